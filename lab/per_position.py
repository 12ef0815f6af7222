"""The loss by position in one long window, as in SSMax's Figure 5.

    python -m lab.per_position runs/a_softmax_162m runs/b_ssmax_162m --lengths 20000 \\
        --rope theta --rope-theta 500000

The validation text is cut into windows of the longest of --lengths, by default 16 times the
training length. Their tokens are taken in --parts parts of one width. eval_length.py has the same
losses in parts that double, beside shorter windows and the context cut.

Writes per_position.json and per_position.png into the run folder and adds to its rows.csv. Several
runs get one more figure.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from eval_length import block_losses
from evals import common, output
from evals.common import Blocks, add_arguments, mean_and_stderr, parse_arguments
from evals.output import Result
from evals.rows import FACTORS, Cell, text_key
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from model import GPT
from positions import RopeScaling

N_PRINTED = 10  # parts of the table


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(
        parser, "the longest is the window (default: 16 x the training length)", tokens=2**20
    )
    parts_help = "of a window (default: %(default)s)"
    parser.add_argument("--parts", type=positive_int, default=200, metavar="N", help=parts_help)
    args = parse_arguments(parser, "per_position")
    args.lengths = args.lengths and [max(args.lengths)]
    return args


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args, world, FACTORS[-1:])
        all_blocks = common.open_blocks(args, runs)
        length = all_blocks[0].longest
        if args.parts > length:
            raise UserError(f"--parts {args.parts}: expected at most {length}, the longest length")
        edges = [i * length // args.parts for i in range(args.parts + 1)]

        def measure(i: int, model: GPT, step: int) -> tuple[dict[str, Any], str, list[Cell]]:
            data = all_blocks[i].describe()
            entry = summarise(edges, score(model, all_blocks[i], edges, args.rope_scaling, world))
            return {"data": data, "lengths": [entry]}, text_key(data), cells(entry)

        common.evaluate("per_position", args, world, runs, picture, measure, tables, plot)


def score(
    model: GPT, blocks: Blocks, edges: list[int], rope: RopeScaling, world: World
) -> Tensor | str:
    """The mean loss of each part of each window, (n_blocks, n_parts), or why there are none."""

    def part_losses(items: Sequence[int]) -> Tensor:
        (item,) = items
        (losses,) = block_losses(model, blocks, item, blocks.longest, rope).double()  # (longest,)
        return torch.stack([losses[start:stop].mean() for start, stop in pairwise(edges)])[None]

    return common.score_all(world, f"{blocks.longest} tokens", blocks.n_blocks, part_losses)


def summarise(edges: list[int], losses: Tensor | str) -> dict[str, Any]:
    """The entry of "lengths" in per_position.json: the parts, their mean losses with errors over
    windows.
    """
    if isinstance(losses, str):
        return {"length": edges[-1], "reason": losses, "parts": []}
    parts = []
    for (start, stop), of_part in zip(pairwise(edges), losses.T, strict=True):
        loss, stderr = mean_and_stderr(of_part)
        parts.append({"from": start, "to": stop, "loss": loss, "stderr": stderr})
    return {"length": edges[-1], "reason": None, "parts": parts}


def cells(entry: dict[str, Any]) -> list[Cell]:
    return [
        (entry["length"], None, f"loss[{p['from']}:{p['to']}]", p["loss"]) for p in entry["parts"]
    ]


def tables(results: list[Result]) -> str:
    """Runs down, some of the parts across."""
    data = results[0]["data"]
    texts = ", ".join(dict.fromkeys(result["data"]["dir"] for result in results))
    # a rejected run has none
    parts = max((result["lengths"][0]["parts"] for result in results), key=len)
    printed = range(0, len(parts), max(1, len(parts) // N_PRINTED))
    lines = [["run", *(f"{parts[i]['from']}-{parts[i]['to'] - 1}" for i in printed)]]
    for result in results:
        own = result["lengths"][0]["parts"]
        shown = [
            output.format_stderr(own[i]["loss"], own[i]["stderr"]) if own else "-" for i in printed
        ]
        lines.append([result["run"], *shown])
    title = (
        f"Loss in nats by position in {data['blocks']} windows of {data['block_length']} tokens of "
        f"{texts}, ± standard error over windows, RoPE scaling {output.format_rope(*results)}."
    )
    shown_tables = [title, output.run_table(results), output.format_table(lines)]
    return "\n\n".join(shown_tables + output.rejections(results)) + "\n"


def plot(results: list[Result], path: Path) -> None:
    """The loss by position, and the training length (SSMax, Figure 5)."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        parts = result["lengths"][0]["parts"]
        middles = [(part["from"] + part["to"]) / 2 for part in parts]
        axes.plot(middles, [part["loss"] for part in parts], label=output.run_title(result))
    for i, train_len in enumerate({result["train_len"] for result in results}):
        axes.axvline(train_len, color="0.4", linestyle=":", label=None if i else "training length")
    axes.set(
        xlabel=f"position (tokens), RoPE scaling {output.format_rope(*results)}",
        ylabel="loss (nats)",
    )
    axes.grid(alpha=0.3)
    output.legend_below(figure, 3)
    output.save_figure(figure, path)


if __name__ == "__main__":
    run_main(main)
