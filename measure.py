"""Numbers as rows: written, read, collected, compared, and shown as a table or a curve.

    python measure.py runs/softmax runs/lssar --out results    # collect: runs.csv and rows.csv.gz there

Every evaluation writes rows and nothing else, to rows.csv of the run folder. A row is one number:

    run        name of the run's config                step     optimiser steps done
    text       first 12 digits of the scored stream's sha256, or another evaluation's name of it
    measure    loss (all tokens), same_targets (the last tokens of a block), loss[0:128] (positions)
    length     tokens of context given
    window     0, or 128: a rolling KV window, or "128 recomputed": windows computed anew
    scaling    of RoPE: none, ntk, yarn, theta=500000
    block      number of the block, empty for a mean over all       document   that it is of
    value      empty where the model rejects the length, or the number is not finite

All rows of one (run, step, text, measure, window, scaling) are a set. Writing replaces whole sets,
at once. A table of runs says what each run is. Tables, figures and pages are views of both.
"""

import argparse
import fcntl
import gzip
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from pandas import DataFrame, MultiIndex

from config import load_config
from infra.cli import ArgumentParser, UserError, run_main
from infra.figures import Figure
from infra.files import atomic_file, read_jsonl, write_atomically
from model import GPT
from normalisers import own
from schema import Config, describe_layers

FILE = "rows.csv"
COLUMNS = [
    "run", "step", "text", "measure", "length", "window", "scaling", "block", "document", "value",
]  # fmt: skip
TYPES: dict[str, Any] = dict.fromkeys(COLUMNS, str) | {
    "step": int, "length": int, "block": "Int64", "document": "Int64", "value": float,
}  # fmt: skip
SET = ["run", "step", "text", "measure", "window", "scaling"]
RUN_COLUMNS = [
    "run", "variant", "options", "seed", "rate", "parameters", "T", "steps", "dtype",
    "commit", "sha256", "date", "machine", "threads", "minutes",
]  # fmt: skip
VALIDATIONS = ("val_loss", "val_cross_entropy")  # keys of metrics.jsonl
FIGURE_SUFFIXES = (".png", ".pdf", ".svg")
MARKERS = "osD^vP*Xph<>"
MOST_TICKS = 12  # of an axis, one for each value
CONFIDENCE = 0.95
WIDTH = 80  # of tables


# ---------------------------------------------------------------- rows
def write_rows(folder: Path, rows: Iterable[Sequence[Any]] | DataFrame) -> None:
    """Write whole sets of rows to the folder's rows.csv, in place of those that it has of them.

    A kill leaves the old file or the new one. Another evaluation that writes there waits. Raises
    UserError: the file there is not one of rows, or cannot be written.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # no locks there, or a lock of another user
            fcntl.flock(stack.enter_context(open(folder / ".rows.lock", "ab")), fcntl.LOCK_EX)
        table = replace_sets(read_rows(folder), as_rows(rows))
        write_atomically(folder / FILE, to_csv(table))


def as_rows(rows: Iterable[Sequence[Any]] | DataFrame) -> DataFrame:
    """A table with the types of `read_rows`. A number that is not finite has no value."""
    table = DataFrame(rows, columns=COLUMNS).astype(TYPES)
    table["value"] = table["value"].where(np.isfinite(table["value"]))
    return table


def replace_sets(old: DataFrame, new: DataFrame) -> DataFrame:
    """The old rows but for the sets that are among the new ones, then the new rows.

    All parts of a measure by position are one set.
    """
    old_sets, new_sets = (
        MultiIndex.from_frame(table[SET].replace({"measure": r"\[.*"}, "[", regex=True))
        for table in (old, new)
    )
    kept = old[~old_sets.isin(new_sets)]
    return pandas.concat([kept, new], ignore_index=True) if len(kept) else new


def to_csv(table: DataFrame) -> bytes:
    return table.to_csv(index=False, lineterminator="\n", float_format="%.7g").encode()


def read_rows(*sources: str | Path) -> DataFrame:
    """The rows of run folders, or of files rows.csv and rows.csv.gz, one after the other.

    step and length are int64, block and document Int64 (empty: NA), value float64 (empty: NaN),
    the others text. A folder without the file has no rows. Raises UserError: it is no such file.
    """
    empty = {column: [""] for column in ("block", "document", "value")}
    tables = []
    for source in map(Path, sources):
        path = source / FILE if source.is_dir() else source
        if path.exists() or not source.is_dir():
            tables.append(read_table(path, COLUMNS, dtype=TYPES, na_values=empty))
    return pandas.concat(tables or [as_rows([])], ignore_index=True)


def read_table(path: Path, columns: list[str], **options: Any) -> DataFrame:
    """These columns of a CSV file. Raises UserError: it does not have them."""
    try:
        return pandas.read_csv(
            path, usecols=columns, keep_default_na=False, skip_blank_lines=False, **options
        )[columns]
    except (OSError, ValueError, EOFError) as e:  # pandas' own errors are ValueErrors
        problem = " ".join(str(e).split())
        raise UserError(f"{path}: expected rows with {', '.join(columns)}: {problem}") from None


def select(rows: DataFrame, **values: Any) -> DataFrame:
    """The rows with these values, compared as text: select(rows, run="lssar", window=0)."""
    for column, value in values.items():
        rows = rows[rows[column].astype(str) == str(value)]
    return rows


# ---------------------------------------------------------------- runs
def describe_runs(folders: Sequence[Path]) -> DataFrame:
    """The table of runs, all values as text. Raises UserError: one is not a run folder."""
    return DataFrame(map(describe_run, folders), columns=RUN_COLUMNS).astype(str)


def describe_run(folder: Path) -> dict[str, Any]:
    """A line of the table of runs, from config.toml, starts.jsonl and metrics.jsonl.

    minutes: of training alone, summed over all starts. Raises UserError: it is not a run folder.
    """
    config = load_config(folder / "config.toml")
    starts = read_jsonl(folder / "starts.jsonl")
    last = starts[-1] if starts else {}
    metrics = read_jsonl(folder / "metrics.jsonl")
    steps = [each["step"] for each in metrics if "loss" in each]
    return {
        "run": config.name,
        "variant": variant_of(config.name),
        "options": describe_layers(config),
        "seed": config.seed,
        "rate": peak_rate(config),
        "parameters": count_parameters(config),
        "T": config.train.seq_len,
        "steps": max(steps, default=0),
        "dtype": config.train.dtype,
        "commit": last.get("commit") or "",
        "sha256": code_of(config),
        "date": last.get("time", "")[:10],
        "machine": last.get("device", ""),
        "threads": last.get("threads", ""),
        "minutes": round(training_seconds(metrics) / 60, 3),
    }


def count_parameters(config: Config) -> int:
    with torch.device("meta"):
        return GPT(config).n_params()


def code_of(config: Config) -> str:
    """The sha256 of the files of its own normalisers."""
    return " ".join(sha256(x).hexdigest() for x in own.files_of(config.normalisers).values())


def peak_rate(config: Config) -> float:
    """Of the matrices, which Muon has a rate of its own for."""
    optimizer = config.optimizer
    return optimizer.muon_lr if optimizer.name == "muon" else optimizer.lr


def training_seconds(metrics: list[dict[str, Any]]) -> float:
    """The logged steps' mean times, each of all steps since the last logged one."""
    seconds = 0.0
    before = 0
    for record in metrics:
        if "step_ms" in record:
            seconds += record["step_ms"] / 1000 * (record["step"] - before)
            before = record["step"]
    return seconds


def variant_of(run: str) -> str:
    """The name without seed and rate: 'ssmax_lr=0.002_seed=2' -> 'ssmax'."""
    return re.sub(r"_(seed|lr|muon_lr)=[^_]+", "", run)


def validation_rows(folder: Path) -> Iterator[tuple[Any, ...]]:
    """The validations in metrics.jsonl; their text is empty, the first train.val_tokens."""
    config = load_config(folder / "config.toml")
    for record in read_jsonl(folder / "metrics.jsonl"):
        for measure in VALIDATIONS:
            if measure in record:
                key = (config.name, record["step"], "", measure, config.train.seq_len)
                yield (*key, 0, "none", None, None, record[measure])


def collect(folders: Sequence[Path], out: Path) -> None:
    """Enter run folders into the two tables runs.csv and rows.csv.gz of the folder `out`.

    A run's line and its sets replace older ones; all else stays. Raises UserError: see `read_rows`
    and `describe_runs`; two folders have one run name, or the tables have it of another attention.
    """
    runs = describe_runs(folders)
    twice = runs["run"][runs["run"].duplicated()]
    if len(twice):
        raise UserError(f"{twice.iloc[0]}: two of the folders have a run of this name")
    validations = itertools.chain(*map(validation_rows, folders))
    rows = pandas.concat([read_rows(*folders), as_rows(validations)])
    runs_path = out / "runs.csv"
    rows_path = out / "rows.csv.gz"
    if runs_path.exists():
        old = read_runs(out)
        refuse_another(old, runs, "run", runs_path)
        runs = pandas.concat([old[~old["run"].isin(runs["run"])], runs])
    if rows_path.exists():
        rows = replace_sets(read_rows(rows_path), rows)
    with atomic_file(rows_path) as f:
        f.write(gzip.compress(to_csv(rows), mtime=0))  # the same bytes for the same rows
    write_atomically(runs_path, to_csv(runs))


def refuse_another(old: DataFrame, new: DataFrame, key: str, where: Path) -> None:
    """Raises UserError: old and new runs with one value of the key have other options or files."""
    for _, pair in old.merge(new, on=key, suffixes=("_before", "")).iterrows():
        for column in ("options", "sha256"):
            before, now = pair[f"{column}_before"], pair[column]
            if before != now:
                expected = f"{where} has {before or 'none'}: expected another name"
                raise UserError(f"{pair[key]}: {column} is {now or 'none'}: {expected}")


def read_runs(folder: Path) -> DataFrame:
    """The folder's runs.csv, all values as text. Raises UserError: it is no table of runs."""
    return read_table(folder / "runs.csv", RUN_COLUMNS, dtype=str)


# ---------------------------------------------------------------- statistics
class Estimate(NamedTuple):
    """A mean or a difference of means with its 95 % interval, value ± half."""

    value: float
    half: float  # NaN for a single seed and document
    p: float  # of "it is 0", two-sided; NaN likewise


class Losses(NamedTuple):
    """One measure of the seeds of a model on the same blocks."""

    values: np.ndarray  # (seeds, blocks) float64
    blocks: tuple[tuple[int, int], ...]  # (block, document) of each column
    runs: tuple[str, ...] = ()  # of each row, if known

    @property
    def documents(self) -> np.ndarray:
        return np.array([document for _, document in self.blocks])


def read_losses(rows: DataFrame) -> Losses | None:
    """The rows of one measure, length, window and scaling, of one or several seeds, as a table.

    None: there are no blocks, or a value is empty. Raises UserError: two runs have other blocks.
    """
    rows = rows[rows["block"].notna()]
    if rows.empty or rows["value"].isna().any():
        return None
    document = rows["document"].fillna(rows["block"])
    table = rows.assign(document=document).pivot(
        index="run", columns=["block", "document"], values="value"
    )
    if table.isna().any(axis=None):
        names = ", ".join(map(str, table.index))
        raise UserError(f"{names}: scored on other blocks: evaluate them in one call")
    blocks = tuple((int(block), int(document)) for block, document in table.columns)
    return Losses(table.to_numpy(float), blocks, tuple(table.index))


def estimate(losses: Losses, minus: Losses | None = None) -> Estimate:
    """The mean over seeds and blocks, or its difference to another model's on the same blocks.

    The variance is s²(seeds) / n of each model + s²(documents) / m of the mean over seeds, its
    degrees of freedom are Satterthwaite's, and the interval is Student's (Welch 1947). A single
    seed adds no variance: the interval is then of the documents alone. Blocks of one document are
    one draw. Losses of the same runs, as in two settings, are paired by run. Raises UserError: the
    blocks differ.
    """
    models = [losses] if minus is None else [losses, minus]
    if any(model.blocks != losses.blocks for model in models):
        raise UserError("scored on other blocks: evaluate these runs in one call")
    if minus is not None and losses.runs == minus.runs != ():
        return estimate(Losses(losses.values - minus.values, losses.blocks))
    parts = []  # (variance of the mean, degrees of freedom)
    for model in models:
        seeds = model.values.mean(1)
        if len(seeds) > 1:
            parts.append((seeds.var(ddof=1) / len(seeds), len(seeds) - 1))
    by_block = losses.values.mean(0)
    if minus is not None:
        by_block = by_block - minus.values.mean(0)
    value = by_block.mean()
    _, of_document = np.unique(losses.documents, return_inverse=True)
    sums = np.bincount(of_document, by_block - value)  # of the blocks of each document
    m = len(sums)
    if m > 1:
        parts.append((m / (m - 1) * (sums**2).sum() / len(by_block) ** 2, m - 1))
    variance = sum(part for part, _ in parts)
    if not parts:
        return Estimate(float(value), math.nan, math.nan)
    if variance == 0:
        return Estimate(float(value), 0.0, 1.0 if value == 0 else 0.0)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    error = math.sqrt(variance)
    angles, shares = student(freedom)
    scale = error * math.sqrt(freedom)
    p = 1 - np.interp(math.atan(abs(value) / scale), angles, shares)
    half = scale * math.tan(np.interp(CONFIDENCE, shares, angles))
    return Estimate(float(value), half, float(p))


def subtract(
    losses: Mapping[int, Losses | None], zero: Mapping[int, Losses | None]
) -> dict[int, Estimate | None]:
    """Of each length the difference to `zero`'s; None where they do not have the same blocks."""
    differences: dict[int, Estimate | None] = dict.fromkeys(losses)
    for length, each in losses.items():
        other = zero.get(length)
        if each is not None and other is not None and each.blocks == other.blocks:
            differences[length] = estimate(each, other)
    return differences


def student(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """Student's distribution: angles x from 0 on, and P(|T| < √freedom tan x).

    Its density over x is proportional to cos^(freedom - 1) x, and is summed by trapezoids.
    """
    angles = np.linspace(0, min(math.pi / 2, 40 / math.sqrt(freedom)), 4001)
    density = np.cos(angles) ** (freedom - 1)
    shares = np.cumsum(density) - (density + density[0]) / 2
    return angles, shares / shares[-1]


def holm(p: Sequence[float]) -> list[float]:
    """The p values of several tests, adjusted so that any false one among those below 0.05 has a
    chance of at most 5 % (Holm 1979).
    """
    order = np.argsort(p)
    scaled = np.sort(p) * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(scaled))
    return adjusted.tolist()


# ---------------------------------------------------------------- names
NAMES = {  # of formulas and positions
    "ssmax": "SSMax", "lssa": "LSSA", "norm_softmax": "NormSoftmax", "fox": "FoX",
    "asentmax": "ASEntmax", "decay": "decay by distance",
    "alibi": "ALiBi", "none": "NoPE", "p_rope": "p-RoPE",
}  # fmt: skip
PLACED = ("fox", "stick_breaking", "decay")  # by a decay of their own, without positions


def name_model(config: Config) -> str:
    """As people would name the model: 'softmax', 'SSMax, QK-norm', 'LSSAR', 'windows of 16 + FoX'."""
    parts: list[str] = []
    for layer in config.layer_configs:
        part = name_layer(layer)
        if part not in parts:
            parts.append(part)
    windows = [part for part in parts if part.startswith("window")]
    name = " + ".join([*windows, *(part for part in parts if part not in windows)])
    return f"{name}, by document" if config.data.documents else name


def name_layer(config: Config) -> str:
    options = config.attention
    model = config.model
    kind = options.definition.name
    name = NAMES.get(kind, kind.replace("_", "-"))
    if kind == "lssa" and options.reweight_p:
        name = "LSSAR"
    elif options.reweight_p:
        name += f" to the power {options.reweight_p:g}"
    if kind in ("softmax", "ssmax") and getattr(options.definition, "scores", "") == "cosine":
        name += ", QK-norm"
    if model.position != ("none" if kind in PLACED else "rope"):
        name += f", {NAMES.get(model.position, model.position)}"
    name += ", output gate" if model.attention_gate else ""
    name += ", exclusive" if model.exclusive else ""
    name += ", shifted keys" if model.key_shift else ""
    if model.window:
        plain = name.removeprefix("softmax").removeprefix(", ")
        name = f"windows of {model.window}" + (f" ({plain})" if plain else "")
    return name


# ---------------------------------------------------------------- tables
def format_loss(each: Estimate) -> str:
    """'1.63', with a third digit where the interval is below ±0.02, or none."""
    return f"{each.value:.{2 if each.half >= 0.02 else 3}f}"


def format_difference(each: Estimate | None) -> str:
    """'+.02 ±.01': short, since a table has five of them in 80 columns. "-" for None."""
    if each is None:
        return "-"
    digits = 2 if each.half >= 0.02 else 3
    text = f"{each.value:+.{digits}f}"
    if each.half >= 0:  # NaN: there is no interval
        text += f" ±{each.half:.{digits}f}"
    return re.sub(r"(?<!\d)0\.", ".", text)


def format_table(lines: Sequence[Sequence[str]], n_names: int = 1) -> str:
    """Aligned columns, names to the left and numbers to the right, with a rule below the header.

    Columns beyond WIDTH follow below, after the names. A line with one cell is the heading of those
    below it: as long as it likes.
    """
    whole = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    ends = np.cumsum(np.add(widths, 2)) - 2
    n_fit = max(n_names + 1, int((ends <= WIDTH).sum()))
    formatted = []
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        cells = [f"{cell:{'<' if i < n_names else '>'}{widths[i]}}" for i, cell in enumerate(line)]
        formatted.append("  ".join(cells[:n_fit]).rstrip())
    if n_fit < len(widths):
        rest = [[*line[:n_names], *line[n_fit:]] for line in lines]
        formatted += ["", format_table(rest, n_names)]
    return "\n".join(formatted)


# ---------------------------------------------------------------- figures
class Curve(NamedTuple):
    """Values over numbers, as lengths, or over words."""

    label: str
    x: Sequence[Any]
    values: Sequence[float]
    halves: Sequence[float] = ()  # of the 95 % intervals
    style: dict[str, Any] = {}  # of matplotlib, in place of the next colour and marker


def draw_curves(
    path: Path,
    curves: Sequence[Curve],
    title: str,
    ylabel: str,
    train_lens: Iterable[int] = (),
    xlabel: str = "context (tokens)",
) -> None:
    """One panel, with a dotted line at each training length.

    The axis is logarithmic where it has few numbers, the largest at least four times the smallest.
    """
    # a line of the legend has two curves
    figure = Figure(figsize=(8, 4.72 + 0.11 * len(curves)), layout="constrained")
    axes = figure.subplots()
    for i, curve in enumerate(curves):
        style = {"color": f"C{i}", "marker": MARKERS[i % len(MARKERS)]} | curve.style
        errors = np.nan_to_num(curve.halves) if len(curve.halves) else None
        axes.errorbar(
            curve.x, curve.values, errors, label=escape(curve.label), markersize=5,
            capsize=3, elinewidth=0.8, **style,
        )  # fmt: skip
    places = list(dict.fromkeys(x for curve in curves for x in curve.x))
    are_numbers = all(isinstance(x, int | float) for x in places)
    if are_numbers and len(places) <= MOST_TICKS and max(places) >= 4 * min(places) > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [format_length(x) for x in places])
        axes.set_xticks([], minor=True)
    for i, train_len in enumerate(sorted({*train_lens})):
        label = "_" * i + "training length"  # one of "_..." is not in the legend
        axes.axvline(train_len, color="0.4", linestyle=":", linewidth=1, label=label)
    axes.set(title=escape(title), xlabel=escape(xlabel), ylabel=escape(ylabel))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path)


def draw_training(folder: Path) -> None:
    """loss.png of a run folder: the loss of every step, and the validations."""
    records = DataFrame(read_jsonl(folder / "metrics.jsonl"))
    curves = []
    for key, label, marker in (("loss", "training", ""), ("val_loss", "validation", "o")):
        if key in records:
            found = records.dropna(subset=[key])
            style = {"marker": marker, "linewidth": 1}
            curves.append(Curve(label, [*found["step"]], [*found[key]], style=style))
    draw_curves(folder / "loss.png", curves, folder.name, "loss (nats)", xlabel="step")


def escape(text: str) -> str:
    """A name with dollar signs is no formula."""
    return text.replace("$", r"\$")


def format_length(length: float) -> str:
    """2048 -> '2K'; 128 -> '128'."""
    return f"{length / 1024:g}K" if length % 1024 == 0 else f"{length:g}"


def check_figure(out: Path | None, option: str = "--out ") -> None:
    """Raises UserError: `out` is given and is no figure's name in a folder that exists."""
    if out and (out.suffix not in FIGURE_SUFFIXES or not out.parent.is_dir()):
        expected = f"expected {', '.join(FIGURE_SUFFIXES)} in a folder that exists"
        raise UserError(f"{option}{out}: {expected}")


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    with atomic_file(path, shared=True) as f:
        figure.savefig(f, format=path.suffix[1:], dpi=dpi)
    print(f"wrote {path}")


# ---------------------------------------------------------------- command
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    add("--out", type=Path, required=True, metavar="DIR", help="has the tables, or gets them")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if not args.out.is_dir():
        raise UserError(f"--out {args.out}: no such folder")
    collect([run for run in args.runs if run.is_dir()] or args.runs, args.out)  # logs lie beside
    runs = read_runs(args.out)
    rows = read_rows(args.out / "rows.csv.gz")
    print(f"{args.out}: {len(rows):,} rows of {len(runs)} runs")


if __name__ == "__main__":
    run_main(main)
