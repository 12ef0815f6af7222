"""Token shards: the file format, writing, and reading as one stream of batches.

    python data/shards.py info data/python_bytes      # what is in a dataset, and how long its documents are
    python data/shards.py verify data/python_bytes    # read every byte, compare with dataset.json

A prepared dataset is a folder, for example `data/fineweb10B`:

    fineweb_val_000000.bin      {dataset}_{split}_{index:06d}.bin, the index counts over both splits
    fineweb_train_000001.bin
    ...
    dataset.json                tokeniser, vocabulary, source, counts, sha256 (see `dataset_info`)

A shard is llm.c's: a header of 256 little-endian int32 (magic 20240520, version 1, token count, zeros),
then the tokens as little-endian uint16. `<|endoftext|>` stands before each document; documents run across
shard ends. A split is the concatenation of its shards in index order, read as one endless stream.

A split may have a mask, the split `{split}mask` of as many "tokens": 1 for each token that counts in the loss
and 0 for the others (data/squad.py). Batches name the others -100.

A batch is a pure function of its arguments (`train_batch`, `val_batch`): there is no loader state to
save, and any number of processes reads the same global batch, each its own rows.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from infra.cli import UserError, run_main  # noqa: E402
from infra.files import atomic_file, write_atomically  # noqa: E402

HEADER_BYTES = 1024  # 256 int32
MAGIC = 20240520
VERSION = 1
TOKEN = np.dtype("<u2")
MAX_TOKENS = 2**31 - 1  # of one shard: the header's count is an int32
INFO_NAME = "dataset.json"
INFO_VERSION = 1
UNFINISHED_NAME = "dataset.unfinished"
MANIFEST_NAME = "manifest.jsonl"  # data/fineweb.py: which rows of the input each shard ends at
IGNORED = -100  # a target that counts in no loss
HOW_TO_PREPARE = (
    "prepare data with `python data/fineweb.py`, or with `python data/python_source.py` for a small corpus "
    "(see README.md)"
)
FEISTEL_ROUNDS = 8
PERMUTED_AT_ONCE = 1024  # windows: a Feistel network on a few at a time is all overhead
SHARD_NAME = re.compile(r"(?P<dataset>.+)_(?P<split>[^_]+)_(?P<index>[0-9]{6})\.bin")


# ---------------------------------------------------------------- writing


def write_shard(path: str | Path, tokens: Sequence[int] | np.ndarray) -> str:
    """Write a shard that is either complete under its name or not there at all.

    Args:
        path: the file to make or replace; its folder exists.
        tokens: (n,) integers, 1 <= n < 2**31, each in 0..65535.
    Returns:
        The sha256 of the file, in hex.
    Raises:
        UserError: naming the path, for a token that is no uint16, for no tokens, for a failed write.
    """
    path = Path(path)
    array = _as_uint16(tokens, path)
    if not 1 <= len(array) <= MAX_TOKENS:
        raise UserError(f"{path}: {len(array)} tokens: expected 1 to {MAX_TOKENS} in a shard")
    header = _header(len(array))
    digest = hashlib.sha256(header)
    digest.update(array.data)
    write_atomically(path, header, array.data)
    return digest.hexdigest()


class ShardWriter:
    """Cuts a stream of tokens into shards `{dataset}_{split}_{index:06d}.bin` of `shard_size` tokens.

    A context manager: `add()` documents; its end writes the last, shorter shard. A shard is written as its
    tokens come, so that memory stays flat, and appears under its name when it is full; after an exception
    the one in hand is thrown away.

    Attributes:
        files: the shards written, as dataset.json lists them.
        n_tokens: of the stream so far.
        room: tokens until the shard in hand is full.
        index: of the shard in hand.
    """

    def __init__(self, folder: str | Path, dataset: str, split: str, shard_size: int, index: int) -> None:
        self.folder, self.dataset, self.split = Path(folder), dataset, split
        self.shard_size, self.index = shard_size, index
        self.n_tokens, self.room = 0, shard_size
        self.files: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()  # of the stream
        self._file_digest = hashlib.sha256()  # of the shard in hand
        self._file: BinaryIO | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self.close()
        self._opened.__exit__(*exception)

    def close(self) -> None:
        """Write the last, shorter shard, if there is one."""
        if self._file is not None:
            self._finish_shard()

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens (n,). Raises UserError as `write_shard` does."""
        rest = _as_uint16(tokens, self._path())
        self._digest.update(rest.data)
        self.n_tokens += len(rest)
        while len(rest):
            part, rest = rest[: self.room], rest[self.room :]
            self._write(part)
            if not self.room:
                self._finish_shard()

    def adopt(self, entry: dict[str, Any]) -> None:
        """Go on after a shard that an interrupted run has written, given as `files` lists it.

        Raises:
            UserError: naming the shard, if it is not, byte for byte, what was written.
        """
        path = self._path()
        tokens = open_shard(path, 65536)
        with open(path, "rb") as f:
            digest, stream = hashlib.sha256(f.read(HEADER_BYTES)), self._digest.copy()
        for start in range(0, len(tokens), 2**23):
            digest.update(tokens[start : start + 2**23].data)
            stream.update(tokens[start : start + 2**23].data)
            _forget(tokens)
        if (path.name, len(tokens), digest.hexdigest()) != (entry["file"], entry["tokens"], entry["sha256"]):
            raise UserError(f"{path}: not the {entry['tokens']} tokens of sha256 {entry['sha256'][:8]}...")
        self.files.append({key: entry[key] for key in ("file", "tokens", "sha256")})
        self._digest = stream
        self.n_tokens += len(tokens)
        self.index += 1

    def sha256(self) -> str:
        """The sha256 in hex of the stream's tokens as little-endian uint16, whatever the shard size."""
        return self._digest.hexdigest()

    def counts(self, documents: int) -> dict[str, Any]:
        """What dataset.json says of the stream as a split, which `documents` documents begin in."""
        return {
            "tokens": self.n_tokens,
            "documents": documents,
            "shards": len(self.files),
            "sha256": self.sha256(),
        }

    def _path(self) -> Path:
        return self.folder / f"{self.dataset}_{self.split}_{self.index:06d}.bin"

    def _write(self, tokens: np.ndarray) -> None:
        try:
            if self._file is None:
                self._file = self._opened.enter_context(atomic_file(self._path()))
                header = _header(self.shard_size)
                self._file_digest = hashlib.sha256(header)
                self._file.write(header)
            self._file.write(tokens.data)
        except OSError:
            self._opened.__exit__(*sys.exc_info())  # atomic_file cleans up and names the shard
        self._file_digest.update(tokens.data)
        self.room -= len(tokens)

    def _finish_shard(self) -> None:
        path, n_tokens = self._path(), self.shard_size - self.room
        assert self._file is not None
        try:
            if self.room:  # the last shard: now its size is known
                self._file.seek(0)
                self._file.write(_header(n_tokens))
                self._file.flush()
                with open(self._file.name, "rb") as f:
                    self._file_digest = hashlib.file_digest(f, "sha256")
        except OSError:
            self._opened.__exit__(*sys.exc_info())
        self._opened.close()
        self.files.append({"file": path.name, "tokens": n_tokens, "sha256": self._file_digest.hexdigest()})
        self._file, self.room = None, self.shard_size
        self.index += 1


def begin_dataset(folder: str | Path) -> None:
    """Make the folder and mark it unfinished, so that nobody trains on half a dataset.

    Without the mark, shards left by an interrupted run and read without their dataset.json would pass
    for a gpt2 download.

    Raises:
        UserError: if the folder cannot be made or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNFINISHED_NAME).write_text("The script that prepares this folder has not finished.\n")
        (folder / INFO_NAME).unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}") from None


def finish_dataset(folder: str | Path, info: dict[str, Any]) -> None:
    """Write dataset.json, last of all, and take the mark of `begin_dataset` away."""
    info = _check_info({"format_version": INFO_VERSION} | info, Path(folder) / INFO_NAME)
    text = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    write_atomically(Path(folder) / INFO_NAME, text.encode())
    (Path(folder) / UNFINISHED_NAME).unlink(missing_ok=True)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Make the folder and hold it: two processes that write the same shards would spoil both.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}") from None
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the system, however we end
        except BlockingIOError:
            raise UserError(f"{folder}: another process is preparing it") from None
        yield
    finally:
        os.close(held)


def progress_bar(what: str, total: int, unit: str, initial: int = 0, leave: bool = True) -> tqdm:
    """A tqdm bar; where nobody watches, in a log file, it speaks once a minute."""
    watched = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=initial,
        desc=what,
        unit=unit,
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if watched else 60,
        delay=0 if watched else 60,
        leave=leave,
    )  # fmt: skip


def _header(n_tokens: int) -> bytes:
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, n_tokens
    return header.tobytes()


def _as_uint16(tokens: Sequence[int] | np.ndarray, path: Path) -> np.ndarray:
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, TOKEN)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{path}: tokens of shape {array.shape}, {array.dtype}: expected (n,) integers")
    for token in (int(array.min()), int(array.max())):
        if not 0 <= token <= 65535:
            raise UserError(f"{path}: token {token} does not fit uint16: expected 0 to 65535")
    return np.ascontiguousarray(array, TOKEN)


# ---------------------------------------------------------------- opening


def open_shard(path: str | Path, vocab_size: int) -> np.memmap:
    """Map a shard's tokens, (n,) little-endian uint16, after checking the file.

    Magic, version and the exact size are checked, and that tokens are below `vocab_size`: all of them in
    a small shard, else 256 spread evenly from the first to the last.

    Raises:
        UserError: one line naming the file, what was found and what was expected.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as f:
            header = f.read(HEADER_BYTES)
    except OSError as e:
        raise UserError(f"{path}: cannot be read as a shard: {e.strerror}") from None
    n_tokens = check_header(path, header, size)
    try:
        tokens = np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES, shape=(n_tokens,))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be mapped into memory: {e}") from None

    where = np.arange(n_tokens) if n_tokens <= 65536 else np.linspace(0, n_tokens - 1, 256).astype(np.int64)
    bad = where[tokens[where] >= vocab_size]
    if len(bad):
        raise UserError(
            f"{path}: token {tokens[bad[0]]} at position {bad[0]}: expected tokens below the vocabulary "
            f"size {vocab_size}"
        )
    _forget(tokens)  # the kernel maps whole neighbourhoods of what was looked at
    return tokens


def check_header(path: str | Path, header: bytes, size: int) -> int:
    """The shard's token count, once the header and the file's size agree."""
    if size == 0:
        raise UserError(f"{path}: empty file: expected a {HEADER_BYTES}-byte header and tokens")
    if len(header) < HEADER_BYTES:
        raise UserError(f"{path}: {len(header)} bytes, too short: expected a {HEADER_BYTES}-byte header")
    magic, version, n_tokens = (int(n) for n in np.frombuffer(header, "<i4", count=3))
    if magic != MAGIC:
        raise UserError(f"{path}: magic number {magic}: expected {MAGIC}, an llm.c token shard")
    if version != VERSION:
        raise UserError(f"{path}: shard version {version}: expected {VERSION}")
    if n_tokens < 1:
        raise UserError(f"{path}: the header counts {n_tokens} tokens: expected at least 1")
    expected = HEADER_BYTES + 2 * n_tokens
    if size != expected:
        damage = "truncated" if size < expected else "trailing bytes"
        raise UserError(f"{path}: {damage}: {size} bytes: expected {expected} for {n_tokens} tokens")
    return n_tokens


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
    """What dataset.json holds. A script may add keys of its own."""

    format_version: Literal[1]
    dataset: str
    tokenizer: str
    vocab_size: int = Field(ge=1, le=65536)
    source: str
    splits: dict[str, _Split]
    shards: list[_ShardFile]


def dataset_info(folder: str | Path) -> dict[str, Any]:
    """What dataset.json says, or that of a pretokenised download, which has none: gpt2.

    Keys: format_version, dataset, tokenizer, vocab_size, source, splits {name: {tokens, documents,
    shards, sha256}}, shards [{file, tokens, sha256}] and what the preparing script adds. Without the file
    just tokenizer and vocab_size.

    Raises:
        UserError: no such folder, its preparation did not finish, or a dataset.json that is damaged.
    """
    folder = data_folder(folder)
    if (folder / UNFINISHED_NAME).exists():
        raise UserError(f"{folder}: its preparation did not finish; run the script that prepares it again")
    return read_info(folder)


def data_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        what = "a file: expected a data folder" if folder.exists() else "no such data folder"
        raise UserError(f"{folder}: {what}; {HOW_TO_PREPARE}")
    return folder


def read_info(folder: Path) -> dict[str, Any]:
    path = folder / INFO_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"tokenizer": "gpt2", "vocab_size": 50257}
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON: {e}") from None
    return _check_info(values, path)


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


class TokenStream:
    """All shards of a split as one stream that starts over at its end.

    Attributes:
        folder, split: where it was read from.
        info: what `dataset_info` says; vocab_size is taken from there.
        n_tokens, n_shards: length of the stream, and into how many files it is cut.
        mask: the stream of its mask, None without.
    Raises:
        UserError: one line, for a missing folder, no shards, a missing or foreign shard, a damaged one.
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
        self.n_tokens, self.n_shards = self._starts[-1], len(self._shards)
        if "shards" in self.info:
            self._check_listed(paths)
        has_mask = f"{split}mask" in self.info.get("splits", {})
        self.mask = TokenStream(folder, f"{split}mask") if has_mask else None

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as (length,) int64, wrapping around the stream's end."""
        if start < 0 or length < 0:
            raise ValueError(f"start = {start}, length = {length}: expected both >= 0")
        out = np.empty(length, dtype=np.int64)
        position, filled = start % self.n_tokens, 0
        while filled < length:
            i = bisect.bisect_right(self._starts, position) - 1
            offset = position - self._starts[i]
            part = self._shards[i][offset : offset + length - filled]
            out[filled : filled + len(part)] = part
            _forget(self._shards[i])
            filled += len(part)
            position = (position + len(part)) % self.n_tokens
        return out

    @property
    def fingerprint(self) -> str:
        """Tells this token stream from others: its sha256 from dataset.json, else its length."""
        split = self.info.get("splits", {}).get(self.split)
        return f"sha256 {split['sha256']}" if split else f"{self.n_tokens} tokens"

    def check_model(self, vocab_size: int) -> None:
        """
        Raises:
            UserError: the stream has tokens that a model with so many does not know.
        """
        if self.vocab_size > vocab_size:
            raise UserError(
                f"model.vocab_size = {vocab_size}: {self.folder} was tokenised with {self.vocab_size} "
                "tokens; expected at least that many"
            )

    def _check_listed(self, paths: list[Path]) -> None:
        """The shards are those in dataset.json: a lost last shard would silently change the stream."""
        found = {path.name: len(shard) for path, shard in zip(paths, self._shards, strict=True)}
        every = {entry["file"]: entry["tokens"] for entry in self.info["shards"]}
        listed = {name: n for name, n in every.items() if name_parts(Path(name), self.split)}
        for name in sorted(found.keys() | listed.keys()):
            if name not in found:
                raise UserError(f"{self.folder / name}: missing: {INFO_NAME} lists it")
            if name not in listed:
                raise UserError(f"{self.folder / name}: not listed in {INFO_NAME}: expected no other shards")
            if found[name] != listed[name]:
                raise UserError(
                    f"{self.folder / name}: {found[name]} tokens: {INFO_NAME} lists {listed[name]}"
                )


def name_parts(path: Path, split: str) -> tuple[str, int] | None:
    """(dataset, index) of a shard's name, None if it is of another split or no shard."""
    match = re.fullmatch(rf"(.+)_{re.escape(split)}_(\d{{6}})\.bin", path.name)
    return (match[1], int(match[2])) if match else None


def find_shards(folder: Path, split: str) -> list[Path]:
    """The split's shards in index order; refuses gaps and a mix of datasets."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        parts = name_parts(path, split)
        if parts is None:
            raise UserError(f"{path}: expected a name like fineweb_{split}_000001.bin")
        if parts[1] in found:
            raise UserError(f"{path}: has the index of {found[parts[1]].name}: expected one dataset a folder")
        found[parts[1]] = path
    if not found:
        raise UserError(f"{folder}: no shards named *_{split}_*.bin; {HOW_TO_PREPARE}")

    datasets = {path.name[: -len(f"_{split}_000000.bin")] for path in found.values()}
    if len(datasets) > 1:
        raise UserError(f"{folder}: shards of {', '.join(sorted(datasets))}: expected one dataset a folder")
    # Indices below the split's first belong to other splits; 0 (val) may have been left out of a download.
    name = datasets.pop()
    others = {int(path.stem[-6:]) for path in folder.glob(f"{name}_*_[0-9][0-9][0-9][0-9][0-9][0-9].bin")}
    first, last = min(found), max(found)
    for index in range(1, last):
        if index not in (others if index < first else found):
            missing = folder / f"{name}_{split}_{index:06d}.bin"
            raise UserError(f"{missing}: missing, though shard {last:06d} is there: expected no gaps")
    return [found[index] for index in sorted(found)]


def _forget(shard: np.ndarray) -> None:
    """Leave a shard's pages to the page cache alone, where the next reader finds them.

    Else every page ever read counts as resident memory of this process, and of each of its siblings: 20 GB
    a rank after an epoch of FineWeb-10B, for which batch schedulers kill jobs.
    """
    if isinstance(shard.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        shard.base.madvise(mmap.MADV_DONTNEED)


# ---------------------------------------------------------------- batches


def train_batch(
    stream: TokenStream,
    step: int,
    n_seq: int,
    seq_len: int,
    order: Literal["sequential", "shuffled"],
    seed: int,
    first: int = 0,
    count: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [first, first + count) of the `n_seq` sequences of a step: a pure function of the arguments.

    Sequence i of step s is window w = s * n_seq + i.
    sequential: it starts at token w * seq_len of the endless stream, so nothing is dropped at its end.
    shuffled: an epoch is the n_tokens // seq_len whole windows of the stream in a permutation of its own.

    Args:
        step: from 0.
        n_seq: sequences of the step over all processes.
        seq_len: T, in tokens.
        seed: of the permutations, >= 0; sequential order ignores it.
        first, count: the slice for one process and micro-batch; count None: all that follow.
    Returns:
        x, y, both (count, T) int64; y is x one token later in the stream, -100 where the mask is 0.
    Raises:
        UserError: the stream is too short for one window.
    """
    count = n_seq - first if count is None else count
    if step < 0 or seq_len < 1 or count < 0 or not 0 <= first <= first + count <= n_seq:
        raise ValueError(
            f"step {step}, seq_len {seq_len}, rows [{first}, {first + count}) of {n_seq}: out of range"
        )
    _check_length(stream, seq_len)
    window = step * n_seq + first
    if order == "sequential":
        return _read_windows(stream, window, count, seq_len)
    if order != "shuffled":
        raise ValueError(f"order = {order!r}: expected sequential or shuffled")

    x, y = np.empty((count, seq_len), np.int64), np.empty((count, seq_len), np.int64)
    for row, shuffled in enumerate(_shuffled_windows(window, count, stream.n_tokens // seq_len, seed)):
        x[row : row + 1], y[row : row + 1] = _read_windows(stream, shuffled, 1, seq_len)
    return x, y


def val_windows(stream: TokenStream, n_tokens: int, seq_len: int) -> int:
    """How many windows of `seq_len` predictions fit the first `n_tokens` predictions of the stream.

    Fewer if the stream is shorter: its first token is predicted by nothing. To score exactly the same
    tokens at several lengths, ask for an `n_tokens` that all of them divide and the stream holds.

    Raises:
        UserError: not even one window fits.
    """
    _check_length(stream, seq_len)
    if n_tokens < seq_len:
        raise UserError(f"{n_tokens} tokens of {stream.folder}: expected at least one window of {seq_len}")
    return min(n_tokens, stream.n_tokens - 1) // seq_len


def val_batch(stream: TokenStream, first: int, count: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows [first, first + count), consecutive from the stream's start.

    Returns:
        x, y, as `train_batch` does. The tokens, in order, are the same for every T.
    Raises:
        UserError: the stream is too short for one window.
    """
    _check_length(stream, seq_len)
    if first < 0 or count < 0 or (first + count) * seq_len >= stream.n_tokens:
        raise ValueError(f"windows [{first}, {first + count}) of {seq_len}: beyond {stream.n_tokens} tokens")
    return _read_windows(stream, first, count, seq_len)


def _check_length(stream: TokenStream, seq_len: int) -> None:
    if stream.n_tokens < seq_len + 1:
        raise UserError(
            f"{stream.folder}: the {stream.split} split has {stream.n_tokens} tokens: expected at least "
            f"{seq_len + 1} for one window of length {seq_len}"
        )


def _read_windows(stream: TokenStream, first: int, count: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive windows of the endless stream: x, y, both (count, T) int64, y masked."""
    tokens = stream.read(first * seq_len, count * seq_len + 1)
    x = tokens[:-1].reshape(-1, seq_len)  # (count * T + 1,) -> (count, T)
    y = tokens[1:].reshape(-1, seq_len).copy()  # a copy: else x and y would share memory
    if stream.mask is not None:
        counts = stream.mask.read(first * seq_len + 1, count * seq_len).reshape(-1, seq_len)
        y[counts == 0] = IGNORED
    return x, y


def _shuffled_windows(window: int, count: int, n_windows: int, seed: int) -> list[int]:
    """Which windows of the stream the shuffled order has at places [window, window + count)."""
    shuffled: list[int] = []
    while len(shuffled) < count:
        epoch, place = divmod(window + len(shuffled), n_windows)
        chunk, first = divmod(place, PERMUTED_AT_ONCE)
        permuted = _permuted_chunk(chunk, n_windows, seed, epoch)
        shuffled += permuted[first : first + count - len(shuffled)].tolist()
    return shuffled


@lru_cache(maxsize=4)  # of 8 KB each; the next micro-batches want the same chunk
def _permuted_chunk(chunk: int, n_windows: int, seed: int, epoch: int) -> np.ndarray:
    start = chunk * PERMUTED_AT_ONCE
    return _permute(np.arange(start, min(n_windows, start + PERMUTED_AT_ONCE)), n_windows, seed, epoch)


def _permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `index` (k,) under a permutation of range(n) that (seed, epoch) fixes, in O(k) memory.

    A Feistel network permutes the smallest 2^(2 * half) >= n; where that leads out of range(n), walk on
    along the cycle until it comes back: again a permutation, after less than 4 walks on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    # The seed last: it may fill two 32-bit words, and then (seed, epoch) would not be told apart.
    keys = np.random.SeedSequence([epoch, seed]).generate_state(FEISTEL_ROUNDS, np.uint64)
    image = index.astype(np.uint64)
    outside = np.arange(len(index))
    while len(outside):
        walked = _feistel(image[outside], half, keys)
        image[outside] = walked
        outside = outside[walked >= n]
    return image.astype(np.int64)


def _feistel(x: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        mixed = right ^ key  # splitmix64's finaliser; uint64 products wrap
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << shift) | right


if __name__ == "__main__":
    from data.check import main

    run_main(main)
