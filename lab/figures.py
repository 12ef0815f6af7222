"""The report's figures: LSSAR's 1 and 2, SSMax's 2 (p_n) and 4, NormSoftmax's 2, 3a and 4, each scale's
learning curves and positions.

A figure is None where the runs have nothing to draw.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from evals.output import MARKERS
from infra.files import read_jsonl
from lab.runs import FACTORS, FinishedRun, Group, RunIndex
from lab.tables import read_published, read_rows
from training.checkpoint import load_model

LOSS = "loss (nats per token)"


def new_axes(title: str, xlabel: str, ylabel: str, height: float = 4.5) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    return figure, axes


def with_legend(figure: Figure, ncols: int = 3) -> Figure | None:
    """A legend below the axes; None if nothing is drawn."""
    n = len(figure.axes[0].get_legend_handles_labels()[1])
    if not n:
        return None
    figure.legend(loc="outside lower center", ncols=min(n, ncols), frameon=False)
    return figure


def draw_means(axes: Any, i: int, label: str, values: dict[Any, list[float]], linestyle: str = "-") -> None:
    """Curve i: means over seeds of the values at each x, with their standard deviation."""
    means = [statistics.fmean(losses) for losses in values.values()]
    spread = [statistics.stdev(losses) if len(losses) > 1 else math.nan for losses in values.values()]
    style = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "markersize": 4, "linewidth": 1.5}
    axes.errorbar([*values], means, spread, capsize=3, label=label, linestyle=linestyle, **style)


def length_figure(groups: list[Group], rope: str, title: str) -> Figure | None:
    """Loss against length (LSSAR, Figure 1)."""
    figure, axes = new_axes(title, "length (tokens)", LOSS)
    axes.set_xscale("log", base=2)
    for i, group in enumerate(group for group in groups if group.losses(rope, 1)):
        lengths = [factor * group.runs[0].config.train.seq_len for factor in FACTORS]
        known = zip(lengths, (group.losses(rope, factor) for factor in FACTORS), strict=True)
        draw_means(axes, i, group.name, {length: losses for length, losses in known if losses})
        axes.set_xticks(lengths, map(str, lengths))
    return with_legend(figure)


def powers_figure(index: RunIndex, scale: str, rope: str, title: str) -> Figure | None:
    """Loss at each length against the power p (LSSAR, Figure 2). None: fewer than two powers."""
    figure, axes = new_axes(title, "re-weighting power p", LOSS)
    powers: set[int] = set()
    for name, linestyle in (("LSSA", "-"), ("softmax", "--")):
        by_power = {
            row.config.attention.reweight_p: group
            for row in read_rows("lssar_paper", f"figure2_{name.lower()}")
            for group in index.of_row(row)
            if group.scale == scale and group.losses(rope, 1)
        }
        powers |= by_power.keys()
        for i, factor in enumerate(FACTORS):
            known = {p: losses for p, group in by_power.items() if (losses := group.losses(rope, factor))}
            if known:
                draw_means(axes, i, f"{name}, {factor}x", known, linestyle)
    axes.set_xscale("log")
    axes.set_xticks(sorted(powers), map(str, sorted(powers)))
    axes.set_xticks([], minor=True)
    return with_legend(figure) if len(powers) > 1 else None


def learning_figure(groups: list[Group], title: str) -> Figure | None:
    """Validation loss against step."""
    figure, axes = new_axes(title, "step", f"validation {LOSS}", 5.5)
    for i, group in enumerate(g for g in groups if all(len(run.validations) > 1 for run in g.runs)):
        before, curves = group.runs[0].steps_before, [dict(run.validations) for run in group.runs]
        steps = [step for step in curves[0] if all(step in curve for curve in curves)]
        draw_means(axes, i, group.name, {before + step: [curve[step] for curve in curves] for step in steps})
    return with_legend(figure)


def positions_figure(groups: list[Group], rope: str, title: str) -> Figure | None:
    """Loss by position in windows of 16x."""
    figure, axes = new_axes(title, "position", LOSS, 5.5)
    for i, group in enumerate(group for group in groups if group.losses(rope, 16)):
        runs = [run for run in group.runs if run.loss(rope, 16) is not None]  # not all may be evaluated
        known: dict[str, list[float]] = {}
        entries = [e for run in runs for e in run.evaluations[rope]["lengths"]]
        longest = 16 * group.runs[0].config.train.seq_len
        for bucket in (b for e in entries if e["length"] == longest for b in e["buckets"]):
            known.setdefault(f"{bucket['from']}-{bucket['to'] - 1}", []).append(bucket["loss"])
        draw_means(axes, i, group.name, known)
    return with_legend(figure)


def logged(run: FinishedRun, key: str) -> dict[int, Any]:
    """Step -> what log.attention_every recorded."""
    return {r["step"]: r[key] for r in read_jsonl(run.folder / "metrics.jsonl") if r.get(key) is not None}


def attention_figure(run: FinishedRun, title: str) -> Figure | None:
    """Each layer's standard deviation of q.k and entropy against step (NormSoftmax, Figures 2a and 4)."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, key in ((left, "qk_std"), (right, "entropy")):
        values = logged(run, key)
        for layer in next(iter(values.values()), {}):
            label = f"layer {int(layer[6:]) + 1}" if axes is left else None
            axes.plot(values.keys(), [by_layer[layer] for by_layer in values.values()], label=label)
        axes.grid(alpha=0.3)
    left.set(title="Figure 2a", xlabel="step", ylabel="standard deviation of q.k, unscaled", yscale="log")
    right.set(title="Figure 4", xlabel="step", ylabel="entropy of the weights (nats)")
    right.set_ylim(0, math.log(run.config.train.seq_len))  # up to uniform weights, on one scale for all runs
    left.axhline(math.sqrt(run.config.model.head_dim), color="k", linestyle="--", label="√d")
    figure.suptitle(title)
    return with_legend(figure) if logged(run, "qk_std") else None


def logits_figure(groups: list[Group], title: str) -> Figure | None:
    """The standard deviation of the logits against step (NormSoftmax, Figure 2b)."""
    figure, axes = new_axes(title, "step", "standard deviation of the logits")
    axes.set_yscale("log")
    for group in groups:
        if values := logged(group.runs[0], "logit_std"):
            axes.plot(values.keys(), values.values(), label=group.name)
    return with_legend(figure)


class LogFit(NamedTuple):
    """A run's learned p_n, (T,), and its least-squares fit a1 ln n + a2 (SSMax, Section 2.1)."""

    run: FinishedRun
    p_n: Tensor
    a1: float
    a2: float
    r2: float

    def __str__(self) -> str:
        return f"{self.a1:.4f} ln n + {self.a2:.4f}, R² = {self.r2:.3f}"


def fit_p_n(run: FinishedRun) -> LogFit:
    parameters = dict(load_model(run.folder).model.named_parameters())
    p_n = parameters["blocks.0.attention.normaliser.p_n"].detach().double()
    return LogFit(run, p_n, *fit_log(p_n))


def fit_log(p_n: Tensor) -> tuple[float, float, float]:
    """a1, a2, R². n = 1 is left out: a single key has no gradient."""
    x, y = np.log(np.arange(2, len(p_n) + 1)), p_n[1:].numpy()
    a1, a2 = np.polyfit(x, y, 1).tolist()
    return a1, a2, float(np.corrcoef(x, y)[0, 1] ** 2) if y.std() else 0.0


def p_n_figure(fit: LogFit, title: str) -> Figure | None:
    """The learned p_n, our fit, and the paper's (SSMax, Figure 2)."""
    n = torch.arange(1, len(fit.p_n) + 1)
    figure, axes = new_axes(title, "n, visible keys", "p_n")
    axes.plot(n, fit.p_n, ".", markersize=4, label="learned p_n")
    axes.plot(n, fit.a1 * n.log() + fit.a2, label=str(fit))
    a1, a2 = published_fit()
    axes.plot(n, a1 * n.log() + a2, "--", label=f"the paper's: {a1} ln n + {a2}")
    return with_legend(figure)


def published_fit() -> tuple[float, float]:
    """The paper's a1 and a2."""
    a1, a2 = (n["value"] for n in read_published()["ssmax"] if n["where"] == "Figure 2 (legend)")
    return a1, a2


def training_figure(groups: list[Group], title: str) -> Figure | None:
    """Training loss against step, means over hundredths of the run and over seeds (SSMax, Figure 4).

    None: fewer than two curves.
    """
    figure, axes = new_axes(title, "step", f"training {LOSS}")
    tops = []
    for group in (group for group in groups if all(run.losses for run in group.runs)):
        losses = torch.tensor([run.losses for run in group.runs], dtype=torch.float64).nanmean(0)  # (steps,)
        parts = losses.split(math.ceil(len(losses) / 100))
        means = torch.stack([part.nanmean() for part in parts])
        ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        axes.plot(ends, means, label=f"{group.name}, at the end {means[-1]:.4f}", linewidth=1.2)
        finite = means[means.isfinite()].tolist() or [0.0]
        tops.append(finite[len(finite) // 20])  # the first steps would take most of the height
    if len(tops) < 2:
        return None
    axes.set_ylim(top=max(tops))
    return with_legend(figure, ncols=2)


def acceleration_figure(losses: dict[str, dict[int, list[float]]], title: str) -> Figure | None:
    """Final validation loss against the length of training (NormSoftmax, Figure 3a)."""
    figure, axes = new_axes(title, "steps, each length with its own schedule", f"final validation {LOSS}")
    for i, (name, by_steps) in enumerate(losses.items()):
        draw_means(axes, i, name, by_steps)
    steps = sorted(set().union(*losses.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, map(str, steps))
    return with_legend(figure)


def all_figures(
    index: RunIndex, papers: list[str], fits: list[LogFit]
) -> Iterator[tuple[str, str, Figure | None]]:
    """(file name, caption, figure) by scale and RoPE scaling."""
    if "normsoftmax" in papers:
        lengths = index.training_lengths(read_rows("normsoftmax_paper", "acceleration"))
        for i, (size, losses) in enumerate(lengths.items(), 1):
            title = "NormSoftmax, Figure 3a: final loss by length of training"
            yield f"normsoftmax_figure3a_{i}.png", f"{title} ({size})", acceleration_figure(losses, title)
    for scale in index.letters.values():
        groups = index.at_scale(scale)
        for rope in index.ropes:
            file, where = f"{scale}_{rope.replace(' = ', '')}.png", f"(scale {scale}), RoPE {rope}"
            if "lssar" in papers:
                rows = read_rows("lssar_paper", "table4_softmax table4_lssa_p15")
                pair = [group for row in rows for group in index.of_row(row) if group.scale == scale]
                title = f"LSSAR, Figure 1: softmax and LSSAR {where}"
                yield f"lssar_figure1_{file}", title, length_figure(pair, rope, title)
                title = f"LSSAR, Figure 2: the power p {where}"
                yield f"lssar_figure2_{file}", title, powers_figure(index, scale, rope, title)
            title = f"Loss by position in windows of 16x {where}"
            yield f"positions_{file}", title, positions_figure(groups, rope, title)
        for group in groups if "normsoftmax" in papers else []:
            title = f"NormSoftmax, Figures 2a and 4: attention of {group.name} in training (scale {scale})"
            yield f"attention_{scale}_{group.name}.png", title, attention_figure(group.runs[0], title)
        if "normsoftmax" in papers:
            title = f"NormSoftmax, Figure 2b: the logits in training (scale {scale})"
            yield f"logits_{scale}.png", title, logits_figure(groups, title)
        title = f"Validation loss during training (scale {scale})"
        yield f"learning_{scale}.png", title, learning_figure(groups, title)
        if "ssmax" in papers:
            rows = read_rows("ssmax_paper", "a_softmax_162m b_ssmax_162m c_ssmax_s1_162m d_ssmax_bias_162m")
            found = [group for row in rows for group in index.of_row(row) if group.scale == scale]
            title = f"SSMax, Figure 4: training loss of (a) to (d) (scale {scale})"
            yield f"ssmax_figure4_{scale}.png", title, training_figure(found, title)
        for fit in (fit for fit in fits if index.letters[fit.run.scale] == scale):
            title = f"SSMax, Figure 2: p_n (scale {scale})"
            yield f"ssmax_p_n_{scale}_{fit.run.config.name}.png", f"{title}: {fit}", p_n_figure(fit, title)
