"""The ready GPT-2 shards of kjj0/fineweb10B-gpt2, which is FineWeb's sample-10BT.

Command line: `python -m data.fineweb --pretokenized`.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import begin_dataset, dataset_info, finish_dataset
from data.documents import naming
from data.shards import MAX_TOKENS, ShardWriter, open_shard
from infra.cli import UserError
from infra.files import exclusive_lock

PRETOKENIZED = "kjj0/fineweb10B-gpt2"
SHARD = re.compile(r"fineweb_(val|train)_\d{6}\.bin")
HINT = "; run the same command again to resume; without a network, HF_HUB_OFFLINE=1 uses the hub's cache"


def fetch_pretokenized(out: Path, n_train: int | None) -> dict[str, Any]:
    """Fetch the validation shard and the first `n_train` training shards (None: all); returns dataset.json.

    Each is compared with the hub's sha256 and checked as a shard. Existing shards are checked and kept.

    Raises:
        UserError: no network, fewer shards than asked for, or a folder with another dataset.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    offline, fetch = constants.HF_HUB_OFFLINE, partial(snapshot_download, PRETOKENIZED, repo_type="dataset")
    with exclusive_lock(out):
        with naming(PRETOKENIZED, HINT):
            if offline:  # the cache names a file's content by its sha256
                cached = Path(fetch(allow_patterns="*_val_*.bin"))
                commit, sha256 = cached.name, {path.name: path.resolve().name for path in cached.iterdir()}
            else:
                found = HfApi().dataset_info(PRETOKENIZED, files_metadata=True, timeout=10)
                commit = str(found.sha)
                sha256 = {file.rfilename: file.lfs.sha256 for file in found.siblings or [] if file.lfs}
        wanted = _wanted(out, sorted(filter(SHARD.fullmatch, sha256)), n_train)
        begin_dataset(out)
        with naming(PRETOKENIZED, HINT):
            if not offline:
                fetch(revision=commit, allow_patterns=wanted, local_dir=out)
            for name in wanted:
                if not (out / name).exists():
                    shutil.copyfile(cached / name, out / name)
        info = {
            "dataset": "fineweb",
            "tokenizer": "gpt2",
            "vocab_size": 50257,
            "source": f"{PRETOKENIZED} at commit {commit}",
            "rows": {},
        }
        finish_dataset(out, info | _checked_splits(out, {name: sha256[name] for name in wanted}))
    return dataset_info(out)


def _wanted(out: Path, names: list[str], n_train: int | None) -> list[str]:
    """The shards to fetch of those on the hub, those of an earlier call included."""
    val, train = ([name for name in names if f"_{split}_" in name] for split in ("val", "train"))
    if not val or len(train) < (n_train or 1):
        asked = f"--shards {n_train}: " if n_train else ""
        raise UserError(f"{asked}{PRETOKENIZED} has {len(val)} validation and {len(train)} training shards")
    for path in (*out.glob("*.bin"), *out.glob("manifest.jsonl")):
        if path.name not in names:
            raise UserError(f"{out}: holds {path.name}, another dataset's: choose another --out")
    there = [index for index, name in enumerate(train, 1) if (out / name).exists()]
    return val + train[: max([n_train or len(train), *there])]


def _checked_splits(out: Path, sha256: dict[str, str]) -> dict[str, Any]:
    """`splits` and `shards` of dataset.json, each shard compared with its sha256 on the hub."""
    splits: dict[str, Any] = {}
    shards: list[dict[str, Any]] = []
    for index, split in enumerate(("val", "train")):
        writer, documents = ShardWriter(out, "fineweb", split, MAX_TOKENS, index), 0
        for name in (name for name in sha256 if f"_{split}_" in name):
            try:
                tokens = open_shard(out / name, 50257)
                writer.adopt({"file": name, "tokens": len(tokens), "sha256": sha256[name]})
            except UserError as e:
                (out / name).unlink()
                raise UserError(f"{e}; deleted: run the same command again to fetch it anew") from None
            documents += int(np.count_nonzero(tokens == 50256))
        shards += writer.files
        splits[split] = writer.counts(documents)
    return {"splits": splits, "shards": shards}
