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


def survey(folder: str | Path, split: str) -> Survey:
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


class Verification:
    """Every byte of a dataset, read once and compared with its dataset.json.

    Compared are names and gaps; each shard's header, size, tokens (all below the vocabulary size) and sha256;
    each split's counts and sha256; leftovers of an interrupted preparation. Without dataset.json (a
    pretokenised download) no hashes are known, and the vocabulary is gpt2's.

    Attributes:
        problems: one line each, naming the file; empty for a healthy dataset.
        counts: what was read of each split.
    Raises:
        UserError: no such folder, or nothing in it to verify.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = dataset.check_folder(folder)
        self.problems: list[str] = []
        try:
            self.info = dataset.read_info(self.folder)
        except UserError as e:
            self.problems.append(f"{e}; hashes and range of tokens could not be checked")
            self.info = {"vocab_size": 65536}  # all that fits uint16
        if (self.folder / UNFINISHED_NAME).exists():
            self._problem(UNFINISHED_NAME, "the preparation did not finish; run its script again")
        for path in sorted(self.folder.glob(".*.tmp")):
            self._problem(
                path.name, "left by an interrupted write: delete it, unless a script is writing now"
            )
        self.found = {path.name for path in self.folder.glob("*.bin")}
        self.listed = {entry["file"]: entry for entry in self.info.get("shards", [])}
        if not self.found and not self.listed and not self.problems:
            raise UserError(f"{folder}: no shards in it; {HOW_TO_PREPARE}")
        splits = self._shards_by_split()
        paths = [self.folder / name for name in self.found]
        size = sum(path.stat().st_size for path in paths if path.exists())  # not a dangling link
        with dataset.progress_bar("verifying", size, "B", leave=False) as self.bar:
            self.counts = {split: self._check_split(split, names) for split, names in splits.items()}

    def _problem(self, name: str, what: str) -> None:
        self.problems.append(f"{self.folder / name}: {what}")

    def _shards_by_split(self) -> dict[str, list[str]]:
        """The shards listed and those found, in the order of the stream."""
        splits: dict[str, list[str]] = {split: [] for split in self.info.get("splits", {})}
        for name in sorted(self.found | self.listed.keys(), key=lambda name: (name[-10:], name)):
            split = dataset.split_of(name)
            if split is None or "/" in name:
                listed = f"listed in {INFO_NAME}; " if name in self.listed else ""
                self._problem(name, f"{listed}expected a name like fineweb_train_000001.bin")
            elif "shards" in self.info and name not in self.listed:
                self._problem(name, f"not listed in {INFO_NAME}: expected no other shards")
            else:
                splits.setdefault(split, []).append(name)
        for split in splits if "shards" not in self.info else ():
            try:
                dataset.find_shards(self.folder, split)
            except UserError as e:
                self.problems.append(str(e))
        return splits

    def _check_split(self, split: str, names: list[str]) -> dict[str, Any]:
        """Counts of what was read, with the split's sha256 if none of its shards is damaged."""
        count: dict[str, Any] = {"shards": 0, "tokens": 0, "documents": 0}
        digest = hashlib.sha256()
        for name in names:
            if read := self._check_shard(name, digest):
                count = {"shards": count["shards"] + 1, "tokens": count["tokens"] + read[0],
                         "documents": count["documents"] + read[1]}  # fmt: skip
        if "shards" not in self.info:
            return count
        if split not in self.info["splits"]:
            self._problem(INFO_NAME, f"splits: no {split}, though shards of it are listed")
            return count
        listed = {"tokens": sum(self.listed[name]["tokens"] for name in names), "shards": len(names)}
        if count["shards"] == len(names):
            count["sha256"] = digest.hexdigest()
            listed = count
        for key, value in listed.items():
            found = self.info["splits"][split][key]
            if found != value:
                self._problem(INFO_NAME, f"splits.{split}.{key} = {found!r}: the shards have {value!r}")
        return count

    def _check_shard(self, name: str, stream: Any) -> tuple[int, int] | None:
        """Read a shard, update the hash `stream`, and compare: its tokens and documents; None if damaged."""
        eot, entry = self.info["vocab_size"] - 1, self.listed.get(name)
        n_tokens, n_documents, n_bad, first_bad = 0, 0, 0, ""
        if name not in self.found:
            self._problem(name, f"missing: {INFO_NAME} lists it")
            return None
        try:
            with open_tokens(self.folder / name) as (header, chunks):
                digest = hashlib.sha256(header)
                for chunk in chunks:
                    if self.listed:  # else no hashes are known
                        digest.update(chunk.data)
                        stream.update(chunk.data)
                    bad = np.flatnonzero(chunk > eot)
                    if len(bad):
                        first_bad = first_bad or f"token {chunk[bad[0]]} at position {n_tokens + bad[0]}"
                    n_bad += len(bad)
                    n_tokens += len(chunk)
                    n_documents += int(np.count_nonzero(chunk == eot))
                    self.bar.update(chunk.nbytes)
        except UserError as e:
            self.problems.append(str(e))
            return None
        if n_bad:
            more = f", and {n_bad - 1:,} more" if n_bad > 1 else ""
            self._problem(name, f"{first_bad}{more}: expected tokens below the vocabulary size {eot + 1}")
        if entry and n_tokens != entry["tokens"]:
            self._problem(name, f"{n_tokens} tokens: {INFO_NAME} lists {entry['tokens']}")
        elif entry and digest.hexdigest() != entry["sha256"]:
            found, listed = digest.hexdigest()[:12], entry["sha256"][:12]
            self._problem(name, f"sha256 {found}...: {INFO_NAME} lists {listed}...")
        else:
            return n_tokens, n_documents
        return None


def _print_verification(folder: Path) -> None:
    result = Verification(folder)
    if result.problems:
        raise UserError("\n".join(result.problems))
    for split, count in result.counts.items():
        print(f"{split:8} " + ", ".join(f"{key} {value}" for key, value in count.items()))
    if "shards" not in result.info:
        print(
            f"no {INFO_NAME}, so no recorded hashes: checked that names, headers and sizes are those of "
            f"whole shards without gaps, and all tokens below gpt2's {result.info['vocab_size']}"
        )
    n_shards, n_tokens = (sum(c[key] for c in result.counts.values()) for key in ("shards", "tokens"))
    print(f"ok: {n_shards} shards, {n_tokens:,} tokens, every byte checked")


def main() -> None:
    parser = ArgumentParser(__doc__, prog="python -m data.verify")
    parser.add_argument("command", choices=("info", "verify"), help="info: the content; verify: all damage")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a data folder, such as data/python_bytes")
    args = parser.parse_args()
    (_print_info if args.command == "info" else _print_verification)(args.folder)


if __name__ == "__main__":
    run_main(main)
