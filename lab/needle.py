"""Needle in a haystack: does a model still find a number in a long context (SSMax, Section 3.3)?

    python -m lab.needle runs/ssmax --lengths 1000 2000 5000 10000 --rope theta=500000
    python -m lab.needle runs/softmax runs/ssmax runs/lssar --samples 100
    python -m lab.needle runs/sft --data data/fineweb10B                # fine-tuned: no text of its own

A piece of the held-out text contains, at 10, 30, 50, 70 or 90 % of it, "The special magic {city}
number is: {seven digits}.". The question and the beginning of its answer, which is the needle's
sentence up to the number, follow. With --question-only the prompt ends with "Answer:", for models
that were tuned to answer so. Lengths include all of it. Reported with 95 % intervals (Wilson 1927):

    number         share of samples whose greedy answer is the whole number
    first_digit    share whose answer begins with the right digit
    choice         share in which the number is likelier than nine others of the same distribution: chance is
                   10 %, and a model needs no fine-tuning to beat it
    needle_score   attention mass from behind the needle's colon to its end in the row that predicts the
                   first digit, for each layer and head (Section 3.4), heads ranked (Figure 7)

Sample i has the same text, city and number at every depth of a length and for every run of the same
tokeniser. The paper multiplies RoPE's base by 50. Its Figure 7 is of one example, ours of all
samples. The text, the cities and that the prompt begins the answer are ours, the paper does not
give them.

Writes rows.csv of the run folder: `number` and the others over all depths, `number[10%]` at one, and
`needle_score[1.0]` of layer 1, head 0. Draws shares by length (Figure 6) and the heads.
"""

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.dataset import TokenStream
from data.tokenizer import Tokenizer
from evaluation import (
    Run,
    open_runs,
    picture_path,
    score_all,
    text_of,
)
from infra.cli import ArgumentParser, UserError, integer, positive_int, run_main
from infra.distributed import World, join_world
from infra.figures import Figure
from lab.attention_statistics import attention_mass
from lab.options import parse_with_picture
from lab.squad import question_prompt
from measure import format_table, save_figure, write_rows
from model import GPT, KVCache
from positions import RopeScaling

CITIES = [
    *("Amsterdam", "Athens", "Bangkok", "Berlin", "Bogota", "Cairo", "Chicago", "Delhi", "Dublin"),
    *("Havana", "Helsinki", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid"),
    *("Manila", "Nairobi", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto"),
    *("Vienna", "Warsaw"),
]  # fmt: skip
MEASURES = ("number", "first_digit", "choice")
FACTORS = (1, 2, 4, 8)  # of the training length
RANDOM_DEPTH = 0
N_CHOICES = 10
ANSWER_TOKENS = 8  # room for seven digits
TOKENS_AT_ONCE = 65536  # of one batch
N_RANKED = 25  # heads in Figure 7
# by length and depth: (len(MEASURES) + n_layer * n_head,) means over the samples; None: rejected
Cells = dict[tuple[int, int], Tensor | None]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders or checkpoint files, first")
    lengths_help = (
        "of the whole sequence with the answer (default: 1, 2, 4, 8 x the training length)"
    )
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    depths_help = "of the text, 0: one at random for each sample (default: 10 30 50 70 90)"
    depths = [10, 30, 50, 70, 90]
    percent = integer(0, 100)
    add("--depths", nargs="+", type=percent, default=depths, metavar="PERCENT", help=depths_help)
    add("--question-only", action="store_true", help="ask without beginning the answer")
    samples_help = "of each length and depth (default: %(default)s)"
    add("--samples", type=positive_int, default=1000, metavar="N", help=samples_help)
    add("--data", type=Path, metavar="DIR", help="dataset (default: that of each run's config)")
    add("--split", choices=("val", "test"), help="(default: test, if the dataset has it)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    args = parse_with_picture(parser, "needle")
    args.depths = sorted({*args.depths})
    return args


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs = open_runs(args.runs, world)
        own = {factor * run.train_len for run in runs for factor in FACTORS}
        args.lengths = sorted({*(args.lengths or own)})
        streams = [run.text(args.data, args.split) for run in runs]
        haystacks = [Haystack(stream, stream.tokenizer) for stream in streams]
        ends = {args.lengths[0], args.lengths[-1]}
        for haystack, length, i in product(haystacks, ends, range(args.samples)):
            make_trial(haystack, length, 50, i, args.question_only)  # raises if it does not fit
        results = []
        for run, haystack in zip(runs, haystacks, strict=True):
            model, step = run.load(world)
            if not model.cacheable:
                raise UserError(
                    f"{run.source}: needs a KV cache, but its weights depend on all keys"
                )
            if model.end_of_text is not None:
                model.end_of_text.fill_(-1)  # a haystack is one document
            cells = measure_run(world, run, model, haystack, args)
            if world.is_main:
                asked = ", question only" if args.question_only else ""
                text = f"{text_of(haystack.stream)}, needle, {args.samples} samples{asked}"
                write_rows(run.folder, rows_of(run, step, text, args, cells))
            results.append(cells)
        if world.is_main:
            print(table(runs, results, args))
            draw(runs, results, args)


# ---------------------------------------------------------------- task
class Haystack(NamedTuple):
    """A long text as tokens, and their tokeniser."""

    stream: TokenStream
    tokenizer: Tokenizer


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


# ---------------------------------------------------------------- scores
def measure_run(
    world: World, run: Run, model: GPT, haystack: Haystack, args: argparse.Namespace
) -> Cells:
    cells: Cells = {}
    for length, depth in product(args.lengths, args.depths):
        (scaling,) = run.scalings([args.scaling])
        rope = RopeScaling(scaling.name, length)
        scores = score(world, run.title, model, haystack, length, depth, args, rope)
        if isinstance(scores, str):
            if world.is_main:
                print(f"{run.title} at {length}, {depth} %: no result: {scores}")
            cells[length, depth] = None
        else:
            cells[length, depth] = scores.mean(0)
    return cells


def score(
    world: World, title: str, model: GPT, haystack: Haystack, length: int, depth: int,
    args: argparse.Namespace, rope: RopeScaling,
) -> Tensor | str:  # fmt: skip
    """The `run_trials` of all samples, (N, n), or why there are none."""

    def outcomes(items: Sequence[int]) -> Tensor:
        trials = [make_trial(haystack, length, depth, i, args.question_only) for i in items]
        with model.autocast():
            return run_trials(model, trials, rope, haystack.tokenizer)

    batch = max(1, TOKENS_AT_ONCE // length)
    label = f"{title}, {length} tokens, depth {depth}"
    return score_all(world, label, args.samples, outcomes, batch)


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


# ---------------------------------------------------------------- rows, table, picture
def over_depths(cells: Cells, length: int) -> Tensor | None:
    """The mean of a length's cells, None where one was rejected."""
    of_length = [each for (n, _), each in cells.items() if n == length]
    known = [each for each in of_length if each is not None]
    return torch.stack(known).mean(0) if len(known) == len(of_length) else None


def rows_of(
    run: Run, step: int, text: str, args: argparse.Namespace, cells: Cells
) -> Iterator[tuple[Any, ...]]:
    (scaling,) = run.scalings([args.scaling])
    for length in args.lengths:
        mean = over_depths(cells, length)
        where = (length, 0, scaling.name, None, None)
        for i, name in enumerate(MEASURES):
            yield (run.name, step, text, name, *where, math.nan if mean is None else mean[i].item())
            for depth in args.depths:
                each = cells[length, depth]
                value = math.nan if each is None else each[i].item()
                yield (run.name, step, text, f"{name}[{depth}%]", *where, value)
        heads = [] if mean is None else mean[len(MEASURES) :].tolist()
        for i, value in enumerate(heads):
            layer, head = divmod(i, run.config.model.n_head)
            yield (run.name, step, text, f"needle_score[{layer}.{head}]", *where, value)


def format_share(share: float, n: int) -> str:
    """'62.5 [54.0, 70.2]' per cent of n trials, with the 95 % interval of Wilson 1927, which is not
    empty at 0 and 1 either. A dash for NaN.
    """
    if math.isnan(share):
        return "-"
    z2 = 1.959964**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = 1 / (1 + z2 / n) * math.sqrt(z2 * share * (1 - share) / n + z2 * z2 / (4 * n * n))
    low = max(0.0, centre - half)
    high = min(1.0, centre + half)
    return f"{100 * share:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def table(runs: Sequence[Run], results: Sequence[Cells], args: argparse.Namespace) -> str:
    """Measures, runs and depths down, lengths across."""
    lines = [["measure", "run", "depth", *map(str, args.lengths)]]
    for i, name in enumerate(MEASURES):
        for (run, cells), depth in product(zip(runs, results, strict=True), args.depths):
            row = [cells[length, depth] for length in args.lengths]
            shares = [math.nan if each is None else each[i].item() for each in row]
            place = f"{depth} %" if depth != RANDOM_DEPTH else "any"
            lines.append([name, run.name, place, *(format_share(s, args.samples) for s in shares)])
    return f"Per cent of {args.samples} samples a cell.\n\n{format_table(lines, n_names=3)}"


def draw(runs: Sequence[Run], results: Sequence[Cells], args: argparse.Namespace) -> None:
    """Shares by length and depth or, of several runs, by run (SSMax, Figure 6); Figure 7."""
    figure = Figure(figsize=(19, 5), layout="constrained")
    *maps, ranks = figure.subplots(1, len(MEASURES) + 1)
    names = [f"{depth} %" for depth in args.depths] if len(runs) == 1 else [r.title for r in runs]
    for i, (axes, measure) in enumerate(zip(maps, MEASURES, strict=True)):
        shares = np.full((len(names), len(args.lengths)), math.nan)
        for row, column in np.ndindex(*shares.shape):
            length = args.lengths[column]
            cells = results[0] if len(runs) == 1 else results[row]
            each = cells[length, args.depths[row]] if len(runs) == 1 else over_depths(cells, length)
            if each is not None:
                shares[row, column] = each[i].item()
                colour = "w" if each[i] < 0.5 else "k"
                axes.text(column, row, f"{each[i]:.0%}", ha="center", color=colour)
        axes.imshow(shares, vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(args.lengths)), args.lengths)
        axes.set_yticks(range(len(names)), names)
        axes.set(title=f"{measure}: share of samples", xlabel="length (tokens)")
    for run, cells in zip(runs, results, strict=True):
        known = [each for each in (over_depths(cells, n) for n in args.lengths) if each is not None]
        if known:  # of the longest length
            heads = known[-1][len(MEASURES) :].sort(descending=True).values[:N_RANKED]
            ranks.plot(range(1, len(heads) + 1), heads, "o-", markersize=4, label=run.title)
    ranks.set(
        title="needle score", xlabel="rank of the head", ylabel="attention mass on the number"
    )
    ranks.legend()
    save_figure(figure, args.out or picture_path(runs, "needle"))


if __name__ == "__main__":
    run_main(main)
