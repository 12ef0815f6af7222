"""What --dry-run of train.py makes of a config: four steps that leave nothing."""

from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import finish_dataset, write_split
from infra.distributed import World
from infra.files import read_jsonl
from schema import Config
from training.loader import share_batch
from training.run_log import format_duration
from training.state import RANDOM

N_STEPS = 4  # at p = 1, a larger one and the last, each of which compiles; the fourth is timed


def write_random_data(config: Config, folder: Path) -> None:
    """Shards of random tokens, of four windows."""
    vocab_size = config.model.vocab_size
    info: dict[str, Any] = {"dataset": "random", "tokenizer": RANDOM, "vocab_size": vocab_size}
    info |= {"source": "random numbers", "splits": {}, "shards": []}
    size = 4 * config.train.seq_len + 1
    tokens = np.random.default_rng(config.seed).integers(vocab_size, size=size)
    tokens[0] = vocab_size - 1  # `<|endoftext|>`
    folder.mkdir()
    for split in ("train", "val"):
        write_split(folder, info, split, [tokens], n_documents=1)
    finish_dataset(folder, info)


def shorten(config: Config, world: World, folder: Path) -> Config:
    """The config of a few small steps, one validation and one save, in `folder`.

    A step has two micro-batches a process if the config's has more than one: at the second there
    are gradients already, which count in the peak of memory.
    """
    data = Path(config.data.dir)
    if not any(data.glob("*.bin")):
        if world.is_main:
            print(f"data.dir = {str(data)!r}: no shards there: random tokens take their place")
        data = folder / "data"
        write_random_data(config, data)
    train = config.train
    n_steps = N_STEPS if train.max_steps else 0
    micro, per_process = share_batch(train, world.size)
    n_sequences = world.size * min(2 * micro, per_process)
    changes: dict[str, dict[str, Any]] = {
        "data": {"dir": str(data)},
        "attention": {"reweight_p_warmup": min(config.attention.reweight_p_warmup, 2)},
        "optimizer": {"warmup_steps": min(config.optimizer.warmup_steps, n_steps)},
        "log": {"dir": str(folder), "every": 1, "wandb": False},
        "train": {
            "max_steps": n_steps, "batch_tokens": n_sequences * train.seq_len, "val_every": N_STEPS,
            "val_tokens": train.seq_len, "checkpoint_every": N_STEPS,
        },
    }  # fmt: skip
    sections = {
        name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()
    }
    return config.model_copy(update=sections)


def describe(config: Config, shortened: Config) -> list[str]:
    """Memory and time of the config's steps, by the last one of the shortened run."""
    kept = "dry run  steps, validation and save work; nothing is kept"
    steps = [each for each in read_jsonl(shortened.run_dir / "metrics.jsonl") if "loss" in each]
    if not steps:  # with max_steps = 0
        return [kept]
    train = config.train
    # A step of this run has an update for two micro-batches, one of the config's for all.
    seconds = steps[-1]["step_ms"] / 1000 * train.batch_tokens / shortened.train.batch_tokens
    return [
        kept,
        f"memory   {steps[-1]['memory_gb']:.2f} GB at the peak, in one process",
        f"time     at most {seconds:.3g} s a step of {train.batch_tokens:,} tokens: "
        f"{format_duration(1000 * seconds)} for 1000 steps, "
        f"{format_duration(train.max_steps * seconds)} for all {train.max_steps}",
    ]
