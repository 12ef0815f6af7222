"""Whether a dataset is intact: read every byte and compare it with dataset.json.

    python -m data.verify data/fineweb10B

Names every damage it finds, one line each, with its file; then the exit status is 2.
"""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import dataset, shards
from data.dataset import HOW_TO_PREPARE, INFO_NAME, TokenStream
from data.shards import SHARD_NAME
from infra.cli import ArgumentParser, UserError, run_main


def splits_of(folder: Path) -> list[str]:
    """The splits in the names of the shards."""
    names = [SHARD_NAME.fullmatch(path.name) for path in folder.glob("*.bin")]
    splits = sorted({name["split"] for name in names if name})
    if not splits:
        raise UserError(f"{folder}: no shards named like fineweb_train_000001.bin; {HOW_TO_PREPARE}")
    return splits


def verify(folder: Path) -> str:
    """Compare every byte of a dataset with its dataset.json, and say what was read.

    Compared are each shard's name, header, size, sha256 and tokens, and the order of a split's shards.
    Raises UserError: one line for each damage, naming the file; no such folder, or nothing in it to verify.
    """
    info = dataset.dataset_info(folder)
    listed = {file["file"]: file for file in info.get("shards", [])}
    files = {path.name for path in folder.glob("*.bin")} | listed.keys()
    problems = []
    n_tokens = 0
    for file in tqdm(sorted(files), "verifying", unit=" shards", leave=False, disable=None):
        try:
            n_tokens += _check_shard(folder / file, info, listed.get(file))
        except UserError as e:
            problems.append(str(e))
    for split in [] if problems else splits_of(folder):
        try:
            _ = TokenStream(folder, split).tokenizer_file  # lost or changed; gaps, shards of another dataset
        except UserError as e:
            problems.append(str(e))
    if problems:
        raise UserError("\n".join(problems))
    return f"{len(files)} shards, {n_tokens:,} tokens, every byte checked"


def _check_shard(path: Path, info: dict[str, Any], recorded: dict[str, Any] | None) -> int:
    """The tokens of a shard. Raises UserError: its damage."""
    if not SHARD_NAME.fullmatch(path.name):
        raise UserError(f"{path}: expected a name like fineweb_train_000001.bin")
    if recorded is None and "shards" in info:
        raise UserError(f"{path}: not listed in {INFO_NAME}: expected no other shards")
    tokens = shards.map_tokens(path)
    shards.check_vocabulary(path, tokens, info["vocab_size"])
    if recorded:
        shards.check_recorded(path, tokens, recorded)
    shards.release_pages(tokens)
    return len(tokens)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a data folder, such as data/python_bytes")
    args = parser.parse_args()
    print(f"ok: {verify(args.folder)}")
    if not (args.folder / INFO_NAME).exists():
        print(f"no {INFO_NAME}, so no hashes: checked were names, headers, sizes and gpt2's vocabulary")


if __name__ == "__main__":
    run_main(main)
