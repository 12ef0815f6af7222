"""Tables and figures of the evaluations. A result is what a script writes into its JSON."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from infra.cli import UserError
from infra.files import atomic_file

Result = dict[str, Any]
# of an entry of "lengths": mean and error
Value = Callable[[dict[str, Any]], tuple[float, float | None]]
FIGURE_SUFFIXES = (".png", ".pdf", ".svg")
MARKERS = "osD^vP*Xph<>"


# ---------------------------------------------------------------- text
def format_stderr(mean: float, stderr: float | None) -> str:
    return f"{mean:.4f} ±{stderr:.4f}" if stderr is not None else f"{mean:.4f} ±-"


def format_length(length: int) -> str:
    """2048 -> '2K'; 128 -> '128'."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def format_rope(*results: Result) -> str:
    """'ntk', 'theta = 500000', 'ntk and none' of models with RoPE and without."""
    ropes = (result["rope"] for result in results)
    scalings = [rope["kind"] + (f" = {rope['theta']:g}" if rope["theta"] else "") for rope in ropes]
    return " and ".join(dict.fromkeys(scalings))


def run_title(result: Result) -> str:
    return f"{result['run']}: {result['normaliser']}"


def format_table(lines: list[list[str]], n_names: int = 1) -> str:
    """Aligned columns, names to the left and numbers to the right, with a rule below the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    formatted = []
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        cells = [f"{cell:{'<' if i < n_names else '>'}{widths[i]}}" for i, cell in enumerate(line)]
        formatted.append("  ".join(cells).rstrip())
    return "\n".join(formatted)


def run_table(results: list[Result]) -> str:
    """What the runs of the tables below are."""
    lines = [["run", "normaliser", "step", "trained at"]]
    lines += [
        [str(result[key]) for key in ("run", "normaliser", "step", "train_len")]
        for result in results
    ]
    return format_table(lines, n_names=2)


def length_table(results: list[Result], value: Value, cut: str = "") -> str:
    """Runs down, lengths across, a dash for a rejected length. First the entry "cut", if it gets a
    name.
    """
    lengths = [str(entry["length"]) for entry in results[0]["lengths"]]
    lines = [["run", *([cut] if cut else []), *lengths]]
    for result in results:
        line = [result["run"]]
        for entry in ([result["cut"]] if cut else []) + result["lengths"]:
            line.append(format_stderr(*value(entry)) if entry["reason"] is None else "-")
        lines.append(line)
    return format_table(lines)


def rejections(results: list[Result], key: str = "lengths") -> list[str]:
    """A paragraph with the reason of each entry without numbers, if there are any."""
    lines = []
    for result in results:
        for entry in result[key]:
            if entry["reason"] is not None:
                depth = f", {entry['depth']} %" if "depth" in entry else ""
                lines.append(
                    f"{result['run']} at {entry['length']}{depth}: no result: {entry['reason']}"
                )
    return ["\n".join(lines)] if lines else []


# ---------------------------------------------------------------- figures
class Curve(NamedTuple):
    """Values over lengths."""

    label: str
    lengths: list[float]
    values: list[float]
    errors: Any = None  # of each value; or (below, above)


def length_curves(results: list[Result], value: Value) -> list[Curve]:
    """A curve for each result, without its rejected lengths."""
    curves = []
    for result in results:
        known = {
            entry["length"]: value(entry) for entry in result["lengths"] if entry["reason"] is None
        }
        means = [mean for mean, _ in known.values()]
        errors = [error or 0.0 for _, error in known.values()]
        curves.append(Curve(run_title(result), list(known), means, errors))
    return curves


def draw_curves(
    axes: Any, curves: list[Curve], lengths: list[int], results: list[Result], styles: Any = None
) -> None:
    """Error bars over a logarithmic x axis with `lengths` as its only ticks, and the training
    lengths.

    styles: by label; by default a colour and a marker for each curve.
    """
    for i, (label, x, y, errors) in enumerate(curves):
        style = styles[label] if styles else {"color": f"C{i}", "marker": MARKERS[i % len(MARKERS)]}
        axes.errorbar(x, y, errors, label=label, markersize=5, capsize=3, elinewidth=0.8, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(format_length, lengths))
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    for i, train_len in enumerate({result["train_len"] for result in results}):
        named = None if i else "training length"
        axes.axvline(train_len, color="0.4", linestyle=":", linewidth=1, label=named)


def legend_below(figure: Figure, n_columns: int) -> None:
    """The legend of the first axes, below all axes, in as many columns as fit, at most `n_columns`.

    The figure grows with it, from its third row on.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    characters = int(13 * figure.get_figwidth())  # in a line, about
    n_fitting = characters // (max(map(len, labels)) + 8)
    n_columns = max(1, min(n_columns, n_fitting, len(handles)))
    n_rows = math.ceil(len(handles) / n_columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * max(0, n_rows - 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=n_columns, frameon=False)


def check_figure(out: Path | None, option: str = "--out ") -> None:
    """Raises UserError: `out` is given and is no figure's name in a folder that exists."""
    if out and (out.suffix not in FIGURE_SUFFIXES or not out.parent.is_dir()):
        raise UserError(
            f"{option}{out}: expected {', '.join(FIGURE_SUFFIXES)} in a folder that exists"
        )


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    with atomic_file(path, shared=True) as f:
        figure.savefig(f, format=path.suffix[1:], dpi=dpi)
    print(f"wrote {path}")
