"""Fetch ready GPT-2 shards: kjj0/fineweb10B-gpt2, the tokens of FineWeb's sample-10BT.

    python -m data.pretokenized                # all of them, 20 GB -> data/fineweb10B
    python -m data.pretokenized --shards 10    # validation and the first 10 training shards, 2 GB

Each shard is compared with the hub's sha256. Stop it at any moment and run the same command again to resume.
With a larger --shards it fetches the others.

Writes fineweb_val_000000.bin, fineweb_train_000001.bin, ... (format: data/shards.py), and at the end
dataset.json.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import begin_dataset, finish_dataset, print_summary
from data.documents import naming
from data.shards import MAX_TOKENS, ShardWriter, open_shard
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.files import exclusive_lock

REPO = "kjj0/fineweb10B-gpt2"
VAL = "fineweb_val_000000.bin"
VOCAB_SIZE = 50257
HINT = "; run the same command again to resume"


def fetch(out: Path, n_train: int | None) -> dict[str, Any]:
    """Fetch the validation shard and the first `n_train` training shards (None: all); returns dataset.json.

    Shards that are there are compared and kept.
    Raises UserError: no network, too few shards, a damaged one, another dataset in the folder.
    """
    from huggingface_hub import HfApi, snapshot_download

    with exclusive_lock(out):
        with naming(REPO, HINT):
            repo = HfApi().dataset_info(REPO, files_metadata=True, timeout=10)
        sha256 = {file.rfilename: file.lfs.sha256 for file in repo.siblings or [] if file.lfs}
        for path in (*out.glob("*.bin"), *out.glob("manifest.jsonl")):
            if path.name not in sha256:
                raise UserError(f"{out}: holds {path.name}, another dataset's: choose another --out")
        train = sorted(file for file in sha256 if file.startswith("fineweb_train_"))
        if n_train and n_train > len(train):
            raise UserError(f"--shards {n_train}: {REPO} has {len(train)} training shards")
        present = [i for i, file in enumerate(train, 1) if (out / file).exists()]
        train = train[: max([n_train or len(train), *present])]
        begin_dataset(out)
        with naming(REPO, HINT):
            files = [VAL, *train]
            snapshot_download(
                REPO, repo_type="dataset", revision=repo.sha, allow_patterns=files, local_dir=out
            )
        source = f"{REPO} at commit {repo.sha}"
        info = {"dataset": "fineweb", "tokenizer": "gpt2", "vocab_size": VOCAB_SIZE, "source": source}
        info |= {"splits": {}, "shards": []}
        _add_split(out, info, "val", {VAL: sha256[VAL]})
        _add_split(out, info, "train", {file: sha256[file] for file in train})
        return finish_dataset(out, info)


def _add_split(out: Path, info: dict[str, Any], split: str, sha256: dict[str, str]) -> None:
    """Enter the split's shards in `info`, each compared with its sha256 on the hub."""
    writer = ShardWriter(out, "fineweb", split, MAX_TOKENS, index=len(info["shards"]))
    n_documents = 0
    for file, expected in sha256.items():
        try:
            tokens = open_shard(out / file, VOCAB_SIZE)
            writer.adopt({"file": file, "tokens": len(tokens), "sha256": expected})
        except UserError as e:
            (out / file).unlink(missing_ok=True)
            raise UserError(f"{e}; deleted: run the same command again to fetch it anew") from None
        n_documents += int(np.count_nonzero(tokens == VOCAB_SIZE - 1))
    info["shards"] += writer.files
    info["splits"][split] = writer.counts(n_documents)


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--shards", type=positive_int, metavar="N", help="training shards (default: all)")
    default = Path(__file__).resolve().parent / "fineweb10B"
    add("--out", type=Path, metavar="DIR", default=default, help="folder to write (default: data/fineweb10B)")
    args = parser.parse_args()
    try:
        info = fetch(args.out, args.shards)
    except KeyboardInterrupt:
        os._exit(130)  # at once: threads may be downloading
    print_summary(info, args.out)


if __name__ == "__main__":
    run_main(main)
