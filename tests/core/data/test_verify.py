"""data.verify: info counts documents and their lengths, verify names all damage by file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import flip, one_line, write_shard

from data import shards
from data import verify as verify_module
from data.dataset import TokenStream, begin_dataset, finish_dataset, write_split
from data.verify import document_lengths
from infra.cli import UserError

ROOT = Path(__file__).resolve().parents[3]
EOT = 256  # of the bytes tokeniser


def make_dataset(folder: Path, splits: dict[str, Any], shard_size: int) -> Path:
    begin_dataset(folder)
    info: dict = {"dataset": "toy", "tokenizer": "bytes", "vocab_size": 257, "source": "test"}
    info |= {"splits": {}, "shards": []}
    for split, tokens in splits.items():
        write_split(folder, info, split, [tokens], int((np.asarray(tokens) == EOT).sum()), shard_size)
    finish_dataset(folder, info)
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """val: shard 0; train: shards 1 to 4 of 100,000 tokens (more than open_shard looks at), 5 of 50,000."""
    rng = np.random.default_rng(0)
    streams = {"val": rng.integers(0, 257, 5000), "train": rng.integers(0, 256, 450_000)}
    streams["train"][rng.integers(0, 450_000, 40)] = EOT
    return make_dataset(tmp_path / "toy", streams, 100_000)


def verify(folder: Path) -> list[str]:
    """The damages."""
    try:
        verify_module.verify(folder)
    except UserError as e:
        return str(e).splitlines()
    return []


def train_shard(folder: Path, index: int) -> Path:
    return folder / f"toy_train_{index:06d}.bin"


def edit_info(folder: Path, *keys: str | int, to: object) -> None:
    path = folder / "dataset.json"
    info = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    path.write_text(json.dumps(info))


@pytest.mark.parametrize("shard_size", [700, 5000, 10**6])
def test_document_lengths_are_the_slow_count(tmp_path: Path, shard_size: int) -> None:
    """Documents that cross shards, exceed them and are empty; a split inside of one; one without any."""
    rng = np.random.default_rng(1)
    lengths = [*rng.permutation([1, 1, 2, 1023, 1024, 4096, 16384, 40_000, 300]), 1]
    tokens = rng.integers(0, 256, sum(lengths))
    tokens[np.cumsum([0, *lengths[:-1]])] = EOT
    streams = {"val": tokens[:20_000], "train": tokens[20_000:], "test": tokens, "none": np.ones(9, int)}
    make_dataset(tmp_path, streams, shard_size)
    for split, stream in streams.items():
        pieces = [0]
        for token in stream:
            if token == EOT:
                pieces.append(0)
            pieces[-1] += 1
        head, found = document_lengths(TokenStream(tmp_path, split))
        assert [head, *found] == pieces
    assert found.size == 0 and head == 9


def test_info_shows_what_is_there(tmp_path: Path, call: Callable[..., None], capsys: Any) -> None:
    val = [EOT, *"Two\nlines, é\x1b".encode(), EOT, *b"x" * 5000]
    train = [*b"tail", EOT, *b"y" * 300, EOT, *b"z"]
    make_dataset(tmp_path / "toy", {"val": val, "train": train}, 1000)
    call(verify_module, "info", tmp_path / "toy")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for line in (
        "source     test",
        "tokeniser  bytes, vocabulary 257",
        f"val: {len(val):,} tokens in 6 shards",
        f"2 documents, {len(val) / 2:,.1f} tokens on average",
        f"{5001 / len(val):.1%} of the tokens in 1 documents of at least 4,096",
        "the first begins 'Two\\nlines, é\\x1b'",
        "2 documents, 151.5 tokens on average",
        "4 tokens of a document that began before the split",
        "0.0% of the tokens in 0 documents of at least 1,024",
        f"the first begins '{'y' * 200}'...",
    ):
        assert line in printed


def test_info_needs_no_vocabulary_files(
    dataset: Path, call: Callable[..., None], monkeypatch: Any, capsys: Any
) -> None:
    def unreachable(encoding: str) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    edit_info(dataset, "tokenizer", to="gpt2")
    call(verify_module, "info", dataset)
    assert "not shown: tokenizer 'gpt2'" in capsys.readouterr().out
    (dataset / "dataset.json").unlink()
    call(verify_module, "info", dataset)
    printed = capsys.readouterr().out
    assert "unknown: no dataset.json" in printed and "train: 450,000 tokens in 5 shards" in printed


def test_healthy_datasets_have_no_problems(dataset: Path) -> None:
    (dataset / "manifest.jsonl").write_text("{}")  # a script's own files are its own business
    assert verify(dataset) == []
    (dataset / "dataset.json").unlink()
    assert verify(dataset) == []


# Of each damage: the file that has to be named, what is done to it, a part of the line.
SHARD = "toy_train_000003.bin"
INFO = "dataset.json"
DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "flipped bit": (SHARD, lambda path: flip(path, 1024 + 2 * 12_345), "sha256"),
    "flipped bit in the header": (SHARD, lambda path: flip(path, 500), "sha256"),
    "truncated": (SHARD, lambda path: os.truncate(path, 9999), "9999 bytes"),
    "shorter": (SHARD, lambda path: write_shard(path, np.ones(9, int)), "expected 100000 tokens"),
    "missing": (SHARD, lambda path: path.unlink(), "No such file"),
    "missing last": ("toy_train_000005.bin", lambda path: path.unlink(), "No such file"),
    "extra": ("toy_train_000006.bin", lambda path: write_shard(path, [EOT, 1]), "not listed"),
    "foreign": ("copy.bin", lambda path: path.write_bytes(b"1"), "expected a name like"),
    "recorded sha256": (
        SHARD,
        lambda path: edit_info(path.parent, "shards", 3, "sha256", to="0" * 64),
        "100000 tokens, sha256 000000000000...",
    ),
    "no JSON": (INFO, lambda path: path.write_text("{"), "not valid JSON"),
    "bad key": (INFO, lambda path: edit_info(path.parent, "vocab_size", to="257"), "vocab_size = '257'"),
}


def damage(folder: Path, kind: str) -> tuple[Path, str]:
    """Do it; returns what the line has to name and to say."""
    file, do, part = DAMAGES[kind]
    do(folder / file)
    return folder / file, part


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_one_line_that_names_the_file(dataset: Path, kind: str) -> None:
    path, part = damage(dataset, kind)
    (line,) = verify(dataset)
    assert line.startswith(f"{path}: ") and part in line


def test_a_token_that_the_sample_misses(dataset: Path) -> None:
    path = train_shard(dataset, 2)
    tokens = shards.open_shard(path, 257).copy()
    tokens[54_321] = 50_000
    sha256 = write_shard(path, tokens)
    shards.open_shard(path, 257)
    edit_info(dataset, "shards", 2, "sha256", to=sha256)  # written wrong, then recorded faithfully
    assert verify(dataset) == [f"{path}: token 50000: expected only tokens below 257"]


def test_all_damages_at_once(dataset: Path) -> None:
    flip(train_shard(dataset, 1), 1024)
    flip(dataset / "toy_val_000000.bin", 0)
    damaged = [damage(dataset, kind)[0].name for kind in ("truncated", "missing last", "extra", "foreign")]
    damaged += ["toy_train_000001.bin", "toy_val_000000.bin"]
    assert sorted(Path(line.split(": ")[0]).name for line in verify(dataset)) == sorted(damaged)


def test_gaps_and_mixtures_without_dataset_json(dataset: Path) -> None:
    (dataset / "dataset.json").unlink()
    (dataset / "toy_val_000000.bin").unlink()  # need not have been downloaded
    assert verify(dataset) == []
    for index in (3, 1):
        train_shard(dataset, index).unlink()
        (line,) = verify(dataset)
        assert line.startswith(f"{train_shard(dataset, index)}: missing")
    write_shard(dataset / "other_train_000006.bin", [1])
    (line,) = verify(dataset)
    assert "other, toy" in line


def start(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "data.verify", *map(str, args)]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def test_verify_command(dataset: Path) -> None:
    with start("verify", dataset) as process:
        assert process.communicate() == ("ok: 6 shards, 455,000 tokens, every byte checked\n", "")
    for kind in ("truncated", "missing last"):
        damage(dataset, kind)
    with start("verify", dataset) as process:
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (2, "")
    assert stderr.count("\n") == stderr.count("error: ") == 2


def test_a_closed_pipe_ends_quietly(dataset: Path) -> None:
    """As in `python -m data.verify verify DIR | true`, where the output waits in a buffer until the end."""
    with start("verify", dataset) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("command", "part"), [("look", "'look'"), ("info", "no shards"), ("verify", "no shards")]
)
def test_mistakes_are_one_line(tmp_path: Path, command: str, part: str, call: Any) -> None:
    with one_line(part):
        call(verify_module, command, tmp_path)
