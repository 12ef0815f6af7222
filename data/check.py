"""What is in a dataset, and whether it is whole: `python data/shards.py info DIR` and `... verify DIR`.

    python data/shards.py info data/fineweb10B      # counts, how long the documents are, how they begin
    python data/shards.py verify data/fineweb10B    # read every byte, compare with dataset.json

`verify` names every damage it finds, one line each, with its file, and ends with exit status 2.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.shards import (
    HEADER_BYTES,
    HOW_TO_PREPARE,
    INFO_NAME,
    SHARD_NAME,
    TOKEN,
    UNFINISHED_NAME,
    TokenStream,
    check_header,
    data_folder,
    dataset_info,
    find_shards,
    name_parts,
    progress_bar,
    read_info,
)
from data.tokenizer import get_tokenizer
from infra.cli import ArgumentParser, UserError

LONG = (1024, 4096, 16384)  # tokens; documents at least so long are counted
CHUNK_TOKENS = 2**21  # read at a time
PEEK_CHARACTERS = 200


# ---------------------------------------------------------------- info


def document_lengths(chunks: Iterable[np.ndarray], eot: int) -> Iterator[np.ndarray]:
    """Lengths of the pieces into which `eot`, the token that begins a document, cuts a stream.

    Args:
        chunks: the stream's tokens, cut anywhere.
    Yields:
        Arrays of lengths in tokens, `eot` included. The first of all is the head, which ends a document
        that began before the stream (0 if there is none); the last piece ends with the stream.
    """
    begun = position = 0  # of the piece in hand
    for chunk in chunks:
        starts = np.flatnonzero(chunk == eot) + position
        position += len(chunk)
        if len(starts):
            yield np.diff(starts, prepend=begun)
            begun = int(starts[-1])
    yield np.array([position - begun])


@dataclass(frozen=True)
class Survey:
    """What a scan of a split counts.

    Documents are those that begin in the split, with their tokens in it: where a document runs across the
    end of the split, the rest is the `head` of the next one. The head is nobody's document: it counts as a
    piece of its own length in `long`'s tokens, and not among documents.
    """

    shards: int
    tokens: int
    documents: int
    head: int  # tokens
    long: dict[int, tuple[int, int]]  # for each of LONG: documents of at least so many tokens, their tokens

    @property
    def mean_length(self) -> float:
        """Tokens of a document, on average; 0 without documents."""
        return (self.tokens - self.head) / self.documents if self.documents else 0.0


def survey(folder: str | Path, split: str) -> Survey:
    """Scan a split from end to end in memory that does not grow with it.

    Raises:
        UserError: as `TokenStream` does; a shard that cannot be read.
    """
    stream = TokenStream(folder, split)  # checks the folder
    paths = find_shards(stream.folder, split)
    head, n_pieces = -1, 0
    long = np.zeros((len(LONG), 2), dtype=np.int64)
    with progress_bar(f"scanning {split}", stream.n_tokens, "tok", leave=False) as bar:
        for lengths in document_lengths(_split_chunks(paths, bar), stream.vocab_size - 1):
            n_pieces += len(lengths)
            for i, limit in enumerate(LONG):
                enough = lengths[lengths >= limit]
                long[i] += len(enough), enough.sum()
            if head < 0:
                head = int(lengths[0])
                long[:, 0] -= [head >= limit for limit in LONG]  # no document
    counts = {limit: (int(n), int(tokens)) for limit, (n, tokens) in zip(LONG, long, strict=True)}
    return Survey(len(paths), stream.n_tokens, n_pieces - 1, head, counts)


def _split_chunks(paths: list[Path], bar: tqdm) -> Iterator[np.ndarray]:
    """The tokens of several shards, in order."""
    for path in paths:
        try:
            with open(path, "rb") as f:
                f.seek(HEADER_BYTES)
                for chunk in _chunks(f):
                    yield chunk
                    bar.update(len(chunk))
        except OSError as e:
            raise UserError(f"{path}: cannot be read: {e.strerror}") from None


def _chunks(f: BufferedReader) -> Iterator[np.ndarray]:
    """Tokens from here to the file's end, in one buffer that is used again: a map of the file would fill
    the memory of this process with pages that are not needed twice."""
    buffer = np.empty(CHUNK_TOKENS, TOKEN)
    while (n_bytes := f.readinto(buffer.data)) > 1:
        yield buffer[: n_bytes // 2]


def _shard_names(folder: Path) -> dict[str, list[str]]:
    """Names of the shards that are there, by split, in index order; the split of the lowest index first."""
    matches = [match for path in folder.glob("*.bin") if (match := SHARD_NAME.fullmatch(path.name))]
    names: dict[str, list[str]] = {}
    for match in sorted(matches, key=lambda match: (match["index"], match["split"])):
        names.setdefault(match["split"], []).append(match[0])
    return names


def _print_info(folder: Path) -> None:
    info = dataset_info(folder)
    splits = dict.fromkeys(_shard_names(folder))
    splits |= {name: None for name, counts in info.get("splits", {}).items() if counts["tokens"]}
    if not splits:
        raise UserError(f"{folder}: no shards named like fineweb_train_000001.bin; {HOW_TO_PREPARE}")
    surveys = {split: survey(folder, split) for split in splits}

    assumed = "" if "source" in info else f"; no {INFO_NAME}: taken for a download"
    print(f"folder     {folder}")
    print(f"source     {info.get('source', f'unknown: no {INFO_NAME}')}")
    print(f"tokeniser  {info['tokenizer']}, vocabulary {info['vocab_size']}{assumed}")
    print(f"\n{'split':8}{'shards':>9}{'tokens':>18}{'documents':>14}{'mean length':>14}")
    for split, s in surveys.items():
        print(f"{split:8}{s.shards:9,}{s.tokens:18,}{s.documents:14,}{s.mean_length:14,.1f}")
    print("\nshare of the tokens that is in long documents (and how many documents that are)")
    print(f"{'length':8}" + "".join(f"{f'>= {limit:,} tokens':>22}" for limit in LONG))
    for split, s in surveys.items():
        cells = (f"{tokens / s.tokens:.1%} ({n:,})" for n, tokens in s.long.values())
        print(f"{split:8}" + "".join(f"{cell:>22}" for cell in cells))
    for split, s in surveys.items():
        if s.head:
            print(f"({split} begins with {s.head:,} tokens of a document that began before the split)")
    print("\nfirst document of each split")
    _print_peeks(folder, surveys)


def _print_peeks(folder: Path, surveys: dict[str, Survey]) -> None:
    """How the first document that begins in each split begins, or why that cannot be shown."""
    try:
        encoding = get_tokenizer(dataset_info(folder)["tokenizer"])
    except UserError as e:
        print(f"not shown: {e}")
        return
    for split, s in surveys.items():
        if not s.documents:
            print(f"{split:8}none begins in this split")
            continue
        stream = TokenStream(folder, split)
        wanted = 1 + 4 * PEEK_CHARACTERS  # a character is at most 4 tokens, as UTF-8 has at most 4 bytes
        tokens = stream.read(s.head, min(wanted, stream.n_tokens - s.head))[1:]
        ends = np.flatnonzero(tokens == stream.vocab_size - 1)
        try:
            text = encoding.decode(tokens[: ends[0] if len(ends) else None].tolist())
        except KeyError as e:
            print(f"{split:8}not shown: the tokeniser {encoding.name} has no token {e}")
            continue
        more = "..." if len(text) > PEEK_CHARACTERS else ""
        print(f"{split:8}{text[:PEEK_CHARACTERS]!r}{more}")  # repr: on one line, nothing for the terminal


# ---------------------------------------------------------------- verify


def verify(folder: str | Path) -> list[str]:
    """Read every byte of a dataset, once, and compare it with its dataset.json.

    Checked are names and gaps; each shard's header, size, tokens (all of them below the vocabulary size)
    and sha256; each split's counts and sha256; what an interrupted preparation leaves behind. A split's
    documents and sha256 are left alone if one of its shards is damaged: then they cannot be right.
    Without dataset.json (a pretokenised download) no hashes are known, and the vocabulary is gpt2's.

    Returns:
        All problems, one line each, naming the file; none for a healthy dataset.
    Raises:
        UserError: there is no such folder, or nothing in it to verify.
    """
    return _Verification(folder).problems


@dataclass
class _Count:
    """What was read of a shard or of a split."""

    shards: int = 0
    tokens: int = 0
    documents: int = 0
    sha256: str = ""  # of the shard's file; of the split's tokens


class _Verification:
    """What `verify` finds: `problems`, and in `counts` what was read of each split."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = data_folder(folder)
        self.problems: list[str] = []
        self.counts: dict[str, _Count] = {}
        self.found = {path.name for path in self.folder.glob("*.bin")}
        self.info = self._read_info()
        self.listed = {entry["file"]: entry for entry in self.info.get("shards", [])}
        self._check_leftovers()
        if not self.found and not self.listed and not self.problems:
            raise UserError(f"{folder}: no shards in it; {HOW_TO_PREPARE}")
        splits = self._check_names()
        paths = [self.folder / name for name in self.found]
        size = sum(path.stat().st_size for path in paths if path.exists())  # not a link to nowhere
        with progress_bar("verifying", size, "B", leave=False) as self.bar:
            for split, names in splits.items():
                self._check_split(split, names)
        self._check_totals()

    def _problem(self, name: str, what: str) -> None:
        self.problems.append(f"{self.folder / name}: {what}")

    def _read_info(self) -> dict[str, Any]:
        try:
            return read_info(self.folder)
        except UserError as e:
            self.problems.append(f"{e}; hashes and range of tokens could not be checked")
            return {"vocab_size": 65536}  # all that fits uint16

    def _check_leftovers(self) -> None:
        if (self.folder / UNFINISHED_NAME).exists():
            self._problem(UNFINISHED_NAME, "the preparation did not finish; run its script again")
        for path in sorted(self.folder.glob(".*.tmp")):
            self._problem(
                path.name, "left by an interrupted write: delete it, unless a script writes just now"
            )

    def _check_names(self) -> dict[str, list[str]]:
        """The shards to read, by split and in the order of the stream: those listed and those found."""
        recorded = "shards" in self.info
        splits: dict[str, list[str]] = {split: [] for split in self.info.get("splits", {})}
        indices: dict[str, set[int]] = {}  # of the dataset's own shards
        datasets = set()
        for name in sorted(self.found | self.listed.keys(), key=lambda name: (name[-10:], name)):
            match = SHARD_NAME.fullmatch(name)
            if match is None or "/" in name:
                listed = f"listed in {INFO_NAME}; " if name in self.listed else ""
                self._problem(name, f"{listed}expected a name like fineweb_train_000001.bin")
                continue
            splits.setdefault(match["split"], []).append(name)
            if recorded and name not in self.listed:
                self._problem(name, f"not listed in {INFO_NAME}: expected no other shards")
            else:
                indices.setdefault(match["split"], set()).add(int(match["index"]))
                datasets.add(match["dataset"])
        if len(datasets) > 1:
            names = ", ".join(sorted(datasets))
            self.problems.append(f"{self.folder}: shards of {names}: expected one dataset a folder")
        elif datasets:
            self._check_gaps(datasets.pop(), indices)
        return splits

    def _check_gaps(self, dataset: str, indices: dict[str, set[int]]) -> None:
        """By the rule of `find_shards`, but all gaps."""
        every = set().union(*indices.values())
        gaps: dict[int, str] = {}
        for split, own in sorted(indices.items(), key=lambda item: min(item[1])):
            for index in range(1, max(own)):
                if index not in (every if index < min(own) else own):
                    gaps.setdefault(index, split)
        for index, split in sorted(gaps.items()):
            self._problem(f"{dataset}_{split}_{index:06d}.bin", "missing: expected no gaps between shards")

    def _check_split(self, split: str, names: list[str]) -> None:
        count, digest, whole = _Count(), hashlib.sha256(), True
        for name in names:
            entry = self.listed.get(name)
            shard = self._check_shard(name, digest if entry else None) if name in self.found else None
            if name not in self.found:
                self._problem(name, f"missing: {INFO_NAME} lists it")
            elif shard and entry and shard.tokens != entry["tokens"]:
                self._problem(name, f"{shard.tokens} tokens: {INFO_NAME} lists {entry['tokens']}")
            elif shard and entry and shard.sha256 != entry["sha256"]:
                self._problem(
                    name, f"sha256 {shard.sha256[:12]}...: {INFO_NAME} lists {entry['sha256'][:12]}..."
                )
            elif shard and (entry or "shards" not in self.info):
                count.shards += 1
                count.tokens += shard.tokens
                count.documents += shard.documents
                continue
            whole = whole and entry is None  # what is not listed is not of the split
        if whole and "shards" in self.info:
            count.sha256 = digest.hexdigest()
        self.counts[split] = count

    def _check_shard(self, name: str, stream: Any) -> _Count | None:
        """Read a shard. Its tokens go on the hash `stream`, too; None: nothing is hashed.

        Returns:
            What was read; None, and a problem, for a file that is no whole shard.
        """
        eot, shard, n_bad, first_bad = self.info["vocab_size"] - 1, _Count(1), 0, ""
        try:
            with open(self.folder / name, "rb") as f:
                header = f.read(HEADER_BYTES)
                n_tokens = check_header(self.folder / name, header, os.fstat(f.fileno()).st_size)
                digest = hashlib.sha256(header)
                for chunk in _chunks(f):
                    if stream is not None:
                        digest.update(chunk.data)
                        stream.update(chunk.data)
                    if chunk.max() > eot:
                        bad = np.flatnonzero(chunk > eot)
                        first_bad = first_bad or f"token {chunk[bad[0]]} at position {shard.tokens + bad[0]}"
                        n_bad += len(bad)
                    shard.tokens += len(chunk)
                    shard.documents += int(np.count_nonzero(chunk == eot))
                    self.bar.update(chunk.nbytes)
        except OSError as e:
            self._problem(name, f"cannot be read: {e.strerror}")
            return None
        except UserError as e:
            self.problems.append(str(e))
            return None
        if n_bad:
            more = f", and {n_bad - 1:,} more" if n_bad > 1 else ""
            self._problem(name, f"{first_bad}{more}: expected tokens below the vocabulary size {eot + 1}")
        if shard.tokens != n_tokens:
            self._problem(name, "changed while it was read")
        shard.sha256 = digest.hexdigest()
        return shard

    def _check_totals(self) -> None:
        """dataset.json's splits are what its shards add up to."""
        expected = self.info.get("splits", {})
        for split, count in self.counts.items():
            entries = [self.listed[name] for name in self.listed if name_parts(Path(name), split)]
            if split not in expected:
                if entries:
                    self._problem(INFO_NAME, f"splits: no {split}, though shards of it are listed")
                continue
            values: dict[str, Any] = {
                "tokens": sum(entry["tokens"] for entry in entries),
                "shards": len(entries),
            }
            if count.sha256:
                values |= {"documents": count.documents, "sha256": count.sha256}
            for key, value in values.items():
                if expected[split][key] != value:
                    self._problem(
                        INFO_NAME,
                        f"splits.{split}.{key} = {expected[split][key]!r}: the shards have {value!r}",
                    )


def _print_verification(folder: str | Path) -> None:
    result = _Verification(folder)
    if result.problems:
        raise UserError("\n".join(result.problems))
    for split, count in result.counts.items():
        sha256 = f", sha256 {count.sha256}" if count.sha256 else ""
        print(
            f"{split:8} {count.shards} shards, {count.tokens:,} tokens, {count.documents:,} documents{sha256}"
        )
    if "shards" not in result.info:
        print(
            f"no {INFO_NAME}, so no recorded hashes: checked that names, headers and sizes are those of "
            f"whole shards without gaps, and all tokens below gpt2's {result.info['vocab_size']}"
        )
    n_shards = sum(count.shards for count in result.counts.values())
    n_tokens = sum(count.tokens for count in result.counts.values())
    print(f"ok: {n_shards} shards, {n_tokens:,} tokens, every byte checked")


def main() -> None:
    if not sys.argv[1:]:
        raise UserError("expected `python data/shards.py info DIR` or `verify DIR` (or --help)")
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "command",
        choices=("info", "verify"),
        help="info: what is in a dataset; verify: compare every byte with dataset.json, name all damage",
    )
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="folder of shards, such as data/python_bytes"
    )
    args = parser.parse_args()
    (_print_info if args.command == "info" else _print_verification)(args.folder)
