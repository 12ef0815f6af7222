"""How long the documents of a dataset are.

    python -m lab.lengths data/fineweb10B

Of a loss mask it says how many tokens count.
"""

from pathlib import Path

import numpy as np

from data.dataset import HOW_TO_PREPARE, INFO_NAME, TokenStream, dataset_info
from data.shards import SHARD_NAME
from infra.cli import ArgumentParser, UserError, run_main

LONG = (1024, 4096, 16384)  # tokens; documents of at least these lengths are counted


def splits_of(folder: Path) -> list[str]:
    """The splits in the names of the shards."""
    names = [SHARD_NAME.fullmatch(path.name) for path in folder.glob("*.bin")]
    splits = sorted({name["split"] for name in names if name})
    if not splits:
        raise UserError(
            f"{folder}: no shards named like fineweb_train_000001.bin; {HOW_TO_PREPARE}"
        )
    return splits


def document_lengths(stream: TokenStream) -> np.ndarray:
    """The length of each document that begins in a split, (documents,) int64. The last one ends
    with it.
    """
    return np.diff(stream.document_starts(), append=stream.n_tokens)


def print_lengths(folder: Path) -> None:
    info = dataset_info(folder)
    print(f"source     {info.get('source', f'unknown: no {INFO_NAME}, so gpt2 is assumed')}")
    print(f"tokeniser  {info['tokenizer']}, vocabulary {info['vocab_size']}")
    for split in splits_of(folder):
        stream = TokenStream(folder, split)
        if split.endswith("mask"):
            n_learned = sum(int(shard.sum()) for shard in stream.shards)
            print(f"{split:10} {n_learned:,} of {stream.n_tokens:,} tokens count in the loss")
            continue
        lengths = document_lengths(stream)
        print(f"{split:10} {stream.n_tokens:,} tokens, {len(lengths):,} documents")
        for limit in LONG:
            long = lengths[lengths >= limit]
            share = long.sum() / stream.n_tokens
            print(
                f"{'':10} {share:.1%} of the tokens in {len(long):,} documents of at least {limit:,}"
            )


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="a data folder, such as data/python_bytes"
    )
    print_lengths(parser.parse_args().folder)


if __name__ == "__main__":
    run_main(main)
