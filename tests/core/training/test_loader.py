"""Batches: split over processes and micro-batches, from shards that are whole."""

import pytest
import torch

from config import load_config
from data.batches import train_batch
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import World
from training.loader import BatchLoader


def test_ranks_and_micro_batches_are_slices_of_the_batch(tiny_config, tiny_dataset):
    """In any order of steps."""
    config = load_config(tiny_config, ["--train.micro-batch", "2", "--data.skip-steps", "5"])
    stream = TokenStream(tiny_dataset, "train")
    loaders = [BatchLoader(stream, config, World(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    for step in (0, 1, 7, 2):
        parts = [pair for loader in loaders for pair in loader.read(step)]
        assert [x.shape for x, _ in parts] == [(2, 16)] * 4
        x, y = train_batch(stream, 5 + step, 8, 16, "sequential", config.seed)
        assert torch.equal(torch.cat([x for x, _ in parts]), torch.from_numpy(x))
        assert torch.equal(torch.cat([y for _, y in parts]), torch.from_numpy(y))


def test_batch_that_cannot_be_split(tiny_config, tiny_dataset):
    stream = TokenStream(tiny_dataset, "train")
    config = load_config(tiny_config, ["--train.batch-tokens", "256"])
    loaders = [BatchLoader(stream, config, World(0, n, torch.device("cpu"))) for n in (2, 16)]
    assert [(loader.per_rank, loader.micro) for loader in loaders] == [(8, 4), (1, 1)]
    with pytest.raises(
        UserError, match="train.batch_tokens = 256: 16 sequences cannot be shared by 3"
    ):
        BatchLoader(stream, config, World(0, 3, torch.device("cpu")))
    config = load_config(tiny_config, ["--train.batch-tokens", "192", "--train.micro-batch", "4"])
    with pytest.raises(
        UserError, match="micro_batch = 4: expected a divisor of the 6 sequences of each"
    ):
        BatchLoader(stream, config, World(0, 2, torch.device("cpu")))
