"""What the attention of trained models does as contexts grow: for each layer, head and length.

    python diagnose.py runs/lssar
    python diagnose.py runs/softmax runs/ssmax runs/lssar --lengths 1024 4096 16384
    torchrun --standalone --nproc_per_node=8 diagnose.py runs/lssar --tokens 1048576

The validation text is cut into blocks of the longest length. The last rows (queries) of each block are looked
at in windows of each length that all end there: the same tokens, and more of what came before them. Reported
are means over rows of how wide their scores are, how concentrated their weights, how much goes to the first
token (NormSoftmax, Figures 2a and 4; the attention sink): --help lists all, attention_statistics.py has the
formulas.

Writes diagnose.json and diagnose.png (curves for each layer; heat-maps of layers and heads at the shortest
and the longest length) into the run folder; several runs get one more picture, with a curve for each.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from data.batches import val_windows
from data.dataset import TokenStream
from evals.attention_statistics import STATISTICS, model_statistics
from evals.common import (
    MARKERS,
    Run,
    add_arguments,
    add_lengths,
    choose_lengths,
    choose_picture,
    describe_rope,
    evaluate_all,
    format_table,
    mark_training_length,
    mean_and_stderr,
    open_runs,
    open_validation,
    parse_arguments,
    progress,
    save_figure,
    short,
    token_axis,
    whole_number,
    with_stderr,
)
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import World, join_world
from model import GPT, RopeKind, RopeScaling


@dataclass(frozen=True)
class Plan:
    """What is common to all runs of a call."""

    lengths: list[int]  # ascending
    tokens: int  # at most
    rows: int
    rope: RopeKind
    rope_theta: float | None

    def n_blocks(self, stream: TokenStream) -> int:
        return val_windows(stream, self.tokens, self.lengths[-1])


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs = open_runs(args.runs, args.name)
        streams = {run: open_validation(run.config, args.data) for run in runs}
        plan = make_plan(args, streams)
        picture = choose_picture(args.out, runs, args.name)
        evaluate_all(
            runs, world, picture, lambda run: evaluate(run, streams[run], plan, args, world), report, plot
        )


def make_plan(args: argparse.Namespace, streams: dict[Run, TokenStream]) -> Plan:
    lengths = choose_lengths(args.lengths, streams, (1, 2, 4, 8, 16))
    rows = args.rows or max(1, min(128, lengths[0] // 2))
    if rows > lengths[0]:
        raise UserError(f"--rows {rows}: expected at most the shortest length, {lengths[0]}")
    plan = Plan(lengths, args.tokens, rows, args.rope, args.rope_theta)
    for stream in streams.values():
        plan.n_blocks(stream)  # raises if there is none
    return plan


# ---------------------------------------------------------------- evaluation


def evaluate(
    run: Run, stream: TokenStream, plan: Plan, args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """All lengths of one run: what diagnose.json holds. Every process gets the same."""
    model, _, step, _ = run.load(world)
    n_blocks = plan.n_blocks(stream)
    mine = len(range(world.rank, n_blocks, world.size))
    with progress(run.label, mine * sum(plan.lengths), "tok", world) as bar:
        lengths = [at_length(model, stream, plan, length, world, bar) for length in plan.lengths]
    return {
        **run.describe(step, args),
        "data": {"dir": str(stream.folder), "split": stream.split, "fingerprint": stream.fingerprint,
                 "blocks": n_blocks, "block_length": plan.lengths[-1], "rows": plan.rows},
        "lengths": lengths,
        "meaning": STATISTICS | {"heads": "for each layer, for each head", "mean": "over layers and heads"},
    }  # fmt: skip


def at_length(
    model: GPT, stream: TokenStream, plan: Plan, length: int, world: World, bar: tqdm
) -> dict[str, Any]:
    """The statistics of every block's last rows in windows of `length`."""
    n_blocks, longest = plan.n_blocks(stream), plan.lengths[-1]
    m = model.config.model
    shape = (n_blocks, m.n_layer, m.n_head, len(STATISTICS))
    values = torch.zeros(shape, dtype=torch.float64, device=world.device)
    rope, reason = RopeScaling(plan.rope, plan.rope_theta), None
    try:
        for block in range(world.rank, n_blocks, world.size):
            tokens = torch.from_numpy(stream.read((block + 1) * longest - length, length))
            with model.autocast():
                values[block] = model_statistics(model, tokens[None].to(world.device), rope, plan.rows)[0]
            bar.update(length)
    except UserError as e:  # ssmax_pn has no p_n beyond its training length
        reason = str(e)
    values = world.sum(values).cpu()  # also when refused: a process without blocks waits here
    if reason is None and not values.isfinite().all():
        reason = "not finite"
    return {"length": length, "reason": reason} | (summarise(values) if reason is None else {})


def summarise(values: Tensor) -> dict[str, Any]:
    """(n_blocks, n_layer, n_head, S) to means by head, and over all heads with its error over blocks."""
    heads = {name: values.mean(0)[..., i].tolist() for i, name in enumerate(STATISTICS)}
    every = [mean_and_stderr(values[..., i].mean((1, 2))) for i in range(len(STATISTICS))]
    mean = {name: mean for name, (mean, _) in zip(STATISTICS, every, strict=True)}
    stderr = {name: stderr for name, (_, stderr) in zip(STATISTICS, every, strict=True)}
    return {"mean": mean, "stderr": stderr, "heads": heads}


# ---------------------------------------------------------------- tables and pictures


def report(results: list[dict[str, Any]]) -> str:
    """A table for each statistic: runs down, lengths across; means over layers and heads."""
    data = results[0]["data"]
    parts = [
        f"The last {data['rows']} rows of {data['blocks']} blocks of {data['block_length']} tokens of "
        f"{data['dir']}, in windows of each length; RoPE scaling {describe_rope(results[0])}.\n"
        "Means over layers and heads, ± standard error over blocks."
    ]
    for name, meaning in STATISTICS.items():
        table = [["run", "normaliser", *(str(row["length"]) for row in results[0]["lengths"])]]
        for result in results:
            cells = [
                with_stderr(row["mean"][name], row["stderr"][name]) if row["reason"] is None else "-"
                for row in result["lengths"]
            ]
            table.append([result["run"], result["normaliser"], *cells])
        parts.append(f"{name}: {meaning}\n{format_table(table)}")
    parts += [
        f"{result['run']} at {row['length']}: no result: {row['reason']}"
        for result in results
        for row in result["lengths"]
        if row["reason"] is not None
    ]
    return "\n\n".join(parts) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """Curves against length, a panel for each statistic; for one run also heat-maps of layers and heads."""
    alone = results[0] if len(results) == 1 else None
    n_rows, n_columns = (3, len(STATISTICS)) if alone else (2, math.ceil(len(STATISTICS) / 2))
    figure = Figure(figsize=(3.2 * n_columns, 3.2 * n_rows + 0.4), layout="constrained")
    grid = figure.subplots(n_rows, n_columns)
    for i, (name, axes) in enumerate(zip(STATISTICS, grid.flat, strict=False)):
        draw_curves(axes, layer_curves(alone, name) if alone else run_curves(results, name))
        axes.set_title(name)
        mark_training_length(axes, results)
        if alone:
            draw_heat_maps(grid[1:, i], alone, name)
    if alone:
        figure.suptitle(f"{alone['run']}: {alone['normaliser']}, step {alone['step']}")
    else:
        for axes in grid.flat[len(STATISTICS) :]:
            axes.axis("off")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    return save_figure(figure, path)


def finished(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["lengths"] if row["reason"] is None]


Curve = tuple[str, list[int], list[float], list[float]]  # label, lengths, values, errors


def layer_curves(result: dict[str, Any], name: str) -> list[Curve]:
    """Mean over heads, for each layer."""
    rows, curves = finished(result), []
    for layer in range(len(rows[0]["heads"][name]) if rows else 0):
        means = [sum(heads) / len(heads) for heads in (row["heads"][name][layer] for row in rows)]
        curves.append((f"layer {layer}", [row["length"] for row in rows], means, [0.0] * len(rows)))
    return curves


def run_curves(results: list[dict[str, Any]], name: str) -> list[Curve]:
    """Mean over layers and heads, for each run."""
    curves = []
    for result in results:
        rows = finished(result)
        means, errors = [row["mean"][name] for row in rows], [row["stderr"][name] or 0.0 for row in rows]
        curves.append(
            (f"{result['run']}: {result['normaliser']}", [r["length"] for r in rows], means, errors)
        )
    return curves


def draw_curves(axes: Any, curves: list[Curve]) -> None:
    for i, (label, lengths, values, errors) in enumerate(curves):
        marker, color = MARKERS[i % len(MARKERS)], f"C{i % 10}"
        axes.errorbar(lengths, values, errors, color=color, marker=marker, markersize=4, label=label)
    token_axis(axes, sorted({length for _, xs, _, _ in curves for length in xs}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("window length (tokens)")


def draw_heat_maps(panels: Any, result: dict[str, Any], name: str) -> None:
    """Layers by heads at the shortest and the longest length, in the same colours."""
    rows = finished(result)
    if not rows:
        return
    pair = [(row["length"], torch.tensor(row["heads"][name])) for row in (rows[0], rows[-1])]
    every = torch.stack([heads for _, heads in pair])
    low, high = every.min().item(), every.max().item()
    for axes, (length, heads) in zip(panels, pair, strict=True):
        image = axes.imshow(heads.numpy(), vmin=low, vmax=high, aspect="auto", origin="lower")
        axes.set_title(f"{name} at {short(length)}", fontsize=10)
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        for axis, n in ((axes.yaxis, heads.shape[0]), (axes.xaxis, heads.shape[1])):
            axis.set_ticks(range(0, n, 1 + n // 12))
    panels[0].figure.colorbar(image, ax=panels, shrink=0.8)


# ---------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    listed = [f"  {name:18}{meaning}" for name, meaning in STATISTICS.items()]
    parser.epilog = "\n".join(
        ["p = |A| / sum |A| over the n visible keys, the weights of a softmax:", *listed]
    )
    add_arguments(parser)
    add_lengths(parser, "window lengths (default: 1, 2, 4, 8, 16 x the training length)")
    parser.add_argument(
        "--rows",
        type=whole_number,
        metavar="N",
        help="the last N rows of each block (default: 128, or half the shortest length)",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number,
        default=262_144,
        metavar="N",
        help="at most the first N validation tokens, in whole blocks (default: %(default)s)",
    )
    return parse_arguments(parser, "diagnose")


if __name__ == "__main__":
    run_main(main)
