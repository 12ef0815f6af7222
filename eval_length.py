"""Loss at lengths that a model was never trained on, 1x to 16x its training length.

    python eval_length.py runs/lssar                                      # a run's newest checkpoint
    python eval_length.py runs/softmax runs/lssa runs/lssar               # one table, one picture
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope theta --rope-theta 500000
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same tokens, the first ones of the validation stream: they are cut into blocks of
the longest length, and each block into windows of length T, for each T. It reports

    loss           mean over all tokens, in nats. A longer window gives tokens more context, and puts
                   most of them at positions that training never had: both are in this number.
    same targets   mean over the last tokens of each block only (as many as the training length), predicted
                   from windows of length T that all end there: context is the only thing that changes.
    per position   loss by place in the window, in buckets that double.

The standard error is that of the mean over blocks: neighbouring tokens are too alike to count one by one.
The blocks are the same at every length, so what one length adds to another is known better than either
alone: `change` in the JSON is that difference to the shortest length, with its own (paired) error.

Writes eval_length.json and eval_length.png into the run folder (for one checkpoint file:
eval_length_<its name>, in its run's folder); several runs get one more picture, with all curves. With
--tag none they are called eval_length_none, and stand beside those of another call.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from attention import describe_attention
from checkpoint import load_model
from config import ArgumentParser, Config, UserError, run_main, write_atomically
from data.shards import TokenStream, val_batch, val_windows
from distributed import World, join_world
from model import GPT, RopeKind, RopeScaling

FIRST_BUCKET = 128  # positions; each further bucket reaches twice as far
LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary
PICTURES = (".png", ".pdf", ".svg")
MEANING = {
    "loss": "mean cross-entropy in nats over all tokens; the same tokens at every length",
    "stderr": "standard error of the mean over blocks of the longest length; null: only one block",
    "change": "loss minus the shortest length's, null if that has none; change_stderr is paired over blocks",
    "same_target_loss": "mean over the last same_target_tokens of each block, in windows that end there",
    "perplexity": "exp(loss); null: too large for a float",
    "buckets": "loss at positions from <= i < to of the window",
    "reason": "why there are no numbers for this length; null: there are",
}


@dataclass(frozen=True)
class Run:
    """A model to evaluate, on what, and where its results go."""

    source: Path  # as given: run folder or checkpoint file
    label: str
    config: Config
    stream: TokenStream
    output: Path  # without suffix

    def file(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)


@dataclass(frozen=True)
class Plan:
    """What is common to all runs of a call."""

    lengths: list[int]  # ascending, all divide the last
    tokens: int  # at most
    same_target_tokens: int
    rope: RopeKind
    rope_theta: float | None

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
        runs = open_runs(args.runs, args.data, args.tag)
        plan = make_plan(args, runs)
        picture = choose_picture(args.out, runs, args.tag)
        results = []
        for run in runs:
            results.append(evaluate(run, plan, world))
            if world.is_main:  # at once: a later run may fail
                write_json(results[-1], run.file(".json"))
                plot(results[-1:], run.file(".png"))
        if world.is_main:
            print(report(results))
            if picture is not None:
                plot(results, picture)
            written = [run.file(suffix) for run in runs for suffix in (".json", ".png")]
            print("\n".join(f"wrote {path}" for path in [*written, picture] if path is not None))


# ---------------------------------------------------------------- what to evaluate


def open_runs(sources: list[str], data_dir: str | None, tag: str | None = None) -> list[Run]:
    """Check every source and its data before the first is evaluated: that may take hours.

    Raises:
        UserError: a source that does not load, data that is missing or of another vocabulary, a source
            given twice, a folder that cannot be written.
    """
    paths = [Path(source) for source in sources]
    outputs = [output_of(path) for path in paths]
    labels = [label_of(path, output) for path, output in zip(paths, outputs, strict=True)]
    runs = []
    for path, output, label in zip(paths, outputs, labels, strict=True):
        if outputs.count(output) > 1:
            raise UserError(f"{path}: given twice")
        config = load_model(path).config  # not the model: ten models may not fit in memory
        stream = open_validation(config, data_dir)
        if not os.access(output.parent, os.W_OK):
            raise UserError(f"{output.parent}: cannot be written; the results go there")
        name = label if labels.count(label) == 1 else str(path)
        runs.append(Run(path, name, config, stream, with_tag(output, tag)))
    return runs


def output_of(source: Path) -> Path:
    """Where a source's results go, without suffix: its run's folder; beside a checkpoint that is alone."""
    source = source.resolve()
    if source.is_dir():
        return source / "eval_length"
    folder = source.parent.parent if source.parent.name == "checkpoints" else source.parent
    return folder / f"eval_length_{source.stem}"


def with_tag(path: Path, tag: str | None) -> Path:
    """eval_length -> eval_length_<tag>, whatever follows it."""
    return path.with_name(path.name.replace("eval_length", f"eval_length_{tag}", 1)) if tag else path


def label_of(source: Path, output: Path) -> str:
    """The run folder's name, with the checkpoint's name where one was given."""
    source = source.resolve()
    if source.is_dir():
        return source.name
    return f"{output.parent.name}/{source.stem}" if source.parent.name == "checkpoints" else source.stem


def open_validation(config: Config, data_dir: str | None) -> TokenStream:
    """The validation tokens, checked against the model's vocabulary.

    Raises:
        UserError: missing, damaged, or tokens that the model does not know.
    """
    stream = TokenStream(data_dir or config.data.dir, "val")
    stream.check_model(config.model.vocab_size)
    known, found = config.model.vocab_size, stream.vocab_size
    # A model may have a few rows more than its tokeniser has tokens, but if the numbers are far apart
    # the tokens of --data mean something else to it, and it would score noise.
    if data_dir is not None and math.ceil(known / 128) != math.ceil(found / 128):
        raise UserError(
            f"{stream.folder}: tokenised with {found} tokens, but {config.name} has "
            f"model.vocab_size = {known}; expected the same tokeniser"
        )
    return stream


def make_plan(args: argparse.Namespace, runs: list[Run]) -> Plan:
    """Lengths and tokens for all runs, so that their rows compare.

    Raises:
        UserError: lengths that do not divide the longest; a stream too short for one longest window.
    """
    train_lens = [run.config.train.seq_len for run in runs]
    chosen = args.lengths or [factor * train_len for train_len in train_lens for factor in (1, 2, 4, 8, 16)]
    lengths = sorted(set(chosen))
    for length in lengths:
        if lengths[-1] % length:
            raise UserError(
                f"--lengths {' '.join(map(str, lengths))}: {length} does not divide the longest; expected "
                "divisors of it, so that every length scores the same tokens"
            )
    plan = Plan(lengths, args.tokens, min(*train_lens, lengths[0]), args.rope, args.rope_theta)
    for run in runs:
        plan.n_blocks(run.stream)  # raises if there is none
    return plan


def choose_picture(out: str | None, runs: list[Run], tag: str | None = None) -> Path | None:
    """Where the picture with all curves goes; None: nowhere, a single run has its own."""
    if out is not None:
        path = Path(out)
        if path.suffix not in PICTURES:
            raise UserError(f"--out {out}: expected a name that ends in {', '.join(PICTURES)}")
        if not path.parent.is_dir():
            raise UserError(f"--out {out}: no folder {path.parent}")
        return path
    if len(runs) == 1:
        return None
    folders = [run.output.parent for run in runs]
    common = Path(os.path.commonpath(folders))
    # Two checkpoints of one run: eval_length.png there is the picture of the run itself.
    name = "eval_length_all.png" if common in folders else "eval_length.png"
    return with_tag(common / name, tag)


# ---------------------------------------------------------------- evaluation


def evaluate(run: Run, plan: Plan, world: World) -> dict[str, Any]:
    """All lengths of one run: what eval_length.json holds. Every process gets the same."""
    model, config, step, _ = load_model(run.source, world.device)
    if not world.agree(step):
        raise UserError(f"{run.source}: got a new checkpoint while it was read; try again")
    avoid_dense(model)
    n_blocks, longest = plan.n_blocks(run.stream), plan.longest
    with tqdm(
        total=len(plan.lengths) * len(range(world.rank, n_blocks, world.size)) * longest,
        desc=run.label,
        unit="tok",
        unit_scale=True,
        disable=not (world.is_main and sys.stderr.isatty()),
    ) as bar:
        scores = [score_length(model, run.stream, plan, length, world, bar) for length in plan.lengths]
    return {
        "run": run.label,
        "source": str(run.source),
        "step": step,
        "normaliser": describe_attention(config.attention),
        "train_len": config.train.seq_len,
        "rope": {"kind": plan.rope, "theta": plan.rope_theta},
        "dtype": config.train.dtype,
        "data": {
            "dir": str(run.stream.folder),
            "split": run.stream.split,
            "fingerprint": run.stream.fingerprint,
            "tokenizer": run.stream.info["tokenizer"],
            "tokens": n_blocks * longest,
            "blocks": n_blocks,
            "block_length": longest,
        },
        "same_target_tokens": plan.same_target_tokens,
        "lengths": summarise(scores, plan),
        "meaning": MEANING,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
    }


def avoid_dense(model: GPT) -> None:
    """The dense engine holds (T, T) for each head; the others need memory in proportion to T."""
    for block in model.blocks:
        if block.attention.engine == "dense":  # type: ignore[union-attr]
            block.attention.engine = "auto"  # type: ignore[union-attr]


@dataclass(frozen=True)
class Score:
    """Sums of losses at one length, float64 on the CPU, over all processes."""

    by_bucket: Tensor  # (n_blocks, n_buckets)
    same_targets: Tensor  # (n_blocks,)
    reason: str | None  # the length was refused


def score_length(model: GPT, stream: TokenStream, plan: Plan, length: int, world: World, bar: tqdm) -> Score:
    """Score every block, cut into windows of `length`; this process takes its share of the blocks.

    A block is always scored by one process in one way, so the number of processes changes nothing.
    """
    n_blocks = plan.n_blocks(stream)
    edges = bucket_edges(length)
    sizes = [stop - start for start, stop in zip(edges, edges[1:], strict=False)]
    by_bucket = torch.zeros(n_blocks, len(sizes), dtype=torch.float64, device=world.device)
    same_targets = torch.zeros(n_blocks, dtype=torch.float64, device=world.device)
    reason = None
    try:
        for block in range(world.rank, n_blocks, world.size):
            losses = block_losses(model, stream, block, plan, length).double()  # (W, T)
            by_position = losses.sum(0)  # (T,)
            by_bucket[block] = torch.stack([part.sum() for part in by_position.split(sizes)])
            same_targets[block] = losses[-1, -plan.same_target_tokens :].sum()
            bar.update(plan.longest)
    except UserError as e:  # ssmax_pn has no p_n beyond its training length
        reason = str(e)
    # Also when refused: a process without blocks has not noticed, and waits here.
    return Score(world.sum(by_bucket).cpu(), world.sum(same_targets).cpu(), reason)


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
        rows.append(row)
    return rows


def summarise_buckets(by_bucket: Tensor, length: int, longest: int) -> list[dict[str, Any]]:
    edges, n_windows = bucket_edges(length), len(by_bucket) * longest // length
    return [
        {"from": start, "to": stop, "loss": total / (n_windows * (stop - start))}
        for start, stop, total in zip(edges, edges[1:], by_bucket.sum(0).tolist(), strict=False)
    ]


def mean_and_stderr(block_means: Tensor) -> tuple[float, float | None]:
    """Mean of (n_blocks,) and its standard error, None for a single block."""
    n = len(block_means)
    stderr = block_means.std().item() / math.sqrt(n) if n > 1 else None
    return block_means.mean().item(), stderr


# ---------------------------------------------------------------- tables


def report(results: list[dict[str, Any]]) -> str:
    """All tables as text, each with a line that says what is in it."""
    lengths = [row["length"] for row in results[0]["lengths"]]
    rope, theta = results[0]["rope"]["kind"], results[0]["rope"]["theta"]
    span, block = results[0]["same_target_tokens"], results[0]["data"]["block_length"]
    scaling = f"RoPE scaling {rope}" + (f" = {theta:g}" if theta else "")
    parts = [
        describe_data(results),
        f"Loss in nats over all tokens, ± standard error over blocks; {scaling}.",
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
    names = [f"{start}-{stop - 1}" for start, stop in zip(edges, edges[1:], strict=False)]
    rows = [["run", "normaliser", *names]]
    for result in results:
        buckets = result["lengths"][-1].get("buckets")
        cells = [f"{bucket['loss']:.4f}" for bucket in buckets] if buckets else ["-"] * len(names)
        rows.append([result["run"], result["normaliser"], *cells])
    return format_table(rows)


def with_stderr(mean: float, stderr: float | None) -> str:
    return f"{mean:.4f} ±{stderr:.4f}" if stderr is not None else f"{mean:.4f} ±-"


def format_table(rows: list[list[str]], n_left: int = 2) -> str:
    """Aligned columns, the first `n_left` to the left, numbers to the right; a rule below the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if i < n_left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------- files


def write_json(result: dict[str, Any], path: Path) -> None:
    write_atomically(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Loss against length: all tokens on the left, the same targets on the right."""
    figure = Figure(figsize=(11, 4.5 + 0.2 * (len(results) // 3)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    span, rope = results[0]["same_target_tokens"], results[0]["rope"]
    scaling = rope["kind"] + (f" = {rope['theta']:g}" if rope["theta"] else "")
    left.set_title("All tokens")
    right.set_title(f"Same targets (last {short(span)} tokens of each block)")
    left.set_ylabel("validation loss (nats)")
    handles = draw_panel(left, results, "loss", "stderr")
    draw_panel(right, results, "same_target_loss", "same_target_stderr")
    right.yaxis.set_tick_params(labelleft=True)
    for axes in (left, right):
        axes.set_xlabel(f"window length (tokens), RoPE scaling {scaling}")
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=150)
    write_atomically(path, content.getvalue())


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
                color=f"C{i % 10}",  # ten colours; the markers go on telling runs apart
                marker="osD^vP*Xph<>"[i % 12],
                markersize=5,
                capsize=3,
                linewidth=1.8,
                elinewidth=0.8,
                label=f"{result['run']}: {result['normaliser']}",
            )
        )
    for train_len in {result["train_len"] for result in results}:
        line = axes.axvline(train_len, color="0.4", linestyle="--", linewidth=1, label="training length")
    axes.set_xscale("log", base=2)
    lengths = [row["length"] for row in results[0]["lengths"]]
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    return [*handles, line]


def short(length: int) -> str:
    """2048 -> '2K'; 128 stays."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


# ---------------------------------------------------------------- command line


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders or checkpoint files, first of all"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=whole_number,
        metavar="T",
        help="window lengths, divisors of the longest (default: 1, 2, 4, 8, 16 x the training length)",
    )
    parser.add_argument(
        "--rope",
        choices=get_args(RopeKind),
        default="ntk",
        help="how RoPE is scaled beyond the training length (default: %(default)s)",
    )
    parser.add_argument("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    parser.add_argument(
        "--tokens",
        type=whole_number,
        default=1_048_576,
        metavar="N",
        help="score at most the first N validation tokens, in whole blocks (default: %(default)s)",
    )
    parser.add_argument("--data", metavar="DIR", help="dataset folder (default: that of each run's config)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="picture with all curves (default for several runs: eval_length.png in the folder above them)",
    )
    parser.add_argument("--tag", metavar="WORD", help="part of the results' names: eval_length_WORD.json")
    args = parser.parse_args()
    if args.tag and not re.fullmatch(r"[\w.+-]+", args.tag):
        raise UserError(f"--tag {args.tag}: expected letters, digits and . _ + - alone")
    if args.rope == "theta" and args.rope_theta is None:
        raise UserError("--rope theta needs --rope-theta, the new base (500000 in the SSMax paper)")
    RopeScaling(args.rope, args.rope_theta)  # raises if the two do not fit
    return args


if __name__ == "__main__":
    run_main(main)
