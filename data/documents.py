"""Where documents come from: the rows of local files or of a dataset on the hub, as text, in a
fixed order.

`datasets` reads parquet and the hub as streams of Arrow tables. Memory is bounded by a file's
texts, unless documents are shuffled.
"""

import glob
import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from infra.cli import UserError
from infra.files import fingerprint

BLOCK_CHARACTERS = 2**20
BATCH_ROWS = 64  # read at a time
MOST_SHUFFLED = 2**31  # characters


class Input(NamedTuple):
    """A file of rows."""

    name: str
    read: Callable[[], Iterator[str]]  # the text of each row, "" for a row without text


class Source(NamedTuple):
    """Inputs in a fixed order."""

    description: str  # one line for dataset.json
    settings: dict[str, Any]  # the options that identify the source
    paths: list[Path]  # the local files, or the folder of them; empty for the hub
    files: list[str]  # a hash of each local file; empty where a commit of the hub identifies them
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


def read_blocks(inputs: list[Input], start: Cursor) -> Iterator[Block]:
    """All rows from row `start.row` of input `start.input` on, in blocks of about BLOCK_CHARACTERS.

    Raises UserError, naming the input that cannot be read or has no text, and the line of JSON.
    """
    for index, file in islice(enumerate(inputs), start.input, None):
        block = Block(index, start.row if index == start.input else 0, [])
        n_characters = 0
        with naming(file.name):
            for text in islice(file.read(), block.row, None):
                block.texts.append(text)
                n_characters += 1 + len(text)
                if n_characters >= BLOCK_CHARACTERS:
                    yield block
                    block = Block(index, block.row + len(block.texts), [])
                    n_characters = 0
            yield block


def _stream(column: str, split: str, *path: str | None, **options: Any) -> Any:
    """The tables of a dataset that `datasets` can load, with this column alone."""
    import datasets

    # errors are raised as well
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    builder = datasets.load_dataset_builder(*path, **options)
    if builder.__module__.endswith(".cache.cache"):  # what `datasets` falls back on, without a word
        raise ConnectionError(
            "the hub did not answer, and a copy in the cache may be of another commit"
        )
    if hasattr(builder.config, "sample_by"):  # text: a row is a file, as with --files, not a line
        builder.config.sample_by = "document"
        builder.config.encoding_errors = "replace"
    stream = builder.as_streaming_dataset(split).select_columns([column])  # checks its name
    if hasattr(builder.config, "columns"):  # parquet: the other columns are not even fetched
        builder.config.columns = [column]
        builder.config.batch_size = BATCH_ROWS
        stream = builder.as_streaming_dataset(split)
    return stream.with_format("arrow")


def _texts(tables: Any) -> Iterator[str]:
    for table in tables.iter(BATCH_ROWS):
        # As binary: a column of strings may hold invalid UTF-8, not checked so far.
        for row in table.column(0).cast(pa.large_binary()).to_pylist():
            yield (row or b"").decode("utf-8", "replace")


def _parquet_texts(path: str, column: str) -> Iterator[str]:
    location = glob.escape(os.path.abspath(path))  # a name may contain brackets
    yield from _texts(_stream(column, "train", "parquet", data_files=location))


def _json_texts(path: str, key: str) -> Iterator[str]:
    """The strings under the key. Not by `datasets`, which makes times of texts that look like them."""
    with _open_text(path, newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)[key] if line.strip() else None
                text = "" if text is None else text
                # JSON can write half a surrogate pair.
                yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                expected = f'expected a JSON object with a string "{key}"'
                raise UserError(f"{path}, line {number}: {line[:60]!r}: {expected}") from None


def _whole_text(path: str, key: str) -> Iterator[str]:
    """The whole file as one text, its line ends as \\n."""
    with _open_text(path) as file:
        yield file.read()


def _open_text(path: str, newline: str | None = None) -> Any:
    opener: Any = gzip.open if path.endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8", errors="replace", newline=newline)


def _shuffled_texts(inputs: list[Input], seed: int) -> Iterator[str]:
    """The texts of all inputs, which are held in memory, in an order that the seed fixes."""
    texts: list[str] = []
    n_characters = 0
    for file in inputs:
        with naming(file.name):
            for text in filter(None, file.read()):
                texts.append(text)
                n_characters += len(text)
                if n_characters > MOST_SHUFFLED:
                    raise UserError(
                        f"--shuffle {seed}: expected at most {MOST_SHUFFLED:,} characters in all"
                    )
    for i in np.random.RandomState(seed).permutation(len(texts)):  # numbers that numpy has frozen
        yield texts[i]


READERS = {
    ".parquet": _parquet_texts,
    ".jsonl": _json_texts,
    ".jsonl.gz": _json_texts,
    ".txt": _whole_text,
    ".txt.gz": _whole_text,
}


def local_files(patterns: list[str], column: str, shuffle: int | None = None) -> Source:
    """The files of READERS that match the patterns, sorted by path, or all documents shuffled by a
    seed.
    """
    names: set[str] = set()
    for pattern in patterns:
        # A name that the shell has expanded may contain brackets.
        paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not paths:
            raise UserError(
                f"--files {pattern}: no such files: expected paths or 'DIR/**/*.parquet'"
            )
        names.update(map(os.path.normpath, paths))
    by_file: dict[str, str] = {}
    for name in sorted(names):  # of several names of one file the first
        by_file.setdefault(os.path.realpath(name), name)
    files = [*by_file.values()]
    inputs = []
    for file in files:
        suffixes = [suffix for suffix in READERS if file.endswith(suffix)]
        if not suffixes or not os.path.isfile(file):
            raise UserError(f"{file}: expected a file that ends in {', '.join(READERS)}")
        inputs.append(Input(file, partial(READERS[suffixes[0]], file, column)))
    listed = os.fsencode(", ".join(map(os.path.basename, files))).decode("utf-8", "replace")
    description = f"local files ({len(files)}): {listed}"
    if shuffle is not None:
        description += f", shuffled by seed {shuffle}"
        inputs = [Input("", partial(_shuffled_texts, inputs, shuffle))]
    own_paths = [Path(file) for file in files]
    hashes = [fingerprint(path) for path in own_paths]
    return Source(
        description, {"column": column, "shuffle": shuffle}, own_paths, hashes, lambda: inputs
    )


def hub_dataset(
    repo: str, name: str | None, split: str, column: str, revision: str, commit: str | None
) -> Source:
    """A text dataset that `datasets` can load: of the hub, at one commit, or a local folder.

    name: its configuration. commit: of an interrupted run; None: the newest of `revision`.
    """
    from huggingface_hub import HfApi

    paths = [Path(repo)] if Path(repo).is_dir() else []
    listed = [path for path in sorted(Path(repo).rglob("*")) if path.is_file()] if paths else []
    # no .git, no .cache
    shown = [path for path in listed if "/." not in f"/{path.relative_to(repo)}"]
    hashes = [fingerprint(path) for path in shown]
    if not paths and commit is None:
        with naming(f"{repo} at {revision}"):
            commit = HfApi().dataset_info(repo, revision=revision, timeout=10).sha

    def open_inputs() -> list[Input]:
        with naming(repo):
            tables = _stream(column, split, repo, name, revision=commit)
        n = tables.num_shards
        return [
            Input(f"{repo}, file {i + 1} of {n}", partial(_texts, tables.shard(n, i)))
            for i in range(n)
        ]

    settings = {"repo": repo, "name": name, "split": split, "column": column, "revision": revision}
    description = " ".join(filter(None, (repo, name, split, commit and f"at commit {commit}")))
    return Source(description, settings | {"commit": commit}, paths, hashes, open_inputs)


@contextmanager
def naming(label: str, hint: str = "") -> Iterator[None]:
    """Errors of the libraries that read an input become one line that begins with `label`."""
    try:
        yield
    except UserError:  # names it, or an option
        raise
    except Exception as e:  # which library's errors these are depends on its version
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise UserError(f"{label}: cannot be read: {reason}{hint}") from None
