"""Checkpoints: written atomically, found newest first, loaded safely.

A checkpoint is one file, `runs/<name>/checkpoints/step_000500.pt`, a dict of

    format      1
    step        optimiser steps done
    config      the run's resolved config, as a dict
    model       parameters by their plain names (never torch.compile's or DDP's prefixes)
    optimizers  the optimisers' states
    val_loss    the newest validation loss, or None
    data        {"tokenizer": name, "train": fingerprint, "val": fingerprint} (see `TokenStream`)

It holds tensors and plain values only and is read with `weights_only`: loading one runs no code.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from config import Config, UserError, atomic_file, config_from_dict
from model import GPT

FORMAT = 1
KEYS = {"format", "step", "config", "model", "optimizers", "val_loss", "data"}


def save_checkpoint(run_dir: Path, state: dict[str, Any], keep_last: int) -> Path:
    """Write `checkpoints/step_<step>.pt` so that it is either whole or absent; delete old ones.

    Raises:
        UserError: the disk refused; checkpoints already there are untouched.
    """
    path = run_dir / "checkpoints" / f"step_{state['step']:06d}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as f:
            torch.save({"format": FORMAT, **state}, f)
        older = [old for old in find_checkpoints(run_dir) if old.name < path.name]
        for old in older[keep_last - 1 :]:
            old.unlink()
    # torch's zip writer answers a full disk with a RuntimeError of its own.
    except (OSError, RuntimeError) as e:
        raise UserError(f"{path}: the checkpoint could not be written: {e}") from None
    return path


def find_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint files, newest first."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("step_*.pt")
        if (match := re.fullmatch(r"step_(\d{6,})\.pt", path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read one checkpoint file into main memory.

    Raises:
        UserError: not there, damaged, or not a checkpoint of this format.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if archive.testzip() is not None:
                raise ValueError("checksum mismatch")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such run folder or checkpoint") from None
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: not a checkpoint of this repo (it is not plain tensors and values)"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"{path}: damaged or unreadable checkpoint ({reason})") from None
    if not isinstance(state, dict) or KEYS - state.keys():
        raise UserError(
            f"{path}: not a checkpoint of this repo (expected the keys {', '.join(sorted(KEYS))})"
        )
    if state["format"] != FORMAT:
        raise UserError(f"{path}: checkpoint format {state['format']!r}, expected {FORMAT}")
    return state


def load_newest(run_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that loads, or None where there is none at all.

    A damaged one is named on stderr and the one before it is used.

    Raises:
        UserError: there are checkpoints, but none loads.
    """
    paths = find_checkpoints(run_dir)
    for path in paths:
        try:
            return path, load_checkpoint(path)
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


def load_model(source: str | Path, device: torch.device | str = "cpu") -> Trained:
    """A trained model for evaluation, from a run folder (its newest checkpoint) or one checkpoint file.

    Raises:
        UserError: nothing there, or nothing that loads.
    """
    path = Path(source)
    if path.is_dir():
        found = load_newest(path)
        if found is None:
            raise UserError(f"{path}: no checkpoint in {path / 'checkpoints'}; train.py writes them there")
        path, state = found
    else:
        state = load_checkpoint(path)
    config = config_from_dict(state["config"], str(path))
    model = GPT(config)
    load_parameters(model, state["model"], path)
    return Trained(model.to(device).eval(), config, state["step"], state["data"]["tokenizer"])


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
