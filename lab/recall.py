"""Synthetic recall: does a model trained on lab/recall_data.py still retrieve at lengths it never
saw?

    python -m lab.recall runs/comparison_recall/*/ --rope none --tag none
    python -m lab.recall runs/comparison_recall/lssar_p15 --lengths 64 1024 16384 --samples 50

The share of answer tokens that are right is reported for each task and length. Answers are scored
by teacher
forcing: each is the model's likeliest token, given the right ones before it. The 95 % confidence
intervals (Wilson) are for as many trials as there are sequences, because the tokens of an answer
are not independent. Sequences are fresh, and the same for every run. "mean" is over tasks, with the
interval of one. lab/recall_data.py says what guessing reaches.

Writes eval_recall.json and eval_recall.png into the run folder and adds to its rows.csv. Several
runs get one more figure.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.dataset import dataset_info
from evals import common, output
from evals.common import add_arguments, parse_arguments
from evals.output import Result
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from lab import recall_data
from lab.shares import percent, proportion
from model import GPT
from positions import RopeScaling

TOKENS_AT_ONCE = 65536  # of one batch


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser, "even numbers (default: 1, 2, 4, ... 64 x the training length)")
    samples_help = "of each cell (default: %(default)s)"
    parser.add_argument("--samples", type=positive_int, default=200, metavar="N", help=samples_help)
    return parse_arguments(parser, "eval_recall")


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args, world, [2**i for i in range(7)])
        tasks = trained_tasks(runs, args.data)
        lengths = args.lengths
        for length in lengths:
            recall_data.make_sequence(tasks[0], length, "")  # raises if it does not fit

        def measure(_: int, model: GPT, step: int) -> tuple[dict[str, Any], str, list[Any]]:
            cells = [{task: score(model, task, n, args, world) for task in tasks} for n in lengths]
            at_lengths = [
                summarise(n, each, args.samples) for n, each in zip(lengths, cells, strict=True)
            ]
            summary = {"tasks": tasks, "samples": args.samples, "seed": 0, "lengths": at_lengths}
            shares = [
                (
                    entry["length"],
                    None,
                    task,
                    entry[task]["tokens"]["share"] if task in entry else math.nan,
                )
                for entry, task in product(at_lengths, tasks)
            ]
            return summary, f"seed 0, {args.samples} samples", shares

        common.evaluate("recall", args, world, runs, picture, measure, tables, plot)


def trained_tasks(runs: list[common.EvaluatedRun], data_dir: str | None) -> list[str]:
    """The tasks that all runs were trained on. Raises UserError: another dataset, or other tasks."""
    infos = [dataset_info(data_dir or run.config.data.dir) for run in runs]
    for run, info in zip(runs, infos, strict=True):
        if info.get("dataset") != recall_data.DATASET or info["tasks"] != infos[0]["tasks"]:
            raise UserError(
                f"{run.label}: expected a dataset of lab.recall_data, with the same tasks for all"
            )
    tasks: list[str] = infos[0]["tasks"]
    return tasks


# ---------------------------------------------------------------- score
def score(
    model: GPT, task: str, length: int, args: argparse.Namespace, world: World
) -> Tensor | str:
    """Whether each answer token of each sequence is right, (N, A), or why not (see
    `common.score_all`).
    """
    rope = RopeScaling(args.rope, args.rope_theta, length)

    def right(items: Sequence[int]) -> Tensor:
        pairs = [recall_data.make_sequence(task, length, f"0 evaluation {i}") for i in items]
        # (B, T) each
        tokens, mask = (np.stack(part).astype(np.int64) for part in zip(*pairs, strict=True))
        with model.autocast():
            return answers_right(
                model, torch.from_numpy(tokens), torch.from_numpy(mask).bool(), rope
            )

    batch = max(1, TOKENS_AT_ONCE // length)
    return common.score_all(world, f"{task}, {length} tokens", args.samples, right, batch)


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


# ---------------------------------------------------------------- summary, table, figure
def summarise(length: int, scores: dict[str, Tensor | str], n: int) -> dict[str, Any]:
    """An entry of eval_recall.json's "lengths": the share of right tokens in each task, and their
    mean.
    """
    counts: dict[str, float] = {}  # of right tokens, in sequences
    for task, right in scores.items():
        if isinstance(right, str):
            return {"length": length, "reason": right}
        counts[task] = right.mean(1).sum().item()
    counts["mean"] = float(np.mean(list(counts.values())))
    shares = {task: {"tokens": proportion(count, n)} for task, count in counts.items()}
    return {"length": length, "reason": None, **shares}


def tables(results: list[Result]) -> str:
    """Tasks and runs down, lengths across."""
    table = [["task", "run", *(str(entry["length"]) for entry in results[0]["lengths"])]]
    for task, result in product((*results[0]["tasks"], "mean"), results):
        cells = [
            percent(e[task]["tokens"]) if e["reason"] is None else "-" for e in result["lengths"]
        ]
        table.append([task, result["run"], *cells])
    heading = (
        f"Right answer tokens, {results[0]['samples']} sequences a cell, RoPE scaling "
        f"{output.format_rope(*results)}; 95 % confidence intervals."
    )
    return (
        "\n\n".join([heading, output.format_table(table, n_names=2), *output.rejections(results)])
        + "\n"
    )


def plot(results: list[Result], path: Path) -> None:
    """The share of right tokens against length: a panel for each task, and their mean."""
    panels = (*results[0]["tasks"], "mean")
    lengths = [entry["length"] for entry in results[0]["lengths"]]
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True)
    for axes, task in zip(grid, panels, strict=True):
        curves = output.length_curves(results, partial(share_and_errors, task))
        curves = [curve._replace(errors=np.transpose(curve.errors)) for curve in curves]
        output.draw_curves(axes, curves, lengths, results)
        axes.set(title=task, ylim=(-0.03, 1.03), xlabel="length (tokens)")
    grid[0].set_ylabel("right answer tokens, 95 % interval")
    figure.suptitle(f"RoPE scaling {output.format_rope(*results)}")
    output.legend_below(figure, 6)
    output.save_figure(figure, path)


def share_and_errors(task: str, entry: dict[str, Any]) -> Any:
    """A task's share, and how far below and above it the interval reaches."""
    share, low, high = (entry[task]["tokens"][key] for key in ("share", "low", "high"))
    return share, (abs(share - low), abs(high - share))  # rounding may put an end inside of 0 or 1


if __name__ == "__main__":
    run_main(main)
