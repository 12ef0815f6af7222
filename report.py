"""The papers' tables and figures from run folders: their numbers beside ours.

    python report.py runs/*                                     # all three papers -> runs/report/
    python report.py runs/small --out results/small             # a folder of runs
    python report.py runs/lssa* runs/softmax* --paper lssar

Writes report.md, report.json (every number of ours) and PNGs into --out. A row of a table is an experiment,
a file in configs/; runs belong to it if their attention, loss and kind of optimiser are that file's, whatever
their size and name. The size is said with every number: runs of one scale share a letter, and runs that
differ in their seed alone share a line, mean ± standard deviation. A row without a run has a dash. Losses
are those of eval_length.py at multiples of the training length, in nats per token. Only finished runs count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attention import norm_softmax_gamma
from config import Config, expand_sweep, load_config
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import atomic_file, write_atomically
from model import GPT, RopeKind
from training.checkpoint import load_model
from training.run_log import read_metrics

CONFIGS = Path(__file__).resolve().parent / "configs"
FACTORS = (1, 2, 4, 8, 16)  # times the training length
DASH = "–"

# ---------------------------------------------------------------- what the papers say

# Only numbers that we could read, each with its source: never a memory, never a guess.
SOURCES = {
    "a": "The LSSAR paper's validation loss at the training length, 124M on FineWeb-10B.",
    "b": "The LSSAR paper's losses at 124M as a note on it quotes them, to two decimals "
    "(en.papernotes.org, ICML 2026); not checked against the paper, and whether RoPE was scaled is not said.",
}
PUBLISHED: dict[str, dict[int, str]] = {  # config -> factor -> number and source
    "lssar_paper/table1_softmax": {1: "3.1911 [a]"},
    "lssar_paper/table2_scenario4": {1: "3.1911 [a]"},
    "lssar_paper/table3_exp": {1: "3.1911 [a]"},
    "lssar_paper/table3_softplus": {1: "3.1901 [a]"},
    "lssar_paper/table4_softmax": {1: "3.1911 [a]", 2: "4.17 [b]", 4: "5.45 [b]", 8: "6.28 [b]"},
    "lssar_paper/table4_sigmoid_log_train_len": {
        1: "3.19 [b]", 2: "7.46 [b]", 4: "11.84 [b]", 8: "14.50 [b]"
    },
    "lssar_paper/table4_relu_wortsman": {1: "3.21 [b]", 2: "6.27 [b]", 4: "8.50 [b]", 8: "10.35 [b]"},
    "lssar_paper/table4_lssa": {1: "3.19 [b]", 2: "4.13 [b]", 4: "5.30 [b]", 8: "5.94 [b]"},
    "lssar_paper/table4_softmax_p15": {8: "7.02 [b]"},
    "lssar_paper/table4_sigmoid_log_n_l1_p15": {8: "3.86 [b]"},
    "lssar_paper/table4_lssa_p3": {1: "3.18 [b]", 2: "4.24 [b]", 4: "5.41 [b]", 8: "6.30 [b]"},
    "lssar_paper/table4_lssa_p15": {1: "3.19 [b]", 2: "3.19 [b]", 4: "3.23 [b]", 8: "3.32 [b]"},
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    title: str
    folder: str
    files: str  # names without .toml, in the order of the rows


TABLES = {
    "lssar": [
        Table("LSSAR, Table 1", "lssar_paper",
              "table1_softmax table1_inverse table1_recentred table1_recentred_l1"),
        Table("LSSAR, Table 2", "lssar_paper",
              "table2_scenario1 table2_scenario2 table2_scenario3 table2_scenario4"),
        Table("LSSAR, Table 3", "lssar_paper",
              "table3_relu table3_relu2 table3_relu6 table3_gelu table3_sigmoid table3_softplus table3_mish "
              "table3_exp"),
        Table("LSSAR, Table 4", "lssar_paper",
              "table4_softmax table4_sigmoid_log_train_len table4_sigmoid_log_n table4_sigmoid_log_n_l1 "
              "table4_relu_wortsman table4_relu_li table4_relu_shen table4_lssa "
              "table4_softmax_p3 table4_sigmoid_log_n_l1_p3 table4_lssa_p3 "
              "table4_softmax_p15 table4_sigmoid_log_n_l1_p15 table4_lssa_p15"),
        Table("LSSAR, Figure 2", "lssar_paper", "figure2_lssa figure2_softmax"),
    ],
    "ssmax": [
        Table("SSMax, models (a) to (f), and p_n of Section 2.1", "ssmax_paper",
              "a_softmax_162m b_ssmax_162m c_ssmax_s1_162m d_ssmax_bias_162m e_after_pretraining_162m "
              "f_during_pretraining_162m pn_162m"),
    ],
    "normsoftmax": [
        Table("NormSoftmax: gamma and tau", "normsoftmax_paper", "softmax norm_softmax gamma tau"),
        Table("NormSoftmax: variants and LogitNorm", "normsoftmax_paper", "f1 f2 logit_norm"),
        Table("NormSoftmax: robustness", "normsoftmax_paper", "no_warmup no_weight_decay sgd"),
        Table("NormSoftmax: heads, depth, width", "normsoftmax_paper", "heads depth width"),
        Table("NormSoftmax: in the loss", "normsoftmax_paper", "loss_norm_softmax loss_tau loss_logit_norm"),
    ],
}  # fmt: skip
FIGURE1 = ("lssar_paper/table4_softmax", "lssar_paper/table4_lssa_p15")
FIGURE2 = {"LSSA": "lssar_paper/figure2_lssa", "softmax": "lssar_paper/figure2_softmax"}


@dataclass(frozen=True)
class Row:
    """One experiment of a paper."""

    file: str  # in configs/, without .toml
    label: str
    config: Config
    exact: dict[str, Any]  # keys of the model's shape that the experiment is about


def read_rows(folder: str, files: str) -> list[Row]:
    rows = []
    for name in files.split():
        path = CONFIGS / folder / f"{name}.toml"
        for chosen in expand_sweep(path):
            config = load_config(path, chosen)
            swept = dict(zip(chosen[:-2:2], chosen[1:-2:2], strict=True))  # --key: value
            keys = [key[2:] for key in swept if key.startswith("--model.")]
            exact = {key: getattr(config.model, key.split(".")[1]) for key in keys}
            rows.append(Row(f"{folder}/{name}", config.name, config, exact))
    return rows


# ---------------------------------------------------------------- our runs


@dataclass(frozen=True)
class Run:
    """A run folder that is finished."""

    folder: Path
    config: Config
    validations: list[tuple[int, float]]  # (step, loss)
    evaluations: dict[str, dict[str, Any]]  # RoPE scaling -> what eval_length.py wrote
    steps_before: int  # of the run whose weights it started from

    @property
    def train_len(self) -> int:
        return self.config.train.seq_len

    def loss(self, rope: str, factor: int) -> float | None:
        """At `factor` times the training length, over all tokens."""
        for row in self.evaluations.get(rope, {"lengths": []})["lengths"]:
            if row["length"] == factor * self.train_len and row["reason"] is None:
                return row["loss"]
        return None

    @cached_property
    def experiment(self) -> str:
        return experiment(self.config)

    @cached_property
    def scale(self) -> str:
        m, t = self.config.model, self.config.train
        steps = self.steps_before + t.max_steps
        kind = f"{m.norm}, {m.mlp}, {'tied' if m.tie_embeddings else 'untied'} embeddings"
        return (
            f"{m.n_layer} layers, {m.n_head} heads of {m.head_dim}, {kind}, vocabulary {m.vocab_size}; "
            f"T = {t.seq_len}; {steps:,} steps of {t.batch_tokens:,} tokens "
            f"({steps * t.batch_tokens / 1e6:,.1f}M) from {self.config.data.dir}"
        )


def experiment(config: Config) -> str:
    """What of a config makes it the experiment that it is, whatever its size."""
    a = config.attention
    attention = a.model_dump(exclude_none=True, exclude={"engine", "compile_rows", "gamma", "gamma_factor"})
    if a.normaliser == "norm_softmax":  # the same numbers may be written in several ways
        attention["tau"] = a.tau or 1.0
        if a.variant != "affine":
            attention["gamma"] = str(norm_softmax_gamma(a, config.model.head_dim))
    if config.init_from:
        attention.pop("scale_init", None)  # depends on the length
    t, o = config.train, config.optimizer
    is_norm = t.loss == "norm_softmax"
    kind = {
        "loss": (t.loss, t.loss_gamma or "inf", t.loss_tau or 1.0) if is_norm else (t.loss, t.loss_tau),
        "optimizer": (o.name, t.max_steps > 0 and o.warmup_steps == 0, o.weight_decay == 0),
        "start": (config.init_from is not None, t.max_steps == 0),
    }
    return json.dumps(attention | kind, sort_keys=True)


def read_runs(sources: list[str]) -> list[Run]:
    """The finished runs among folders, or in them; says what it leaves out.

    Raises:
        UserError: there is none at all, or a run folder cannot be read.
    """
    folders: list[Path] = []
    for source in map(Path, sources):
        inner = sorted(path.parent for path in source.glob("*/config.toml"))
        if (source / "config.toml").is_file():
            folders.append(source)
        elif inner:
            folders += inner
        elif not source.exists():
            raise UserError(f"{source}: no such run folder")
    runs = [run for folder in dict.fromkeys(folders) if (run := read_run(folder)) is not None]
    if not runs:
        raise UserError(f"{' '.join(sources)}: no finished run (train.py makes them) in these folders")
    return runs


def read_run(folder: Path) -> Run | None:
    """A run, or None with a word on the console if it is not finished."""
    config = load_config(folder / "config.toml")
    validations, evaluations = [], {}
    for record in read_metrics(folder):
        if record.get("val_loss") is not None:
            validations.append((record["step"], record["val_loss"]))
    if not validations or validations[-1][0] != config.train.max_steps:
        print(f"left out: {folder} is not finished")
        return None
    for path in sorted(folder.glob("eval_length*.json")):
        result = json.loads(path.read_text())
        if result["step"] == config.train.max_steps:
            rope = result["rope"]
            evaluations[rope["kind"] + (f" = {rope['theta']:g}" if rope["theta"] else "")] = result
    account = folder / "init_from.txt"
    before = re.search(r", step (\d+)$", account.read_text(), re.MULTILINE) if account.exists() else None
    return Run(folder, config, validations, evaluations, int(before[1]) if before else 0)


def n_params(config: Config) -> int:
    with torch.device("meta"):
        return GPT(config).n_params()


@dataclass(frozen=True)
class Group:
    """Runs of one experiment at one scale: they differ in their seed."""

    scale: str  # its letter
    runs: list[Run]

    def values(self, rope: str, factor: int) -> list[float]:
        losses = [run.loss(rope, factor) for run in self.runs]
        return [loss for loss in losses if loss is not None]


class Ours:
    """All runs, grouped by scale and experiment."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        scales = sorted({run.scale for run in runs}, key=lambda s: -sum(run.scale == s for run in runs))
        self.letters = {scale: letter(i) for i, scale in enumerate(scales)}
        self.groups: dict[tuple[str, str], Group] = {}
        for run in runs:
            key = (self.letters[run.scale], run.experiment)
            self.groups.setdefault(key, Group(key[0], [])).runs.append(run)

    def of(self, row: Row) -> list[Group]:
        """The groups that belong to a row of a paper, one for each scale."""
        wanted = experiment(row.config)
        groups = [group for (_, name), group in sorted(self.groups.items()) if name == wanted]
        return [
            group
            for group in groups
            if all(getattr(group.runs[0].config.model, k.split(".")[1]) == v for k, v in row.exact.items())
        ]

    def at(self, scale: str) -> list[Group]:
        return [group for group in self.groups.values() if group.scale == scale]

    def ropes(self) -> list[str]:
        """The RoPE scalings that runs were evaluated with, in the order of --rope."""
        found = {rope for run in self.runs for rope in run.evaluations}
        return sorted(found, key=lambda rope: (get_args(RopeKind).index(rope.split(" ")[0]), rope))


def letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"S{i}"


# ---------------------------------------------------------------- the tables


def mean_and_spread(values: list[float], digits: int = 4) -> str:
    if not values:
        return DASH
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean + (f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def markdown(header: list[str], rows: Iterable[list[str]], n_left: int) -> str:
    """A table, its first columns to the left, the others to the right."""
    align = ["---" if i < n_left else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, align, *rows])


def paper_table(table: Table, ours: Ours) -> str:
    """A paper's table: for each row its published numbers, then ours for each scale and RoPE scaling."""
    lines = []
    for row in read_rows(table.folder, table.files):
        label = f"`{row.config.name}`"
        published, groups = PUBLISHED.get(row.file), ours.of(row)
        if published:
            lines.append([label, "the paper", *(published.get(factor, "") for factor in FACTORS)])
        elif groups:
            lines.append([label, "the paper", "not at hand", *[""] * 4])
        for group in groups:
            who = f"ours, scale {group.scale}" + (f", {n} seeds" if (n := len(group.runs)) > 1 else "")
            for rope in ours.ropes():
                cells = [mean_and_spread(group.values(rope, factor)) for factor in FACTORS]
                lines.append(["", f"{who}, RoPE {rope}", *cells])
            if not any(run.evaluations for run in group.runs):
                final = mean_and_spread([run.validations[-1][1] for run in group.runs])
                lines.append(["", f"{who}, validation in training", final, *[DASH] * 4])
        if not groups:
            missing = ["", "ours"] if published else [label, "the paper: not at hand; ours"]
            lines.append([*missing, *[DASH] * 5])
    header = [f"row (`configs/{table.folder}/`)", "whose", *(f"{factor}x" for factor in FACTORS)]
    return f"### {table.title}\n\n{markdown(header, lines, 2)}"


def all_runs_table(ours: Ours, scale: str) -> str:
    """Every experiment of a scale: losses at 1x and 16x, and what length costs, for each RoPE scaling."""
    ropes = ours.ropes()
    header = ["run", "seeds", "parameters", "validation"]
    header += [f"{what} ({rope})" for rope in ropes for what in ("1x", "16x", "16x - 1x")]
    lines = []
    for group in sorted(ours.at(scale), key=lambda g: cost(g, ropes[0]) if ropes else 0.0):
        cells = [mean_and_spread([run.validations[-1][1] for run in group.runs])]
        for rope in ropes:
            pairs = [(run.loss(rope, 1), run.loss(rope, 16)) for run in group.runs]
            costs = [b - a for a, b in pairs if a is not None and b is not None]
            cells += [mean_and_spread(group.values(rope, f)) for f in (1, 16)] + [mean_and_spread(costs)]
        seeds = ", ".join(str(run.config.seed) for run in group.runs)
        lines.append([name_of(group), seeds, f"{n_params(group.runs[0].config):,}", *cells])
    return markdown(header, lines, 1)


def cost(group: Group, rope: str) -> float:
    """What 16 times the training length costs; inf where it is not known."""
    values = [group.values(rope, factor) for factor in (1, 16)]
    return statistics.fmean(values[1]) - statistics.fmean(values[0]) if all(values) else math.inf


def name_of(group: Group) -> str:
    """The runs' common name: that of the first, without its seed."""
    return re.sub(r"_?seed=?\d+", "", group.runs[0].config.name)


def scales_text(ours: Ours) -> str:
    lines = []
    papers = {"gpt2_124m.toml": "the LSSAR paper's", "ssmax_paper/base_162m.toml": "the SSMax paper's"}
    for scale, name in ours.letters.items():
        runs = [run for run in ours.runs if run.scale == scale]
        params = sorted({n_params(run.config) for run in runs})
        size = " to ".join(f"{n:,}" for n in dict.fromkeys((params[0], params[-1])))
        whose = [
            whose
            for file, whose in papers.items()
            if Run(Path(), load_config(CONFIGS / file), [], {}, 0).scale == scale
        ]
        owner = f"This is {whose[0]} scale." if whose else "**This is no paper's scale**: it tells of trends."
        tokens = {run.evaluations[r]["data"]["tokens"] for run in runs for r in run.evaluations}
        evaluated = f" Evaluated on {' or '.join(f'{n:,}' for n in sorted(tokens))} tokens." if tokens else ""
        lines.append(f"- **{name}** ({len(runs)} runs): {scale}; {size} parameters.{evaluated} {owner}")
    return "\n".join(lines)


def write_report(ours: Ours, papers: list[str], pictures: dict[str, str], out: Path) -> None:
    """report.md."""
    parts = [
        "# Report",
        "Made by `report.py` from run folders. Losses are in nats per token of each run's own tokeniser, at "
        "multiples of the training length; ± is the standard deviation over seeds. A dash: there is no such "
        "run, or it refuses the length.",
        "## Scales\n\n" + scales_text(ours),
    ]
    for name in ours.letters.values():
        parts.append(f"## All runs of scale {name}, by what length costs\n\n{all_runs_table(ours, name)}")
    parts += [f"![{caption}]({file})\n\n{caption}." for file, caption in pictures.items()]
    for paper in papers:
        parts += [paper_table(table, ours) for table in TABLES[paper]]
    parts.append("## Published numbers\n\n" + "\n".join(f"- [{k}] {text}" for k, text in SOURCES.items()))
    write_atomically(out / "report.md", ("\n\n".join(parts) + "\n").encode())


def write_json(ours: Ours, fits: list[dict[str, Any]], out: Path) -> None:
    """report.json: all that the tables and figures are made of."""
    runs = [
        {
            "run": run.config.name,
            "scale": ours.letters[run.scale],
            "seed": run.config.seed,
            "parameters": n_params(run.config),
            "attention": run.config.attention.model_dump(exclude_none=True),
            "validations": run.validations,
            "lengths": {rope: result["lengths"] for rope, result in run.evaluations.items()},
        }
        for run in ours.runs
    ]
    scales = {name: scale for scale, name in ours.letters.items()}
    content = {"scales": scales, "published": PUBLISHED, "sources": SOURCES, "runs": runs, "p_n": fits}
    write_atomically(out / "report.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


# ---------------------------------------------------------------- the figures


def new_axes(title: str, xlabel: str, ylabel: str, tall: float = 4.5) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, tall), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def save(figure: Figure, path: Path, legend: bool = True) -> None:
    if legend:
        n = len(figure.axes[0].get_legend_handles_labels()[1])
        figure.legend(loc="outside lower center", ncols=min(n, 3), frameon=False)
    with atomic_file(path) as f:
        figure.savefig(f, format="png", dpi=130)


def style(i: int) -> dict[str, Any]:
    """Ten colours, and markers that go on telling curves apart."""
    return {"color": f"C{i % 10}", "marker": "osD^vP*Xph<>"[i % 12], "markersize": 4, "linewidth": 1.5}


def draw_length(groups: list[Group], rope: str, title: str, path: Path) -> bool:
    """Loss against length, mean and deviation over seeds (LSSAR, Figure 1). False: nothing to draw."""
    figure, axes = new_axes(title, f"length (tokens), RoPE scaling {rope}", "loss (nats per token)")
    drawn = [group for group in groups if group.values(rope, 1)]
    for i, group in enumerate(drawn):
        known = [(f, values) for f in FACTORS if (values := group.values(rope, f))]
        xs = [f * group.runs[0].train_len for f, _ in known]
        means = [statistics.fmean(values) for _, values in known]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in known]
        axes.errorbar(xs, means, spread, capsize=3, label=name_of(group), **style(i))
    axes.set_xscale("log", base=2)
    if drawn:
        ticks = [f * drawn[0].runs[0].train_len for f in FACTORS]
        axes.set_xticks(ticks, map(str, ticks))
        save(figure, path)
    return bool(drawn)


def draw_powers(ours: Ours, scale: str, rope: str, path: Path) -> bool:
    """Loss at each length against the power p (LSSAR, Figure 2). False: fewer than two powers."""
    figure, axes = new_axes(
        f"LSSAR, Figure 2 (scale {scale}, RoPE {rope})", "re-weighting power p", "loss (nats per token)"
    )
    powers: set[int] = set()
    for name, dashes in zip(FIGURE2, ("-", "--"), strict=True):
        by_power: dict[int, Group] = {}
        for row in read_rows(*FIGURE2[name].split("/")):
            for group in ours.of(row):
                if group.scale == scale and group.values(rope, 1):
                    by_power[row.config.attention.reweight_p or 0] = group
        powers |= by_power.keys()
        for i, factor in enumerate(FACTORS):
            known = {p: group.values(rope, factor) for p, group in by_power.items()}
            means = {p: statistics.fmean(values) for p, values in known.items() if values}
            if means:
                label = f"{name}, {factor}x"
                axes.plot([*means], [*means.values()], linestyle=dashes, label=label, **style(i))
    axes.set_xscale("log")
    axes.set_xticks(sorted(powers), map(str, sorted(powers)))
    axes.set_xticks([], minor=True)
    if len(powers) > 1:
        save(figure, path)
    return len(powers) > 1


def draw_learning(groups: list[Group], title: str, path: Path) -> bool:
    """Validation loss against step, mean over seeds. False: no run has a curve."""
    figure, axes = new_axes(title, "step", "validation loss (nats per token)", 5.5)
    groups = [group for group in groups if all(len(run.validations) > 1 for run in group.runs)]
    for i, group in enumerate(groups):
        before = group.runs[0].steps_before
        curves = [dict(run.validations) for run in group.runs]
        steps = [step for step in curves[0] if all(step in curve for curve in curves)]
        means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
        axes.plot([before + step for step in steps], means, label=name_of(group), **style(i))
    if groups:
        save(figure, path)
    return bool(groups)


def draw_positions(groups: list[Group], rope: str, title: str, path: Path) -> bool:
    """Loss by place in the longest window, mean over seeds. False: nothing was evaluated."""
    figure, axes = new_axes(title, f"position, windows of 16x, RoPE {rope}", "loss (nats per token)", 5.5)
    groups = [group for group in groups if group.values(rope, 16)]
    for i, group in enumerate(groups):
        runs = [run for run in group.runs if run.loss(rope, 16) is not None]  # not all may be evaluated
        buckets = [run.evaluations[rope]["lengths"][-1]["buckets"] for run in runs]
        places = [f"{bucket['from']}-{bucket['to'] - 1}" for bucket in buckets[0]]
        means = [statistics.fmean(b["loss"] for b in at) for at in zip(*buckets, strict=True)]
        axes.plot(places, means, label=name_of(group), **style(i))
    if groups:
        save(figure, path)
    return bool(groups)


def draw_fading(path: Path) -> None:
    """SSMax, Figure 1: the largest weight of (-2, ..., -2, 3) against n, softmax and SSMax with s = 0.43."""
    n = torch.logspace(0.5, 6, 200, dtype=torch.float64)
    figure, axes = new_axes(
        "SSMax, Figure 1: one element of +3 among n - 1 of -2", "n, elements of the vector", "largest weight"
    )
    for label, scale in (("softmax", torch.ones_like(n)), ("SSMax, s = 0.43", 0.43 * n.log())):
        axes.plot(n, largest_weight(n, 5.0 * scale), label=label)
    axes.set_xscale("log")
    save(figure, path)


def draw_threshold(path: Path) -> None:
    """The largest weight against its element's lead: half at ln n for softmax, 1 / s for SSMax (Figure 3)."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    delta = torch.linspace(0, 15, 300, dtype=torch.float64)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, s in zip(panels, (None, 0.43), strict=True):
        for n in (10, 100, 1000, 10_000, 100_000):
            scale = 1.0 if s is None else s * math.log(n)
            axes.plot(delta, largest_weight(torch.tensor(float(n)), scale * delta), label=f"n = {n:,}")
        if s is not None:
            axes.axvline(1 / s, color="0.4", linestyle="--", linewidth=1, label="1 / s")
        axes.set(title="softmax" if s is None else f"SSMax, s = {s}", xlabel="largest - all other elements")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panels[0].set_ylabel("largest weight")
    save(figure, path, legend=False)


def largest_weight(n: Tensor, lead: Tensor) -> Tensor:
    """Softmax's largest weight, if it leads n - 1 equal elements by `lead`."""
    return 1 / (1 + (n - 1) * (-lead).exp())


def draw_p_n(run: Run, title: str, path: Path) -> dict[str, Any]:
    """SSMax, Section 2.1: a run's p_n and the fit a1 ln n + a2; returns the fit."""
    p_n = dict(load_model(run.folder).model.named_parameters())["blocks.0.attention.normaliser.p_n"].detach()
    a1, a2, r2 = fit_log(p_n.double())
    n = torch.arange(1, len(p_n) + 1)
    figure, axes = new_axes(title, "n, keys that a row sees", "p_n")
    axes.plot(n, p_n, ".", markersize=4, label="learned p_n")
    axes.plot(n, a1 * n.log() + a2, label=f"{a1:.4f} ln n + {a2:.4f}, R² = {r2:.3f}")
    save(figure, path)
    return {"run": run.config.name, "a1": a1, "a2": a2, "r2": r2}


def fit_log(p_n: Tensor) -> tuple[float, float, float]:
    """Least squares a1 ln n + a2 to p_n, (T,), and R²; n = 1 is left out: a single key has no gradient."""
    x = torch.arange(2, len(p_n) + 1, dtype=p_n.dtype).log()
    y = p_n[1:]
    a1 = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    a2 = y.mean() - a1 * x.mean()
    rest = (y - a1 * x - a2).square().sum() / (y - y.mean()).square().sum()
    return a1.item(), a2.item(), 1 - rest.item()


def draw_all(ours: Ours, papers: list[str], out: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """All pictures: file -> caption; and the fits of p_n."""
    drawn, fits = {}, []
    for scale in ours.letters.values():
        groups, at = ours.at(scale), f"(scale {scale})"
        for rope in ours.ropes():
            name = f"{scale}_{rope.replace(' = ', '')}.png"
            rows = [row for file in FIGURE1 for row in read_rows(*file.split("/"))]
            pair = [group for row in rows for group in ours.of(row) if group.scale == scale]
            title = f"LSSAR, Figure 1: softmax and LSSAR {at}"
            if "lssar" in papers and draw_length(pair, rope, title, out / f"lssar_figure1_{name}"):
                drawn[f"lssar_figure1_{name}"] = f"{title}, RoPE {rope}"
            if "lssar" in papers and draw_powers(ours, scale, rope, out / f"lssar_figure2_{name}"):
                drawn[f"lssar_figure2_{name}"] = f"LSSAR, Figure 2: the power p {at}, RoPE {rope}"
            if draw_positions(groups, rope, f"Loss by position {at}", out / f"positions_{name}"):
                drawn[f"positions_{name}"] = f"Loss by position in windows of 16x {at}, RoPE {rope}"
        if draw_learning(groups, f"Learning curves {at}", out / f"learning_{scale}.png"):
            drawn[f"learning_{scale}.png"] = f"Validation loss during training {at}"
        for run in (run for group in groups for run in group.runs) if "ssmax" in papers else ():
            if run.config.attention.normaliser == "ssmax_pn":
                name, title = f"ssmax_p_n_{scale}_{run.config.name}.png", f"SSMax, Section 2.1: p_n {at}"
                fit = draw_p_n(run, title, out / name)
                fits.append(fit)
                drawn[name] = f"{title}: {fit['a1']:.4f} ln n + {fit['a2']:.4f}, R² = {fit['r2']:.3f}"
    if "ssmax" in papers:
        draw_fading(out / "ssmax_figure1.png")
        draw_threshold(out / "ssmax_figure3.png")
        drawn["ssmax_figure1.png"] = (
            "SSMax, Figure 1, from the formulas: attention fades with n, SSMax does not"
        )
        drawn["ssmax_figure3.png"] = (
            "After SSMax, Figure 3, from the formulas: the lead at which one element takes the weight grows "
            "with n for softmax and stays near 1 / s for SSMax (the lengths and s are ours)"
        )
    return drawn, fits


# ---------------------------------------------------------------- command line


def main() -> None:
    args = parse_args()
    papers = list(TABLES) if args.paper is None else [args.paper]
    ours = Ours(read_runs(args.runs))
    out = Path(args.out) if args.out else default_out(ours.runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: cannot be made: {e.strerror}") from None
    pictures, fits = draw_all(ours, papers, out)
    write_report(ours, papers, pictures, out)
    write_json(ours, fits, out)
    print("\n".join(f"wrote {out / name}" for name in ["report.md", "report.json", *pictures]))


def default_out(runs: list[Run]) -> Path:
    """report/ in the folder that holds the runs."""
    return Path(os.path.commonpath([run.folder.resolve().parent for run in runs])) / "report"


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of run folders")
    parser.add_argument("--paper", choices=list(TABLES), help="only this paper (default: all three)")
    parser.add_argument("--out", metavar="DIR", help="(default: report/ in the folder that holds the runs)")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
