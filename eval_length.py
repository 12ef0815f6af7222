"""Loss at lengths that a model was never trained on, 1x to 16x its training length.

    python eval_length.py runs/lssar                                      # a run's newest checkpoint
    python eval_length.py runs/softmax runs/lssa runs/lssar               # one table, one figure
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope theta --rope-theta 500000
    python eval_length.py runs/lssar --rope none --tag none               # results beside the others
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same tokens, the first of the validation stream (after --skip), cut into blocks of
the longest length; each block is cut into windows of length T, for each T. Reported:

    loss           mean over all tokens, in nats. A longer window gives tokens more context, and puts most of
                   them at positions that training never had. This number contains both effects.
    same targets   mean over the last tokens of each block only (as many as the training length), predicted
                   from windows of length T that all end there. Only the context changes.
    buckets        loss by position in the window, in buckets that double.

Standard errors are those of means over blocks, since the losses of neighbouring tokens are correlated. The
losses of single blocks are in rows.csv (see evals/rows.py), to pair runs or lengths over text.

Writes eval_length.json and .png into the run folder (eval_length_<checkpoint> for one checkpoint file). With
--tag none they are eval_length_none. Several runs get one more figure.
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
LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary
SCORED = "Scored: {blocks} blocks of {block_length} tokens of {dir} ({split}) after token {skipped_tokens:,}."


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args)
        all_blocks = common.open_blocks(args, runs)
        n_same = count_same_targets(all_blocks[0].lengths, runs)

        def measure(i: int, model: GPT) -> tuple[dict[str, Any], str, Iterator[Cell]]:
            blocks = all_blocks[i]
            at_lengths = []
            for length in blocks.lengths:
                sums = score(model, blocks, length, n_same, args.rope_scaling, world)
                at_lengths.append(summarise(length, sums, blocks, n_same))
            data = blocks.describe()
            summary = {"data": data, "same_target_tokens": n_same, "lengths": at_lengths}
            return summary, text_key(data), cells(summary)

        common.evaluate("eval_length", args, world, runs, picture, measure, tables, plot)


# ---------------------------------------------------------------- windows
def count_same_targets(lengths: list[int], runs: list[EvaluatedRun]) -> int:
    """The number of last tokens of a block that count as same targets, at most a training length.

    Raises UserError: a length does not divide the longest. All lengths have to score the same tokens.
    """
    for length in lengths:
        if lengths[-1] % length:
            raise UserError(f"--lengths: {length} does not divide the longest, {lengths[-1]}")
    return min(lengths[0], *(run.config.train.seq_len for run in runs))


def bucket_edges(length: int) -> list[int]:
    """0, 128, 256, 512, ... and the length itself."""
    edges = [0]
    edge = FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


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
    """(W, T) losses to float64 sums, of each bucket and of the same targets, a block's last tokens."""
    losses = losses.double()
    by_position = losses.sum(0)  # (T,)
    buckets = [by_position[i:j].sum() for i, j in pairwise(bucket_edges(len(by_position)))]
    return torch.stack([*buckets, losses[-1, -n_same:].sum()])


# ---------------------------------------------------------------- summary
def summarise(length: int, sums: Tensor | str, blocks: Blocks, n_same: int) -> dict[str, Any]:
    """An entry of "lengths" in eval_length.json: means and standard errors, or the reason for none."""
    if isinstance(sums, str):
        return {"length": length, "reason": sums}
    by_bucket = sums[:, :-1]  # (n_blocks, n_buckets)
    losses = by_bucket.sum(1) / blocks.longest  # (n_blocks,)
    same_targets = sums[:, -1] / n_same
    entry: dict[str, Any] = {"length": length, "reason": None}
    entry["loss"], entry["stderr"] = mean_and_stderr(losses)
    entry["same_target_loss"], entry["same_target_stderr"] = mean_and_stderr(same_targets)
    entry["block_losses"] = [round(loss, 6) for loss in losses.tolist()]
    entry["block_same_target_losses"] = [round(loss, 6) for loss in same_targets.tolist()]
    entry["buckets"] = []
    window_sums = by_bucket.T / (blocks.longest // length)
    for (start, stop), bucket_sums in zip(pairwise(bucket_edges(length)), window_sums, strict=True):
        loss, stderr = mean_and_stderr(bucket_sums / (stop - start))
        entry["buckets"].append({"from": start, "to": stop, "loss": loss, "stderr": stderr})
    return entry


def cells(summary: dict[str, Any]) -> Iterator[Cell]:
    """The numbers of a summary's rows; None for those of a rejected length."""
    nothing = [None] * summary["data"]["blocks"]
    same_targets = f"same_targets[{summary['same_target_tokens']}]"
    for entry in summary["lengths"]:
        length = entry["length"]
        for measure, key in (("loss", "block_losses"), (same_targets, "block_same_target_losses")):
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
    scored = dict.fromkeys(SCORED.format_map(result["data"]) for result in results)  # one line if they agree
    parts = [
        "\n".join(scored),
        f"Loss in nats over all tokens, ± standard error over blocks; RoPE {output.format_rope(*results)}.",
        output.length_table(results, itemgetter("loss", "stderr")),
        f"Same targets: loss over the last {span} tokens of each block, from windows that end there.",
        output.length_table(results, itemgetter("same_target_loss", "same_target_stderr")),
        f"Loss by position in windows of {block} tokens.",
        bucket_table(results),
    ]
    return "\n\n".join(parts + output.rejections(results)) + "\n"


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
    """Loss against length, over all tokens and over the same targets."""
    figure = Figure(figsize=(11, 4.5 + 0.2 * (len(results) // 3)), layout="constrained")
    lengths = [entry["length"] for entry in results[0]["lengths"]]
    span = output.format_length(results[0]["same_target_tokens"])
    titles = {"": "All tokens", "same_target_": f"Same targets (last {span} tokens of each block)"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        curves = output.length_curves(results, itemgetter(f"{key}loss", f"{key}stderr"))
        output.draw_curves(axes, curves, lengths, results)
        axes.set(title=title, xlabel=f"window length (tokens), RoPE scaling {output.format_rope(*results)}")
        axes.set(ylabel="validation loss (nats)")
        axes.tick_params(labelleft=True)
    output.legend_below(figure, 3)
    output.save_figure(figure, path)


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    lengths_help = "divisors of the longest (default: 1, 2, 4, 8, 16 x the training length)"
    common.add_arguments(parser, lengths_help, tokens=2**20)
    return common.parse_arguments(parser, "eval_length")


if __name__ == "__main__":
    run_main(main)
