"""What a text has to gain from context, by counting: the baseline to ask before any model is
trained.

    python -m lab.text_gain data/python_bytes --train-len 256
    python -m lab.text_gain data/packages_4k --train-len 128 --blocks 256
    python -m lab.text_gain data/python_4k --model runs/softmax --out runs/softmax_count

The targets are those of eval_length.py, the last L = `--train-len` tokens of each block of 16 L. A
prediction mixes three counts of what followed the same last tokens before: in the training split
(up to 3 tokens), in the last L tokens (up to 7), and in a window of 2L to 16L tokens (up to 7).
Shorter matches smooth longer ones (Witten and Bell 1991). The weights of the mixture depend on the
lengths of the matches. They are fitted by EM on half of the blocks and scored on the other half,
both ways. The window of L alone is the cut.

With --model a model's prediction takes the place of the training split's counts. It has its context
cut at L, as in eval_length.py, or with --sees window that script's window of each length w, whose
targets see w - L + 1 to w tokens (the counts w, or all that the block has before). That is a cache
of what came before (Grave et al. 2017, arXiv 1612.04426), added to a trained model. Only the
mixture's weights are fitted.

Prints the loss in the window of L and in each longer one, and the gain of each. --out writes the
rows, of the run NAME_count, into a folder's rows.csv.
"""

import argparse
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data.dataset import TokenStream
from eval_length import recomputed_losses
from evaluation import Blocks, GPTScorer, open_blocks, open_text, progress, text_of
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from lab.results import markdown, signed
from measure import Losses, estimate, write_rows
from model import GPT
from training.checkpoint import Trained, load_model

TRAINING_ORDER = 4  # tokens of the longest n-gram counted in the training split
WINDOW_ORDER = 8
EM_STEPS = 40
FACTORS = (1, 2, 4, 8, 16)  # of L: the lengths


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "data", type=Path, help="a prepared dataset, whose training split is counted"
    )
    parser.add_argument("--text", type=Path, metavar="DATA", help="score held-out text of this one")
    parser.add_argument("--split", choices=("val", "test"), default="val", help="(default: val)")
    train_len_help = "(default: the model's training length, else 256)"
    parser.add_argument("--train-len", type=positive_int, metavar="L", help=train_len_help)
    parser.add_argument(
        "--blocks", type=positive_int, default=32, metavar="N", help="(default: 32)"
    )
    parser.add_argument(
        "--counted",
        type=positive_int,
        default=4_000_000,
        metavar="N",
        help="training tokens (default: 4M)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="RUN", help="in place of the counts of training tokens"
    )
    parser.add_argument(
        "--sees", choices=("cut", "window"), default="cut", help="the model (default: cut)"
    )
    parser.add_argument("--out", type=output_folder, metavar="FOLDER", help="write rows.csv there")
    args = parser.parse_args()
    if args.blocks < 2:
        parser.error(f"--blocks {args.blocks}: expected at least 2")
    if args.sees == "window" and not args.model:
        parser.error("--sees window: only read with --model")
    return args


def output_folder(text: str) -> Path:
    """An argparse type: a folder that can be written, or made. Checked before the work."""
    folder = Path(text)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return folder
    raise argparse.ArgumentTypeError(f"{text}: expected a folder that can be written")


class Match(NamedTuple):
    length: int  # of the longest context found in the window; -1: the window is empty
    probability: float  # of the target, smoothed


class Target(NamedTuple):
    # its probability by what was learned from the training split, by width
    trained: dict[int, float]
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
    """Witten and Bell's estimate: the weight of the shorter context's is its number of distinct
    followers.
    """
    return (count + distinct * shorter) / (total + distinct)


# tokens, widths: (L,) each
Learned = Callable[[Sequence[int], list[int]], dict[int, np.ndarray]]


def by_counts(
    counts: TrainingCounts, tokens: Sequence[int], widths: list[int]
) -> dict[int, np.ndarray]:
    """The targets' probabilities by the counts of the training split, which know no window."""
    targets = range(len(tokens) - widths[0], len(tokens))
    learned = [
        counts.probability(tokens[max(0, i - TRAINING_ORDER) : i], tokens[i]) for i in targets
    ]
    return dict.fromkeys(widths, np.array(learned))


@torch.no_grad()
def by_model(
    model: GPT, sees: str, tokens: Sequence[int], widths: list[int]
) -> dict[int, np.ndarray]:
    """The targets' probabilities by a model that keeps a window of L, or beyond L sees all of it."""
    train_len = widths[0]
    text = torch.tensor(tokens)
    scorer = GPTScorer(model)
    probabilities = {}
    for width in widths:
        if width == train_len:
            losses = recomputed_losses(scorer, text, train_len, train_len)
        elif sees == "window":
            losses = scorer.losses(text[None, -width - 1 :], train_len)[0]
        probabilities[width] = losses.double().neg().exp().numpy()
    return probabilities


def read_block(
    tokens: Sequence[int], learned: dict[int, np.ndarray], vocab_size: int
) -> Iterator[Target]:
    """The targets of one block (16 L + 1 tokens): its last L tokens, with their learned
    probabilities.
    """
    first = len(tokens) - min(learned)
    places: list[defaultdict[tuple[int, ...], list[int]]] = [
        defaultdict(list) for _ in range(WINDOW_ORDER)
    ]
    for i in range(1, len(tokens)):
        if i >= first:
            found = [place.get(tuple(tokens[i - n : i]), []) for n, place in enumerate(places)]
            matches = {width: match(tokens, i, width, found, vocab_size) for width in learned}
            yield Target(
                {width: of_width[i - first] for width, of_width in learned.items()}, matches
            )
        for order in range(min(WINDOW_ORDER, i + 1)):
            places[order][tuple(tokens[i - order : i])].append(i)


def match(
    tokens: Sequence[int], i: int, width: int, found: list[list[int]], vocab_size: int
) -> Match:
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
    probabilities = [target.trained[widths[-1]], *(match.probability for match in matches)]
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
    return np.array(
        [-math.log(weights.get(bucket, even) @ probabilities) for bucket, probabilities in mixed]
    )


def cross_fit(blocks: list[list[Target]], widths: Sequence[int]) -> np.ndarray:
    """The mean loss of each block (n_blocks,), its weights fitted on the blocks of the other
    parity.
    """
    losses = np.empty(len(blocks))
    for parity in (0, 1):
        fitted = [target for block in blocks[1 - parity :: 2] for target in block]
        scored = [target for block in blocks[parity::2] for target in block]
        losses[parity::2] = (
            fit_and_score(fitted, scored, widths).reshape(len(blocks[parity::2]), -1).mean(1)
        )
    return losses


def open_scored(args: argparse.Namespace, trained: Trained | None) -> tuple[Blocks, int]:
    """The blocks to score, and L. Raises UserError: the text is short, or its tokens are not the model's."""
    folder = args.text or args.data
    if trained is None:
        stream = TokenStream(folder, args.split)
        train_len = args.train_len or 256
    else:
        stream = open_text(trained.config, folder, trained.tokenizer_name, args.split)
        train_len = args.train_len or trained.config.train.seq_len
    longest = FACTORS[-1] * train_len
    blocks = open_blocks(stream, longest, args.blocks * longest)
    if len(blocks) < 2:
        expected = f"expected at least two blocks of {longest}"
        raise UserError(f"{stream.folder}: {stream.n_tokens} tokens: {expected} (--train-len)")
    if len(blocks) < args.blocks:
        raise UserError(f"--blocks {args.blocks}: expected 2 to {len(blocks)}, {stream.folder}'s")
    return blocks, train_len


def main() -> None:
    args = parse_args()
    trained = load_model(args.model) if args.model else None
    blocks, train_len = open_scored(args, trained)
    stream = blocks.stream
    widths = [factor * train_len for factor in FACTORS]
    longest = widths[-1]
    if trained is not None:
        learned: Learned = partial(by_model, trained.model, args.sees)
        saw = "_whole" if args.sees == "window" else ""
        run, step = f"{trained.config.name}{saw}_count", trained.step
    else:
        train = TokenStream(args.data, "train")
        if train.info["tokenizer"] != stream.info["tokenizer"]:
            raise UserError(
                f"--text {args.text}: tokens of another tokenizer: expected {args.data}'s"
            )
        tokens = train.read(0, min(args.counted, train.n_tokens)).tolist()
        learned = partial(by_counts, TrainingCounts(tokens, stream.vocab_size))
        run, step = "count", 0
    targets = []
    for start in progress(blocks.starts, "blocks"):
        tokens = stream.read(start, longest + 1).tolist()
        probabilities = learned(tokens, widths)
        targets.append(list(read_block(tokens, probabilities, stream.vocab_size)))
    losses = {
        width: cross_fit(targets, sorted({train_len, width})) for width in progress(widths, "fits")
    }
    print(markdown(gain_table(losses, blocks.documents), n_left=0))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_rows(args.out, rows_of(losses, blocks.documents, (run, step, text_of(stream))))


def gain_table(losses: dict[int, np.ndarray], documents: Sequence[int]) -> list[list[str]]:
    """By length of context the loss and its gain over the shortest, paired over blocks."""
    shortest = losses[min(losses)]
    blocks = tuple(enumerate(documents))
    lines = [["context", "loss", "gain"]]
    for length, each in losses.items():
        gain = estimate(Losses((shortest - each)[None], blocks))
        lines.append([f"{length:,}", f"{each.mean():.3f}", signed(gain)])
    return lines


def rows_of(
    losses: dict[int, np.ndarray], documents: Sequence[int], key: tuple[str, int, str]
) -> Iterator[tuple[Any, ...]]:
    """Those of measure.py. The shortest context is a window of L over the longest."""
    shortest, longest = min(losses), max(losses)
    for length, each in losses.items():
        is_window = length == shortest
        where = (longest, f"{shortest} recomputed") if is_window else (length, 0)
        for block, loss in enumerate(each.tolist()):
            yield (*key, "same_targets", *where, "none", block, documents[block], loss)


if __name__ == "__main__":
    run_main(main)
