"""A prepared dataset: a folder of shards and its dataset.json, read as one stream of tokens per split.

    data/fineweb10B/fineweb_val_000000.bin
    data/fineweb10B/fineweb_train_000001.bin ...
    data/fineweb10B/dataset.json                tokeniser, vocabulary, source, counts, sha256

`<|endoftext|>` precedes each document; documents run across shard ends. A split is the concatenation of its
shards in index order, read as an endless stream. Without dataset.json (a pretokenised download) the tokeniser
is gpt2's.

A split may have a mask, the split `{split}mask` of as many "tokens": 1 for each token that counts in the
loss, 0 for the others (data/squad.py). Batches set the targets of the others to IGNORED.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from data.shards import SHARD_NAME, ShardWriter, open_shard, release_pages
from infra.cli import UserError
from infra.files import read_json, write_json

INFO_NAME = "dataset.json"
INFO_VERSION = 1
UNFINISHED_NAME = "dataset.unfinished"
IGNORED = -100  # a target that counts in no loss
HOW_TO_PREPARE = (
    "prepare it with python -m data.fineweb, data.python_source (a small corpus; with --tokenizer gpt2 for "
    "models of GPT-2's vocabulary), lab.squad or lab.recall_data"
)


# ---------------------------------------------------------------- dataset.json


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Split(_Strict):
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    shards: int = Field(ge=0)
    sha256: str  # of the split's tokens as little-endian uint16, so independent of the shard size


class _ShardFile(_Strict):
    file: str
    tokens: int = Field(ge=1)
    sha256: str  # of the file


class _DatasetInfo(_Strict):
    """The content of dataset.json. A script may add keys of its own."""

    format_version: Literal[1]
    dataset: str
    tokenizer: str
    vocab_size: int = Field(ge=1, le=65536)
    source: str
    splits: dict[str, _Split]
    shards: list[_ShardFile]


def begin_dataset(folder: Path, name: str = "", keep: Collection[str] = ()) -> None:
    """Create the folder, mark it unfinished, and remove an earlier preparation's shards.

    Without the mark, shards of an interrupted run, having no dataset.json, would pass for a gpt2 download.

    Args:
        name: of the dataset, whose shards alone the folder may hold; "": any, and none is removed.
        keep: file names of the shards to keep.
    Raises:
        UserError: the folder cannot be created or written, or holds another dataset's shards.
    """
    for path in folder.glob("*.bin") if name else ():
        if not path.name.startswith(f"{name}_"):
            raise UserError(f"{folder}: holds {path.name}, another dataset's: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED_NAME).write_text("The script that prepares this folder has not finished.\n")
        (folder / INFO_NAME).unlink(missing_ok=True)
        for path in (*folder.glob(f"{name}_*.bin"), *folder.glob(f".{name}_*.bin.tmp")):
            if path.name not in keep:
                path.unlink()
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}") from None


def write_split(
    folder: Path,
    info: dict[str, Any],
    split: str,
    rows: Iterable[Sequence[int] | np.ndarray],
    n_documents: int,
    shard_size: int = 10**8,
) -> None:
    """Write a split's shards after those in `info`, the content of dataset.json, and enter them there."""
    with ShardWriter(folder, info["dataset"], split, shard_size, index=len(info["shards"])) as writer:
        for row in rows:
            writer.add(row)
    info["shards"] += writer.files
    info["splits"][split] = writer.counts(n_documents)


def finish_dataset(folder: Path, info: dict[str, Any]) -> None:
    """Write dataset.json and remove the mark of `begin_dataset`: the last step of a preparation."""
    path = folder / INFO_NAME
    write_json(_check_info({"format_version": INFO_VERSION} | info, path), path)
    (folder / UNFINISHED_NAME).unlink(missing_ok=True)


def dataset_info(folder: str | Path) -> dict[str, Any]:
    """The content of dataset.json, or for a pretokenised download, which has none, gpt2's.

    Keys: those of `_DatasetInfo` and what the preparing script adds; without the file only tokenizer and
    vocab_size.

    Raises:
        UserError: no such folder, its preparation did not finish, or dataset.json is damaged.
    """
    folder = check_folder(folder)
    if (folder / UNFINISHED_NAME).exists():
        raise UserError(f"{folder}: its preparation did not finish; run the script that prepares it again")
    return read_info(folder)


def check_folder(folder: str | Path) -> Path:
    """The folder as a Path. Raises UserError if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "a file: expected a data folder" if folder.exists() else "no such data folder"
        raise UserError(f"{folder}: {what}; {HOW_TO_PREPARE}")
    return folder


def read_info(folder: Path) -> dict[str, Any]:
    """As `dataset_info`, also for a folder whose preparation did not finish."""
    path = folder / INFO_NAME
    if not path.exists():
        return {"tokenizer": "gpt2", "vocab_size": 50257}
    return _check_info(read_json(path), path)


def _check_info(values: Any, path: Path) -> dict[str, Any]:
    try:
        return _DatasetInfo.model_validate(values).model_dump()
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        if first["type"] == "missing":
            raise UserError(f"{path}: {where}: missing") from None
        expected = first["msg"].removeprefix("Input should be ")
        raise UserError(f"{path}: {where} = {str(first['input'])[:60]!r}: expected {expected}") from None


# ---------------------------------------------------------------- reading


class TokenStream:
    """All shards of a split as one stream that starts over at its end.

    Attributes:
        folder, split: where it is read from.
        info: the `dataset_info`; vocab_size is one of its keys.
        n_tokens: length of the stream.
        mask: the stream of its mask, or None.
    Raises:
        UserError: one line, for a missing folder, no shards, a missing or foreign shard, a damaged one,
            a mask of another length.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder, self.split = Path(folder), split
        self.info = dataset_info(folder)
        self.vocab_size: int = self.info["vocab_size"]
        paths = find_shards(self.folder, split)
        self._shards = [open_shard(path, self.vocab_size) for path in paths]
        self._starts = [0]  # Python ints: as numpy int32 their sum overflows at 103 shards of 10^8
        for shard in self._shards:
            self._starts.append(self._starts[-1] + len(shard))
        self.n_tokens = self._starts[-1]
        if "shards" in self.info:
            self._check_listed(paths)
        has_mask = f"{split}mask" in self.info.get("splits", {})
        self.mask = TokenStream(folder, f"{split}mask") if has_mask else None
        if self.mask and self.mask.n_tokens != self.n_tokens:
            raise UserError(
                f"{folder}: {split}mask has {self.mask.n_tokens} tokens: expected {self.n_tokens}, as {split}"
            )

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as (length,) int64, wrapping around the stream's end."""
        out = np.empty(length, dtype=np.int64)
        position, filled = start % self.n_tokens, 0
        while filled < length:
            i = bisect.bisect_right(self._starts, position) - 1
            offset = position - self._starts[i]
            part = self._shards[i][offset : offset + length - filled]
            out[filled : filled + len(part)] = part
            release_pages(self._shards[i])
            filled += len(part)
            position = (position + len(part)) % self.n_tokens
        return out

    @property
    def fingerprint(self) -> str:
        """Identifies the stream: its sha256 from dataset.json, else its length."""
        split = self.info.get("splits", {}).get(self.split)
        return f"sha256 {split['sha256']}" if split else f"{self.n_tokens} tokens"

    def check_model(self, vocab_size: int) -> None:
        """Raises UserError unless a model's `vocab_size` is the stream's, or that with padding."""
        most = self.vocab_size + 1023
        if not self.vocab_size <= vocab_size <= most:
            raise UserError(
                f"model.vocab_size = {vocab_size}: {self.folder} was tokenised with {self.vocab_size} tokens "
                f"({self.info['tokenizer']}); expected {self.vocab_size} to {most}"
            )

    def _check_listed(self, paths: list[Path]) -> None:
        """The shards are those in dataset.json: a lost last shard would silently change the stream."""
        found = {path.name: len(shard) for path, shard in zip(paths, self._shards, strict=True)}
        every = {entry["file"]: entry["tokens"] for entry in self.info["shards"]}
        listed = {name: n for name, n in every.items() if split_of(name) == self.split}
        for name in sorted(found.keys() | listed.keys()):
            path, n, expected = self.folder / name, found.get(name), listed.get(name)
            if n is None:
                raise UserError(f"{path}: missing: {INFO_NAME} lists it")
            if expected is None:
                raise UserError(f"{path}: not listed in {INFO_NAME}: expected no other shards")
            if n != expected:
                raise UserError(f"{path}: {n} tokens: {INFO_NAME} lists {expected}")


def split_of(name: str) -> str | None:
    """The split that a shard's file name names; None if it is no shard's name."""
    match = SHARD_NAME.fullmatch(name)
    return match["split"] if match else None


def find_shards(folder: Path, split: str) -> list[Path]:
    """The split's shards in index order. Raises UserError for none, a gap, or a mix of datasets."""
    found: dict[int, Path] = {}
    datasets = set()
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        match = SHARD_NAME.fullmatch(path.name)
        if match is None or match["split"] != split:
            raise UserError(f"{path}: expected a name like fineweb_{split}_000001.bin")
        found[int(match["index"])] = path
        datasets.add(match["dataset"])
    if not found:
        raise UserError(f"{folder}: no shards named *_{split}_*.bin; {HOW_TO_PREPARE}")
    if len(datasets) > 1:
        raise UserError(f"{folder}: shards of {', '.join(sorted(datasets))}: expected one dataset a folder")
    # Indices below the split's first belong to other splits; 0 (val) may have been left out of a download.
    name = datasets.pop()
    others = {int(path.stem[-6:]) for path in folder.glob(f"{name}_*_[0-9][0-9][0-9][0-9][0-9][0-9].bin")}
    first, last = min(found), max(found)
    gaps = [index for index in range(1, last) if index not in (others if index < first else found)]
    if gaps:
        missing = ", ".join(f"{name}_{split}_{index:06d}.bin" for index in gaps)
        raise UserError(f"{folder / missing}: missing, though shard {last:06d} is there: expected no gaps")
    return [found[index] for index in sorted(found)]


def finished_info(folder: Path) -> dict[str, Any] | None:
    """dataset.json's content if both splits are complete; else None, and it prints why."""
    if not (folder / INFO_NAME).exists() and not (folder / UNFINISHED_NAME).exists():
        return None
    try:
        return [TokenStream(folder, split) for split in ("val", "train")][0].info
    except UserError as e:
        print(f"not finished: {e}")
        return None


# ---------------------------------------------------------------- printing


def print_splits(info: dict[str, Any]) -> None:
    """A line per split of dataset.json's content."""
    for name, split in info["splits"].items():
        print(
            f"{name:8} {split['tokens']:,} {info['tokenizer']} tokens, {split['documents']:,} documents, "
            f"{split['shards']} shards, sha256 {split['sha256']}"
        )


def progress_bar(what: str, total: int | None, unit: str, initial: int = 0, leave: bool = True) -> tqdm:
    """A tqdm bar on stderr; without a TTY, as in a log file, it updates once a minute."""
    mininterval, delay = (0.5, 0) if sys.stderr.isatty() else (60, 60)
    return tqdm(
        total=total, initial=initial, desc=what, unit=unit, leave=leave, unit_scale=True, dynamic_ncols=True,
        mininterval=mininterval, delay=delay,
    )  # fmt: skip
