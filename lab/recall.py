"""Synthetic recall: does a model trained on lab/recall_data.py still retrieve at lengths it never
saw?

    python -m lab.recall runs/recall/*/
    python -m lab.recall runs/recall/lssar_p15 --lengths 64 1024 16384 --samples 50 --rope ntk

The share of answer tokens that are right is reported for each task and length. Answers are scored
by teacher forcing: each is the model's likeliest token, given the right ones before it. The 95 %
intervals (Wilson 1927) are for as many trials as there are sequences, because the tokens of an answer
are not independent. Sequences are fresh, and the same for every run. "mean" is over tasks, with the
interval of one. lab/recall_data.py says what guessing reaches.

Writes the shares of each task to rows.csv of the run folder, and their mean as `right answers`.
Draws that mean by length.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.dataset import dataset_info
from evaluation import Run, open_runs, picture_path, score_all
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from lab import recall_data
from lab.needle import format_share
from lab.options import parse_with_picture
from measure import Curve, draw_curves, format_table, write_rows
from model import GPT
from positions import RopeScaling

FACTORS = [2**i for i in range(7)]
MEAN = "right answers"
TOKENS_AT_ONCE = 65536  # of one batch


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders or checkpoint files, first")
    lengths_help = "even numbers (default: 1, 2, 4, ... 64 x the training length)"
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    samples_help = "of each task and length (default: %(default)s)"
    add("--samples", type=positive_int, default=200, metavar="N", help=samples_help)
    add("--data", type=Path, metavar="DIR", help="dataset (default: that of each run's config)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    return parse_with_picture(parser, "recall")


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs = open_runs(args.runs, world)
        tasks = trained_tasks(runs, args.data)
        own = {factor * run.train_len for run in runs for factor in FACTORS}
        lengths = sorted({*(args.lengths or own)})
        for length in lengths:
            recall_data.make_sequence(tasks[0], length, "")  # raises if it does not fit
        shares = []
        for run in runs:
            model, step = run.load(world)
            (scaling,) = run.scalings([args.scaling])
            of_run = measure_run(world, run.title, model, tasks, lengths, args.samples, scaling)
            key = (run.name, step, f"recall, {args.samples} samples")
            if world.is_main:
                where = (0, scaling.name, None, None)
                write_rows(
                    run.folder,
                    [(*key, task, n, *where, share) for (task, n), share in of_run.items()],
                )
            shares.append(of_run)
        if world.is_main:
            print(table(runs, shares, args.samples))
            labels = [f"{run.title}, seed {run.config.seed}" for run in runs]
            curves = [
                Curve(label, lengths, [100 * of_run[MEAN, n] for n in lengths])
                for label, of_run in zip(labels, shares, strict=True)
            ]
            path = args.out or picture_path(runs, "recall")
            title = "Right answer tokens, mean of the tasks"
            draw_curves(path, curves, title, "per cent", [run.train_len for run in runs])


def trained_tasks(runs: Sequence[Run], folder: Path | None) -> list[str]:
    """The tasks that all runs were trained on. Raises UserError: another dataset, or other tasks."""
    infos = [dataset_info(folder or run.config.data.dir) for run in runs]
    for run, info in zip(runs, infos, strict=True):
        if info.get("dataset") != recall_data.DATASET or info["tasks"] != infos[0]["tasks"]:
            raise UserError(
                f"{run.source}: expected a dataset of lab.recall_data, with the same tasks for all"
            )
    tasks: list[str] = infos[0]["tasks"]
    return tasks


# ---------------------------------------------------------------- scores
def measure_run(
    world: World,
    title: str,
    model: GPT,
    tasks: list[str],
    lengths: Sequence[int],
    n_samples: int,
    scaling: RopeScaling,
) -> dict[tuple[str, int], float]:
    """The share of right answers by task, or MEAN, and length; NaN where the model rejects it."""
    shares = {}
    for length in lengths:
        rope = RopeScaling(scaling.name, length)
        for task in tasks:
            scores = score(world, title, model, task, length, n_samples, rope)
            if isinstance(scores, str) and world.is_main:
                print(f"{title}, {task} at {length}: no result: {scores}")
            shares[task, length] = math.nan if isinstance(scores, str) else scores.mean().item()
        shares[MEAN, length] = float(np.mean([shares[task, length] for task in tasks]))
    return shares


def score(
    world: World, title: str, model: GPT, task: str, length: int, n_samples: int, rope: RopeScaling
) -> Tensor | str:
    """Whether each answer token of each sequence is right, (N, A), or why not."""

    def right(items: Sequence[int]) -> Tensor:
        pairs = [recall_data.make_sequence(task, length, f"0 evaluation {i}") for i in items]
        # (B, T) each
        tokens, mask = (np.stack(part).astype(np.int64) for part in zip(*pairs, strict=True))
        with model.autocast():
            return answers_right(
                model, torch.from_numpy(tokens), torch.from_numpy(mask).bool(), rope
            )

    batch = max(1, TOKENS_AT_ONCE // length)
    return score_all(world, f"{title}, {task}, {length} tokens", n_samples, right, batch)


@torch.no_grad()
def answers_right(model: GPT, tokens: Tensor, mask: Tensor, rope: RopeScaling) -> Tensor:
    """Whether the likeliest token is the right one, where the mask is set: (B, T) each to (B, A)."""
    device = model.embedding.weight.device
    tokens = tokens.to(device)
    is_answer = mask[:, 1:].to(device)
    logits = model.logits(model.hidden(tokens[:, :-1], rope)[is_answer])  # (B * A, V)
    if not logits.isfinite().all():
        raise UserError("the model computed NaN or infinity")
    return (logits.argmax(-1) == tokens[:, 1:][is_answer]).view(len(tokens), -1)


def table(runs: Sequence[Run], shares: Sequence[dict[tuple[str, int], float]], n: int) -> str:
    """Tasks and runs down, lengths across."""
    tasks = list(dict.fromkeys(task for task, _ in shares[0]))
    lengths = list(dict.fromkeys(length for _, length in shares[0]))
    lines: list[list[Any]] = [["task", "run", *map(str, lengths)]]
    for task in tasks:
        for run, of_run in zip(runs, shares, strict=True):
            cells = [format_share(of_run[task, length], n) for length in lengths]
            lines.append([task, run.name, *cells])
    heading = f"Right answer tokens in per cent, {n} sequences a cell, 95 % intervals."
    return f"{heading}\n\n{format_table(lines, n_names=2)}"


if __name__ == "__main__":
    run_main(main)
