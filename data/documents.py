"""Where documents come from: the rows of local files or of a dataset on the hub, as text, in a fixed order.

`datasets` reads the hub. Local files are read here, so that invalid UTF-8 is repaired and counted and a bad
line is named by its number. Memory is bounded by the longest documents, not by files (on the hub by a row
group).
"""

import glob
import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from infra.cli import UserError

BLOCK_CHARACTERS = 2**20
BATCH_ROWS = 64  # read at a time
EMPTY = "without text"
REPAIRED = "repaired UTF-8"


class Input(NamedTuple):
    """A file of rows: UTF-8 text, or lines of JSON with the text under `json_key`."""

    name: str
    read: Callable[[], Iterator[bytes | None]]
    json_key: str | None = None


class Source(NamedTuple):
    """Inputs in a fixed order."""

    description: str  # one line for dataset.json
    settings: dict[str, Any]  # the options that identify the source
    files: list[str]  # a hash of each local file; empty for the hub, where a commit identifies them
    open: Callable[[], list[Input]]


class Cursor(NamedTuple):
    """A place in a source: token `token` of the document in row `row` of input `input`."""

    input: int = 0
    row: int = 0
    token: int = 0


class Block(NamedTuple):
    """Consecutive rows of one input."""

    input: int
    row: int  # of the first one
    texts: list[str]  # "": no document
    notes: list[str]  # EMPTY, REPAIRED or "" for each row


def read_blocks(source: Source, start: Cursor) -> Iterator[Block]:
    """All rows from row `start.row` of input `start.input` on, in blocks of about BLOCK_CHARACTERS.

    Raises UserError, naming the input that cannot be read or has no text, and the line of JSON.
    """
    for index, file in enumerate(source.open()):
        if index >= start.input:
            first_row = start.row if index == start.input else 0
            with naming(file.name):
                yield from _input_blocks(file, index, first_row)


def _input_blocks(file: Input, index: int, first_row: int) -> Iterator[Block]:
    block = Block(index, first_row, [], [])
    n_characters = 0
    for line, row in enumerate(islice(file.read(), first_row, None), first_row + 1):
        try:
            text, note = _decode(row or b"", file.json_key)
        except ValueError as e:
            raise UserError(f"{file.name}, line {line}: {e}") from None
        block.texts.append(text)
        block.notes.append(note)
        n_characters += 1 + len(text)
        if n_characters >= BLOCK_CHARACTERS:
            yield block
            block = Block(index, line, [], [])
            n_characters = 0
    if block.texts:
        yield block


def _decode(row: bytes, json_key: str | None) -> tuple[str, str]:
    """A row's text and a note on it. Raises ValueError for JSON without a text."""
    text = row.decode("utf-8", "replace")
    is_valid = text.encode() == row
    if json_key is not None:
        try:
            record = json.loads(text) if text.strip() else {json_key: ""}
        except (ValueError, RecursionError) as e:
            raise ValueError(f"not valid JSON: {e}") from None
        content = record.get(json_key, 0) if isinstance(record, dict) else 0
        if not isinstance(content, str | None):
            raise ValueError(f'{str(record)[:60]!r}: expected an object with a string "{json_key}"')
        # JSON can write half a surrogate pair.
        text = (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        is_valid = is_valid and text == (content or "")
    if not text:
        return "", EMPTY
    return text, "" if is_valid else REPAIRED


def local_files(patterns: list[str], column: str) -> Source:
    """The .parquet, .jsonl and .jsonl.gz files that match the patterns, sorted by path."""
    paths: set[str] = set()
    for pattern in patterns:
        # A name that the shell has expanded may contain brackets.
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        files = {os.path.normpath(path) for path in matches if not os.path.isdir(path)}
        if not files:
            raise UserError(f"--files {pattern}: no such files: expected paths or 'DIR/**/*.parquet'")
        paths |= files
    inputs = []
    for path in map(Path, sorted(paths)):
        label = os.fsencode(path).decode("utf-8", "replace")  # on Linux a path need not be UTF-8
        if path.name.endswith(".parquet"):
            inputs.append(Input(label, partial(_parquet_rows, path, column)))
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            inputs.append(Input(label, partial(_lines, path), json_key=column))
        else:
            raise UserError(f"{label}: expected .parquet, .jsonl or .jsonl.gz")
    hashes = [_fingerprint(Path(path)) for path in sorted(paths)]
    description = f"local file {os.path.basename(inputs[0].name)}"
    if len(inputs) > 1:
        first, *_, last = (os.path.basename(file.name) for file in inputs)
        description = f"{len(inputs)} local files, {first} to {last}"
    return Source(description, {"column": column}, hashes, lambda: inputs)


def _parquet_rows(path: Path, column: str) -> Iterator[bytes | None]:
    with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        columns = file.schema_arrow.names
        if column not in columns:
            raise UserError(f"no column {column}: expected one of {', '.join(columns)[:200]}")
        for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
            yield from _as_bytes(batch.column(0))


def _lines(path: Path) -> Iterator[bytes | None]:
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as lines:
        yield from lines


def _as_bytes(column: Any) -> list[bytes | None]:
    """An Arrow column of strings, as binary: a string column may hold invalid UTF-8, not checked so far."""
    if column.type not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise UserError(f"a column of {column.type}: expected strings")
    return list(column.cast(pa.large_binary()).to_pylist())


def _fingerprint(path: Path) -> str:
    """A sha256 over a file's size, first and last 64 KB: enough to notice a change."""
    with naming(str(path)), open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest = sha256(str(size).encode() + f.read(2**16))
        f.seek(max(0, size - 2**16))
        digest.update(f.read())
    return digest.hexdigest()


def hub_dataset(
    repo: str, name: str | None, split: str, column: str, revision: str, commit: str | None
) -> Source:
    """A text dataset that `datasets` can load: of the hub, at one commit, or a local folder.

    Args:
        name: its configuration, or None.
        commit: the commit of an interrupted run, or None: the newest of `revision`.
    """
    from huggingface_hub import HfApi

    hashes: list[str] = []
    if Path(repo).is_dir():
        hashes = [_fingerprint(path) for path in sorted(Path(repo).rglob("*")) if path.is_file()]
    elif commit is None:
        hint = f"; `hf download {repo} --repo-type dataset --local-dir DIR`, then --files 'DIR/**/*.parquet'"
        with naming(f"{repo} at {revision}", f"{hint} reads local files"):
            commit = HfApi().dataset_info(repo, revision=revision, timeout=10).sha

    def open_inputs() -> list[Input]:
        import datasets

        datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # errors are raised as well
        with naming(repo):
            builder = datasets.load_dataset_builder(repo, name, revision=commit)
            stream = builder.as_streaming_dataset(split).select_columns([column])  # checks its name
            if hasattr(builder.config, "columns"):  # parquet: the other columns are not even fetched
                builder.config.columns = [column]
                stream = builder.as_streaming_dataset(split)
        tables = stream.with_format("arrow")
        n = tables.num_shards
        return [Input(f"{repo}, file {i + 1} of {n}", partial(_table_rows, tables, i)) for i in range(n)]

    settings = {"repo": repo, "name": name, "split": split, "column": column, "revision": revision}
    description = " ".join(filter(None, (repo, name, split, commit and f"at commit {commit}")))
    return Source(description, settings | {"commit": commit}, hashes, open_inputs)


def _table_rows(tables: Any, file: int) -> Iterator[bytes | None]:
    for table in tables.shard(tables.num_shards, file).iter(BATCH_ROWS):
        yield from _as_bytes(table.column(0))


@contextmanager
def naming(label: str, hint: str = "") -> Iterator[None]:
    """Errors of the libraries that read an input become one line that begins with `label`."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e) if str(e).startswith(label) else f"{label}: {e}") from None
    except Exception as e:  # which library's errors these are depends on its version
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"{label}: cannot be read: {reason}{hint}") from None
