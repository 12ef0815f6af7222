"""Needle in a haystack: does a model still find a number in a long context (SSMax, Section 3.3)?

    python -m lab.needle runs/ssmax --lengths 1000 2000 5000 10000 --rope theta --rope-theta 500000
    python -m lab.needle runs/softmax runs/ssmax runs/lssar --samples 100
    python -m lab.needle runs/sft --data data/fineweb10B                # fine-tuned: no text of its own
    python -m lab.needle runs/ssmax --haystack essays/                  # a folder of .txt files
    torchrun --standalone --nproc_per_node=8 -m lab.needle runs/ssmax

A text contains, at 10, 30, 50, 70 or 90 % of it, "The special magic {city} number is: {seven digits}.". The
question and the beginning of its answer follow the text; lengths include all of it and the answer. Reported:

    number         share of samples whose greedy answer is the whole number
    first digit    share whose answer begins with the right digit
    choice         share in which the number is likelier than nine others of the same distribution: chance is
                   10 %, and a model needs no fine-tuning to beat it
    needle score   attention mass from behind the needle's colon to its end in the row that predicts the
                   first digit, for each layer and head (Section 3.4): heads ranked (Figure 7), and the best
                   head's in trials at random depths of the longest length, marked by outcome (Figure 8)

with 95 % confidence intervals (Wilson). Sample i has the same text, city and number at every depth of
a length and for every run of the same tokeniser. The paper multiplies RoPE's base by 50: `--rope theta
--rope-theta 500000`. Its Figure 7 is of one example, but the text around that needle is not given: here heads
are ranked by their mean over all samples.

Writes eval_needle.json and eval_needle.png into the run folder; several runs get one more figure.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tiktoken
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.tokenizer import get_tokenizer
from evals import common, output
from evals.common import proportion
from evals.output import Result, Share, percent
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import World, join_world
from lab.squad import question_prompt
from model import GPT, KVCache
from positions import RopeScaling
from training.attention_statistics import attention_mass

CITIES = (
    *("Amsterdam", "Athens", "Bangkok", "Berlin", "Bogota", "Cairo", "Chicago", "Delhi", "Dublin", "Havana"),
    *("Helsinki", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Nairobi"),
    *("Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw"),
)
MEASURES = ("number", "first_digit", "choice")
DEPTHS = [10, 30, 50, 70, 90]
OUTCOMES = ("whole number", "first digit", "wrong")
N_CHOICES = 10
ANSWER_TOKENS = 8  # room for seven digits
TOKENS_AT_ONCE = 65536  # of one batch
N_RANKED = 25  # heads in Figure 7
Depth = int | Literal["random"]  # per cent of the text


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args)
        haystacks = [open_haystack(run, args) for run in runs]
        lengths = common.choose_lengths(args.lengths, runs, (1, 2, 4, 8))
        for haystack in haystacks:
            for length in lengths:
                make_trial(haystack, length, 50, args.seed, 0)  # raises if it does not fit
        results = []
        for run, haystack in zip(runs, haystacks, strict=True):
            model, step = run.load(world)
            if not model.cacheable:
                raise UserError(f"{run.label}: needs a KV cache, which bias = log_len rules out")
            where = product(lengths, args.depths)
            cells = {at: score(model, haystack, *at, args, world) for at in where}
            trials = score(model, haystack, lengths[-1], "random", args, world)
            if world.is_main:  # at once: a later run may fail
                results.append(run.write(summarise(cells, trials, model, haystack, args), step, args))
                plot(results[-1:], run.file(".png"))
        if world.is_main:
            print(tables(results))
            if picture:
                plot(results, picture)


# ---------------------------------------------------------------- task
class Haystack(NamedTuple):
    """A long text as tokens, and their tokeniser."""

    read: Callable[[int, int], np.ndarray]  # (start, length) -> (length,)
    n_tokens: int
    tokenizer: tiktoken.Encoding
    source: str


class Trial(NamedTuple):
    """One prompt and its answer."""

    prompt: list[int]  # up to the number's first token
    span: range  # positions from behind the needle's colon to its end
    number: str
    choices: list[list[int]]  # tokens of N_CHOICES numbers, the right one first


def open_haystack(run: common.EvaluatedRun, args: argparse.Namespace) -> Haystack:
    """The validation text, or the .txt files of --haystack, in the run's tokens.

    Raises:
        UserError: bad data or no .txt files.
    """
    stream = common.open_validation(run.config, args.data)
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
    return Haystack(lambda start, n: tokens[start : start + n], len(tokens), tokenizer, args.haystack)


def draw_numbers(rng: np.random.Generator) -> list[str]:
    """N_CHOICES different numbers of seven digits."""
    return [str(1_000_000 + n) for n in rng.choice(9_000_000, N_CHOICES, replace=False)]


def make_trial(haystack: Haystack, length: int, depth: Depth, seed: int, index: int) -> Trial:
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
    before, secret, after = encode(f"\n{statement}"), answers[0] + encode("."), encode("\n")
    ask = encode(question_prompt("", f"What is the special magic {city} number?") + f" {statement}")
    ask += answers[0][:lead]
    room = length - ANSWER_TOKENS - 1 - len(before) - len(secret) - len(after) - len(ask)
    if room < 1 or haystack.n_tokens <= room:
        raise UserError(
            f"--lengths {length}: expected at least {length - room + 1}, for needle and question, and "
            f"at most the {haystack.n_tokens} tokens of {haystack.source}"
        )
    start = int(rng.integers(2**40)) % max(1, haystack.n_tokens - room)
    percent = int(rng.integers(101)) if depth == "random" else depth
    text, cut = haystack.read(start, room).tolist(), room * percent // 100
    prompt = [haystack.tokenizer.eot_token, *text[:cut], *before]
    span = range(len(prompt), len(prompt) + len(secret))
    prompt += [*secret, *after, *text[cut:], *ask]
    return Trial(prompt, span, numbers[0], [answer[lead:] for answer in answers])


# ---------------------------------------------------------------- score
def score(
    model: GPT, haystack: Haystack, length: int, depth: Depth, args: argparse.Namespace, world: World
) -> Tensor | str:
    """The `run_trials` of all samples or trials, (N, n), or why there are none (see `common.score_all`)."""
    rope = RopeScaling(args.rope, args.rope_theta, length)

    def outcomes(items: Sequence[int]) -> Tensor:
        trials = [make_trial(haystack, length, depth, args.seed, i) for i in items]
        with model.autocast():
            return run_trials(model, trials, rope, haystack.tokenizer)

    batch = max(1, TOKENS_AT_ONCE // length)
    n_items = args.trials if depth == "random" else args.samples
    return common.score_all(world, f"{length} tokens, depth {depth}", n_items, outcomes, batch)


@torch.no_grad()
def run_trials(model: GPT, trials: list[Trial], rope: RopeScaling, tokenizer: tiktoken.Encoding) -> Tensor:
    """Outcomes, 0 or 1, and all heads' needle scores: (B, len(MEASURES) + n_layer * n_head) float64."""
    device = model.embedding.weight.device
    prompt = torch.tensor([trial.prompt for trial in trials], device=device)  # (B, P)
    n = prompt.shape[1]
    cache = KVCache(model.config.model.n_layer, n + ANSWER_TOKENS)
    model.hidden(prompt[:, :-1], rope, cache)
    where = torch.tensor([[i in t.span for i in range(n)] for t in trials], device=device)  # (B, P)
    needle_scores = attention_mass(model, prompt[:, -1:], rope, cache, where)
    first = model.logits(model.hidden(prompt[:, -1:], rope, cache)[:, -1])  # (B, V)
    answers = [tokenizer.decode(a).strip() for a in greedy(model, first, rope, cache, tokenizer)]
    choices = [[trial.choices[i] for trial in trials] for i in range(N_CHOICES)]
    likelihoods = torch.stack([log_likelihood(model, first, tokens, rope, cache, n) for tokens in choices])
    outcomes = [
        [answer.startswith(trial.number) for answer, trial in zip(answers, trials, strict=True)],
        [answer[:1] == trial.number[0] for answer, trial in zip(answers, trials, strict=True)],
        (likelihoods[0] > likelihoods[1:].amax(0)).tolist(),
    ]
    found = torch.tensor(outcomes, dtype=torch.float64, device=device).T  # (B, len(MEASURES))
    return torch.cat((found, needle_scores.flatten(1)), dim=1)


def greedy(
    model: GPT, logits: Tensor, rope: RopeScaling, cache: KVCache, tokenizer: tiktoken.Encoding
) -> list[list[int]]:
    """The likeliest ANSWER_TOKENS tokens of each row but end-of-text; the first by logits (B, V)."""
    eot, new = torch.tensor([tokenizer.eot_token], device=logits.device), []
    while True:  # the model may have more rows than the tokeniser has tokens
        new.append(logits[:, : tokenizer.n_vocab].index_fill(-1, eot, -math.inf).argmax(-1, keepdim=True))
        if len(new) == ANSWER_TOKENS:
            return torch.cat(new, dim=1).tolist()
        logits = model.logits(model.hidden(new[-1], rope, cache)[:, -1])


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


# ---------------------------------------------------------------- summary and tables
def summarise(
    cells: dict[tuple[int, int], Tensor | str],
    trials: Tensor | str,
    model: GPT,
    haystack: Haystack,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What eval_needle.json holds besides the run's keys: shares and scores of each cell, single trials."""
    entries, m = [], model.config.model
    for (length, depth), scores in cells.items():
        entry: dict[str, Any] = {"length": length, "depth": depth}
        entry["reason"] = scores if isinstance(scores, str) else None
        if not isinstance(scores, str):
            for i, name in enumerate(MEASURES):
                entry[name] = proportion(int(scores[:, i].sum()), args.samples)
            heads = scores[:, len(MEASURES) :]
            entry["needle_score"] = heads.mean(0).view(m.n_layer, m.n_head).tolist()
        entries.append(entry)
    listed = [] if isinstance(trials, str) else trials.tolist()
    singles = [{"top_score": max(row[len(MEASURES) :]), "outcome": outcome_of(row)} for row in listed]
    task = {"haystack": haystack.source, "samples": args.samples, "seed": args.seed}
    lengths = list(dict.fromkeys(length for length, _ in cells))
    return task | {"lengths": lengths, "depths": args.depths, "cells": entries, "trials": singles}


def outcome_of(row: list[float]) -> str:
    """Of a row of `run_trials`: the better of OUTCOMES that it reaches."""
    found, first_digit = row[:2]
    return OUTCOMES[0] if found else OUTCOMES[1] if first_digit else OUTCOMES[2]


def finished_cells(result: Result, length: int) -> list[dict[str, Any]]:
    """The cells of a length, one for each depth; none if the model rejected it."""
    return [cell for cell in result["cells"] if cell["length"] == length and cell["reason"] is None]


def ranked_heads(result: Result, length: int) -> list[float]:
    """Each head's needle score, mean over depths, in descending order."""
    cells = finished_cells(result, length)
    scores = torch.tensor([cell["needle_score"] for cell in cells])  # (n_depths, n_layer, n_head)
    return scores.mean(0).flatten().sort(descending=True).values.tolist() if cells else []


def tables(results: list[Result]) -> str:
    """For each measure a table: runs and depths down, lengths across."""
    first, lengths = results[0], results[0]["lengths"]
    parts = [
        f"{first['samples']} samples a cell, haystack {first['haystack']}, RoPE scaling "
        f"{output.format_rope(*results)}; 95 % confidence intervals."
    ]
    for name in MEASURES:
        rows = [["run", "depth", *map(str, lengths)]]
        for result in results:
            for depth, shares in shares_by_depth(result, name).items():
                rows.append([result["run"], depth, *(percent(share) if share else "-" for share in shares)])
        parts.append(f"{name.replace('_', ' ')}\n{output.format_table(rows)}")
    rows = [["run", "normaliser", *map(str, lengths)]]
    for result in results:
        best = [ranked_heads(result, length)[:1] for length in lengths]
        rows.append([result["run"], result["normaliser"], *(f"{s[0]:.4f}" if s else "-" for s in best)])
    parts.append(f"needle score of the best head, mean over all samples\n{output.format_table(rows)}")
    return "\n\n".join(parts + output.rejections(results, "cells")) + "\n"


def shares_by_depth(result: Result, name: str) -> dict[str, list[Share | None]]:
    """'10 %' -> a measure at each length, None where the length was rejected."""
    return {
        f"{depth} %": [cell.get(name) for cell in result["cells"] if cell["depth"] == depth]
        for depth in result["depths"]
    }


def mean_shares(result: Result, name: str) -> list[Share | None]:
    """Means over depths, with the interval of one depth: the depths of a sample are not independent."""
    n, cells = result["samples"], [finished_cells(result, length) for length in result["lengths"]]
    means = [sum(cell[name]["share"] for cell in each) / len(each) if each else None for each in cells]
    return [None if mean is None else proportion(n * mean, n) for mean in means]


# ---------------------------------------------------------------- figures
def plot(results: list[Result], path: Path) -> None:
    output.save_figure(draw(results), path)


def draw(results: list[Result]) -> Figure:
    """Shares by length, and by depth or, of several runs, by run (SSMax, Figure 6); Figures 7 and 8."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    above, below = figure.subfigures(2, 1).flat  # type: ignore[union-attr]
    for axes, name in zip(above.subplots(1, 3, sharey=True), MEASURES, strict=True):
        rows = {result["run"]: mean_shares(result, name) for result in results}
        if len(results) == 1:
            rows = shares_by_depth(results[0], name)
        draw_heat_map(axes, rows, results[0]["lengths"])
        axes.set_title(f"{name.replace('_', ' ')}: share of samples, 95 % interval")
        axes.set(xlabel="length (tokens)", ylabel="depth of the needle" if len(results) == 1 else "")
        axes.label_outer()
    ranks, trials = below.subplots(1, 2)
    draw_ranks(ranks, results)
    draw_trials(trials, results)
    for axes in (ranks, trials):
        axes.set_ylabel("attention mass on the number")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    titles = [f"{output.run_title(result)}, step {result['step']}" for result in results]
    figure.suptitle("\n".join([*titles, f"RoPE scaling {output.format_rope(*results)}"]), fontsize=10)
    return figure


def draw_heat_map(axes: Any, rows: dict[str, list[Share | None]], lengths: list[int]) -> None:
    """Rows by lengths, with the intervals as text; white where the length was rejected."""
    grid = [[share["share"] if share else math.nan for share in row] for row in rows.values()]
    axes.imshow(grid, vmin=0, vmax=1, aspect="auto")
    for i, row in enumerate(rows.values()):
        for j, share in enumerate(row):
            text = percent(share, digits=0).replace("% ", "%\n") if share else ""
            axes.text(
                j, i, text, ha="center", va="center", fontsize=8, color="w" if grid[i][j] < 0.5 else "k"
            )
    axes.set_xticks(range(len(lengths)), map(output.format_length, lengths))
    axes.set_yticks(range(len(rows)), rows)


def draw_ranks(axes: Any, results: list[Result]) -> None:
    """Figure 7: the best heads by descending needle score; a line for each length, or for each run."""
    longest, alone = results[0]["lengths"][-1], len(results) == 1
    lines = {result["run"]: ranked_heads(result, longest) for result in results}
    if alone:
        lines = {output.format_length(n): ranked_heads(results[0], n) for n in results[0]["lengths"]}
    for marker, (label, scores) in zip(cycle(output.MARKERS), lines.items(), strict=False):
        axes.plot(range(1, len(scores) + 1)[:N_RANKED], scores[:N_RANKED], f"-{marker}", ms=4, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    at = "by length" if alone else f"at {output.format_length(longest)}"
    axes.set(title=f"needle score by rank of the head, {at}", xlabel="rank of the head")


def draw_trials(axes: Any, results: list[Result]) -> None:
    """Figure 8: the best head's needle score in trials at random depths, marked by outcome."""
    for i, result in enumerate(results):
        trials = sorted(result["trials"], key=lambda trial: -trial["top_score"])
        for outcome, marker in zip(OUTCOMES, "o^x", strict=True):
            points = {j + 1: t["top_score"] for j, t in enumerate(trials) if t["outcome"] == outcome}
            label = f"{result['run']}: {outcome} ({len(points)})"
            axes.scatter(points.keys(), points.values(), marker=marker, s=18, color=f"C{i % 10}", label=label)
    longest = output.format_length(results[0]["lengths"][-1])
    title = f"best head's needle score in single trials at {longest}, random depths"
    axes.set(title=title, xlabel="trial, ranked by score")


# ---------------------------------------------------------------- command line
def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    common.add_arguments(
        parser, "of the whole sequence with the answer (default: 1, 2, 4, 8 x the training length)"
    )
    add, help = parser.add_argument, "positions of the needle in the text (default: 10 30 50 70 90)"
    add("--depths", nargs="+", type=int, default=DEPTHS, metavar="PERCENT", help=help)
    add("--samples", type=positive_int, default=1000, metavar="N", help="of each cell (default: %(default)s)")
    add("--trials", type=positive_int, default=100, metavar="N", help="of Figure 8 (default: %(default)s)")
    add("--haystack", metavar="DIR", help=".txt files (default: the validation text)")
    add("--seed", type=int, default=0, help="of texts, cities and numbers (default: 0)")
    args = common.parse_arguments(parser, "eval_needle")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: expected 0 or more")
    if not all(0 <= depth <= 100 for depth in args.depths):
        raise UserError(f"--depths {' '.join(map(str, args.depths))}: expected 0 to 100 per cent")
    return args


if __name__ == "__main__":
    run_main(main)
