"""The tables and figures of results/, drawn from its rows.

    python -m lab.results       # rewrites them in results/*.md and results/figures/

A table of a page stands between `<!-- table NAME -->` and `<!-- end -->`. The test of this module
draws all again, and finds every decimal number of a page's prose in one of its tables.
"""

import math
import re
import tomllib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pandas import DataFrame

import compare
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import read_text, write_atomically
from measure import (
    Curve,
    Estimate,
    Losses,
    draw_curves,
    estimate,
    format_difference,
    read_losses,
    read_rows,
    read_runs,
    select,
)

FOLDER = Path(__file__).parents[1] / "results"
MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
DASH = "–"
TABLES = tomllib.loads((FOLDER / "tables.toml").read_text(encoding="utf-8"))
RECOMPUTED = "128 recomputed"
SHORT_TEXT = "2ec003527944"  # of lab/definitions.py
VAL_TEXT, LONG_TEXT = "41bb81c34cc1", "efd157a3fce6"  # of data/packages.py, val and test
PEAK_RATES = ("0.01", "0.02", "0.04", "0.08")  # of Muon, tried in the track
Lines = list[list[str]]  # of a table, the header first


class Records:
    """The rows of a table by model, which is a run's name without its seed."""

    def __init__(self, rows: DataFrame):
        models = rows["run"].str.replace(r"_seed=\d+$", "", regex=True)
        self.models = dict(tuple(rows.groupby(models)))
        self.table = rows

    @cached_property
    def on_test(self) -> "Records":
        """Without rows on texts other than the track's test text."""
        return Records(self.table[self.table["text"].isin(["", LONG_TEXT])])

    def rows(
        self, model: str, length: int, window: str = "0", scaling: str = "none",
        measure: str = "same_targets",
    ) -> DataFrame:  # fmt: skip
        """Those of all seeds of a model, or of a run. Of val_loss that of the last step.

        Raises UserError: no such model.
        """
        name, _, seed = model.partition("_seed=")
        if name not in self.models:
            raise UserError(f"{FOLDER}/rows.csv.gz: no rows of {model}")
        rows = self.models[name]
        is_asked = (rows["length"] == length) & (rows["window"] == window)
        if seed:
            is_asked &= rows["run"] == model
        is_asked &= (rows["scaling"] == scaling) & (rows["measure"] == measure)
        rows = rows[is_asked]
        if measure == "val_loss":
            rows = rows[rows["step"] == rows.groupby("run")["step"].transform("max")]
        return rows

    def seeds(self, model: str) -> str:
        return str(self.models[model]["run"].nunique())

    def mean(self, model: str, length: int, *where: Any, **others: Any) -> float:
        """Over seeds, each a mean over its blocks. NaN where there is none."""
        return float(
            self.rows(model, length, *where, **others).groupby("run")["value"].mean().mean()
        )

    def losses(self, model: str, length: int, *where: Any, **others: Any) -> Losses | None:
        return read_losses(self.rows(model, length, *where, **others))

    def difference(self, first: Losses | None, second: Losses | None) -> str:
        """Of two models: '−.38 ±.06'. A dash where one has no blocks."""
        return DASH if first is None or second is None else signed(estimate(first, second))

    def gain(self, model: str, length: int, scaling: str = "none", window: str = RECOMPUTED) -> str:
        """The loss in a sliding window minus that at the length, paired over seeds and blocks."""
        short = self.losses(model, length, window)
        return self.difference(short, self.losses(model, length, "0", scaling))


def signed(each: Estimate) -> str:
    return format_difference(each).replace("-", "−")


def number(value: float, digits: int = 2, sign: str = "") -> str:
    return DASH if math.isnan(value) else f"{value:{sign}.{digits}f}".replace("-", "−")


def mean_of(losses: Losses | None, digits: int = 3) -> str:
    """A dash where there are none."""
    return DASH if losses is None else number(float(losses.values.mean()), digits)


def percent(value: float) -> str:
    return DASH if math.isnan(value) else f"{100 * value:.0f}"


def markdown(lines: Lines, n_left: int = 1) -> str:
    rule = ["---" if i < n_left else "---:" for i in range(len(lines[0]))]
    return "".join("| " + " | ".join(line) + " |\n" for line in [lines[0], rule, *lines[1:]])


# ---------------------------------------------------------------- tables of losses
def draw_table(name: str, records: Records) -> str:
    """A table of tables.toml, by its function here or, without one, by its columns there."""
    table = TABLES[name]
    draw = FUNCTIONS.get(name)
    records = records.on_test if table.get("on_test") else records
    lines = draw(records, table["lines"]) if draw else columns_table(records, table)
    return markdown(lines, table.get("n_left", 1))


def columns_table(records: Records, table: dict[str, Any]) -> Lines:
    """Lines have their labels, a model and a RoPE scaling. A column names rows of each model."""
    lines = [[*table.get("labels", []), *(column["name"] for column in table["columns"])]]
    for *labels, model, scaling in table["lines"]:
        cells = [column_cell(records, model, scaling, **column) for column in table["columns"]]
        lines.append([*labels, *cells])
    return lines


def column_cell(
    records: Records, model: str, scaling: str, *, name: str, length: int = 0, window: str = "0",
    measure: str = "same_targets", show: str = "loss", digits: int = 2, rope: str = "",
) -> str:  # fmt: skip
    """show: loss, percent, gain over the window, n of the seeds that have rows, the needle score of the
    head that has the highest, or a label. rope: in place of the line's scaling.
    """
    if show == "RoPE":
        return scaling
    if show == "run":
        return model.partition("/")[2]
    if show == "gain":
        return records.gain(model, length, scaling, window)
    of_scaling = (rope or scaling) if window == "0" and measure != "val_loss" else "none"
    if show == "needle score":
        rows = select(records.models[model], length=length, scaling=of_scaling)
        heads = rows[rows["measure"].str.startswith("needle_score")].groupby("measure")
        return number(float(heads["value"].mean().max()), digits)
    rows = records.rows(model, length, window, of_scaling, measure)
    if show == "n":
        return str(rows["run"].nunique())
    value = float(rows.groupby("run")["value"].mean().mean())
    return percent(value) if show == "percent" else number(value, digits)


# ---------------------------------------------------------------- tables of their own
def board(records: Records, given: list[list[Any]]) -> Lines:
    """The track's, as compare.py has it."""
    return board_of(records, compare.track_runs(FOLDER), given)


def readme(records: Records, given: list[list[Any]]) -> Lines:
    """Some of its lines and columns, with labels of their own."""
    labels = dict(given)
    lines = [["trained at 256", "context", "seeds", "loss at 4,096", "minus softmax's window"]]
    for label, setting, n, *_, at_16_T, _, _, minus, _ in board(records, TABLES["board"]["lines"]):
        if label in labels:
            lines.append([labels[label], setting, n, at_16_T, minus.replace("+.000 ±.000", "0")])
    return lines


def half(records: Records, given: list[list[Any]]) -> Lines:
    """The same of the runs of half the steps."""
    runs = read_runs(FOLDER)
    return board_of(records, runs[runs["run"].str.startswith("half/")], given)


def board_of(records: Records, runs: DataFrame, given: list[list[Any]]) -> Lines:
    labels = dict(given)
    entries = compare.make_entries(runs, records.table, LONG_TEXT, VAL_TEXT)
    header = ["model", "context", "n", "rates", "T", "4 T", "16 T"]
    lines = [[*header, "own window − 16 T", "T − softmax", "16 T − softmax's window", "p"]]
    both = compare.differences(entries)[1:], compare.costs(entries)[1:]
    for (_, setting, n, at_T, _, *last), (name, *losses, _, _, n_rates) in zip(*both, strict=True):
        cells = (cell.replace("-", "−") for cell in (*losses, at_T, *last))
        lines.append([labels.get(name, name), setting, n, n_rates, *cells])
    return lines


def adamw(records: Records, given: list[list[Any]]) -> Lines:
    zero = records.losses("context/softmax", 2048, RECOMPUTED)
    header = ["model", "RoPE", "n", "window of 128", "at 512", "at 2,048"]
    header.append("at 2,048 − softmax's window")
    loss = number(records.mean("context/softmax", 2048, RECOMPUTED))
    lines = [header, ["**softmax, sliding window of 128**", "none", "3", loss, loss, loss, "0"]]
    for label, model, scaling in given:
        model = f"context/{model}"
        lines.append([
            label,
            scaling,
            records.seeds(model),
            number(records.mean(model, 2048, RECOMPUTED)),
            number(records.mean(model, 512, "0", scaling)),
            number(records.mean(model, 2048, "0", scaling)),
            records.difference(records.losses(model, 2048, "0", scaling), zero),
        ])  # fmt: skip
    return lines


def optimiser(records: Records, given: list[list[Any]]) -> Lines:
    lines = [
        ["model", "n", "AdamW", "Muon", "Muon − AdamW", "AdamW, rise to 16x", "Muon, rise to 16x"]
    ]
    for label, model, scaling in given:
        runs = {}
        for study in ("A", "A_muon"):
            rows = records.rows(f"{study}/{model}", 256, measure="val_loss")
            runs[study] = Losses(rows["value"].to_numpy()[:, None], ((0, 0),))
        muon = estimate(runs["A_muon"], runs["A"])
        means = [number(estimate(each).value) for each in runs.values()]
        lines.append([label, "3", *means, signed(muon), *rises(records, model, scaling)])
    return lines


def rounding(records: Records, given: list[list[Any]]) -> Lines:
    lines = [["model", "16 sequences at a time", "8", "difference"]]
    for label, model in given:
        whole, halves = (
            records.mean(f"rounding/{model}_micro={n}", 128, measure="val_loss") for n in (16, 8)
        )
        differs = number(halves - whole, 4, "+")
        lines.append([label, number(whole, 4), number(halves, 4), differs])
    return lines


def rates(records: Records, given: list[list[Any]]) -> Lines:
    """The validation loss of seed 1 at each peak rate, at half of the track's steps."""
    lines = [["model", *PEAK_RATES]]
    for label, model in given:
        cells = [DASH] * len(PEAK_RATES)
        for i, rate in enumerate(PEAK_RATES):
            if (name := f"half/{model}_muon_lr={rate}") in records.models:
                cells[i] = number(records.mean(f"{name}_seed=1", 256, measure="val_loss"), 3)
        lines.append([label, *cells])
    return lines


def by_group(records: Records, given: list[list[Any]], group: str) -> Lines:
    """The validation loss, that at 16 T in a rolling window or none, and what each is above softmax of
    the same group, its first line, at T and in its window.
    """
    lines = [["model", group, "n", "validation", "16 T", "own window − 16 T", "T − softmax"]]
    lines[0].append("16 T − softmax's window")
    zero: dict[str, tuple[Losses | None, ...]] = {}
    for label, size, model, window in given:
        losses = tuple(
            records.on_test.losses(model, *where)
            for where in ((256,), (4096, window), (4096, "256"))
        )
        zero.setdefault(size, losses)
        validation = number(records.mean(model, 256, measure="val_loss"), 3)
        n = str(records.rows(model, 256)["run"].nunique())
        cells = [label, size, n, validation, mean_of(losses[1])]
        cells.append(records.difference(losses[2], losses[1]))
        cells += [records.difference(losses[i], zero[size][i]) for i in (0, 1)]
        lines.append(cells)
    return lines


def ladder(records: Records, given: list[list[Any]]) -> Lines:
    """The last 128 tokens of the test text by T: in a rolling window of T, at 4 T and at 4,096."""
    lines = [["model", "T", "window of T", "4 T", "4,096", "window − 4,096"]]
    lines[0].append("4,096 − softmax's window")
    zero: dict[int, Losses | None] = {}
    for label, run, train_len, scaling in given:
        window, *beyond = (
            records.on_test.losses(f"ladder/{run}", *where)
            for where in (
                (4096, str(train_len)),
                (4 * train_len, "0", scaling),
                (4096, "0", scaling),
            )
        )
        zero.setdefault(train_len, window)
        cells = [mean_of(each) for each in (window, *beyond)]
        cells += [records.difference(window, beyond[1])]
        cells += [records.difference(beyond[1], zero[train_len])]
        lines.append([label, f"{train_len:,}", *cells])
    return lines


def reach(records: Records, given: list[list[Any]]) -> Lines:
    """What a copy of the last 64 tokens saves, by its distance (lab/reach.py)."""
    distances = (64, 128, 256, 1024, 4032)
    lines = [["model", "steps", *(f"{distance:,}" for distance in distances)]]
    for label, n_steps, model, window in given:
        losses = [records.losses(model, each, window, measure="copy_saves") for each in distances]
        cells = [DASH if each is None else signed(estimate(each)) for each in losses]
        lines.append([label, n_steps, *cells])
    return lines


def documents(records: Records, given: list[list[Any]]) -> Lines:
    """The loss of models whose queries see their own document alone, and what it costs to see others:
    in short documents, and at 16 T, at the ends of long files.
    """
    header = ["model", "short documents", "price, seed 1", "seed 2"]
    lines = [[*header, "16 T of long ones", "price, seed 1", "seed 2"]]
    for label, model, window, scaling in given:
        cells = [label]
        for text, *context in ((SHORT_TEXT, 256, "0", "none"), (LONG_TEXT, 4096, window, scaling)):
            across, apart = (
                select(records.rows(f"documents/{model}{kind}", *context), text=text)
                for kind in ("", "_documents")
            )
            cells.append(number(apart.groupby("run")["value"].mean().mean()))
            for seed in (1, 2):
                both = [rows[rows["run"].str.endswith(f"_seed={seed}")] for rows in (across, apart)]
                cells.append(records.difference(*map(read_losses, both)))
        lines.append(cells)
    return lines


def rises(records: Records, model: str, scaling: str) -> list[str]:
    """The loss at 16x minus that at 1x over all tokens, with either optimiser."""
    found = []
    for study in ("A", "A_muon"):
        at = [
            records.mean(f"{study}/{model}", n, "0", scaling, measure="loss") for n in (256, 4096)
        ]
        found.append(number(at[1] - at[0], 2, "+"))
    return found


def settings(records: Records, given: list[list[Any]]) -> Lines:
    header = ["text", "size", "T", "n", "softmax, window of T", "the design, window of T", "16 T"]
    lines = [[*header, "its gain", "gain of softmax continued at 16 T"]]
    for label, study, train_len, model, size in given:
        window = f"{train_len} recomputed"
        models = [f"{study}/{each}" for each in ("softmax", model, "softmax_continued")]
        short = [
            records.mean(each, 16 * train_len, window) if each in records.models else math.nan
            for each in models
        ]
        gains = [
            records.gain(each, 16 * train_len, "none", window) if each in records.models else DASH
            for each in models[1:]
        ]
        long = records.mean(models[1], 16 * train_len)
        numbers = [number(each) for each in (*short[:2], long)]
        n = records.rows(models[1], 16 * train_len)["run"].nunique()
        lines.append([label, size, f"{train_len:,}", str(n), *numbers, *gains])
    return lines


def with_counts(
    records: Records, model: str, train_len: int, others: list[Losses | None], digits: int = 2
) -> list[str]:
    """n, the losses with a cache of the last T tokens, 4 T and 16 T, the gain, and minus the others."""
    whole, window = 16 * train_len, f"{train_len} recomputed"
    at = [records.mean(model, whole, window)]
    at += [records.mean(model, n) for n in (4 * train_len, whole)]
    cells = [records.seeds(model), *(number(each, digits) for each in at)]
    cells.append(records.gain(model, whole, window=window))
    losses = records.losses(model, whole)
    return [*cells, *(records.difference(losses, other) for other in others)]


def cache(records: Records, given: list[list[Any]]) -> Lines:
    header = ["model", "n", "cache of 128", "of 512", "of 2,048", "gain"]
    lines = [[*header, "minus windows of 16 + FoX without it"]]
    for study, label, model in given:
        best = records.losses(f"{study}/windows_16_fox", 2048)
        lines.append([label, *with_counts(records, f"{study}/{model}", 128, [best])])
    return lines


def counts(records: Records, given: list[list[Any]]) -> Lines:
    """The same on the track's test text."""
    header = ["with counts", "n", "of 256", "of 1,024", "of 4,096", "gain"]
    lines = [[*header, "− windows + ALiBi without", "− softmax with them"]]
    names = ("hybrid_16_alibi_muon_lr=0.04", "counts/softmax_muon_lr=0.04")
    others = [records.on_test.losses(name, 4096) for name in names]
    for label, model in given:
        lines.append([label, *with_counts(records, f"counts/{model}", 256, others, digits=3)])
    return lines


def survey(records: Records, given: list[list[Any]]) -> Lines:
    """Losses over all tokens at scales A and B, and over the same targets at A, by length."""
    header = ["model", "n", "A, 256", "A, 4,096", "A, last 256 targets", "the same at 4,096"]
    lines = [[*header, "n", "B, 512", "B, 8,192"]]
    for label, model in given:
        cells = [label]
        for study, ends in (("A", (256, 4096)), ("B", (512, 8192))):
            name = f"{study}/{model}"
            if name not in records.models:
                cells += [DASH] * 3
                continue
            scaling = of_losses(records.models[name])
            cells.append(records.seeds(name))
            for measure in ("loss", "same_targets")[: 2 if study == "A" else 1]:
                at = [records.mean(name, n, "0", scaling, measure=measure) for n in ends]
                cells += map(number, at)
        lines.append(cells)
    return lines


def of_losses(rows: DataFrame) -> str:
    """The one RoPE scaling of a model's losses by length."""
    return str(rows[rows["measure"] == "same_targets"]["scaling"].iloc[0])


def formulas(records: Records, given: list[list[Any]]) -> Lines:
    """LSSAR's Tables 1 to 3 with Muon: each run minus softmax, the first line, in the paper and here."""
    header = ["row", "table", "paper, 1x", "paper − softmax", "1x", "1x − softmax"]
    lines = [[*header, "16x", "16x, NTK", "16x, window of T"]]
    settings = [(256, "0", "none"), (4096, "0", "none"), (4096, "0", "ntk"), (4096, "256", "none")]
    found = []
    for _, _, _, run in given:
        model = f"papers_muon/{run}"
        found.append([records.losses(model, *setting, measure="loss") for setting in settings])
    zero = found[0][0]
    for (label, table, theirs, _), losses in zip(given, found, strict=True):
        cells = [number(theirs, 3), number(theirs - given[0][2], 3, "+")] if theirs else [DASH] * 2
        cells += [mean_of(losses[0]), records.difference(losses[0], zero)]
        cells += [mean_of(each, 2) for each in losses[1:]]
        lines.append([label, table, *cells])
    return lines


def ssmax_seeds(records: Records, given: list[list[Any]]) -> Lines:
    """(b) and (e) minus (a), seed by seed, at θ x 50."""
    lines = [["at θ × 50", "seed", "1x", "2x", "4x", "8x", "16x"]]
    for label, run in given:
        for seed in (1, 2, 3):
            at = []
            for length in (256, 512, 1024, 2048, 4096):
                where = length, "0", "theta=500000", "loss"
                names = [f"papers/{each}_seed={seed}" for each in (run, "softmax")]
                both = [records.rows(name, *where)["value"].iloc[0] for name in names]
                at.append(number(both[0] - both[1], 2, "+"))
            lines.append([label, str(seed), *at])
    return lines


def gradients(records: Records, given: list[list[Any]]) -> Lines:
    lines = [
        ["attention", "p", "norm, median", "largest", "last loss", "largest n A", "as written"]
    ]
    for (kind,) in given:
        for p in (1, 3, 7, 15, 50, 100):
            model = f"gradients/{kind}_p{p}_stable"
            largest = "gradient norm, largest"
            measures = ("gradient norm, median", largest, "loss, last ten steps", "largest n A")
            at = [records.mean(model, 1024, measure=measure) for measure in measures]
            written = f"gradients/{kind}_p{p}_as_written"
            steps = records.mean(written, 1024, measure="steps that are finite")
            norm = records.mean(written, 1024, measure=largest)
            state = number(norm, 1) if steps == 120 else f"not finite at step {steps + 1:.0f}"
            cells = [number(each, digits) for each, digits in zip(at, (2, 1, 2, 0), strict=True)]
            lines.append([kind, str(p), *cells, state])
    return lines


FUNCTIONS: dict[str, Callable[[Records, list[list[Any]]], Lines]] = {
    "readme": readme,
    "board": board,
    "adamw": adamw,
    "optimiser": optimiser,
    "rounding": rounding,
    "half": half,
    "rates": rates,
    "steps": partial(by_group, group="steps"),
    "scale": partial(by_group, group="parameters"),
    "qk_norm": partial(by_group, group="trained at"),
    "ladder": ladder,
    "reach": reach,
    "documents": documents,
    "settings": settings,
    "cache": cache,
    "counts": counts,
    "survey": survey,
    "ssmax_seeds": ssmax_seeds,
    "formulas": formulas,
    "gradients": gradients,
}
PAGES = [FOLDER.parent / "README.md", *sorted(FOLDER.glob("*.md"))]


# ---------------------------------------------------------------- figures
DASHED = {"color": "black", "linestyle": "--", "marker": ""}
# label, model, rolling window and RoPE scaling
TRACK_LINES = (
    ("softmax, NTK", "softmax_muon_lr=0.04", "0", "ntk"),
    ("SSMax, NTK", "ssmax_qk_norm_muon_lr=0.02", "0", "ntk"),
    ("LSSAR, NTK", "lssar_muon_lr=0.02", "0", "ntk"),
    ("FoX", "fox_muon_lr=0.04", "0", "none"),
    ("stick-breaking", "stick_breaking_muon_lr=0.02", "0", "none"),
    ("windows + ALiBi", "hybrid_16_alibi_muon_lr=0.04", "0", "none"),
    ("softmax, rolling window of 256", "softmax_muon_lr=0.04", "256", "none"),
)
DEMO_LINES = (
    ("softmax, NTK", "demo/softmax", "0", "ntk"),
    ("SSMax, NTK", "demo/ssmax", "0", "ntk"),
    ("LSSAR", "demo/lssar", "0", "none"),
    ("windows + FoX", "demo/windows_16_fox", "0", "none"),
    ("softmax, rolling window of 128", "demo/softmax", "128", "none"),
)


def by_length(
    records: Records, lengths: tuple[int, ...], given: tuple[tuple[str, ...], ...]
) -> list[Curve]:
    """The line of the rolling window is dashed."""
    curves = []
    for label, model, window, scaling in given:
        at = [records.mean(model, n, window, scaling) for n in lengths]
        curves.append(Curve(label, lengths, at, style=DASHED if window != "0" else {}))
    return curves


def track_figure(records: Records, path: Path) -> None:
    curves = by_length(records.on_test, (256, 1024, 4096), TRACK_LINES)
    title = "Models of 1.3M parameters, trained at 256"
    y_label = "loss, nats a token, same targets"
    draw_curves(path, curves, title, y_label, [256], "tokens of context")


def demo_figure(records: Records, path: Path) -> None:
    """Each model with the RoPE scaling that is better for it at 16x, as eval_length.py draws it."""
    curves = by_length(records, (128, 256, 512, 1024, 2048), DEMO_LINES)
    title = "Byte-level models of 0.6M parameters, trained at 128"
    draw_curves(path, curves, title, "loss, nats a byte", [128], "bytes of context")


def position_figure(records: Records, path: Path) -> None:
    """SSMax's Figure 5: the loss by position, in parts of 128 tokens at least."""
    curves = []
    models = [(label, run, "0", "theta=500000") for label, run, _ in TABLES["ssmax_muon"]["lines"]]
    models.append(("(a), window of 256", "papers_muon/softmax", "256", "none"))
    for label, run, window, scaling in models:
        rows = select(records.models[run], length=4096, window=window, scaling=scaling)
        found = rows["measure"].str.extract(r"^loss\[(\d+):(\d+)\]$").astype(float)
        parts = rows.assign(part=found[0] // 128, center=found.mean(axis=1))
        means = parts.dropna(subset=["part"]).groupby("part")[["center", "value"]].mean()
        style = DASHED if window != "0" else {"marker": ""}
        curves.append(Curve(label, [*means["center"]], [*means["value"]], style=style))
    title = "Loss by position at 50 times the base of RoPE, trained at 256"
    draw_curves(path, curves, title, "loss, nats a byte", [256], "position (bytes)")


FIGURES: dict[str, Callable[[Records, Path], None]] = {
    "track.png": track_figure,
    "demo.png": demo_figure,
    "position.png": position_figure,
}


# ---------------------------------------------------------------- pages
def redraw(text: str, records: Records) -> str:
    """A page with its tables drawn again. Raises UserError: a table is unknown."""

    def draw(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise UserError(f"table {match[2]}: expected one of {', '.join(TABLES)}")
        return f"{match[1]}{draw_table(match[2], records)}{match[3]}"

    return MARKED.sub(draw, text)


def read_records() -> Records:
    return Records(read_rows(FOLDER / "rows.csv.gz"))


def main() -> None:
    ArgumentParser(__doc__).parse_args()
    records = read_records()
    for page in PAGES:
        write_atomically(page, redraw(read_text(page), records).encode())
    for name, draw in FIGURES.items():
        draw(records, FOLDER / "figures" / name)


if __name__ == "__main__":
    run_main(main)
