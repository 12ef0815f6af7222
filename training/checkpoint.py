"""Checkpoints: written atomically in the background, found newest first, loaded safely.

A checkpoint is one file, `runs/<name>/checkpoints/step_000500.pt`, a dict of

    format      2
    step        optimiser steps done
    config      the run's resolved config, as a dict
    model       parameters by their plain names (never torch.compile's or DDP's prefixes)
    optimizers  the optimisers' states
    validation  {"step", "loss", "best", "best_step"}: the newest one and the best so far; -1, None before any
    guard       recent losses and gradient norms (see `train.Guard`)
    rng         torch's random states of each process
    data        {"tokenizer": name, "train": fingerprint, "val": fingerprint} (see `TokenStream`)

It holds tensors and plain values only and is read with `weights_only`: loading one runs no code.
`checkpoints/best.pt` is the one with the best validation loss, under a second name.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import threading
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from config import Config, changed_keys, config_from_dict
from infra.cli import UserError
from infra.files import atomic_file
from model import GPT

FORMAT = 2
UNTOLD = ("name", "init_from", "log.")  # of the changes that a run starts with
KEYS = {"format", "step", "config", "model", "optimizers", "validation", "guard", "rng", "data"}


class CheckpointWriter:
    """Writes a run's checkpoints in a background thread: training waits for the copy of the tensors only.

    Args:
        keep_last: how many of the newest to keep.
        keep_every: those of steps that it divides are kept, too; None: no such.
    """

    def __init__(self, run_dir: Path, keep_last: int, keep_every: int | None) -> None:
        self.run_dir, self.keep_last, self.keep_every = run_dir, keep_last, keep_every
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Any], is_best: bool) -> None:
        """Copy the state and begin to write it, once the one before is written."""
        self.finish()
        copied = in_main_memory(state)

        def write() -> None:
            try:
                save_checkpoint(self.run_dir, copied, self.keep_last, self.keep_every, is_best)
            except BaseException as e:  # for the thread that trains
                self._error = e

        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises UserError if a write has failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Wait until all is written. Raises UserError if that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()


def in_main_memory(value: Any, copies: dict[Any, torch.Tensor] | None = None) -> Any:
    """A copy of nested dicts and lists of tensors that later steps do not change.

    Args:
        copies: made so far, so that tied weights stay one.
    """
    copies = {} if copies is None else copies
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if not value.numel() or key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        return {key: in_main_memory(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_main_memory(item, copies) for item in value)
    return value


def save_checkpoint(
    run_dir: Path, state: dict[str, Any], keep_last: int, keep_every: int | None = None, is_best: bool = False
) -> Path:
    """Write `checkpoints/step_<step>.pt` so that it is either whole or absent; delete old ones.

    Raises:
        UserError: the disk refused; checkpoints already there are untouched.
    """
    path = run_dir / "checkpoints" / f"step_{state['step']:06d}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # no file can take its place
            path.rename(path.with_name(f"{path.name}.folder"))
        with atomic_file(path) as f:
            torch.save({"format": FORMAT, **state}, f)
        if is_best:
            link(path, path.with_name("best.pt"))
        older = [old for old in find_checkpoints(run_dir) if old.name < path.name and old.is_file()]
        for old in older[keep_last - 1 :]:
            if not keep_every or int(old.stem[5:]) % keep_every:
                old.unlink()
    # torch's zip writer answers a full disk with a RuntimeError of its own.
    except (OSError, RuntimeError) as e:
        raise UserError(f"{path}: the checkpoint could not be written: {e}") from None
    return path


def link(path: Path, name: Path) -> None:
    """Give a file a second name, at once: a reader finds the old file or the new one."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)


def clear_unfinished(run_dir: Path) -> None:
    """Remove what a run that was killed in the midst of a write has left."""
    for path in (run_dir / "checkpoints").glob(".*.tmp"):
        path.unlink(missing_ok=True)


def find_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint files, newest first."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("step_*.pt")
        if (match := re.fullmatch(r"step_(\d{6,})\.pt", path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def load_checkpoint(path: Path, lazily: bool = False) -> dict[str, Any]:
    """Read one checkpoint file into main memory.

    Args:
        lazily: leave tensors on the disk until they are used, and their checksums alone.
    Raises:
        UserError: not there, damaged, or not a checkpoint of this format.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if not lazily and archive.testzip() is not None:
                raise ValueError("checksum mismatch")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except FileNotFoundError:
        raise UserError(f"{path}: no such run folder or checkpoint") from None
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: not a checkpoint of this repo (it is not plain tensors and values)"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"{path}: damaged or unreadable checkpoint ({reason})") from None
    if isinstance(state, dict) and state.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path}: checkpoint format {state['format']!r}, expected {FORMAT}")
    if not isinstance(state, dict) or KEYS - state.keys():
        raise UserError(
            f"{path}: not a checkpoint of this repo (expected the keys {', '.join(sorted(KEYS))})"
        )
    return state


def load_newest(run_dir: Path, lazily: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that loads, or None where there is none at all.

    A damaged one is named on stderr and the one before it is used.

    Args:
        lazily: see `load_checkpoint`.
    Raises:
        UserError: there are checkpoints, but none loads.
    """
    paths = find_checkpoints(run_dir)
    for path in paths:
        try:
            return path, load_checkpoint(path, lazily)
        except UserError as e:
            if os.environ.get("RANK", "0") == "0":
                print(f"warning: {e}; skipped", file=sys.stderr, flush=True)
    if paths:
        raise UserError(f"{run_dir / 'checkpoints'}: none of the {len(paths)} checkpoints loads")
    return None


class Trained(NamedTuple):
    """A model as a checkpoint holds it, in eval mode."""

    model: GPT
    config: Config
    step: int
    tokenizer: str


def load_source(source: str | Path, lazily: bool = False) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that a run folder (its newest) or one checkpoint file names.

    Raises:
        UserError: nothing there, or nothing that loads.
    """
    path = Path(source)
    if not path.is_dir():
        return path, load_checkpoint(path, lazily)
    found = load_newest(path, lazily)
    if found is None:
        raise UserError(f"{path}: no checkpoint in {path / 'checkpoints'}; train.py writes them there")
    return found


def read_config(source: str | Path) -> Config:
    """The config of a run folder's newest checkpoint or of one checkpoint file, without its tensors."""
    path, state = load_source(source, lazily=True)
    return config_from_dict(state["config"], str(path))


def load_model(source: str | Path, device: torch.device | str = "cpu") -> Trained:
    """A trained model for evaluation, from a run folder (its newest checkpoint) or one checkpoint file.

    Raises:
        UserError: nothing there, or nothing that loads.
    """
    path, state = load_source(source)
    config = config_from_dict(state["config"], str(path))
    model = GPT(config)
    load_parameters(model, state["model"], path)
    return Trained(model.to(device).eval(), config, state["step"], state["data"]["tokenizer"])


def take_over(model: GPT, source: str | Path, tokenizer: str) -> list[str]:
    """Start from another run's weights: copy each parameter that both have, bit for bit; leave the others.

    By section of the config: [model] must fit, [attention] may add and drop parameters, [data] must have the
    same tokeniser; [train], [optimizer] and the count of steps begin anew.

    Args:
        model: freshly initialised.
        source: run folder (its newest checkpoint) or checkpoint file.
        tokenizer: of the data to train on.
    Returns:
        The account for the console: what is taken over, new, dropped and changed.
    Raises:
        UserError: nothing there, another tokeniser, or a parameter of another shape, by its name.
    """
    old = load_model(source)
    if old.tokenizer != tokenizer:
        raise UserError(
            f"init_from = {str(source)!r}: trained on tokens of {old.tokenizer}, the data has {tokenizer}"
        )
    theirs, mine = old.model.state_dict(), model.state_dict()
    changed = changed_keys(old.config, model.config)
    changes = [
        f"{key} {was!r} -> {now!r}" for key, (was, now) in changed.items() if not key.startswith(UNTOLD)
    ]
    if problems := misfits(mine, theirs, model.config.model.tie_embeddings):
        shapes = [text for text in changes if text.startswith(("model.", "train.seq_len"))]
        raise UserError(
            f"init_from = {str(source)!r}: does not fit: {'; '.join(problems)} ({', '.join(shapes)})"
        )
    taken = {name: theirs[name] for name in mine if name in theirs}
    model.load_state_dict(taken, strict=False)
    n_values = sum({mine[name].data_ptr(): mine[name].numel() for name in taken}.values())  # tied ones once
    return [
        f"init_from {source}, step {old.step}",
        f"  taken over  {len(taken)} tensors, {n_values:,} values",
        f"  new         {listed(mine, theirs)}; the optimiser's state",
        f"  dropped     {listed(theirs, mine)}",
        f"  changed     {', '.join(changes) or 'nothing'}",
    ]


def misfits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tied: bool) -> list[str]:
    """Why the parameters in `theirs` cannot become those of the same name in `mine`; tied: embeddings."""
    problems = [
        f"{any_layer(name)} is {tuple(mine[name].shape)} here, {tuple(theirs[name].shape)} there"
        for name in mine
        if name in theirs and mine[name].shape != theirs[name].shape
    ]
    if tied and not torch.equal(theirs["lm_head.weight"], theirs["embedding.weight"]):
        problems.append("lm_head.weight is tied to the embedding here, not there")
    return list(dict.fromkeys(problems))


def listed(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> str:
    """The names that only `some` has, those that differ in the layer's number as one."""
    counts = Counter(any_layer(name) for name in some if name not in others)
    return ", ".join(f"{name} ({n} tensors)" if n > 1 else name for name, n in counts.items()) or "nothing"


def any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def load_parameters(model: nn.Module, parameters: dict[str, Any], path: Path) -> None:
    """Copy a checkpoint's parameters into the model.

    Raises:
        UserError: a parameter is missing, unknown, or of another shape.
    """
    try:
        model.load_state_dict(parameters)
    except RuntimeError as e:
        lines = [line.strip() for line in str(e).splitlines()[1:]]
        raise UserError(f"{path}: does not fit its config: {' '.join(lines)}") from None
