"""Prepare short documents, on which data.documents decides: files of Python cut at their definitions.

    python -m lab.definitions data/packages_4k              # -> data/definitions_4k

Each function, each method, and what stands before them is a document of its own. They are in an
order that is drawn once, so that the document before is of another file, as pages of the web are.
Splits and tokeniser are the dataset's.
"""

import argparse
import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from data.dataset import TokenStream, made_before, print_summary, write_dataset
from data.tokenizer import encode
from infra.cli import ArgumentParser, run_main
from infra.files import exclusive_lock

DATASET = "definitions"
T = 256  # configs/track.toml's
START = re.compile(r"^(?= {0,4}(?:@|def |class |async def ))", re.MULTILINE)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("dataset", metavar="DIR", help="dataset folder whose documents are files of Python")
    default = Path("data/definitions_4k")
    add("--out", type=Path, metavar="DIR", default=default, help="(default: %(default)s)")
    return parser.parse_args()


def definitions(text: str) -> list[str]:
    """The file in parts, each from its first decorator, def or class to the next one's."""
    parts: list[str] = []
    for part in START.split(text):
        if parts and parts[-1].lstrip(" ").startswith("@") and parts[-1].count("\n") == 1:
            parts[-1] += part  # what a decorator of one line decorates
        elif part.strip():
            parts.append(part)
    return parts


def cut(stream: TokenStream) -> list[np.ndarray]:
    """The tokens of each definition of each document, in an order drawn from seed 0."""
    starts = [*stream.document_starts().tolist(), stream.n_tokens]
    tokens = [
        encode(stream.tokenizer, part)
        for start, end in pairwise(starts)
        for part in definitions(
            stream.tokenizer.decode(stream.read(start + 1, end - start - 1).tolist())
        )
    ]
    return [tokens[i] for i in np.random.default_rng(0).permutation(len(tokens))]


def describe(stream: TokenStream) -> str:
    """How long the documents are, and how many meet in a window of T tokens."""
    starts = stream.document_starts()
    sizes = np.diff(np.append(starts, stream.n_tokens))
    place = np.arange(stream.n_tokens // T * T)
    window = place // T * T
    first = np.maximum(np.repeat(starts, sizes)[: len(place)], window)
    crossing = (first - window).sum() / (place - window + 1).sum()
    met = (first.reshape(-1, T)[:, -1] > window[::T]).mean()
    windows = f"of windows of {T} tokens {met:.0%} hold a boundary"
    return f"{np.median(sizes):.0f} tokens in the median; {windows}; {crossing:.0%} of visible keys cross"


def main() -> None:
    args = parse_args()
    streams = {split: TokenStream(args.dataset, split) for split in ("val", "train")}
    settings = {"text": [stream.fingerprint for stream in streams.values()]}
    with exclusive_lock(args.out):
        info = made_before(args.out, DATASET, settings)
        if not info:
            splits = {split: cut(stream) for split, stream in streams.items()}
            source = f"lab/definitions.py, {args.dataset}"
            made = {"dataset": DATASET, "source": source, "settings": settings}
            info = write_dataset(args.out, made, splits, streams["val"].tokenizer)
    print_summary(info, args.out, "configs/track.toml")
    print(f"train    {describe(TokenStream(args.out, 'train'))}")


if __name__ == "__main__":
    run_main(main)
