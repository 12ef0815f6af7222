"""lab.lengths: documents, those that cross shards as well."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import one_line, write_dataset

from data.dataset import TokenStream
from lab import lengths
from lab.lengths import document_lengths

EOT = 256  # of the bytes tokeniser


@pytest.mark.parametrize("shard_size", [7000, 10**6])
def test_document_lengths(tmp_path: Path, shard_size: int) -> None:
    """Documents that cross shards, exceed them and are empty; a split inside of one; one without
    any.
    """
    lengths = [1, 300, 1, 40_000, 2, 1023, 1024, 16384, 4096, 1]
    tokens = np.ones(sum(lengths), int)
    tokens[np.cumsum([0, *lengths[:-1]])] = EOT
    write_dataset(
        tmp_path, {"val": tokens, "train": tokens[200:], "none": np.ones(9, int)}, shard_size
    )
    for split, expected in (("val", lengths), ("train", lengths[2:]), ("none", [])):
        assert document_lengths(TokenStream(tmp_path, split)).tolist() == expected


def test_a_mask(tmp_path: Path, call: Callable[..., None], capsys: Any) -> None:
    ones = np.array([1, 1, 0, 1, 0])
    write_dataset(tmp_path, {"val": np.full(5, EOT), "valmask": ones}, 3)
    call(lengths, tmp_path)
    assert capsys.readouterr().out.endswith("valmask    3 of 5 tokens count in the loss\n")


def test_the_command(tmp_path: Path, call: Callable[..., None], capsys: Any) -> None:
    dataset = write_dataset(
        tmp_path, {"val": np.full(7, EOT), "train": np.resize([EOT, 1, 2], 120)}, 50
    )
    call(lengths, dataset)
    printed = capsys.readouterr().out
    for part in ("source     a test", "bytes, vocabulary 257", "120 tokens, 40 documents"):
        assert part in printed


def test_an_empty_folder_is_one_line(tmp_path: Path, call: Callable[..., None]) -> None:
    with one_line("no shards"):
        call(lengths, tmp_path)
