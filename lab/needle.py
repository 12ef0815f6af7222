"""Needle in a haystack: does a model still find a number in a long context (SSMax, Section 3.3)?

    python -m lab.needle runs/ssmax --lengths 1000 2000 5000 10000 --rope theta --rope-theta 500000
    python -m lab.needle runs/softmax runs/ssmax runs/lssar --samples 100
    python -m lab.needle runs/sft --data data/fineweb10B                # fine-tuned: no text of its own

A piece of the validation text contains, at 10, 30, 50, 70 or 90 % of it, "The special magic {city}
number is: {seven digits}.". The question and the beginning of its answer, which is the needle's
sentence up to the number, follow. With --question-only the prompt ends with "Answer:", for models
that were tuned to answer so. Lengths include all of it. Reported with 95 % confidence intervals
(Wilson):

    number         share of samples whose greedy answer is the whole number
    first_digit    share whose answer begins with the right digit
    choice         share in which the number is likelier than nine others of the same distribution: chance is
                   10 %, and a model needs no fine-tuning to beat it
    needle score   attention mass from behind the needle's colon to its end in the row that predicts the
                   first digit, for each layer and head (Section 3.4), heads ranked (Figure 7). With
                   --depths 0, drawn for each sample, the best head's in each sample, marked by
                   outcome (Figure 8)

Sample i has the same text, city and number at every depth of a length and for every run of the same
tokeniser. The paper multiplies RoPE's base by 50. Its Figure 7 is of one example, ours of all
samples. The text, the cities and that the prompt begins the answer are ours, the paper does not
give them.

Writes eval_needle.json and eval_needle.png into the run folder and adds to its rows.csv. Several
runs get one more figure.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor

from data.dataset import TokenStream
from data.tokenizer import Tokenizer, get_tokenizer
from evals import common, output
from evals.common import add_arguments, parse_arguments
from evals.output import Result
from evals.rows import identity_of
from infra.cli import ArgumentParser, UserError, integer, positive_int, run_main
from infra.distributed import World, join_world
from lab.attention_statistics import attention_mass
from lab.shares import percent, proportion
from lab.squad import question_prompt
from model import GPT, KVCache
from positions import RopeScaling

CITIES = (
    *(
        "Amsterdam",
        "Athens",
        "Bangkok",
        "Berlin",
        "Bogota",
        "Cairo",
        "Chicago",
        "Delhi",
        "Dublin",
        "Havana",
    ),
    *(
        "Helsinki",
        "Jakarta",
        "Kyoto",
        "Lagos",
        "Lima",
        "Lisbon",
        "London",
        "Madrid",
        "Manila",
        "Nairobi",
    ),
    *("Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw"),
)
MEASURES = ("number", "first_digit", "choice")
OUTCOMES = {"number": "o", "first_digit": "^", "neither": "x"}  # markers in Figure 8
RANDOM_DEPTH = 0
N_CHOICES = 10
ANSWER_TOKENS = 8  # room for seven digits
TOKENS_AT_ONCE = 65536  # of one batch
N_RANKED = 25  # heads in Figure 7


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    lengths_help = (
        "of the whole sequence with the answer (default: 1, 2, 4, 8 x the training length)"
    )
    add_arguments(parser, lengths_help)
    add = parser.add_argument
    depths = [10, 30, 50, 70, 90]
    depths_help = "of the text, 0: one at random for each sample (default: 10 30 50 70 90)"
    add(
        "--depths",
        nargs="+",
        type=integer(0, 100),
        default=depths,
        metavar="PERCENT",
        help=depths_help,
    )
    add(
        "--question-only", action="store_true", help="ask without beginning the answer; use a --tag"
    )
    add(
        "--samples",
        type=positive_int,
        default=1000,
        metavar="N",
        help="of each cell (default: %(default)s)",
    )
    args = parse_arguments(parser, "eval_needle")
    args.depths = sorted({*args.depths})
    return args


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args, world, (1, 2, 4, 8))
        streams = [common.open_validation(run.config, args.data, run.tokenizer) for run in runs]
        haystacks = [Haystack(stream, tokenizer_of(stream)) for stream in streams]
        lengths = args.lengths
        for haystack, length, i in product(
            haystacks, {lengths[0], lengths[-1]}, range(args.samples)
        ):
            make_trial(haystack, length, 50, i, args.question_only)  # raises if it does not fit

        def measure(i: int, model: GPT, step: int) -> tuple[dict[str, Any], str, list[Any]]:
            if not model.cacheable:
                raise UserError(
                    f"{runs[i].label}: needs a KV cache, but its weights depend on all keys"
                )
            cells = []
            for length, depth in product(lengths, args.depths):
                scores = score(model, haystacks[i], length, depth, args, world)
                cells.append({"length": length, "depth": depth, **summarise(scores, model, depth)})
            task = {"samples": args.samples, "seed": 0, "lengths": lengths, "depths": args.depths}
            summary = {"haystack": str(haystacks[i].stream.folder), **task, "cells": cells}
            question = ", question only" if args.question_only else ""
            text = f"{identity_of(haystacks[i].stream.fingerprint)}, seed 0, {args.samples} samples{question}"
            return summary, text, measured_shares(cells)

        common.evaluate("needle", args, world, runs, picture, measure, tables, plot)


# ---------------------------------------------------------------- task
class Haystack(NamedTuple):
    """A long text as tokens, and their tokeniser."""

    stream: TokenStream
    tokenizer: Tokenizer


def tokenizer_of(stream: TokenStream) -> Tokenizer:
    return get_tokenizer(stream.info["tokenizer"], stream.tokenizer_file)


class Trial(NamedTuple):
    """One prompt and its answer."""

    prompt: list[int]  # up to the number's first token
    span: range  # positions from behind the needle's colon to its end
    number: str
    choices: list[list[int]]  # tokens of N_CHOICES numbers, the right one first


def draw_numbers(rng: np.random.Generator) -> list[str]:
    """N_CHOICES different numbers of seven digits."""
    return [str(1_000_000 + n) for n in rng.choice(9_000_000, N_CHOICES, replace=False)]


def make_trial(
    haystack: Haystack, length: int, depth: int, index: int, question_only: bool = False
) -> Trial:
    """Sample `index`: `length` tokens with the answer, the needle at `depth` per cent of the text.

    Raises:
        UserError: the length has no room for needle and question, or the haystack is shorter.
    """
    stream, tokenizer = haystack
    encode = tokenizer.encode_ordinary
    rng = np.random.default_rng([0, index])
    city = CITIES[rng.integers(len(CITIES))]
    numbers = draw_numbers(rng)
    answers = [encode(f" {number}") for number in numbers]
    # The bytes tokeniser has a token for the space: the prompt ends with it, so that a digit comes
    # first.
    n_lead = 1 if tokenizer.decode(answers[0][:1]) == " " else 0
    statement = f"The special magic {city} number is:"
    before = encode(f"\n{statement}")
    secret = answers[0] + encode(".")
    after = encode("\n")
    question = question_prompt("", f"What is the special magic {city} number?")
    ask = encode(question if question_only else f"{question} {statement}") + answers[0][:n_lead]
    room = length - ANSWER_TOKENS - 1 - len(before) - len(secret) - len(after) - len(ask)
    if room < 1 or stream.n_tokens <= room:
        raise UserError(
            f"a sequence of {length} tokens: expected at least {length - room + 1}, for needle and question, "
            f"and at most the {stream.n_tokens} tokens of {stream.folder} (--lengths, --seq-len)"
        )
    start = int(rng.integers(2**40)) % (stream.n_tokens - room)
    text = stream.read(start, room).tolist()
    cut = int(rng.integers(room + 1)) if depth == RANDOM_DEPTH else room * depth // 100
    prompt = [tokenizer.eot_token, *text[:cut], *before]
    span = range(len(prompt), len(prompt) + len(secret))
    prompt += [*secret, *after, *text[cut:], *ask]
    return Trial(prompt, span, numbers[0], [answer[n_lead:] for answer in answers])


# ---------------------------------------------------------------- score
def score(
    model: GPT, haystack: Haystack, length: int, depth: int, args: argparse.Namespace, world: World
) -> Tensor | str:
    """The `run_trials` of all samples, (N, n), or why there are none (see `common.score_all`)."""
    rope = RopeScaling(args.rope, args.rope_theta, length)

    def outcomes(items: Sequence[int]) -> Tensor:
        trials = [make_trial(haystack, length, depth, i, args.question_only) for i in items]
        with model.autocast():
            return run_trials(model, trials, rope, haystack.tokenizer)

    batch = max(1, TOKENS_AT_ONCE // length)
    return common.score_all(world, f"{length} tokens, depth {depth}", args.samples, outcomes, batch)


@torch.no_grad()
def run_trials(model: GPT, trials: list[Trial], rope: RopeScaling, tokenizer: Tokenizer) -> Tensor:
    """Outcomes, 0 or 1, and all heads' needle scores: (B, len(MEASURES) + n_layer * n_head)
    float64.
    """
    device = model.embedding.weight.device
    prompt = torch.tensor([trial.prompt for trial in trials], device=device)  # (B, P)
    n = prompt.shape[1]
    cache = KVCache(model.config.model.n_layer, n + ANSWER_TOKENS)
    model.hidden(prompt[:, :-1], rope, cache)
    # (B, P)
    is_needle = torch.tensor([[i in t.span for i in range(n)] for t in trials], device=device)
    needle_scores = attention_mass(model, prompt[:, -1:], rope, cache, is_needle)
    first = model.logits(model.hidden(prompt[:, -1:], rope, cache)[:, -1])  # (B, V)
    answers = [
        tokenizer.decode(tokens).strip() for tokens in greedy(model, first, rope, cache, tokenizer)
    ]
    choices = [[trial.choices[i] for trial in trials] for i in range(N_CHOICES)]
    likelihoods = torch.stack(
        [log_likelihood(model, first, tokens, rope, cache, n) for tokens in choices]
    )
    is_right = [
        (re.match(rf"{trial.number}(?!\d)", answer) is not None, answer[:1] == trial.number[0])
        for answer, trial in zip(answers, trials, strict=True)
    ]
    is_likeliest = likelihoods[0] > likelihoods[1:].amax(0)
    outcomes = torch.column_stack((torch.tensor(is_right, device=device), is_likeliest))
    return torch.cat((outcomes.double(), needle_scores.flatten(1).double()), dim=1)


def greedy(
    model: GPT, logits: Tensor, rope: RopeScaling, cache: KVCache, tokenizer: Tokenizer
) -> list[list[int]]:
    """The likeliest ANSWER_TOKENS tokens of each row but end-of-text; the first by logits (B, V)."""
    eot = torch.tensor([tokenizer.eot_token], device=logits.device)
    answer: list[Tensor] = []
    while True:  # the model may have more rows than the tokeniser has tokens
        allowed = logits[:, : tokenizer.n_vocab].index_fill(-1, eot, -math.inf)
        answer.append(allowed.argmax(-1, keepdim=True))
        if len(answer) == ANSWER_TOKENS:
            return torch.cat(answer, dim=1).tolist()
        logits = model.logits(model.hidden(answer[-1], rope, cache)[:, -1])


def log_likelihood(
    model: GPT, first: Tensor, answers: list[list[int]], rope: RopeScaling, cache: KVCache, n: int
) -> Tensor:
    """ln P(answer | the n cached positions) of each row, (B,), the first token's by logits `first`
    (B, V).
    """
    cache.length = n
    lengths = torch.tensor([len(answer) for answer in answers], device=first.device)[:, None]
    longest = int(lengths.max())
    # (B, A)
    padded = torch.tensor([a + [0] * (longest - len(a)) for a in answers], device=first.device)
    logits = first[:, None]
    if longest > 1:
        logits = torch.cat((logits, model.logits(model.hidden(padded[:, :-1], rope, cache))), dim=1)
    each = logits.log_softmax(-1).gather(-1, padded[..., None])[..., 0]  # (B, A)
    return (each * (torch.arange(longest, device=first.device) < lengths)).sum(1)


# ---------------------------------------------------------------- summary and tables
def summarise(scores: Tensor | str, model: GPT, depth: int) -> dict[str, Any]:
    """A cell's shares of its samples, its needle scores by layer and head, at random depths its
    trials.
    """
    if isinstance(scores, str):
        return {"reason": scores}
    m = model.config.model
    of_heads = scores[:, len(MEASURES) :]  # (N, n_layer * n_head)
    counts = scores[:, : len(MEASURES)].sum(0).int().tolist()
    shares = {
        measure: proportion(n, len(scores)) for measure, n in zip(MEASURES, counts, strict=True)
    }
    heads = of_heads.mean(0).view(m.n_layer, m.n_head)
    cell = {"reason": None, **shares, "needle_score": heads.tolist()}
    if depth == RANDOM_DEPTH:
        outcomes = [
            "number" if number else "first_digit" if digit else "neither"
            for number, digit, *_ in scores
        ]
        cell["trials"] = [*zip(of_heads.amax(1).tolist(), outcomes, strict=True)]
    return cell


def measured_shares(cells: list[dict[str, Any]]) -> list[tuple[int, int, str, float]]:
    """(length, depth, measure, share); NaN where the length was rejected."""
    return [
        (
            cell["length"],
            cell["depth"],
            measure,
            cell[measure]["share"] if measure in cell else math.nan,
        )
        for cell, measure in product(cells, MEASURES)
    ]


def share_table(
    results: list[Result], measure: str, value: Callable[[Any], Any]
) -> pandas.DataFrame:
    """The `value` of each share: runs and depths down, lengths across. NaN where the length was
    rejected.
    """
    shares = {
        (result["run"], cell["depth"] or "any", cell["length"]): value(cell[measure])
        if measure in cell
        else math.nan
        for result in results
        for cell in result["cells"]
    }
    return pandas.Series(shares).rename_axis(["run", "depth", "length"]).unstack(sort=False)


def tables(results: list[Result]) -> str:
    """For each measure a table: runs and depths down, lengths across."""
    first = results[0]
    texts = ", ".join(dict.fromkeys(result["haystack"] for result in results))
    parts = [
        f"{first['samples']} samples a cell, haystack {texts}, RoPE scaling "
        f"{output.format_rope(*results)}; 95 % confidence intervals."
    ]
    for measure in MEASURES:
        parts.append(f"{measure}\n{share_table(results, measure, percent).to_string(na_rep='-')}")
    return "\n\n".join(parts + output.rejections(results, "cells")) + "\n"


# ---------------------------------------------------------------- figure
def plot(results: list[Result], path: Path) -> None:
    """Shares by length, and by depth or, of several runs, by run (SSMax, Figure 6); Figure 7 or 8."""
    figure = Figure(figsize=(19, 5), layout="constrained")
    *maps, ranks = figure.subplots(1, len(MEASURES) + 1)
    is_single = len(results) == 1
    for axes, measure in zip(maps, MEASURES, strict=True):
        shares = share_table(results, measure, itemgetter("share"))
        shares = shares.droplevel("run") if is_single else shares.groupby("run", sort=False).mean()
        axes.imshow(shares, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            axes.text(column, row, f"{share:.0%}", ha="center", color="w" if share < 0.5 else "k")
        axes.set_xticks(range(shares.shape[1]), shares.columns)
        axes.set_yticks(range(len(shares)), shares.index)
        axes.set(
            title=f"{measure}: share of samples", xlabel="length (tokens)", ylabel=shares.index.name
        )
    # Of each run the last cell at random depths, so of the longest length that has them.
    trials = {
        result["run"]: cell["trials"]
        for result in results
        for cell in result["cells"]
        if "trials" in cell
    }
    heads = ranked_heads(results)
    if trials:
        draw_trials(ranks, trials)
    elif len(heads):  # else every length was rejected
        heads.plot(ax=ranks, style="o-", ms=4, grid=True, title="needle score by rank of the head")
    ranks.set(
        xlabel=f"rank of the {'sample' if trials else 'head'}",
        ylabel="attention mass on the number",
    )
    titles = [f"{output.run_title(result)}, step {result['step']}" for result in results]
    figure.suptitle(
        "\n".join([*titles, f"RoPE scaling {output.format_rope(*results)}"]), fontsize=10
    )
    output.save_figure(figure, path)


def draw_trials(axes: Any, trials: dict[str, list[tuple[float, str]]]) -> None:
    """Figure 8: each run's needle scores of the best head in single samples, by rank, marked by
    outcome.
    """
    for i, (name, of_run) in enumerate(trials.items()):
        ranked = sorted(of_run, reverse=True)
        for outcome, marker in OUTCOMES.items():
            ranks = [rank for rank, (_, its) in enumerate(ranked) if its == outcome]
            scores = [ranked[rank][0] for rank in ranks]
            label = f"{name}: {outcome} ({len(ranks)})" if ranks else None
            axes.scatter(
                [rank + 1 for rank in ranks],
                scores,
                s=18,
                color=f"C{i}",
                marker=marker,
                label=label,
            )
    axes.set(title="needle score of the best head, by sample")
    axes.legend()
    axes.grid()


def ranked_heads(results: list[Result]) -> pandas.DataFrame:
    """Needle scores, means over depths, of the best heads: by length, of several runs at the
    longest one.
    """
    by_rank = {}
    for result, length in product(results, results[0]["lengths"]):
        cells = [
            cell for cell in result["cells"] if cell["length"] == length and cell["reason"] is None
        ]
        if cells:
            scores = np.mean([cell["needle_score"] for cell in cells], axis=0).flatten()
            # series align models of fewer heads
            best = pandas.Series(np.sort(scores)[::-1][:N_RANKED])
            by_rank[result["run"] if len(results) > 1 else length] = best
    heads = pandas.DataFrame(by_rank)
    return heads.set_axis(range(1, len(heads) + 1))


if __name__ == "__main__":
    run_main(main)
