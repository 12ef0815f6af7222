"""Batches: pure functions of (stream, step, seed).

There is no loader state to save, and any number of processes reads the same global batch, each its
own rows.
"""

from functools import lru_cache
from typing import Literal

import numpy as np

from data.dataset import IGNORED, TokenStream
from infra.cli import UserError


def train_batch(
    stream: TokenStream,
    step: int,
    n_seq: int,
    seq_len: int,
    order: Literal["sequential", "shuffled"],
    seed: int,
    first: int = 0,
    count: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [first, first + count) of the `n_seq` sequences of a step: a pure function of the
    arguments.

    Sequence i of step s, from 0, is window w = s * n_seq + i of seq_len = T tokens.
    sequential: it starts at token w * T of the endless stream, so nothing is dropped at its end.
    shuffled: an epoch is the n_tokens // T whole windows of the stream, in a permutation that the
    seed fixes. first, count: the slice of one process; count None: all that follow.

    Returns x, y, both (count, T) int64; y is x one token later in the stream, -100 where the mask
    is 0.
    Raises UserError: the stream is too short for one window.
    """
    count = n_seq - first if count is None else count
    assert step >= 0 and 0 <= first < first + count <= n_seq, (step, first, count, n_seq)
    _check_length(stream, seq_len)
    place = step * n_seq + first
    if order == "sequential":
        return read_windows(stream, place, count, seq_len)
    n_windows = stream.n_tokens // seq_len
    places = [divmod(place + row, n_windows) for row in range(count)]
    windows = [int(_permutation(n_windows, seed, epoch)[i]) for epoch, i in places]
    x, y = zip(*(read_windows(stream, window, 1, seq_len) for window in windows), strict=True)
    return np.concatenate(x), np.concatenate(y)


def val_windows(stream: TokenStream, n_tokens: int, seq_len: int) -> int:
    """How many windows of `seq_len` predictions fit the first `n_tokens` predictions of the stream.

    Fewer if the stream is shorter: its first token is not predicted. An `n_tokens` that several
    lengths divide scores the same tokens at each. Raises UserError: the stream is too short for one
    window.
    """
    _check_length(stream, seq_len)
    return min(n_tokens, stream.n_tokens - 1) // seq_len


def _check_length(stream: TokenStream, seq_len: int) -> None:
    if stream.n_tokens < seq_len + 1:
        expected = f"expected at least {seq_len + 1} for one window of length {seq_len}"
        raise UserError(
            f"{stream.folder}: the {stream.split} split has {stream.n_tokens} tokens: {expected}"
        )


def read_windows(
    stream: TokenStream, first: int, count: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Windows [first, first + count) of the endless stream, one after the other: x, y as of
    `train_batch`.

    The tokens, in order, are the same for every T. `val_windows` says how many are for validation.
    """
    x, y = read_targets(stream, first * seq_len, count * seq_len)
    return x.reshape(-1, seq_len), y.reshape(-1, seq_len)  # (count * T,) -> (count, T)


def read_targets(stream: TokenStream, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` tokens from token `start` of the endless stream, and what each is to predict.

    Returns x, y, both (count,) int64; y is x one token later, -100 where the mask is 0.
    """
    tokens = stream.read(start, count + 1)
    x = tokens[:-1]
    y = tokens[1:].copy()  # else x and y would share memory
    if stream.mask is not None:
        y[stream.mask.read(start + 1, count) == 0] = IGNORED
    return x, y


def document_blocks(stream: TokenStream, length: int) -> list[tuple[int, int]]:
    """One block a document, at its end: (start, number of the document) for `read_targets`.

    A block is of `length` targets, the last `length` tokens of its document; a shorter document,
    `<|endoftext|>` before it not counted, has none. Documents are counted from 0 in the order of
    the stream. Tokens before the first `<|endoftext|>` are no document.
    """
    starts = stream.document_starts()
    ends = np.append(starts[1:], stream.n_tokens)
    has_block = ends - starts > length
    # the last target is the token before `end`, so the first input is `length` before that
    return [(int(ends[i]) - 1 - length, int(i)) for i in np.flatnonzero(has_block)]


@lru_cache(maxsize=1)  # 40 MB and 0.4 s for the 10^7 windows of 10^10 tokens at T = 1024
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n), (n,) uint32, that (seed, epoch) fixes.

    By RandomState, whose numbers numpy has frozen. Generator's may change with numpy's version, and
    with them the data of a resumed run.
    """
    # The seed last: it may fill two 32-bit words, and then (seed, epoch) would be ambiguous.
    bits = np.random.MT19937(np.random.SeedSequence([epoch, seed]))
    permutation = np.arange(n, dtype=np.uint32)
    np.random.RandomState(bits).shuffle(permutation)
    return permutation
