"""The token shard, llm.c's file format: one file written, opened and checked.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, token count, zeros) and
then the tokens as little-endian uint16. Its name is {dataset}_{split}_{index:06d}.bin. The index
counts over all splits of a dataset. data/dataset.py reads a folder of shards as one stream.
"""

import hashlib
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from infra.cli import UserError
from infra.files import write_atomically

HEADER_BYTES = 1024  # 256 int32
MAGIC = 20240520
VERSION = 1
TOKEN = np.dtype("<u2")
MAX_TOKENS = 2**31 - 1  # per shard: the header's count is an int32
N_SAMPLED = 256  # tokens that are compared with the vocabulary when a shard is opened


class ShardWriter:
    """Cuts a stream of tokens into shards `{dataset}_{split}_{index:06d}.bin` of `shard_size`
    tokens.

    `flush` writes the last, shorter shard. Memory holds one shard.
    """

    def __init__(self, folder: Path, dataset: str, split: str, shard_size: int, index: int) -> None:
        self.folder = folder
        self.dataset = dataset
        self.split = split
        self.shard_size = shard_size
        self.index = index  # of the current shard
        self.n_tokens = 0  # of the stream so far
        self.files: list[dict[str, Any]] = []  # the finished shards, as dataset.json lists them
        self._content = bytearray()  # of the current shard
        self._digest = hashlib.sha256()  # of the stream

    @property
    def room(self) -> int:
        """Tokens until the current shard is full."""
        return self.shard_size - len(self._content) // TOKEN.itemsize

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens (n,). Raises UserError: a token does not fit uint16; a failed write."""
        values = np.asarray(tokens)
        rest = np.ascontiguousarray(values, TOKEN)
        if (rest != values).any():
            expected = "expected tokens 0 to 65535"
            raise UserError(f"{self._path()}: {values.min()} to {values.max()}: {expected}")
        while len(rest):
            part = rest[: self.room]
            rest = rest[len(part) :]
            self._content += part.data
            self._digest.update(part.data)
            self.n_tokens += len(part)
            if not self.room:
                self.flush()

    def flush(self) -> None:
        """Write the current shard, if it has tokens, whether or not it is full."""
        n_tokens = len(self._content) // TOKEN.itemsize
        if not n_tokens:
            return
        path = self._path()
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = MAGIC, VERSION, n_tokens
        digest = hashlib.sha256(header.data)
        digest.update(self._content)
        write_atomically(path, header.data, memoryview(self._content))
        self.files.append({"file": path.name, "tokens": n_tokens, "sha256": digest.hexdigest()})
        self.index += 1
        self._content = bytearray()

    def adopt(self, recorded: dict[str, Any]) -> None:
        """Continue after a shard that an interrupted run has finished, given as `files` lists it.

        Raises UserError, naming the shard, unless it is the next one and byte for byte what was
        written.
        """
        path = self._path()
        tokens = open_shard(path)
        check_recorded(path, tokens, recorded)
        self._digest.update(tokens.data)
        release_pages(tokens)
        self.files.append({key: recorded[key] for key in ("file", "tokens", "sha256")})
        self.n_tokens += len(tokens)
        self.index += 1

    def counts(self, documents: int) -> dict[str, Any]:
        """The split's entry in dataset.json. Its sha256 does not depend on the shard size."""
        counts = {"tokens": self.n_tokens, "documents": documents, "shards": len(self.files)}
        return counts | {"sha256": self._digest.hexdigest()}

    def _path(self) -> Path:
        return self.folder / f"{self.dataset}_{self.split}_{self.index:06d}.bin"


def open_shard(path: Path, vocab_size: int = 65536) -> np.memmap:
    """Map a shard's tokens, (n,) little-endian uint16, after checking the file.

    Checked are magic, version, the exact size, and that 256 tokens, spread evenly from the first to
    the last, are below `vocab_size`, as any is below 65536. Raises UserError, naming the file, what
    it has and what was expected; OSError: it cannot be read, but may be whole.
    """
    if path.exists() and not path.is_file():  # a pipe would never end
        raise UserError(f"{path}: expected a file")
    try:
        with open(path, "rb") as f:
            header = f.read(HEADER_BYTES)
            size = os.fstat(f.fileno()).st_size
        magic, version, n_tokens = np.frombuffer(
            header.ljust(HEADER_BYTES, b"\0"), "<i4", 3
        ).tolist()
        if (magic, version) != (MAGIC, VERSION):
            raise UserError(
                f"{path}: magic number {magic}, version {version}: expected {MAGIC}, {VERSION}"
            )
        expected = HEADER_BYTES + TOKEN.itemsize * n_tokens
        if n_tokens < 1 or size != expected:
            raise UserError(
                f"{path}: {size} bytes: expected {expected} for the header's {n_tokens} tokens"
            )
        tokens = np.memmap(path, TOKEN, "r", HEADER_BYTES)
    except (FileNotFoundError, IsADirectoryError) as e:
        raise UserError(f"{path}: cannot be read as a shard: {e.strerror}") from None
    positions = np.linspace(0, len(tokens) - 1, min(len(tokens), N_SAMPLED)).astype(np.int64)
    check_vocabulary(path, tokens[positions], vocab_size)
    release_pages(tokens)
    return tokens


def allow_open_files() -> None:
    """Raise the limit of open files, often 1,024, to the highest allowed. A mapped shard is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, 10240) if hard == resource.RLIM_INFINITY else hard  # macOS allows 10,240
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_vocabulary(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises UserError unless the tokens, which are from this file, are below `vocab_size`."""
    if tokens.max() >= vocab_size:
        raise UserError(f"{path}: token {tokens.max()}: expected only tokens below {vocab_size}")


def check_recorded(path: Path, tokens: np.ndarray, recorded: dict[str, Any]) -> None:
    """Raises UserError unless the shard has the tokens and the sha256 that were recorded for it."""
    with open(path, "rb") as f:
        sha256 = hashlib.file_digest(f, "sha256").hexdigest()
    if (len(tokens), sha256) != (recorded["tokens"], recorded["sha256"]):
        expected = f"{recorded['tokens']} tokens, sha256 {recorded['sha256'][:12]}..."
        raise UserError(
            f"{path}: {len(tokens)} tokens, sha256 {sha256[:12]}...: expected {expected}"
        )


def release_pages(shard: np.ndarray) -> None:
    """Unmap a shard's pages after a read. They stay in the page cache.

    Otherwise every page ever read counts as resident memory of this process. After an epoch of
    FineWeb-10B that is 20 GB a rank, for which batch schedulers kill jobs.
    """
    if isinstance(shard.base, mmap.mmap):
        shard.base.madvise(mmap.MADV_DONTNEED)
