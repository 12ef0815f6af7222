"""The ready GPT-2 shards of kjj0/fineweb10B-gpt2, which is FineWeb's sample-10BT.

Command line: `python -m data.fineweb --pretokenized`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import begin_dataset, dataset_info, finish_dataset
from data.documents import brief
from data.shards import MAX_TOKENS, ShardWriter, open_shard
from infra.cli import UserError
from infra.files import exclusive_lock

PRETOKENIZED = "kjj0/fineweb10B-gpt2"
SHARD = re.compile(r"fineweb_(val|train)_\d{6}\.bin")
NO_NETWORK = "without a network, HF_HUB_OFFLINE=1 uses the hub's cache"


def fetch_pretokenized(out: Path, n_train: int | None) -> dict[str, Any]:
    """Fetch the validation shard and the first `n_train` training shards (None: all); returns dataset.json.

    Each is compared with the hub's sha256 and checked as a shard. Shards that are there are checked and kept.

    Raises:
        UserError: no network, fewer shards than asked for, no room, or a folder with another dataset.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE
    try:
        if offline:
            cached = Path(
                snapshot_download(PRETOKENIZED, repo_type="dataset", allow_patterns=_patterns(n_train))
            )
            commit, files = cached.name, {path.name: ("", path.stat().st_size) for path in cached.iterdir()}
        else:
            found = HfApi().dataset_info(PRETOKENIZED, files_metadata=True, timeout=10)
            commit = str(found.sha)
            files = {
                file.rfilename: (file.lfs.sha256 if file.lfs else "", file.size or 0)
                for file in found.siblings or []
            }
    except Exception as e:  # which library's errors these are depends on huggingface_hub's version
        raise UserError(f"{PRETOKENIZED}: {brief(e)}; {NO_NETWORK}") from None
    with exclusive_lock(out):
        wanted = _wanted(out, files, n_train)
        begin_dataset(out)
        try:
            if offline:
                for name in wanted:
                    if not (out / name).exists():
                        shutil.copyfile(cached / name, out / name)
            else:
                snapshot_download(
                    PRETOKENIZED, repo_type="dataset", revision=commit, allow_patterns=wanted, local_dir=out
                )
        except Exception as e:
            raise UserError(
                f"{PRETOKENIZED}: {brief(e)}; run the same command again to resume; {NO_NETWORK}"
            ) from None
        finish_dataset(out, _info(out, commit, {name: files[name][0] for name in wanted}))
    return dataset_info(out)


def _patterns(n_train: int | None) -> list[str]:
    train = [f"fineweb_train_{index:06d}.bin" for index in range(1, (n_train or 0) + 1)]
    return ["fineweb_val_*.bin", *(train or ["fineweb_train_*.bin"])]


def _wanted(out: Path, files: dict[str, tuple[str, int]], n_train: int | None) -> list[str]:
    """The shards to fetch, those of an earlier call included. `files`: sha256 and bytes by name."""
    shards = sorted(name for name in files if SHARD.fullmatch(name))
    val = [name for name in shards if "_val_" in name]
    train = [name for name in shards if "_train_" in name]
    if not val or len(train) < (n_train or 1):
        asked = f"--shards {n_train}: " if n_train else ""
        raise UserError(f"{asked}{PRETOKENIZED} has {len(val)} validation and {len(train)} training shards")
    for path in (*out.glob("*.bin"), *out.glob("manifest.jsonl")):
        if path.name not in files:
            raise UserError(f"{out}: holds {path.name}, another dataset: choose another --out")
    there = [index for index, name in enumerate(train, 1) if (out / name).exists()]
    wanted = val + train[: max([n_train or len(train), *there])]
    need = sum(files[name][1] for name in wanted if not (out / name).exists())
    free = shutil.disk_usage(out).free
    if free < need:
        raise UserError(f"{out}: {free / 1e9:.1f} GB free: expected {need / 1e9:.1f} GB for the shards")
    return wanted


def _info(out: Path, commit: str, expected: dict[str, str]) -> dict[str, Any]:
    """The content of dataset.json, after comparing each shard with its sha256 on the hub ("": unknown)."""
    splits, shards = {}, []
    for index, split in enumerate(("val", "train")):
        writer, documents = ShardWriter(out, "fineweb", split, MAX_TOKENS, index), 0
        for name in (name for name in expected if f"_{split}_" in name):
            try:
                tokens = open_shard(out / name, 50257)
                with open(out / name, "rb") as f:
                    sha256 = expected[name] or hashlib.file_digest(f, "sha256").hexdigest()
                writer.adopt({"file": name, "tokens": len(tokens), "sha256": sha256})
            except UserError as e:
                (out / name).unlink()
                raise UserError(f"{e}; deleted: run the same command again to fetch it anew") from None
            documents += int(np.count_nonzero(tokens == 50256))
        shards += writer.files
        splits[split] = writer.counts(documents)
    return {
        "dataset": "fineweb",
        "tokenizer": "gpt2",
        "vocab_size": 50257,
        "source": f"{PRETOKENIZED} at commit {commit}",
        "rows": {},
        "splits": splits,
        "shards": shards,
    }
