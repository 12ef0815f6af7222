"""What the evaluation scripts share: which runs, on which text, and how results are written.

Each of them takes run folders or checkpoint files, checks all of them before the first is evaluated, and
writes <script>.json and <script>.png into the run's folder (<script>_<checkpoint's name> for one checkpoint
file), and one more picture for several runs.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from attention import describe_attention
from config import Config
from data.dataset import TokenStream
from infra.cli import ArgumentParser, UserError
from infra.distributed import World
from infra.files import write_atomically
from model import RopeKind, RopeScaling
from training.checkpoint import Trained, load_model, read_config

MARKERS = "osD^vP*Xph<>"  # tell runs apart where the ten colours are used up
PICTURES = (".png", ".pdf", ".svg")


# ---------------------------------------------------------------- which runs


@dataclass(frozen=True)
class Run:
    """A model to evaluate, and where its results go."""

    source: Path  # as given: run folder or checkpoint file
    label: str
    config: Config
    output: Path  # without suffix

    def file(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)

    def load(self, world: World) -> Trained:
        """The model on this process's device, never with the dense engine: that holds (T, T) for each head.

        Raises:
            UserError: it does not load, or the processes got different checkpoints.
        """
        trained = load_model(self.source, world.device)
        if not world.agree(trained.step):
            raise UserError(f"{self.source}: got a new checkpoint while it was read; try again")
        for block in trained.model.blocks:
            if block.attention.engine == "dense":  # type: ignore[union-attr]
                block.attention.engine = "auto"  # type: ignore[union-attr]
        return trained

    def describe(self, step: int, args: argparse.Namespace) -> dict[str, Any]:
        """What every result's JSON begins with."""
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


def open_runs(sources: list[str], name: str) -> list[Run]:
    """Check every source before the first is evaluated: that may take hours.

    Args:
        name: of the results, e.g. "eval_length" or "eval_length_none".
    Raises:
        UserError: a source that does not load or is given twice, a folder that cannot be written.
    """
    paths = [Path(source) for source in sources]
    outputs = [output_of(path, name) for path in paths]
    labels = [label_of(path, output) for path, output in zip(paths, outputs, strict=True)]
    runs = []
    for path, output, label in zip(paths, outputs, labels, strict=True):
        if outputs.count(output) > 1:
            raise UserError(f"{path}: given twice")
        config = read_config(path)  # not the model: ten models may not fit in memory
        if not os.access(output.parent, os.W_OK):
            raise UserError(f"{output.parent}: cannot be written; the results go there")
        runs.append(Run(path, label if labels.count(label) == 1 else str(path), config, output))
    return runs


def output_of(source: Path, name: str) -> Path:
    """Where a source's results go, without suffix: its run's folder; beside a checkpoint that is alone."""
    source = source.resolve()
    if source.is_dir():
        return source / name
    folder = source.parent.parent if source.parent.name == "checkpoints" else source.parent
    return folder / f"{name}_{source.stem}"


def label_of(source: Path, output: Path) -> str:
    """The run folder's name, with the checkpoint's name where one was given."""
    source = source.resolve()
    if source.is_dir():
        return source.name
    return f"{output.parent.name}/{source.stem}" if source.parent.name == "checkpoints" else source.stem


def choose_picture(out: str | None, runs: list[Run], name: str) -> Path | None:
    """Where the picture with all runs goes; None: nowhere, a single run has its own."""
    if out is not None:
        path = Path(out)
        if path.suffix not in PICTURES:
            raise UserError(f"--out {out}: expected a name that ends in {', '.join(PICTURES)}")
        if not path.parent.is_dir():
            raise UserError(f"--out {out}: no folder {path.parent}")
        return path
    if len(runs) == 1:
        return None
    folders = [run.output.parent for run in runs]
    common = Path(os.path.commonpath(folders))
    # Two checkpoints of one run: <name>.png there is the picture of the run itself.
    return common / (f"{name}_all.png" if common in folders else f"{name}.png")


def open_validation(config: Config, data_dir: str | None) -> TokenStream:
    """The validation tokens, checked against the model's vocabulary.

    Raises:
        UserError: missing, damaged, or tokens that the model does not know.
    """
    stream = TokenStream(data_dir or config.data.dir, "val")
    stream.check_model(config.model.vocab_size)
    if stream.mask is not None:
        raise UserError(f"{stream.folder}: made for fine-tuning, no running text; expected other --data")
    known, found = config.model.vocab_size, stream.vocab_size
    # A model may have a few rows more than its tokeniser has tokens, but if the numbers are far apart
    # the tokens of --data mean something else to it, and it would score noise.
    if data_dir is not None and math.ceil(known / 128) != math.ceil(found / 128):
        raise UserError(
            f"{stream.folder}: tokenised with {found} tokens, but {config.name} has "
            f"model.vocab_size = {known}; expected the same tokeniser"
        )
    return stream


# ---------------------------------------------------------------- command line


def add_arguments(parser: ArgumentParser, rope: RopeKind = "ntk", data: bool = True) -> None:
    """The options that all evaluations have.

    Args:
        rope: default of --rope.
        data: whether the script reads the validation text.
    """
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders or checkpoint files, first of all"
    )
    parser.add_argument(
        "--rope",
        choices=get_args(RopeKind),
        default=rope,
        help="how RoPE is scaled beyond the training length (default: %(default)s)",
    )
    parser.add_argument("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    if data:
        parser.add_argument(
            "--data", metavar="DIR", help="dataset folder (default: that of each run's config)"
        )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="picture of all runs (default for several: <script>.png in the folder above them)",
    )
    parser.add_argument("--tag", metavar="WORD", help="part of the results' names: <script>_WORD.json")


def add_lengths(parser: ArgumentParser, help: str) -> None:
    """--lengths, with what they are lengths of and the default."""
    parser.add_argument("--lengths", nargs="+", type=whole_number, metavar="T", help=help)


def parse_arguments(parser: ArgumentParser, script: str) -> argparse.Namespace:
    """The command line; `name` in it is that of the results, <script> or <script>_<tag>."""
    args = parser.parse_args()
    if args.tag and not re.fullmatch(r"[\w.+-]+", args.tag):
        raise UserError(f"--tag {args.tag}: expected letters, digits and . _ + - alone")
    args.name = f"{script}_{args.tag}" if args.tag else script
    if args.rope == "theta" and args.rope_theta is None:
        raise UserError("--rope theta needs --rope-theta, the new base (500000 in the SSMax paper)")
    RopeScaling(args.rope, args.rope_theta)  # raises if the two do not fit
    return args


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def choose_lengths(given: list[int] | None, runs: Iterable[Run], factors: Sequence[int]) -> list[int]:
    """The lengths that were given, or else multiples of the runs' training lengths, in ascending order."""
    train_lens = {run.config.train.seq_len for run in runs}
    return sorted(set(given or [factor * train_len for train_len in train_lens for factor in factors]))


# ---------------------------------------------------------------- results


def progress(label: str, total: int, unit: str, world: World) -> tqdm:
    """A bar where somebody watches."""
    shown = world.is_main and sys.stderr.isatty()
    return tqdm(total=total, desc=label, unit=unit, unit_scale=True, disable=not shown)


def mean_and_stderr(values: Tensor) -> tuple[float, float | None]:
    """Mean of (n,) and its standard error, None for a single value."""
    n = len(values)
    stderr = values.std().item() / math.sqrt(n) if n > 1 else None
    return values.mean().item(), stderr


def proportion(successes: float, n: int) -> dict[str, float]:
    """The share with its 95 % confidence interval (Wilson 1927), which also says something at 0 and 1."""
    share, z2 = successes / n, 1.959964**2
    centre, scale = (share + z2 / (2 * n)) / (1 + z2 / n), 1 / (1 + z2 / n)
    half = scale * math.sqrt(z2 * share * (1 - share) / n + z2 * z2 / (4 * n * n))
    return {"share": share, "low": max(0.0, centre - half), "high": min(1.0, centre + half)}


def percent(value: dict[str, float]) -> str:
    """A `proportion` as '62.5 % [54.0, 70.2]'."""
    return f"{100 * value['share']:.1f} % [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"


def with_stderr(mean: float, stderr: float | None) -> str:
    return f"{mean:.4f} ±{stderr:.4f}" if stderr is not None else f"{mean:.4f} ±-"


def format_table(rows: list[list[str]], n_left: int = 2) -> str:
    """Aligned columns, the first `n_left` to the left, numbers to the right; a rule below the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if i < n_left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def short(length: int) -> str:
    """2048 -> '2K'; 128 stays."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def describe_rope(result: dict[str, Any]) -> str:
    """'ntk', 'theta = 500000'."""
    rope = result["rope"]
    return rope["kind"] + (f" = {rope['theta']:g}" if rope["theta"] else "")


def mark_training_length(axes: Any, results: list[dict[str, Any]]) -> Any:
    """A vertical line at each training length, one of them labelled; returns the last."""
    for i, train_len in enumerate({result["train_len"] for result in results}):
        label = None if i else "training length"
        line = axes.axvline(train_len, color="0.4", linestyle="--", linewidth=1, label=label)
    return line


def token_axis(axes: Any, lengths: list[int]) -> None:
    """A logarithmic x axis with the lengths as its only ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)


def write_json(result: dict[str, Any], path: Path) -> None:
    write_atomically(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Returns [path], for `evaluate_all`."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=150)
    write_atomically(path, content.getvalue())
    return [path]


def evaluate_all(
    runs: list[Run],
    world: World,
    picture: Path | None,
    evaluate: Callable[[Run], dict[str, Any]],
    report: Callable[[list[dict[str, Any]]], str],
    plot: Callable[[list[dict[str, Any]], Path], list[Path]],
) -> None:
    """Each run's result to its .json and .png, then all of them to the console and the picture.

    Args:
        evaluate: called in every process.
        report, plot: called in the main process; plot returns the files that it wrote.
    """
    results, written = [], []
    for run in runs:
        results.append(evaluate(run))
        if world.is_main:  # at once: a later run may fail
            write_json(results[-1], run.file(".json"))
            written += [run.file(".json"), *plot(results[-1:], run.file(".png"))]
    if world.is_main:
        print(report(results))
        if picture is not None:
            written += plot(results, picture)
        print("\n".join(f"wrote {path}" for path in written))
