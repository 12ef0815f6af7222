"""lab.text_gain: counting sees what lies beyond L, and only there."""

import random

from lab.text_gain import TrainingCounts, cross_fit, match, read_block

L = 16
VOCAB = 64


def blocks_of(distance, n_blocks=8):
    """Random text whose last L tokens repeat those `distance` tokens before."""
    draw = random.Random(1)
    counts = TrainingCounts([draw.randrange(VOCAB) for _ in range(2000)], VOCAB)
    blocks = []
    for _ in range(n_blocks):
        tokens = [draw.randrange(VOCAB) for _ in range(16 * L + 1)]
        tokens[-L:] = tokens[-L - distance : -distance]
        blocks.append(list(read_block(tokens, counts, L)))
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
