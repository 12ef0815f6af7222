"""The content of a dataset, and whether it is intact.

    python -m data.verify info data/fineweb10B      # tokens, documents and their lengths
    python -m data.verify verify data/fineweb10B    # read every byte, compare with dataset.json

`verify` names every damage it finds, one line each, with its file; then the exit status is 2.
"""

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import dataset, shards
from data.dataset import HOW_TO_PREPARE, INFO_NAME, TokenStream
from data.shards import SHARD_NAME
from infra.cli import ArgumentParser, UserError, run_main

LONG = (1024, 4096, 16384)  # tokens; documents of at least these lengths are counted


def document_lengths(stream: TokenStream) -> np.ndarray:
    """The length of each document that begins in a split, (documents,) int64. The last one ends with it."""
    starts = [np.empty(0, np.int64)]
    position = 0
    for shard in stream.shards:
        starts.append(position + np.flatnonzero(shard == stream.eot))
        position += len(shard)
        shards.release_pages(shard)
    return np.diff(np.concatenate(starts), append=position)


def print_info(folder: Path) -> None:
    info = dataset.dataset_info(folder)
    print(f"source     {info.get('source', f'unknown: no {INFO_NAME}, so gpt2 is assumed')}")
    print(f"tokeniser  {info['tokenizer']}, vocabulary {info['vocab_size']}")
    for split in _splits_of(folder):
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
            print(f"{'':10} {share:.1%} of the tokens in {len(long):,} documents of at least {limit:,}")


def _splits_of(folder: Path) -> list[str]:
    """The splits in the names of the shards."""
    names = [SHARD_NAME.fullmatch(path.name) for path in folder.glob("*.bin")]
    splits = sorted({name["split"] for name in names if name})
    if not splits:
        raise UserError(f"{folder}: no shards named like fineweb_train_000001.bin; {HOW_TO_PREPARE}")
    return splits


def verify(folder: Path) -> str:
    """Compare every byte of a dataset with its dataset.json, and say what was read.

    Compared are each shard's name, header, size, sha256 and tokens, and the order of a split's shards.
    Raises UserError: one line for each damage, naming the file; no such folder, or nothing in it to verify.
    """
    info = dataset.dataset_info(folder)
    listed = {file["file"]: file for file in info.get("shards", [])}
    files = {path.name for path in folder.glob("*.bin")} | listed.keys()
    problems = []
    n_tokens = 0
    for file in tqdm(sorted(files), "verifying", unit=" shards", leave=False, disable=None):
        try:
            n_tokens += _check_shard(folder / file, info, listed.get(file))
        except UserError as e:
            problems.append(str(e))
    for split in [] if problems else _splits_of(folder):
        try:
            TokenStream(folder, split)  # gaps, shards of another dataset
        except UserError as e:
            problems.append(str(e))
    if problems:
        raise UserError("\n".join(problems))
    return f"{len(files)} shards, {n_tokens:,} tokens, every byte checked"


def _check_shard(path: Path, info: dict[str, Any], recorded: dict[str, Any] | None) -> int:
    """The tokens of a shard. Raises UserError: its damage."""
    if not SHARD_NAME.fullmatch(path.name):
        raise UserError(f"{path}: expected a name like fineweb_train_000001.bin")
    if recorded is None and "shards" in info:
        raise UserError(f"{path}: not listed in {INFO_NAME}: expected no other shards")
    tokens = shards.map_tokens(path)
    shards.check_vocabulary(path, tokens, info["vocab_size"])
    if recorded:
        shards.check_recorded(path, tokens, recorded)
    shards.release_pages(tokens)
    return len(tokens)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("command", choices=("info", "verify"), help="info: the content; verify: all damage")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a data folder, such as data/python_bytes")
    args = parser.parse_args()
    if args.command == "info":
        print_info(args.folder)
        return
    print(f"ok: {verify(args.folder)}")
    if not (args.folder / INFO_NAME).exists():
        print(f"no {INFO_NAME}, so no hashes: checked were names, headers, sizes and gpt2's vocabulary")


if __name__ == "__main__":
    run_main(main)
