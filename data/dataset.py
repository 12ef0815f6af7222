"""A prepared dataset: a folder of shards and its dataset.json, read as one stream of tokens per
split.

    data/fineweb10B/fineweb_val_000000.bin
    data/fineweb10B/fineweb_train_000001.bin ...
    data/fineweb10B/dataset.json                tokeniser, vocabulary, source, counts, sha256
    data/fineweb10B/tokenizer.json              the tokeniser, if it is neither gpt2 nor bytes

`<|endoftext|>` precedes each document. Documents run across shard ends. A split is the
concatenation of its shards in index order, read as an endless stream. Without dataset.json, as for
shards from elsewhere, the tokeniser is gpt2's.

A split may have a mask, the split `{split}mask` of as many "tokens": 1 for each token that counts
in the loss, 0 for the others. Batches set the targets of the others to IGNORED.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from data.shards import (
    ShardWriter,
    allow_open_files,
    check_vocabulary,
    open_shard,
    release_pages,
)
from data.tokenizer import FILE_NAME, FileTokenizer, Tokenizer, file_identity, get_tokenizer
from infra.cli import UserError
from infra.files import check_shape, fingerprint, read_json, read_text, write_atomically, write_json

NUMBER = re.compile(r"(?<=_)\d{6}(?=\.bin$)")  # of a shard, at the end of its name
INFO_NAME = "dataset.json"
UNFINISHED_NAME = "dataset.unfinished"
IGNORED = -100  # a target that counts in no loss
HOW_TO_PREPARE = (
    "prepare it with python -m data.prepare --out, or data.python_source --out (no download)"
)


class Split(BaseModel, strict=True):
    tokens: int
    documents: int
    shards: int
    sha256: str  # of the split's tokens as little-endian uint16, so independent of the shard size


class ShardFile(BaseModel, strict=True):
    file: str
    tokens: int
    sha256: str  # of the file


class DatasetInfo(BaseModel, strict=True, extra="allow"):
    """The content of dataset.json. A script may add keys of its own."""

    format_version: Literal[1]
    dataset: str
    tokenizer: str
    vocab_size: int = Field(ge=1, le=65536)
    eot: int | None = None  # end-of-text; None: the last token
    source: str
    splits: dict[str, Split]
    shards: list[ShardFile]


def made_before(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The content of dataset.json if the folder has the finished dataset of these settings.

    Raises UserError: the folder is finished with other settings, or holds another dataset's shards.
    """
    refuse_others(folder, f"{name}_")
    if not (folder / INFO_NAME).exists():
        return None
    try:
        TokenStream(folder, "val")
        train = TokenStream(folder, "train")
        _ = train.tokenizer_file  # lost or changed
    except UserError as e:
        print(f"not finished: {e}")
        return None
    if not settings.items() <= train.info.get("settings", {}).items():
        expected = "choose another --out, or delete it to make it again"
        raise UserError(f"{folder}: holds a finished dataset of other settings: {expected}")
    print(f"{folder}: finished before; nothing to do (delete it to make it again)")
    return train.info


def refuse_others(folder: Path, own: str | tuple[str, ...]) -> None:
    """Raises UserError: the folder holds shards whose names do not begin with `own`."""
    for path in folder.glob("*.bin"):
        if not path.name.startswith(own):
            raise UserError(f"{folder}: holds {path.name}, another dataset's: choose another --out")


def begin_dataset(folder: Path, name: str, keep: Collection[str] = ()) -> None:
    """Create the folder, mark it unfinished, and remove the dataset's shards, but for the files to
    keep.

    Without the mark, shards of an interrupted run, having no dataset.json, would pass for gpt2's.
    Raises UserError: the folder cannot be created or written, or holds another dataset's shards.
    """
    refuse_others(folder, f"{name}_")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED_NAME).write_text(
            "The script that prepares this folder has not finished.\n"
        )
        (folder / INFO_NAME).unlink(missing_ok=True)
        for path in (*folder.glob(f"{name}_*.bin"), *folder.glob(f".{name}_*.bin.tmp")):
            if path.name not in keep:
                path.unlink()
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}") from None


def write_dataset(
    folder: Path,
    info: dict[str, Any],
    splits: Mapping[str, Sequence[np.ndarray]],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Write a dataset of one shard a split from the tokens of its documents, each of which gets its
    `<|endoftext|>`; returns dataset.json's content.

    info: the keys of dataset.json but those of the tokeniser, the splits and the shards.
    """
    begin_dataset(folder, info["dataset"])
    whole_info = info | {"splits": {}, "shards": []}
    for split, members in splits.items():
        sequences = (np.append(tokenizer.eot_token, tokens) for tokens in members)
        write_split(folder, whole_info, split, sequences, len(members))
    return finish_dataset(folder, whole_info, tokenizer)


def write_split(
    folder: Path,
    info: dict[str, Any],
    split: str,
    sequences: Iterable[Sequence[int] | np.ndarray],
    n_documents: int,
    shard_size: int = 10**8,
) -> None:
    """Write a split's shards after those in `info`, the content of dataset.json, and enter them
    there.
    """
    writer = ShardWriter(folder, info["dataset"], split, shard_size, index=len(info["shards"]))
    for tokens in sequences:
        writer.add(tokens)
    writer.flush()
    info["shards"] += writer.files
    info["splits"][split] = writer.counts(n_documents)


def finish_dataset(
    folder: Path, info: dict[str, Any], tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Write dataset.json and remove the mark of `begin_dataset`: the last step. Returns what it
    wrote.

    The tokenizer, if it is given, is entered in dataset.json; one from a file is copied into the
    folder.
    """
    path = folder / INFO_NAME
    whole_info = {"format_version": 1} | info
    if tokenizer:
        names = {
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.n_vocab,
            "eot": tokenizer.eot_token,
        }
        whole_info |= names
    if isinstance(tokenizer, FileTokenizer):
        write_atomically(folder / FILE_NAME, tokenizer.content.encode())
    write_json(check_shape(whole_info, DatasetInfo, path), path)
    (folder / UNFINISHED_NAME).unlink(missing_ok=True)
    return whole_info


def dataset_info(folder: str | Path) -> dict[str, Any]:
    """The content of dataset.json, which has the keys of `DatasetInfo` and those of the preparing
    script.

    Without the file, as for shards from elsewhere, tokenizer and vocab_size of gpt2.
    Raises UserError: no such folder, its preparation did not finish, or dataset.json is damaged.
    """
    folder = Path(folder)
    path = folder / INFO_NAME
    if not folder.is_dir():
        raise UserError(f"{folder}: no such data folder; {HOW_TO_PREPARE}")
    if (folder / UNFINISHED_NAME).exists():
        raise UserError(
            f"{folder}: its preparation did not finish; run the script that prepares it again"
        )
    for partial in folder.glob(".cache/huggingface/download/**/*.incomplete"):
        expected = "run hf download again; if it finds nothing to do, delete this file"
        raise UserError(f"{partial}: a download that did not finish: {expected}")
    if not path.exists():
        for mask in folder.glob("*_*mask_[0-9]*.bin"):  # means nothing without it
            raise UserError(
                f"{path}: no such file; expected the one that was made with {mask.name}"
            )
        return {"tokenizer": "gpt2", "vocab_size": 50257}
    return read_json(path, DatasetInfo)


def print_summary(info: dict[str, Any], folder: Path, config: str = "") -> None:
    """The end of a preparation: the source, the vocabulary, a line per split of dataset.json's
    content, the folder, and the command that trains on it.

    config: for that command; "": one by the number of tokens.
    """
    vocabulary = info["vocab_size"]
    print(f"source   {shorten(info['source'], 100)}")
    print(f"tokens   {info['tokenizer']}, a vocabulary of {vocabulary:,}")
    for split, counts in info["splits"].items():
        size = f"{counts['tokens']:,} tokens, {counts['documents']:,} documents"
        print(f"{split:8} {size}, {counts['shards']} shards, sha256 {counts['sha256']}")
    print(f"folder   {folder}")
    if "train" in info["splits"]:
        is_small = info["splits"]["train"]["tokens"] < 10**8
        config = config or f"configs/{'demo_' if is_small else ''}softmax.toml"
        padded = vocabulary if vocabulary < 1024 else -(-vocabulary // 128) * 128
        if is_small and vocabulary > 2**14:
            print("note     a vocabulary this large slows a small model: try --tokenizer bytes")
        options = f"--data.dir {quote(str(folder))} --model.vocab-size {padded}"
        print(f"next     python train.py {config} {options}")


class TokenStream:
    """All shards of a split as one stream of n_tokens that starts over at its end.

    paths, shards: the files and their tokens, (n,) uint16, mapped. eot: before each document.
    mask: the stream of its mask, or None.
    Raises UserError: no folder; no shards; a missing, foreign or damaged one; a mask of another
    length.
    OSError: a shard cannot be read.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder)
        self.split = split
        self.info = dataset_info(folder)
        self.vocab_size: int = self.info["vocab_size"]
        eot = self.info.get("eot")
        self.eot: int = self.vocab_size - 1 if eot is None else eot
        self.paths = self._find_shards()
        allow_open_files()
        self.shards = [open_shard(path, self.vocab_size) for path in self.paths]
        # Python ints: as numpy int32 their sum overflows at 103 shards of 10^8.
        self._starts = list(accumulate(map(len, self.shards), initial=0))
        self.n_tokens = self._starts[-1]
        for path, shard in zip(self.paths, self.shards, strict=True):
            n_listed = self.listed.get(path.name, len(shard))
            if len(shard) != n_listed:
                raise UserError(f"{path}: {len(shard)} tokens: {INFO_NAME} lists {n_listed}")
        mask = f"{split}mask"
        self.mask = TokenStream(folder, mask) if mask in self.info.get("splits", {}) else None
        if self.mask and self.mask.n_tokens != self.n_tokens:
            n_mask = self.mask.n_tokens
            raise UserError(
                f"{folder}: {mask} has {n_mask} tokens: expected {self.n_tokens}, as {split}"
            )

    @property
    def is_fineweb(self) -> bool:
        """Its shards are FineWeb's in GPT-2's vocabulary, by name."""
        return self.paths[0].name.startswith("fineweb_") and self.info["tokenizer"] == "gpt2"

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as (length,) int64, wrapping around the stream's end."""
        tokens = np.empty(length, np.int64)
        n_read = 0
        while n_read < length:
            position = (start + n_read) % self.n_tokens
            i = bisect_right(self._starts, position) - 1
            offset = position - self._starts[i]
            part = self.shards[i][offset : offset + length - n_read]
            check_vocabulary(self.paths[i], part, self.vocab_size)
            tokens[n_read : n_read + len(part)] = part
            release_pages(self.shards[i])
            n_read += len(part)
        return tokens

    def document_starts(self) -> np.ndarray:
        """The place of each `<|endoftext|>`, which precedes a document: (documents,) int64."""
        starts = [np.empty(0, np.int64)]
        for begin, shard in zip(self._starts, self.shards, strict=False):
            starts.append(begin + np.flatnonzero(shard == self.eot))
            release_pages(shard)
        return np.concatenate(starts)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return get_tokenizer(self.info["tokenizer"], self.tokenizer_file)

    def n_bytes(self, start: int, length: int) -> int:
        """Of the text of tokens [start, start + length)."""
        return len(self.tokenizer.decode_bytes(self.read(start, length).tolist()))

    @property
    def fingerprint(self) -> str:
        """Identifies the stream: its sha256 from dataset.json, else one of its shards'
        fingerprints.
        """
        splits = self.info.get("splits", {})
        if self.split in splits:
            return f"sha256 {splits[self.split]['sha256']}"
        return f"sha256 {sha256(''.join(map(fingerprint, self.paths)).encode()).hexdigest()}"

    @property
    def tokenizer_file(self) -> str:
        """The content of tokenizer.json if the tokens are its, else "". Raises UserError: lost or
        changed.
        """
        name = self.info["tokenizer"]
        if not name.startswith("tokenizer-"):
            return ""
        content = read_text(self.folder / FILE_NAME)
        if file_identity(content) != name:
            raise UserError(
                f"{self.folder / FILE_NAME}: {file_identity(content)}: the tokens are of {name}"
            )
        return content

    def check_model(self, vocab_size: int) -> None:
        """Raises UserError unless a model's `vocab_size` is the stream's, or that with padding."""
        most = self.vocab_size + 1023
        if not self.vocab_size <= vocab_size <= most:
            reason = f"{self.folder} was tokenised with {self.vocab_size} tokens ({self.info['tokenizer']})"
            expected = f"expected {self.vocab_size} to {most}"
            raise UserError(f"model.vocab_size = {vocab_size}: {reason}; {expected}")

    @property
    def listed(self) -> dict[str, int]:
        """The split's shards in dataset.json, with their tokens; none without the file."""
        shards = {shard["file"]: shard["tokens"] for shard in self.info.get("shards", ())}
        return {name: n for name, n in shards.items() if f"_{self.split}_" in name}

    def _find_shards(self) -> list[Path]:
        """Those that dataset.json lists, or else by their names."""
        if "shards" not in self.info:
            return find_shards(self.folder, self.split)
        if not self.listed:
            raise UserError(f"{self.folder}: {INFO_NAME} has no split {self.split!r}")
        for path in self.folder.glob(f"*_{self.split}_*.bin"):
            if path.name not in self.listed:
                raise UserError(f"{path}: {INFO_NAME} does not list it")
        return [self.folder / name for name in self.listed]


def find_shards(folder: Path, split: str) -> list[Path]:
    """The split's shards in index order. Raises UserError for none, a gap, or a mix of datasets."""
    paths = sorted(folder.glob(f"*_{split}_*.bin")) or sorted(folder.glob(f"*_{split}.bin"))
    if not paths:
        present = "".join(f", though there is {path.name}" for path in [*folder.glob("*.bin")][:1])
        raise UserError(f"{folder}: no shards named *_{split}_*.bin{present}; {HOW_TO_PREPARE}")
    datasets = sorted({path.name.rpartition(f"_{split}")[0] for path in paths})
    if len(datasets) > 1:
        raise UserError(f"{folder}: shards of {', '.join(datasets)}: expected one dataset a folder")
    first = NUMBER.search(paths[0].name)
    if first is None and len(paths) == 1:  # llm.c's TinyStories_train.bin
        return paths
    number = int(first[0]) if first else 0
    for i, path in enumerate(paths, number):
        expected = f"{datasets[0]}_{split}_{i:06d}.bin"
        if path.name != expected:
            raise UserError(f"{folder / expected}: missing, though there is {path.name}")
    # What precedes is of other splits. Number 0, of val, may have been left out of a download.
    if number > 1 and not [*folder.glob(f"{datasets[0]}_*_{number - 1:06d}.bin")]:
        expected = f"{datasets[0]}_{split}_{number - 1:06d}.bin"
        raise UserError(f"{folder / expected}: missing, though there is {paths[0].name}")
    return paths
