"""How attention changes as contexts grow: statistics of each layer, head and length.

    python -m lab.diagnose runs/lssar
    python -m lab.diagnose runs/softmax runs/ssmax runs/lssar --lengths 1024 4096 16384
    python -m lab.diagnose runs/lssar/checkpoints/*.pt      # over training (NormSoftmax, Figures 2, 4)
    torchrun --standalone --nproc_per_node=8 -m lab.diagnose runs/lssar --tokens 1048576

The statistics are means over the last 128 rows (queries) of each block, or half the shortest length,
in windows of each length that all end there. So the queries are the same, with more context. They
measure how wide the scores are, how concentrated the weights, and how much goes to the first token
(the attention sink).

Writes their means to rows.csv of the run folder, of all heads as `entropy`, of a layer as
`entropy[0]` and so on, and draws a picture: a curve for each layer, or for each of several runs.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evaluation import (
    FACTORS,
    Blocks,
    Run,
    add_arguments,
    open_blocks,
    open_runs,
    picture_path,
    score_all,
    text_of,
)
from infra.cli import ArgumentParser, positive_int, run_main
from infra.distributed import World, join_world
from infra.figures import Figure
from lab.attention_statistics import STATISTICS, model_statistics
from lab.options import parse_with_picture
from measure import MARKERS, format_length, format_table, save_figure, write_rows
from model import GPT
from positions import RopeScaling

Means = dict[int, Tensor | None]  # by length: (n_layer, len(STATISTICS)); None: rejected


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    listed = [f"  {name:18}{meaning}" for name, meaning in STATISTICS.items()]
    heading = "p = |A| / sum |A| over the n visible keys, the weights of a softmax:"
    parser.epilog = "\n".join([heading, *listed])
    add_arguments(parser, tokens=2**18)
    add = parser.add_argument
    lengths_help = "(default: 1, 2, 4, 8, 16 x the training length)"
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    return parse_with_picture(parser, "diagnose")


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs = open_runs(args.runs, world)
        own = {factor * run.train_len for run in runs for factor in FACTORS}
        lengths = sorted({*(args.lengths or own)})
        texts = [run.text(args.data, args.split) for run in runs]
        all_blocks = [open_blocks(text, lengths[-1], args.tokens) for text in texts]
        means = {}
        for run, blocks in zip(runs, all_blocks, strict=True):
            model, step = run.load(world)
            (scaling,) = run.scalings([args.scaling])
            of_run = measure_run(world, run.title, model, blocks, lengths, scaling)
            if world.is_main:
                write_rows(run.folder, rows_of(run, step, text_of(blocks.stream), scaling, of_run))
            means[f"{run.title}, step {step}"] = of_run
        if world.is_main:
            for name, meaning in STATISTICS.items():
                print(f"\n{name}: {meaning}\n{table(means, name)}")
            draw(means, args.out or picture_path(runs, "diagnose"))


def count_rows(lengths: Sequence[int]) -> int:
    """Queries at the end of each block."""
    return max(1, min(128, lengths[0] // 2))


# ---------------------------------------------------------------- scores
def measure_run(
    world: World, title: str, model: GPT, blocks: Blocks, lengths: Sequence[int], rope: RopeScaling
) -> Means:
    means: Means = {}
    for length in lengths:
        scores = score(model, blocks, length, count_rows(lengths), rope, world, title)
        if isinstance(scores, str):
            print(f"{title} at {length}: no result: {scores}")
            means[length] = None
        else:
            means[length] = scores.mean((0, 2))
    return means


def score(
    model: GPT,
    blocks: Blocks,
    length: int,
    n_rows: int,
    rope: RopeScaling,
    world: World,
    title: str,
) -> Tensor | str:
    """Statistics of every block, (n_blocks, n_layer, n_head, len(STATISTICS)), or why there are
    none.
    """

    def statistics(items: Sequence[int]) -> Tensor:
        starts = [blocks.starts[i] + blocks.length - length for i in items]
        windows = np.stack([blocks.stream.read(start, length) for start in starts])
        with model.autocast():
            return model_statistics(model, torch.from_numpy(windows).to(world.device), rope, n_rows)

    return score_all(world, f"{title}, {length} tokens", len(blocks), statistics)


def rows_of(
    run: Run, step: int, text: str, scaling: RopeScaling, means: Means
) -> Iterator[tuple[Any, ...]]:
    """The rows of measure.py: means over all heads and blocks, and those of each layer."""
    for (length, of_length), (i, name) in product(means.items(), enumerate(STATISTICS)):
        where = (length, 0, scaling.name, None, None)
        layers = [] if of_length is None else of_length[:, i].tolist()
        mean = sum(layers) / len(layers) if layers else math.nan
        yield (run.name, step, text, name, *where, mean)
        for layer, value in enumerate(layers):
            yield (run.name, step, text, f"{name}[{layer}]", *where, value)


# ---------------------------------------------------------------- table and picture
def of_statistic(means: Means, name: str) -> dict[int, Tensor]:
    """Of the lengths that were not rejected: (n_layer,)."""
    i = list(STATISTICS).index(name)
    return {length: each[:, i] for length, each in means.items() if each is not None}


def table(means: dict[str, Means], name: str) -> str:
    """Models down, lengths across: means over layers and heads."""
    lengths = [*next(iter(means.values()))]
    lines = [["model", *map(format_length, lengths)]]
    for title, of_run in means.items():
        values = of_statistic(of_run, name)
        cells = [f"{values[n].mean():.4g}" if n in values else "-" for n in lengths]
        lines.append([title, *cells])
    return format_table(lines)


def draw(means: dict[str, Means], path: Path) -> None:
    """A panel for each statistic: a curve for each layer of a single run, or for each run."""
    n_columns = math.ceil(len(STATISTICS) / 2)
    figure = Figure(figsize=(3.2 * n_columns, 6.8), layout="constrained")
    for name, axes in zip(STATISTICS, figure.subplots(2, n_columns).flat, strict=True):
        for label, values in curves(means, name).items():
            marker = MARKERS[len(axes.lines) % len(MARKERS)]
            axes.plot([*values], [*values.values()], marker=marker, label=label)
        axes.set_xscale("log", base=2)
        axes.set(title=name, xlabel="context (tokens)")
        axes.grid(alpha=0.3)
        if name == "effective_keys":  # from one key to all
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def curves(means: dict[str, Means], name: str) -> dict[str, dict[int, float]]:
    """By label a statistic by length."""
    if len(means) > 1:
        return {
            title: {n: each.mean().item() for n, each in of_statistic(of_run, name).items()}
            for title, of_run in means.items()
        }
    (of_run,) = means.values()
    values = of_statistic(of_run, name)
    n_layers = len(next(iter(values.values()))) if values else 0
    return {
        f"layer {layer}": {n: each[layer].item() for n, each in values.items()}
        for layer in range(n_layers)
    }


if __name__ == "__main__":
    run_main(main)
