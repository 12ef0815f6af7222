"""The content of a dataset, and whether it is intact.

    python -m data.verify info data/fineweb10B      # counts, lengths of the documents, how they begin
    python -m data.verify verify data/fineweb10B    # read every byte, compare with dataset.json

`verify` names every damage it finds, one line each, with its file; then the exit status is 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import dataset
from data.dataset import HOW_TO_PREPARE, INFO_NAME, UNFINISHED_NAME, TokenStream
from data.shards import open_tokens
from data.tokenizer import get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main

LONG = (1024, 4096, 16384)  # tokens; documents of at least these lengths are counted
PEEK_CHARACTERS = 200


# ---------------------------------------------------------------- info


@dataclass(frozen=True)
class Survey:
    """Counts of a split.

    Documents are those that begin in the split, with their tokens in it: where a document runs across the end
    of a split, the rest is the `head` of the next one, whose tokens `long` counts, but not as a document.
    """

    shards: int
    tokens: int
    documents: int
    head: int  # tokens
    long: dict[int, tuple[int, int]]  # for each of LONG: documents of at least that length, their tokens

    @property
    def mean_length(self) -> float:
        """Mean tokens of a document; 0 without documents."""
        return (self.tokens - self.head) / self.documents if self.documents else 0.0


def survey(folder: Path, split: str) -> Survey:
    """Scan a split from end to end, in constant memory.

    Raises:
        UserError: as `TokenStream` does; a shard that cannot be read.
    """
    stream = TokenStream(folder, split)  # checks the folder
    paths = dataset.find_shards(stream.folder, split)
    head, n_pieces = -1, 0
    long = np.zeros((len(LONG), 2), dtype=np.int64)
    with dataset.progress_bar(f"scanning {split}", stream.n_tokens, "tok", leave=False) as bar:
        for lengths in _piece_lengths(_split_chunks(paths, bar), stream.vocab_size - 1):
            n_pieces += len(lengths)
            for i, limit in enumerate(LONG):
                enough = lengths[lengths >= limit]
                long[i] += len(enough), enough.sum()
            if head < 0:
                head = int(lengths[0])
                long[:, 0] -= [head >= limit for limit in LONG]  # the head is no document
    counts = {limit: (int(n), int(tokens)) for limit, (n, tokens) in zip(LONG, long, strict=True)}
    return Survey(len(paths), stream.n_tokens, n_pieces - 1, head, counts)


def _piece_lengths(chunks: Iterable[np.ndarray], eot: int) -> Iterator[np.ndarray]:
    """Lengths of the pieces into which `eot`, the first token of a document, cuts a stream of chunks.

    The first piece of all is the head, the end of a document that began before the stream (0: none).
    """
    begun = position = 0  # of the current piece
    for chunk in chunks:
        starts = np.flatnonzero(chunk == eot) + position
        position += len(chunk)
        if len(starts):
            yield np.diff(starts, prepend=begun)
            begun = int(starts[-1])
    yield np.array([position - begun])


def _split_chunks(paths: list[Path], bar: tqdm) -> Iterator[np.ndarray]:
    for path in paths:
        with open_tokens(path) as (_, chunks):
            for chunk in chunks:
                yield chunk
                bar.update(len(chunk))


def _print_info(folder: Path) -> None:
    info = dataset.dataset_info(folder)
    names = sorted((path.name for path in folder.glob("*.bin")), key=lambda name: (name[-10:], name))
    splits = dict.fromkeys(split for name in names if (split := dataset.split_of(name)))
    splits |= {split: None for split, counts in info.get("splits", {}).items() if counts["tokens"]}
    if not splits:
        raise UserError(f"{folder}: no shards named like fineweb_train_000001.bin; {HOW_TO_PREPARE}")
    surveys = {split: survey(folder, split) for split in splits}

    assumed = "" if "source" in info else f"; no {INFO_NAME}: assumed to be a download"
    print(f"folder     {folder}")
    print(f"source     {info.get('source', f'unknown: no {INFO_NAME}')}")
    print(f"tokeniser  {info['tokenizer']}, vocabulary {info['vocab_size']}{assumed}")
    print(f"\n{'split':8}{'shards':>9}{'tokens':>18}{'documents':>14}{'mean length':>14}")
    for split, s in surveys.items():
        print(f"{split:8}{s.shards:9,}{s.tokens:18,}{s.documents:14,}{s.mean_length:14,.1f}")
    print("\nshare of the tokens in long documents (and the number of those documents)")
    print(f"{'length':8}" + "".join(f"{f'>= {limit:,} tokens':>22}" for limit in LONG))
    for split, s in surveys.items():
        cells = (f"{tokens / s.tokens:.1%} ({n:,})" for n, tokens in s.long.values())
        print(f"{split:8}" + "".join(f"{cell:>22}" for cell in cells))
    texts = {split: s for split, s in surveys.items() if not split.endswith("mask")}
    for split, s in texts.items():
        if s.head:
            print(f"({split} begins with {s.head:,} tokens of a document that began before the split)")
    print("\nfirst document of each split")
    _print_peeks(folder, texts)


def _print_peeks(folder: Path, surveys: dict[str, Survey]) -> None:
    """The beginning of the first document of each split, or why it cannot be shown."""
    for split, s in surveys.items():
        stream = TokenStream(folder, split)
        wanted = 1 + 4 * PEEK_CHARACTERS  # a character is at most 4 tokens, as UTF-8 has at most 4 bytes
        tokens = stream.read(s.head, min(wanted, stream.n_tokens - s.head))[1:]
        ends = np.flatnonzero(tokens == stream.vocab_size - 1)
        try:
            encoding = get_tokenizer(stream.info["tokenizer"])
            text = encoding.decode(tokens[: ends[0] if len(ends) else None].tolist())
        except (UserError, KeyError) as e:  # KeyError: a token that the tokeniser does not have
            print(f"{split:8}not shown: {e}")
            continue
        more = "..." if len(text) > PEEK_CHARACTERS else ""
        print(f"{split:8}{text[:PEEK_CHARACTERS]!r}{more}")  # repr: one line, no control characters


# ---------------------------------------------------------------- verify


def verify(folder: Path) -> str:
    """Read every byte of a dataset once and compare it with its dataset.json.

    Compared are each shard's name, header, size, sha256 and tokens, and the order of a split's shards.
    Without dataset.json (a pretokenised download) no hashes are known, and the vocabulary is gpt2's.

    Returns:
        What was read.
    Raises:
        UserError: one line for each damage, naming the file; no such folder, or nothing in it to verify.
    """
    info = dataset.read_info(dataset.check_folder(folder))
    listed = {entry["file"]: entry for entry in info.get("shards", [])}
    found = {path.name: path.stat().st_size if path.exists() else 0 for path in folder.glob("*.bin")}
    left = sorted((*folder.glob(UNFINISHED_NAME), *folder.glob(".*.tmp")))
    problems = [f"{path}: left by an interrupted preparation: run its script again" for path in left]
    if not found and not listed and not problems:
        raise UserError(f"{folder}: no shards in it; {HOW_TO_PREPARE}")
    n_tokens = 0
    with dataset.progress_bar("verifying", sum(found.values()), "B", leave=False) as bar:
        for name in sorted(found | listed, key=lambda name: (name[-10:], name)):
            try:
                n_tokens += _check_shard(folder / name, info, listed.get(name), bar)
            except UserError as e:
                problems.append(str(e))
    splits = {split for name in found if (split := dataset.split_of(name))}
    for split in sorted(splits) if not problems else ():
        try:
            TokenStream(folder, split)  # gaps, shards of another dataset
        except UserError as e:
            problems.append(str(e))
    if problems:
        raise UserError("\n".join(problems))
    return f"{len(found)} shards, {n_tokens:,} tokens, every byte checked"


def _check_shard(path: Path, info: dict[str, Any], entry: dict[str, Any] | None, bar: tqdm) -> int:
    """The tokens of a shard. Raises UserError: its damage."""
    if dataset.split_of(path.name) is None:
        raise UserError(f"{path}: expected a name like fineweb_train_000001.bin")
    if entry is None and "shards" in info:
        raise UserError(f"{path}: not listed in {INFO_NAME}: expected no other shards")
    vocab_size, n_tokens, bad = info["vocab_size"], 0, ""
    with open_tokens(path) as (header, chunks):
        digest = hashlib.sha256(header)
        for chunk in chunks:
            digest.update(chunk.data)
            if not bad and len(outside := np.flatnonzero(chunk >= vocab_size)):
                bad = f"token {chunk[outside[0]]} at position {n_tokens + outside[0]}"
            n_tokens += len(chunk)
            bar.update(chunk.nbytes)
    if bad:
        raise UserError(f"{path}: {bad}: expected tokens below the vocabulary size {vocab_size}")
    if entry and (n_tokens, digest.hexdigest()) != (entry["tokens"], entry["sha256"]):
        found, wanted = digest.hexdigest()[:12], entry["sha256"][:12]
        raise UserError(
            f"{path}: {n_tokens} tokens, sha256 {found}...: {INFO_NAME} lists {entry['tokens']}, {wanted}..."
        )
    return n_tokens


def _print_verification(folder: Path) -> None:
    read = verify(folder)
    if not (folder / INFO_NAME).exists():
        print(
            f"no {INFO_NAME}, so no recorded hashes: checked that names, headers and sizes are those of "
            "whole shards without gaps, and all tokens below gpt2's 50257"
        )
    print(f"ok: {read}")


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("command", choices=("info", "verify"), help="info: the content; verify: all damage")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a data folder, such as data/python_bytes")
    args = parser.parse_args()
    (_print_info if args.command == "info" else _print_verification)(args.folder)


if __name__ == "__main__":
    run_main(main)
