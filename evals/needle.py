"""Needle in a haystack: can a model still find a number in a long context (SSMax, Section 3.3)?

    python eval_needle.py runs/ssmax --lengths 1000 2000 5000 10000 --rope theta --rope-theta 500000
    python eval_needle.py runs/softmax runs/ssmax runs/lssar --samples 100
    python eval_needle.py runs/sft --data data/fineweb10B                 # fine-tuned on other data than text
    python eval_needle.py runs/ssmax --haystack essays/                   # a folder of .txt files
    torchrun --standalone --nproc_per_node=8 eval_needle.py runs/ssmax

Somewhere in a text (at 10, 30, 50, 70, 90 % of it) stands "The special magic {city} number is: {seven
digits}."; after the text come the question for it and the beginning of the answer. A length is that of the
whole, with the answer. It reports

    number         share of samples whose greedy answer is the whole number
    first digit    share whose answer begins with the right digit
    choice         share in which the number is likelier than nine others, drawn alike: chance is 10 %, and
                   it takes no fine-tuning to beat that
    needle score   attention mass on the number's digits in the row that predicts the first of them, for each
                   layer and head (Section 3.4): heads ranked (Figure 7), and the best head's in each trial,
                   marked by its outcome (Figure 8)

with 95 % confidence intervals (Wilson). Sample i has the same text, city and number in every cell and for
every run of the same tokeniser. The paper multiplies RoPE's base by 50: `--rope theta --rope-theta 500000`.

Writes eval_needle.json and eval_needle.png into the run folder; several runs get one more picture.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.squad import question_prompt
from data.tokenizer import get_tokenizer
from evals.attention_statistics import attention_mass
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
    open_runs,
    open_validation,
    parse_arguments,
    percent,
    progress,
    proportion,
    save_figure,
    short,
    token_axis,
    whole_number,
)
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import World, join_world
from model import GPT, KVCache, RopeScaling

CITIES = (
    *("Amsterdam", "Athens", "Bangkok", "Berlin", "Bogota", "Cairo", "Chicago", "Delhi", "Dublin", "Havana"),
    *("Helsinki", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Nairobi"),
    *("Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw"),
)
MEASURES = ("number", "first_digit", "choice")
N_CHOICES = 10
ANSWER_TOKENS = 8  # room for seven digits
TOKENS_AT_ONCE = 65536  # of one batch
MAX_TRIALS = 100  # of a length, whose outcomes are kept one by one


@dataclass(frozen=True)
class Trial:
    """One prompt and what is asked of it."""

    prompt: list[int]  # all but the first token of the number
    digits: range  # the positions of the needle's digits
    number: str
    choices: list[list[int]]  # tokens of N_CHOICES numbers, the right one first


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs = open_runs(args.runs, args.name)
        haystacks = {run: open_haystack(run, args) for run in runs}
        lengths = choose_lengths(args.lengths, runs, (1, 2, 4, 8))
        for haystack in haystacks.values():
            for length in lengths:
                make_trial(haystack, length, 50, args.seed, 0)  # raises if it does not fit
        picture = choose_picture(args.out, runs, args.name)

        def evaluate_run(run: Run) -> dict[str, Any]:
            return evaluate(run, haystacks[run], lengths, args, world)

        evaluate_all(runs, world, picture, evaluate_run, report, plot)


# ---------------------------------------------------------------- the task


@dataclass(frozen=True)
class Haystack:
    """A long text as tokens, and the tokeniser that made them."""

    tokens: Any  # a numpy array or a TokenStream's read
    n_tokens: int
    tokenizer: tiktoken.Encoding
    source: str

    def read(self, start: int, length: int) -> list[int]:
        start %= max(1, self.n_tokens - length)
        return self.tokens(start, length).tolist()


def open_haystack(run: Run, args: argparse.Namespace) -> Haystack:
    """The validation text, or the .txt files of --haystack, in the run's tokens."""
    stream = open_validation(run.config, args.data)
    tokenizer = get_tokenizer(stream.info["tokenizer"])
    if args.haystack is None:
        return Haystack(stream.read, stream.n_tokens, tokenizer, str(stream.folder))
    files = sorted(Path(args.haystack).glob("*.txt"))
    if not files:
        raise UserError(f"--haystack {args.haystack}: expected a folder with .txt files")
    try:
        text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--haystack {args.haystack}: cannot be read as UTF-8 text: {e}") from None
    tokens = np.array(tokenizer.encode_ordinary(text))
    return Haystack(
        lambda start, length: tokens[start : start + length], len(tokens), tokenizer, args.haystack
    )


def draw_numbers(rng: np.random.Generator) -> list[str]:
    """N_CHOICES different numbers of seven digits."""
    return [str(1_000_000 + n) for n in rng.choice(9_000_000, N_CHOICES, replace=False)]


def make_trial(haystack: Haystack, length: int, depth: int, seed: int, index: int) -> Trial:
    """Sample `index`: `length` tokens with the answer, the needle at `depth` per cent of the text.

    Raises:
        UserError: the length has no room for needle and question, or the haystack is shorter.
    """
    rng = np.random.default_rng([seed, index])
    city, numbers = CITIES[rng.integers(len(CITIES))], draw_numbers(rng)
    encode = haystack.tokenizer.encode_ordinary
    statement = f"The special magic {city} number is:"
    answers = [encode(f" {number}") for number in numbers]
    # The bytes tokeniser has a token for the space: the prompt ends with it, so that a digit comes first.
    lead = 1 if haystack.tokenizer.decode(answers[0][:1]) == " " else 0
    before, needle_number, after = encode(f"\n{statement}"), answers[0], encode(".\n")
    ask = encode(question_prompt("", f"What is the special magic {city} number?") + f" {statement}")
    ask += answers[0][:lead]
    room = length - ANSWER_TOKENS - 1 - len(before) - len(needle_number) - len(after) - len(ask)
    if room < 1 or haystack.n_tokens <= room:
        raise UserError(
            f"--lengths {length}: expected at least {length - room + 1}, for needle and question, and "
            f"at most the {haystack.n_tokens} tokens of {haystack.source}"
        )
    text = haystack.read(int(rng.integers(2**40)), room)
    cut = room * depth // 100
    prompt = [haystack.tokenizer.eot_token, *text[:cut], *before]
    digits = range(len(prompt) + lead, len(prompt) + len(needle_number))
    prompt += [*needle_number, *after, *text[cut:], *ask]
    return Trial(prompt, digits, numbers[0], [answer[lead:] for answer in answers])


# ---------------------------------------------------------------- evaluation


def evaluate(
    run: Run, haystack: Haystack, lengths: list[int], args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """All cells of one run: what eval_needle.json holds. Every process gets the same."""
    model, _, step, _ = run.load(world)
    if not model.cacheable:
        raise UserError(f"{run.source}: needs a model that can be cached; sigmoid with bias = log_len cannot")
    mine = len(range(world.rank, args.samples, world.size))
    with progress(run.label, mine * len(args.depths) * sum(lengths), "tok", world) as bar:
        cells = []
        for length in lengths:
            for depth in args.depths:
                cells.append(run_cell(model, haystack, length, depth, args, world))
                bar.update(mine * length)
    return {
        **run.describe(step, args),
        "haystack": haystack.source,
        "samples": args.samples,
        "seed": args.seed,
        "lengths": lengths,
        "depths": args.depths,
        "cells": cells,
    }


def run_cell(
    model: GPT, haystack: Haystack, length: int, depth: int, args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """All samples at one length and depth; this process takes its share of them."""
    m = model.config.model
    outcomes = torch.zeros(args.samples, len(MEASURES), dtype=torch.float64, device=world.device)
    scores = torch.zeros(args.samples, m.n_layer, m.n_head, dtype=torch.float64, device=world.device)
    rope, reason = RopeScaling(args.rope, args.rope_theta, length), None
    batch = max(1, TOKENS_AT_ONCE // length)
    try:
        mine = list(range(world.rank, args.samples, world.size))
        for start in range(0, len(mine), batch):
            here = mine[start : start + batch]
            trials = [make_trial(haystack, length, depth, args.seed, i) for i in here]
            with model.autocast():
                outcomes[here], scores[here] = run_trials(model, trials, rope, haystack.tokenizer)
    except UserError as e:  # ssmax_pn has no p_n beyond its training length
        reason = str(e)
    # Also when refused: a process without samples waits here.
    outcomes, scores = world.sum(outcomes).cpu(), world.sum(scores).cpu()
    cell: dict[str, Any] = {"length": length, "depth": depth, "reason": reason}
    if reason is not None:
        return cell
    shares = {name: proportion(int(outcomes[:, i].sum()), args.samples) for i, name in enumerate(MEASURES)}
    n_kept = max(1, MAX_TRIALS // len(args.depths))
    top = scores.flatten(1).amax(1)[:n_kept].tolist()
    return cell | shares | {
        "needle_score": scores.mean(0).tolist(),
        "trials": [
            {"top_score": t, "number": bool(o)} for t, o in zip(top, outcomes[:, 0].tolist(), strict=False)
        ],
    }  # fmt: skip


@torch.no_grad()
def run_trials(
    model: GPT, trials: list[Trial], rope: RopeScaling, tokenizer: tiktoken.Encoding
) -> tuple[Tensor, Tensor]:
    """Outcomes (B, len(MEASURES)) and needle scores (B, n_layer, n_head) of trials of one length, float64."""
    device = model.embedding.weight.device
    prompt = torch.tensor([trial.prompt for trial in trials], device=device)  # (B, P)
    n = prompt.shape[1]
    cache = KVCache(model.config.model.n_layer, n + ANSWER_TOKENS)
    model.hidden(prompt[:, :-1], rope, cache)
    positions = torch.arange(n, device=device)
    digits = torch.stack(
        [(positions >= t.digits.start) & (positions < t.digits.stop) for t in trials]
    )  # (B, P)
    scores = attention_mass(model, prompt[:, -1:], rope, cache, digits)
    first = model.logits(model.hidden(prompt[:, -1:], rope, cache)[:, -1])  # (B, V)
    outcomes = torch.zeros(len(trials), len(MEASURES), dtype=torch.float64, device=device)
    for row, trial, tokens in zip(outcomes, trials, greedy(model, first, rope, cache), strict=True):
        answer = tokenizer.decode(tokens).strip()
        row[0] = answer[: len(trial.number)] == trial.number
        row[1] = answer[:1] == trial.number[0]
    likelihoods = torch.stack(
        [
            log_likelihood(model, first, [trial.choices[i] for trial in trials], rope, cache, n)
            for i in range(N_CHOICES)
        ]
    )  # (N_CHOICES, B)
    outcomes[:, 2] = (likelihoods[0] > likelihoods[1:].amax(0)).double()
    return outcomes, scores.double()


def greedy(model: GPT, logits: Tensor, rope: RopeScaling, cache: KVCache) -> list[list[int]]:
    """The likeliest ANSWER_TOKENS tokens of each row, the first by `logits` (B, V)."""
    new = [logits.argmax(-1, keepdim=True)]
    while len(new) < ANSWER_TOKENS:
        new.append(model.logits(model.hidden(new[-1], rope, cache)[:, -1]).argmax(-1, keepdim=True))
    return torch.cat(new, dim=1).tolist()


def log_likelihood(
    model: GPT, first: Tensor, answers: list[list[int]], rope: RopeScaling, cache: KVCache, n: int
) -> Tensor:
    """ln P(answer | the n cached positions) of each row, (B,), the first token's by logits `first` (B, V)."""
    cache.length = n
    longest = max(map(len, answers))
    padded = torch.tensor([a + [0] * (longest - len(a)) for a in answers], device=first.device)  # (B, A)
    logits = first[:, None]
    if longest > 1:
        logits = torch.cat((logits, model.logits(model.hidden(padded[:, :-1], rope, cache))), dim=1)
    each = logits.log_softmax(-1).gather(-1, padded[..., None])[..., 0]  # (B, A)
    lengths = torch.tensor([len(a) for a in answers], device=first.device)[:, None]
    return (each * (torch.arange(longest, device=first.device) < lengths)).sum(1)


# ---------------------------------------------------------------- tables and pictures


def report(results: list[dict[str, Any]]) -> str:
    """For each measure a table: runs and depths down, lengths across."""
    first = results[0]
    parts = [
        f"{first['samples']} samples a cell, haystack {first['haystack']}, RoPE scaling "
        f"{describe_rope(first)}; 95 % confidence intervals."
    ]
    for name in MEASURES:
        rows = [["run", "depth", *(str(length) for length in first["lengths"])]]
        for result in results:
            for depth in result["depths"]:
                cells = [cell for cell in result["cells"] if cell["depth"] == depth]
                shares = [percent(cell[name]) if name in cell else "-" for cell in cells]
                rows.append([result["run"], f"{depth} %", *shares])
        parts.append(f"{name.replace('_', ' ')}\n{format_table(rows)}")
    rows = [["run", "normaliser", *(str(length) for length in first["lengths"])]]
    for result in results:
        best = [max((s for _, s in ranked_heads(result, n)), default=None) for n in result["lengths"]]
        rows.append([result["run"], result["normaliser"], *("-" if s is None else f"{s:.4f}" for s in best)])
    parts.append(f"needle score of the best head, mean over all samples\n{format_table(rows)}")
    parts += [
        f"{result['run']} at {cell['length']}, {cell['depth']} %: no result: {cell['reason']}"
        for result in results
        for cell in result["cells"]
        if cell["reason"] is not None
    ]
    return "\n\n".join(parts) + "\n"


def ranked_heads(result: dict[str, Any], length: int) -> list[tuple[str, float]]:
    """(layer.head, needle score) from the highest on, means over depths."""
    cells = [cell for cell in result["cells"] if cell["length"] == length and cell["reason"] is None]
    if not cells:
        return []
    mean = torch.tensor([cell["needle_score"] for cell in cells]).mean(0)  # (n_layer, n_head)
    named = [(f"{i}.{j}", mean[i, j].item()) for i in range(mean.shape[0]) for j in range(mean.shape[1])]
    return sorted(named, key=lambda pair: -pair[1])


def plot(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """One run: accuracy by length and depth; several: by length. Below, ranked heads and single trials."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    above, below = halves
    panels = above.subplots(1, 3, sharey=True)
    for axes, name in zip(panels, MEASURES, strict=True):
        axes.set_title(f"{name.replace('_', ' ')}: share of samples, 95 % interval")
        if len(results) == 1:
            draw_heat_map(axes, results[0], name)
        else:
            draw_accuracy(axes, results, name)
    ranks, trials = below.subplots(1, 2)
    draw_ranks(ranks, results)
    draw_trials(trials, results)
    titles = [f"{result['run']}: {result['normaliser']}, step {result['step']}" for result in results]
    figure.suptitle("\n".join([*titles, f"RoPE scaling {describe_rope(results[0])}"]), fontsize=10)
    return save_figure(figure, path)


def draw_heat_map(axes: Any, result: dict[str, Any], name: str) -> None:
    lengths, depths = result["lengths"], result["depths"]
    shares = torch.full((len(depths), len(lengths)), torch.nan)
    for cell in result["cells"]:
        if cell["reason"] is None:
            i, j, value = depths.index(cell["depth"]), lengths.index(cell["length"]), cell[name]
            shares[i, j] = value["share"]
            text = f"{100 * value['share']:.0f} %\n[{100 * value['low']:.0f}, {100 * value['high']:.0f}]"
            dark = value["share"] < 0.5
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.imshow(shares.numpy(), vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [short(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth of the needle")


def draw_accuracy(axes: Any, results: list[dict[str, Any]], name: str) -> None:
    """The mean over depths, with the interval of one depth: the depths of a sample are not independent."""
    for i, result in enumerate(results):
        lengths, shares, low, high = [], [], [], []
        for length in result["lengths"]:
            cells = [cell for cell in result["cells"] if cell["length"] == length and cell["reason"] is None]
            if cells:
                mean = sum(cell[name]["share"] for cell in cells) / len(cells)
                value = proportion(mean * result["samples"], result["samples"])
                lengths.append(length)
                shares.append(value["share"])
                low.append(max(0.0, value["share"] - value["low"]))
                high.append(max(0.0, value["high"] - value["share"]))
        marker = MARKERS[i % len(MARKERS)]
        axes.errorbar(lengths, shares, (low, high), marker=marker, capsize=3, label=result["run"])
    mark_training_length(axes, results)
    token_axis(axes, results[0]["lengths"])
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("length (tokens), mean over depths")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_ranks(axes: Any, results: list[dict[str, Any]]) -> None:
    """Figure 7: heads from the highest needle score on; a line for each length, or for each run."""
    longest = results[0]["lengths"][-1]
    lines = [(result["run"], ranked_heads(result, longest)) for result in results]
    if len(results) == 1:
        lines = [(short(n), ranked_heads(results[0], n)) for n in results[0]["lengths"]]
    for i, (label, ranked) in enumerate(lines):
        scores = [score for _, score in ranked]
        axes.plot(
            range(1, len(scores) + 1), scores, marker=MARKERS[i % len(MARKERS)], markersize=4, label=label
        )
    axes.set_title(
        "needle score by rank of the head" + (f", at {short(longest)}" if len(results) > 1 else "")
    )
    axes.set_xlabel("rank of the head")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("attention mass on the digits, mean")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="length" if len(results) == 1 else None)


def draw_trials(axes: Any, results: list[dict[str, Any]]) -> None:
    """Figure 8: the best head's needle score in single trials at the longest length, marked by outcome."""
    longest = results[0]["lengths"][-1]
    for i, result in enumerate(results):
        cells = [cell for cell in result["cells"] if cell["length"] == longest and cell["reason"] is None]
        trials = sorted((t for cell in cells for t in cell["trials"]), key=lambda t: -t["top_score"])
        for outcome, marker, word in ((True, "o", "found"), (False, "x", "not found")):
            points = [(j + 1, t["top_score"]) for j, t in enumerate(trials) if t["number"] == outcome]
            x, y = zip(*points, strict=True) if points else ((), ())
            label = f"{result['run']}: {word} ({len(points)})"
            axes.scatter(x, y, marker=marker, s=18, color=f"C{i % 10}", label=label)
    axes.set_title(f"best head's needle score in single trials at {short(longest)}")
    axes.set_xlabel("trial, ranked by score")
    axes.set_ylabel("attention mass on the digits")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


# ---------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser)
    add_lengths(parser, "of the whole sequence with the answer (default: 1, 2, 4, 8 x the training length)")
    parser.add_argument(
        "--depths",
        nargs="+",
        type=int,
        choices=range(101),
        metavar="PERCENT",
        default=[10, 30, 50, 70, 90],
        help="where in the text the needle stands (default: 10 30 50 70 90)",
    )
    parser.add_argument(
        "--samples", type=whole_number, default=1000, metavar="N", help="of each cell (default: %(default)s)"
    )
    parser.add_argument("--haystack", metavar="DIR", help=".txt files (default: the validation text)")
    parser.add_argument("--seed", type=int, default=0, help="of texts, cities and numbers (default: 0)")
    return parse_arguments(parser, "eval_needle")


if __name__ == "__main__":
    run_main(main)
