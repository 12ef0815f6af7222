"""What every command shares: errors a user can mend, the argument parser, and how a command ends."""

import argparse
import io
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn


class UserError(ValueError):
    """A mistake in the user's input. Its message is printed without a traceback, exit status 2."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the script's docstring unwrapped in --help, and bad options raised as
    `UserError`.
    """

    def __init__(self, description: str | None) -> None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
        prog = f"python -m {spec.name}" if spec else None
        unwrapped = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog, description=description, formatter_class=unwrapped, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        typo = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = get_close_matches(typo[1], self._option_string_actions, n=1) if typo else []
        raise UserError(message + "".join(f"; did you mean {option}?" for option in near))

    def parse_known_args(self, words: Any = None, namespace: Any = None) -> Any:
        """With ~ after = as the home folder, which a shell leaves there."""
        for word in sys.argv:
            if any("\ud800" <= letter <= "\udfff" for letter in word):  # bytes that are not UTF-8
                raise UserError(f"{word!r}: expected UTF-8")
        words = [
            re.sub("^(--[^=]+=)(~.*)", lambda found: found[1] + os.path.expanduser(found[2]), word)
            for word in (sys.argv[1:] if words is None else words)
        ]
        known, rest = super().parse_known_args(words, namespace)
        for word in rest:  # a key is never as near to an option
            if word.startswith("--") and get_close_matches(
                word, self._option_string_actions, cutoff=0.85
            ):
                self.error(f"unrecognized arguments: {word}")
        return known, rest


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from low to high."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,30}", text) or not low <= int(text) <= high:
            expected = f"expected an integer, at least {low}, at most {high:,}"
            raise argparse.ArgumentTypeError(f"{text!r}: {expected}")
        return int(text)

    return parse


positive_int = integer(1, 10**12)


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")


def suggest(word: str, names: list[str], prefix: str = "") -> str:
    """What the writer of an unknown word may have meant, for the end of its error."""
    near = get_close_matches(word, names, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"expected one of {', '.join(names)}"


def n_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_streams() -> None:
    """Have what a terminal's encoding lacks escaped, and what is printed to a closed stream go
    nowhere.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # as after >&-
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):  # a notebook's is none
            stream.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Send what is still printed nowhere, for a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def launched(name: str, default: int) -> int:
    """A number that torchrun sets, as WORLD_SIZE; the default where it is not set."""
    return int(os.environ.get(name) or default)


def launcher_problem() -> str:
    """What is wrong with a launcher's variables, as one that is left over; "" if nothing is."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    numbers = {name: int(value) for name, value in given.items() if value.isdecimal()}
    size = numbers.get("WORLD_SIZE", 1)
    fits = numbers.keys() >= given.keys() - {"MASTER_ADDR"}
    fits &= numbers.get("RANK", 0) < size
    fits &= numbers.get("MASTER_PORT", 0) < 2**16
    fits &= numbers.get("LOCAL_RANK", 0) < numbers.get("LOCAL_WORLD_SIZE", size)
    fits &= size == 1 or {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= given.keys()
    if fits:
        return ""
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    return f"{shown}: expected what torchrun sets, or to run alone: unset {' '.join(given)}"


def is_out_of_memory(error: Exception) -> bool:
    """torch raises a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "allocate" in str(error)
    )


def reason_of(error: Exception) -> str:
    """What to print of an error that the user can mend; "" of another one."""
    if is_out_of_memory(error):
        return f"out of memory: {' '.join(str(error).split())}"
    if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(
        error
    ):
        return (
            f"train.deterministic = True: {str(error).partition(',')[0]} in torch: expected false"
        )
    if "BackendCompilerFailed" in [cls.__name__ for cls in type(error).__mro__]:
        problem = f"torch cannot compile here ({str(error).splitlines()[0]})"
        return f"{problem}: expected train.compile = false, or a C++ compiler"
    return str(error) if isinstance(error, UserError | OSError) else ""


def run_main(main: Callable[[], object]) -> None:
    """Run a script's main(). A `UserError` is printed as "error: ..." lines, exit status 2, no
    traceback.

    Under torchrun local rank 0 prints the error. The other ranks wait 3 s, by when torchrun has
    killed them if they failed alike. A failed rank exits at once, since NCCL's destructors would
    wait for the others.
    """

    def leave(status: int) -> NoReturn:
        if alone:
            sys.exit(status)
        sys.stdout.flush()
        os._exit(status)

    open_streams()
    if problem := launcher_problem():
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    alone = launched("WORLD_SIZE", 1) == 1
    try:
        main()
        sys.stdout.flush()  # a closed pipe is an error here, not while Python exits
    except KeyboardInterrupt:
        leave(130)
    except BrokenPipeError:  # stdout was closed early, as by `head`
        drop_output()
        leave(1)
    except Exception as e:
        reason = reason_of(e)
        if not reason:
            if alone:
                raise
            traceback.print_exc()
            leave(1)
        prefix = "error: "
        if launched("LOCAL_RANK", 0) != 0:
            time.sleep(3)
            prefix += f"rank {os.environ.get('RANK')}: "
        print("\n".join(prefix + line for line in reason.splitlines()), file=sys.stderr, flush=True)
        if isinstance(e, OSError):  # perhaps of a full disk under stdout
            drop_output()
        leave(2)
