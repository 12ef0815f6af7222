"""What a text has to gain from context, by counting: the baseline to ask before any model is trained.

    python -m lab.text_gain data/python_bytes --train-len 256
    python -m lab.text_gain data/python_4k --train-len 128 --blocks 48

The targets are those of eval_length.py, the last `--train-len` tokens of each block of 16 times as many. A
prediction mixes three counts of what followed the same last tokens before: in the training split (up to 3
tokens), in the last L tokens (up to 7), and in a window of 2L to 16L tokens (up to 7). Shorter matches smooth
longer ones (Witten and Bell 1991). The weights of the mixture depend on the lengths of the matches. They are
fitted by EM on half of the blocks and scored on the other half, both ways. The window of L alone is the cut.

Prints the loss in nats a token at each length and the gain over the cut, ± the standard error paired over
blocks. A transformer may gain more or less: this says only that there is something to gain.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.dataset import TokenStream
from evals.rows import FACTORS
from infra.cli import ArgumentParser, UserError, positive_int, run_main

TRAINING_ORDER = 4  # tokens of the longest n-gram counted in the training split
WINDOW_ORDER = 8
EM_STEPS = 40


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("data", type=Path, help="a prepared dataset")
    parser.add_argument("--train-len", type=positive_int, default=256, metavar="L", help="(default: 256)")
    parser.add_argument("--blocks", type=positive_int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument(
        "--counted", type=positive_int, default=4_000_000, metavar="N", help="training tokens (default: 4M)"
    )
    return parser.parse_args()


class Match(NamedTuple):
    length: int  # of the longest context found in the window; -1: the window is empty
    probability: float  # of the target, smoothed


class Target(NamedTuple):
    trained: float  # its probability by the counts of the training split
    matches: dict[int, Match]  # by width of the window


class TrainingCounts:
    """What follows each context of at most TRAINING_ORDER - 1 tokens in the training split."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.followers: list[defaultdict[tuple[int, ...], Counter[int]]] = []
        for order in range(TRAINING_ORDER):
            followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
            for i in range(order, len(tokens)):
                followers[tuple(tokens[i - order : i])][tokens[i]] += 1
            self.followers.append(followers)

    def probability(self, context: Sequence[int], target: int) -> float:
        probability = 1 / self.vocab_size
        for order, followers in enumerate(self.followers):
            counts = followers.get(tuple(context[len(context) - order :]))
            if counts is None:
                break
            probability = smoothed(counts[target], counts.total(), len(counts), probability)
        return probability


def smoothed(count: int, total: int, distinct: int, shorter: float) -> float:
    """Witten and Bell's estimate: the weight of the shorter context's is its number of distinct followers."""
    return (count + distinct * shorter) / (total + distinct)


def read_block(tokens: Sequence[int], counts: TrainingCounts, train_len: int) -> Iterator[Target]:
    """The targets of one block (16 L + 1 tokens): its last L tokens."""
    first = len(tokens) - train_len
    places: list[defaultdict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in range(WINDOW_ORDER)]
    for i in range(1, len(tokens)):
        if i >= first:
            context = tokens[max(0, i - TRAINING_ORDER) : i]
            found = [place.get(tuple(tokens[i - n : i]), []) for n, place in enumerate(places)]
            matches = {
                factor * train_len: match(tokens, i, factor * train_len, found, counts.vocab_size)
                for factor in FACTORS
            }
            yield Target(counts.probability(context, tokens[i]), matches)
        for order in range(min(WINDOW_ORDER, i + 1)):
            places[order][tuple(tokens[i - order : i])].append(i)


def match(tokens: Sequence[int], i: int, width: int, found: list[list[int]], vocab_size: int) -> Match:
    """The prediction of token i from the `width` tokens before it.

    Args:
        found: for each length of a context, the positions that followed the same tokens before.
    """
    probability = 1 / vocab_size
    longest = -1
    for order, positions in enumerate(found):
        followers = [tokens[j] for j in positions if j - order >= i - width]
        if not followers:
            break
        count = followers.count(tokens[i])
        probability = smoothed(count, len(followers), len(set(followers)), probability)
        longest = order
    return Match(longest, probability)


def components(target: Target, widths: Sequence[int]) -> tuple[tuple[int, ...], np.ndarray]:
    """The bucket of the mixture's weights, and the probabilities that they mix."""
    matches = [target.matches[width] for width in widths]
    probabilities = [target.trained, *(match.probability for match in matches)]
    return tuple(match.length for match in matches), np.array(probabilities)


def fit_and_score(fitted: list[Target], scored: list[Target], widths: Sequence[int]) -> np.ndarray:
    """The losses (n,) of `scored` with the mixture's weights fitted by EM on `fitted`."""
    even = np.full(1 + len(widths), 1 / (1 + len(widths)))
    weights: dict[tuple[int, ...], np.ndarray] = {}
    for _ in range(EM_STEPS):
        # A bucket begins with one target's worth of even weights.
        shares: defaultdict[tuple[int, ...], np.ndarray] = defaultdict(even.copy)
        for bucket, probabilities in (components(target, widths) for target in fitted):
            share = weights.get(bucket, even) * probabilities
            shares[bucket] += share / share.sum()
        weights = {bucket: share / share.sum() for bucket, share in shares.items()}
    mixed = (components(target, widths) for target in scored)
    return np.array([-math.log(weights.get(bucket, even) @ probabilities) for bucket, probabilities in mixed])


def cross_fit(blocks: list[list[Target]], widths: Sequence[int]) -> np.ndarray:
    """The mean loss of each block (n_blocks,), its weights fitted on the blocks of the other parity."""
    losses = np.empty(len(blocks))
    for parity in (0, 1):
        fitted = [target for block in blocks[1 - parity :: 2] for target in block]
        scored = [target for block in blocks[parity::2] for target in block]
        losses[parity::2] = fit_and_score(fitted, scored, widths).reshape(len(blocks[parity::2]), -1).mean(1)
    return losses


def print_table(blocks: list[list[Target]], train_len: int) -> None:
    cut = cross_fit(blocks, [train_len])
    print(f"{'length':>8} {'loss':>7} {'gain over the cut':>18}")
    print(f"{train_len:8,} {cut.mean():7.3f}")
    for factor in FACTORS[1:]:
        long = cross_fit(blocks, [train_len, factor * train_len])
        gain = cut - long
        error = gain.std(ddof=1) / math.sqrt(len(gain))
        print(f"{factor * train_len:8,} {long.mean():7.3f} {gain.mean():+10.3f} ±{error:.3f}")


def main() -> None:
    args = parse_args()
    train = TokenStream(args.data, "train")
    val = TokenStream(args.data, "val")
    length = FACTORS[-1] * args.train_len
    needed = args.blocks * length + 1
    if args.blocks < 2 or val.n_tokens < needed:
        raise UserError(
            f"--blocks {args.blocks}: expected 2 to {(val.n_tokens - 1) // length}, {val.folder}'s"
        )
    counts = TrainingCounts(train.read(0, min(args.counted, train.n_tokens)).tolist(), train.vocab_size)
    blocks = []
    for number in tqdm(range(args.blocks), unit="block", disable=None):
        tokens = val.read(number * length, length + 1).tolist()
        blocks.append(list(read_block(tokens, counts, args.train_len)))
    print_table(blocks, args.train_len)


if __name__ == "__main__":
    run_main(main)
