"""Checkpoint files: written atomically, found newest first, loaded safely.

A checkpoint is one file, `runs/<name>/checkpoints/step_000500.pt`, a dict of its format and what
`TrainState.to_checkpoint` returns. It holds tensors and plain values only and is read with
`weights_only`, so loading one runs no code, except that of a file that its normaliser names
(normalisers/own.py).
"""

import errno
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import config_from_dict
from data.tokenizer import Tokenizer, get_tokenizer
from infra.cli import UserError, is_out_of_memory
from infra.files import atomic_file
from model import GPT
from schema import Config
from training.optim import power_at

FORMAT = 4
CONTENT = {"step", "config", "model", "optimizers", "rng", "data"}


def save_checkpoint(
    run_dir: Path, state: dict[str, Any], keep_last: int, keep_every: int = 0
) -> None:
    """Write `checkpoints/step_<step>.pt`, whole or not at all, and delete old ones.

    Raises UserError: it cannot be written. Existing checkpoints are unchanged then. Old ones that
    cannot be deleted are reported on stderr.
    """
    path = run_dir / "checkpoints" / f"step_{state['step']:06d}.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for partial in path.parent.glob(".*.tmp"):  # half a checkpoint, which a kill has left
            partial.unlink(missing_ok=True)
        with atomic_file(path) as f:
            torch.save({"format": FORMAT, **state}, f)
    except (OSError, RuntimeError) as e:  # RuntimeError: a full disk, in torch's zip writer
        free = (
            f" ({shutil.disk_usage(run_dir).free:,} bytes are free)"
            if isinstance(e, RuntimeError)
            else ""
        )
        raise UserError(f"{path}: the checkpoint could not be written: {e}{free}") from None
    older = [old for old in find_checkpoints(run_dir) if step_of(old) < state["step"]]
    try:
        for old in older[keep_last - 1 :]:
            if not keep_every or step_of(old) % keep_every:
                old.unlink(missing_ok=True)
    except OSError as e:
        print(f"warning: {e}: an old checkpoint stays", file=sys.stderr, flush=True)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def find_checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint files, newest first."""
    paths = (run_dir / "checkpoints").glob("step_*.pt")
    return sorted((path for path in paths if path.stem[5:].isdecimal()), key=step_of, reverse=True)


class DamagedCheckpoint(UserError):
    """A file that a kill or a disk has spoilt: the one before it may be whole."""


def load_checkpoint(path: Path, lazily: bool = False) -> dict[str, Any]:
    """Read one checkpoint file into host memory; lazily: map it, without a look at its checksums.

    Raises UserError: absent, damaged (`DamagedCheckpoint`), or not a checkpoint of this format.
    OSError, or what a lack of memory raises: it cannot be read, but may be whole.
    """
    if path.exists() and (not path.is_file() or path.suffix == ".toml"):
        raise UserError(f"{path}: expected a run folder or a checkpoint file")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not check the checksums
            if not lazily and archive.testzip() is not None:
                raise ValueError("checksum mismatch")
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=lazily
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such run folder or checkpoint") from None
    except Exception as e:  # which one depends on the damage
        if is_out_of_memory(e):
            raise
        # these are a damaged file's
        if isinstance(e, OSError) and e.errno not in (None, errno.EINVAL):
            raise OSError(e.errno, e.strerror, str(path)) from None
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise DamagedCheckpoint(f"{path}: damaged or unreadable checkpoint ({reason})") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this version")
    if lost := CONTENT - checkpoint.keys():
        raise UserError(f"{path}: a checkpoint without {', '.join(sorted(lost))}")
    return checkpoint


def load_newest(run_dir: Path, lazily: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is not damaged, or None without any. Damaged ones are reported on
    stderr.

    Raises UserError: there are checkpoints, but none loads; the newest is of another version.
    OSError, or what a lack of memory raises: one cannot be read, but may be whole. An older one
    would lose steps.
    """
    paths = find_checkpoints(run_dir)
    for path in paths:
        try:
            return path, load_checkpoint(path, lazily)
        except DamagedCheckpoint as e:
            if os.environ.get("RANK", "0") == "0":
                print(f"warning: {e}; skipped", file=sys.stderr, flush=True)
    if paths:
        raise UserError(f"{run_dir / 'checkpoints'}: none of the {len(paths)} checkpoints loads")
    return None


def load_source(source: str | Path, lazily: bool = False) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of a run folder, or one checkpoint file.

    Raises UserError: nothing there, or nothing that loads.
    """
    path = Path(source)
    if not path.is_dir():
        return path, load_checkpoint(path, lazily)
    newest = load_newest(path, lazily)
    if newest is None:
        raise UserError(
            f"{path}: no checkpoint in {path / 'checkpoints'}; train.py writes them there"
        )
    return newest


def read_config(source: str | Path) -> tuple[Config, str]:
    """The config of a run or checkpoint (see `load_source`) and its tokenizer's name, without the
    tensors.
    """
    path, content = load_source(source, lazily=True)
    return stored_config(content, path), content["data"]["tokenizer"]


def stored_config(content: dict[str, Any], path: Path) -> Config:
    """The config in a checkpoint of a run folder, which has the files that it names."""
    return config_from_dict(content["config"], str(path), path.absolute().parents[1])


class Trained(NamedTuple):
    """A model from a checkpoint, in eval mode."""

    model: GPT
    config: Config
    step: int
    tokenizer_name: str
    tokenizer_file: str  # its content, if it has one

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises UserError: see `get_tokenizer`."""
        return get_tokenizer(self.tokenizer_name, self.tokenizer_file)


def load_model(source: str | Path, device: torch.device | str = "cpu") -> Trained:
    """The trained model of a run or checkpoint (see `load_source`), for evaluation."""
    path, content = load_source(source)
    config = stored_config(content, path)
    p = power_at(config.attention, max(0, content["step"] - 1))
    if p is not None and os.environ.get("RANK", "0") == "0":
        final = f"evaluated at p = {config.attention.reweight_p}"
        print(f"warning: {path} was trained up to p = {p}, {final}", file=sys.stderr, flush=True)
    model = GPT(config, device)
    load_parameters(model, content["model"], path)
    tokenizer = (content["data"]["tokenizer"], content.get("tokenizer", ""))
    return Trained(model.eval(), config, content["step"], *tokenizer)


def load_parameters(model: GPT, parameters: dict[str, Any], path: Path) -> None:
    """Raises UserError: a parameter of the checkpoint is missing, unknown, or of another shape."""
    try:
        model.load_state_dict(parameters)
    except RuntimeError as e:
        raise UserError(f"{path}: does not fit its config: {' '.join(str(e).split())}") from None
