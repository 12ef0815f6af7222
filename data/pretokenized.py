"""The ready GPT-2 shards of kjj0/fineweb10B-gpt2: FineWeb sample-10BT as somebody has tokenised it before.

`python data/fineweb.py --pretokenized` is its command line.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from data.hub import Download, HubDataset, HubFile, clear_downloads, damage, remove_downloads
from data.shards import (
    MANIFEST_NAME,
    MAX_TOKENS,
    ShardWriter,
    begin_dataset,
    dataset_info,
    finish_dataset,
    only_one,
    open_shard,
    progress_bar,
)
from infra.cli import UserError
from infra.files import atomic_file

PRETOKENIZED = "kjj0/fineweb10B-gpt2"
PARALLEL_DOWNLOADS = 8
DOWNLOADS_NAME = "download"  # a folder, gone when all is done


def fetch_pretokenized(out: Path, n_train: int | None) -> dict[str, Any]:
    """Fetch the validation shard and the first `n_train` training shards (None: all) of kjj0/fineweb10B-gpt2.

    Each is checked against the hub's sha256 and as a shard. Shards that are there already are checked
    and kept.

    Raises:
        UserError: no network, not so many shards, no room, or a folder with another dataset.
    """
    names = [f"fineweb_train_{index:06d}.bin" for index in range(1, (n_train or 0) + 1)]
    dataset = HubDataset(PRETOKENIZED, wanted=["fineweb_val_*.bin", *(names or ["fineweb_train_*.bin"])])
    files = [file for file in dataset.files("") if re.fullmatch(r"fineweb_(val|train)_\d{6}\.bin", file.name)]
    val = [file for file in files if "_val_" in file.name]
    train = [file for file in files if "_train_" in file.name]
    if not val or len(train) < (n_train or 1):
        asked = f"--shards {n_train}: " if n_train else ""
        raise UserError(f"{asked}{PRETOKENIZED} has {len(val)} validation and {len(train)} training shards")
    there = [index for index, file in enumerate(train, 1) if (out / file.name).exists()]
    wanted = val + train[: max([n_train or len(train), *there])]  # what an earlier call fetched stays
    with only_one(out):
        ours = {file.name for file in files}
        for path in (*out.glob("*.bin"), *out.glob(MANIFEST_NAME)):
            if path.name not in ours:
                raise UserError(f"{out}: holds {path.name}, another dataset: choose another --out")
        begin_dataset(out)
        _fetch_all(dataset, wanted, out)
        info = _pretokenized_info(dataset, wanted, out)
        finish_dataset(out, info)
    return dataset_info(out)


def _fetch_all(dataset: HubDataset, wanted: list[HubFile], out: Path) -> None:
    """All files into `out`, a few at a time, with a bar over bytes."""
    downloads_folder = out / DOWNLOADS_NAME
    clear_downloads(downloads_folder)
    missing = [file for file in wanted if not _is_there(out / file.name, file)]
    need, free = sum(file.n_bytes for file in missing), shutil.disk_usage(out).free
    if free < need:
        raise UserError(
            f"{out}: {free / 1e9:.1f} GB free: expected {need / 1e9:.1f} GB for {len(missing)} shards"
        )
    bar = progress_bar(out.name, sum(file.n_bytes for file in wanted), "B")
    waiting, done = deque(missing), len(wanted) - len(missing)
    active: list[Download] = []
    finished_bytes = sum(file.n_bytes for file in wanted) - need
    with bar:
        while waiting or active:
            while waiting and len(active) < PARALLEL_DOWNLOADS:
                active.append(Download(dataset, waiting.popleft(), downloads_folder))
            for download in [download for download in active if not download.is_alive()]:
                _take(download, out)
                active.remove(download)
                finished_bytes += download.file.n_bytes
                done += 1
            notes = [download.note for download in active if download.note]
            bar.set_postfix_str(", ".join([f"{done} of {len(wanted)} shards", *notes[:1]]), refresh=False)
            bar.update(finished_bytes + sum(download.n_bytes for download in active) - bar.n)
            time.sleep(0.1)
    remove_downloads(downloads_folder)


def _is_there(path: Path, file: HubFile) -> bool:
    return path.is_file() and not damage(path, file)


def _take(download: Download, out: Path) -> None:
    """Move a shard that has arrived to its place: complete under its name, or not there."""
    path, target = download.result(), out / download.file.name
    open_shard(path, 50257)
    if path.is_relative_to(out):
        with open(path, "rb") as f:
            os.fsync(f.fileno())
        os.replace(path, target)
    else:  # in the hub's cache
        with atomic_file(target) as copy, open(path, "rb") as f:
            shutil.copyfileobj(f, copy)


def _pretokenized_info(dataset: HubDataset, wanted: list[HubFile], out: Path) -> dict[str, Any]:
    splits, shards = {}, []
    for index, split in enumerate(("val", "train")):
        writer, documents = ShardWriter(out, "fineweb", split, MAX_TOKENS, index), 0
        for file in (file for file in wanted if f"_{split}_" in file.name):
            tokens = open_shard(out / file.name, 50257)
            with open(out / file.name, "rb") as f:
                sha256 = file.sha256 or hashlib.file_digest(f, "sha256").hexdigest()  # offline none is known
            writer.adopt({"file": file.name, "tokens": len(tokens), "sha256": sha256})
            documents += int(np.count_nonzero(tokens == 50256))
        shards += writer.files
        splits[split] = writer.counts(documents)
    return {
        "dataset": "fineweb",
        "tokenizer": "gpt2",
        "vocab_size": 50257,
        "source": f"{dataset.name} at commit {dataset.commit}",
        "rows": {},
        "splits": splits,
        "shards": shards,
    }
