"""Checkpoint files: written atomically, found newest first, loaded safely.

A checkpoint is one file, `runs/<name>/checkpoints/step_000500.pt`, a dict of its format and what
`TrainState.to_checkpoint` returns. It holds tensors and plain values only and is read with
`weights_only`, so loading one runs no code, except that of a file that its normaliser names
(normalisers/own.py).
"""

import errno
import os
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, Field

from config import config_from_dict
from data.tokenizer import Tokenizer, get_tokenizer
from infra.cli import UserError, is_out_of_memory
from infra.files import atomic_file, check_shape, why_not_written
from model import GPT
from schema import Config
from training.optim import power_at

FORMAT = 4


class DataInfo(BaseModel, strict=True, extra="allow"):
    tokenizer: str


class Content(BaseModel, strict=True):
    """What every checkpoint has."""

    step: int = Field(ge=0)
    config: dict[str, Any]
    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    rng: list[dict[str, Any]]
    data: DataInfo


def save_checkpoint(
    run_dir: Path, state: dict[str, Any], keep_last: int, keep_every: int = 0
) -> None:
    """Write `checkpoints/step_<step>.pt`, whole or not at all, and delete old ones.

    Raises UserError: it cannot be written. Existing checkpoints are unchanged then. OSError: an old
    one cannot be deleted.
    """
    path = run_dir / "checkpoints" / f"step_{state['step']:06d}.pt"
    n_bytes = size_of(state)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for partial in path.parent.glob(".*.tmp"):  # half a checkpoint, which a kill has left
            partial.unlink(missing_ok=True)
        with atomic_file(path, n_bytes=n_bytes) as f:
            torch.save({"format": FORMAT, **state}, f)
    except (OSError, RuntimeError) as e:  # RuntimeError: a full disk, in torch's zip writer
        raise UserError(why_not_written(path, e, n_bytes)) from None
    older = [old for old in find_checkpoints(run_dir) if step_of(old) < state["step"]]
    for old in older[keep_last - 1 :]:
        if not keep_every or step_of(old) % keep_every:
            old.unlink(missing_ok=True)


def size_of(content: Any) -> int:
    """Bytes of all tensors in nested dicts and lists."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, dict) else content
    return sum(map(size_of, parts)) if isinstance(content, dict | list | tuple) else 0


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

    Raises UserError: absent, not a checkpoint of this version, or unreadable for now, as for a lack
    of memory, but perhaps whole. DamagedCheckpoint: a kill or a disk has spoilt it.
    """
    if path.exists() and (not path.is_file() or path.suffix == ".toml"):
        raise UserError(f"{path}: expected a run folder or a checkpoint file")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not check the checksums
            if not lazily and archive.testzip() is not None:
                raise ValueError("checksum mismatch")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as e:  # which one depends on the damage
        # an OSError without a number, or with this one, is of a damaged file
        is_system = isinstance(e, OSError) and e.errno not in (None, errno.EINVAL)
        kind = UserError if is_system or is_out_of_memory(e) else DamagedCheckpoint
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise kind(f"{path}: no readable checkpoint: {reason}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this version")
    checked: dict[str, Any] = check_shape(content, Content, path)
    return checked


def load_newest(run_dir: Path, lazily: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is not damaged, or None without any. Damaged ones are reported on
    stderr.

    Raises UserError: there are checkpoints, but none loads; or see `load_checkpoint`: in the place
    of one that may be whole an older one would lose steps.
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
