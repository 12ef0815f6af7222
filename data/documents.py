"""Documents in files: local ones or the hub's, Parquet or JSON lines, read in blocks from any row on.

`read_blocks(source, cursor)` yields the rows of a source's files in their order, as bytes: nothing is decoded
here, that is the workers' work. Memory is bounded by the largest document, not by files or row groups.
"""

from __future__ import annotations

import glob
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.hub import Download, HubDataset, HubFile, clear_downloads, remove_downloads
from infra.cli import UserError

BLOCK_BYTES = 2**20  # of text
BYTES_PER_TOKEN = 4.5  # of web text in GPT-2's BPE; for estimates


class Cursor(NamedTuple):
    """The first token that is not yet in a finished shard: token `token` of row `row` of input `input`."""

    input: int = 0
    row: int = 0
    token: int = 0


@dataclass(frozen=True)
class InputFile:
    name: str
    n_bytes: int
    sha256: str  # of a hub file; of a local one, of its size, first and last 64 KB: see `fingerprint`


class Source(Protocol):
    """Files of documents, in a fixed order."""

    settings: dict[str, Any]  # what, besides the inputs, tells one source from another
    inputs: list[InputFile]
    expected_tokens: int
    temporary_bytes: int  # room on the disk for what is fetched
    description: str
    while_waiting: Callable[[], None]  # called now and then by an `open` that takes long

    def open(self, index: int) -> Path:
        """The local path of an input, which may have to be fetched first."""

    def release(self, index: int) -> None:
        """Inputs before this one are needed no more, not even after a restart."""

    def status(self) -> str:
        """A few words for the progress bar."""


class LocalFiles:
    """The files that match the patterns, sorted by path."""

    def __init__(self, patterns: list[str]) -> None:
        names: set[str] = set()
        for pattern in patterns:  # one that the shell has expanded may hold brackets
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
        self._paths = paths
        self.inputs = [InputFile(_shown(path), *fingerprint(path)) for path in paths]
        self.expected_tokens = int(sum(_text_bytes(path) for path in paths) / BYTES_PER_TOKEN)
        self.temporary_bytes = 0
        self.while_waiting = lambda: None
        self.settings: dict[str, Any] = {}
        first, last = _shown(Path(paths[0].name)), _shown(Path(paths[-1].name))
        self.description = f"{len(paths)} local files, {first} to {last}"
        if len(paths) == 1:
            self.description = f"local file {first}"

    def open(self, index: int) -> Path:
        return self._paths[index]

    def release(self, index: int) -> None:
        pass

    def status(self) -> str:
        return ""


class HubFiles:
    """The parquet files in a folder of a dataset on the hub, fetched one ahead of their use.

    Args:
        folder: of the dataset.
        downloads: folder for the files, each deleted when it is released.
        known: the header of this dataset's manifest, if it was begun before: its commit and files stand.
    """

    def __init__(
        self, name: str, folder: str, revision: str, downloads: Path, known: dict[str, Any] | None
    ) -> None:
        self.settings = {"repo": name, "folder": folder, "revision": revision}
        begun = known["options"] if known else {}
        if known and all(begun.get(key) == value for key, value in self.settings.items()):
            self._dataset = HubDataset(name, begun["commit"], f"{folder}/*")
            files = [HubFile(file["name"], file["bytes"], file["sha256"]) for file in known["inputs"]]
        else:
            self._dataset = HubDataset(name, revision, f"{folder}/*")
            files = [file for file in self._dataset.files(folder) if file.name.endswith(".parquet")]
        if not files:
            raise UserError(f"{name}: no parquet files in {folder} at {self._dataset.commit[:12]}")
        self.settings["commit"] = self._dataset.commit
        self.inputs = [InputFile(file.name, file.n_bytes, file.sha256) for file in files]
        # The samples are called after their tokens (sample-10BT has 10.25e9); a byte holds less than one.
        named = float(re.sub(r"\D", "", folder) or "inf") * 1e9
        self.expected_tokens = int(min(named, sum(file.n_bytes for file in files)))
        self.temporary_bytes = sum(sorted(file.n_bytes for file in files)[-3:])
        self.description = f"{name} {folder} at commit {self._dataset.commit}"
        self.while_waiting: Callable[[], Any] = lambda: None
        self._files, self._folder = files, downloads
        self._started: dict[int, Download] = {}
        self._waiting: Download | None = None

    def open(self, index: int) -> Path:
        if not self._started:
            clear_downloads(self._folder)
        for i in range(index, min(index + 2, len(self._files))):
            if i not in self._started:
                self._started[i] = Download(self._dataset, self._files[i], self._folder)
        self._waiting = self._started[index]
        path = self._waiting.result(self.while_waiting)
        self._waiting = None
        return path

    def release(self, index: int) -> None:
        for i in [i for i in self._started if i < index]:
            del self._started[i]
            (self._folder / self._files[i].name).unlink(missing_ok=True)
        if index == len(self._files):
            remove_downloads(self._folder)

    def status(self) -> str:
        if self._waiting is None:
            return ""
        download = self._waiting
        share = download.n_bytes / max(1, download.file.n_bytes)
        return f"fetching {Path(download.file.name).name} {share:.0%} {download.note}".rstrip()


def _shown(path: Path) -> str:
    """A path as text: on Linux it may be no UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def fingerprint(path: Path) -> tuple[int, str]:
    """A file's size and a sha256 over its size, first and last 64 KB: enough to tell that it changed."""
    try:
        with open(path, "rb") as f:
            n_bytes = os.fstat(f.fileno()).st_size
            digest = sha256(str(n_bytes).encode() + f.read(2**16))
            f.seek(max(0, n_bytes - 2**16))
            digest.update(f.read())
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    return n_bytes, digest.hexdigest()


def _text_bytes(path: Path) -> float:
    """About how much text a file holds."""
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return sum(
                _text_column(file, group).total_uncompressed_size for group in range(file.num_row_groups)
            )
    return path.stat().st_size * (3.0 if path.suffix == ".gz" else 0.95)


class Block(NamedTuple):
    """Consecutive rows of one input, as bytes: of the text, or of a line of JSON that has it."""

    input: int
    row: int  # of the input, of the first one here
    rows: list[bytes | None]
    name: str  # of the input
    is_json: bool
    done: float  # share of the whole source read when this block is, by bytes of files

    @property
    def n_bytes(self) -> int:
        return sum(len(row) for row in self.rows if row)


def read_blocks(source: Source, start: Cursor) -> Iterator[Block]:
    """All rows from `start.row` of `start.input` on, in blocks of about BLOCK_BYTES.

    Raises:
        UserError: an input cannot be read or has no text.
    """
    sizes = [file.n_bytes for file in source.inputs]
    total = max(1, sum(sizes))
    for i in range(start.input, len(sizes)):
        path = source.open(i)
        read = _read_parquet if path.suffix == ".parquet" else _read_jsonl
        try:
            for row, rows, share in read(path, start.row if i == start.input else 0):
                done = (sum(sizes[:i]) + share * sizes[i]) / total
                yield Block(i, row, rows, source.inputs[i].name, read is _read_jsonl, done)
        except (
            OSError,
            EOFError,
            ValueError,
            zlib.error,
        ) as e:  # pyarrow's errors are ValueErrors and OSErrors
            if isinstance(e, UserError):
                raise
            raise UserError(f"{path}: cannot be read: {' '.join(str(e).split())[:200]}") from None


def _read_parquet(path: Path, first: int) -> Iterator[tuple[int, list[bytes | None], float]]:
    """(first row, rows, share of the file read) of consecutive blocks from row `first` on."""
    import pyarrow as pa

    with _parquet(path) as file:
        n_rows, row = max(1, file.metadata.num_rows), 0
        for group in range(file.num_row_groups):
            in_group = file.metadata.row_group(group).num_rows
            if row + in_group <= first:
                row += in_group
                continue
            n_bytes = _text_column(file, group).total_uncompressed_size
            size = max(1, min(1024, BLOCK_BYTES * in_group // max(1, n_bytes)))
            for batch in file.iter_batches(size, row_groups=[group], columns=["text"]):
                skip = max(0, first - row)
                if skip >= len(batch):
                    row += len(batch)
                    continue
                row += skip
                # As binary: a string column may hold invalid UTF-8, and nobody has checked it so far.
                rows = batch.column(0).slice(skip).cast(pa.large_binary()).to_pylist()
                yield row, rows, (row + len(rows)) / n_rows
                row += len(rows)


def _parquet(path: Path) -> Any:
    """An open pyarrow.parquet.ParquetFile with a text column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffered: else a row group's whole column is read at once, however large.
        file = pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{path}: not a readable parquet file: {' '.join(str(e).split())[:200]}") from None
    columns = file.schema_arrow
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if "text" not in columns.names:
        file.close()
        raise UserError(f"{path}: no column text: expected one; found {', '.join(columns.names)[:200]}")
    if not any(kind(columns.field("text").type) for kind in kinds):
        file.close()
        raise UserError(f"{path}: column text is {columns.field('text').type}: expected strings")
    return file


def _text_column(file: Any, group: int) -> Any:
    """Metadata of the text column in a row group: columns count by leaf, which nested ones have many of."""
    row_group = file.metadata.row_group(group)
    columns = (row_group.column(i) for i in range(row_group.num_columns))
    return next(column for column in columns if column.path_in_schema == "text")


def _read_jsonl(path: Path, first: int) -> Iterator[tuple[int, list[bytes | None], float]]:
    """As `_read_parquet`; a row is a line."""
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as lines:
        n_bytes = max(1, os.fstat(raw.fileno()).st_size)
        rows: list[bytes | None] = []
        row = size = 0
        for number, line in enumerate(lines):
            if number < first:
                row = number + 1
                continue
            rows.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                yield row, rows, raw.tell() / n_bytes
                row, rows, size = number + 1, [], 0
        if rows:
            yield row, rows, 1.0
