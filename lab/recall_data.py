"""Prepare synthetic recall: tasks whose answers need exact retrieval, or order, at any length.

    python -m lab.recall_data                                     # all tasks mixed -> data/recall
    python -m lab.recall_data --tasks copy --sequences 20000 --out data/copy

A sequence fills one window of --seq-len tokens, which train.seq_len must equal, so windows and
sequences coincide in either data.order. It opens with end-of-text and the task's letter. A loss
mask, as lab/squad.py's, marks the answers, which alone are learned. Shown with four of the eight
items, answers in brackets:

    mqar       M;~Kd*Ga:!Pm&?Be,=G[a]K[d]B[e]P[m]   the value of each key, keys in another order
                                                    (multi-query associative recall, Arora et al.
                                                    2023)
    copy       C*;<hbnk>,:-&=[hbnk]                 the list, in order
    reverse    R*;<hbnk>,:-&=[knbh]                 backwards
    sort       S*;<hbnk>,:-&=[bhkn]                 in the alphabet's order
    flipflop   Fw1i0i1r[1]i0w0i1r[0]                the last bit written; i: ignore (Liu et al. 2023)

A longer sequence has as much to recall among more noise (flipflop: ignored bits), at random places.
So errors are of retrieval among more keys at larger distances, not of an algorithm on longer lists.
Tokens are the bytes of ASCII text.

The best guess of an answer token, given those before it but nothing found, is right in 1/16 of
mqar, 0.08 of copy and reverse (0.34 within the right list: letters do not repeat), 1/2 of sort (the
alphabet's next letter) and 1/2 of flipflop: 0.25 in the mean of all tasks.

Writes recall_val_000000.bin, recall_train_000001.bin, the masks, and dataset.json (format:
data/shards.py). Train a variant on it, `configs/lssa.toml --base
configs/scales/recall.toml`, evaluate with `python -m lab.recall`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from data.dataset import made_before
from data.tokenizer import TOKENIZERS
from evaluation import progress
from infra.cli import ArgumentParser, UserError, integer, positive_int, run_main
from infra.files import exclusive_lock
from lab.squad import Sequence, write_masked

DATASET = "recall"
VOCAB = TOKENIZERS["bytes"]  # the last is end-of-text
NOISE = ".,:;!?-+*/&%$#@~"
LETTERS = "abcdefghijklmnop"
KEYS = "ABDEGHIJKLNOPQTU"  # of mqar; no task's letter
N_ITEMS = 8  # of a list; pairs of mqar
N_EVENTS = 4  # writes, and reads, of flipflop
N_VAL = 2048  # sequences
MIN_LENGTH = 40

Task = Callable[[Random, int], tuple[str, range | list[int]]]


# ---------------------------------------------------------------- tasks: n characters, and where
# answers are
def mqar(rng: Random, n: int) -> tuple[str, range]:
    keys = rng.sample(KEYS, N_ITEMS)
    values = rng.choices(LETTERS, k=N_ITEMS)
    pairs = [key + value for key, value in zip(keys, values, strict=True)]
    queries = "".join(rng.sample(pairs, N_ITEMS))
    return f"{bury(rng, pairs, n - 1 - len(queries))}={queries}", range(n - len(queries) + 1, n, 2)


def list_task(answer: Callable[[list[str]], list[str]]) -> Task:
    """A list between < and >, then its `answer`."""

    def make(rng: Random, n: int) -> tuple[str, range]:
        items = rng.sample(LETTERS, N_ITEMS)
        text = bury(rng, [f"<{''.join(items)}>"], n - 1 - N_ITEMS)
        return f"{text}={''.join(answer(items))}", range(n - N_ITEMS, n)

    return make


def flipflop(rng: Random, n: int) -> tuple[str, list[int]]:
    """The first instruction writes, the last one reads (Liu et al. 2023, Section 3)."""
    last = n // 2 - 1
    places = rng.sample(range(1, last), 2 * (N_EVENTS - 1))
    writes = {0, *places[1::2]}
    reads = {last, *places[::2]}
    bits = rng.choices("01", k=last + 1)
    stored = "0"
    for i in sorted(writes | reads):
        stored = bits[i] if i in writes else stored
        bits[i] = stored
    text = "".join(
        ("w" if i in writes else "r" if i in reads else "i") + bit for i, bit in enumerate(bits)
    )
    return text, [2 * i + 1 for i in sorted(reads)]


def bury(rng: Random, contents: list[str], n: int) -> str:
    """The contents at random places of noise, n characters in all."""
    units = rng.choices(NOISE, k=n - sum(map(len, contents)) + len(contents))
    for place, content in zip(rng.sample(range(len(units)), len(contents)), contents, strict=True):
        units[place] = content
    return "".join(units)


TASKS: dict[str, Task] = {
    "mqar": mqar,
    "copy": list_task(lambda items: items),
    "reverse": list_task(lambda items: items[::-1]),
    "sort": list_task(sorted),
    "flipflop": flipflop,
}


def make_sequence(task: str, length: int, seed: str) -> Sequence:
    """A sequence whose mask is 1 for each token of the answer, fixed by the arguments.

    Raises:
        UserError: an odd length, or one below MIN_LENGTH.
    """
    if length < MIN_LENGTH or length % 2:
        raise UserError(
            f"a sequence of {length} tokens: expected an even number of at least {MIN_LENGTH}"
        )
    text, answers = TASKS[task](Random(f"{seed} {task} {length}"), length - 2)
    opening = [VOCAB - 1, ord(task[0].upper())]
    tokens = np.array(opening + list(text.encode("ascii")), np.uint16)
    mask = np.zeros(length, np.uint16)
    mask[2:][answers] = 1
    return Sequence(tokens, mask)


# ---------------------------------------------------------------- writing
def main() -> None:
    args = parse_args()
    settings = {"tasks": args.tasks, "sequences": args.sequences, "seq_len": args.seq_len}
    if made_before(args.out, DATASET, settings):
        return
    sizes = {"val": N_VAL, "train": args.sequences}
    splits: dict[str, list[Sequence]] = {}
    for split, n in sizes.items():
        tasks = [args.tasks[i % len(args.tasks)] for i in range(n)]  # in turn
        splits[split] = [
            make_sequence(tasks[i], args.seq_len, f"0 {split} {i}")
            for i in progress(range(n), f"{split} sequences")
        ]
    info = {"dataset": DATASET, "tokenizer": "bytes", "vocab_size": VOCAB, "tasks": args.tasks}
    info |= {"source": "lab/recall_data.py, seed 0", "settings": settings}
    with exclusive_lock(args.out):
        write_masked(args.out, info, splits)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="TASK",
        help="(default: all)",
    )
    n_help = "to train on (default: %(default)s)"
    add("--sequences", type=positive_int, default=2**17, metavar="N", help=n_help)
    length_help = "of every sequence (default: %(default)s)"
    add("--seq-len", type=integer(2, 2**20), default=64, metavar="T", help=length_help)
    default = Path("data") / DATASET
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=default,
        help="folder to write (default: data/recall)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
