"""Shared parts of the evaluations: options, runs, validation text and scores.

Each evaluation is a pipeline, score -> summary -> rows, table, plot, which `evaluate` drives for
all runs.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from data.batches import val_windows
from data.dataset import TokenStream
from evals.output import Result, check_figure, format_rope
from evals.rows import FACTORS, FILE, Cell, Row, read_table, write_rows
from infra.cli import ArgumentParser, UserError, positive_int
from infra.distributed import World
from infra.files import read_json, write_json
from model import GPT
from positions import RopeKind, RopeScaling
from schema import Config, describe_layers
from training.checkpoint import find_checkpoints, load_model, read_config

# not in "options"
PLACES = {"runs", "device", "out", "tag", "name", "replace", "also", "rope_scaling"}


# ---------------------------------------------------------------- options
def add_arguments(parser: ArgumentParser, lengths_help: str, tokens: int | None = None) -> None:
    """The options of every evaluation, and --tokens where it has a default."""
    parser.usage = "%(prog)s RUN [RUN ...] [options]"
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders or checkpoint files, first")
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    add("--rope", choices=get_args(RopeKind), default="ntk", help="RoPE scaling (default: ntk)")
    add("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    add("--data", metavar="DIR", help="dataset folder (default: that of each run's config)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    out_help = "figure of all runs (default: <script>.png in the folder above them)"
    add("--out", type=Path, metavar="FILE", help=out_help)
    add("--tag", metavar="WORD", help="part of the results' names: <script>_WORD.json")
    add("--replace", action="store_true", help="overwrite the results of other options")
    if tokens is not None:
        tokens_help = "at most N validation tokens, in whole blocks (default: %(default)s)"
        add("--tokens", type=positive_int, default=tokens, metavar="N", help=tokens_help)
        skip_help = "leave out the first N validation tokens, in whole blocks; needs a --tag"
        add("--skip", type=positive_int, default=0, metavar="N", help=skip_help)


def parse_arguments(parser: ArgumentParser, script: str) -> argparse.Namespace:
    """The command line. Adds `name`, of the results, and `rope_scaling`.

    Raises UserError: a bad option, --rope and --rope-theta that do not fit together.
    """
    args = parser.parse_args()
    if args.tag and not re.fullmatch(r"[\w.+-]+", args.tag):
        raise UserError(f"--tag {args.tag}: expected only letters, digits and . _ + -")
    if getattr(args, "skip", 0) and not args.tag:
        raise UserError(f"--skip {args.skip}: expected a --tag, for results beside the usual ones")
    args.name = f"{script}_{args.tag}" if args.tag else script
    args.rope_scaling = RopeScaling(args.rope, args.rope_theta)
    check_figure(args.out)
    return args


# ---------------------------------------------------------------- runs
@dataclass(frozen=True)
class EvaluatedRun:
    """A model to evaluate and where its results go."""

    source: Path  # as given: run folder or checkpoint file
    label: str
    config: Config
    tokenizer: str  # its name
    output: Path  # without suffix

    def file(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)

    def load(self, world: World) -> tuple[GPT, int]:
        """The model on this rank's device, and its step.

        Raises UserError: the model does not load, or the ranks got different checkpoints.
        """
        trained = load_model(self.source, world.device)
        if not world.agree(trained.step):
            raise UserError(f"{self.source}: got a new checkpoint while it was read; try again")
        return trained.model, trained.step

    def options(self, args: argparse.Namespace) -> dict[str, Any]:
        """What a result was asked for beside the model: its key "options"."""
        chosen = {key: value for key, value in vars(args).items() if key not in PLACES}
        return chosen | {"data": str(Path(args.data or self.config.data.dir))}

    def check_options(self, args: argparse.Namespace) -> None:
        """Raises UserError: the run has a result of other options, and no --replace."""
        path = self.file(".json")
        old = read_json(path).get("options", {}) if path.exists() and not args.replace else {}
        now = self.options(args)
        others = ", ".join(
            f"{key} = {value}" for key, value in old.items() if now.get(key) != value
        )
        if others:
            raise UserError(
                f"{path}: has {others}: expected a --tag, for results beside these, or --replace"
            )

    def write(self, step: int, summary: Result, args: argparse.Namespace) -> Result:
        """Write and return the result: the keys that every evaluation has, and its summary."""
        config = self.config
        scales = bool(config.rope_bases)
        result = {
            "run": self.label,
            "source": str(self.source),
            "step": step,
            "normaliser": describe_layers(config),
            "train_len": config.train.seq_len,
            "dtype": config.train.dtype,
            "rope": {
                "kind": args.rope if scales else "none",
                "theta": args.rope_theta if scales else None,
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "options": self.options(args),
            **summary,
        }
        write_json(result, self.file(".json"), shared=True)
        print(f"wrote {self.file('.json')}")
        return result


def open_runs(
    args: argparse.Namespace, world: World, factors: Sequence[int] = FACTORS
) -> tuple[list[EvaluatedRun], Path | None]:
    """Check every source without its tensors, since ten models may not fit in memory.

    Folders without a checkpoint are skipped with a line, unless all are.
    `args.lengths` become those given, else `factors` times each run's training length, ascending.
    Returns: The runs, and the path of the figure with all of them. None: a single run already has
    its own.
    Raises UserError: a source does not load or is given twice, its folder cannot be written, or has
    a result of other options or a damaged rows.csv.
    """
    runs: list[EvaluatedRun] = []
    sources = [Path(source) for source in args.runs]
    trained = [source for source in sources if not source.is_dir() or find_checkpoints(source)]
    for source in sources if trained and world.is_main else ():
        if source not in trained:
            print(f"skipped: {source} has no checkpoint")
    for source in trained or sources:
        # not resolved: the results of a link stay where it is
        absolute = Path(os.path.abspath(source))
        label, output = name_results(absolute, args.name)
        if any(output.resolve() == run.output.resolve() for run in runs):
            raise UserError(f"{source}: given twice")
        if any(label == run.label for run in runs):
            label = str(source)
        config, tokenizer = read_config(source)
        rows = output.parent / FILE
        if rows.exists():
            read_table(rows)  # before the work: the new rows are added to it
        if not os.access(output.parent, os.W_OK):
            raise UserError(f"{output.parent}: cannot be written; the results go there")
        runs.append(EvaluatedRun(source, label, config, tokenizer, output))
    own_lengths = (factor * run.config.train.seq_len for run in runs for factor in factors)
    args.lengths = sorted({*(args.lengths or own_lengths)})
    for run in runs:
        run.check_options(args)
    if args.out is not None or len(runs) == 1:
        return runs, args.out
    folders = [run.output.parent for run in runs]
    common = common_folder(folders)
    # Two checkpoints of one run: <name>.png there is the figure of the run itself.
    return runs, common / f"{args.name}{'_all' if common in folders else ''}.png"


def common_folder(folders: list[Path]) -> Path:
    """The deepest one that has all of these absolute folders; the first of them if that is the
    root.
    """
    common = Path(os.path.commonpath(folders))
    return common if common.name else folders[0]


def evaluate(
    script: str,
    args: argparse.Namespace,
    world: World,
    runs: list[EvaluatedRun],
    picture: Path | None,
    measure: Callable[[int, GPT, int], tuple[Result, str, Iterable[Cell]]],
    tables: Callable[[list[Result]], str],
    plot: Callable[[list[Result], Path], None],
) -> None:
    """Measure each run and write its results, then print the table and draw the figure of all.

    Args:
        measure: of a run's number, its model and its step: the summary, what text was read, the
        rows' cells.
    """
    results = []
    for i, run in enumerate(runs):
        model, step = run.load(world)
        summary, text, cells = measure(i, model, step)
        if world.is_main:  # at once: a later run may fail
            result = run.write(step, summary, args)
            config = run.config
            key = (
                config.name,
                config.seed,
                config.optimizer.lr,
                step,
                script,
                format_rope(result),
                text,
            )
            write_rows(run.output.parent, (Row(*key, *cell) for cell in cells))
            plot([result], run.file(".png"))
            results.append(result)
    if world.is_main:
        print(tables(results))
        if picture:
            plot(results, picture)


def name_results(source: Path, name: str) -> tuple[str, Path]:
    """A source's label, and the path of its results without suffix, in the run's folder or beside a
    file.
    """
    if source.is_dir():
        return source.name, source / name
    folder = source.parent.parent if source.parent.name == "checkpoints" else source.parent
    return f"{folder.name}/{source.stem}", folder / f"{name}_{source.stem}"


# ---------------------------------------------------------------- validation text
def open_validation(
    config: Config, data_dir: str | None, tokenizer: str | None = None
) -> TokenStream:
    """The validation tokens, checked against the model's vocabulary and the tokenizer that it was
    trained on.

    Raises UserError: missing, damaged, masked for fine-tuning, or tokens of another tokenizer.
    """
    if not data_dir and not Path(config.data.dir).is_dir():
        raise UserError(
            f"{config.data.dir}: no such data folder; expected the run's data, or --data DIR"
        )
    stream = TokenStream(data_dir or config.data.dir, "val")
    stream.check_model(config.model.vocab_size)
    theirs = stream.info["tokenizer"]
    if theirs != (tokenizer or theirs):
        raise UserError(
            f"{stream.folder}: tokens of {theirs}: expected {tokenizer}, the model's tokenizer"
        )
    if stream.mask is not None:
        raise UserError(
            f"{stream.folder}: made for fine-tuning, no running text; expected other --data"
        )
    return stream


@dataclass(frozen=True)
class Blocks:
    """Validation tokens as consecutive blocks of the longest length."""

    stream: TokenStream
    lengths: list[int]  # of the windows in a block, ascending
    n_blocks: int
    n_skipped: int = 0  # blocks of the stream before the first one

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def count_documents(self) -> list[int]:
        """How many documents have begun by each block's end: blocks within one document share the
        number.
        """
        tokens = self.stream.read(self.n_skipped * self.longest, self.n_blocks * self.longest)
        is_begin = tokens.reshape(self.n_blocks, self.longest) == self.stream.eot
        return is_begin.sum(1).cumsum().tolist()

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
            "skipped_tokens": self.n_skipped * self.longest,
        }


def open_blocks(args: argparse.Namespace, runs: list[EvaluatedRun]) -> list[Blocks]:
    """Each run's blocks, in windows of the lengths.

    Raises UserError: bad data, runs of several tokenisers, a stream or --tokens shorter than one
    block, or all of it skipped.
    """
    longest = args.lengths[-1]
    if args.tokens < longest:
        raise UserError(f"--tokens {args.tokens}: expected at least {longest}, the longest length")
    n_skipped = math.ceil(args.skip / longest)
    all_blocks = []
    for run in runs:
        stream = open_validation(run.config, args.data, run.tokenizer)
        end = val_windows(stream, n_skipped * longest + args.tokens, longest)
        if end <= n_skipped:
            expected = f"expected a block of {longest} after it"
            raise UserError(f"--skip {args.skip}: {expected}; the data has {end} of them")
        all_blocks.append(Blocks(stream, args.lengths, end - n_skipped, n_skipped))
        if run.tokenizer != runs[0].tokenizer:
            expected = f"expected {runs[0].tokenizer}, as {runs[0].label} has: losses of both do not compare"
            raise UserError(f"{run.label}: tokens of {run.tokenizer}: {expected}")
    return all_blocks


# ---------------------------------------------------------------- scores
def score_all(
    world: World, label: str, n_items: int, score: Callable[[Sequence[int]], Tensor], batch: int = 1
) -> Tensor | str:
    """All items' scores, in order, the same on every rank. Each rank takes its share of the items.

    Args:
        score: of the items with these numbers, at most `batch`: (n, ...).
    Returns:
        (n_items, ...) float64 on the CPU; or why there are none. Then the model rejects the input
        (ssmax_pn, whose p_n ends at the training length), or a score is not finite.
    """
    own = range(world.rank, n_items, world.size)
    scores: dict[int, Tensor] = {}
    reason = ""
    bar = tqdm(
        range(0, len(own), batch), label, leave=False, disable=None if world.is_main else True
    )
    try:
        for i in bar:
            items = own[i : i + batch]
            scores |= zip(items, score(items).double().cpu(), strict=True)
    except UserError as e:  # every rank still joins the collective
        reason = str(e)
    for theirs, their_reason in world.gather_objects((scores, reason)):
        scores |= theirs
        reason = reason or their_reason
    if reason:
        return reason
    in_order = torch.stack([scores[i] for i in range(n_items)])
    return in_order if in_order.isfinite().all() else "the model computed NaN or infinity"


def mean_and_stderr(values: Tensor) -> tuple[float, float | None]:
    """Mean of (n,) and its standard error, None for a single value."""
    n = len(values)
    return values.mean().item(), values.std().item() / math.sqrt(n) if n > 1 else None
