"""Loss at lengths that a model was never trained on, 1x to 16x its training length.

    python eval_length.py runs/lssar                                      # a run's newest checkpoint
    python eval_length.py runs/softmax runs/lssa runs/lssar               # one table, one figure
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope theta --rope-theta 500000
    python eval_length.py runs/softmax runs/ssmax --per-position --lengths 20000
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same tokens, the first of the validation stream, cut into blocks of the longest
length; each block is cut into windows of length T, for each T. Reported:

    loss           mean over all tokens, in nats. A longer window gives tokens more context, and puts most of
                   them at positions that training never had: this number contains both effects.
    same targets   mean over the last tokens of each block only (as many as the training length), predicted
                   from windows of length T that all end there: only the context changes.
    per position   loss by position in the window, in buckets that double; with --per-position also in 100
                   equal parts of the longest window, as a curve with its standard error (SSMax, Figure 5).

Standard errors are those of means over blocks: the losses of neighbouring tokens are correlated. `change` in
the JSON is the difference to the shortest length with its paired error, smaller than that of either loss.

Writes eval_length.json and .png into the run folder (eval_length_<checkpoint> for one checkpoint file), with
--per-position also eval_length_position.png; several runs get one more figure. --tag none names the results
eval_length_none.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.batches import val_batch
from evals.common import (
    Blocks,
    EvaluatedRun,
    Rejection,
    add_arguments,
    mean_and_stderr,
    open_blocks,
    open_runs,
    parse_arguments,
    token_bar,
)
from evals.figures import draw_curves, length_curves, mark_training_length, save_figure
from evals.tables import format_length, format_rope, format_stderr, format_table, length_table, rejections
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from infra.files import write_json
from model import GPT
from positions import RopeScaling

FIRST_BUCKET = 128  # positions; each further bucket reaches twice as far
POSITION_PARTS = 100  # points of the --per-position curve
LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary
MEANING = {
    "loss": "mean cross-entropy in nats over all tokens; the same tokens at every length",
    "stderr": "standard error of the mean over blocks of the longest length; null: only one block",
    "change": "loss minus the shortest length's, null if that has none; change_stderr is paired over blocks",
    "same_target_loss": "mean over the last same_target_tokens of each block, in windows that end there",
    "perplexity": "exp(loss); null: too large for a float",
    "buckets": "loss at positions from <= i < to of the window",
    "positions": "loss at positions from <= i < to of the longest window; stderr over blocks",
    "reason": "why there are no numbers for this length; null: there are",
}


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = open_runs(args)
        all_blocks = open_blocks(args, runs)
        n_same = count_same_targets(all_blocks[0].lengths, runs)
        results, written = [], []
        for run, blocks in zip(runs, all_blocks, strict=True):
            model, step = run.load(world)
            scores = score(model, blocks, n_same, args.rope_scaling, run.label, world)
            results.append(run.describe(step, args) | summarise(scores, blocks, n_same, args.per_position))
            if world.is_main:  # at once: a later run may fail
                write_json(results[-1], run.file(".json"))
                written += [run.file(".json"), *plot(results[-1:], run.file(".png"))]
        if world.is_main:
            print(tables(results))
            written += plot(results, picture) if picture else []
            print("\n".join(f"wrote {path}" for path in written))


# ---------------------------------------------------------------- windows
def count_same_targets(lengths: list[int], runs: list[EvaluatedRun]) -> int:
    """The number of last tokens of a block that count as same targets: at most a training length.

    Raises:
        UserError: a length does not divide the longest.
    """
    for length in lengths:
        if lengths[-1] % length:
            raise UserError(
                f"--lengths {' '.join(map(str, lengths))}: {length} does not divide the longest; expected "
                "divisors of it, so that every length scores the same tokens"
            )
    return min(lengths[0], *(run.config.train.seq_len for run in runs))


def bucket_edges(length: int) -> list[int]:
    """0, 128, 256, 512, ... and the length itself."""
    edges, edge = [0], FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def part_edges(length: int) -> list[int]:
    """0 to the length in POSITION_PARTS equal parts; one part for each position of a short window."""
    n = min(POSITION_PARTS, length)
    return [length * i // n for i in range(n + 1)]


# ---------------------------------------------------------------- score
class Score(NamedTuple):
    """Sums of losses at one length, over all ranks."""

    sums: Tensor  # (n_blocks, n_buckets + n_parts + 1) float64 on the CPU, see `block_sums`
    reason: str | None  # the model rejected the length


def score(
    model: GPT, blocks: Blocks, n_same: int, rope: RopeScaling, label: str, world: World
) -> list[Score]:
    """A score for each length, the same on every rank.

    Each rank takes its share of the blocks. A block is always scored by one rank in one batch, so the number
    of ranks changes nothing.
    """
    share, scores = blocks.share(world), []
    with token_bar(label, len(share) * blocks.longest * len(blocks.lengths), world) as bar:
        for length in blocks.lengths:
            n_sums = len(bucket_edges(length)) + len(part_edges(length)) - 1
            sums = torch.zeros(blocks.n_blocks, n_sums, dtype=torch.float64, device=world.device)
            with Rejection() as rejection:
                for block in share:
                    sums[block] = block_sums(block_losses(model, blocks, block, length, rope), n_same)
                    bar.update(blocks.longest)
            scores.append(Score(world.sum(sums).cpu(), rejection.reason))
    return scores


def block_losses(model: GPT, blocks: Blocks, block: int, length: int, rope: RopeScaling) -> Tensor:
    """The losses of one block's tokens: (W, T) float32, W = longest / T consecutive windows of one batch.

    W·T is the same for all lengths, and so is the peak memory.
    """
    n = blocks.longest // length
    x, y = map(torch.from_numpy, val_batch(blocks.stream, block * n, n, length))  # (W, T)
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
def summarise(scores: list[Score], blocks: Blocks, n_same: int, per_position: bool) -> dict[str, Any]:
    """Means and standard errors, finite numbers only: what eval_length.json holds besides the run's keys."""
    shortest, entries = None, []
    for length, (sums, reason) in zip(blocks.lengths, scores, strict=True):
        n_buckets = len(bucket_edges(length)) - 1
        total = sums[:, :n_buckets].sum(1)  # (n_blocks,)
        if reason is None and not total.isfinite().all():
            reason = "the loss is not finite"
        entry: dict[str, Any] = {"length": length, "reason": reason}
        if reason is None:
            shortest = total if length == blocks.lengths[0] else shortest
            entry["loss"], entry["stderr"] = mean_and_stderr(total / blocks.longest)
            entry["perplexity"] = math.exp(entry["loss"]) if entry["loss"] < 700 else None  # exp(710) is inf
            entry["change"], entry["change_stderr"] = None, None
            if shortest is not None:
                change = mean_and_stderr((total - shortest) / blocks.longest)
                entry["change"], entry["change_stderr"] = change
            entry["same_target_loss"], entry["same_target_stderr"] = mean_and_stderr(sums[:, -1] / n_same)
            entry["buckets"] = summarise_buckets(sums[:, :n_buckets], length, blocks.longest // length)
            if per_position and length == blocks.longest:
                entry["positions"] = summarise_parts(sums[:, n_buckets:-1], length)
        entries.append(entry)
    data = {"data": blocks.describe(), "same_target_tokens": n_same}
    return data | {"lengths": entries, "meaning": MEANING}


def summarise_buckets(by_bucket: Tensor, length: int, n_windows: int) -> list[dict[str, Any]]:
    """Mean loss in each bucket, (n_blocks, n_buckets), over all blocks of n_windows windows."""
    totals, edges = by_bucket.sum(0).tolist(), pairwise(bucket_edges(length))
    return [
        {"from": i, "to": j, "loss": total / (len(by_bucket) * n_windows * (j - i))}
        for (i, j), total in zip(edges, totals, strict=True)
    ]


def summarise_parts(by_part: Tensor, length: int) -> list[dict[str, Any]]:
    """Mean loss in each part, (n_blocks, n_parts), of windows that are a block; its error is over blocks."""
    entries = []
    for (i, j), sums in zip(pairwise(part_edges(length)), by_part.T, strict=True):
        loss, stderr = mean_and_stderr(sums / (j - i))
        entries.append({"from": i, "to": j, "loss": loss, "stderr": stderr})
    return entries


# ---------------------------------------------------------------- tables
def tables(results: list[dict[str, Any]]) -> str:
    """All tables as text, each with a line that describes it."""
    span, block = results[0]["same_target_tokens"], results[0]["data"]["block_length"]
    parts = [
        describe_data(results),
        f"Loss in nats over all tokens, ± standard error over blocks; RoPE {format_rope(results[0])}.",
        length_table(results, lambda x: format_stderr(x["loss"], x["stderr"])),
        f"Same targets: loss over the last {span} tokens of each block, from windows that end there.",
        length_table(results, lambda x: format_stderr(x["same_target_loss"], x["same_target_stderr"])),
        "Perplexity over all tokens.",
        length_table(results, lambda x: f"{x['perplexity'] or math.inf:.4g}"),
        f"Loss by position in windows of {block} tokens.",
        bucket_table(results),
    ]
    return "\n\n".join(parts + rejections(results)) + "\n"


def describe_data(results: list[dict[str, Any]]) -> str:
    """The scored tokens; run by run where they differ."""
    text = "Scored: the first {tokens:,} tokens of {dir} ({split}), {blocks} blocks of {block_length}"
    texts = [text.format(**result["data"]) for result in results]
    if len(set(texts)) == 1:
        return f"{texts[0]}."
    listed = [f"{text}: {result['run']}." for text, result in zip(texts, results, strict=True)]
    return "\n".join([*listed, "Runs that were scored on other tokens do not compare."])


def bucket_table(results: list[dict[str, Any]]) -> str:
    """Loss by position at the longest length."""
    edges = bucket_edges(results[0]["data"]["block_length"])
    rows = [["run", "normaliser", *(f"{start}-{stop - 1}" for start, stop in pairwise(edges))]]
    for result in results:
        buckets = result["lengths"][-1].get("buckets") or [None] * (len(edges) - 1)
        cells = [f"{bucket['loss']:.4f}" if bucket else "-" for bucket in buckets]
        rows.append([result["run"], result["normaliser"], *cells])
    return format_table(rows)


# ---------------------------------------------------------------- figures
def plot(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """The figure of all lengths, and that of --per-position where results have it."""
    written = [plot_lengths(results, path)]
    if any("positions" in result["lengths"][-1] for result in results):
        written.append(plot_positions(results, path.with_name(f"{path.stem}_position{path.suffix}")))
    return written


def plot_lengths(results: list[dict[str, Any]], path: Path) -> Path:
    """Loss against length: all tokens on the left, the same targets on the right."""
    figure = Figure(figsize=(11, 4.5 + 0.2 * (len(results) // 3)), layout="constrained")
    panels, span = figure.subplots(1, 2, sharey=True), format_length(results[0]["same_target_tokens"])
    titles = "All tokens", f"Same targets (last {span} tokens of each block)"
    for axes, title, key in zip(panels, titles, ("", "same_target_"), strict=True):
        curves = length_curves(results, itemgetter(f"{key}loss", f"{key}stderr"))
        handles = draw_curves(axes, curves, [entry["length"] for entry in results[0]["lengths"]], results)
        axes.set_title(title)
        axes.set_xlabel(f"window length (tokens), RoPE scaling {format_rope(results[0])}")
        axes.yaxis.set_tick_params(labelleft=True)
    panels[0].set_ylabel("validation loss (nats)")
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
    return save_figure(figure, path)


def plot_positions(results: list[dict[str, Any]], path: Path) -> Path:
    """Loss against the position in the longest window, with a band of one standard error."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        parts = result["lengths"][-1].get("positions", [])  # none if the length was rejected
        middle = [(part["from"] + part["to"]) / 2 for part in parts]
        low, high = ([part["loss"] + sign * (part["stderr"] or 0.0) for part in parts] for sign in (-1, 1))
        (line,) = axes.plot(
            middle, [part["loss"] for part in parts], label=f"{result['run']}: {result['normaliser']}"
        )
        axes.fill_between(middle, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    mark_training_length(axes, results)
    blocks, length = results[0]["data"]["blocks"], results[0]["data"]["block_length"]
    axes.set_title(f"Means over {blocks} windows in {len(part_edges(length)) - 1} parts, ± standard error")
    axes.set_xlabel(f"position in the window (tokens), RoPE scaling {format_rope(results[0])}")
    axes.set_ylabel("validation loss (nats)")
    axes.set_xlim(0, length)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return save_figure(figure, path)


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser, "divisors of the longest (default: 1, 2, 4, 8, 16 x the training length)")
    tokens_help = "score at most the first N validation tokens, in whole blocks (default: %(default)s)"
    position_help = "also a curve of the loss by position in windows of the longest length"
    parser.add_argument("--tokens", type=positive_int, default=2**20, metavar="N", help=tokens_help)
    parser.add_argument("--per-position", action="store_true", help=position_help)
    return parse_arguments(parser, "eval_length")


if __name__ == "__main__":
    run_main(main)
