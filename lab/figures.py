"""Lines of means over seeds, and the figures of the papers' report.

LSSAR's Figures 1 and 2, SSMax's 2 (p_n) and 4, NormSoftmax's 2a and 4.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from evals.output import MARKERS, format_length, legend_below
from evals.rows import FACTORS
from lab.runs import FinishedRun, Runs, recipe_of
from lab.styles import GREY, N_SHOWN, variant_styles
from lab.tables import read_published, read_rows

LOSS = "loss (nats per token)"
WINDOW = 100  # steps of training whose losses are one point of a learning curve
# What p_n may be a1 f(n) + a2 of: the paper's first (SSMax, Section 2.1), then its rivals.
P_N_FITS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ln n": np.log,
    "√n": np.sqrt,
    "n^0.35": lambda n: n**0.35,
    "n": lambda n: n,
}
Drawn = tuple[str, str, Figure]  # file name, caption, figure


def ordered_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colours from dark to light for lines that have an order, such as layers and lengths."""
    colours = colormaps["viridis"].resampled(len(names) + 1).colors  # type: ignore[attr-defined]
    return {
        name: {"color": to_hex(colours[i]), "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(names)
    }


def draw_lines(
    points: pd.DataFrame,
    title: str,
    xlabel: str,
    ylabel: str = LOSS,
    shown: Sequence[str] = (),
    sharey: bool = True,
    is_ordered: bool = False,
) -> Figure:
    """Means of y over seeds ± standard deviation against x, a line for each name.

    Args:
        points: name, x, y, a row for each seed; panel: which axes, if there are several.
        shown: the names in colour, the others are grey; by default the first N_SHOWN.
        is_ordered: the shown have an order, which their colours say.
    """
    points = points if "panel" in points else points.assign(panel="")
    means = points.groupby(["panel", "name", "x"]).y.agg(["mean", "std"]).reset_index()
    shown = shown or [*points.name.unique()[:N_SHOWN]]
    styles = ordered_styles(shown) if is_ordered else variant_styles(shown)
    panels = points.panel.unique()
    figure = Figure(figsize=(max(8, 5 * len(panels)), 5.5), layout="constrained")
    figure.subplots(1, len(panels), sharey=sharey)
    for axes, panel in zip(figure.axes, panels, strict=True):
        lines = means[means.panel == panel]
        others = lines[~lines.name.isin(shown)].groupby("name")
        for i, (_, line) in enumerate(others):
            label = "" if i else f"{len(others)} others"
            axes.plot(line.x, line["mean"], color=GREY, linewidth=0.8, zorder=1, label=label)
        for name, style in styles.items():
            line = lines[lines.name == name]
            if len(line) >= 30:
                style = style | {"marker": ""}
            capsize = 3 if style["marker"] else 0
            if len(line):
                axes.errorbar(
                    line.x,
                    line["mean"],
                    line["std"],
                    label=name,
                    markersize=4,
                    capsize=capsize,
                    **style,
                )
        axes.set(xlabel=xlabel, title=panel)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(ylabel)
    figure.suptitle(title)
    legend_below(figure, 4)
    return figure


def log_ticks(figure: Figure, ticks: Sequence[int], base: int = 2) -> Figure:
    """Logarithmic x axes with these ticks only."""
    for axes in figure.axes:
        axes.set_xscale("log", base=base)
        axes.set_xticks(ticks, [format_length(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
    return figure


def lssar_figures(runs: Runs, scale: str) -> Iterator[Drawn]:
    """LSSAR's Figure 1: softmax and LSSAR by length. Figure 2: loss at each length against the
    power p.
    """
    losses = runs.means().query("scale == @scale and factor in @FACTORS")
    losses = losses.assign(panel="RoPE " + losses.rope, y=losses.loss)
    rows = read_rows("lssar_paper", "table4_softmax table4_lssa_p15")
    points = losses[losses.line.isin({line for row in rows for line in runs.of_row(row).line})]
    if points.length.nunique() > 1:
        title = f"LSSAR, Figure 1: softmax and LSSAR (scale {scale})"
        figure = draw_lines(points.assign(x=points.length), title, "length (tokens)")
        yield f"lssar_figure1_{scale}.png", title, log_ticks(figure, sorted(points.length.unique()))
    parts = []
    configs = {line.line: line.run.config for line in runs.table.itertuples()}
    recipes = {line: str(recipe_of(config, "attention.")) for line, config in configs.items()}
    for row in read_rows("lssar_paper", "figure2_lssa figure2_softmax"):
        part = losses[losses.line.isin(runs.of_row(row).line)]
        parts.append(part.assign(recipe=part.line.map(recipes), x=row.config.attention.reweight_p))
    points = pd.concat(parts).sort_values(["panel", "factor"])
    points["normaliser"] = points.line.map(lambda line: configs[line].attention.normaliser)
    n_powers = points.groupby(["normaliser", "recipe"]).x.nunique()
    usual = n_powers.groupby("normaliser").idxmax()  # lines of several recipes would be one
    points = points.merge(pd.DataFrame([*usual], columns=["normaliser", "recipe"], dtype=object))
    if points.x.nunique() > 1:
        rates = points.line.map(lambda line: f", lr {configs[line].optimizer.lr:g}, ")
        dtypes = points.line.map(lambda line: configs[line].train.dtype)
        points["panel"] = points.normaliser + rates + dtypes + "\n" + points.panel
        title = f"LSSAR, Figure 2: the power p (scale {scale})"
        factors = [f"{factor}x" for factor in FACTORS]
        points = points.assign(name=points.factor.map("{:g}x".format))
        figure = draw_lines(points, title, "re-weighting power p", shown=factors, is_ordered=True)
        yield (
            f"lssar_figure2_{scale}.png",
            title,
            log_ticks(figure, sorted(points.x.unique()), base=10),
        )


def ssmax_figures(runs: Runs, scale: str) -> Iterator[Drawn]:
    """SSMax's Figure 4: training losses against softmax's, paired by seed. Figure 2: the learned
    p_n.
    """
    of_scale = runs.table.query("scale == @scale")
    points = learning_curves(runs, of_scale)
    if len(points):
        n_seeds = points.groupby("name").seed.nunique()
        n_steps = int(points.x.min())
        title = f"SSMax, Figure 4: training loss of (b) to (d) minus (a)'s of the same seed (scale {scale})"
        figure = draw_lines(points, title, "step", "difference (nats per token)")
        figure.axes[0].axhline(0, color="0.6", linestyle=":")
        seeds = ", ".join(f"{name} {n}" for name, n in n_seeds.items())
        yield (
            f"ssmax_figure4_{scale}.png",
            f"{title}, means over {n_steps} steps; seeds: {seeds}",
            figure,
        )
    for line in of_scale.itertuples():
        if line.run.p_n:
            fits, figure = p_n_figure(line.run)
            title = f"SSMax, Figure 2: p_n of {line.name} (scale {scale}): {fits}"
            yield f"ssmax_p_n_{scale}_{line.run.name}_{line.seed}.png", title, figure


def learning_curves(runs: Runs, of_scale: pd.DataFrame) -> pd.DataFrame:
    """(b), (c), (d) minus (a) of the same seed and recipe, over WINDOW steps: name, seed, x (the
    step), y.
    """
    curves: dict[tuple[str, int, str], tuple[str, pd.Series]] = {}
    for row in read_rows(
        "ssmax_paper", "a_softmax_162m b_ssmax_162m c_ssmax_s1_162m d_ssmax_bias_162m"
    ):
        for line in runs.of_row(row).query("index in @of_scale.index").itertuples():
            losses = pd.Series(line.run.logged("loss"), dtype=float)
            width = max(WINDOW, line.run.config.train.max_steps // 100)
            means = losses.groupby((losses.index - 1) // width).mean()
            means.index = (means.index + 1) * width
            key = str(recipe_of(line.run.config, "attention.")), line.seed, row.config.name[0]
            if len(losses):
                curves[key] = f"({key[-1]}) {line.name}", means
    parts = [
        (curve - curves[recipe, seed, "a"][1])
        .rename("y")
        .rename_axis("x")
        .reset_index()
        .assign(name=name, seed=seed)
        for (recipe, seed, letter), (name, curve) in curves.items()
        if letter != "a" and (recipe, seed, "a") in curves
    ]
    return pd.concat(parts) if parts else pd.DataFrame()


def fit_p_n(p_n: np.ndarray, name: str) -> tuple[float, float, float]:
    """a1, a2 and R² of a1 f(n) + a2 for p_n, (T,). n = 1 is left out: a single key has no gradient."""
    x = P_N_FITS[name](np.arange(2, len(p_n) + 1))
    a1, a2 = np.polyfit(x, p_n[1:], 1).tolist()
    return a1, a2, float(np.corrcoef(x, p_n[1:])[0, 1] ** 2) if p_n[1:].std() else 0.0


def p_n_figure(run: FinishedRun) -> tuple[str, Figure]:
    """A run's learned p_n with least-squares fits, also in words, and the paper's (SSMax, Section
    2.1).
    """
    p_n = np.array(run.p_n)
    n = np.arange(1, len(p_n) + 1)
    curves = pd.DataFrame({"learned p_n": p_n})
    for name, function in P_N_FITS.items():
        a1, a2, r2 = fit_p_n(p_n, name)
        curves[f"{a1:.4g} {name} + {a2:.3f}, R² = {r2:.3f}"] = a1 * function(n) + a2
    fits = "; ".join(curves.columns[1:])
    theirs = (
        read_published()
        .query("where == 'Figure 2 (legend)'")
        .set_index("column")
        .printed.astype(float)
    )
    curves[f"the paper's: {theirs.a1} ln n + {theirs.a2}"] = theirs.a1 * np.log(n) + theirs.a2
    points = curves.assign(x=n).melt("x", var_name="name", value_name="y")
    return fits, draw_lines(points, run.config.name, "n, visible keys", "p_n", shown=[*curves])


def normsoftmax_figures(runs: Runs, scale: str) -> Iterator[Drawn]:
    """NormSoftmax's Figures 2a and 4: what earlier versions recorded of softmax and of each gamma."""
    panels = {"qk_std": "std of q.k, unscaled", "entropy": "entropy, nats"}
    lines = []
    for row in read_rows("normsoftmax_paper", "baseline norm_softmax gamma"):
        options = row.config.attention.model_dump()
        name = f"gamma = {options['gamma']}" if "gamma" in options else "softmax"
        of_row = runs.of_row(row).query("scale == @scale")
        recorded = [run for run in of_row.run if run.logged("qk_std")]
        for run, (key, panel) in product(recorded[:1], panels.items()):
            label = f"{name}, {run.config.train.dtype}"
            for step, by_layer in run.logged(key).items():
                lines += [
                    (f"{panel}, {layer}", label, step, value) for layer, value in by_layer.items()
                ]
    if lines:
        title = f"NormSoftmax, Figures 2a and 4: attention in training (scale {scale})"
        points = pd.DataFrame(lines, columns=["panel", "name", "x", "y"])
        yield (
            f"normsoftmax_attention_{scale}.png",
            title,
            draw_lines(points, title, "step", "", sharey=False),
        )


def all_figures(runs: Runs) -> Iterator[Drawn]:
    for scale in sorted(runs.table.scale.unique()):
        for draw in (lssar_figures, ssmax_figures, normsoftmax_figures):
            yield from draw(runs, scale)
