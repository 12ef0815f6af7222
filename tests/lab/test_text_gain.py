"""lab.text_gain: counting sees what lies beyond L, and only there."""

import random

import pytest
from conftest import make_byte_run, one_line, write_dataset

from lab import text_gain
from lab.text_gain import (
    FACTORS,
    TrainingCounts,
    by_counts,
    cross_fit,
    fit_and_score,
    match,
    read_block,
)
from measure import read_rows

L = 16
WIDTHS = [factor * L for factor in FACTORS]
VOCAB = 64


def blocks_of(distance, n_blocks=8):
    """Random text whose last L tokens repeat those `distance` tokens before."""
    draw = random.Random(1)
    counts = TrainingCounts([draw.randrange(VOCAB) for _ in range(2000)], VOCAB)
    blocks = []
    for _ in range(n_blocks):
        tokens = [draw.randrange(VOCAB) for _ in range(16 * L + 1)]
        tokens[-L:] = tokens[-L - distance : -distance]
        blocks.append(list(read_block(tokens, by_counts(counts, tokens, WIDTHS), VOCAB)))
    return blocks


def test_a_repetition_beyond_the_cut_is_gained_at_the_lengths_that_reach_it():
    blocks = blocks_of(distance=3 * L)
    cut = cross_fit(blocks, [L]).mean()
    assert abs(cross_fit(blocks, [L, 2 * L]).mean() - cut) < 0.1 * cut
    assert cross_fit(blocks, [L, 4 * L]).mean() < 0.5 * cut


def test_match_reads_the_window_alone():
    tokens = [5, 7, 1, 2, 3, 5, 7]
    found = [[1, 2, 3, 4, 5], [1]]  # what followed anything, and what followed a 5
    narrow = match(tokens, 6, 4, found, VOCAB)
    assert narrow.length == 0
    assert narrow.probability == (0 + 4 * (1 / VOCAB)) / (4 + 4)
    wide = match(tokens, 6, 6, found, VOCAB)
    assert wide.length == 1
    assert wide.probability > 0.5


def repeating_dataset(folder):
    """Random bytes; the last L tokens of each block of 16 L repeat those 3 L before."""
    draw = random.Random(1)
    tokens: list[int] = []
    for _ in range(4):
        tokens += [draw.randrange(256) for _ in range(15 * L)]
        tokens += tokens[-3 * L : -2 * L]
    return write_dataset(folder, {"val": [*tokens, 256], "train": [*tokens[:500], 256]}, 10**6)


@pytest.mark.parametrize("sees", ["cut", "window"])
def test_a_model_in_place_of_the_counts(tmp_path, tiny_config, call, capsys, sees):
    """A model of random weights knows next to nothing, so that mixing helps."""
    run = make_byte_run(tiny_config)
    data = repeating_dataset(tmp_path / "data")
    folder = tmp_path / "counted"
    call(text_gain, data, "--blocks", 4, "--model", run, "--sees", sees, "--out", folder)
    assert f"| {16 * L} |" in capsys.readouterr().out
    rows = read_rows(folder)
    assert rows.run.unique().tolist() == [
        run.name + ("_whole" if sees == "window" else "") + "_count"
    ]
    losses = rows[rows.window == "0"].groupby("length").value.mean()
    window = rows[rows.window == f"{L} recomputed"].value.mean()
    assert abs(losses[2 * L] - window) < 0.2 * window and losses[16 * L] < 0.7 * window


def test_another_text_needs_the_same_tokenizer(tmp_path, tiny_dataset, call):
    data = repeating_dataset(tmp_path / "data")
    call(text_gain, tiny_dataset, "--text", data, "--train-len", L, "--blocks", 2)
    (data / "dataset.json").write_text(
        (data / "dataset.json").read_text().replace('"bytes"', '"gpt2"')
    )
    with one_line("--text", "tokenizer", tiny_dataset):
        call(text_gain, tiny_dataset, "--text", data, "--train-len", L, "--blocks", 2)
    with one_line("--blocks 99", "expected 2 to"):
        call(text_gain, tiny_dataset, "--train-len", L, "--blocks", 99)


def test_weights_are_fitted_on_the_other_blocks():
    first, second = blocks_of(3 * L, n_blocks=2)
    widths = [L, 4 * L]
    expected = [fit_and_score(*pair, widths).mean() for pair in ((second, first), (first, second))]
    assert cross_fit([first, second], widths) == pytest.approx(expected)


def test_the_training_split_is_counted(tmp_path, call):
    """Random bytes that it does not have stay near ln 257 = 5.5. Counted themselves, they would be
    known.
    """
    draw = random.Random(1)
    val = [draw.randrange(256) for _ in range(2 * 16 * L)]
    data = write_dataset(tmp_path / "data", {"val": [*val, 256], "train": [7] * 500 + [256]}, 10**6)
    call(text_gain, data, "--train-len", L, "--blocks", 2, "--out", tmp_path / "out")
    rows = read_rows(tmp_path / "out")
    assert rows.value.min() > 5
