"""Loss at lengths that a model was never trained on, 1x to 16x its training length.

    python eval_length.py runs/lssar                                      # a run's newest checkpoint
    python eval_length.py runs/softmax runs/lssa runs/lssar               # one table, one figure
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope theta --rope-theta 500000
    python eval_length.py runs/a runs/b --per-position --lengths 20000    # as SSMax, Figure 5
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same tokens, the first of the validation stream (after --skip), cut into blocks of
the longest length; each block is cut into windows of length T, for each T. Reported:

    loss           mean over all tokens, in nats. A longer window gives tokens more context, and puts most of
                   them at positions that training never had. This number contains both effects.
    same targets   mean over the last tokens of each block only (as many as the training length), predicted
                   from windows of length T that all end there. Only the context changes.
    per position   loss by position in the window, in buckets that double; with --per-position also in 100
                   equal parts of the longest window, as a curve with its standard error (SSMax, Figure 5).

Standard errors are those of means over blocks, since the losses of neighbouring tokens are correlated. The
losses of single blocks are in rows.csv (see evals/rows.py), to pair runs or lengths over text.

Writes eval_length.json and .png into the run folder (eval_length_<checkpoint> for one checkpoint file).
Several runs get one more figure. --tag none names the results eval_length_none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.batches import val_batch
from evals import common, output
from evals.common import Blocks, EvaluatedRun, mean_and_stderr
from evals.output import Result
from evals.rows import Cell, text_key
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import World, join_world
from model import GPT
from positions import RopeScaling

FIRST_BUCKET = 128  # positions; each further bucket reaches twice as far
POSITION_PARTS = 100  # points of the --per-position curve
LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary
MEANING = {
    "loss": "mean cross-entropy in nats over all tokens; the same tokens at every length",
    "stderr": "standard error of the mean over blocks of the longest length; null: only one block",
    "same_target_loss": "mean over the last same_target_tokens of each block, in windows that end there",
    "block_losses": "loss of each block, block_same_target_losses likewise: to pair runs over text",
    "buckets": "loss at positions from <= i < to of the window",
    "positions": "loss at positions from <= i < to of the longest window; stderr over blocks",
    "reason": "why there are no numbers for this length; null: there are",
}


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args)
        all_blocks = common.open_blocks(args, runs)
        n_same = count_same_targets(all_blocks[0].lengths, runs)

        def measure(i: int, model: GPT) -> tuple[dict[str, Any], str, Iterator[Any]]:
            blocks = all_blocks[i]
            scores = [score(model, blocks, n, n_same, args.rope_scaling, world) for n in blocks.lengths]
            summary = summarise(scores, blocks, n_same, args.per_position)
            return summary, text_key(summary["data"]), cells(summary)

        common.evaluate("eval_length", args, world, runs, picture, measure, tables, plot)


# ---------------------------------------------------------------- windows
def count_same_targets(lengths: list[int], runs: list[EvaluatedRun]) -> int:
    """The number of last tokens of a block that count as same targets, at most a training length.

    Raises UserError: a length does not divide the longest. All lengths have to score the same tokens.
    """
    for length in lengths:
        if lengths[-1] % length:
            given = " ".join(map(str, lengths))
            raise UserError(
                f"--lengths {given}: {length} does not divide the longest; expected divisors of it"
            )
    return min(lengths[0], *(run.config.train.seq_len for run in runs))


def bucket_edges(length: int) -> list[int]:
    """0, 128, 256, 512, ... and the length itself."""
    edges = [0]
    edge = FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def part_edges(length: int) -> list[int]:
    """0 to the length in POSITION_PARTS equal parts; one part for each position of a short window."""
    n = min(POSITION_PARTS, length)
    return [length * i // n for i in range(n + 1)]


# ---------------------------------------------------------------- score
def score(
    model: GPT, blocks: Blocks, length: int, n_same: int, rope: RopeScaling, world: World
) -> Tensor | str:
    """The `block_sums` of every block, (n_blocks, n_sums), or why there are none (see `common.score_all`)."""

    def sums(items: Sequence[int]) -> Tensor:
        return torch.stack([block_sums(block_losses(model, blocks, i, length, rope), n_same) for i in items])

    return common.score_all(world, f"{length} tokens", blocks.n_blocks, sums)


def block_losses(model: GPT, blocks: Blocks, block: int, length: int, rope: RopeScaling) -> Tensor:
    """The losses of one block's tokens: (W, T) float32, W = longest / T consecutive windows of one batch."""
    n = blocks.longest // length
    first = (blocks.n_skipped + block) * n
    x, y = map(torch.from_numpy, val_batch(blocks.stream, first, n, length))  # (W, T)
    device = model.embedding.weight.device
    with model.autocast():
        return model.token_losses(x.to(device), y.to(device), rope=rope, chunk=max(1, LOGITS_AT_ONCE // n))


def block_sums(losses: Tensor, n_same: int) -> Tensor:
    """(W, T) losses to float64 sums: by bucket, by part, and over the same targets, a block's last tokens."""
    losses = losses.double()
    by_position = losses.sum(0)  # (T,)
    edges = bucket_edges(len(by_position)), part_edges(len(by_position))
    sums = [by_position[i:j].sum() for each in edges for i, j in pairwise(each)]
    return torch.stack([*sums, losses[-1, -n_same:].sum()])


# ---------------------------------------------------------------- summary
def summarise(scores: list[Tensor | str], blocks: Blocks, n_same: int, per_position: bool) -> dict[str, Any]:
    """Means and standard errors, finite numbers only: what eval_length.json holds besides the run's keys."""
    entries = []
    for length, sums in zip(blocks.lengths, scores, strict=True):
        entry: dict[str, Any] = {"length": length, "reason": sums if isinstance(sums, str) else None}
        entries.append(entry)
        if isinstance(sums, str):
            continue
        buckets = bucket_edges(length)
        parts = part_edges(length)
        by_bucket, by_part, same = sums.split((len(buckets) - 1, len(parts) - 1, 1), dim=1)  # (n_blocks, ...)
        for key, losses in (("", by_bucket.sum(1) / blocks.longest), ("same_target_", same[:, 0] / n_same)):
            entry[f"{key}loss"], entry[f"{key}stderr"] = mean_and_stderr(losses)
            entry[f"block_{key}losses"] = [round(loss, 6) for loss in losses.tolist()]
        n_windows = blocks.longest // length  # of a block
        entry["buckets"] = range_losses(by_bucket / n_windows, buckets)
        if per_position and length == blocks.longest:
            entry["positions"] = range_losses(by_part, parts)
    data = {"data": blocks.describe(), "same_target_tokens": n_same}
    return data | {"lengths": entries, "meaning": MEANING}


def range_losses(sums: Tensor, edges: list[int]) -> list[dict[str, Any]]:
    """Means over the positions between edges, from each block's sums in a window, (n_blocks, n)."""
    ranges = []
    for (start, stop), block_sums in zip(pairwise(edges), sums.T, strict=True):
        loss, stderr = mean_and_stderr(block_sums / (stop - start))
        ranges.append({"from": start, "to": stop, "loss": loss, "stderr": stderr})
    return ranges


def cells(result: Result) -> Iterator[Cell]:
    """The numbers of a result's rows; None for those of a rejected length."""
    nothing = [None] * result["data"]["blocks"]
    for entry in result["lengths"]:
        length = entry["length"]
        for measure, key in (("loss", "block_losses"), ("same_targets", "block_same_target_losses")):
            for block, loss in enumerate(entry.get(key, nothing)):
                yield length, block, measure, loss
        losses = {bucket["from"]: bucket["loss"] for bucket in entry.get("buckets", [])}
        for start, stop in pairwise(bucket_edges(length)):
            yield length, None, f"loss[{start}:{stop}]", losses.get(start)


# ---------------------------------------------------------------- tables
def tables(results: list[Result]) -> str:
    """All tables as text, each with a line that describes it."""
    span = results[0]["same_target_tokens"]
    block = results[0]["data"]["block_length"]
    parts = [
        describe_data(results),
        f"Loss in nats over all tokens, ± standard error over blocks; RoPE {output.format_rope(*results)}.",
        output.length_table(results, itemgetter("loss", "stderr")),
        f"Same targets: loss over the last {span} tokens of each block, from windows that end there.",
        output.length_table(results, itemgetter("same_target_loss", "same_target_stderr")),
        f"Loss by position in windows of {block} tokens.",
        bucket_table(results),
    ]
    return "\n\n".join(parts + output.rejections(results)) + "\n"


def describe_data(results: list[Result]) -> str:
    """The scored tokens, run by run where they differ."""
    runs: dict[str, list[str]] = {}  # by their text
    for result in results:
        data = result["data"]
        skipped = f"after {data['skipped_tokens']:,}, {data['blocks']} blocks of {data['block_length']}"
        scored = f"Scored: {data['tokens']:,} tokens of {data['dir']} ({data['split']}) {skipped}"
        runs.setdefault(scored, []).append(result["run"])
    if len(runs) == 1:
        return f"{scored}."
    listed = [f"{scored}: {', '.join(labels)}." for scored, labels in runs.items()]
    return "\n".join([*listed, "Runs that were scored on other tokens do not compare."])


def bucket_table(results: list[Result]) -> str:
    """Loss by position at the longest length."""
    edges = list(pairwise(bucket_edges(results[0]["data"]["block_length"])))
    lines = [["run", "normaliser", *(f"{start}-{stop - 1}" for start, stop in edges)]]
    for result in results:
        buckets = result["lengths"][-1].get("buckets")  # none if the length was rejected
        cells = [f"{bucket['loss']:.4f}" for bucket in buckets] if buckets else ["-"] * len(edges)
        lines.append([result["run"], result["normaliser"], *cells])
    return output.format_table(lines)


# ---------------------------------------------------------------- figure
def plot(results: list[Result], path: Path) -> None:
    """Loss against length over all tokens and over the same targets, and that of --per-position."""
    with_positions = any("positions" in result["lengths"][-1] for result in results)
    figure = Figure(
        figsize=(16 if with_positions else 11, 4.5 + 0.2 * (len(results) // 3)), layout="constrained"
    )
    panels = figure.subplots(1, 3 if with_positions else 2, sharey=True)
    lengths = [entry["length"] for entry in results[0]["lengths"]]
    span = output.format_length(results[0]["same_target_tokens"])
    rope = f"(tokens), RoPE scaling {output.format_rope(*results)}"
    titles = {"": "All tokens", "same_target_": f"Same targets (last {span} tokens of each block)"}
    for axes, (key, title) in zip(panels, titles.items(), strict=False):
        curves = output.length_curves(results, itemgetter(f"{key}loss", f"{key}stderr"))
        output.draw_curves(axes, curves, lengths, results)
        axes.set(title=title, xlabel=f"window length {rope}", ylabel="validation loss (nats)")
        axes.tick_params(labelleft=True)
    if with_positions:
        draw_positions(panels[2], results)
        panels[2].set(xlabel=f"position in the window {rope}")
    output.legend_below(figure, 3)
    output.save_figure(figure, path)


def draw_positions(axes: Any, results: list[Result]) -> None:
    """Loss against the position in the longest window, with a band of one standard error."""
    for result in results:
        parts = result["lengths"][-1].get("positions", [])  # none if the length was rejected
        middle = [(part["from"] + part["to"]) / 2 for part in parts]
        low = [part["loss"] - (part["stderr"] or 0.0) for part in parts]
        high = [part["loss"] + (part["stderr"] or 0.0) for part in parts]
        (line,) = axes.plot(middle, [part["loss"] for part in parts])
        axes.fill_between(middle, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    output.mark_training_length(axes, results)
    axes.set(title=f"By position, means over {results[0]['data']['blocks']} windows, ± standard error")
    axes.tick_params(labelleft=True)
    axes.grid(alpha=0.3)


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    lengths_help = "divisors of the longest (default: 1, 2, 4, 8, 16 x the training length)"
    common.add_arguments(parser, lengths_help, tokens=2**20)
    position_help = "also a curve of the loss by position in windows of the longest length"
    parser.add_argument("--per-position", action="store_true", help=position_help)
    return common.parse_arguments(parser, "eval_length")


if __name__ == "__main__":
    run_main(main)
