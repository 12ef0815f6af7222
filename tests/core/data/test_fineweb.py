"""data.fineweb: tokens against an independent pass, resuming from every state, kills, damages, refusals.

Most builds are of small blocks, one at a time (`inline`); the tests of the command are of full ones.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from conftest import flip, needs_gpt2, one_line

from data import documents, fineweb
from data.dataset import TokenStream, dataset_info
from data.documents import hub_dataset, local_files
from infra.cli import UserError
from infra.files import exclusive_lock

ROOT = Path(__file__).resolve().parents[3]
HANGS = 60  # seconds: far more than any of the commands here takes
EMPTY, REPAIRED = "without text", "repaired UTF-8"


# ---------------------------------------------------------------- inputs


class Row(NamedTuple):
    """A row of an input, and what is expected of it."""

    raw: bytes | None  # parquet: the text; JSON: the line
    text: str = ""  # "": no document
    note: str = ""


ODD_PARQUET = [
    Row(None, "", EMPTY),
    Row(b"", "", EMPTY),
    Row(b"caf\xe9 \xff\xfe!", "caf\ufffd \ufffd\ufffd!", REPAIRED),
    Row(b"\xed\xa0\x80", "\ufffd\ufffd\ufffd", REPAIRED),  # UTF-8 of half a surrogate pair
    Row(b"a<|endoftext|>\x00b", "a<|endoftext|>\x00b"),
    Row("漢字🎉 e\u0301\r\n".encode(), "漢字🎉 e\u0301\r\n"),
]
ODD_JSON = [
    Row(b"  \t \r", "", EMPTY),
    Row(b'{"text": ""}', "", EMPTY),
    Row(b'{"text": null}', "", EMPTY),
    Row(b'{"text": "half \\ud83d pair"}', "half \ufffd pair", REPAIRED),
    Row(b'{"text": "\\ud83c\\udf89"}', "🎉"),
    Row(b'{"text": "raw \xff byte"}', "raw \ufffd byte", REPAIRED),
    Row(b' {"a": [1, {"text": 0}], "text": "<|endoftext|>", "z": null} \r', "<|endoftext|>"),
    Row(b'{"text": "\\u0000\\n"}', "\x00\n"),
]


def plain(text: str, is_json: bool) -> Row:
    raw = json.dumps({"id": 1, "text": text}) if is_json else text
    return Row(raw.encode(), text, "" if text else EMPTY)


def some_rows(n: int, seed: int, is_json: bool, longest: int = 80) -> list[Row]:
    """Documents of 1 to `longest` characters, with odd ones in between."""
    rng = random.Random(seed)
    words = ["alpha ", "Beta", "  ", "\n", "é", "1999 ", "<|endoftext|>", "🎉", ".", "naïve "]
    rows = []
    for _ in range(n):
        text = "".join(rng.choices(words, k=rng.randint(1, longest)))[:longest]
        odd = rng.choice(ODD_JSON if is_json else ODD_PARQUET)
        rows.append(odd if rng.random() < 0.25 else plain(text, is_json))
    return rows


def write(path: Path, rows: list[Row], group: int = 17, column: str = "text") -> Path:
    """A .parquet, .jsonl or .jsonl.gz file of the rows; the text is not checked for UTF-8."""
    if path.suffix == ".parquet":
        raw = pa.array([row.raw for row in rows], pa.binary())
        text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), raw.null_count)
        nested = pa.array([[{"text": f"no {i}"}] * (i % 3) for i in range(len(rows))])
        pq.write_table(pa.table({"nested": nested, column: text}), path, row_group_size=group)
    else:
        data = b"".join((row.raw or b"") + b"\n" for row in rows)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


class Corpus(NamedTuple):
    """Input files, in their order, with their rows."""

    paths: list[Path]
    files: list[list[Row]]


def make_corpus(folder: Path, files: dict[str, list[Row]]) -> Corpus:
    folder.mkdir(exist_ok=True)
    return Corpus([write(folder / name, rows) for name, rows in files.items()], list(files.values()))


def texts_corpus(folder: Path, *texts: str, name: str = "a.jsonl") -> Corpus:
    return make_corpus(folder, {name: [plain(text, "jsonl" in name) for text in texts]})


@pytest.fixture
def small(tmp_path: Path) -> Corpus:
    """All formats, odd rows at the starts and ends of files, empty files: some 5000 tokens of "bytes"."""
    return make_corpus(
        tmp_path / "in",
        {
            "a.parquet": ODD_PARQUET[:2] + some_rows(60, 1, False) + ODD_PARQUET,
            "b.parquet": [],
            "c.jsonl": some_rows(40, 2, True) + ODD_JSON + [plain("long " * 200, True)] + ODD_JSON[:3],
            "d.jsonl": [],
            "e.jsonl.gz": ODD_JSON[:3] + some_rows(30, 3, True),
            "f.parquet": some_rows(20, 4, False) + ODD_PARQUET[:2],
        },
    )


# ---------------------------------------------------------------- what is expected


class Expected:
    """The dataset that a corpus should become, without a line of data/."""

    def __init__(
        self, corpus: Corpus, tokenizer: str = "bytes", shard_size: int = 100, max_tokens: int | None = None
    ) -> None:
        def encode(text: str) -> list[int]:
            if tokenizer == "bytes":
                return [256, *text.encode()]
            return [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]

        rows = [row for file in corpus.files for row in file]
        encoded = [encode(row.text) if row.text else [] for row in rows]
        stream = np.array([token for tokens in encoded for token in tokens], "<u2")
        self.n_whole, self.stream = len(stream), stream[:max_tokens]
        parts = [self.stream[i : i + shard_size] for i in range(0, len(self.stream), shard_size)]
        self.shards = {
            f"fineweb_{'train' if i else 'val'}_{i:06d}.bin": np.array(
                [20240520, 1, len(part)] + [0] * 253, "<i4"
            ).tobytes()
            + part.tobytes()
            for i, part in enumerate(parts)
        }
        starts = np.cumsum([0, *(len(tokens) for tokens in encoded)])[:-1][[bool(t) for t in encoded]]
        n_val = len(parts[0])
        self.documents = {
            "val": int((starts < n_val).sum()),
            "train": int(((starts >= n_val) & (starts < len(self.stream))).sum()),
        }
        self.rows = dict(Counter(row.note for row in rows if row.note)) if max_tokens is None else None

    def check(self, out: Path) -> None:
        """The folder holds exactly that."""
        found = contents(out)
        assert sorted(found) == sorted([*self.shards, "manifest.jsonl", "dataset.json"])
        assert {name: content for name, content in found.items() if name in self.shards} == self.shards
        info = dataset_info(out)
        assert [(file["file"], file["sha256"]) for file in info["shards"]] == [
            (name, hashlib.sha256(content).hexdigest()) for name, content in self.shards.items()
        ]
        assert {split: counts["documents"] for split, counts in info["splits"].items()} == self.documents
        assert self.rows is None or info["rows"] == self.rows
        train = TokenStream(out, "train")
        np.testing.assert_array_equal(
            train.read(0, train.n_tokens), self.stream[len(self.stream) - train.n_tokens :]
        )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def listed(folder: Path) -> list[str]:
    """The finished shards, by the manifest's whole lines."""
    path = folder / "manifest.jsonl"
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    return [json.loads(line)["file"] for line in lines]


def identities(folder: Path, names: list[str]) -> list[tuple[int, int]]:
    """What changes when a file is written again."""
    return [((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in names]


# ---------------------------------------------------------------- building in this process


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fineweb, "BLOCKS_AHEAD", 0)  # each block is added before the next one is read
    monkeypatch.setattr(documents, "BLOCK_BYTES", 300)
    monkeypatch.setattr(documents, "BATCH_ROWS", 7)
    monkeypatch.setattr(fineweb, "get_tokenizer", lru_cache(fineweb.get_tokenizer))
    monkeypatch.setattr(os, "fsync", lambda file: None)


def build(
    corpus: Corpus,
    out: Path,
    tokenizer: str = "bytes",
    shard_size: int = 100,
    max_tokens: int | None = None,
    column: str = "text",
) -> dict[str, Any]:
    options = {
        "dataset": "fineweb",
        "tokenizer": tokenizer,
        "shard_size": shard_size,
        "max_tokens": max_tokens,
    }
    return fineweb.build(local_files([str(path) for path in corpus.paths], column), out, options, 1)


def refused(corpus: Corpus, out: Path, *parts: object, **options: Any) -> None:
    """The build ends with one line that has these parts."""
    with one_line(*parts):
        build(corpus, out, **options)


@pytest.mark.parametrize("shard_size", [1, 100, 997])
def test_tokens_are_those_of_an_independent_pass(
    tmp_path: Path, small: Corpus, shard_size: int, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shard_size == 1:  # a shard per token
        small = texts_corpus(tmp_path / "tiny", "ab", "", "c")
    for block_bytes in (1, 2**20):
        monkeypatch.setattr(documents, "BLOCK_BYTES", block_bytes)
        build(small, tmp_path / f"{block_bytes}", shard_size=shard_size)
        Expected(small, shard_size=shard_size).check(tmp_path / f"{block_bytes}")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_documents_that_end_where_shards_do(tmp_path: Path, name: str, inline: None) -> None:
    """Rows without text before, between and after; the last shard is full."""
    texts = ["", "", "x" * 99, "", "y" * 99, "z" * 199, "", "", "v" * 49, "w" * 49, "", "u" * 99, "", ""]
    corpus = texts_corpus(tmp_path / "in", *texts, name=name)
    expected = Expected(corpus)
    assert (len(expected.shards), expected.n_whole) == (6, 600)
    build(corpus, tmp_path / "out")
    expected.check(tmp_path / "out")


def test_max_tokens_is_exact(tmp_path: Path, small: Corpus, inline: None) -> None:
    """In mid-document, at shard ends, as many as there are, and more; also when resumed."""
    n = Expected(small).n_whole
    for max_tokens in (101, 200, 250, 300, n - 1, n, n + 1):
        out = tmp_path / str(max_tokens)
        build(small, out, max_tokens=max_tokens)
        Expected(small, max_tokens=max_tokens).check(out)
        before = (out / "dataset.json").read_bytes()
        truncate_manifest(out, 2)
        build(small, out, max_tokens=max_tokens)
        assert (out / "dataset.json").read_bytes() == before


def test_column(tmp_path: Path, inline: None) -> None:
    rows = [plain("x" * 99, False), plain("y" * 300, False)]
    lines = [Row(json.dumps({"content": "z" * 50, "text": 3}).encode(), "z" * 50)]
    paths = [write(tmp_path / "a.parquet", rows, column="content"), write(tmp_path / "b.jsonl", lines)]
    build(Corpus(paths, []), tmp_path / "out", column="content")
    Expected(Corpus(paths, [rows, lines])).check(tmp_path / "out")


@needs_gpt2
def test_gpt2(tmp_path: Path, small: Corpus, inline: None) -> None:
    """A million spaces: GPT-2's pattern makes a token of each; the regex engine's stack has an end."""
    build(small, tmp_path / "small", "gpt2")
    Expected(small, "gpt2").check(tmp_path / "small")
    texts = ["a", " " * 10**6 + "b", "c", "d" * 9]
    build(texts_corpus(tmp_path / "in2", *texts), tmp_path / "out", "gpt2", shard_size=10**5)
    streams = [TokenStream(tmp_path / "out", split) for split in ("val", "train")]
    tokens = [token for stream in streams for token in stream.read(0, stream.n_tokens).tolist()]
    assert tiktoken.get_encoding("gpt2").decode(tokens) == "".join(f"<|endoftext|>{text}" for text in texts)


# ---------------------------------------------------------------- resuming


def truncate_manifest(out: Path, n_shards: int, torn: bytes = b"") -> None:
    """The folder as a crash leaves it after `n_shards` shards."""
    lines = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (out / "manifest.jsonl").write_bytes(b"".join(lines[: 1 + n_shards]) + torn)
    (out / "dataset.json").unlink(missing_ok=True)
    (out / "dataset.unfinished").touch()


def test_resumes_after_every_shard(tmp_path: Path, small: Corpus, inline: None) -> None:
    """Finished shards stay untouched; temporary files, unlisted shards and a torn line are cleared away."""
    expected = Expected(small, shard_size=200)
    build(small, tmp_path / "reference", shard_size=200)
    reference = contents(tmp_path / "reference")
    lines = reference["manifest.jsonl"].splitlines()
    for n_shards in (0, 1, 2, 7, 12, len(expected.shards) - 1, len(expected.shards)):
        out = tmp_path / f"out{n_shards}"
        shutil.copytree(tmp_path / "reference", out)
        torn = random.Random(n_shards).choice([b"", b"{", b"\0" * 30, lines[-1][:40]])
        truncate_manifest(out, n_shards, torn)
        for name in list(expected.shards)[n_shards + 1 :]:
            (out / name).unlink()
        (out / ".fineweb_train_000003.bin.tmp").write_bytes(b"half")
        done = list(expected.shards)[:n_shards]
        before = identities(out, done)
        build(small, out, shard_size=200)
        assert identities(out, done) == before
        assert contents(out) == reference


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), UserError("no network")])
def test_an_input_that_fails_again_and_again(
    tmp_path: Path, small: Corpus, stop: BaseException, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 4 blocks of each run, until it is done: most runs start in mid-file and mid-document."""
    read, runs, out = documents.read_blocks, 0, tmp_path / "out"

    def failing(source: Any, start: Any) -> Iterator[Any]:
        for i, block in enumerate(read(source, start)):
            if i == 4:
                raise stop
            yield block

    monkeypatch.setattr(documents, "read_blocks", failing)
    while not (out / "dataset.json").exists():
        runs += 1
        done = listed(out)
        with suppress(type(stop)):
            build(small, out)
        assert len(listed(out)) > len(done)
    assert runs > 4
    Expected(small).check(out)


def test_a_write_that_fails(
    tmp_path: Path, small: Corpus, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", fineweb.ShardWriter.flush

    def failing(writer: Any) -> None:
        if writer.index == 3:
            raise UserError("cannot be written: No space left on device")
        real(writer)

    with monkeypatch.context() as patch:
        patch.setattr(fineweb.ShardWriter, "flush", failing)
        refused(small, out, "No space left")
    assert listed(out) == list(Expected(small).shards)[:3]
    build(small, out)
    Expected(small).check(out)


DAMAGES: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "truncated": (4, lambda path: os.truncate(path, 1222)),
    "missing": (4, Path.unlink),
    "last missing": (-1, Path.unlink),
    "val truncated": (0, lambda path: os.truncate(path, 1100)),
    "padding": (5, lambda path: flip(path, 600)),
    "first token": (2, lambda path: flip(path, 1024)),
    "last token": (-1, lambda path: flip(path, -1)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_shards_are_named_and_made_again(
    tmp_path: Path, small: Corpus, kind: str, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    index, damage = DAMAGES[kind]
    expected, out = Expected(small), tmp_path / "out"
    build(small, out)
    names = list(expected.shards)
    damage(out / names[index])
    (out / "dataset.json").unlink()
    before = identities(out, names[:index])
    build(small, out)
    assert str(out / names[index]) in capsys.readouterr().err
    assert identities(out, names[:index]) == before
    expected.check(out)


def test_a_finished_folder_is_left_alone(
    tmp_path: Path, small: Corpus, inline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    info = build(small, out)
    before = identities(out, os.listdir(out))
    assert build(small, out) == info
    assert capsys.readouterr().out.count("nothing to do") == 1
    assert identities(out, os.listdir(out)) == before
    for damage in (lambda: (out / "dataset.json").write_text("{}"), (out / "dataset.unfinished").touch):
        damage()
        assert build(small, out) == info
    (out / list(Expected(small).shards)[4]).unlink()
    assert build(small, out) == info
    assert "not finished: " in capsys.readouterr().out
    Expected(small).check(out)


# ---------------------------------------------------------------- refusals


def test_other_options_and_inputs_are_rejected(tmp_path: Path, small: Corpus, inline: None) -> None:
    out = tmp_path / "out"
    build(small, out, max_tokens=2000)
    truncate_manifest(out, 8)
    before = contents(out)
    refused(small, out, out, "shard_size = 100, not 101", shard_size=101, max_tokens=2000)
    refused(small, out, out, "max_tokens = 2000, not None")
    refused(small, out, out, "column = text, not other", column="other", max_tokens=2000)
    fewer = Corpus(small.paths[:-1], small.files[:-1])
    refused(fewer, out, out, "begun with files = ", max_tokens=2000)
    flip(small.paths[2], -5)
    refused(small, out, out, "begun with files = ", max_tokens=2000)
    assert contents(out) == before
    flip(small.paths[2], -5)
    moved = Corpus([Path(shutil.move(path, tmp_path)) for path in small.paths], small.files)
    build(moved, out, max_tokens=2000)  # contents and order count, not places
    Expected(small, max_tokens=2000).check(out)


def test_foreign_shards_and_damaged_manifests_are_spared(tmp_path: Path, small: Corpus, inline: None) -> None:
    out = tmp_path / "out"
    for name in ("toy_train_000001.bin", "fineweb_val_000000.bin", "weights.bin"):
        out.mkdir()
        (out / name).write_bytes(b"precious")
        refused(small, out, out, name, "choose another --out")
        assert contents(out) == {name: b"precious"}
        shutil.rmtree(out)
    build(small, out)
    lines = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    for content in (b"", b"garbage\n" + b"".join(lines[1:]), b"".join(lines[1:]), b"null\n"):
        (out / "manifest.jsonl").write_bytes(content)
        before = contents(out)
        refused(small, out, out)
        assert contents(out) == before
    # A damaged line in the middle: the shards from there on are made again.
    (out / "manifest.jsonl").write_bytes(b"".join([*lines[:4], b'{"file": 5}\n', *lines[5:]]))
    (out / "dataset.json").unlink()
    build(small, out)
    Expected(small).check(out)


def test_a_folder_in_use_is_rejected(tmp_path: Path, small: Corpus, inline: None) -> None:
    with exclusive_lock(tmp_path / "out"):
        refused(small, tmp_path / "out", tmp_path / "out", "another process")
        assert contents(tmp_path / "out") == {}


def test_inputs_that_cannot_be_read(tmp_path: Path, small: Corpus, inline: None) -> None:
    """Each is named; what precedes it is finished and right."""
    out = tmp_path / "out"
    shards = Expected(Corpus([], [*small.files, small.files[4]])).shards  # a damaged .gz gives some rows
    bad = tmp_path / "z.txt"
    bad.write_text("x")
    for paths, parts in (
        ([*small.paths, tmp_path / "none*.parquet"], ["none*.parquet", "no such files"]),
        ([tmp_path], [tmp_path, "no such files"]),
        ([bad], [bad, "expected .parquet, .jsonl or .jsonl.gz"]),
    ):
        refused(Corpus(paths, []), out, *parts)
        assert not out.exists()
    parquet, gz = small.paths[0].read_bytes(), small.paths[4].read_bytes()
    flipped = gz[:-6] + bytes([gz[-6] ^ 1]) + gz[-5:]  # the checksum
    for suffix, content in (
        *((".parquet", data) for data in (b"", b"garbage" * 100, parquet[:-1], parquet[:-9] + parquet[-8:])),
        *((".jsonl.gz", data) for data in (gz[: len(gz) // 2], b"not gzip" + gz, flipped)),
    ):
        bad = tmp_path / f"z{suffix}"
        bad.write_bytes(content)
        refused(Corpus([*small.paths, bad], small.files), out, bad, "cannot be read")
        names = listed(out)
        assert len(names) > 20 and all((out / name).read_bytes() == shards[name] for name in names)
        shutil.rmtree(out)
    bad = tmp_path / "z.parquet"
    for table, parts in (
        ({"content": ["x"], "url": ["y"]}, ["no column text", "content, url"]),
        ({"text": [1, 2]}, ["a column of int64", "expected strings"]),
    ):
        pq.write_table(pa.table(table), bad)
        refused(Corpus([bad], []), out, bad, *parts)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"text": "x"', "not valid JSON"),
        (b"1" * 5000, "not valid JSON"),
        (b"[" * 10**5, "not valid JSON"),
        (b'{"content": "x"}', 'a string "text"'),
        (b'{"text": ["x\\ny"]}', 'a string "text"'),
        (b"null", 'a string "text"'),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, part: str, inline: None) -> None:
    rows = some_rows(31, 10, True)
    corpus = make_corpus(tmp_path / "in", {"a.jsonl": [*rows, Row(line), plain("end", True)]})
    refused(corpus, tmp_path / "out", f"{corpus.paths[0]}, line 32: ", part)
    assert len(listed(tmp_path / "out")) > 3


def test_too_little_text(tmp_path: Path, inline: None) -> None:
    for i, (texts, parts) in enumerate(
        (
            ([], ["0 tokens of text"]),
            (["", "", ""], ["0 tokens of text"]),
            (["x" * 50], ["51 tokens", "--shard-size 6"]),
            (["x" * 99], ["100 tokens", "more than a shard of 100", "--shard-size 11"]),
        )
    ):
        refused(texts_corpus(tmp_path / f"in{i}", *texts), tmp_path / f"out{i}", *parts)
        with pytest.raises(UserError, match="did not finish"):
            dataset_info(tmp_path / f"out{i}")


def test_odd_file_names(tmp_path: Path, inline: None) -> None:
    """Brackets, and on Linux names that are not UTF-8."""
    odd = os.fsdecode(b"d\xe9.jsonl")
    files = {f"c[1].{kind}": [plain("x" * 150, kind == "jsonl")] for kind in ("jsonl", "parquet")}
    corpus = make_corpus(tmp_path / "in", files | {odd: [plain("y" * 150, True)]})
    build(corpus, tmp_path / "out")
    Expected(corpus).check(tmp_path / "out")


# ---------------------------------------------------------------- datasets of the hub


@pytest.fixture
def repo(tmp_path: Path) -> tuple[Path, Corpus]:
    """A folder that `datasets` loads like a repository: configuration "big", split "train", three files."""
    folder = tmp_path / "re_po"
    (folder / "big").mkdir(parents=True)
    files = {f"{i}.parquet": some_rows(40, i, False) for i in range(3)}
    for name, rows in files.items():
        write(folder / "big" / name, rows, column="content")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: big\n  data_files:\n  - split: train\n    path: big/*.parquet\n---\n"
    )
    return folder, Corpus([], list(files.values()))


def build_repo(folder: Path, out: Path, **changes: Any) -> dict[str, Any]:
    settings = {"name": "big", "split": "train", "column": "content", "revision": "main", "commit": None}
    options = {"dataset": "fineweb", "tokenizer": "bytes", "shard_size": 100, "max_tokens": None}
    return fineweb.build(hub_dataset(str(folder), **(settings | changes)), out, options, 1)


def test_a_dataset_by_name(tmp_path: Path, repo: tuple[Path, Corpus], inline: None) -> None:
    """Repaired rows and all; resumed within each of its files."""
    folder, corpus = repo
    expected, out = Expected(corpus), tmp_path / "out"
    build_repo(folder, out)
    expected.check(out)
    reference = contents(out)
    for n_shards in range(2, len(expected.shards), 7):
        truncate_manifest(out, n_shards)
        build_repo(folder, out)
        assert contents(out) == reference


def test_datasets_that_cannot_be_read(tmp_path: Path, repo: tuple[Path, Corpus], inline: None) -> None:
    for changes, part in (
        ({"column": "text"}, "Column name ['text'] not in the dataset"),
        ({"column": "nested"}, "expected strings"),
        ({"split": "test"}, "cannot be read: ValueError: Bad split: test"),
        ({"name": "small"}, "'small' not found"),
    ):
        with one_line(repo[0], part):
            build_repo(repo[0], tmp_path / "out", **changes)


def test_the_hub_is_asked_for_a_commit_once(
    tmp_path: Path, repo: tuple[Path, Corpus], inline: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Defaults are FineWeb's; an interrupted run stays at its commit when main moves on."""
    asked: list[Any] = []

    class Api:
        def dataset_info(self, name: str, **options: Any) -> Any:
            asked.append((name, options["revision"]))
            return type("Info", (), {"sha": "ab" * 20})

    def open_local(path: str, split: str, column: str, **options: Any) -> Any:
        asked.append((path, split, column, options))
        return open_stream(str(repo[0]), split, "content", name="big")

    open_stream = documents._open_stream
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr(documents, "_open_stream", open_local)
    out = tmp_path / "out"
    args = ["--out", str(out), "--tokenizer", "bytes", "--shard-size", "100", "--workers", "1"]
    stream = ("HuggingFaceFW/fineweb", "train", "text", {"name": "sample-10BT", "revision": "ab" * 20})
    assert run_here(monkeypatch, *args) == 0
    assert asked == [("HuggingFaceFW/fineweb", "main"), stream]
    truncate_manifest(out, 2)
    assert run_here(monkeypatch, *args) == 0
    assert asked[2:] == [stream]
    Expected(repo[1]).check(out)
    assert "HuggingFaceFW/fineweb sample-10BT train at commit abab" in capsys.readouterr().out


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Api:
        def dataset_info(self, name: str, **options: Any) -> Any:
            raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert run_here(monkeypatch, "--tokenizer", "bytes") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: HuggingFaceFW/fineweb") and error.count("\n") == 1
    assert "no route to host" in error and "--files" in error


def test_offline_is_one_line() -> None:
    for mode in ([], ["--pretokenized"]):
        done = subprocess.run(
            [sys.executable, "-m", "data.fineweb", *mode], capture_output=True, text=True, cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


# ---------------------------------------------------------------- the command


def run_here(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """The command in this process: its exit status."""
    monkeypatch.setattr(sys, "argv", ["fineweb", *map(str, args)])
    try:
        fineweb.run_main(fineweb.main)
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_wrong_options_are_one_line(
    tmp_path: Path, small: Corpus, inline: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    files = ["--files", *small.paths]
    cases: list[tuple[list[Any], str]] = [
        ([*files, "--pretokenized"], "not together with"),
        ([*files, "--dataset", "x"], "--dataset: not together with --files"),
        (["--shards", "3"], "--shards: only with --pretokenized"),
        (["--pretokenized", "--shard-size", "100"], "--shard-size: not together with --pretokenized"),
        ([*files, "--max-tokens", "100", "--shard-size", "100"], "--max-tokens 100: expected more than"),
        ([*files, "--workers", "0"], "--workers"),
        ([*files, "--shard-size", str(2**31)], "2147483647"),
        ([*files, "--out", __file__, "--shard-size", "100", "--tokenizer", "bytes"], __file__),
    ]
    for args, part in cases:
        assert run_here(monkeypatch, *args) == 2, args
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
        assert part in said.err


def test_the_command(tmp_path: Path, small: Corpus, inline: None, monkeypatch: Any, capsys: Any) -> None:
    """Patterns in any order; files sorted by path."""
    out, folder = tmp_path / "out", tmp_path / "in"
    args = ["--files", folder / "*.jsonl*", tmp_path / "**" / "*.parquet", small.paths[0], "--out", out]
    args += ["--tokenizer", "bytes", "--shard-size", "1000"]
    assert run_here(monkeypatch, *args) == 0
    expected = Expected(small, shard_size=1000)
    expected.check(out)
    said = capsys.readouterr().out
    for part in (f"{len(expected.stream) - 1000:,} bytes tokens", "6 local files, a.parquet to f.parquet"):
        assert part in said
    assert f"{(expected.rows or {})[EMPTY]} {EMPTY}" in said


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Expected]:
    """A .jsonl and a .parquet file, 20 MB of documents that are not all alike."""
    rng = random.Random(20240520)
    texts = ["".join(rng.choices("abcdefgh \né", k=rng.randint(1, 3000))) for _ in range(400)] * 32
    files = {
        "a.jsonl": [plain(text, True) for text in texts[:5000]],
        "b.parquet": [plain(text, False) for text in texts[5000:]],
    }
    corpus = make_corpus(tmp_path_factory.mktemp("large"), files)
    return corpus, Expected(corpus, shard_size=200_000)


def command(corpus: Corpus, out: Path, workers: int) -> list[str]:
    options = ["--out", out, "--tokenizer", "bytes", "--shard-size", 200_000, "--workers", workers]
    return [*map(str, (sys.executable, "-m", "data.fineweb", "--files", *corpus.paths, *options))]


@contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, which does not outlive the block."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_kills_at_random_moments(tmp_path: Path, large: tuple[Corpus, Expected]) -> None:
    """SIGKILL and Ctrl-C, each in mid-work, until it is done."""
    corpus, expected = large
    out, rng = tmp_path / "out", random.Random(1)
    for workers, end in ((1, "kill"), (2, "int"), (2, "kill")):
        done = listed(out)
        before = identities(out, done)
        with running(command(corpus, out, workers)) as process:
            wait_until(lambda: len(listed(out)) > len(done), "no shards")  # noqa: B023
            time.sleep(rng.random() * 0.2)
            if end == "int":  # Ctrl-C reaches all of the terminal's processes
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.kill()
            stdout, stderr = process.communicate(timeout=HANGS)
            assert process.returncode == (-9 if end == "kill" else 130), stderr
            assert not stdout or (stdout.startswith("not finished: ") and stdout.count("\n") == 1), stdout
            assert end == "kill" or (stderr.startswith("stopped; ") and stderr.count("\n") == 1), stderr
        assert (out / "dataset.unfinished").exists() and identities(out, done) == before
        assert not list(out.glob(".fineweb*")) or end == "kill"
    result = subprocess.run(command(corpus, out, workers), capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    expected.check(out)
