"""A normaliser from a file outside this repo: `normaliser = "my_softmax.py:MySoftmax"` in
[attention].
"""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from infra.cli import suggest
from normalisers import adaptive, family, others  # noqa: F401  (their classes register themselves)
from normalisers.base import NORMALISERS, Normaliser

FILES: dict[Path, str] = {}  # imported so far -> the name of the module


def find_normaliser(name: str) -> type[Normaliser]:
    """The class with a registered name, or a class of a file, which is imported once.

    Raises ValueError: no such name, or the file cannot be imported or has no such normaliser.
    """
    if name in NORMALISERS:
        return NORMALISERS[name]
    file, _, class_name = name.rpartition(":")
    if not file:
        raise ValueError(f"unknown; {suggest(name, list(NORMALISERS))}")
    if not file.endswith(".py"):
        raise ValueError("expected FILE.py:CLASS")
    path = Path(file).resolve()
    module = f"own_{len(FILES)}_{path.stem}"
    try:
        if path not in FILES:
            spec = importlib.util.spec_from_file_location(module, path)
            assert spec is not None and spec.loader is not None
            # where pydantic looks for types
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
            FILES[path] = module
    except Exception as e:
        raise ValueError(f"cannot be imported here: {type(e).__name__}: {e}") from None
    cls = getattr(sys.modules[FILES[path]], class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Normaliser) and "name" in vars(cls)):
        raise ValueError(
            f'expected `class {class_name}(Softmax, name="...")` or the like in {file}'
        )
    return cls


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """The sha256 of each normaliser's code, as a checkpoint keeps it.

    That is the file of one's own, by its path, or the registered class with those that it inherits
    from.
    """
    code = {}
    for name in sorted(names):
        file = name.rpartition(":")[0]
        if file:
            code[file] = Path(file).read_bytes()
            continue
        classes = [cls for cls in NORMALISERS[name].__mro__ if issubclass(cls, Normaliser)]
        with suppress(OSError, TypeError):  # a class without a file, as in a notebook
            # the last one is Normaliser
            code[name] = "".join(map(inspect.getsource, classes[:-1])).encode()
    return {name: hashlib.sha256(text).hexdigest() for name, text in code.items()}
