"""The token shard, llm.c's file format: writing, opening and checking one file at a time.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the
tokens as little-endian uint16. Shards are named {dataset}_{split}_{index:06d}.bin; the index counts over all
splits of a dataset. data/dataset.py reads a folder of them as one stream.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

import numpy as np

from infra.cli import UserError
from infra.files import write_atomically

HEADER_BYTES = 1024  # 256 int32
MAGIC = 20240520
VERSION = 1
TOKEN = np.dtype("<u2")
MAX_TOKENS = 2**31 - 1  # per shard: the header's count is an int32
CHUNK_TOKENS = 2**21  # read at a time
SHARD_NAME = re.compile(r"(?P<dataset>.+)_(?P<split>[^_]+)_(?P<index>[0-9]{6})\.bin")


# ---------------------------------------------------------------- writing


class ShardWriter:
    """Cuts a stream of tokens into shards `{dataset}_{split}_{index:06d}.bin` of `shard_size` tokens.

    A context manager: leaving it without an exception writes the last, shorter shard. Memory holds one shard.

    Attributes:
        files: the finished shards, as dataset.json lists them.
        n_tokens: tokens of the stream so far.
        room: tokens until the current shard is full.
        index: index of the current shard.
    """

    def __init__(self, folder: Path, dataset: str, split: str, shard_size: int, index: int) -> None:
        self.folder, self.dataset, self.split = folder, dataset, split
        self.shard_size, self.index = shard_size, index
        self.n_tokens, self.room = 0, shard_size
        self.files: list[dict[str, Any]] = []
        self._parts: list[np.ndarray] = []  # of the current shard
        self._digest = hashlib.sha256()  # of the stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self.flush()

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens (n,). Raises UserError: a token does not fit uint16; a failed write."""
        rest = _as_uint16(tokens, self._path())
        while len(rest):
            part, rest = rest[: self.room], rest[self.room :]
            self._digest.update(part.data)
            self._parts.append(part)
            self.n_tokens += len(part)
            self.room -= len(part)
            if not self.room:
                self.flush()

    def flush(self) -> None:
        """Write the current shard, if it has tokens, whether or not it is full."""
        n_tokens = self.shard_size - self.room
        if n_tokens:
            sha256 = _write(self._path(), n_tokens, self._parts)
            self.files.append({"file": self._path().name, "tokens": n_tokens, "sha256": sha256})
            self._parts, self.room = [], self.shard_size
            self.index += 1

    def adopt(self, entry: dict[str, Any]) -> None:
        """Continue after a shard that an interrupted run has finished, given as `files` lists it.

        Raises:
            UserError: naming the shard, if it is not, byte for byte, what was written.
        """
        path, stream, n_tokens = self._path(), self._digest.copy(), 0
        with open_tokens(path) as (header, chunks):
            digest = hashlib.sha256(header)
            for chunk in chunks:
                digest.update(chunk.data)
                stream.update(chunk.data)
                n_tokens += len(chunk)
        if (path.name, n_tokens, digest.hexdigest()) != (entry["file"], entry["tokens"], entry["sha256"]):
            raise UserError(
                f"{path}: {n_tokens} tokens, sha256 {digest.hexdigest()[:12]}...: expected {entry['file']}, "
                f"{entry['tokens']} tokens, sha256 {entry['sha256'][:12]}..."
            )
        self.files.append({key: entry[key] for key in ("file", "tokens", "sha256")})
        self._digest = stream
        self.n_tokens += n_tokens
        self.index += 1

    def counts(self, documents: int) -> dict[str, Any]:
        """The split's entry in dataset.json. Its sha256 does not depend on the shard size."""
        counts = {"tokens": self.n_tokens, "documents": documents, "shards": len(self.files)}
        return counts | {"sha256": self._digest.hexdigest()}

    def _path(self) -> Path:
        return self.folder / f"{self.dataset}_{self.split}_{self.index:06d}.bin"


def _write(path: Path, n_tokens: int, parts: Sequence[np.ndarray]) -> str:
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, n_tokens
    digest = hashlib.sha256(header.data)
    for part in parts:
        digest.update(part.data)
    write_atomically(path, header.tobytes(), *(part.data for part in parts))
    return digest.hexdigest()


def _as_uint16(tokens: Sequence[int] | np.ndarray, path: Path) -> np.ndarray:
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, TOKEN)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{path}: tokens of shape {array.shape}, {array.dtype}: expected (n,) integers")
    for token in (int(array.min()), int(array.max())):
        if not 0 <= token <= 65535:
            raise UserError(f"{path}: token {token} does not fit uint16: expected 0 to 65535")
    return np.array(array, TOKEN)  # a copy: ShardWriter keeps it


# ---------------------------------------------------------------- reading


def open_shard(path: Path, vocab_size: int) -> np.memmap:
    """Map a shard's tokens, (n,) little-endian uint16, after checking the file.

    Checked are magic, version, the exact size, and that tokens are below `vocab_size`: all tokens of a small
    shard, else 256 spread evenly from the first to the last.

    Raises:
        UserError: one line naming the file, what was found and what was expected.
    """
    with open_tokens(path):
        tokens = np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES)
    n_tokens = len(tokens)
    where = np.arange(n_tokens) if n_tokens <= 65536 else np.linspace(0, n_tokens - 1, 256).astype(np.int64)
    bad = where[tokens[where] >= vocab_size]
    if len(bad):
        raise UserError(
            f"{path}: token {tokens[bad[0]]} at position {bad[0]}: expected tokens below the vocabulary "
            f"size {vocab_size}"
        )
    release_pages(tokens)
    return tokens


@contextmanager
def open_tokens(path: Path) -> Iterator[tuple[bytes, Iterator[np.ndarray]]]:
    """A shard's checked header (1024 bytes) and an iterator over chunks of its tokens.

    Each chunk, (n,) uint16, is a view of one buffer that the next chunk overwrites, so memory stays flat.

    Raises:
        UserError: naming the file, if it is not a whole shard or cannot be read.
    """
    try:
        with open(path, "rb") as f:
            header = f.read(HEADER_BYTES)
            check_header(path, header, os.fstat(f.fileno()).st_size)
            yield header, _chunks(f)
    except OSError as e:
        raise UserError(f"{path}: cannot be read as a shard: {e.strerror}") from None


def _chunks(f: BufferedReader) -> Iterator[np.ndarray]:
    buffer = np.empty(CHUNK_TOKENS, TOKEN)
    while (n_bytes := f.readinto(buffer.data)) > 1:
        yield buffer[: n_bytes // 2]


def check_header(path: Path, header: bytes, size: int) -> None:
    """Raises UserError, naming what was found and expected, unless the header agrees with the file's size."""
    if len(header) < HEADER_BYTES:
        what = f"{size} bytes, too short" if size else "empty file"
        raise UserError(f"{path}: {what}: expected a {HEADER_BYTES}-byte header and tokens")
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


def release_pages(shard: np.ndarray) -> None:
    """Unmap a shard's pages after a read; they stay in the page cache.

    Otherwise every page ever read counts as resident memory of this process: 20 GB a rank after an epoch of
    FineWeb-10B, for which batch schedulers kill jobs.
    """
    if isinstance(shard.base, mmap.mmap):
        shard.base.madvise(mmap.MADV_DONTNEED)
