"""data.prepare: tokens against an independent pass, kinds of files, resuming, damages, kills.

Most builds are of small blocks, one at a time (`inline`); the tests of the command are of full
ones.
"""

import bz2
import errno
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from conftest import flip, needs_gpt2, one_line
from datasets.packaged_modules.cache.cache import Cache

from data import documents, prepare
from data.dataset import TokenStream, dataset_info
from data.documents import folder_dataset, hub_dataset, local_files
from infra.cli import UserError
from infra.files import exclusive_lock

ROOT = Path(__file__).resolve().parents[3]
HANGS = 60  # seconds: far more than any of the commands here takes
OPTIONS: dict[str, Any] = {"dataset": "fineweb", "tokenizer": "bytes", "shard_size": 100}
OPTIONS |= {"max_tokens": None, "val_tokens": None}


class Row(NamedTuple):
    """A row of an input, and the document that is expected of it."""

    raw: bytes | None  # parquet: the text; JSON: the line
    text: str = ""  # "": no document


ODD_PARQUET = [
    Row(None),
    Row(b""),
    Row(b"caf\xe9 \xff\xfe!", "caf\ufffd \ufffd\ufffd!"),
    Row(b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # UTF-8 of half a surrogate pair
    Row("<|endoftext|>\x00 漢字🎉 e\u0301\r\n".encode(), "<|endoftext|>\x00 漢字🎉 e\u0301\r\n"),
]
ODD_JSON = [
    Row(b"  \t"),
    Row(b'{"text": ""}'),
    Row(b'{"text": null}'),
    Row(b'{"text": "half \\ud83d pair \\ud83c\\udf89"}', "half \ufffd pair 🎉"),
    Row(b'{"text": "raw \xff byte"}', "raw \ufffd byte"),
    Row(b'{"text": "2026-11-23"}', "2026-11-23"),
    Row(
        b' {"a": [1, {"text": 0}], "text": "<|endoftext|>\\u0000\\n", "z": null} ',
        "<|endoftext|>\x00\n",
    ),
]


def plain(text, is_json):
    raw = json.dumps({"id": 1, "text": text}) if is_json else text
    return Row(raw.encode(), text)


def some_rows(n, seed, is_json):
    """Documents of 1 to 80 characters, with odd ones in between."""
    rng = random.Random(seed)
    words = ["alpha ", "Beta", "  ", "\n", "é", "1999 ", "<|endoftext|>", "🎉", ".", "naïve "]
    rows = []
    for _ in range(n):
        text = "".join(rng.choices(words, k=rng.randint(1, 80)))[:80]
        odd = rng.choice(ODD_JSON if is_json else ODD_PARQUET)
        rows.append(odd if rng.random() < 0.25 else plain(text, is_json))
    return rows


def write(path, rows, column="text"):
    """A .parquet, .jsonl or .jsonl.gz file of the rows; the text is not checked for UTF-8."""
    if path.suffix == ".parquet":
        raw = pa.array([row.raw for row in rows], pa.binary())
        text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), raw.null_count)
        nested = pa.array([[{"text": f"no {i}"}] * (i % 3) for i in range(len(rows))])
        pq.write_table(pa.table({"nested": nested, column: text}), path, row_group_size=17)
    else:
        data = b"".join((row.raw or b"") + b"\n" for row in rows)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


Corpus = dict[Path, list[Row]]  # input files, in their order, with their rows


def make_corpus(folder, files):
    folder.mkdir()
    return {write(folder / file, rows): rows for file, rows in files.items()}


def texts_corpus(folder, *texts):
    return make_corpus(folder, {"a.jsonl": [plain(text, True) for text in texts]})


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def small(tmp_path):
    """All formats, odd rows at the starts and ends of files, empty files: some 5000 tokens of
    "bytes".
    """
    return make_corpus(
        tmp_path / "in",
        {
            "a.parquet": ODD_PARQUET[:2] + some_rows(60, 1, False) + ODD_PARQUET,
            "b.parquet": [],
            "c.jsonl": some_rows(40, 2, True)
            + ODD_JSON
            + [plain("long " * 200, True)]
            + ODD_JSON[:3],
            "d.jsonl": [],
            "e.jsonl.gz": ODD_JSON[:3] + some_rows(30, 3, True),
            "f.parquet": some_rows(20, 4, False) + ODD_PARQUET[:2],
        },
    )


class Expected:
    """The dataset that a corpus should become, without a line of data/."""

    def __init__(self, corpus, tokenizer="bytes", shard_size=100, max_tokens=None):
        def encode(text):
            if tokenizer == "bytes":
                return [256, *text.encode()]
            return [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]

        rows = [row for file in corpus.values() for row in file]
        whole = np.array([token for row in rows if row.text for token in encode(row.text)], "<u2")
        self.n_whole = len(whole)
        self.stream = whole[:max_tokens]
        self.shards = {}
        for i, start in enumerate(range(0, len(self.stream), shard_size)):
            part = self.stream[start : start + shard_size]
            header = np.array([20240520, 1, len(part)] + [0] * 253, "<i4")
            name = f"fineweb_{'train' if i else 'val'}_{i:06d}.bin"
            self.shards[name] = header.tobytes() + part.tobytes()
        starts = np.flatnonzero(self.stream == (256 if tokenizer == "bytes" else 50256))
        n_val = int((starts < shard_size).sum())
        self.documents = [n_val, len(starts) - n_val]

    def check(self, out):
        """The folder holds exactly that."""
        files = contents(out)
        info = dataset_info(out)
        del files["manifest.jsonl"], files["dataset.json"]
        assert files == self.shards
        listed = {file["file"]: file["sha256"] for file in info["shards"]}
        assert listed == {file: hashlib.sha256(raw).hexdigest() for file, raw in files.items()}
        counts = [info["splits"][split]["documents"] for split in ("val", "train")]
        assert counts == self.documents


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def listed(folder):
    """The finished shards, by the manifest."""
    path = folder / "manifest.jsonl"
    lines = path.read_bytes().splitlines()[1:] if path.exists() else []
    return [json.loads(line)["file"] for line in lines]


def identities(folder, files):
    """What changes when a file is written again."""
    return [((folder / file).stat().st_ino, (folder / file).stat().st_mtime_ns) for file in files]


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    # each block is added before the next one is read
    monkeypatch.setattr(prepare, "BLOCKS_AHEAD", 0)
    monkeypatch.setattr(documents, "BLOCK_CHARACTERS", 300)
    monkeypatch.setattr(documents, "BATCH_ROWS", 7)
    monkeypatch.setattr(documents, "MOST_UNREADABLE", 1)  # of the odd rows
    monkeypatch.setattr(prepare, "get_tokenizer", lru_cache(prepare.get_tokenizer))


def build(paths, out, column="text", **options):
    source = local_files([str(path) for path in paths], column)
    return prepare.build(source, out, OPTIONS | options, 1)


def rejected(paths, out, *parts, **options):
    """The build ends with one line that has these parts."""
    with one_line(*parts):
        build(paths, out, **options)


def tokens_of(out):
    """All of the dataset's tokens, (n,) int64."""
    streams = [TokenStream(out, split) for split in ("val", "train")]
    return np.concatenate([stream.read(0, stream.n_tokens) for stream in streams])


def texts_of(out):
    """The documents of a dataset of bytes."""
    tokens = tokens_of(out)
    assert tokens[0] == 256
    parts = np.split(tokens, np.flatnonzero(tokens == 256))[1:]
    return [bytes(part[1:].tolist()).decode() for part in parts]


def cut_off(out, n_shards):
    """The folder as a kill leaves it after `n_shards` shards and one that is not listed."""
    lines = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (out / "manifest.jsonl").write_bytes(b"".join(lines[: 1 + n_shards]))
    (out / "dataset.json").unlink(missing_ok=True)
    (out / "dataset.unfinished").touch()
    (out / ".fineweb_train_000003.bin.tmp").write_bytes(b"half")
    for path in out.glob("*.bin"):
        if int(path.stem[-6:]) > n_shards:
            path.unlink()


# ---------------------------------------------------------------- the tokens


@pytest.mark.parametrize("shard_size", [100, 997])
def test_tokens_are_those_of_an_independent_pass(tmp_path, small, shard_size, monkeypatch):
    for block in (1, 2**20):
        monkeypatch.setattr(documents, "BLOCK_CHARACTERS", block)
        build(small, tmp_path / f"{block}", shard_size=shard_size)
        Expected(small, shard_size=shard_size).check(tmp_path / f"{block}")


def test_documents_that_end_where_shards_do(tmp_path, out):
    """Rows without text before, between and after; the last shard is full."""
    lengths = [0, 99, 0, 99, 199, 0, 0, 49, 49, 0, 99, 0, 0]
    corpus = texts_corpus(tmp_path / "in", *("x" * n for n in lengths))
    expected = Expected(corpus)
    assert (len(expected.shards), expected.n_whole) == (6, 600)
    build(corpus, out)
    expected.check(out)


def test_numbers_of_tokens_are_exact(tmp_path, small):
    """In mid-document, at shard ends, as many as there are, and more; also when resumed."""
    n = Expected(small).n_whole
    cases = [(101, None), (200, None), (250, 80), (n - 1, None), (n, None), (n + 1, 80), (None, 80)]
    for max_tokens, val_tokens in cases:
        options = {"max_tokens": max_tokens, "val_tokens": val_tokens}
        out = tmp_path / f"{max_tokens} {val_tokens}"
        build(small, out, **options)
        assert TokenStream(out, "val").n_tokens == (val_tokens or 100)
        assert (tokens_of(out) == Expected(small, max_tokens=max_tokens).stream).all()
        before = contents(out)
        cut_off(out, 2)
        build(small, out, **options)
        assert contents(out) == before


def test_shuffled_documents(tmp_path, out, small, monkeypatch):
    """The same documents in an order that the seed fixes, also when resumed."""

    def shuffle(out, seed):
        source = local_files([str(path) for path in small], "text", seed)
        prepare.build(source, out, OPTIONS, 1)
        return texts_of(out)

    first = shuffle(out, 1)
    assert sorted(first) == sorted(shuffle(tmp_path / "unshuffled", None)) != first
    assert shuffle(tmp_path / "again", 1) == first != shuffle(tmp_path / "2", 2)
    before = contents(out)
    cut_off(out, 7)
    shuffle(out, 1)
    assert contents(out) == before
    with one_line("shuffle = 1, not 2"):
        shuffle(out, 2)
    monkeypatch.setattr(documents, "MOST_SHUFFLED", 999)
    with one_line("--shuffle 3: expected at most 999"):
        shuffle(tmp_path / "3", 3)


@needs_gpt2
def test_gpt2(tmp_path, out, small):
    """A million spaces: GPT-2's pattern makes a token of each; the regex engine's stack has an end."""
    build(small, tmp_path / "small", tokenizer="gpt2")
    Expected(small, "gpt2").check(tmp_path / "small")
    texts = ["a", *(space * 10**6 + "b" for space in (" ", "\n"))]
    build(texts_corpus(tmp_path / "in2", *texts), out, tokenizer="gpt2", shard_size=10**5)
    text = tiktoken.get_encoding("gpt2").decode(tokens_of(out).tolist())
    assert text == "".join(f"<|endoftext|>{text}" for text in texts)


# ---------------------------------------------------------------- kinds of files
ASCII = "plain text, " * 100
FRENCH = "Les élèves étaient déjà là, près de la fenêtre.\n" * 30


def lines_of(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(column):
    file = io.BytesIO()
    pq.write_table(pa.table({"n": pa.nulls(len(column)), "text": column}), file)
    return file.getvalue()


def office():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", ASCII)
    return file.getvalue()


zstd = pa.Codec("zstd").compress
UNREADABLE = "% of its characters are U+FFFD or NUL: expected UTF-8"
NO_JSON = 'expected a JSON object with a string "text"'
NO_SUFFIX = "expected a file that ends in"
# A file's name, its bytes, and its documents or what is said of it.
KINDS: list[tuple[str, bytes, list[str] | str]] = [
    # encodings and other formats under the name of a text
    ("utf16.txt", ASCII.encode("utf-16"), UNREADABLE),
    ("utf16le.txt", ASCII.encode("utf-16-le"), UNREADABLE),
    ("chinese.txt", ("中文字符" * 99).encode("utf-16"), UNREADABLE),
    ("utf32.txt", ASCII.encode("utf-32-be"), UNREADABLE),
    ("french.txt", FRENCH.encode("cp1252"), UNREADABLE),
    ("russian.txt.gz", gzip.compress(("Все счастливы. " * 99).encode("koi8-r")), UNREADABLE),
    ("japanese.txt", ("日本語の文章" * 40).encode("shift-jis"), UNREADABLE),
    ("zeros.txt", ASCII.encode() + bytes(100), "7.7" + UNREADABLE),
    ("office.txt", office(), UNREADABLE),
    ("packed.txt", gzip.compress(ASCII.encode()), UNREADABLE),
    ("table.txt", parquet([ASCII]), UNREADABLE),
    ("report.txt", b"\n%PDF-1.7\n" + ASCII.encode(), "is a PDF"),
    ("letter.txt.gz", gzip.compress(b"{\\rtf1 " + ASCII.encode()), "is RTF"),
    ("figure.md", b"%!PS-Adobe" + ASCII.encode(), "is PostScript"),
    ("utf16.jsonl", lines_of(ASCII).decode().encode("utf-16"), "line 1: "),
    ("french.jsonl", b'{"text": "' + FRENCH[:48].encode("cp1252") * 9 + b'"}', "line 1: "),
    ("latin.jsonl", b'{"text": "caf\xe9 cr\xe8me"}', UNREADABLE),
    ("latin.parquet", parquet(pa.array([b"caf\xe9"])), UNREADABLE),
    # what UTF-8 may have
    ("mark.txt", FRENCH.encode("utf-8-sig"), [FRENCH]),
    ("mark.jsonl", b"\xef\xbb\xbf" + lines_of(FRENCH), [FRENCH]),
    ("mark.txt.gz", gzip.compress(FRENCH.encode("utf-8-sig")), [FRENCH]),
    ("one.txt", FRENCH.encode() + b"\xe9", [FRENCH + "\ufffd"]),
    ("ends.txt", b"a\r\nb\rc\n", ["a\nb\nc\n"]),
    ("empty.txt", b"", []),
    # names
    ("a.JSON", lines_of("a"), ["a"]),
    ("a.json.gz", gzip.compress(lines_of("a")), ["a"]),
    ("a.jsonl.zst", zstd(lines_of("a"), asbytes=True) + zstd(lines_of("b"), asbytes=True), ["a", "b"]),
    ("a.NDJSON.BZ2", bz2.compress(lines_of("a")), ["a"]),
    ("a.md", b"# a", ["# a"]),
    ("a.parquet.gz", b"", NO_SUFFIX),
    ("a.jsonl.xz", b"", NO_SUFFIX),
    ("a.csv", b"text\na", NO_SUFFIX),
    ("fineweb_val_000000.bin", b"", "train.py reads shards of tokens by --data.dir"),
    ("a.txt.gz", ASCII.encode(), "cannot be read"),
    ("half.jsonl.zst", zstd(lines_of(ASCII), asbytes=True)[:-5], "cannot be read"),
    ("half.jsonl.gz", gzip.compress(lines_of(ASCII))[:40], "cannot be read"),
    ("sum.jsonl.gz", gzip.compress(lines_of(ASCII))[:-8] + bytes(8), "cannot be read"),
    ("a.parquet", lines_of("a"), "cannot be read"),
    # JSON
    ("array.json", json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(), ["a", "b"]),
    ("dates.jsonl", lines_of("1912-01-02", "2026-11-28T10:00:00"), ["1912-01-02", "2026-11-28T10:00:00"]),
    ("numbers.jsonl", lines_of("12", "1e5", "true"), ["12", "1e5", "true"]),
    ("other.jsonl", b'{"text": "a", "n": 1}\n{"n": [{}], "text": "b", "m": NaN}', ["a", "b"]),
    ("crlf.jsonl", b'{"text": "a\\r\\n"}\r\n\r\n{"text": "b"}\r\n', ["a\r\n", "b"]),
    ("ends.jsonl", '{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
    ("null.jsonl", b'{"text": null}\n{"text": "a"}', ["a"]),
    ("no.json", b"", []),
    *((f"{i}.jsonl", line, f"line 1: {line[:9].decode()!r}"[:-1]) for i, line in enumerate((
        b'{"text": "x"', b"[" * 10**5, b'{"content": "x"}', b'{"text": ["x"]}', b'{"text": 12}',
        b'{"text": 0}', b'{"text": false}', b'{"text": {"a": "x"}}', b'["x"]', b"3", b'{"text": "a"},',
    ))),
    # columns of parquet
    ("dictionary.parquet", parquet(pa.array(["a", "a", None]).dictionary_encode()), ["a", "a"]),
    ("large.parquet", parquet(pa.array(["a"], pa.large_string())), ["a"]),
    ("view.parquet", parquet(pa.array(["a"], pa.string_view())), ["a"]),
    ("null.parquet", parquet(pa.nulls(2)), []),
    ("int.parquet", parquet([1]), "cannot be read"),
    ("list.parquet", parquet([["a"]]), "cannot be read"),
]  # fmt: skip


def read(source):
    blocks = documents.read_blocks(source.open(), documents.Cursor())
    return [text for block in blocks for text in block.texts if text]


@pytest.mark.parametrize(("file", "content", "expected"), KINDS, ids=[kind[0] for kind in KINDS])
def test_kinds_of_files(tmp_path, file, content, expected, monkeypatch):
    """Read or named, by --files as by --dataset."""
    monkeypatch.setattr(documents, "MOST_UNREADABLE", 0.005)
    (tmp_path / file).write_bytes(content)
    if isinstance(expected, list):
        assert read(local_files([str(tmp_path / file)], "text")) == expected
        assert read(folder_dataset(str(tmp_path), None, "train", "text")) == expected
        return
    with one_line(tmp_path / file, expected):
        read(local_files([str(tmp_path / file)], "text"))


def test_what_is_said_of_a_file(tmp_path, out, monkeypatch, capsys):
    """A share of bad bytes; that a wrong kind is one before its end; the line of bad JSON."""
    monkeypatch.setattr(documents, "MOST_UNREADABLE", 0.005)
    bad = tmp_path / "d.txt"
    bad.write_bytes(FRENCH.encode() + b"\xe9")
    read(local_files([str(bad)], "text"))
    warning = f"warning: {bad}: 1 of {len(FRENCH) + 1:,} characters (0.069%)"
    assert capsys.readouterr().err.startswith(warning)
    rows = [Row(b'{"text": "\xe9\xe8 caf\xe9"}')] * 20_000
    path = write(tmp_path / "a.jsonl", [*rows, Row(b"no JSON")])
    with one_line(path, UNREADABLE):
        read(local_files([str(path)], "text"))
    corpus = make_corpus(tmp_path / "in", {"a.jsonl": [*[plain("x" * 99, True)] * 31, Row(b"3")]})
    rejected(corpus, out, f"{list(corpus)[0]}, line 32: ", NO_JSON)
    assert len(listed(out)) == 30  # the 31st was in the block of the bad line
    (tmp_path / "pipe.jsonl").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe.jsonl")
    rejected([tmp_path / "pipe.jsonl"], out, tmp_path / "pipe.jsonl", "expected a file")


STORIES = ["Once upon a time\nthere was a cat.", "Two.", "The end."]


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>"])
@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "parquet"])
def test_a_separator_splits_texts(tmp_path, kind, end, monkeypatch, capsys):
    """TinyStories' format, also where the parts that are read end within a separator."""
    path = tmp_path / f"stories.{kind}"
    joined = "".join(f"{story}\n{end}\n" for story in STORIES)
    if kind.startswith("txt"):
        data = joined.replace("\n", "\r\n").encode()
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    else:
        write(path, [plain(joined.replace("\n<", "\r\n<"), kind == "jsonl")])
    assert len(read(local_files([str(path)], "text"))) == 1
    assert f"warning: {path}: holds {end}, which" in capsys.readouterr().err
    for fragment in (1, 7, 2**24):
        monkeypatch.setattr(documents, "FRAGMENT", fragment)
        assert read(local_files([str(path)], "text", separator=end)) == STORIES
    assert capsys.readouterr().err == ""


def test_names_that_files_have(tmp_path):
    """Brackets, several names of one file, another encoding, a folder of all kinds."""
    folder = tmp_path / "a[1]"
    (folder / "below").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder / "below" / "a.jsonl").write_bytes(lines_of("a"))
    (folder / "scores.csv").write_text("1,2")
    (folder / "z.txt").symlink_to(folder / "b.txt")
    assert read(local_files([str(folder)], "text")) == ["b", "a"]
    names = [str(folder / "b.txt"), os.path.relpath(folder / "b.txt"), str(folder / "z.txt")]
    assert read(local_files(names, "text")) == ["b"]
    if sys.platform != "darwin":  # whose file system has no such names
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
        path.write_text("c")
        source = local_files([str(path)], "text")
        assert (source.description, read(source)) == ("local files (1): caf\ufffd.txt", ["c"])


def test_the_files_of_a_folder(tmp_path, capsys):
    """All kinds at once, without hidden and foreign ones; a test file is no training text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    kinds = [kind for kind in KINDS if isinstance(kind[2], list)]
    for file, content, _ in kinds:
        (folder / file).write_bytes(content)
    (folder / ".git").mkdir()
    (folder / ".git" / "a.txt").write_text("hidden")
    (folder / "README.md").write_text("# A page without configurations\n")
    (folder / "scores.csv").write_text("1,2")
    texts = read(folder_dataset(str(folder), None, "train", "text"))
    assert sorted(texts) == sorted(text for kind in kinds for text in kind[2])
    assert f"{folder}: left out scores.csv" in capsys.readouterr().err
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text(split)
    for split in ("train", "test"):
        assert read(folder_dataset(str(folder), None, split, "text")) == [split]
    with one_line(folder, "has no split 'val': expected train, test"):
        folder_dataset(str(folder), None, "val", "text")
    with one_line("--name small", folder, "README.md, which has none"):
        folder_dataset(str(folder), "small", "train", "text")
    (tmp_path / "none").mkdir()
    with one_line(tmp_path / "none", "cannot be read"):
        folder_dataset(str(tmp_path / "none"), None, "train", "text")


# ---------------------------------------------------------------- resuming


def test_resumes_after_every_shard(tmp_path, small):
    """Finished shards stay untouched; temporary files and the unlisted shard are cleared away."""
    build(small, tmp_path / "reference", shard_size=500)
    reference = contents(tmp_path / "reference")
    shards = list(Expected(small, shard_size=500).shards)
    for n_shards in range(len(shards) + 1):
        out = tmp_path / f"out{n_shards}"
        shutil.copytree(tmp_path / "reference", out)
        cut_off(out, n_shards)
        before = identities(out, shards[:n_shards])
        build(small, out, shard_size=500)
        assert identities(out, shards[:n_shards]) == before
        assert contents(out) == reference


def test_a_write_that_fails(tmp_path, small, monkeypatch):
    """Each of the first ones, and that of dataset.json; the same build then resumes."""
    expected = Expected(small)
    for n in (*range(10), 2 + 4 * len(expected.shards)):
        out = tmp_path / f"out{n}"
        full = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=[*[None] * n, full]))
            rejected(small, out, "cannot be written: No space left")
        assert (out / "dataset.unfinished").exists() and not list(out.glob(".*.tmp"))
        build(small, out)
        expected.check(out)


def test_damaged_shards_are_named_and_made_again(out, small, capsys):
    expected = Expected(small)
    shards = list(expected.shards)
    build(small, out)
    for index, damage in (
        (4, lambda path: os.truncate(path, 1222)),
        (-1, Path.unlink),
        (5, lambda path: flip(path, 600)),  # the header's padding
        (0, lambda path: flip(path, 1024)),
    ):
        damage(out / shards[index])
        (out / "dataset.json").unlink()
        before = identities(out, shards[:index])
        build(small, out)
        assert str(out / shards[index]) in capsys.readouterr().err
        assert identities(out, shards[:index]) == before
        expected.check(out)


def test_a_finished_folder_is_left_alone(out, small, capsys):
    info = build(small, out)
    files = [name for name in os.listdir(out) if not name.endswith(".lock")]  # its holder's name
    before = identities(out, files)
    assert build(small, out) == info
    assert "nothing to do" in capsys.readouterr().out
    assert identities(out, files) == before
    for damage in (
        (out / "dataset.unfinished").touch,
        lambda: (out / "dataset.json").write_text("{}"),
        (out / "fineweb_train_000004.bin").unlink,
    ):
        damage()
        assert build(small, out) == info
        Expected(small).check(out)


def test_shards_that_cannot_be_read_now_are_kept(out, small, monkeypatch):
    """The file system's error is no damage: they may be whole."""
    build(small, out)
    before = contents(out)
    unread = Mock(side_effect=OSError(errno.EIO, "Input/output error", "a shard"))
    monkeypatch.setattr(np, "memmap", unread)
    with pytest.raises(OSError, match="Input/output error"):
        build(small, out)
    assert contents(out) == before


def test_the_input_is_not_where_the_shards_go(small, repo):
    """The error on a second run would advise to delete it."""
    folder = list(small)[0].parent
    expected = "expected another folder than the input's"
    rejected(small, folder, f"--out {folder}: {expected}, {folder / 'a.parquet'}")
    rejected([folder], folder / "tokens", f"{expected}, {folder}")
    with one_line(f"{expected}, {repo[0]}"):
        build_repo(repo[0], repo[0] / "tokens")
    assert not (repo[0] / "tokens").exists()


def test_other_options_and_inputs_are_rejected(out, small):
    build(small, out, max_tokens=2000)
    cut_off(out, 8)
    before = contents(out)
    rejected(small, out, out, "shard_size = 100, not 101", shard_size=101, max_tokens=2000)
    rejected(small, out, out, "max_tokens = 2000, not None")
    flip(list(small)[2], -5)
    rejected(small, out, out, "begun with files = ", max_tokens=2000)
    flip(list(small)[2], -5)
    with exclusive_lock(out):
        rejected(small, out, out, "another process", max_tokens=2000)
    assert contents(out) == before
    build(small, out, max_tokens=2000)
    Expected(small, max_tokens=2000).check(out)


def test_foreign_shards_and_damaged_manifests_are_spared(out, small):
    out.mkdir()
    foreign = out / "fineweb_val_000000.bin"
    foreign.write_bytes(b"precious")
    rejected(small, out, out, foreign.name, "choose another --out")
    foreign = foreign.rename(out / "fineweb_train_000001.bin")
    # killed before the first shard
    (out / "manifest.jsonl").write_text('{"options": {}, "files": []}\n')
    rejected(small, out, out, foreign.name, "choose another --out")
    assert foreign.read_bytes() == b"precious"
    foreign.unlink()
    build(small, out)
    lines = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (out / "manifest.jsonl").write_bytes(b"".join(lines[1:]))
    before = contents(out)
    rejected(small, out, out, "manifest.jsonl: damaged")
    assert contents(out) == before


def test_too_little_text(tmp_path, out):
    short = texts_corpus(tmp_path / "in", "", "x" * 99)
    rejected(short, out, "100 tokens of text", "try --val-tokens 6")
    with pytest.raises(UserError, match="did not finish"):
        dataset_info(out)
    with one_line("tokens of text: expected more, to hold some out"):
        build_share(texts_corpus(tmp_path / "in2", "abc"), tmp_path / "share")


# ---------------------------------------------------------------- datasets by name


@pytest.fixture
def repo(tmp_path):
    """A folder that `datasets` loads like a repository: configuration "big", split "train", three
    files.
    """
    folder = tmp_path / "re_po"
    (folder / "big").mkdir(parents=True)
    files = {folder / "big" / f"{i}.parquet": some_rows(40, i, False) for i in range(3)}
    for path, rows in files.items():
        write(path, rows, column="content")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: big\n  data_files:\n  - split: train\n    path: big/*.parquet\n---\n"
    )
    return folder, files


def build_repo(folder, out, column="content"):
    return prepare.build(folder_dataset(str(folder), "big", "train", column), out, OPTIONS, 1)


def test_a_dataset_by_name(out, repo):
    """Resumed within each of its files."""
    folder, corpus = repo
    expected = Expected(corpus)
    build_repo(folder, out)
    expected.check(out)
    reference = contents(out)
    for n_shards in range(2, len(expected.shards), 9):
        cut_off(out, n_shards)
        build_repo(folder, out)
        assert contents(out) == reference


def test_a_hub_out_of_reach_costs_no_shard(out, repo, monkeypatch):
    """Without the hub `datasets` reads a copy in its cache, of any commit."""

    def build_hub():
        source = hub_dataset("a/repo", None, "train", "content", "main", "ab" * 20)
        prepare.build(source, out, OPTIONS, 1)

    local = datasets.load_dataset_builder(str(repo[0]), "big")
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: local)
    build_hub()
    (out / "fineweb_train_000003.bin").unlink()
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr("datasets.load_dataset_builder", lambda *_, **__: Cache.__new__(Cache))
        with one_line("a/repo: cannot be read: ConnectionError: the hub did not answer"):
            build_hub()
    assert contents(out) == before
    build_hub()
    Expected(repo[1]).check(out)


def test_columns_that_cannot_be_read(out, repo):
    for column, part in (
        ("text", "has no column 'text': expected --column of nested, content"),
        ("nested", "cannot be read"),
    ):
        with one_line(repo[0], part):
            build_repo(repo[0], out, column)


def test_the_hub_is_asked_for_a_commit_once(out, repo, monkeypatch, capsys, call):
    """Defaults are FineWeb's; an interrupted run stays at its commit when main moves on."""
    asked: list[Any] = []

    def dataset_info(name, revision, timeout):
        asked.append((name, revision))
        return SimpleNamespace(sha="ab" * 20)

    def load_local(*arguments, **options):
        asked.append((*arguments, options))
        return load_builder(str(repo[0]), "big")

    load_builder = datasets.load_dataset_builder
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=dataset_info))
    monkeypatch.setattr("datasets.load_dataset_builder", load_local)
    args = ["--out", out, "--tokenizer", "bytes", "--shard-size", 100, "--column", "content"]
    loaded = ("HuggingFaceFW/fineweb", "sample-10BT", {"revision": "ab" * 20})
    call(prepare, *args)
    cut_off(out, 2)
    call(prepare, *args)
    assert asked == [("HuggingFaceFW/fineweb", "main"), loaded, loaded]
    Expected(repo[1]).check(out)
    assert "HuggingFaceFW/fineweb sample-10BT train at commit abab" in capsys.readouterr().out


def test_wrong_options_are_one_line(call):
    for options, part in (
        (["--files", "x", "--dataset", "x"], "--files: expected no --dataset"),
        (["--shuffle", "1"], "--shuffle: expected --files"),
        (["--files", "x", "--val-tokens", "0"], "--val-tokens: '0': expected an integer"),
        (["--max-tokens", "100000000"], "expected more than the tokens of validation"),
    ):
        with one_line(part):
            call(prepare, *options)


def test_the_command(tmp_path, out, small, call, capsys):
    """Patterns in any order; files sorted by path."""
    patterns = [tmp_path / "in" / "*.jsonl*", tmp_path / "**" / "*.parquet", next(iter(small))]
    call(prepare, "--files", *patterns, "--out", out, "--tokenizer", "bytes", "--shard-size", 1000)
    assert (tokens_of(out) == Expected(small).stream).all()
    names = "a.parquet, b.parquet, c.jsonl, d.jsonl, e.jsonl.gz, f.parquet"
    assert f"local files (6): {names}" in capsys.readouterr().out


def start(corpus, out, workers):
    """The command, in a process group of its own."""
    options = ["--out", out, "--tokenizer", "bytes", "--shard-size", 200_000, "--workers", workers]
    return subprocess.Popen(
        [*map(str, (sys.executable, "-m", "data.prepare", "--files", *corpus, *options))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path, out):
    """Ctrl-C with two workers and SIGKILL with one, in mid-work of 20 MB, then the end."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefgh \né", k=rng.randint(1, 3000))) for _ in range(400)] * 32
    files = {"a.jsonl": [plain(text, True) for text in texts[:5000]]}
    files["b.parquet"] = [plain(text, False) for text in texts[5000:]]
    corpus = make_corpus(tmp_path / "in", files)
    for workers, stop, status in ((2, signal.SIGINT, 130), (1, signal.SIGKILL, -9)):
        done = listed(out)
        before = identities(out, done)
        with start(corpus, out, workers) as process:
            deadline = time.monotonic() + HANGS
            while len(listed(out)) == len(done):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(rng.random() * 0.2)
            os.killpg(process.pid, stop)
            stderr = process.communicate(timeout=HANGS)[1]
        assert (process.returncode, stderr) == (status, "")
        assert (out / "dataset.unfinished").exists() and identities(out, done) == before
        assert not list(out.glob(".text*")) or stop == signal.SIGKILL
    with start(corpus, out, workers) as process:
        stderr = process.communicate(timeout=HANGS)[1]
    assert (process.returncode, stderr) == (0, "")
    assert (tokens_of(out) == Expected(corpus).stream).all()


# ---------------------------------------------------------------- a share for validation


def build_share(paths, out, workers=1):
    source = local_files([str(path) for path in paths], "text")
    return prepare.build(source, out, OPTIONS | {"val_share": prepare.VAL_SHARE}, workers)


def parts_of(out, split):
    stream = TokenStream(out, split)
    tokens = stream.read(0, stream.n_tokens)
    return [bytes(part[1:].tolist()) for part in np.split(tokens, stream.document_starts())[1:]]


def test_a_share_of_all_documents(tmp_path, out, monkeypatch):
    """Whole ones, equal texts together, the rest as it was; resumed from every state."""
    monkeypatch.setattr(prepare, "ENOUGH_DOCUMENTS", 20)
    texts = [f"document {i} of many, {i * i}" for i in range(1000)]
    texts[500] = texts[3]
    corpus = texts_corpus(tmp_path / "in", *texts)
    info = build_share(corpus, out)
    val, train = (parts_of(out, split) for split in ("val", "train"))
    assert 25 < len(val) < 100 and not {*val} & {*train}
    rank = {text.encode(): i for i, text in reversed([*enumerate(texts)])}
    assert sorted([*val, *train]) == sorted(text.encode() for text in texts)
    assert [rank[part] for part in val] == sorted(rank[part] for part in val)
    assert rank[val[0]] < 100 and rank[val[-1]] > 900
    assert info["splits"]["val"]["documents"] == len(val)
    reference = contents(out)
    for n_shards in (40, 2, 1, 0):
        cut_off(out, n_shards)
        build_share(corpus, out, workers=2)
        assert contents(out) == reference


@pytest.mark.parametrize("n_documents", [1, 3])
def test_a_share_of_few_documents(tmp_path, out, n_documents):
    """The end of each, for a book is one document."""
    texts = [f"{i} " + "word " * 400 for i in range(n_documents)]
    corpus = texts_corpus(tmp_path / "in", *texts)
    build_share(corpus, out)
    val, train = (parts_of(out, split) for split in ("val", "train"))
    whole = [begin + end for begin, end in zip(train, val, strict=True)]
    assert whole == [text.encode() for text in texts]
    assert all(
        len(end) == round(0.05 * (1 + len(text))) for end, text in zip(val, texts, strict=True)
    )
    reference = contents(out)
    cut_off(out, 1)
    build_share(corpus, out)
    assert contents(out) == reference


def test_own_text_in_one_command(tmp_path, out, call, capsys):
    """No number is asked for; the vocabulary and what to type next are printed."""
    (tmp_path / "book.txt").write_text("It was the best of times. " * 200)
    call(prepare, "--files", tmp_path / "book.txt", "--tokenizer", "bytes", "--out", out)
    printed = capsys.readouterr().out
    assert "tokens   bytes, a vocabulary of 257\n" in printed
    command = f"python train.py configs/demo_softmax.toml --data.dir {out} --model.vocab-size 257\n"
    assert printed.endswith(f"next     {command}")
    assert [TokenStream(out, split).n_tokens for split in ("val", "train")] == [261, 4941]
    sized = ["--val-tokens", "100", "--out", tmp_path / "sized"]
    call(prepare, "--files", tmp_path / "book.txt", "--tokenizer", "bytes", *sized)
    assert TokenStream(tmp_path / "sized", "val").n_tokens == 100
