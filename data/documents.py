"""Documents of a text dataset: rows read from local files or the hub in blocks, and the tokens of a block.

`datasets` reads the hub. Local files are read here: its parquet reader holds a whole row group in memory, and
its JSON reader stops at the first byte that is not UTF-8, which is repaired and counted here.

Nothing is decoded while reading; that is the workers' task. Memory is bounded by the longest documents, not
by files (on the hub by a row group).
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import pickle
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.shards import TOKEN
from data.tokenizer import encode, get_tokenizer
from infra.cli import UserError

Rows = list[bytes | None]  # UTF-8 text, or lines of JSON

BLOCK_BYTES = 2**20  # of text
BATCH_ROWS = 64  # read at a time
SKIPPED = ("", "without text", "repaired UTF-8")  # the notes on a row


class Cursor(NamedTuple):
    """The first token that is not yet in a finished shard: token `token` of row `row` of input `input`."""

    input: int = 0
    row: int = 0
    token: int = 0


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class Input:
    """A file of rows: UTF-8 text, or JSON objects with the text under `json_key`."""

    name: str
    json_key: str | None
    read: Callable[[int], Generator[Rows]]  # the rows from a given one on, a few at a time


@dataclass(frozen=True)
class Source:
    """Inputs in a fixed order."""

    description: str  # one line for dataset.json
    settings: dict[str, Any]  # the options that identify the source
    files: list[str]  # a hash of each local file; empty for the hub, where a commit identifies them
    n_tokens: int | None  # an estimate
    open: Callable[[], list[Input]]


def local_files(patterns: list[str], column: str) -> Source:
    """The .parquet, .jsonl and .jsonl.gz files that match the patterns, sorted by path."""
    names: set[str] = set()
    for pattern in patterns:  # one that the shell has expanded may contain brackets
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not found:
            raise UserError(f"--files {pattern}: no such files")
        names.update(os.path.normpath(name) for name in found)
    paths = [Path(name) for name in sorted(names) if not Path(name).is_dir()]
    if not paths:
        raise UserError(f"--files {' '.join(patterns)}: no files, folders only")
    for path in paths:
        if not path.name.endswith((".parquet", ".jsonl", ".jsonl.gz")):
            raise UserError(f"{path}: expected .parquet, .jsonl or .jsonl.gz")
    first, last = _printable(Path(paths[0].name)), _printable(Path(paths[-1].name))
    description = f"{len(paths)} local files, {first} to {last}" if len(paths) > 1 else f"local file {first}"

    def open_inputs() -> list[Input]:
        return [
            Input(_printable(path), None, partial(_read_parquet, path, column))
            if path.suffix == ".parquet"
            else Input(_printable(path), column, partial(_read_lines, path))
            for path in paths
        ]

    return Source(description, {"column": column}, [_fingerprint(path) for path in paths], None, open_inputs)


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
        if not is_local:
            _check_online(repo)
        with naming(repo):
            stream = _open_stream(repo, split, column, name=name, revision=commit)
        n = stream.num_shards
        return [
            Input(f"{repo}, file {i + 1} of {n}", None, partial(_read_stream, stream, i)) for i in range(n)
        ]

    description = " ".join(filter(None, (repo, name, split, commit and f"at commit {commit}")))
    return Source(description, settings | {"commit": commit}, [], n_tokens, open_inputs)


def _check_online(repo: str) -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{repo}: HF_HUB_OFFLINE is set: expected --files 'DIR/**/*.parquet' (with a network, "
            f"`hf download {repo} --repo-type dataset --local-dir DIR` fetches them)"
        )


def _newest_commit(repo: str, revision: str) -> str:
    from huggingface_hub import HfApi

    _check_online(repo)
    try:
        return str(HfApi().dataset_info(repo, revision=revision, timeout=10).sha)
    except Exception as e:  # which library's errors these are depends on huggingface_hub's version
        raise UserError(
            f"{repo} at {revision}: cannot be found on the hub ({brief(e)}); without a network, --files "
            "'DIR/**/*.parquet' reads local files"
        ) from None


# ---------------------------------------------------------------- reading


def _open_stream(repo: str, split: str, column: str, **options: Any) -> Any:
    """A `datasets.IterableDataset` of the text column alone, as Arrow tables."""
    import datasets

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # errors are raised as well
    builder = datasets.load_dataset_builder(repo, **options)
    stream = builder.as_streaming_dataset(split)
    if stream.column_names is not None:
        _check_column(column, stream.column_names)
    if hasattr(builder.config, "columns"):  # parquet: the other columns are not even fetched
        builder.config.columns = [column]
        stream = builder.as_streaming_dataset(split)
    return stream.select_columns([column]).with_format("arrow")


def _read_stream(stream: Any, index: int, first: int) -> Generator[Rows]:
    part = stream.shard(stream.num_shards, index)
    with closing(part.skip(first).iter(BATCH_ROWS)) as tables:
        for table in tables:
            yield _as_bytes(table.column(0))


def _read_parquet(path: Path, column: str, first: int) -> Generator[Rows]:
    """By pyarrow: `datasets` holds a whole row group in memory, and reads all rows before `first`."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        _check_column(column, file.schema_arrow.names)
        for group in range(file.num_row_groups):
            n_rows = file.metadata.row_group(group).num_rows
            if first < n_rows:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column]):
                    yield _as_bytes(batch.column(0).slice(first))
                    first = max(0, first - len(batch))
            else:
                first -= n_rows


def _check_column(column: str, names: list[str]) -> None:
    if column not in names:
        raise UserError(f"no column {column}: expected one of {', '.join(names)[:200]}")


def _as_bytes(column: Any) -> Rows:
    """An Arrow column of strings, as binary: a string column may hold invalid UTF-8, not checked so far."""
    import pyarrow as pa

    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if not any(kind(column.type) for kind in kinds):
        raise UserError(f"a column of {column.type}: expected strings")
    rows: Rows = column.cast(pa.large_binary()).to_pylist()
    return rows


def _read_lines(path: Path, first: int) -> Generator[Rows]:
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as lines:
        rest = islice(lines, first, None)
        while batch := list(islice(rest, BATCH_ROWS)):
            yield list[bytes | None](batch)


class Block(NamedTuple):
    """Consecutive rows of one input, as bytes: UTF-8 text, or a line of JSON with the text under a key."""

    input: int
    row: int  # of the first one
    rows: Rows
    name: str  # of the input
    json_key: str | None

    @property
    def n_bytes(self) -> int:
        return sum(len(row) for row in self.rows if row)


def read_blocks(source: Source, start: Cursor) -> Generator[Block]:
    """All rows from `start.row` of `start.input` on, in blocks of about BLOCK_BYTES.

    Raises:
        UserError: naming the input that cannot be read or has no text.
    """
    inputs = source.open()
    for index in range(start.input, len(inputs)):
        file, first = inputs[index], start.row if index == start.input else 0
        block = Block(index, first, [], file.name, file.json_key)
        with naming(file.name), closing(file.read(first)) as batches:
            for rows in batches:
                block.rows.extend(rows)
                if block.n_bytes >= BLOCK_BYTES:
                    yield block
                    block = block._replace(row=block.row + len(block.rows), rows=[])
        if block.rows:
            yield block


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of the libraries that read an input become one line with its name."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(name) else f"{name}: {e}") from None
    except Exception as e:
        raise UserError(f"{name}: cannot be read: {brief(e)}") from None


def brief(e: Exception) -> str:
    """A library's error in one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


def _printable(path: Path) -> str:
    """A path as text: on Linux it need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _fingerprint(path: Path) -> str:
    """A sha256 over a file's size, first and last 64 KB: enough to notice a change."""
    try:
        with open(path, "rb") as f:
            n_bytes = os.fstat(f.fileno()).st_size
            digest = sha256(str(n_bytes).encode() + f.read(2**16))
            f.seek(max(0, n_bytes - 2**16))
            digest.update(f.read())
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    return digest.hexdigest()


# ---------------------------------------------------------------- tokens of a block, in a worker process


class Tokens(NamedTuple):
    """The tokens of a block."""

    tokens: np.ndarray  # (n,) uint16, `<|endoftext|>` first in each document
    lengths: np.ndarray  # (rows,) int64: tokens of each row; 0 for a skipped one
    notes: np.ndarray  # (rows,) uint8: an index of SKIPPED


def tokenise(block: Block, tokenizer: str) -> Tokens:
    """Encode a block's documents.

    Raises:
        UserError: naming input and line, for a line that is not a JSON object with a text.
    """
    encoding = get_tokenizer(tokenizer)
    eot = np.array([encoding.eot_token], TOKEN)
    n = len(block.rows)
    parts, lengths, notes = [np.empty(0, TOKEN)], np.zeros(n, np.int64), np.zeros(n, np.uint8)
    for i, row in enumerate(block.rows):
        try:
            text, repaired = _text(row or b"", block.json_key)
        except ValueError as e:
            raise UserError(f"{block.name}, line {block.row + i + 1}: {e}") from None
        notes[i] = 1 if not text else 2 if repaired else 0
        if text:
            tokens = encode(encoding, text)
            parts += [eot, tokens]
            lengths[i] = 1 + len(tokens)
    return Tokens(np.concatenate(parts), lengths, notes)


def tokenise_file(path: Path, tokenizer: str) -> None:
    """Replace a file's content, a pickled Block, by its pickled Tokens.

    Files, not arguments and results: a pipe would block forever if a worker were killed in mid-message.
    """
    path.write_bytes(pickle.dumps(tokenise(pickle.loads(path.read_bytes()), tokenizer)))


def _text(row: bytes, json_key: str | None) -> tuple[str, bool]:
    """A row's text, and whether it had to be repaired. Raises ValueError for JSON without a text."""
    try:
        text, repaired = row.decode("utf-8"), False
    except UnicodeDecodeError:
        text, repaired = row.decode("utf-8", "replace"), True
    if json_key is None:
        return text, repaired
    if not text.strip():
        return "", repaired
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON: {e}") from None
    found = value.get(json_key, 0) if isinstance(value, dict) else 0
    if found is None:
        return "", repaired
    if not isinstance(found, str):
        raise ValueError(f'{str(value)[:60]!r}: expected an object with a string "{json_key}"')
    try:
        found.encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
    return found, repaired
