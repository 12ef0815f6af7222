"""Prepare the needle's own task for fine-tuning: texts with a number in them, and the question for
it.

    python -m lab.needle_data data/fineweb10B                                  # -> data/needle
    python -m lab.needle_data data/python_4k --seq-len 128 --sequences 12800

A sequence is a sample of `python -m lab.needle` with its answer, in the dataset's own text, the
needle anywhere in it. An end-of-text and zeros fill --seq-len tokens, which train.seq_len must
equal. A loss mask, as lab/squad.py's, marks the number and the end-of-text. Numbers are drawn anew,
cities are those of the test.

It is for models too small to learn to answer from SQuAD. Train on it with --init-from RUN and
--data.dir.
"""

import argparse
from pathlib import Path

from data.dataset import TokenStream, made_before
from evaluation import progress
from infra.cli import ArgumentParser, integer, positive_int, run_main
from infra.files import exclusive_lock
from lab.needle import Haystack, make_trial
from lab.squad import Sequence, answered, write_masked

DATASET = "needle"
FIRST = {"train": 2**40, "val": 2**41}  # sample numbers that the test does not reach
N_VAL = 512  # sequences


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("dataset", metavar="DIR", help="dataset folder whose text the needles are in")
    n_help = "to train on (default: %(default)s)"
    add("--sequences", type=positive_int, default=2**14, metavar="N", help=n_help)
    length_help = "of every sequence (default: %(default)s)"
    add("--seq-len", type=integer(2, 2**20), default=1024, metavar="T", help=length_help)
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("data") / DATASET,
        help="(default: data/needle)",
    )
    return parser.parse_args()


def make_sequence(haystack: Haystack, length: int, index: int) -> Sequence:
    """Sample `index` of the needle test at a depth of 1 to 100 per cent, with its answer.

    Raises UserError: the length has no room for needle and question.
    """
    depth = 1 + index % 100
    trial = make_trial(haystack, length, depth, index)
    return answered(trial.prompt, [*trial.choices[0], haystack.tokenizer.eot_token], length)


def main() -> None:
    args = parse_args()
    sizes = {"val": N_VAL, "train": args.sequences}
    streams = {split: TokenStream(args.dataset, split) for split in sizes}
    settings = {"dataset": args.dataset, "sequences": args.sequences, "seq_len": args.seq_len}
    settings["text"] = [stream.fingerprint for stream in streams.values()]
    if made_before(args.out, DATASET, settings):
        return
    splits: dict[str, list[Sequence]] = {}
    for split, stream in streams.items():
        haystack = Haystack(stream, stream.tokenizer)
        indices = range(FIRST[split], FIRST[split] + sizes[split])
        splits[split] = [
            make_sequence(haystack, args.seq_len, i)
            for i in progress(indices, f"{split} sequences")
        ]
    info = {
        "dataset": DATASET,
        "source": f"lab/needle_data.py, {args.dataset}",
        "settings": settings,
    }
    with exclusive_lock(args.out):
        write_masked(args.out, info, splits, 2, haystack.tokenizer)


if __name__ == "__main__":
    run_main(main)
