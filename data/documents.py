"""Where documents come from: the rows of local files or of a dataset on the hub, as text, in a
fixed order.

Local files are read here: parquet by pyarrow, JSON by `json`, text as it is. A text is the string
that stands in the file; a byte that is no UTF-8 becomes U+FFFD. `datasets` streams the hub, and
names the files of a local folder's split. Memory is bounded by a file's texts, unless documents are
shuffled.
"""

import glob
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.cli import UserError
from infra.files import fingerprint

BLOCK_CHARACTERS = 2**20
BATCH_ROWS = 64  # read at a time
FRAGMENT = 2**24  # characters of a text file that are split at a time
MOST_SHUFFLED = 2**31  # characters
MOST_UNREADABLE = 0.005  # share of U+FFFD and NUL in a file; accents in a code page are 1 to 12 %
LEAST_WARNED = 1e-5  # share of them; web text has 1e-6
SAMPLE = 2**16  # characters after which a file may be refused
END_OF_TEXT = re.compile(r"<\|end_?of_?text\|>")  # GPT-2's and Llama's
MARKUP = {"%PDF-": "a PDF", "%!PS": "PostScript", "{\\rtf": "RTF"}  # of readable characters
HALF_PAIR = re.compile("[\ud800-\udfff]")  # of surrogates, which JSON can write alone


class Input(NamedTuple):
    """A file of rows."""

    name: str
    read: Callable[[], Iterator[str]]  # the text of each row, "" for a row without text


class Source(NamedTuple):
    """Inputs in a fixed order."""

    description: str  # one line for dataset.json
    settings: dict[str, Any]  # the options that identify the source
    paths: list[Path]  # the local files and folders of them; empty for the hub
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


# ---------------------------------------------------------------- local files
def _parquet_texts(path: str, column: str) -> Iterator[str]:
    with pq.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise UserError(f"{path}: has no column {column!r}: expected --column of {names}")
        for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
            yield from _decoded(batch.column(0))


def _decoded(column: Any) -> Iterator[str]:
    """The texts of an Arrow column; "" for null."""
    # As binary: a column of strings may hold invalid UTF-8, not checked so far.
    for row in column.cast(pa.large_binary()).to_pylist():
        yield (row or b"").decode("utf-8", "replace")


def _json_texts(path: str, key: str) -> Iterator[str]:
    """The strings under the key: of an object a line, or of one array of objects."""
    with _open_text(path, newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if number == 1 and line.lstrip().startswith("["):
                    records = json.loads(line + lines.read())
                else:
                    records = [json.loads(line)] if line.strip() else [{key: None}]
                texts = [record[key] for record in records]
                readable = [HALF_PAIR.sub("\ufffd", "" if t is None else t) for t in texts]
            except (ValueError, LookupError, TypeError, RecursionError):
                expected = f'expected a JSON object with a string "{key}"'
                raise UserError(f"{path}, line {number}: {line[:60]!r}: {expected}") from None
            yield from readable


def _text(path: str, size: int) -> Iterator[str]:
    """The file in parts of `size` characters, -1 for all at once; its line ends as \\n."""
    with _open_text(path) as file:
        for part in iter(partial(file.read, size), ""):
            kinds = [kind for begin, kind in MARKUP.items() if part[:99].lstrip().startswith(begin)]
            if kinds:
                raise UserError(f"{path}: is {kinds[0]}: expected plain text")
            yield part


CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def _open_text(path: str, newline: str | None = None) -> Any:
    """UTF-8, with or without a mark at its beginning."""
    codec = CODECS.get(os.path.splitext(path)[1].lower())
    stream = pa.input_stream(io.FileIO(path), compression=codec)
    return io.TextIOWrapper(
        io.BufferedReader(stream), "utf-8-sig", errors="replace", newline=newline
    )


TEXT = (".txt", ".md")
READERS = {
    ".parquet": _parquet_texts,
    ".jsonl": _json_texts,
    ".ndjson": _json_texts,
    ".json": _json_texts,
}
SUFFIXES = (*TEXT, *READERS)


def suffix_of(path: str) -> str:
    """The one of SUFFIXES that says how the file is read, compressed or not, or ""."""
    stem, last = os.path.splitext(path.lower())
    suffix = os.path.splitext(stem)[1] if last in CODECS else last
    is_known = suffix in SUFFIXES and not (suffix == ".parquet" and last in CODECS)
    return suffix if is_known else ""


def _file_input(path: str, column: str, separator: str | None) -> Input:
    """Raises UserError: it cannot be a file of documents."""
    suffix = suffix_of(path)
    if path.endswith(".bin"):
        raise UserError(f"{path}: expected text; train.py reads shards of tokens by --data.dir")
    if not suffix or not os.path.isfile(path):
        packed = f", and {', '.join(CODECS)} of all but parquet"
        raise UserError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}{packed}")

    def read() -> Iterator[str]:
        if suffix in TEXT:
            texts = _split(_text(path, FRAGMENT if separator else -1), separator)
        else:
            texts = _split_each(READERS[suffix](path, column), separator)
        return _checked(path, texts)

    return Input(path, read)


def _split(fragments: Iterable[str], separator: str | None) -> Iterable[str]:
    """What stands between the separators, without the line ends beside them."""
    if not separator:
        yield from fragments
        return
    rest = ""
    for fragment in fragments:
        *pieces, rest = (rest + fragment).split(separator)
        for piece in pieces:
            yield piece.strip("\r\n")
    yield rest.strip("\r\n")


def _split_each(texts: Iterable[str], separator: str | None) -> Iterable[str]:
    return chain.from_iterable(_split([text], separator) for text in texts)


def _checked(name: str, texts: Iterable[str]) -> Iterator[str]:
    """The texts, with a warning of what a file of the wrong kind or encoding has.

    Raises UserError: too many characters are U+FFFD, which stands for bytes that are no UTF-8, or
    NUL.
    """
    n_characters = n_unreadable = 0
    for text in texts:
        n_characters += len(text)
        n_unreadable += text.count("\ufffd") + text.count("\0")
        if n_characters >= SAMPLE:
            _check_share(name, n_unreadable, n_characters)
        if found := END_OF_TEXT.search(text):
            advice = f"--separator '{found[0]}' splits documents there"
            _warn(f"{name}: holds {found[0]}, which is encoded as ordinary text: {advice}")
        yield text
    _check_share(name, n_unreadable, n_characters)
    if n_unreadable > LEAST_WARNED * n_characters:
        counted = f"{n_unreadable:,} of {n_characters:,} characters"
        share = f"{n_unreadable / n_characters:.3%}"
        _warn(f"{name}: {counted} ({share}) are U+FFFD, as bytes that are no UTF-8 become, or NUL")


def _check_share(name: str, n_unreadable: int, n_characters: int) -> None:
    if n_unreadable > MOST_UNREADABLE * n_characters:
        share = f"{n_unreadable / n_characters:.1%} of its characters are U+FFFD or NUL"
        expected = "expected UTF-8; iconv -f UTF-16 -t UTF-8, or -f CP1252, converts text"
        raise UserError(f"{name}: {share}: {expected}")


@cache  # several passes read the same file
def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


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


def local_files(
    patterns: list[str], column: str, shuffle: int | None = None, separator: str | None = None
) -> Source:
    """The files that match the patterns, sorted by path, or all documents shuffled by a seed.

    A folder stands for all files below it that can be read.
    """
    names: set[str] = set()
    for pattern in patterns:
        if os.path.isdir(pattern):
            below = glob.glob(os.path.join(glob.escape(pattern), "**"), recursive=True)
            paths = [path for path in below if suffix_of(path)]
        else:  # a name that the shell has expanded may contain brackets
            paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not paths:
            expected = "expected paths, folders of text or 'DIR/**/*.parquet'"
            raise UserError(f"--files {pattern}: no such files: {expected}")
        names.update(map(os.path.normpath, paths))
    by_file: dict[str, str] = {}
    for name in sorted(names):  # of several names of one file the first
        by_file.setdefault(os.path.realpath(name), name)
    files = [*by_file.values()]
    listed = os.fsencode(", ".join(map(os.path.basename, files))).decode("utf-8", "replace")
    settings = {"column": column, "shuffle": shuffle, "separator": separator}
    folders = [pattern for pattern in patterns if os.path.isdir(pattern)]
    source = _source_of(files + folders, files, f"local files ({len(files)}): {listed}", settings)
    if shuffle is None:
        return source
    shuffled = [Input("", partial(_shuffled_texts, source.open(), shuffle))]
    description = f"{source.description}, shuffled by seed {shuffle}"
    return source._replace(description=description, open=lambda: shuffled)


def _source_of(
    paths: list[str], files: list[str], description: str, settings: dict[str, Any]
) -> Source:
    inputs = [_file_input(file, settings["column"], settings["separator"]) for file in files]
    hashes = [fingerprint(Path(file)) for file in files]
    return Source(description, settings, [*map(Path, paths)], hashes, lambda: inputs)


def folder_dataset(
    folder: str, name: str | None, split: str, column: str, separator: str | None = None
) -> Source:
    """The files of a folder's split, as `datasets` finds them: by its README's configurations, else
    by words such as train and test in their paths. Files that are no documents are left out.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    with naming(folder):
        readme = Path(folder) / "README.md"
        configs: Any = {}
        if readme.is_file():
            configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme).data)
        if name or configs:
            name = name or configs.get_default_config_name()
            if name not in configs:
                expected = f"expected one of {', '.join(configs) or 'README.md, which has none'}"
                raise UserError(f"--name {name or 'left out'}: {folder}: {expected}")
        config = configs[name] if name else {}
        base = str(Path(folder, config.get("data_dir") or "").resolve())
        found = config.get("data_files")
        patterns = sanitize_patterns(found) if found else get_data_patterns(base)
        splits = DataFilesDict.from_patterns(patterns, base_path=base)
    if split not in splits:
        raise UserError(f"{folder}: has no split {split!r}: expected {', '.join(map(str, splits))}")
    listed = sorted(map(str, splits[split]))
    files = [path for path in listed if suffix_of(path)]
    left_out = [os.path.basename(path) for path in listed if not suffix_of(path)]
    if left_out:
        _warn(f"{folder}: left out {', '.join(left_out)[:200]}")
    if not files:
        raise UserError(f"{folder}: no files that end in {', '.join(SUFFIXES)}")
    description = f"{' '.join(filter(None, (folder, name, split)))}, {len(files)} files"
    settings = {"repo": folder, "name": name, "split": split, "column": column}
    settings["separator"] = separator
    return _source_of([folder], files, description, settings)


# ---------------------------------------------------------------- the hub
def hub_dataset(
    repo: str,
    name: str | None,
    split: str,
    column: str,
    revision: str,
    commit: str | None,
    separator: str | None = None,
) -> Source:
    """A text dataset of the hub that `datasets` can load, at one commit.

    name: its configuration. commit: of an interrupted run; None: the newest of `revision`.
    """
    from huggingface_hub import HfApi

    if commit is None:
        with naming(f"{repo} at {revision}"):
            commit = HfApi().dataset_info(repo, revision=revision, timeout=10).sha

    def open_inputs() -> list[Input]:
        with naming(repo):
            tables = _stream(column, split, repo, name, commit)
        n = tables.num_shards
        labels = [f"{repo}, file {i + 1} of {n}" for i in range(n)]
        return [
            Input(label, partial(_hub_texts, label, tables, n, i, separator))
            for i, label in enumerate(labels)
        ]

    settings = {"repo": repo, "name": name, "split": split, "column": column, "revision": revision}
    settings |= {"commit": commit, "separator": separator}
    description = " ".join(filter(None, (repo, name, split, f"at commit {commit}")))
    return Source(description, settings, [], [], open_inputs)


def _stream(column: str, split: str, repo: str, name: str | None, commit: str | None) -> Any:
    """The dataset as Arrow tables, with this column alone."""
    import datasets

    # errors are raised as well
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    builder = datasets.load_dataset_builder(repo, name, revision=commit)
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


def _hub_texts(label: str, tables: Any, n: int, i: int, separator: str | None) -> Iterator[str]:
    batches = tables.shard(n, i).iter(BATCH_ROWS)
    texts = (text for table in batches for text in _decoded(table.column(0)))
    return _checked(label, _split_each(texts, separator))


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
