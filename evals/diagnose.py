"""How attention changes as contexts grow: statistics of each layer, head and length.

    python -m evals.diagnose runs/lssar
    python -m evals.diagnose runs/softmax runs/ssmax runs/lssar --lengths 1024 4096 16384
    torchrun --standalone --nproc_per_node=8 -m evals.diagnose runs/lssar --tokens 1048576

The validation text is cut into blocks of the longest length. The statistics are means over the last rows
(queries) of each block, in windows of each length that all end there: the same queries, with more context.
They measure how wide the scores are, how concentrated the weights, and how much goes to the first token
(NormSoftmax, Figures 2a and 4; the attention sink). --help lists them; training/attention_statistics.py
has the formulas.

Writes diagnose.json and diagnose.png (curves for each layer; heat maps of layers and heads at the shortest
and the longest length) into the run folder; several runs get one more figure, with a curve for each.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evals.common import (
    Blocks,
    Rejection,
    add_arguments,
    mean_and_stderr,
    open_blocks,
    open_runs,
    parse_arguments,
    token_bar,
)
from evals.figures import Curve, draw_curves, length_curves, save_figure
from evals.tables import format_length, format_rope, format_stderr, length_table, rejections
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from infra.files import write_json
from model import GPT
from positions import RopeScaling
from training.attention_statistics import STATISTICS, model_statistics

MEANING = STATISTICS | {"heads": "for each layer, for each head", "mean": "over layers and heads"}


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = open_runs(args)
        all_blocks = open_blocks(args, runs)
        n_rows = choose_rows(args.rows, all_blocks[0].lengths)
        results, written = [], []
        for run, blocks in zip(runs, all_blocks, strict=True):
            model, step = run.load(world)
            scores = score(model, blocks, n_rows, args.rope_scaling, run.label, world)
            results.append(run.describe(step, args) | summarise(scores, blocks, n_rows))
            if world.is_main:  # at once: a later run may fail
                write_json(results[-1], run.file(".json"))
                written += [run.file(".json"), plot(results[-1:], run.file(".png"))]
        if world.is_main:
            print(tables(results))
            written += [plot(results, picture)] if picture else []
            print("\n".join(f"wrote {path}" for path in written))


# ---------------------------------------------------------------- score
def choose_rows(given: int | None, lengths: list[int]) -> int:
    """The number of last rows in each block. Raises UserError if the shortest window has fewer."""
    n_rows = given or max(1, min(128, lengths[0] // 2))
    if n_rows > lengths[0]:
        raise UserError(f"--rows {n_rows}: expected at most the shortest length, {lengths[0]}")
    return n_rows


class Score(NamedTuple):
    """Statistics at one length, over all ranks."""

    values: Tensor  # (n_blocks, n_layer, n_head, len(STATISTICS)) float64 on the CPU
    reason: str | None  # the model rejected the length


def score(
    model: GPT, blocks: Blocks, n_rows: int, rope: RopeScaling, label: str, world: World
) -> list[Score]:
    """A score for each length, the same on every rank; each rank takes its share of the blocks."""
    share, scores, m = blocks.share(world), [], model.config.model
    with token_bar(label, len(share) * sum(blocks.lengths), world) as bar:
        for length in blocks.lengths:
            shape = blocks.n_blocks, m.n_layer, m.n_head, len(STATISTICS)
            values = torch.zeros(shape, dtype=torch.float64, device=world.device)
            with Rejection() as rejection, model.autocast():
                for block in share:
                    window = blocks.stream.read((block + 1) * blocks.longest - length, length)
                    tokens = torch.from_numpy(window)[None].to(world.device)  # (1, T)
                    values[block] = model_statistics(model, tokens, rope, n_rows)[0]
                    bar.update(length)
            scores.append(Score(world.sum(values).cpu(), rejection.reason))
    return scores


# ---------------------------------------------------------------- summary and tables
def summarise(scores: list[Score], blocks: Blocks, n_rows: int) -> dict[str, Any]:
    """What diagnose.json holds besides the run's keys: means by head, and over all heads with their error."""
    entries = []
    for length, (values, reason) in zip(blocks.lengths, scores, strict=True):
        if reason is None and not values.isfinite().all():
            reason = "not finite"
        entry: dict[str, Any] = {"length": length, "reason": reason}
        if reason is None:
            entry |= {"mean": {}, "stderr": {}, "heads": {}}
            for i, name in enumerate(STATISTICS):
                entry["mean"][name], entry["stderr"][name] = mean_and_stderr(values[..., i].mean((1, 2)))
                entry["heads"][name] = values.mean(0)[..., i].tolist()  # (n_layer, n_head)
        entries.append(entry)
    return {"data": blocks.describe() | {"rows": n_rows}, "lengths": entries, "meaning": MEANING}


def tables(results: list[dict[str, Any]]) -> str:
    """A table for each statistic: runs down, lengths across; means over layers and heads."""
    data = results[0]["data"]
    parts = [
        f"The last {data['rows']} rows of {data['blocks']} blocks of {data['block_length']} tokens of "
        f"{data['dir']}, in windows of each length; RoPE scaling {format_rope(results[0])}.\n"
        "Means over layers and heads, ± standard error over blocks."
    ]
    parts += [f"{name}: {meaning}\n{table(results, name)}" for name, meaning in STATISTICS.items()]
    return "\n\n".join(parts + rejections(results)) + "\n"


def table(results: list[dict[str, Any]], name: str) -> str:
    return length_table(results, lambda entry: format_stderr(entry["mean"][name], entry["stderr"][name]))


# ---------------------------------------------------------------- figures
def plot(results: list[dict[str, Any]], path: Path) -> Path:
    return plot_layers(results[0], path) if len(results) == 1 else plot_runs(results, path)


def plot_runs(results: list[dict[str, Any]], path: Path) -> Path:
    """A panel for each statistic: a curve for each run, means over layers and heads."""
    n_columns = math.ceil(len(STATISTICS) / 2)
    figure = Figure(figsize=(3.2 * n_columns, 6.8), layout="constrained")
    panels = figure.subplots(2, n_columns).flat
    for name, axes in zip(STATISTICS, panels, strict=False):
        draw_statistic(axes, name, run_curves(results, name), results)
    for axes in panels[len(STATISTICS) :]:
        axes.axis("off")
    return save_with_legend(figure, path)


def run_curves(results: list[dict[str, Any]], name: str) -> list[Curve]:
    return length_curves(results, lambda entry: (entry["mean"][name], entry["stderr"][name]))


def plot_layers(result: dict[str, Any], path: Path) -> Path:
    """A column for each statistic: a curve for each layer, mean over heads, and two heat maps."""
    figure = Figure(figsize=(3.2 * len(STATISTICS), 10), layout="constrained")
    grid = figure.subplots(3, len(STATISTICS))
    entries = [entry for entry in result["lengths"] if entry["reason"] is None]
    lengths = [entry["length"] for entry in entries]
    for i, name in enumerate(STATISTICS):
        means = [torch.tensor(entry["heads"][name]).mean(1).tolist() for entry in entries]
        layers = zip(*means, strict=True)
        curves = [Curve(f"layer {j}", lengths, list(layer), None) for j, layer in enumerate(layers)]
        draw_statistic(grid[0, i], name, curves, [result])
        draw_heat_maps(grid[1:, i], name, entries)
    figure.suptitle(f"{result['run']}: {result['normaliser']}, step {result['step']}")
    return save_with_legend(figure, path)


def draw_statistic(axes: Any, name: str, curves: list[Curve], results: list[dict[str, Any]]) -> None:
    draw_curves(axes, curves, [entry["length"] for entry in results[0]["lengths"]], results)
    axes.set_title(name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("window length (tokens)")


def draw_heat_maps(panels: Any, name: str, entries: list[dict[str, Any]]) -> None:
    """Layers by heads at the shortest and the longest length, on one colour scale."""
    if not entries:
        return
    maps = torch.tensor([entry["heads"][name] for entry in (entries[0], entries[-1])])  # (2, layers, heads)
    for axes, entry, heads in zip(panels, (entries[0], entries[-1]), maps.numpy(), strict=True):
        image = axes.imshow(heads, vmin=maps.min(), vmax=maps.max(), aspect="auto", origin="lower")
        axes.set_title(f"{name} at {format_length(entry['length'])}", fontsize=10)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        for axis, n in zip((axes.yaxis, axes.xaxis), heads.shape, strict=True):
            axis.set_ticks(range(0, n, 1 + n // 12))
    panels[0].figure.colorbar(image, ax=panels, shrink=0.8)


def save_with_legend(figure: Figure, path: Path) -> Path:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    return save_figure(figure, path)


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__, prog="python -m evals.diagnose")
    listed = [f"  {name:18}{meaning}" for name, meaning in STATISTICS.items()]
    heading = "p = |A| / sum |A| over the n visible keys, the weights of a softmax:"
    parser.epilog = "\n".join([heading, *listed])
    add_arguments(parser, "window lengths (default: 1, 2, 4, 8, 16 x the training length)")
    rows_help = "the last N rows of each block (default: 128, or half the shortest length)"
    tokens_help = "at most the first N validation tokens, in whole blocks (default: %(default)s)"
    parser.add_argument("--rows", type=positive_int, metavar="N", help=rows_help)
    parser.add_argument("--tokens", type=positive_int, default=2**18, metavar="N", help=tokens_help)
    return parse_arguments(parser, "diagnose")


if __name__ == "__main__":
    run_main(main)
