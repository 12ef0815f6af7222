"""Synthetic recall: does a model trained on data/recall.py still retrieve at lengths it never saw?

    python -m lab.recall runs/comparison_recall/softmax
    python -m lab.recall runs/comparison_recall/*/ --rope none --tag none
    python -m lab.recall runs/comparison_recall/lssar_p15 --lengths 64 1024 16384 --samples 50

Answers are scored by teacher forcing: each is the model's likeliest token, given the right ones before it.
Reported for each task and length:

    tokens      share of answer tokens that are right
    sequences   share of sequences whose whole answer is right

with 95 % confidence intervals (Wilson) for as many trials as there are sequences: the tokens of an answer are
not independent. Sequences are fresh, and the same for every run. "mean" is over tasks, with the interval of
one. Chance: data/recall.py.

Writes eval_recall.json and eval_recall.png into the run folder; several runs get one more figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.dataset import dataset_info
from evals import common, output
from evals.common import proportion
from evals.output import Curve, Result, percent
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from lab import recall_data
from model import GPT
from positions import RopeScaling

MEASURES = ("tokens", "sequences")
FACTORS = (1, 2, 4, 8, 16, 32, 64)  # of the training length
TOKENS_AT_ONCE = 65536  # of one batch


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args)
        tasks = trained_tasks(runs, args.data)
        lengths = common.choose_lengths(args.lengths, runs, FACTORS)
        for length in lengths:
            try:
                recall_data.make_sequence(tasks[0], length, "")
            except UserError as e:
                raise UserError(f"--lengths {length}: {e}") from None
        results = []
        for run in runs:
            model, step = run.load(world)
            cells = [{task: score(model, task, n, args, world) for task in tasks} for n in lengths]
            if world.is_main:  # at once: a later run may fail
                summary = summarise(cells, lengths, args.samples) | {"seed": args.seed}
                results.append(run.write(summary, step, args))
                plot(results[-1:], run.file(".png"))
        if world.is_main:
            print(tables(results))
            if picture:
                plot(results, picture)


def trained_tasks(runs: list[common.EvaluatedRun], data_dir: str | None) -> list[str]:
    """The tasks that all runs were trained on.

    Raises:
        UserError: a run's dataset is not data/recall.py's, or the runs have other tasks.
    """
    tasks: list[str] = []
    for run in runs:
        folder = data_dir or run.config.data.dir
        info = dataset_info(folder)
        if info.get("dataset") != recall_data.DATASET:
            raise UserError(
                f"{run.label}: {folder} was not written by lab.recall_data; expected such a dataset"
            )
        if tasks and info["tasks"] != tasks:
            raise UserError(f"{run.label}: tasks {', '.join(info['tasks'])}: expected {', '.join(tasks)}")
        tasks = info["tasks"]
    return tasks


# ---------------------------------------------------------------- score
def score(model: GPT, task: str, length: int, args: argparse.Namespace, world: World) -> Tensor | str:
    """Whether each answer token of each sequence is right, (N, A), or why not (see `common.score_all`)."""
    rope = RopeScaling(args.rope, args.rope_theta, length)

    def right(items: Sequence[int]) -> Tensor:
        rows = [recall_data.make_sequence(task, length, f"{args.seed} evaluation {i}") for i in items]
        tokens, mask = (np.stack(part).astype(np.int64) for part in zip(*rows, strict=True))  # (B, T) each
        with model.autocast():
            return answers_right(model, torch.from_numpy(tokens), torch.from_numpy(mask).bool(), rope)

    batch = max(1, TOKENS_AT_ONCE // length)
    return common.score_all(world, f"{task}, {length} tokens", args.samples, right, batch)


@torch.no_grad()
def answers_right(model: GPT, tokens: Tensor, mask: Tensor, rope: RopeScaling) -> Tensor:
    """Whether the likeliest token is the right one, where the mask is set: (B, T) each to (B, A)."""
    device = model.embedding.weight.device
    tokens, answers = tokens.to(device), mask[:, 1:].to(device)
    logits = model.logits(model.hidden(tokens[:, :-1], rope)[answers])  # (B * A, V)
    if not logits.isfinite().all():
        raise UserError("the model computed NaN or infinity")
    predicted = logits.argmax(-1)
    return (predicted == tokens[:, 1:][answers]).view(len(tokens), -1)


# ---------------------------------------------------------------- summary, table, figure
def summarise(cells: list[dict[str, Tensor | str]], lengths: list[int], n: int) -> dict[str, Any]:
    """What eval_recall.json holds besides the run's keys: for each length the shares of each task."""
    entries = []
    for length, scores in zip(lengths, cells, strict=True):
        entry: dict[str, Any] = {"length": length, "reason": None}
        counts: dict[str, list[float]] = {}  # of right tokens, in sequences; of right sequences
        for task, right in scores.items():
            if isinstance(right, str):
                entry["reason"] = right
            else:
                counts[task] = [right.mean(1).sum().item(), right.prod(1).sum().item()]
        if entry["reason"] is None:
            counts["mean"] = np.mean([*counts.values()], axis=0).tolist()  # with the interval of one task
            for task, each in counts.items():
                entry[task] = {name: proportion(x, n) for name, x in zip(MEASURES, each, strict=True)}
        entries.append(entry)
    return {"tasks": list(cells[0]), "samples": n, "lengths": entries}


def tables(results: list[Result]) -> str:
    """For each measure a table: tasks and runs down, lengths across."""
    n, rope = results[0]["samples"], output.format_rope(*results)
    parts = [f"{n} sequences a cell, RoPE scaling {rope}; 95 % confidence intervals."]
    for name in MEASURES:
        rows = [["task", "run", *(str(entry["length"]) for entry in results[0]["lengths"])]]
        for task, result in product((*results[0]["tasks"], "mean"), results):
            cells = [percent(e[task][name]) if e["reason"] is None else "-" for e in result["lengths"]]
            rows.append([task, result["run"], *cells])
        parts.append(f"{name}\n{output.format_table(rows)}")
    return "\n\n".join(parts + output.rejections(results)) + "\n"


def plot(results: list[Result], path: Path) -> None:
    """The share of right tokens against length: a panel for each task, and their mean."""
    panels = (*results[0]["tasks"], "mean")
    figure = Figure(figsize=(13, 7 + 0.2 * (len(results) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(panels) // 3), min(3, len(panels)), sharey=True, squeeze=False).flatten()
    for axes, task in zip(grid, panels, strict=False):
        curves = []
        for result in results:
            entries = [entry for entry in result["lengths"] if entry["reason"] is None]
            found = [entry[task]["tokens"] for entry in entries]
            # Absolute: rounding may put an end of the interval a bit inside of 0 or 1.
            errors = [[abs(share["share"] - share[end]) for share in found] for end in ("low", "high")]
            x, y = [entry["length"] for entry in entries], [share["share"] for share in found]
            curves.append(Curve(output.run_title(result), x, y, errors))
        output.draw_curves(axes, curves, [entry["length"] for entry in results[0]["lengths"]], results)
        axes.set(title=task, ylim=(-0.03, 1.03))
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.supxlabel(f"length (tokens), RoPE scaling {output.format_rope(*results)}")
    figure.supylabel("share of answer tokens that are right, 95 % interval")
    output.legend_below(figure, 3)
    output.save_figure(figure, path)


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    lengths_help = (
        f"even numbers from {recall_data.MIN_LENGTH} (default: 1, 2, 4, ... 64 x the training length)"
    )
    common.add_arguments(parser, lengths_help)
    add = parser.add_argument
    add("--samples", type=positive_int, default=200, metavar="N", help="of each cell (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the sequences (default: %(default)s)")
    return common.parse_arguments(parser, "eval_recall")


if __name__ == "__main__":
    run_main(main)
