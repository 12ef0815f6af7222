"""Figures of the evaluations. A result is what a script writes into its JSON."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from evals.tables import format_length
from infra.files import write_atomically

MARKERS = "osD^vP*Xph<>"  # distinguish runs beyond the ten colours


class Curve(NamedTuple):
    """Values over lengths."""

    label: str
    lengths: list[float]
    values: list[float]
    errors: Any  # of each value; or (below, above)


def length_curves(
    results: list[dict[str, Any]], value: Callable[[dict[str, Any]], tuple[float, float | None]]
) -> list[Curve]:
    """A curve for each result, without its rejected lengths.

    Args:
        value: value and error of one entry of a result's "lengths".
    """
    curves = []
    for result in results:
        entries = [entry for entry in result["lengths"] if entry["reason"] is None]
        pairs = [value(entry) for entry in entries]
        values, errors = [mean for mean, _ in pairs], [error or 0.0 for _, error in pairs]
        label = f"{result['run']}: {result['normaliser']}"
        curves.append(Curve(label, [entry["length"] for entry in entries], values, errors))
    return curves


def draw_curves(axes: Any, curves: list[Curve], lengths: list[int], results: list[dict[str, Any]]) -> Any:
    """Error bars over a logarithmic x axis with `lengths` as its only ticks; returns the legend's handles."""
    handles = []
    for i, (label, x, y, errors) in enumerate(curves):
        style = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "capsize": 3, "elinewidth": 0.8}
        handles.append(axes.errorbar(x, y, errors, label=label, **style))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [format_length(length) for length in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    return [*handles, mark_training_length(axes, results)]


def mark_training_length(axes: Any, results: list[dict[str, Any]]) -> Any:
    """A vertical line at each training length, one of them labelled; returns the last."""
    for i, train_len in enumerate({result["train_len"] for result in results}):
        label = None if i else "training length"
        line = axes.axvline(train_len, color="0.4", linestyle="--", linewidth=1, label=label)
    return line


def save_figure(figure: Figure, path: Path) -> Path:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=150)
    write_atomically(path, content.getvalue())
    return path
