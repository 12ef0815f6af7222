"""Loss at lengths that a model was never trained on, 1x to 16x its training length.

    python eval_length.py runs/lssar                                      # a run's newest checkpoint
    python eval_length.py runs/softmax runs/lssa runs/lssar               # one table, one picture
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope theta --rope-theta 500000
    python eval_length.py runs/softmax runs/ssmax --per-position --lengths 20000
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same tokens, the first ones of the validation stream: they are cut into blocks of
the longest length, and each block into windows of length T, for each T. It reports

    loss           mean over all tokens, in nats. A longer window gives tokens more context, and puts
                   most of them at positions that training never had: both are in this number.
    same targets   mean over the last tokens of each block only (as many as the training length), predicted
                   from windows of length T that all end there: context is the only thing that changes.
    per position   loss by place in the window, in buckets that double; with --per-position also in 100 equal
                   parts of the longest window, as a curve with its standard error (SSMax, Figure 5).

The standard error is that of the mean over blocks: neighbouring tokens are too alike to count one by one.
The blocks are the same at every length, so what one length adds to another is known better than either
alone: `change` in the JSON is that difference to the shortest length, with its own (paired) error.

Writes eval_length.json and eval_length.png into the run folder (for one checkpoint file:
eval_length_<its name>, in its run's folder); several runs get one more picture, with all curves. The
picture of --per-position is beside it, eval_length_position.png. With --tag none they are called
eval_length_none, and stand beside those of another call.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from data.batches import val_batch, val_windows
from data.dataset import TokenStream
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


@dataclass(frozen=True)
class Plan:
    """What is common to all runs of a call."""

    lengths: list[int]  # ascending, all divide the last
    tokens: int  # at most
    same_target_tokens: int
    rope: RopeKind
    rope_theta: float | None
    per_position: bool

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def scaling(self, length: int) -> RopeScaling:
        return RopeScaling(self.rope, self.rope_theta, length)

    def n_blocks(self, stream: TokenStream) -> int:
        return val_windows(stream, self.tokens, self.longest)


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


# ---------------------------------------------------------------- what to evaluate


def make_plan(args: argparse.Namespace, streams: dict[Run, TokenStream]) -> Plan:
    """Lengths and tokens for all runs, so that their rows compare.

    Raises:
        UserError: lengths that do not divide the longest; a stream too short for one longest window.
    """
    lengths = choose_lengths(args.lengths, streams, (1, 2, 4, 8, 16))
    for length in lengths:
        if lengths[-1] % length:
            raise UserError(
                f"--lengths {' '.join(map(str, lengths))}: {length} does not divide the longest; expected "
                "divisors of it, so that every length scores the same tokens"
            )
    same_target_tokens = min(lengths[0], *(run.config.train.seq_len for run in streams))
    plan = Plan(lengths, args.tokens, same_target_tokens, args.rope, args.rope_theta, args.per_position)
    for stream in streams.values():
        plan.n_blocks(stream)  # raises if there is none
    return plan


# ---------------------------------------------------------------- evaluation


def evaluate(
    run: Run, stream: TokenStream, plan: Plan, args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """All lengths of one run: what eval_length.json holds. Every process gets the same."""
    model, _, step, _ = run.load(world)
    n_blocks, longest = plan.n_blocks(stream), plan.longest
    mine = len(range(world.rank, n_blocks, world.size))
    with progress(run.label, len(plan.lengths) * mine * longest, "tok", world) as bar:
        scores = [score_length(model, stream, plan, length, world, bar) for length in plan.lengths]
    return {
        **run.describe(step, args),
        "data": {
            "dir": str(stream.folder),
            "split": stream.split,
            "fingerprint": stream.fingerprint,
            "tokenizer": stream.info["tokenizer"],
            "tokens": n_blocks * longest,
            "blocks": n_blocks,
            "block_length": longest,
        },
        "same_target_tokens": plan.same_target_tokens,
        "lengths": summarise(scores, plan),
        "meaning": MEANING,
    }


@dataclass(frozen=True)
class Score:
    """Sums of losses at one length, float64 on the CPU, over all processes."""

    by_bucket: Tensor  # (n_blocks, n_buckets)
    by_part: Tensor  # (n_blocks, n_parts)
    same_targets: Tensor  # (n_blocks,)
    reason: str | None  # the length was refused


def score_length(model: GPT, stream: TokenStream, plan: Plan, length: int, world: World, bar: tqdm) -> Score:
    """Score every block, cut into windows of `length`; this process takes its share of the blocks.

    A block is always scored by one process in one way, so the number of processes changes nothing.
    """
    n_blocks = plan.n_blocks(stream)
    buckets, parts = bucket_edges(length), part_edges(length)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(n_blocks, *shape, dtype=torch.float64, device=world.device)

    by_bucket, by_part, same_targets = zeros(len(buckets) - 1), zeros(len(parts) - 1), zeros()
    reason = None
    try:
        for block in range(world.rank, n_blocks, world.size):
            losses = block_losses(model, stream, block, plan, length).double()  # (W, T)
            by_position = losses.sum(0)  # (T,)
            by_bucket[block] = sums_between(buckets, by_position)
            by_part[block] = sums_between(parts, by_position)
            same_targets[block] = losses[-1, -plan.same_target_tokens :].sum()
            bar.update(plan.longest)
    except UserError as e:  # ssmax_pn has no p_n beyond its training length
        reason = str(e)
    # Also when refused: a process without blocks has not noticed, and waits here.
    by_bucket, by_part, same_targets = (world.sum(total) for total in (by_bucket, by_part, same_targets))
    return Score(by_bucket.cpu(), by_part.cpu(), same_targets.cpu(), reason)


def block_losses(model: GPT, stream: TokenStream, block: int, plan: Plan, length: int) -> Tensor:
    """The losses of one block's tokens: (W, T) float32, W = longest / T consecutive windows of one batch.

    W·T is the same for all lengths, and so is the peak memory.
    """
    n_windows = plan.longest // length
    x, y = (
        torch.from_numpy(a).to(model.embedding.weight.device)  # (W, T)
        for a in val_batch(stream, block * n_windows, n_windows, length)
    )
    with model.autocast():
        chunk = max(1, LOGITS_AT_ONCE // n_windows)
        return model.token_losses(x, y, rope=plan.scaling(length), chunk=chunk)


def bucket_edges(length: int) -> list[int]:
    """0, 128, 256, 512, ... and the length itself."""
    edges, edge = [0], FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def part_edges(length: int) -> list[int]:
    """0 to the length in POSITION_PARTS equal parts, or one for each position of a short window."""
    n = min(POSITION_PARTS, length)
    return [length * i // n for i in range(n + 1)]


def sums_between(edges: list[int], by_position: Tensor) -> Tensor:
    """(T,) to the sums over [edges[i], edges[i + 1]): (n_edges - 1,)."""
    sizes = [stop - start for start, stop in pairwise(edges)]
    return torch.stack([part.sum() for part in by_position.split(sizes)])


def summarise(scores: list[Score], plan: Plan) -> list[dict[str, Any]]:
    """The scores as means and standard errors, one dict for each length, finite numbers only."""
    rows = []
    first = scores[0].by_bucket.sum(1)  # of the shortest length
    comparable = scores[0].reason is None and bool(first.isfinite().all())
    for length, score in zip(plan.lengths, scores, strict=True):
        sums = score.by_bucket.sum(1)  # (n_blocks,)
        row: dict[str, Any] = {"length": length, "reason": score.reason}
        if score.reason is None and not sums.isfinite().all():
            row["reason"] = "the loss is not finite"
        if row["reason"] is None:
            row["loss"], row["stderr"] = mean_and_stderr(sums / plan.longest)
            row["perplexity"] = math.exp(row["loss"]) if row["loss"] < 700 else None  # exp(710) overflows
            change = mean_and_stderr((sums - first) / plan.longest) if comparable else (None, None)
            row["change"], row["change_stderr"] = change
            same = score.same_targets / plan.same_target_tokens
            row["same_target_loss"], row["same_target_stderr"] = mean_and_stderr(same)
            row["buckets"] = summarise_buckets(score.by_bucket, length, plan.longest)
            if plan.per_position and length == plan.longest:
                row["positions"] = summarise_parts(score.by_part, length)
        rows.append(row)
    return rows


def summarise_buckets(by_bucket: Tensor, length: int, longest: int) -> list[dict[str, Any]]:
    edges, n_windows = bucket_edges(length), len(by_bucket) * longest // length
    return [
        {"from": start, "to": stop, "loss": total / (n_windows * (stop - start))}
        for (start, stop), total in zip(pairwise(edges), by_bucket.sum(0).tolist(), strict=True)
    ]


def summarise_parts(by_part: Tensor, length: int) -> list[dict[str, Any]]:
    """Mean loss in each part of windows that are a block, with its error over blocks."""
    rows = []
    for (start, stop), sums in zip(pairwise(part_edges(length)), by_part.T, strict=True):
        loss, stderr = mean_and_stderr(sums / (stop - start))
        rows.append({"from": start, "to": stop, "loss": loss, "stderr": stderr})
    return rows


# ---------------------------------------------------------------- tables


def report(results: list[dict[str, Any]]) -> str:
    """All tables as text, each with a line that says what is in it."""
    lengths = [row["length"] for row in results[0]["lengths"]]
    span, block = results[0]["same_target_tokens"], results[0]["data"]["block_length"]
    parts = [
        describe_data(results),
        f"Loss in nats over all tokens, ± standard error over blocks; RoPE {describe_rope(results[0])}.",
        length_table(results, lengths, lambda row: with_stderr(row["loss"], row["stderr"])),
        f"Same targets: loss over the last {span} tokens of each block, from windows that end there.",
        length_table(
            results, lengths, lambda row: with_stderr(row["same_target_loss"], row["same_target_stderr"])
        ),
        "Perplexity over all tokens.",
        length_table(results, lengths, lambda row: f"{row['perplexity'] or math.inf:.4g}"),
        f"Loss by position in windows of {block} tokens.",
        bucket_table(results),
    ]
    refusals = [
        f"{result['run']} at {row['length']}: no result: {row['reason']}"
        for result in results
        for row in result["lengths"]
        if row["reason"] is not None
    ]
    return "\n\n".join(parts + (["\n".join(refusals)] if refusals else [])) + "\n"


def describe_data(results: list[dict[str, Any]]) -> str:
    """Which tokens were scored; if not the same for all runs, for each run."""
    lines: dict[str, list[str]] = {}
    for result in results:
        data = result["data"]
        text = (
            f"Scored: the first {data['tokens']:,} tokens of {data['dir']} ({data['split']}), "
            f"{data['blocks']} blocks of {data['block_length']}"
        )
        lines.setdefault(text, []).append(result["run"])
    if len(lines) == 1:
        return next(iter(lines)) + "."
    listed = [f"{text}: {', '.join(names)}." for text, names in lines.items()]
    return "\n".join([*listed, "Runs that were scored on other tokens do not compare."])


def length_table(results: list[dict[str, Any]], lengths: list[int], cell: Any) -> str:
    """Runs down, lengths across; a dash where a length was refused."""
    rows = [["run", "normaliser", "step", "trained at", *map(str, lengths)]]
    for result in results:
        cells = [cell(row) if row["reason"] is None else "-" for row in result["lengths"]]
        head = [result["run"], result["normaliser"], str(result["step"]), str(result["train_len"])]
        rows.append(head + cells)
    return format_table(rows)


def bucket_table(results: list[dict[str, Any]]) -> str:
    """Loss by position at the longest length."""
    edges = bucket_edges(results[0]["data"]["block_length"])
    names = [f"{start}-{stop - 1}" for start, stop in pairwise(edges)]
    rows = [["run", "normaliser", *names]]
    for result in results:
        buckets = result["lengths"][-1].get("buckets")
        cells = [f"{bucket['loss']:.4f}" for bucket in buckets] if buckets else ["-"] * len(names)
        rows.append([result["run"], result["normaliser"], *cells])
    return format_table(rows)


# ---------------------------------------------------------------- pictures


def plot(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """The picture of all lengths, and that of --per-position where results have it."""
    written = plot_lengths(results, path)
    if any("positions" in result["lengths"][-1] for result in results):
        written += plot_positions(results, path.with_name(f"{path.stem}_position{path.suffix}"))
    return written


def plot_positions(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """Loss against the position in the longest window, with a band of one standard error."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for i, result in enumerate(results):
        parts = result["lengths"][-1].get("positions", [])  # none where that length was refused
        middle = [(part["from"] + part["to"]) / 2 for part in parts]
        loss = [part["loss"] for part in parts]
        error = [part["stderr"] or 0.0 for part in parts]
        axes.plot(middle, loss, color=f"C{i % 10}", label=f"{result['run']}: {result['normaliser']}")
        low, high = ([x + sign * e for x, e in zip(loss, error, strict=True)] for sign in (-1, 1))
        axes.fill_between(middle, low, high, color=f"C{i % 10}", alpha=0.2, linewidth=0)
    mark_training_length(axes, results)
    blocks, length = results[0]["data"]["blocks"], results[0]["data"]["block_length"]
    axes.set_title(f"Means over {blocks} windows in {len(part_edges(length)) - 1} parts, ± standard error")
    axes.set_xlabel(f"position in the window (tokens), RoPE scaling {describe_rope(results[0])}")
    axes.set_ylabel("validation loss (nats)")
    axes.set_xlim(0, length)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return save_figure(figure, path)


def plot_lengths(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """Loss against length: all tokens on the left, the same targets on the right."""
    figure = Figure(figsize=(11, 4.5 + 0.2 * (len(results) // 3)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    span, scaling = results[0]["same_target_tokens"], describe_rope(results[0])
    left.set_title("All tokens")
    right.set_title(f"Same targets (last {short(span)} tokens of each block)")
    left.set_ylabel("validation loss (nats)")
    handles = draw_panel(left, results, "loss", "stderr")
    draw_panel(right, results, "same_target_loss", "same_target_stderr")
    right.yaxis.set_tick_params(labelleft=True)
    for axes in (left, right):
        axes.set_xlabel(f"window length (tokens), RoPE scaling {scaling}")
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
    return save_figure(figure, path)


def draw_panel(axes: Any, results: list[dict[str, Any]], value: str, error: str) -> list[Any]:
    """One curve for each run; returns the legend's handles."""
    handles = []
    for i, result in enumerate(results):
        rows = [row for row in result["lengths"] if row["reason"] is None]
        handles.append(
            axes.errorbar(
                [row["length"] for row in rows],
                [row[value] for row in rows],
                [row[error] or 0.0 for row in rows],
                color=f"C{i % 10}",
                marker=MARKERS[i % len(MARKERS)],
                markersize=5,
                capsize=3,
                linewidth=1.8,
                elinewidth=0.8,
                label=f"{result['run']}: {result['normaliser']}",
            )
        )
    token_axis(axes, [row["length"] for row in results[0]["lengths"]])
    return [*handles, mark_training_length(axes, results)]


# ---------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser)
    add_lengths(
        parser, "window lengths, divisors of the longest (default: 1, 2, 4, 8, 16 x the training length)"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number,
        default=1_048_576,
        metavar="N",
        help="score at most the first N validation tokens, in whole blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--per-position",
        action="store_true",
        help="also a curve of the loss by position in windows of the longest length",
    )
    return parse_arguments(parser, "eval_length")


if __name__ == "__main__":
    run_main(main)
