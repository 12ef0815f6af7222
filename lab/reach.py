"""How far back a model finds what it needs: what a planted copy of the targets saves, by distance.

    python -m lab.reach runs/softmax runs/ssmax runs/fox
    python -m lab.reach runs/softmax --window 1024      # with a rolling window

The targets are the last 64 tokens of each block of 16 times the training length. A copy of them takes
the place of the 64 tokens that end `distance` - 64 tokens before the targets. All else stays. What is
saved is their loss without a copy minus that with one. At 64 the copy stands beside them. A model
that copies from everywhere saves as much at every distance.

Writes a row for each block and distance to rows.csv of the run folder, `copy_saves` with the distance
as its length, and draws a picture.
"""

import argparse
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluation import (
    Blocks,
    Run,
    Scorer,
    add_arguments,
    open_blocks,
    open_runs,
    picture_path,
    score_all,
    text_of,
)
from infra.cli import ArgumentParser, integer, run_main
from infra.distributed import World, join_world
from lab.options import parse_with_picture
from measure import (
    Curve,
    Estimate,
    Losses,
    draw_curves,
    estimate,
    format_difference,
    format_length,
    format_table,
    write_rows,
)
from positions import RopeScaling

N_TARGETS = 64
LONGEST = 16  # times the training length
Saved = dict[int, Estimate]  # by distance


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser, tokens=2**18)
    add = parser.add_argument
    window_help = "rolling window (default: 0, for none)"
    add("--window", type=integer(0, 10**12), default=0, metavar="W", help=window_help)
    return parse_with_picture(parser, "reach")


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs = open_runs(args.runs, world)
        all_blocks = [
            open_blocks(run.text(args.data, args.split), LONGEST * run.train_len, args.tokens)
            for run in runs
        ]
        curves = [
            (run.title, measure_run(world, run, blocks, args))
            for run, blocks in zip(runs, all_blocks, strict=True)
        ]
        if world.is_main:
            print(f"\nNats a token that a copy saves, by its distance\n\n{table(curves)}")
            train_lens = [run.train_len for run in runs]
            draw(curves, train_lens, args.out or picture_path(runs, "reach"))


def distances_of(length: int) -> list[int]:
    """From beside the targets to the block's first token, doubling."""
    doubled = [N_TARGETS << i for i in range(length.bit_length()) if N_TARGETS << i < length]
    return [*doubled, length - N_TARGETS]


def measure_run(world: World, run: Run, blocks: Blocks, args: argparse.Namespace) -> Saved:
    """The rows are written by the first rank."""
    model, step = run.scorer(world)
    (scaling,) = run.scalings([args.scaling])
    distances = distances_of(blocks.length)

    def score(items: Sequence[int]) -> Tensor:
        starts = [blocks.starts[i] for i in items]
        read = [blocks.stream.read(start, blocks.length + 1) for start in starts]
        tokens = torch.stack([torch.from_numpy(each) for each in read])
        return saved_by_copies(model, tokens, distances, args.window, scaling)

    scores = score_all(world, run.title, len(blocks), score)  # (blocks, distances)
    if isinstance(scores, str):
        print(f"{run.title}: no result: {scores}")
        scores = torch.full((len(blocks), len(distances)), math.nan)
    if world.is_main:
        where = (run.name, step, text_of(blocks.stream), "copy_saves")
        rows: list[tuple[Any, ...]] = []
        for (block, values), i in product(enumerate(scores.tolist()), range(len(distances))):
            setting = (distances[i], args.window, scaling.name)
            rows.append((*where, *setting, block, blocks.documents[block], values[i]))
        write_rows(run.folder, rows)
    of_blocks = tuple(enumerate(blocks.documents))
    return {
        distance: estimate(Losses(values[None].numpy(), of_blocks))
        for distance, values in zip(distances, scores.T, strict=True)
    }


def saved_by_copies(
    model: Scorer, tokens: Tensor, distances: Sequence[int], window: int, scaling: RopeScaling
) -> Tensor:
    """What copies of the last N_TARGETS tokens of (B, N) save, (B, distances) float64."""

    def loss(read: Tensor) -> Tensor:
        return model.losses(read, N_TARGETS, window, scaling=scaling).double().mean(1).cpu()

    without = loss(tokens)
    saved = []
    for distance in distances:
        end = tokens.shape[1] - distance
        planted = tokens.clone()
        planted[:, end - N_TARGETS : end] = tokens[:, -N_TARGETS:]
        saved.append(without - loss(planted))
    return torch.stack(saved, dim=1)


def table(curves: list[tuple[str, Saved]]) -> str:
    distances = sorted({distance for _, saved in curves for distance in saved})
    lines = [["model", *map(format_length, distances)]]
    for title, saved in curves:
        found = (saved.get(distance) for distance in distances)
        lines.append([title, *map(format_difference, found)])
    return format_table(lines)


def draw(curves: list[tuple[str, Saved]], train_lens: list[int], path: Path) -> None:
    drawn = [
        Curve(
            title,
            [*saved],
            [each.value for each in saved.values()],
            [each.half for each in saved.values()],
        )
        for title, saved in curves
    ]
    title = f"What a copy of the last {N_TARGETS} tokens saves"
    draw_curves(path, drawn, title, "nats a token", train_lens, "its distance in tokens")


if __name__ == "__main__":
    run_main(main)
