"""What --dry-run and --smoke of train.py change of a config."""

from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import begin_dataset, finish_dataset, write_split
from infra.distributed import World
from schema import Config
from training.state import RANDOM

SMOKE_STEPS = 5


def with_data(config: Config, world: World, folder: Path) -> Config:
    """The config; where its data folder is missing, with random tokens in `folder`."""
    if Path(config.data.dir).exists():
        return config
    if world.is_main:
        print(f"data.dir = {config.data.dir!r}: no such folder: random tokens take its place")
    vocab_size = config.model.vocab_size
    info: dict[str, Any] = {"dataset": "random", "tokenizer": RANDOM, "vocab_size": vocab_size}
    info |= {"source": "random numbers", "splits": {}, "shards": []}
    begin_dataset(folder)
    tokens = np.random.default_rng(config.seed).integers(vocab_size, size=4 * config.train.seq_len + 1)
    for split in ("train", "val"):
        write_split(folder, info, split, [tokens], n_documents=1)
    finish_dataset(folder, info)
    return config.model_copy(update={"data": config.data.model_copy(update={"dir": str(folder)})})


def shorten(config: Config, n_processes: int, folder: Path) -> Config:
    """The config of five steps of a sequence a process, one validation and one save, in `folder`."""
    train = config.train
    n_steps = min(SMOKE_STEPS, train.max_steps)
    attention_every = min(1, config.log.attention_every)
    n_tokens = train.seq_len * n_processes
    changes = {
        "attention": {"reweight_p_warmup": min(config.attention.reweight_p_warmup, n_steps)},
        "optimizer": {"warmup_steps": min(config.optimizer.warmup_steps, n_steps)},
        "log": {"dir": str(folder), "every": 1, "wandb": False, "attention_every": attention_every},
        "train": {
            "max_steps": n_steps, "batch_tokens": n_tokens, "micro_batch": 1, "val_every": SMOKE_STEPS,
            "val_tokens": min(n_tokens, train.val_tokens), "checkpoint_every": SMOKE_STEPS,
        },
    }  # fmt: skip
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return config.model_copy(update=sections)
