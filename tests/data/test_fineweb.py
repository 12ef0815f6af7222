"""data/fineweb.py --files: tokens against an independent pass, stops at every moment, damages, refusals.

Most builds tokenise in this process (`inline`), which takes milliseconds; the pool of workers is in the
tests of the command and of `workers`.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import config  # noqa: E402
from data import documents, fineweb, shards  # noqa: E402
from data.documents import LocalFiles  # noqa: E402
from data.shards import TokenStream, dataset_info  # noqa: E402
from infra.cli import UserError  # noqa: E402

needs_gpt2 = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="TIKTOKEN_CACHE_DIR is not set: gpt2 needs its files"
)
TOKENIZERS = ["bytes", pytest.param("gpt2", marks=needs_gpt2)]
HANGS = 60  # seconds: far more than any of the commands here takes
EMPTY, REPAIRED = "without text", "repaired UTF-8"


# ---------------------------------------------------------------- inputs


class Row(NamedTuple):
    """A row of an input, with what is to become of it."""

    raw: bytes | None  # parquet: the text; JSON: the line
    text: str = ""  # "": no document
    note: str = ""


def plain(text: str, is_json: bool) -> Row:
    raw = json.dumps({"id": 1, "text": text}) if is_json else text
    return Row(raw.encode(), text, "" if text else EMPTY)


ODD_PARQUET = [
    Row(None, "", EMPTY),
    Row(b"", "", EMPTY),
    Row(b"caf\xe9 \xff\xfe!", "caf\ufffd \ufffd\ufffd!", REPAIRED),
    Row(b"\xe2\x82", "\ufffd", REPAIRED),
    Row(b"\xed\xa0\x80", "\ufffd\ufffd\ufffd", REPAIRED),  # UTF-8 of half a surrogate pair
    Row(b"\x00", "\x00"),
    Row(b" \n\t", " \n\t"),
    Row(b"a<|endoftext|>b<|endoftext|>", "a<|endoftext|>b<|endoftext|>"),
    Row(b"\xef\xbb\xbfmark", "\ufeffmark"),
    Row("漢字🎉 e\u0301\r\n".encode(), "漢字🎉 e\u0301\r\n"),
]
ODD_JSON = [
    Row(b"", "", EMPTY),
    Row(b"  \t \r", "", EMPTY),
    Row(b'{"text": ""}', "", EMPTY),
    Row(b'{"text": null}', "", EMPTY),
    Row(b'{"text": "half \\ud83d pair"}', "half \ufffd pair", REPAIRED),
    Row(b'{"text": "\\udc00\\ud83d"}', "\ufffd\ufffd", REPAIRED),
    Row(b'{"text": "\\ud83c\\udf89"}', "🎉"),
    Row(b'{"text": "raw \xff byte"}', "raw \ufffd byte", REPAIRED),
    Row(b' {"a": [1, {"text": 0}], "text": "<|endoftext|>", "z": null} \r', "<|endoftext|>"),
    Row(b'{"text": "\\u0000\\n"}', "\x00\n"),
    Row(b'{"text": "first", "text": "last"}', "last"),
]


def some_rows(n: int, seed: int, is_json: bool, longest: int = 80) -> list[Row]:
    """Documents of 1 to `longest` characters, with odd ones in between."""
    rng = random.Random(seed)
    words = ["alpha ", "Beta", "  ", "\n", "é", "1999 ", "<|endoftext|>", "🎉", ".", "naïve "]
    rows = []
    for _ in range(n):
        if rng.random() < 0.25:
            rows.append(rng.choice(ODD_JSON if is_json else ODD_PARQUET))
        else:
            text = "".join(rng.choices(words, k=rng.randint(1, longest)))[:longest]
            rows.append(plain(text, is_json))
    return rows


def write_parquet(path: Path, rows: list[Row], groups: Sequence[int] = (), kind: pa.DataType = None) -> Path:
    """Row groups of these sizes, the rest in one more; the text is not checked for UTF-8."""
    raw = pa.array([row.raw for row in rows], pa.binary())
    text = pa.Array.from_buffers(kind or pa.string(), len(raw), raw.buffers(), raw.null_count)
    ids = pa.array([[{"text": f"no {i}"}] * (i % 3) for i in range(len(rows))])
    table = pa.table({"nested": ids, "text": text, "other": pa.array(range(len(rows)), pa.int64())})
    with pq.ParquetWriter(path, table.schema) as writer:
        start = 0
        for size in (*groups, len(rows) - sum(groups)):
            writer.write_table(table.slice(start, size), row_group_size=max(1, size))
            start += size
    return path


def write_jsonl(path: Path, rows: list[Row], last_newline: bool = True) -> Path:
    data = b"\n".join(row.raw or b"" for row in rows) + (b"\n" if last_newline else b"")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_texts(path: Path, texts: list[str]) -> list[Row]:
    rows = [plain(text, path.suffix != ".parquet") for text in texts]
    (write_parquet if path.suffix == ".parquet" else write_jsonl)(path, rows)
    return rows


@dataclass
class Corpus:
    """Input files, in their order, with their rows."""

    paths: list[Path] = field(default_factory=list)
    files: list[list[Row]] = field(default_factory=list)

    def add(self, path: Path, rows: list[Row]) -> None:
        self.paths.append(path)
        self.files.append(rows)

    @property
    def source(self) -> LocalFiles:
        return LocalFiles([str(path) for path in self.paths])


def mixed_corpus(folder: Path) -> Corpus:
    """All formats, row groups of all sizes, odd rows at the starts and ends of files, empty files."""
    corpus = Corpus()
    folder.mkdir()
    rows = ODD_PARQUET[:2] + some_rows(90, 1, False) + ODD_PARQUET
    corpus.add(write_parquet(folder / "a.parquet", rows, (1, 50, 0, 7, 2)), rows)
    corpus.add(write_parquet(folder / "b.parquet", []), [])
    rows = some_rows(60, 2, True) + ODD_JSON + [plain("long " * 400, True)] + ODD_JSON[:4]
    corpus.add(write_jsonl(folder / "c.jsonl", rows), rows)
    corpus.add(write_jsonl(folder / "d.jsonl", [], last_newline=False), [])
    rows = ODD_JSON[:3] + some_rows(40, 3, True)
    corpus.add(write_jsonl(folder / "e.jsonl.gz", rows + [plain("the end", True)], False), rows)
    rows.append(plain("the end", True))
    rows = some_rows(30, 4, False) + ODD_PARQUET[:2]
    corpus.add(write_parquet(folder / "f.parquet", rows, (29,), pa.binary()), rows)
    return corpus


# ---------------------------------------------------------------- what is to come out


def encode(text: str, tokenizer: str) -> list[int]:
    """A document's tokens, without a line of data/."""
    if tokenizer == "bytes":
        return [256, *text.encode()]
    return [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]


class Expected:
    """The dataset that a corpus should become."""

    def __init__(
        self, corpus: Corpus, tokenizer: str = "bytes", shard_size: int = 100, max_tokens: int | None = None
    ) -> None:
        self.files, self.tokenizer, self.max_tokens = corpus.files, tokenizer, max_tokens
        self.lengths: list[list[int]] = []  # of each row of each file, in tokens
        stream: list[int] = []
        starts = []
        for rows in corpus.files:
            self.lengths.append([])
            for row in rows:
                tokens = encode(row.text, tokenizer) if row.text else []
                if tokens:
                    starts.append(len(stream))
                stream += tokens
                self.lengths[-1].append(len(tokens))
        self.whole = len(stream)
        self.stream = np.array(stream[:max_tokens], "<u2")
        self.parts = [self.stream[i : i + shard_size] for i in range(0, len(self.stream), shard_size)]
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.documents = np.histogram(starts, [0, *self.ends - 0.5])[0].tolist()
        self.shards = {
            f"fineweb_{'train' if i else 'val'}_{i:06d}.bin": self._shard(part)
            for i, part in enumerate(self.parts)
        }

    @staticmethod
    def _shard(tokens: np.ndarray) -> bytes:
        return np.array([20240520, 1, len(tokens)] + [0] * 253, "<i4").tobytes() + tokens.tobytes()

    def position(self, at: list[int]) -> int:
        """How many tokens come before a manifest's `next`, which must be a token that exists."""
        file, row, token = at
        assert 0 <= row <= len(self.lengths[file])
        assert token == 0 or 0 < token < self.lengths[file][row]
        before = [length for lengths in self.lengths[:file] for length in lengths]
        return sum(before) + sum(self.lengths[file][:row]) + token

    def notes(self, at: list[int] | None = None) -> dict[str, int]:
        """Counts of the odd rows before a manifest's `next`, or of all."""
        file, row = (len(self.files), 0) if at is None else at[:2]
        before = [row for rows in self.files[:file] for row in rows]
        before += self.files[file][:row] if file < len(self.files) else []
        return dict(Counter(row.note for row in before if row.note))

    def check(self, out: Path, info: dict[str, Any] | None = None) -> None:
        """The folder holds exactly that."""
        found = {path.name: path.read_bytes() for path in out.iterdir()}
        assert sorted(found) == sorted([*self.shards, "manifest.jsonl", "dataset.json"])
        for name, content in self.shards.items():
            assert found[name] == content, name
        saved = json.loads(found["dataset.json"])
        assert info is None or info == saved == dataset_info(out)
        assert (saved["dataset"], saved["tokenizer"]) == ("fineweb", self.tokenizer)
        assert saved["vocab_size"] == {"bytes": 257, "gpt2": 50257}[self.tokenizer]
        files = [
            {"file": name, "tokens": len(part), "sha256": hashlib.sha256(self.shards[name]).hexdigest()}
            for name, part in zip(self.shards, self.parts, strict=True)
        ]
        assert saved["shards"] == files
        for split, which in (("val", slice(0, 1)), ("train", slice(1, None))):
            tokens = np.concatenate(self.parts[which])
            assert saved["splits"][split] == {
                "tokens": len(tokens),
                "documents": sum(self.documents[which]),
                "shards": len(self.parts[which]),
                "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
            }
            stream = TokenStream(out, split)
            np.testing.assert_array_equal(stream.read(0, len(tokens)), tokens)

        header, *lines = [json.loads(line) for line in found["manifest.jsonl"].splitlines()]
        assert len(header["inputs"]) == len(self.files)
        assert len(lines) == len(files)
        for line, entry, n_documents, end in zip(lines, files, self.documents, self.ends, strict=True):
            assert {key: line[key] for key in entry} == entry
            assert line["documents"] == n_documents
            assert self.position(line["next"]) == end
            assert line["rows"] == self.notes(line["next"])
        if len(self.stream) == self.max_tokens:  # what comes after the last token is not looked at
            assert saved["rows"] == lines[-1]["rows"]
        else:
            assert saved["rows"] == self.notes()


# ---------------------------------------------------------------- building


class Inline:
    """In place of `fineweb.Workers`: tokenises in this process, at once."""

    def __init__(self, n: int, tokenizer: str) -> None:
        self.n, self.tokenizer = n, tokenizer

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def submit(self, block: documents.Block) -> Future[fineweb.Tokens]:
        future: Future[fineweb.Tokens] = Future()
        try:
            job = (block.rows, self.tokenizer, block.is_json, block.name, block.row)
            future.set_result(fineweb.tokenise(*job))
        except Exception as e:
            future.set_exception(e)
        return future


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fineweb, "Workers", Inline)
    monkeypatch.setattr(fineweb, "BLOCKS_AHEAD", 0)  # what is read is added before the next is
    monkeypatch.setattr(fineweb, "get_tokenizer", lru_cache(fineweb.get_tokenizer))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no test here pulls a real plug


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 300)


def build(
    corpus: Corpus,
    out: Path,
    tokenizer: str = "bytes",
    shard_size: int = 100,
    max_tokens: int | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    options = {
        "dataset": "fineweb",
        "tokenizer": tokenizer,
        "shard_size": shard_size,
        "max_tokens": max_tokens,
    }
    return fineweb.build(corpus.source, out, options, workers)


def refused(corpus: Corpus, out: Path, *parts: object, **options: Any) -> str:
    """The one line that a build refuses with, which has these parts."""
    with pytest.raises(UserError) as error:
        build(corpus, out, **options)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    return message


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_dataset(a: dict[str, bytes], b: dict[str, bytes]) -> None:
    """Two folders' contents; only the manifests' counts of rows may depend on how the input was read."""
    assert a.keys() == b.keys()
    assert json.loads(a["dataset.json"]) == json.loads(b["dataset.json"])
    assert {k: v for k, v in a.items() if k.endswith(".bin")} == {
        k: v for k, v in b.items() if k.endswith(".bin")
    }


def identities(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again."""
    stats = {name: (folder / name).stat() for name in names}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def listed(folder: Path) -> list[str]:
    """The shards that the manifest's whole lines name."""
    try:
        lines = (folder / "manifest.jsonl").read_bytes().split(b"\n")[1:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line)["file"] for line in lines]


@pytest.fixture
def small(tmp_path: Path) -> Corpus:
    """A parquet and a .jsonl file, some 3000 tokens of the bytes tokeniser."""
    corpus = Corpus()
    rows = some_rows(40, 5, False)
    corpus.add(write_parquet(tmp_path / "a.parquet", rows, (13, 20)), rows)
    rows = some_rows(40, 6, True) + ODD_JSON[:2]
    corpus.add(write_jsonl(tmp_path / "b.jsonl", rows), rows)
    return corpus


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tokens_are_those_of_an_independent_pass(
    tmp_path: Path, tokenizer: str, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any shard size, any size of the blocks that are read."""
    corpus = mixed_corpus(tmp_path / "in")
    whole = Expected(corpus, tokenizer).whole
    assert whole > 3000
    n = 700 - whole % 700 + 700  # the input fills the last shard of 700
    rows = write_texts(
        tmp_path / "in" / "z.jsonl", ["x" * (n - 1) if tokenizer == "bytes" else "a" + " a" * (n - 2)]
    )
    corpus.add(tmp_path / "in" / "z.jsonl", rows)
    whole = Expected(corpus, tokenizer).whole
    assert whole % 700 == 0
    for shard_size in (100, 700, 997, whole - 1):
        expected = Expected(corpus, tokenizer, shard_size)
        for block_bytes in (1, 150, 5000, 2**20):
            monkeypatch.setattr(documents, "BLOCK_BYTES", block_bytes)
            out = tmp_path / f"{shard_size}-{block_bytes}"
            expected.check(out, build(corpus, out, tokenizer, shard_size))


def test_documents_that_end_where_shards_do(tmp_path: Path, inline: None, tiny_blocks: None) -> None:
    """Rows without text before, between and after; the last shard is full."""
    for name in ("a.jsonl", "a.parquet"):
        texts = ["", "", "x" * 99, "", "y" * 99, "z" * 199, "", "", "v" * 49, "w" * 49, "", "u" * 99, "", ""]
        corpus = Corpus([tmp_path / name], [write_texts(tmp_path / name, texts)])
        expected = Expected(corpus)
        assert (len(expected.parts), expected.whole) == (6, 600)
        assert expected.documents == [1, 1, 1, 0, 2, 1]
        expected.check(tmp_path / f"{name}-out", build(corpus, tmp_path / f"{name}-out"))


def test_a_shard_per_token(tmp_path: Path, inline: None) -> None:
    corpus = Corpus([tmp_path / "a.jsonl"], [write_texts(tmp_path / "a.jsonl", ["ab", "", "c"])])
    expected = Expected(corpus, shard_size=1)
    assert [part.tolist() for part in expected.parts] == [[256], [97], [98], [256], [99]]
    expected.check(tmp_path / "out", build(corpus, tmp_path / "out", shard_size=1))


def test_a_document_as_long_as_many_shards(tmp_path: Path, inline: None, tiny_blocks: None) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab é", k=n)) for n in (5, 5000, 1, 3000)]
    for name in ("a.jsonl", "a.parquet"):
        corpus = Corpus([tmp_path / name], [write_texts(tmp_path / name, texts)])
        expected = Expected(corpus)
        assert expected.documents.count(0) > 70
        expected.check(tmp_path / f"{name}-out", build(corpus, tmp_path / f"{name}-out"))


def test_parquet_string_types(tmp_path: Path, inline: None) -> None:
    rows = some_rows(50, 9, False)
    expected = None
    for kind in (pa.string(), pa.binary()):
        path = write_parquet(tmp_path / f"{kind}.parquet", rows, kind=kind)
        expected = Expected(Corpus([path], [rows]))
        expected.check(tmp_path / f"{kind}", build(Corpus([path], [rows]), tmp_path / f"{kind}"))
    large = pa.array([row.raw for row in rows], pa.large_binary())
    pq.write_table(pa.table({"text": large}), tmp_path / "large.parquet")
    corpus = Corpus([tmp_path / "large.parquet"], [rows])
    Expected(corpus).check(tmp_path / "large", build(corpus, tmp_path / "large"))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_max_tokens_is_exact(tmp_path: Path, small: Corpus, tokenizer: str, inline: None) -> None:
    """In mid-document, at a document's end, at a shard's end; as many as there are, and more."""
    whole = Expected(small, tokenizer)
    first_ends = np.cumsum([length for lengths in whole.lengths for length in lengths])
    at_end = int(first_ends[first_ends > 250][0])
    for max_tokens in (101, 200, 300, at_end - 1, at_end, at_end + 1, whole.whole, whole.whole + 1, 10**9):
        out = tmp_path / str(max_tokens)
        expected = Expected(small, tokenizer, 100, max_tokens)
        assert len(expected.stream) == min(max_tokens, whole.whole)
        expected.check(out, build(small, out, tokenizer, max_tokens=max_tokens))


def test_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pool, with hundreds of blocks at once in its hands."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)
    corpus = mixed_corpus(tmp_path / "in")
    expected = Expected(corpus, shard_size=500)
    made = []
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        expected.check(out, build(corpus, out, shard_size=500, workers=workers))
        made.append(contents(out))
    assert made[0] == made[1] == made[2]


# ---------------------------------------------------------------- stops, in this process


def resume(corpus: Corpus, out: Path, expected: Expected, reference: dict[str, bytes], **options: Any) -> int:
    """Build again: all is as without a stop, finished shards are untouched. Returns how many those are."""
    done = listed(out)
    before = identities(out, done)
    expected.check(out, build(corpus, out, **options))
    assert identities(out, done) == before
    same_dataset(contents(out), reference)
    return len(done)


class Moments:
    """Calls `then(n)` at the n-th moment at which a build has touched the disk or added a block.

    Before and after each call of os.replace, os.fsync, os.unlink, and around each block. In between
    nothing appears on the disk but bytes of a temporary file and of the manifest's last line.
    """

    def __init__(self, patch: pytest.MonkeyPatch, then: Callable[[int], None]) -> None:
        self.n = 0
        self._then = then
        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (os, "unlink"),
            (fineweb.ShardCutter, "add"),
            (fineweb, "begin_dataset"),
            (fineweb, "finish_dataset"),
        ):
            patch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._moment()
            result = function(*args, **kwargs)
            self._moment()
            return result

        return wrapped

    def _moment(self) -> None:
        self.n += 1
        self._then(self.n)


OPTIONS: list[dict[str, Any]] = [{"shard_size": 600}, {"shard_size": 600, "max_tokens": 2400}]


@pytest.mark.parametrize("options", OPTIONS)
def test_pulling_the_plug_at_every_moment(
    tmp_path: Path, small: Corpus, options: dict[str, Any], inline: None, tiny_blocks: None
) -> None:
    """The folder as it is at each moment of a build, with no chance to clean up, is gone on with."""
    expected = Expected(small, **options)
    copies: list[Path] = []

    def copy(n: int) -> None:
        copies.append(tmp_path / f"copy{n}")
        shutil.copytree(tmp_path / "out", copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        Moments(patch, copy)
        build(small, tmp_path / "out", **options)
    expected.check(tmp_path / "out")
    reference = contents(tmp_path / "out")
    assert len(copies) > 60
    temporary = Counter(len(list(folder.glob(".*"))) for folder in copies)
    assert temporary[0] > 10 and temporary[1] > 10
    done = [resume(small, folder, expected, reference, **options) for folder in copies]
    assert set(done) == set(range(len(expected.parts) + 1))


STOPS = [KeyboardInterrupt(), UserError("told to"), OSError(28, os.strerror(28)), MemoryError()]


@pytest.mark.parametrize("stop", STOPS)
def test_an_exception_at_every_moment(
    tmp_path: Path, small: Corpus, stop: BaseException, inline: None, tiny_blocks: None
) -> None:
    """It may stop the build anywhere, the rename of a shard or the manifest's line included; twice."""
    options = OPTIONS[0]
    expected = Expected(small, **options)
    build(small, tmp_path / "reference", **options)
    reference = contents(tmp_path / "reference")
    with pytest.MonkeyPatch.context() as patch:
        n_moments = Moments(patch, lambda n: None)
        build(small, tmp_path / "counted", **options)
    assert n_moments.n > 80
    stopped = 0
    for moment in range(1 + STOPS.index(stop), n_moments.n + 1, 4):
        out = tmp_path / f"out{moment}"
        for at in (moment, 20):

            def throw(n: int, at: int = at) -> None:
                if n == at:
                    raise stop

            try:
                with pytest.MonkeyPatch.context() as patch:
                    Moments(patch, throw)
                    build(small, out, **options)
            except BaseException as e:
                assert isinstance(e, UserError) or e is stop
                stopped += 1
            assert not list(out.glob(".*")), (moment, at)
        resume(small, out, expected, reference, **options)
    assert stopped > 30


def test_interrupts_between_rename_and_line_and_within_the_line(
    tmp_path: Path, small: Corpus, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Expected(small)
    build(small, tmp_path / "reference")
    reference = contents(tmp_path / "reference")
    append = fineweb.Manifest.append
    for n_bytes in (0, 1, 40):
        out = tmp_path / f"out{n_bytes}"

        def torn(self: Any, shard: dict[str, Any], n_bytes: int = n_bytes) -> None:
            if len(self.shards) == 7:
                with open(self.path, "ab") as f:
                    f.write(json.dumps(shard).encode()[:n_bytes])
                raise KeyboardInterrupt
            append(self, shard)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fineweb.Manifest, "append", torn)
            build(small, out)
        assert len(list(out.glob("*.bin"))) == 8 and len(listed(out)) == 7  # one more than the manifest knows
        with pytest.raises(UserError, match="did not finish"):
            TokenStream(out, "train")
        assert resume(small, out, expected, reference) == 7


def test_a_source_that_fails_now_and_then(
    tmp_path: Path, small: Corpus, inline: None, tiny_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After k blocks of each run, until it is done: every start is in mid-file."""
    expected = Expected(small)
    build(small, tmp_path / "reference")
    reference = contents(tmp_path / "reference")
    read = documents.read_blocks
    for error in (KeyboardInterrupt(), UserError("no network")):
        out, runs = tmp_path / type(error).__name__, 0

        def failing(source: Any, start: Any, error: BaseException = error) -> Iterator[Any]:
            for i, block in enumerate(read(source, start)):
                if i == 4:
                    raise error
                yield block

        with monkeypatch.context() as patch:
            patch.setattr(fineweb, "read_blocks", failing)
            patch.setattr(fineweb, "BLOCKS_AHEAD", 0)
            while True:
                runs += 1
                done = listed(out)
                before = identities(out, done)
                try:
                    build(small, out)
                except type(error) as e:
                    assert e is error
                    assert identities(out, done) == before and len(listed(out)) > len(done)
                else:
                    break
        assert runs > 4
        expected.check(out)
        same_dataset(contents(out), reference)


def test_rows_counted_are_the_same_after_a_stop(
    tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--max-tokens at a document's end, rows without text after it: in its block or in the next one."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 330)
    texts = ["a" * 99, "b" * 149, "c" * 49, "", "d" * 99, "", "e" * 99]
    for name in ("a.parquet", "a.jsonl"):
        corpus = Corpus([tmp_path / name], [write_texts(tmp_path / name, texts)])
        for max_tokens in (300, 400):
            reference = tmp_path / f"{name}{max_tokens}"
            build(corpus, reference, max_tokens=max_tokens)
            for n in range(1, max_tokens // 100):
                out = tmp_path / f"{name}{max_tokens}-{n}"
                shutil.copytree(reference, out)
                lines = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
                (out / "manifest.jsonl").write_bytes(b"".join(lines[: 1 + n]))
                (out / "dataset.json").unlink()
                build(corpus, out, max_tokens=max_tokens)
                assert (out / "dataset.json").read_bytes() == (reference / "dataset.json").read_bytes()


def test_dataset_json_is_the_same_byte_for_byte(tmp_path: Path, inline: None) -> None:
    rows = [plain("x" * 99, False), ODD_PARQUET[0], ODD_PARQUET[3], plain("y" * 300, False)]
    corpus = Corpus([write_parquet(tmp_path / "a.parquet", rows)], [rows])
    out = tmp_path / "out"
    build(corpus, out)
    before = (out / "dataset.json").read_bytes()
    (out / "dataset.json").unlink()
    build(corpus, out)
    assert (out / "dataset.json").read_bytes() == before


# ---------------------------------------------------------------- damages


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage_nothing_but_json(out: Path) -> None:
    (out / "dataset.json").unlink()


def test_damaged_shards_are_named_and_made_again(
    tmp_path: Path, small: Corpus, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that is finished, and in one that is not, where contents are compared too."""
    expected = Expected(small)
    build(small, tmp_path / "reference")
    reference = contents(tmp_path / "reference")
    names = list(expected.shards)
    whole_shard = 1024 + 200
    cases: list[tuple[str, int, Callable[[Path], Any]]] = [
        ("truncated", 4, lambda path: os.truncate(path, whole_shard - 2)),
        ("truncated header", 4, lambda path: os.truncate(path, 100)),
        ("empty", 6, lambda path: os.truncate(path, 0)),
        ("missing", 4, Path.unlink),
        ("last missing", len(names) - 1, Path.unlink),
        ("val truncated", 0, lambda path: os.truncate(path, 1100)),
        ("longer", 3, lambda path: path.write_bytes(path.read_bytes() + b"\0\0")),
        ("wrong magic", 3, lambda path: flip(path, 0)),
    ]
    for what, index, damage in cases:
        for finished in (True, False):
            out = tmp_path / f"{what}-{finished}"
            shutil.copytree(tmp_path / "reference", out)
            if not finished:
                (out / "dataset.json").unlink()
                (out / "dataset.unfinished").touch()
            damage(out / names[index])
            before = identities(out, names[:index])
            capsys.readouterr()
            expected.check(out, build(small, out))
            said = capsys.readouterr()
            assert str(out / names[index]) in said.out + said.err
            assert identities(out, names[:index]) == before, what
            same_dataset(contents(out), reference)
            build(small, out)
            assert capsys.readouterr().out.count("nothing to do") == 1


def flipped_bit(
    tmp_path: Path, small: Corpus, index: int, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Expected(small)
    out = tmp_path / "out"
    build(small, out)
    reference = contents(out)
    name = list(expected.shards)[index]
    (out / "dataset.json").unlink()
    flip(out / name, at)
    capsys.readouterr()
    build(small, out)
    assert str(out / name) in capsys.readouterr().err
    same_dataset(contents(out), reference)
    expected.check(out)


@pytest.mark.parametrize("index", [0, 1, 5, -1])
def test_a_flipped_bit_of_the_count_is_found(
    tmp_path: Path, small: Corpus, index: int, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped_bit(tmp_path, small, index, 8, capsys)


@pytest.mark.parametrize("at", [-1, 1024])
@pytest.mark.parametrize("index", [0, 1, 5, -1])
def test_a_flipped_bit_of_a_token_is_found(
    tmp_path: Path, small: Corpus, index: int, at: int, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped_bit(tmp_path, small, index, at, capsys)


@pytest.mark.parametrize("index", [0, 5])
def test_a_flipped_bit_of_the_header_is_found(
    tmp_path: Path, small: Corpus, index: int, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped_bit(tmp_path, small, index, 600, capsys)


def test_leftovers_are_cleared_away(tmp_path: Path, small: Corpus, inline: None) -> None:
    """Temporary files, shards beyond the manifest, a torn line, a half-written dataset.json."""
    expected = Expected(small)
    out = tmp_path / "out"
    build(small, out)
    reference = contents(out)
    lines = reference["manifest.jsonl"].splitlines(keepends=True)
    for last in (b"", b"{", lines[6][:-1], b"\0" * 30, b"\xff"):
        (out / "dataset.json").unlink(missing_ok=True)
        for name in (
            "fineweb_train_000007.bin",
            "fineweb_train_000003.bin",
            "manifest.jsonl",
            "dataset.json",
        ):
            (out / f".{name}.tmp").write_bytes(b"half")
        (out / "fineweb_train_000099.bin").write_bytes(b"stray")
        (out / "manifest.jsonl").write_bytes(b"".join(lines[:6]) + last)
        assert resume(small, out, expected, reference) == 5


def test_a_finished_folder_is_left_alone(
    tmp_path: Path, small: Corpus, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    info = build(small, out)
    before = identities(out, os.listdir(out))
    capsys.readouterr()
    assert build(small, out) == info
    assert capsys.readouterr().out.count("nothing to do") == 1
    assert identities(out, os.listdir(out)) == before
    names = [name for name in before if name.endswith(".bin")]
    for text in ("", "{}", '{"format_version": 1'):  # what is no dataset.json is written again
        (out / "dataset.json").write_text(text)
        assert build(small, out) == info
        assert identities(out, names) == {name: before[name] for name in names}
    (out / "dataset.unfinished").touch()  # killed between the last two steps
    Expected(small).check(out, build(small, out))
    assert identities(out, names) == {name: before[name] for name in names}


def broken_manifest(tmp_path: Path, corpus: Corpus, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """A manifest that is no manifest: one line about it, and nothing is lost."""
    out = tmp_path / "out"
    build(corpus, out)
    path = out / "manifest.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().splitlines())))
    before = contents(out)
    refused(corpus, out, path, "damaged")
    assert contents(out) == before


@pytest.mark.parametrize("first", [b"garbage", b"\0" * 50, b"", b"\xff\xfe", b'{"options": '])
def test_a_manifest_without_json_is_refused(
    tmp_path: Path, small: Corpus, first: bytes, inline: None
) -> None:
    broken_manifest(tmp_path, small, lambda lines: [first, *lines[1:]])


@pytest.mark.parametrize("first", [b"{}", b"null", b"[]", b"5", b'"x"', None])
def test_a_manifest_with_a_wrong_first_line_is_refused(
    tmp_path: Path, small: Corpus, first: bytes | None, inline: None
) -> None:
    broken_manifest(tmp_path, small, lambda lines: [first, *lines[1:]] if first is not None else lines[1:])


@pytest.mark.parametrize(
    "line", [b"5", b"[]", b"{}", b'{"next": 5}', b'{"next": [1]}', b'{"next": [0, 0, 0]}', b"garbage"]
)
def test_a_manifest_with_a_wrong_shard_is_refused(
    tmp_path: Path, small: Corpus, line: bytes, inline: None
) -> None:
    broken_manifest(tmp_path, small, lambda lines: [*lines[:3], line, *lines[4:]])


# ---------------------------------------------------------------- refusals


def test_other_options_and_inputs_are_refused(tmp_path: Path, small: Corpus, inline: None) -> None:
    """In a finished folder and in an unfinished one; then what it was begun with goes on."""
    expected = Expected(small, max_tokens=2000)
    out = tmp_path / "out"
    build(small, out, max_tokens=2000)
    lines = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    for finished in (True, False):
        if not finished:
            (out / "dataset.json").unlink()
            (out / "manifest.jsonl").write_bytes(b"".join(lines[:9]))
        before = contents(out)
        refused(small, out, out, "shard_size = 100, not 101", shard_size=101, max_tokens=2000)
        refused(small, out, out, "max_tokens = 2000, not None")
        refused(small, out, out, "max_tokens = 2000, not 2001", max_tokens=2001)
        if "TIKTOKEN_CACHE_DIR" in os.environ:
            refused(small, out, out, "tokenizer = bytes, not gpt2", tokenizer="gpt2", max_tokens=2000)
        fewer, more = Corpus(small.paths[:1]), Corpus([*small.paths, tmp_path / "c.jsonl"])
        write_texts(tmp_path / "c.jsonl", ["x"])
        refused(fewer, out, out, "2 input files, not 1", max_tokens=2000)
        refused(more, out, out, "2 input files, not 3", max_tokens=2000)
        original = small.paths[1].read_bytes()
        for at in (10, -5):
            flip(small.paths[1], at)
            refused(small, out, small.paths[1], "is not the file", max_tokens=2000)
            small.paths[1].write_bytes(original)
        small.paths[1].write_bytes(original + b"\n")
        refused(small, out, small.paths[1], "is not the file", max_tokens=2000)
        small.paths[1].write_bytes(original)
        assert contents(out) == before
    expected.check(out, build(small, out, max_tokens=2000))


def test_inputs_in_another_order_are_refused(tmp_path: Path, small: Corpus, inline: None) -> None:
    build(small, tmp_path / "out")
    a, b = small.paths
    a.rename(tmp_path / "z.parquet")
    refused(Corpus([tmp_path / "z.parquet", b]), tmp_path / "out", "b.jsonl is not the file")


def test_moved_inputs_are_the_same(
    tmp_path: Path, small: Corpus, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder may be mounted elsewhere: contents count, and order."""
    build(small, tmp_path / "out")
    (tmp_path / "moved").mkdir()
    moved = Corpus([Path(shutil.move(path, tmp_path / "moved")) for path in small.paths], small.files)
    build(moved, tmp_path / "out")
    assert "nothing to do" in capsys.readouterr().out


def test_foreign_shards_are_spared(tmp_path: Path, small: Corpus, inline: None) -> None:
    out = tmp_path / "out"
    for name in ("toy_train_000001.bin", "fineweb_val_000000.bin", "weights.bin"):
        out.mkdir()
        (out / name).write_bytes(b"precious")
        refused(small, out, out, name, "choose another --out")
        assert contents(out) == {name: b"precious"}
        shutil.rmtree(out)
    build(small, out)
    (out / "toy_train_000001.bin").write_bytes(b"precious")
    before = contents(out)
    refused(small, out, "toy_train_000001.bin")
    assert contents(out) == before


def test_a_folder_in_use_is_refused(tmp_path: Path, small: Corpus, inline: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    held = os.open(out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        refused(small, out, out, "another process")
        assert contents(out) == {}
    finally:
        os.close(held)
    Expected(small).check(out, build(small, out))


def test_inputs_that_are_none(tmp_path: Path, inline: None) -> None:
    out = tmp_path / "out"
    texts = tmp_path / "a.txt"
    texts.write_text("x")
    refused(Corpus([tmp_path / "none" / "*.parquet"]), out, "none/*.parquet", "no such files")
    refused(Corpus([tmp_path]), out, tmp_path, "folders only")
    refused(Corpus([texts]), out, texts, "expected .parquet, .jsonl or .jsonl.gz")
    assert not out.exists()


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"content": ["x"], "url": ["y"]}, ["no column text", "content, url"]),
        ({"text": [1, 2]}, ["column text is int64", "expected strings"]),
        ({"text": [["x"]]}, ["column text is list", "expected strings"]),
        ({"nested": [{"text": "x"}]}, ["no column text", "nested"]),
    ],
)
def test_parquet_without_text(tmp_path: Path, table: dict[str, Any], parts: list[str], inline: None) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path)
    refused(Corpus([path]), tmp_path / "out", path, *parts)
    assert not (tmp_path / "out").exists()


def test_damaged_parquet(tmp_path: Path, small: Corpus, inline: None) -> None:
    """At the start where the file cannot be opened; else when it is met, after the shards before it."""
    good = small.paths[0].read_bytes()
    bad = tmp_path / "bad.parquet"
    for content in (b"", b"PAR1", b"garbage" * 100, good[:-1], good[: len(good) // 2], good[:-9] + good[-8:]):
        bad.write_bytes(content)
        refused(Corpus([*small.paths, bad]), tmp_path / "out", bad)
        assert not (tmp_path / "out").exists()
    rows = some_rows(200, 8, False)
    write_parquet(bad, rows, (100,))
    whole = bad.read_bytes()
    second = pq.ParquetFile(bad).metadata.row_group(1).column(1)
    start = second.dictionary_page_offset or second.data_page_offset
    bad.write_bytes(whole[:start] + bytes(200) + whole[start + 200 :])
    corpus = Corpus([small.paths[0], bad], [small.files[0], rows])
    expected = Expected(corpus)
    refused(corpus, tmp_path / "out", bad, "cannot be read")
    done = listed(tmp_path / "out")
    assert len(done) > 10
    assert not list((tmp_path / "out").glob(".*"))
    for name in done:
        assert (tmp_path / "out" / name).read_bytes() == expected.shards[name]


def damaged_gz(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """One line; the shards before stay; with the file repaired the build, begun anew, is right."""
    rng = random.Random(0)
    rows = [plain("".join(rng.choices("abcdefgh ", k=200)), True) for _ in range(300)]
    path, out = tmp_path / "a.jsonl.gz", tmp_path / "out"
    write_jsonl(path, rows)
    path.write_bytes(change(path.read_bytes()))
    refused(Corpus([path]), out, path, "cannot be read", shard_size=1000)
    assert not list(out.glob(".*"))
    expected = Expected(Corpus([path], [rows]), shard_size=1000)
    done = listed(out)
    assert sorted(done) == sorted(file.name for file in out.glob("*.bin"))
    for name in done:
        assert (out / name).read_bytes() == expected.shards[name]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"not gzip" + data,
        lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:],  # the checksum
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),  # the length
    ],
)
def test_truncated_gz(
    tmp_path: Path, change: Callable[[bytes], bytes], inline: None, tiny_blocks: None
) -> None:
    damaged_gz(tmp_path, change)


def test_gz_damaged_in_the_middle(tmp_path: Path, inline: None, tiny_blocks: None) -> None:
    damaged_gz(tmp_path, lambda data: data[:5000] + b"\xff" * 100 + data[5100:])


BAD_LINES = [
    (b'{"text": "x"', "not valid JSON"),
    (b"text", "not valid JSON"),
    (b'{"text": "x"} {"text": "y"}', "not valid JSON"),
    (b"\xef\xbb\xbf" + b'{"text": "x"}', "not valid JSON"),
    (b"\x00", "not valid JSON"),
    (b'{"content": "x"}', 'a string "text"'),
    (b'{"text": 5}', 'a string "text"'),
    (b'{"text": ["x\\ny"]}', 'a string "text"'),
    (b'["text"]', 'a string "text"'),
    (b'"text"', 'a string "text"'),
    (b"null", 'a string "text"'),
    (b"1" * 5000, "not valid JSON"),
    (b'{"text": {"a": "' + b"x" * 10**5 + b'"}}', 'a string "text"'),
]


def bad_line(tmp_path: Path, line: bytes, part: str) -> None:
    rows = [*some_rows(30, 10, True), Row(b"", "", EMPTY)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, Row(line), plain("end", True)])
    for block_bytes in (1, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "BLOCK_BYTES", block_bytes)
            refused(Corpus([path]), tmp_path / f"{block_bytes}", f"{path}, line 32: ", part)
    done = listed(tmp_path / "1")  # what comes before is finished
    expected = Expected(Corpus([path], [rows]))
    assert len(done) == expected.whole // 100 > 3
    for name in done:
        assert (tmp_path / "1" / name).read_bytes() == expected.shards[name]


@pytest.mark.parametrize(("line", "part"), BAD_LINES)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, part: str, inline: None) -> None:
    bad_line(tmp_path, line, part)


@pytest.mark.parametrize("line", [b"[" * 10**5, b'{"text":' * 10**5])
def test_a_deeply_nested_line_is_named(tmp_path: Path, line: bytes, inline: None) -> None:
    bad_line(tmp_path, line, "")


@needs_gpt2
def test_a_million_spaces_are_tokenised(tmp_path: Path, inline: None) -> None:
    """GPT-2's pattern makes one token of each space before a word; the regex engine's stack has an end."""
    texts = ["a", " " * 10**6 + "b", "c", "d" * 9]
    corpus = Corpus([tmp_path / "a.jsonl"], [write_texts(tmp_path / "a.jsonl", texts)])
    build(corpus, tmp_path / "out", "gpt2", shard_size=10**5)
    streams = [TokenStream(tmp_path / "out", split) for split in ("val", "train")]
    tokens = [token for stream in streams for token in stream.read(0, stream.n_tokens).tolist()]
    assert tiktoken.get_encoding("gpt2").decode(tokens) == "".join(f"<|endoftext|>{text}" for text in texts)


def test_too_little_text(tmp_path: Path, inline: None) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    for texts, parts in (
        ([], ["no documents with text"]),
        (["", "", ""], ["no documents with text"]),
        (["x" * 50], ["51 tokens", "--shard-size 5"]),
        (["x" * 99], ["100 tokens", "more than one shard of 100", "--shard-size 10"]),
    ):
        write_texts(path, texts)
        refused(Corpus([path]), out, out, *parts)
        with pytest.raises(UserError, match="did not finish"):
            dataset_info(out)
        assert not list(out.glob(".*"))
        shutil.rmtree(out)
    rows = write_texts(path, ["x" * 100])
    corpus = Corpus([path], [rows])
    Expected(corpus).check(out, build(corpus, out))  # one token of training is enough


def test_names_with_brackets(tmp_path: Path, small: Corpus, inline: None) -> None:
    """A name that the shell has expanded, or that the user has mistyped, is not passed over in silence."""
    odd = tmp_path / "c[1].jsonl"
    rows = write_texts(odd, ["bracket"] * 30)
    corpus = Corpus([*small.paths, odd], [*small.files, rows])
    Expected(corpus).check(tmp_path / "odd", build(corpus, tmp_path / "odd"))


def test_a_name_that_matches_nothing_is_refused(tmp_path: Path, small: Corpus, inline: None) -> None:
    refused(Corpus([*small.paths, tmp_path / "absent.parquet"]), tmp_path / "out", "absent.parquet")


def test_names_that_are_not_utf8(tmp_path: Path, small: Corpus, inline: None) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    try:
        rows = write_texts(path, ["x" * 150])
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    corpus = Corpus([*small.paths, path], [*small.files, rows])
    expected = Expected(corpus)
    expected.check(tmp_path / "out", build(corpus, tmp_path / "out"))
    (tmp_path / "out" / "dataset.json").unlink()
    expected.check(tmp_path / "out", build(corpus, tmp_path / "out"))


def test_no_room_at_the_start(
    tmp_path: Path, small: Corpus, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    usage = shutil.disk_usage(tmp_path)._replace(free=500)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        refused(small, out, out, "0.0 GB free", "--out", "--max-tokens")
    assert not list(out.glob("*.bin"))
    Expected(small).check(out, build(small, out))


@pytest.mark.parametrize("code", [28, 5])  # ENOSPC, EIO
def test_a_disk_that_refuses(
    tmp_path: Path, small: Corpus, code: int, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-shard, in its header, at the end, in the manifest: one line; then room is made."""
    expected = Expected(small)
    build(small, tmp_path / "reference")
    reference = contents(tmp_path / "reference")
    real = __import__("infra.files").files.atomic_file

    class Full:
        """A file that takes so many bytes, all shards together, and then no more."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            if state["left"] < len(bytes(data)):
                self.file.write(bytes(data)[: state["left"]])
                raise OSError(code, os.strerror(code))
            state["left"] -= len(bytes(data))
            return int(self.file.write(data))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    @contextmanager
    def filling(path: Path) -> Iterator[Any]:
        with real(path) as file:
            yield Full(file)

    state = {"left": 0}
    for left in (0, 500, 1024, 1100, 3 * 1224, 3 * 1224 + 1, 5 * 1224 - 2, 8 * 1224 + 1024):
        out = tmp_path / f"out{left}"
        state["left"] = left
        with monkeypatch.context() as patch:
            patch.setattr(shards, "atomic_file", filling)
            message = refused(small, out, out / list(expected.shards)[left // 1224], os.strerror(code))
            assert ("make room" in message) == (code == 28)
        names = list(expected.shards)[: left // 1224]
        assert listed(out) == names
        assert sorted(path.name for path in out.glob("*.bin")) == sorted(names)
        assert not list(out.glob(".*"))
        for name in names:
            assert (out / name).read_bytes() == expected.shards[name]
        assert resume(small, out, expected, reference) == len(names)


# ---------------------------------------------------------------- the command line


def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object
) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout, stderr."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["fineweb.py", *map(str, args)])
    capsys.readouterr()
    try:
        config.run_main(fineweb.main)
        code = 0
    except SystemExit as e:
        code = int(e.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_wrong_options_are_one_line(
    tmp_path: Path, small: Corpus, inline: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    files = ["--files", *small.paths]
    out = tmp_path / "out"
    cases: list[tuple[list[Any], str]] = [
        ([*files, "--pretokenized"], "not together with"),
        ([*files, "--edu"], "not together with"),
        ([*files, "--shards", "3"], "--shards: "),
        ([*files, "--max-tokens", "100", "--shard-size", "100"], "--max-tokens 100: expected more than"),
        ([*files, "--max-tokens", "100000000"], "--max-tokens 100000000"),
        ([*files, "--workers", "0"], "--workers"),
        ([*files, "--workers", "-1"], "--workers"),
        ([*files, "--workers", "two"], "'two'"),
        ([*files, "--shard-size", "0"], "--shard-size"),
        ([*files, "--shard-size", str(2**31)], "2147483647"),
        ([*files, "--max-tokens", "1e9"], "'1e9'"),
        ([*files, "--tokenizer", "gpt3"], "'gpt3'"),
        ([*files, "--shard", "3"], "--shard"),
        (["--files"], "--files"),
        (["--files", tmp_path / "*.txt"], "no such files"),
        (["--files", __file__], "expected .parquet"),
        ([*files, "--out", __file__, "--shard-size", "100"], __file__),
    ]
    for args, part in cases:
        args = [*([] if "--out" in args else ["--out", out]), "--tokenizer", "bytes", *args]
        code, stdout, stderr = run_here(monkeypatch, capsys, *args)
        assert (code, stdout) == (2, ""), args
        assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
        assert part in stderr
    assert not out.exists()


def test_the_command_in_this_process(
    tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A quoted pattern, sorted by path, whatever the order of the patterns."""
    corpus = mixed_corpus(tmp_path / "in")
    out = tmp_path / "out"
    patterns = [tmp_path / "in" / "*.jsonl*", tmp_path / "in" / "**" / "*.parquet", corpus.paths[0]]
    args = ["--files", *patterns, "--out", out, "--tokenizer", "bytes", "--shard-size", "1_000"]
    code, stdout, stderr = run_here(monkeypatch, capsys, *args)
    assert code == 0 and "error" not in stderr
    expected = Expected(corpus, shard_size=1000)
    expected.check(out)
    for part in (f"{len(expected.stream) - 1000:,} bytes tokens", "6 local files, a.parquet to f.parquet"):
        assert part in stdout
    assert f"{expected.notes()[EMPTY]} {EMPTY}" in stdout
    code, stdout, stderr = run_here(monkeypatch, capsys, *args)
    assert code == 0 and "nothing to do" in stdout


def command(*args: object) -> list[str]:
    return [sys.executable, str(ROOT / "data" / "fineweb.py"), *map(str, args)]


def apart_from_the_bar(stderr: str, out: Path) -> list[str]:
    """Lines of stderr."""
    lines = [line.strip() for line in re.split("[\r\n]+", stderr)]
    return [line for line in lines if line and not line.startswith(f"{out.name}: ")]


def test_a_missing_vocabulary_is_one_line(tmp_path: Path, small: Corpus) -> None:
    env = os.environ | {"TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    args = command("--files", *small.paths, "--out", tmp_path / "out", "--tokenizer", "gpt2")
    result = subprocess.run(args, capture_output=True, text=True, cwd="/", env=env, timeout=HANGS)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "TIKTOKEN_CACHE_DIR" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder(tmp_path: Path, small: Corpus, inline: None) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o500)
    refused(small, out, out, "cannot be written")


def test_a_file_size_limit_in_mid_shard(tmp_path: Path) -> None:
    """As a full disk: one line, no temporary file; without the limit the same command goes on."""
    rows = write_texts(tmp_path / "a.jsonl", ["x" * 999] * 50)
    out = tmp_path / "out"
    expected = Expected(Corpus([tmp_path / "a.jsonl"], [rows]), shard_size=20_000)
    args = command(
        "--files", tmp_path / "a.jsonl", "--out", out, "--tokenizer", "bytes",
        "--shard-size", 20_000, "--workers", 1,
    )  # fmt: skip

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    kwargs: dict[str, Any] = {"capture_output": True, "text": True, "cwd": "/", "timeout": HANGS}
    result = subprocess.run(args, preexec_fn=limit, **kwargs)
    said = apart_from_the_bar(result.stderr, out)
    assert (result.returncode, result.stdout, len(said)) == (2, "", 1)
    assert said[0].startswith(f"error: {out / 'fineweb_val_000000.bin'}: cannot be written: File too large")
    assert sorted(os.listdir(out)) == ["dataset.unfinished", "manifest.jsonl"]
    result = subprocess.run(args, **kwargs)
    assert (result.returncode, apart_from_the_bar(result.stderr, out)) == (0, [])
    expected.check(out)


# ---------------------------------------------------------------- kills


def children(pid: int) -> list[int]:
    """The workers and multiprocessing's resource tracker."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_worker(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@contextmanager
def running(*args: object) -> Iterator[subprocess.Popen[str]]:
    """The command with its workers in a process group of their own, which does not outlive the block."""
    process = subprocess.Popen(
        command(*args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def workers_of(process: subprocess.Popen[str], n: int) -> list[int]:
    """Its workers, once there are n."""
    wait_until(lambda: sum(map(is_worker, children(process.pid))) == n, "no workers")
    return [pid for pid in children(process.pid) if is_worker(pid)]


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")


@pytest.fixture
def large(tmp_path: Path) -> Corpus:
    """Two .jsonl files, 12 MB of documents that are not all alike."""
    rng = random.Random(20240520)
    texts = ["".join(rng.choices("abcdefgh \né", k=rng.randint(1, 3000))) for _ in range(500)]
    rows = [plain(text, True) for text in texts * 16]
    corpus = Corpus()
    for i, part in enumerate((rows[:3000], rows[3000:])):
        corpus.add(write_jsonl(tmp_path / f"{i}.jsonl", part), part)
    return corpus


def large_options(corpus: Corpus, out: Path) -> list[Any]:
    files = ["--files", *corpus.paths, "--out", out]
    return [*files, "--tokenizer", "bytes", "--shard-size", 200_000, "--workers", 2]


@needs_proc
def test_kills_at_random_moments(tmp_path: Path, large: Corpus) -> None:
    """Kills, Ctrl-C and SIGTERM, each in mid-work, until it is done; no worker outlives the command."""
    rng = random.Random(20240520)
    expected = Expected(large, shard_size=200_000)
    n_shards = len(expected.parts)
    assert n_shards > 60
    out = tmp_path / "out"
    args = large_options(large, out)
    ends = ["kill", "int", "term", "kill", "int", "kill", "term"]
    at = [0, *sorted(rng.sample(range(1, n_shards * 3 // 4), len(ends) - 1))]
    for end, n_before in zip(ends, at, strict=True):
        done = listed(out)
        before = identities(out, done)
        with running(*args) as process:
            wait_until((out / "manifest.jsonl").exists, "it did not begin")
            workers_of(process, 2)
            wait_until(lambda: len(listed(out)) >= n_before, "no shards")  # noqa: B023
            if n_before == 0:
                refused(large, out, out, "another process", shard_size=200_000)
            assert process.poll() is None, end
            family = children(process.pid)
            if end == "int":  # Ctrl-C reaches all of the terminal's processes
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal({"kill": signal.SIGKILL, "term": signal.SIGTERM}[end])
            stdout, stderr = process.communicate(timeout=HANGS)
            wait_until(lambda: not any(map(is_running, family)), "processes are left")  # noqa: B023
        assert (process.returncode, stdout) == ({"kill": -9, "int": 130, "term": 143}[end], "")
        if end != "kill":
            said = apart_from_the_bar(stderr, out)
            assert stderr.count("stopped; ") == 1 and "error:" not in stderr, stderr
            assert len(said) == 1, stderr
            assert not list(out.glob(".*"))
        assert not (out / "dataset.json").exists() and (out / "dataset.unfinished").exists()
        assert identities(out, done) == before
        assert len(listed(out)) >= n_before
    done = listed(out)
    before = identities(out, done)
    result = subprocess.run(command(*args), capture_output=True, text=True, cwd="/", timeout=HANGS)
    assert (result.returncode, apart_from_the_bar(result.stderr, out)) == (0, [])
    assert identities(out, done) == before
    expected.check(out)


@needs_proc
def test_workers_do_not_hear_ctrl_c(tmp_path: Path, large: Corpus) -> None:
    """It reaches all processes of the terminal, and a worker's traceback is of no use to anybody."""
    with running(*large_options(large, tmp_path / "out")) as process:
        workers = workers_of(process, 2)
        wait_until(lambda: bool(listed(tmp_path / "out")), "no shards")
        for pid in workers:
            status = Path(f"/proc/{pid}/status").read_text()
            masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Blk|Ign):\t(\w+)$", status, re.M)]
            assert len(masks) == 2
            assert (masks[0] | masks[1]) >> (signal.SIGINT - 1) & 1


def check_worker_killed(process: subprocess.Popen[str], out: Path) -> None:
    stdout, stderr = process.communicate(timeout=HANGS)
    assert (process.returncode, stdout) == (2, "")
    said = apart_from_the_bar(stderr, out)
    assert len(said) == 1 and said[0].startswith("error: a worker process was killed"), stderr
    assert not list(out.glob(".*"))


@needs_proc
def test_a_worker_killed_while_it_starts(tmp_path: Path, small: Corpus) -> None:
    out = tmp_path / "out"
    args = [
        "--files",
        *small.paths,
        "--out",
        out,
        "--tokenizer",
        "bytes",
        "--shard-size",
        100,
        "--workers",
        2,
    ]
    with running(*args) as process:
        os.kill(workers_of(process, 2)[1], signal.SIGKILL)
        check_worker_killed(process, out)
    result = subprocess.run(command(*args), capture_output=True, text=True, cwd="/", timeout=HANGS)
    assert (result.returncode, apart_from_the_bar(result.stderr, out)) == (0, [])
    Expected(small).check(out)


@needs_proc
@pytest.mark.parametrize("n_killed", [1, 2])
def test_a_worker_killed_while_it_sends_tokens(tmp_path: Path, large: Corpus, n_killed: int) -> None:
    """One of two or both, in the midst of a message, which the command has not read yet."""
    out = tmp_path / "out"
    args = large_options(large, out)
    with running(*args) as process:
        workers = workers_of(process, 2)
        wait_until(lambda: len(listed(out)) >= 3, "no shards")
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # pipes fill up
        for pid in workers[:n_killed]:
            os.kill(pid, signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        check_worker_killed(process, out)
    done = listed(out)
    before = identities(out, done)
    result = subprocess.run(command(*args), capture_output=True, text=True, cwd="/", timeout=HANGS)
    assert (result.returncode, apart_from_the_bar(result.stderr, out)) == (0, [])
    assert identities(out, done) == before
    Expected(large, shard_size=200_000).check(out)


STOP_WHILE_A_WORKER_STARTS = """
import multiprocessing.util, signal, sys, threading, time
sys.path.insert(0, {root!r})
from data import fineweb
spawn, n = multiprocessing.util.spawnv_passfds, 0

def spawn_and_stop(path, args, passfds):
    global n
    pid = spawn(path, args, passfds)
    n += 1
    if n == 3:  # the resource tracker is the first
        other = next(t for t in threading.enumerate() if t is not threading.main_thread())
        signal.pthread_kill(other.ident, {signum})  # the system may choose any thread
        time.sleep(0.1)
    return pid

multiprocessing.util.spawnv_passfds = spawn_and_stop
sys.argv = ["fineweb.py", *{args!r}]
fineweb.run_main(fineweb.main)
"""


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_while_the_workers_start(tmp_path: Path, small: Corpus, signum: int, status: int) -> None:
    """At the worst moment: a worker runs, and has not been told yet what to do."""
    out = tmp_path / "out"
    args = [
        *("--files", *map(str, small.paths), "--out", str(out), "--tokenizer", "bytes"),
        *("--shard-size", "100", "--workers", "3"),
    ]
    script = STOP_WHILE_A_WORKER_STARTS.format(root=str(ROOT), args=args, signum=int(signum))
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd="/", timeout=HANGS
    )
    assert (result.returncode, result.stdout) == (status, "")
    said = apart_from_the_bar(result.stderr, out)
    assert len(said) == 1 and said[0].startswith("stopped; "), result.stderr
    result = subprocess.run(command(*args), capture_output=True, text=True, cwd="/", timeout=HANGS)
    assert result.returncode == 0
    Expected(small).check(out)
