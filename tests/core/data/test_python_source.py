"""The tokenisers, and the corpus of Python's own sources."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import check_dataset, make_dataset, needs_gpt2, one_line

from data import python_source
from data.dataset import TokenStream
from data.tokenizer import get_tokenizer

ROOT = Path(__file__).resolve().parents[3]


def test_bytes_tokenizer():
    encoding = get_tokenizer("bytes")
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    for text in ("", "a" * 1000, "\r\n\t\x00", "é漢🎉" * 50, "x<|endoftext|>y"):
        assert encoding.encode_ordinary(text) == list(text.encode())
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.decode([256]) == "<|endoftext|>"


def test_tokenizer_errors(monkeypatch):
    def unreachable(name):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    with one_line("TIKTOKEN_CACHE_DIR", "no route to host"):
        get_tokenizer("gpt2")


@pytest.fixture
def sources(tmp_path):
    """20 documents of 30 to 40,000 bytes, and what must be left out."""
    root = tmp_path / "lib"
    rng = np.random.default_rng(1)
    for i in range(20):
        path = root / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "".join(f"x{n} = '<|endoftext|> é'\r\n" for n in rng.integers(0, 999, 1 + i * i * 4))
        path.write_bytes(f"# {i}\n{body}".encode())
    (root / "copy.py").write_bytes((root / "package0" / "module0.py").read_bytes())
    (root / "empty.py").write_bytes(b"")
    (root / "latin1.py").write_bytes(b"# \xe9\n")
    (root / "data.txt").write_text("no python")
    (root / "_sysconfigdata_x.py").write_text("generated")
    for folder in ("test", "package0/tests", "site-packages", "__pycache__", "config-3.11"):
        (root / folder).mkdir()
        (root / folder / "a.py").write_text("left out")
    return root


def documents_of(folder, split, tokenizer):
    encoding = get_tokenizer(tokenizer)
    stream = TokenStream(folder, split)
    tokens = stream.read(0, stream.n_tokens)
    ends = np.flatnonzero(tokens == encoding.eot_token)
    assert ends[0] == 0
    return [encoding.decode(part[1:].tolist()) for part in np.split(tokens, ends[1:])]


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("gpt2", marks=needs_gpt2)])
def test_corpus_is_the_sources_split_by_file(sources, tmp_path, tokenizer):
    out = tmp_path / "out"
    info = python_source.build(sources, out, tokenizer, val_fraction=0.2)
    val = documents_of(out, "val", tokenizer)
    train = documents_of(out, "train", tokenizer)
    expected = [path.read_bytes().decode() for path in sources.glob("package?/*.py")]
    assert sorted(val + train) == sorted(expected) and len(expected) == 20
    assert 0.1 < sum(map(len, val)) / sum(map(len, expected)) <= 0.2
    assert len(val) >= 2 and train != sorted(train)
    assert [counts["documents"] for counts in info["splits"].values()] == [len(val), len(train)]
    check_dataset(out)


def test_corpus_is_reused_or_rebuilt(sources, tmp_path, capsys):
    out = tmp_path / "out"

    def build(val_fraction=0.1):
        python_source.build(sources, out, val_fraction=val_fraction)
        return capsys.readouterr().out

    build()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "nothing to do" in build()
    shard = out / "python_train_000001.bin"
    shard.write_bytes(before[shard.name][:-2])
    assert f"not finished: {shard}: " in build()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with one_line(out, "holds a finished dataset"):
        build(0.2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "dataset.json").unlink()
    assert "nothing to do" not in build(0.2)
    assert "nothing to do" in build(0.2)


def test_corpus_spares_another_dataset(sources, tmp_path):
    toy = make_dataset(tmp_path / "toy")
    before = sorted(path.stat().st_mtime_ns for path in toy.iterdir())
    with one_line(toy, "another dataset"):
        python_source.build(sources, toy)
    assert sorted(path.stat().st_mtime_ns for path in toy.iterdir()) == before


@pytest.mark.slow
def test_real_corpus(tmp_path):
    """The script itself, from another folder, on this Python's library."""
    command = [sys.executable, "-m", "data.python_source", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")  # no progress bar: stderr is no terminal
    train = TokenStream(tmp_path / "out", "train")
    val = TokenStream(tmp_path / "out", "val")
    assert train.n_tokens > 5_000_000
    assert val.n_tokens > 300_000
    sizes = [len(text) for text in documents_of(tmp_path / "out", "val", "bytes")]
    assert min(sizes) < 16_384 and max(sizes) > 65_536
    assert 0.03 < val.n_tokens / (val.n_tokens + train.n_tokens) <= 0.051
