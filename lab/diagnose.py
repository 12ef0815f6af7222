"""How attention changes as contexts grow: statistics of each layer, head and length.

    python -m lab.diagnose runs/lssar
    python -m lab.diagnose runs/softmax runs/ssmax runs/lssar --lengths 1024 4096 16384
    torchrun --standalone --nproc_per_node=8 -m lab.diagnose runs/lssar --tokens 1048576

The validation text is cut into blocks of the longest length. The statistics are means over the last 128 rows
(queries) of each block, or half the shortest length, in windows of each length that all end there. So the
queries are the same, with more context. They measure how wide the scores are, how concentrated the weights,
and how much goes to the first token (the attention sink). --help lists them. `log.attention_every` records
them over training steps (NormSoftmax, Figures 2 and 4).

Writes diagnose.json and diagnose.png into the run folder and adds the means to its rows.csv. The figure has a
curve for each layer, and heat maps of layers and heads at the shortest and the longest length. Several runs
get one more figure, with a curve for each.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from evals import common, output
from evals.common import Blocks, mean_and_stderr
from evals.output import Result
from evals.rows import text_key
from infra.cli import ArgumentParser, run_main
from infra.distributed import World, join_world
from model import GPT
from positions import RopeScaling
from training.attention_statistics import STATISTICS, model_statistics

LOGARITHMIC = ("effective_keys",)  # from one key to all


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args)
        all_blocks = common.open_blocks(args, runs)
        shortest = all_blocks[0].lengths[0]
        n_rows = max(1, min(128, shortest // 2))
        results = []
        for run, blocks in zip(runs, all_blocks, strict=True):
            model, step = run.load(world)
            scores = [score(model, blocks, n, n_rows, args.rope_scaling, world) for n in blocks.lengths]
            if world.is_main:  # at once: a later run may fail
                at_lengths = [summarise(n, each) for n, each in zip(blocks.lengths, scores, strict=True)]
                data = blocks.describe() | {"rows": n_rows}
                results.append(run.write({"data": data, "lengths": at_lengths}, step, args))
                run.append_rows("diagnose", results[-1], text_key(data), measured_means(at_lengths))
                plot_layers(results[-1], run.file(".png"))
        if world.is_main:
            print(tables(results))
            if picture:
                plot(results, picture)


# ---------------------------------------------------------------- score
def score(
    model: GPT, blocks: Blocks, length: int, n_rows: int, rope: RopeScaling, world: World
) -> Tensor | str:
    """Statistics of every block, (n_blocks, n_layer, n_head, len(STATISTICS)), or why there are none."""

    def statistics(items: Sequence[int]) -> Tensor:
        ends = [(blocks.n_skipped + i + 1) * blocks.longest for i in items]
        windows = [blocks.stream.read(end - length, length) for end in ends]
        with model.autocast():
            tokens = torch.from_numpy(np.stack(windows)).to(world.device)  # (B, T)
            return model_statistics(model, tokens, rope, n_rows)

    return common.score_all(world, f"{length} tokens", blocks.n_blocks, statistics)


# ---------------------------------------------------------------- summary and tables
def summarise(length: int, scores: Tensor | str) -> dict[str, Any]:
    """An entry of diagnose.json's "lengths": means by head, and over all heads with their error."""
    if isinstance(scores, str):
        return {"length": length, "reason": scores}
    entry: dict[str, Any] = {"length": length, "reason": None, "mean": {}, "stderr": {}, "heads": {}}
    for name, of_heads in zip(STATISTICS, scores.unbind(-1), strict=True):  # (n_blocks, n_layer, n_head)
        mean, stderr = mean_and_stderr(of_heads.mean((1, 2)))
        entry["mean"][name] = mean
        entry["stderr"][name] = stderr
        entry["heads"][name] = of_heads.mean(0).tolist()
    return entry


def measured_means(at_lengths: list[dict[str, Any]]) -> list[tuple[int, None, str, float]]:
    """(length, no block, statistic, mean); NaN where the length was rejected."""
    return [
        (entry["length"], None, name, entry["mean"][name] if "mean" in entry else math.nan)
        for entry in at_lengths
        for name in STATISTICS
    ]


def mean_of(name: str) -> output.Value:
    """A statistic's mean over layers and heads, and its standard error over blocks."""
    return lambda entry: (entry["mean"][name], entry["stderr"][name])


def tables(results: list[Result]) -> str:
    """A table for each statistic: runs down, lengths across; means over layers and heads."""
    data = results[0]["data"]
    parts = [
        f"The last {data['rows']} rows of {data['blocks']} blocks of {data['block_length']} tokens of "
        f"{data['dir']}, in windows of each length; RoPE scaling {output.format_rope(*results)}.\n"
        "Means over layers and heads, ± standard error over blocks."
    ]
    for name, meaning in STATISTICS.items():
        parts.append(f"{name}: {meaning}\n{output.length_table(results, mean_of(name))}")
    return "\n\n".join(parts + output.rejections(results)) + "\n"


# ---------------------------------------------------------------- figures
def plot(results: list[Result], path: Path) -> None:
    """A panel for each statistic: a curve for each run, means over layers and heads."""
    n_columns = math.ceil(len(STATISTICS) / 2)
    figure = Figure(figsize=(3.2 * n_columns, 6.8), layout="constrained")
    for name, axes in zip(STATISTICS, figure.subplots(2, n_columns).flat, strict=True):
        draw_statistic(axes, name, output.length_curves(results, mean_of(name)), results)
    output.legend_below(figure, 6)
    output.save_figure(figure, path)


def plot_layers(result: Result, path: Path) -> None:
    """A column for each statistic: a curve for each layer, mean over heads, and two heat maps."""
    figure = Figure(figsize=(3.2 * len(STATISTICS), 10), layout="constrained")
    grid = figure.subplots(3, len(STATISTICS))
    at_lengths = [entry for entry in result["lengths"] if entry["reason"] is None]
    lengths = [entry["length"] for entry in at_lengths]
    for i, name in enumerate(STATISTICS):
        layers = np.array([np.mean(entry["heads"][name], axis=1) for entry in at_lengths]).T
        curves = [output.Curve(f"layer {j}", lengths, layer) for j, layer in enumerate(layers)]
        draw_statistic(grid[0, i], name, curves, [result])
        draw_heat_maps(grid[1:, i], name, at_lengths)
    figure.suptitle(f"{output.run_title(result)}, step {result['step']}")
    output.legend_below(figure, 6)
    output.save_figure(figure, path)


def draw_statistic(axes: Any, name: str, curves: list[output.Curve], results: list[Result]) -> None:
    output.draw_curves(axes, curves, [entry["length"] for entry in results[0]["lengths"]], results)
    axes.set(title=name, xlabel="window length (tokens)")
    if name in LOGARITHMIC:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def draw_heat_maps(panels: Any, name: str, at_lengths: list[dict[str, Any]]) -> None:
    """Layers by heads at the shortest and the longest length, on one colour scale."""
    if not at_lengths:
        return
    maps = np.array([entry["heads"][name] for entry in (at_lengths[0], at_lengths[-1])])  # (2, layers, heads)
    norm = "log" if name in LOGARITHMIC and maps.min() > 0 else "linear"
    for axes, entry, heads in zip(panels, (at_lengths[0], at_lengths[-1]), maps, strict=True):
        image = axes.imshow(heads, norm=norm, aspect="auto", origin="lower")
        image.set_clim(maps.min(), maps.max())
        axes.set(title=f"{name} at {output.format_length(entry['length'])}", xlabel="head", ylabel="layer")
        for axis, n in zip((axes.yaxis, axes.xaxis), heads.shape, strict=True):
            axis.set_ticks(range(0, n, 1 + n // 12))
    panels[0].figure.colorbar(image, ax=panels, shrink=0.8)


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    listed = [f"  {name:18}{meaning}" for name, meaning in STATISTICS.items()]
    heading = "p = |A| / sum |A| over the n visible keys, the weights of a softmax:"
    parser.epilog = "\n".join([heading, *listed])
    lengths_help = "window lengths (default: 1, 2, 4, 8, 16 x the training length)"
    common.add_arguments(parser, lengths_help, tokens=2**18)
    return common.parse_arguments(parser, "diagnose")


if __name__ == "__main__":
    run_main(main)
