"""Shared parts of the evaluations: runs, validation text, options, tables and figures.

Each evaluation is a pipeline, score -> summary -> table, plot, that its own main() drives: every source is
checked before the first is evaluated; each run's <script>.json and <script>.png (<script>_<checkpoint> for a
checkpoint file) are written as soon as it is finished; several runs get one more figure. The functions here
are leaves: they never call back into a script.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from attention import describe_attention
from config import Config
from data.batches import val_windows
from data.dataset import TokenStream
from infra.cli import ArgumentParser, UserError, positive_int
from infra.distributed import World
from model import GPT
from positions import RopeKind, RopeScaling
from training.checkpoint import load_model, read_config

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


# ---------------------------------------------------------------- runs
@dataclass(frozen=True)
class EvaluatedRun:
    """A model to evaluate and where its results go."""

    source: Path  # as given: run folder or checkpoint file
    label: str
    config: Config
    output: Path  # without suffix

    def file(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)

    def load(self, world: World) -> tuple[GPT, int]:
        """The model on this rank's device, and its step. Never the dense engine: (T, T) for each head.

        Raises:
            UserError: the model does not load, or the ranks got different checkpoints.
        """
        model, _, step, _ = load_model(self.source, world.device)
        if not world.agree(step):
            raise UserError(f"{self.source}: got a new checkpoint while it was read; try again")
        for block in model.blocks:
            if block.attention.engine == "dense":  # type: ignore[union-attr]
                block.attention.engine = "rows"  # type: ignore[union-attr]
        return model, step

    def describe(self, step: int, args: argparse.Namespace) -> dict[str, Any]:
        """The first keys of every result's JSON."""
        return {
            "run": self.label,
            "source": str(self.source),
            "step": step,
            "normaliser": describe_attention(self.config.attention),
            "train_len": self.config.train.seq_len,
            "dtype": self.config.train.dtype,
            "rope": {"kind": args.rope, "theta": args.rope_theta},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
        }


def open_runs(args: argparse.Namespace) -> tuple[list[EvaluatedRun], Path | None]:
    """Check every source, without its tensors: ten models may not fit in memory.

    Returns:
        The runs, and the path of the figure with all of them; None: a single run already has its own.
    Raises:
        UserError: a source does not load or is given twice, or its folder cannot be written.
    """
    paths = [Path(source) for source in args.runs]
    named = [name_results(path, args.name) for path in paths]
    labels, outputs = [label for label, _ in named], [output for _, output in named]
    runs = []
    for path, (label, output) in zip(paths, named, strict=True):
        if outputs.count(output) > 1:
            raise UserError(f"{path}: given twice")
        config = read_config(path)
        if not os.access(output.parent, os.W_OK):
            raise UserError(f"{output.parent}: cannot be written; the results go there")
        runs.append(EvaluatedRun(path, label if labels.count(label) == 1 else str(path), config, output))
    if args.out is None and len(runs) > 1:
        folders = [output.parent for output in outputs]
        common = Path(os.path.commonpath(folders))
        # Two checkpoints of one run: <name>.png there is the figure of the run itself.
        return runs, common / f"{args.name}{'_all' if common in folders else ''}.png"
    return runs, Path(args.out) if args.out else None


def name_results(source: Path, name: str) -> tuple[str, Path]:
    """A source's label, and the path of its results without suffix.

    Results go into the run's folder; beside a checkpoint file that belongs to no run.
    """
    source = source.resolve()
    if source.is_dir():
        return source.name, source / name
    if source.parent.name != "checkpoints":
        return source.stem, source.with_name(f"{name}_{source.stem}")
    folder = source.parent.parent
    return f"{folder.name}/{source.stem}", folder / f"{name}_{source.stem}"


def open_validation(config: Config, data_dir: str | None) -> TokenStream:
    """The validation tokens, checked against the model's vocabulary.

    Raises:
        UserError: missing, damaged, masked for fine-tuning, or tokens outside the model's vocabulary.
    """
    stream = TokenStream(data_dir or config.data.dir, "val")
    stream.check_model(config.model.vocab_size)
    if stream.mask is not None:
        raise UserError(f"{stream.folder}: made for fine-tuning, no running text; expected other --data")
    known, found = config.model.vocab_size, stream.vocab_size
    # A model may have a few rows more than its tokeniser has tokens. Numbers that are far apart belong to
    # another tokeniser, whose ids mean something else to this model.
    if data_dir is not None and math.ceil(known / 128) != math.ceil(found / 128):
        raise UserError(
            f"{stream.folder}: tokenised with {found} tokens, but {config.name} has "
            f"model.vocab_size = {known}; expected the same tokeniser"
        )
    return stream


@dataclass(frozen=True)
class Blocks:
    """The first validation tokens as consecutive blocks of the longest length."""

    stream: TokenStream
    lengths: list[int]  # of the windows in a block, ascending
    n_blocks: int

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def share(self, world: World) -> range:
        """This rank's blocks."""
        return range(world.rank, self.n_blocks, world.size)

    def describe(self) -> dict[str, Any]:
        """The key "data" of a result."""
        return {
            "dir": str(self.stream.folder),
            "split": self.stream.split,
            "fingerprint": self.stream.fingerprint,
            "tokenizer": self.stream.info["tokenizer"],
            "tokens": self.n_blocks * self.longest,
            "blocks": self.n_blocks,
            "block_length": self.longest,
        }


def open_blocks(args: argparse.Namespace, runs: list[EvaluatedRun]) -> list[Blocks]:
    """Each run's blocks, in windows of 1 to 16 training lengths unless --lengths says otherwise.

    Raises:
        UserError: bad data, or a stream or --tokens shorter than one block.
    """
    streams = [open_validation(run.config, args.data) for run in runs]
    lengths = choose_lengths(args.lengths, runs, (1, 2, 4, 8, 16))
    return [Blocks(stream, lengths, val_windows(stream, args.tokens, lengths[-1])) for stream in streams]


# ---------------------------------------------------------------- command line
def add_arguments(parser: ArgumentParser, lengths_help: str) -> None:
    """The options of every evaluation."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders or checkpoint files, first")
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    add("--rope", choices=get_args(RopeKind), default="ntk", help="RoPE scaling (default: ntk)")
    add("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    add("--data", metavar="DIR", help="dataset folder (default: that of each run's config)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--out", metavar="FILE", help="figure of all runs (default: <script>.png in the folder above them)")
    add("--tag", metavar="WORD", help="part of the results' names: <script>_WORD.json")


def parse_arguments(parser: ArgumentParser, script: str) -> argparse.Namespace:
    """The command line. Adds `name`, of the results, and `rope_scaling`.

    Raises:
        UserError: a bad option, --rope and --rope-theta that do not fit together.
    """
    args = parser.parse_args()
    if args.tag and not re.fullmatch(r"[\w.+-]+", args.tag):
        raise UserError(f"--tag {args.tag}: expected only letters, digits and . _ + -")
    args.name = f"{script}_{args.tag}" if args.tag else script
    if args.rope == "theta" and args.rope_theta is None:
        raise UserError("--rope theta needs --rope-theta, the new base (500000 in the SSMax paper)")
    args.rope_scaling = RopeScaling(args.rope, args.rope_theta)
    if args.out is not None and Path(args.out).suffix not in FIGURE_SUFFIXES:
        raise UserError(f"--out {args.out}: expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    if args.out is not None and not Path(args.out).parent.is_dir():
        raise UserError(f"--out {args.out}: no folder {Path(args.out).parent}")
    return args


def choose_lengths(given: list[int] | None, runs: list[EvaluatedRun], factors: Sequence[int]) -> list[int]:
    """The given lengths, else `factors` times each run's training length, ascending."""
    train_lens = {run.config.train.seq_len for run in runs}
    return sorted(set(given or [factor * train_len for train_len in train_lens for factor in factors]))


# ---------------------------------------------------------------- scores
class Rejection:
    """Context manager: records a UserError as `reason`, for a length that the model cannot compute.

    Example: ssmax_pn, whose p_n ends at the training length. All ranks then still join the next all-reduce;
    on a rank without items nothing was raised.
    """

    reason: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, UserError):
            self.reason = str(error)
        return isinstance(error, UserError)


def token_bar(label: str, total: int, world: World) -> tqdm:
    """Progress bar in tokens, on rank 0 if stderr is a TTY."""
    shown = world.is_main and sys.stderr.isatty()
    return tqdm(total=total, desc=label, unit="tok", unit_scale=True, disable=not shown)


def mean_and_stderr(values: Tensor) -> tuple[float, float | None]:
    """Mean of (n,) and its standard error, None for a single value."""
    n = len(values)
    return values.mean().item(), values.std().item() / math.sqrt(n) if n > 1 else None
