"""What context is worth to a model: its loss at 1x to 16x the training length, and with its context
cut.

    python eval_length.py runs/softmax runs/lssa runs/lssar               # newest checkpoints: one table
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope theta --rope-theta 500000
    python eval_length.py runs/lssar --also none theta=500000             # three RoPE scalings at once
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same tokens, the first of the validation stream (after --skip), cut into
blocks of the longest length; each block is cut into windows of length T, for each T. Reported are
the loss over the last tokens of each block, the same targets at every T, that of the same targets
with their context cut at the training length, the gain of each T over that cut, and the loss over
all tokens. The last two are by position, too. docs/evaluations.md explains them. rows.csv (see
evals/rows.py) has single blocks with the number of their document, to pair runs over text.

Writes eval_length.json and .png into the run folder (eval_length_<checkpoint> for one checkpoint
file). With --tag none they are eval_length_none, beside results of other options. Several runs get
one more figure.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.batches import read_windows
from evals import common, output
from evals.common import Blocks, add_arguments, mean_and_stderr, parse_arguments
from evals.output import Result
from evals.rows import Cell, text_key
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import World, join_world
from model import GPT
from positions import RopeScaling

FIRST_BUCKET = 128  # positions; each further bucket reaches twice as far
LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary
# of the sliding window: a target sees 7/8 of it on average; 8 would cost twice as much
CUT_STRIDES = 4
SCORED = "Scored: {blocks} blocks of {block_length} tokens of {dir} ({split}) after token {skipped_tokens:,}."
Cuts = dict[tuple[int, int], Tensor | str]  # by a run's number and step, the `score` of its cut


def parse_args() -> list[argparse.Namespace]:
    """The options at each RoPE scaling: those of --rope, then of --also."""
    parser = ArgumentParser(__doc__)
    lengths_help = "divisors of the longest (default: 1, 2, 4, 8, 16 x the training length)"
    add_arguments(parser, lengths_help, tokens=2**20)
    also_help = "RoPE scalings beside --rope: none, theta=500000, ...; they write eval_length_none.json, ..."
    parser.add_argument("--also", nargs="+", default=[], metavar="ROPE", help=also_help)
    args = parse_arguments(parser, "eval_length")
    at_scalings = [args]
    for text in args.also:
        kind, _, base = text.partition("=")
        if any(kind == each.rope for each in at_scalings):
            raise UserError(f"--also {text}: {kind} is there already")
        if kind == "theta" and not base:
            raise UserError(f"--also {text}: expected its base, as in theta=500000")
        try:
            scaling = RopeScaling(kind, float(base) if base else None)
        except ValueError as e:  # a UserError is one
            raise UserError(f"--also {text}: {e}") from None
        own = {"rope": kind, "rope_theta": scaling.theta, "rope_scaling": scaling}
        own |= {"name": f"{args.name}_{kind}", "out": None}
        at_scalings.append(argparse.Namespace(**vars(args) | own))
    return at_scalings


def main() -> None:
    at_scalings = parse_args()
    cuts: Cuts = {}
    with join_world(at_scalings[0].device) as world:
        for evaluate in [prepare(args, world, cuts) for args in at_scalings]:
            evaluate()


def prepare(args: argparse.Namespace, world: World, cuts: Cuts) -> Callable[[], None]:
    """Check everything that one RoPE scaling needs. Returns its evaluation.

    cuts: filled by the first scaling. A cut has the same losses at all.
    """
    runs, picture = common.open_runs(args, world)
    for length in args.lengths:  # all have to score the same tokens
        if args.lengths[-1] % length:
            raise UserError(f"--lengths: {length} does not divide the longest, {args.lengths[-1]}")
    all_blocks = common.open_blocks(args, runs)
    # targets, the last of a block
    n_same = min(args.lengths[0], *(run.config.train.seq_len for run in runs))

    def measure(i: int, model: GPT, step: int) -> tuple[dict[str, Any], str, Iterator[Cell]]:
        blocks = all_blocks[i]
        data = blocks.describe()
        if (i, step) not in cuts:  # a run in training may have a new checkpoint at the next scaling
            cut_at = partial(cut_losses, model, blocks, context=n_same)
            cuts[i, step] = score(world, "cut", blocks, n_same, cut_at)
        cut_sums = cuts[i, step]
        cut = summarise(blocks.longest, cut_sums, blocks, n_same) | {"length": n_same}
        summary: dict[str, Any] = {"data": data, "same_target_tokens": n_same}
        summary |= {"block_documents": blocks.count_documents(), "cut": cut, "lengths": []}
        for length in blocks.lengths:
            losses = partial(block_losses, model, blocks, length=length, rope=args.rope_scaling)
            sums = score(world, f"{length} tokens", blocks, n_same, losses)
            summary["lengths"].append(summarise(length, sums, blocks, n_same, cut_sums))
        return summary, text_key(data), cells(summary)

    return partial(
        common.evaluate, "eval_length", args, world, runs, picture, measure, tables, plot
    )


# ---------------------------------------------------------------- windows
def bucket_edges(length: int) -> list[int]:
    """0, 128, 256, 512, ... and the length itself."""
    doubled = (FIRST_BUCKET * 2**i for i in itertools.count())
    return [0, *itertools.takewhile(lambda edge: edge < length, doubled), length]


# ---------------------------------------------------------------- score
def score(
    world: World, label: str, blocks: Blocks, n_same: int, losses: Callable[[int], Tensor]
) -> Tensor | str:
    """The `block_sums` of every block, (n_blocks, n_sums), or why there are none (see
    `common.score_all`).
    """
    n = blocks.n_blocks
    return common.score_all(world, label, n, lambda item: block_sums(losses(*item), n_same)[None])


def block_losses(model: GPT, blocks: Blocks, block: int, length: int, rope: RopeScaling) -> Tensor:
    """The losses of one block's tokens: (W, T) float32, W = longest / T consecutive windows of one
    batch.
    """
    n = blocks.longest // length
    first = (blocks.n_skipped + block) * n
    x, y = map(torch.from_numpy, read_windows(blocks.stream, first, n, length))  # (W, T)
    device = model.embedding.weight.device
    with model.autocast():
        return model.token_losses(
            x.to(device), y.to(device), rope=rope, chunk=max(1, LOGITS_AT_ONCE // n)
        )


def cut_losses(model: GPT, blocks: Blocks, block: int, context: int) -> Tensor:
    """The losses of one block's tokens with their context cut: (1, longest) float32.

    A window of `context` tokens moves by a quarter of them and scores those that it reaches, which
    so see at least three quarters (Press et al. 2021, arXiv 2012.15832, section 2; "Perplexity of
    fixed-length models" in the documentation of transformers). The first window scores all of its
    tokens.
    """
    device = model.embedding.weight.device
    windows = read_windows(blocks.stream, blocks.n_skipped + block, 1, blocks.longest)
    x, y = (torch.from_numpy(each[0]).to(device) for each in windows)  # (longest,)
    # windows at once: as many tokens as a forward pass of `block_losses` has
    n = blocks.longest // context
    chunk = max(1, LOGITS_AT_ONCE // n)
    stride = math.ceil(context / CUT_STRIDES)
    last = blocks.longest - context
    starts = torch.tensor([*range(stride, last, stride), last], device=device)
    losses = torch.empty(blocks.longest, device=device)
    with model.autocast():
        losses[:context] = model.token_losses(x[None, :context], y[None, :context], chunk=chunk)[0]
        for some in starts.split(n):
            positions = some[:, None] + torch.arange(context, device=device)  # (n, context)
            scored = positions[:, -stride:]  # (n, stride)
            of_windows = model.token_losses(x[positions], y[scored], chunk=chunk)
            # in turn: the last two may overlap
            for where, of_window in zip(scored, of_windows, strict=True):
                losses[where] = of_window
    return losses[None]


def block_sums(losses: Tensor, n_same: int) -> Tensor:
    """(W, T) losses to float64 sums, of each bucket and of the same targets, a block's last tokens."""
    losses = losses.double()
    by_position = losses.sum(0)  # (T,)
    buckets = [
        by_position[i:j].sum() for i, j in itertools.pairwise(bucket_edges(len(by_position)))
    ]
    return torch.stack([*buckets, losses[-1, -n_same:].sum()])


# ---------------------------------------------------------------- summary
def summarise(
    length: int,
    sums: Tensor | str,
    blocks: Blocks,
    n_same: int,
    cut_sums: Tensor | str | None = None,
) -> dict[str, Any]:
    """An entry of "lengths" in eval_length.json, with its gains over the cut, or the reason for
    none.
    """
    if isinstance(sums, str) or isinstance(cut_sums, str):
        return {"length": length, "reason": sums if isinstance(sums, str) else cut_sums}
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
    for (start, stop), bucket_sums in zip(
        itertools.pairwise(bucket_edges(length)), window_sums, strict=True
    ):
        loss, stderr = mean_and_stderr(bucket_sums / (stop - start))
        entry["buckets"].append({"from": start, "to": stop, "loss": loss, "stderr": stderr})
    if cut_sums is not None:
        entry["gain"], entry["gain_stderr"] = mean_and_stderr(
            cut_sums[:, -1] / n_same - same_targets
        )
        # (n_buckets, n_blocks)
        gains = (cut_sums - sums).T[:-1] if length == blocks.longest else ()
        for bucket, of_bucket in zip(entry["buckets"], gains, strict=False):
            n_positions = bucket["to"] - bucket["from"]
            bucket["gain"], bucket["gain_stderr"] = mean_and_stderr(of_bucket / n_positions)
    return entry


def cells(summary: dict[str, Any]) -> Iterator[Cell]:
    """The numbers of a summary's rows; None for those of a rejected length."""
    nothing = [None] * summary["data"]["blocks"]
    same_targets = f"same_targets[{summary['same_target_tokens']}]"
    for block, document in enumerate(summary["block_documents"]):
        yield summary["data"]["block_length"], block, "document", document
    for entry in summary["lengths"]:
        length = entry["length"]
        for measure, key in (("loss", "block_losses"), (same_targets, "block_same_target_losses")):
            for block, loss in enumerate(entry.get(key, nothing)):
                yield length, block, measure, loss
        losses = {bucket["from"]: bucket["loss"] for bucket in entry.get("buckets", [])}
        for start, stop in itertools.pairwise(bucket_edges(length)):
            yield length, None, f"loss[{start}:{stop}]", losses.get(start)
    cut = summary["cut"]
    for block, loss in enumerate(cut.get("block_same_target_losses", nothing)):
        yield cut["length"], block, f"cut[{cut['length']}]", loss
    for bucket in cut.get("buckets", []):
        yield cut["length"], None, f"cut[{bucket['from']}:{bucket['to']}]", bucket["loss"]


# ---------------------------------------------------------------- tables
def tables(results: list[Result]) -> str:
    """All tables as text, each with a line that describes it."""
    span = results[0]["same_target_tokens"]
    block = results[0]["data"]["block_length"]
    # one line if they agree
    scored = dict.fromkeys(SCORED.format_map(result["data"]) for result in results)
    gain = itemgetter("gain", "gain_stderr")
    errors = f"± standard error over blocks; RoPE {output.format_rope(*results)}."
    parts = [
        "\n".join(scored),
        output.run_table(results),
        f"Same targets: loss in nats over the last {span} tokens of each block, {errors}\n"
        f"Cut: each of them sees at most {span} tokens. A length: they are the last of a window of it.",
        output.length_table(
            results, itemgetter("same_target_loss", "same_target_stderr"), f"cut at {span}"
        ),
        "Gain: what the length takes off the loss of the cut, ± standard error paired over blocks.",
        output.length_table(results, gain),
        f"Gain by position in windows of {block} tokens, all tokens.",
        bucket_table(results, gain),
        f"Loss over all tokens, {errors}",
        output.length_table(results, itemgetter("loss", "stderr")),
        f"Loss by position in windows of {block} tokens.",
        bucket_table(results, itemgetter("loss", "stderr")),
    ]
    return "\n\n".join(parts + output.rejections(results)) + "\n"


def bucket_table(results: list[Result], value: output.Value) -> str:
    """A value by position at the longest length."""
    edges = list(itertools.pairwise(bucket_edges(results[0]["data"]["block_length"])))
    lines = [["run", *(f"{start}-{stop - 1}" for start, stop in edges)]]
    for result in results:
        buckets = result["lengths"][-1].get("buckets")  # none if the length was rejected
        cells = (
            [output.format_stderr(*value(each)) for each in buckets]
            if buckets
            else ["-"] * len(edges)
        )
        lines.append([result["run"], *cells])
    return output.format_table(lines)


# ---------------------------------------------------------------- figure
def plot(results: list[Result], path: Path) -> None:
    """Loss against length, over the same targets beside the cut's, and over all tokens."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    lengths = [entry["length"] for entry in results[0]["lengths"]]
    span = output.format_length(results[0]["same_target_tokens"])
    titles = {"same_target_": f"Same targets (last {span} tokens of each block)", "": "All tokens"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        curves = output.length_curves(results, itemgetter(f"{key}loss", f"{key}stderr"))
        output.draw_curves(axes, curves, lengths, results)
        axes.set(
            title=title,
            xlabel=f"window length (tokens), RoPE scaling {output.format_rope(*results)}",
        )
        axes.set(ylabel="validation loss (nats)")
        axes.tick_params(labelleft=True)
    for i, result in enumerate(results):
        label = f"context cut at {span}, in a run's colour" if i == 0 else None
        loss = result["cut"].get("same_target_loss", math.nan)
        panels[0].axhline(loss, color=f"C{i}", linestyle="--", linewidth=1.2, label=label)
    output.legend_below(figure, 3)
    output.save_figure(figure, path)


if __name__ == "__main__":
    run_main(main)
