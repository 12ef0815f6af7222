"""data.verify names all damage by file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import flip, one_line, write_dataset, write_shard

from data import shards
from data import verify as verify_module
from infra.cli import UserError

EOT = 256  # of the bytes tokeniser


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """val: shard 0; train: shards 1 to 4 of 100,000 tokens (more than open_shard looks at), 5 of 50,000."""
    rng = np.random.default_rng(0)
    streams = {"val": rng.integers(0, 257, 5000), "train": rng.integers(0, 256, 450_000)}
    streams["train"][rng.integers(0, 450_000, 40)] = EOT
    return write_dataset(tmp_path / "toy", streams, 100_000)


def verify(folder: Path) -> list[str]:
    """The damages."""
    try:
        verify_module.verify(folder)
    except UserError as e:
        return str(e).splitlines()
    return []


def train_shard(folder: Path, index: int) -> Path:
    return folder / f"toy_train_{index:06d}.bin"


def test_healthy_datasets_have_no_problems(dataset: Path) -> None:
    (dataset / "manifest.jsonl").write_text("{}")  # a script's own files are its own business
    assert verify(dataset) == []
    (dataset / "dataset.json").unlink()
    assert verify(dataset) == []


# Of each damaged file: what is done to it, and a part of the line.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "copy.bin": (lambda path: path.write_bytes(b"1"), "expected a name like"),
    "toy_train_000001.bin": (lambda path: flip(path, 1024 + 2 * 12_345), "sha256"),
    "toy_train_000002.bin": (lambda path: flip(path, 500), "sha256"),  # in the header
    "toy_train_000003.bin": (lambda path: os.truncate(path, 9999), "9999 bytes"),
    "toy_train_000004.bin": (lambda path: write_shard(path, np.ones(9, int)), "expected 100000 tokens"),
    "toy_train_000005.bin": (lambda path: path.unlink(), "No such file"),
    "toy_train_000006.bin": (lambda path: write_shard(path, [EOT, 1]), "not listed"),
}


def test_each_damage_is_one_line_that_names_the_file(dataset: Path) -> None:
    for file, (damage, _) in DAMAGES.items():
        damage(dataset / file)
    for line, (file, (_, part)) in zip(verify(dataset), DAMAGES.items(), strict=True):
        assert line.startswith(f"{dataset / file}: ") and part in line


def test_a_token_that_the_sample_misses(dataset: Path) -> None:
    path = train_shard(dataset, 2)
    tokens = shards.open_shard(path, 257).copy()
    tokens[54_321] = 50_000
    info = json.loads((dataset / "dataset.json").read_text())
    info["shards"][2]["sha256"] = write_shard(path, tokens)  # written wrong, then recorded faithfully
    (dataset / "dataset.json").write_text(json.dumps(info))
    shards.open_shard(path, 257)
    assert verify(dataset) == [f"{path}: token 50000: expected only tokens below 257"]


def test_gaps_without_dataset_json(dataset: Path) -> None:
    (dataset / "dataset.json").unlink()
    (dataset / "toy_val_000000.bin").unlink()  # need not have been downloaded
    assert verify(dataset) == []
    train_shard(dataset, 3).unlink()
    (line,) = verify(dataset)
    assert line.startswith(f"{train_shard(dataset, 3)}: missing")


def test_the_command(dataset: Path, call: Any, capsys: Any) -> None:
    call(verify_module, dataset)
    assert capsys.readouterr().out == "ok: 6 shards, 455,000 tokens, every byte checked\n"


def test_an_empty_folder_is_one_line(tmp_path: Path, call: Any) -> None:
    with one_line("no shards"):
        call(verify_module, tmp_path)
