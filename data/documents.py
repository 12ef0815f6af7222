"""Documents of a text dataset: rows read from local files or the hub in blocks, and the tokens of a block.

`datasets` reads the hub. Local files are read here: its parquet reader holds a whole row group in memory, and
its JSON reader stops at the first byte that is not UTF-8, which is repaired and counted here. Workers decode
the rows. Memory is bounded by the longest documents, not by files (on the hub by a row group).
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from data.shards import TOKEN
from data.tokenizer import encode
from infra.cli import UserError

BLOCK_BYTES = 2**20  # of text
BATCH_ROWS = 64  # read at a time
NOTES = ("", "without text", "repaired UTF-8")  # on a row


class Input(NamedTuple):
    """A file of rows: UTF-8 text, or lines of JSON with the text under `json_key`."""

    name: str
    json_key: str | None
    rows: Callable[[], Iterator[bytes | None]]


class Source(NamedTuple):
    """Inputs in a fixed order."""

    description: str  # one line for dataset.json
    settings: dict[str, Any]  # the options that identify the source
    files: list[str]  # a hash of each local file; empty for the hub, where a commit identifies them
    n_tokens: int | None  # an estimate
    open: Callable[[], list[Input]]


class Cursor(NamedTuple):
    """The first token that is not yet in a finished shard: token `token` of row `row` of input `input`."""

    input: int = 0
    row: int = 0
    token: int = 0


# ---------------------------------------------------------------- local files


def local_files(patterns: list[str], column: str) -> Source:
    """The .parquet, .jsonl and .jsonl.gz files that match the patterns, sorted by path."""
    names: set[str] = set()
    for pattern in patterns:  # one that the shell has expanded may contain brackets
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = {os.path.normpath(name) for name in found if not os.path.isdir(name)}
        if not files:
            raise UserError(f"--files {pattern}: no such files: expected paths or 'DIR/**/*.parquet'")
        names |= files
    inputs, hashes = [], []
    for path in map(Path, sorted(names)):
        label = os.fsencode(path).decode("utf-8", "replace")  # on Linux a path need not be UTF-8
        if not path.name.endswith((".parquet", ".jsonl", ".jsonl.gz")):
            raise UserError(f"{label}: expected .parquet, .jsonl or .jsonl.gz")
        if path.suffix == ".parquet":
            inputs.append(Input(label, None, partial(_parquet_rows, path, column)))
        else:
            inputs.append(Input(label, column, partial(_lines, path)))
        with naming(label):
            hashes.append(_fingerprint(path))
    first, last = (os.path.basename(inputs[i].name) for i in (0, -1))
    description = (
        f"{len(inputs)} local files, {first} to {last}" if len(inputs) > 1 else f"local file {first}"
    )
    return Source(description, {"column": column}, hashes, None, lambda: inputs)


def _fingerprint(path: Path) -> str:
    """A sha256 over a file's size, first and last 64 KB: enough to notice a change."""
    with open(path, "rb") as f:
        digest = sha256(str(path.stat().st_size).encode() + f.read(2**16))
        f.seek(max(0, path.stat().st_size - 2**16))
        digest.update(f.read())
    return digest.hexdigest()


def _parquet_rows(path: Path, column: str) -> Iterator[bytes | None]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        if column not in (names := file.schema_arrow.names):
            raise UserError(f"no column {column}: expected one of {', '.join(names)[:200]}")
        for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
            yield from _as_bytes(batch.column(0))


def _lines(path: Path) -> Iterator[bytes | None]:
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as lines:
        yield from lines


def _as_bytes(column: Any) -> list[bytes | None]:
    """An Arrow column of strings, as binary: a string column may hold invalid UTF-8, not checked so far."""
    import pyarrow as pa

    if column.type not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise UserError(f"a column of {column.type}: expected strings")
    return list(column.cast(pa.large_binary()).to_pylist())


# ---------------------------------------------------------------- the hub


def hub_dataset(
    repo: str, name: str | None, split: str, column: str, revision: str, commit: str | None
) -> Source:
    """A text dataset that `datasets` can load: of the hub, at one commit, or a local folder.

    Args:
        name: its configuration, or None.
        commit: the commit of an interrupted run, or None: the newest of `revision`.
    """
    is_local = Path(repo).is_dir()
    commit = commit or (None if is_local else _newest_commit(repo, revision))
    settings = {"repo": repo, "name": name, "split": split, "column": column, "revision": revision}
    billions = re.search(r"(\d+)BT", name or "")  # FineWeb's samples are named after their size
    n_tokens = int(billions[1]) * 10**9 if billions else None

    def open_inputs() -> list[Input]:
        with naming(repo):
            stream = _open_stream(repo, split, column, name=name, revision=commit)
        n = stream.num_shards
        return [
            Input(f"{repo}, file {i + 1} of {n}", None, partial(_stream_rows, stream, i)) for i in range(n)
        ]

    description = " ".join(filter(None, (repo, name, split, commit and f"at commit {commit}")))
    with naming(repo):
        hashes = [_fingerprint(path) for path in sorted(Path(repo).rglob("*")) if is_local and path.is_file()]
    return Source(description, settings | {"commit": commit}, hashes, n_tokens, open_inputs)


def _newest_commit(repo: str, revision: str) -> str:
    from huggingface_hub import HfApi

    hint = f"; `hf download {repo} --repo-type dataset --local-dir DIR`, then --files 'DIR/**/*.parquet'"
    with naming(f"{repo} at {revision}", f"{hint} reads local files"):
        return str(HfApi().dataset_info(repo, revision=revision, timeout=10).sha)


def _open_stream(repo: str, split: str, column: str, **options: Any) -> Any:
    """A `datasets.IterableDataset` of the text column alone, as Arrow tables."""
    import datasets

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # errors are raised as well
    builder = datasets.load_dataset_builder(repo, **options)
    stream = builder.as_streaming_dataset(split).select_columns([column])  # checks its name
    if hasattr(builder.config, "columns"):  # parquet: the other columns are not even fetched
        builder.config.columns = [column]
        stream = builder.as_streaming_dataset(split)
    return stream.with_format("arrow")


def _stream_rows(stream: Any, index: int) -> Iterator[bytes | None]:
    for table in stream.shard(stream.num_shards, index).iter(BATCH_ROWS):
        yield from _as_bytes(table.column(0))


@contextmanager
def naming(name: str, hint: str = "") -> Iterator[None]:
    """Errors of the libraries that read an input become one line with its name."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(name) else f"{name}: {e}") from None
    except Exception as e:  # which library's errors these are depends on its version
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"{name}: cannot be read: {reason}{hint}") from None


# ---------------------------------------------------------------- blocks


class Block(NamedTuple):
    """Consecutive rows of one input."""

    input: int
    row: int  # of the first one
    rows: list[bytes | None]
    file: Input


class Tokens(NamedTuple):
    """The tokens of a block."""

    input: int
    row: int
    tokens: np.ndarray  # (n,) uint16, `<|endoftext|>` first in each document
    lengths: np.ndarray  # (rows,) int64: tokens of each row; 0 for a skipped one
    notes: np.ndarray  # (rows,) uint8: an index of NOTES


def read_blocks(source: Source, start: Cursor) -> Generator[Block]:
    """All rows from `start.row` of `start.input` on, in blocks of about BLOCK_BYTES.

    Raises:
        UserError: naming the input that cannot be read or has no text.
    """
    inputs = source.open()
    for index in range(start.input, len(inputs)):
        file, row = inputs[index], start.row if index == start.input else 0
        with naming(file.name):
            rows = islice(file.rows(), row, None)
            while taken := _take_block(rows):
                yield Block(index, row, taken, file)
                row += len(taken)


def _take_block(rows: Iterator[bytes | None]) -> list[bytes | None]:
    taken, n_bytes = [], 0
    for row in rows:
        taken.append(row)
        n_bytes += len(row or b"")
        if n_bytes >= BLOCK_BYTES:
            break
    return taken


def tokenise(block: Block, encoding: tiktoken.Encoding) -> Tokens:
    """Raises UserError: naming input and line, for a line that is not a JSON object with a text."""
    eot = np.array([encoding.eot_token], TOKEN)
    n = len(block.rows)
    parts, lengths, notes = [eot[:0]], np.zeros(n, np.int64), np.zeros(n, np.uint8)
    for i, row in enumerate(block.rows):
        try:
            text, repaired = _text(row or b"", block.file.json_key)
        except ValueError as e:
            raise UserError(f"{block.file.name}, line {block.row + i + 1}: {e}") from None
        notes[i] = 1 if not text else 2 if repaired else 0
        if text:
            parts += [eot, encode(encoding, text)]
            lengths[i] = 1 + len(parts[-1])
    return Tokens(block.input, block.row, np.concatenate(parts), lengths, notes)


def _text(row: bytes, json_key: str | None) -> tuple[str, bool]:
    """A row's text, and whether it had to be repaired. Raises ValueError for JSON without a text."""
    try:
        text, repaired = row.decode("utf-8"), False
    except UnicodeDecodeError:
        text, repaired = row.decode("utf-8", "replace"), True
    if json_key is None or not text.strip():
        return text if json_key is None else "", repaired
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON: {e}") from None
    found = value.get(json_key, 0) if isinstance(value, dict) else 0
    if not isinstance(found, str | None):
        raise ValueError(f'{str(value)[:60]!r}: expected an object with a string "{json_key}"')
    text = (found or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text, repaired or text != (found or "")  # JSON can write half a surrogate pair
