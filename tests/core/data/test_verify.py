"""data.verify: info counts documents and their lengths, verify names all damage by file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import flip, one_line, write_shard

from data import shards
from data import verify as verify_module
from data.dataset import begin_dataset, finish_dataset
from data.verify import survey
from infra.cli import UserError

ROOT = Path(__file__).resolve().parents[3]
EOT = 256  # of the bytes tokeniser


def make_dataset(folder: Path, splits: dict[str, np.ndarray], shard_size: int) -> None:
    """Shards and dataset.json of the splits' streams, without help from ShardWriter."""
    begin_dataset(folder)
    info: dict = {"dataset": "toy", "tokenizer": "bytes", "vocab_size": 257, "source": "test", "splits": {}}
    files: list[dict] = []
    for split, tokens in splits.items():
        parts = np.split(tokens, range(shard_size, len(tokens), shard_size))
        for part in parts:
            name = f"toy_{split}_{len(files):06d}.bin"
            files.append({"file": name, "tokens": len(part), "sha256": write_shard(folder / name, part)})
        info["splits"][split] = {
            "tokens": len(tokens),
            "documents": int((tokens == EOT).sum()),
            "shards": len(parts),
            "sha256": hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest(),
        }
    finish_dataset(folder, info | {"shards": files})


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """val: shard 0; train: shards 1 to 4 of 100,000 tokens (more than open_shard looks at), 5 of 50,000."""
    rng = np.random.default_rng(0)
    streams = {"val": rng.integers(0, 257, 5000), "train": rng.integers(0, 256, 450_000)}
    streams["train"][rng.integers(0, 450_000, 40)] = EOT
    make_dataset(tmp_path / "toy", streams, 100_000)
    return tmp_path / "toy"


def verify(folder: Path) -> list[str]:
    """The damages."""
    try:
        verify_module.verify(folder)
    except UserError as e:
        return str(e).splitlines()
    return []


def train_shard(folder: Path, index: int) -> Path:
    return folder / f"toy_train_{index:06d}.bin"


def edit_info(folder: Path, *keys: str | int, value: object) -> None:
    path = folder / "dataset.json"
    info = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(info))


# ---------------------------------------------------------------- survey


def slow_survey(tokens: list[int]) -> tuple[int, int, dict[int, tuple[int, int]]]:
    """Documents, head and the length distribution, one token after the other."""
    head, lengths = 0, []
    for token in tokens:
        if token == EOT:
            lengths.append(0)
        if lengths:
            lengths[-1] += 1
        else:
            head += 1
    long = {}
    for limit in (1024, 4096, 16384):
        in_long = [n for n in lengths if n >= limit]
        long[limit] = (len(in_long), sum(in_long) + (head if head >= limit else 0))
    return len(lengths), head, long


@pytest.mark.parametrize(("shard_size", "chunk"), [(700, 64), (5000, 1000), (10**6, 2**21)])
def test_survey_is_the_slow_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: int, chunk: int
) -> None:
    """Documents that cross shards and chunks, exceed them, are empty, and lengths exactly at the limits."""
    rng = np.random.default_rng(1)
    lengths = [*rng.permutation([1, 1, 2, 1023, 1024, 1025, 4095, 4096, 16383, 16384, 40_000, 300]), 1]
    tokens = rng.integers(0, 256, sum(lengths))
    tokens[np.cumsum([0, *lengths[:-1]])] = EOT
    monkeypatch.setattr(shards, "CHUNK_TOKENS", chunk)
    make_dataset(tmp_path, {"val": tokens[:20_000], "train": tokens[20_000:], "test": tokens}, shard_size)
    for split, part in (("val", tokens[:20_000]), ("train", tokens[20_000:]), ("test", tokens)):
        s = survey(tmp_path, split)
        assert (s.documents, s.head, s.long) == slow_survey(part.tolist())
        assert (s.tokens, s.shards) == (len(part), -(-len(part) // shard_size))
        assert s.mean_length == pytest.approx((len(part) - s.head) / s.documents)
    assert survey(tmp_path, "train").head > 0 and survey(tmp_path, "test").long[1024][0] == 7


def test_survey_of_a_split_inside_one_document(tmp_path: Path) -> None:
    make_dataset(tmp_path, {"val": np.array([EOT, 1]), "train": np.ones(5000, int)}, 2000)
    s = survey(tmp_path, "train")
    assert (s.documents, s.head, s.mean_length) == (0, 5000, 0)
    assert s.long == {1024: (0, 5000), 4096: (0, 5000), 16384: (0, 0)}


# ---------------------------------------------------------------- verify


def test_healthy_datasets_have_no_problems(dataset: Path) -> None:
    assert verify(dataset) == []
    (dataset / "manifest.jsonl").write_text("{}")  # a script's own files are its own business
    assert verify(dataset) == []
    (dataset / "dataset.json").unlink()
    assert verify(dataset) == []


def test_verify_does_not_depend_on_chunks(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_TOKENS", 999)
    assert verify(dataset) == []
    flip(train_shard(dataset, 3), 1024 + 2 * 77_777 + 1)
    assert [line.split(": ")[0] for line in verify(dataset)] == [str(train_shard(dataset, 3))]


def put(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)


# Of each damage: the file that has to be named, what is done to it, a part of the line.
SHARD, INFO = "toy_train_000003.bin", "dataset.json"
DAMAGES = {
    "flipped bit": (SHARD, lambda path: flip(path, 1024 + 2 * 12_345), "sha256"),
    "flipped bit in the header": (SHARD, lambda path: flip(path, 500), "sha256"),
    "truncated": (SHARD, lambda path: put(path, path.read_bytes()[:-3]), "truncated"),
    "shorter": (SHARD, lambda path: write_shard(path, np.ones(9, int)), "dataset.json lists 100000"),
    "missing": (SHARD, lambda path: path.unlink(), "No such file"),
    "missing last": ("toy_train_000005.bin", lambda path: path.unlink(), "No such file"),
    "folder": (SHARD, lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    "link": (SHARD, lambda path: (path.unlink(), path.symlink_to("nowhere")), "cannot be read"),
    "extra": ("toy_train_000006.bin", lambda path: write_shard(path, [EOT, 1]), "not listed"),
    "foreign": ("copy.bin", lambda path: put(path, b"1"), "expected a name like"),
    "recorded sha256": (
        SHARD,
        lambda path: edit_info(path.parent, "shards", 3, "sha256", value="0" * 64),
        "100000, 000000000000...",
    ),
    "no JSON": (INFO, lambda path: path.write_text("{"), "not valid JSON"),
    "bad key": (INFO, lambda path: edit_info(path.parent, "vocab_size", value="257"), "vocab_size = '257'"),
    "unfinished": ("dataset.unfinished", lambda path: path.touch(), "interrupted preparation"),
    "temporary": (".toy_train_000006.bin.tmp", lambda path: put(path, b"x"), "interrupted preparation"),
}


def damage(folder: Path, kind: str) -> tuple[Path, str]:
    """Do it; returns what the line has to name and to say."""
    name, do, part = DAMAGES[kind]
    do(folder / name)
    return folder / name, part


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_one_line_that_names_the_file(dataset: Path, kind: str) -> None:
    path, part = damage(dataset, kind)
    (line,) = verify(dataset)
    assert line.startswith(f"{path}: ") and part in line and "\n" not in line


def test_a_token_that_the_sample_misses(dataset: Path) -> None:
    path = train_shard(dataset, 2)
    tokens = shards.open_shard(path, 257).copy()
    tokens[[54_321, 54_400]] = 257, 50_000
    sha256 = write_shard(path, tokens)
    shards.open_shard(path, 257)
    edit_info(dataset, "shards", 2, "sha256", value=sha256)  # written wrong, then recorded faithfully
    (line,) = verify(dataset)
    assert line == f"{path}: token 257 at position 54321: expected tokens below the vocabulary size 257"


def test_all_damages_at_once(dataset: Path) -> None:
    flip(train_shard(dataset, 1), 1024)
    for kind in ("truncated", "missing last", "extra", "foreign", "unfinished", "temporary"):
        damage(dataset, kind)
    flip(dataset / "toy_val_000000.bin", 0)
    lines = verify(dataset)
    named = {Path(line.split(": ")[0]).name for line in lines}
    assert named == {
        *("toy_val_000000.bin", "toy_train_000001.bin", "toy_train_000003.bin", "toy_train_000005.bin"),
        *("toy_train_000006.bin", "copy.bin", "dataset.unfinished"),
        ".toy_train_000006.bin.tmp",
    }
    assert len(lines) == len(named)


def test_all_gaps_without_dataset_json(dataset: Path) -> None:
    (dataset / "dataset.json").unlink()
    (dataset / "toy_val_000000.bin").unlink()  # need not have been downloaded
    assert verify(dataset) == []
    for index in (1, 3, 4):
        train_shard(dataset, index).unlink()
    (line,) = verify(dataset)
    names = ", ".join(train_shard(dataset, index).name for index in (1, 3, 4))
    assert line.startswith(f"{dataset / names}: missing")
    write_shard(dataset / "other_train_000006.bin", [1])
    (line,) = verify(dataset)
    assert "other, toy" in line


# ---------------------------------------------------------------- the commands


def run(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "data.verify", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


def test_info_shows_what_is_there(tmp_path: Path) -> None:
    def document(text: str) -> list[int]:
        return [EOT, *text.encode()]

    val = [*document("Two\nlines, é\x1b"), *document("x" * 5000)]
    train = [*b"tail", *document("y" * 300), *document("z")]
    make_dataset(tmp_path / "toy", {"val": np.array(val), "train": np.array(train)}, 1000)
    result = run("info", tmp_path / "toy")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    for line in (
        "source test",
        "tokeniser bytes, vocabulary 257",
        f"val 6 {len(val):,} 2 {len(val) / 2:,.1f}",
        "train 1 307 2 151.5",
        f"val {5001 / len(val):.1%} (1) {5001 / len(val):.1%} (1) 0.0% (0)",
        "train 0.0% (0) 0.0% (0) 0.0% (0)",
        "(train begins with 4 tokens of a document that began before the split)",
        "val 'Two\\nlines, é\\x1b'",
        f"train '{'y' * 200}'...",
    ):
        assert line.split() in lines


def test_info_needs_no_vocabulary_files(dataset: Path, tmp_path: Path) -> None:
    edit_info(dataset, "tokenizer", value="gpt2")
    proxy = "http://127.0.0.1:9"  # closed
    result = run("info", dataset, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY=proxy, https_proxy=proxy)
    assert (result.returncode, result.stderr) == (0, "")
    assert "not shown: tokenizer 'gpt2'" in result.stdout
    (dataset / "dataset.json").unlink()
    result = run("info", dataset, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY=proxy, https_proxy=proxy)
    assert result.returncode == 0 and "unknown: no dataset.json" in result.stdout
    assert ["train", "5", "450,000", "0", "0.0"] in [line.split() for line in result.stdout.splitlines()]


def test_verify_command(dataset: Path) -> None:
    result = run("verify", dataset)
    assert (result.returncode, result.stderr) == (0, "")
    assert "ok: 6 shards, 455,000 tokens, every byte checked" in result.stdout
    (dataset / "dataset.json").rename(dataset / "kept")
    result = run("verify", dataset)
    assert (result.returncode, result.stderr) == (0, "")
    assert "no recorded hashes" in result.stdout and "ok: 6 shards" in result.stdout
    (dataset / "kept").rename(dataset / "dataset.json")

    damage(dataset, "truncated")
    damage(dataset, "temporary")
    result = run("verify", dataset)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 2 and result.stderr.count("error: ") == 2


def test_a_closed_pipe_ends_quietly(dataset: Path) -> None:
    """As in `python -m data.verify verify DIR | true`, where the output waits in a buffer until the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "data.verify", "verify", dataset],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert process.stdout and process.stderr
    with process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_mistakes_are_one_line(tmp_path: Path, call: Callable[..., None]) -> None:
    for args, part in (
        ((), "command, DIR"),
        (("look", tmp_path), "'look'"),
        (("info", tmp_path), "no shards"),
        (("verify", tmp_path), "no shards"),
        (("info", tmp_path / "none"), "no such data folder"),
        (("verify", __file__), "a file"),
    ):
        with one_line(part):
            call(verify_module, *args)
