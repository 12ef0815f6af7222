"""Prepare the corpus that is everywhere: the sources of Python's own standard library.

    python data/python_source.py                       # bytes tokeniser -> data/python_bytes, no download
    python data/python_source.py --tokenizer gpt2      # -> data/python_gpt2
    python data/python_source.py --site-packages       # installed packages too

About 12 MB of real text with many long files. It takes every .py file below the standard library except
tests (folders named test, tests, idle_test: three times as much again), and what is
generated when Python is built (config-*, _sysconfigdata*). Skipped and counted: empty files, files that
are not UTF-8, copies of another file. The corpus differs between Python versions: the sha256 printed at
the end, also in dataset.json, tells whether two are the same.

Whole files are held out for validation, chosen by a hash of their relative path, as many of the short as
of the long ones by bytes. Documents are ordered by that hash, not by folder, so neighbouring windows are
not all of one package. `<|endoftext|>` stands before each document.

Writes python_val_000000.bin, python_train_000001.bin, ... (format: data/shards.py), and last of all
dataset.json. Run again, it leaves a finished folder as it is, and builds anew what is damaged or was made
with other options.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.shards import (  # noqa: E402
    INFO_NAME,
    MAX_TOKENS,
    UNFINISHED_NAME,
    ShardWriter,
    TokenStream,
    begin_dataset,
    dataset_info,
    finish_dataset,
)
from data.tokenizer import TOKENIZERS, get_tokenizer  # noqa: E402
from infra.cli import ArgumentParser, UserError, run_main  # noqa: E402

DATASET = "python"
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
LONG_DOCUMENT = 16384  # tokens; for the summary
SIZE_CLASSES = (16 * 1024, 64 * 1024)  # bytes; the validation split takes its share of each class


@dataclass(frozen=True)
class Document:
    name: str  # path relative to its root, with "/", on any platform
    text: str
    n_bytes: int

    @property
    def rank(self) -> str:
        """Orders documents and chooses the held-out ones: fixed by the name alone."""
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()


def source_roots(site_packages: bool) -> dict[str, Path]:
    """Folders to read, by the prefix that their files' names get.

    Raises:
        UserError: this Python has no folder of library sources.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    if not (stdlib / "os.py").is_file():
        raise UserError(f"{stdlib}: expected the standard library's sources there (os.py and so on)")
    roots = {"": stdlib}
    if site_packages:
        pure, binary = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))
        roots["site-packages/"] = pure
        if binary.resolve() != pure.resolve():
            roots["site-packages-binary/"] = binary
    return roots


def collect(roots: dict[str, Path]) -> tuple[list[Document], Counter[str]]:
    """All documents below the roots, sorted by name, and how many files were skipped for which reason.

    Raises:
        UserError: a root does not exist.
    """
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    seen: set[bytes] = set()  # a copy in the other split would leak into validation
    for prefix, root in roots.items():
        if not root.is_dir():
            raise UserError(f"{root}: no such folder of Python sources")
        for name, path in sorted(_python_files(root)):
            try:
                raw = path.read_bytes()
                text = raw.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                skipped["unreadable or not UTF-8"] += 1
                continue
            digest = hashlib.sha256(raw).digest()
            if not raw:
                skipped["empty"] += 1
            elif digest in seen:
                skipped["copies"] += 1
            else:
                seen.add(digest)
                documents.append(Document(prefix + name, text, len(raw)))
    return sorted(documents, key=lambda document: document.name), skipped


def _python_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in SKIPPED_FOLDERS and not f.startswith("config-")]
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path


def split_documents(documents: list[Document], val_fraction: float) -> dict[str, list[Document]]:
    """{"val": ..., "train": ...}, each in hash order; val has about `val_fraction` of the bytes.

    In each size class, files are held out in hash order as long as they fit into the class's share. So
    one very long file cannot be most of the split, and long files, which length extrapolation is
    measured on, are not left to chance.

    Raises:
        UserError: fewer than two documents.
    """
    if len(documents) < 2:
        raise UserError(f"{len(documents)} Python files with text: expected at least 2, one for each split")
    ordered = sorted(documents, key=lambda document: document.rank)
    classes: dict[int, list[Document]] = {}
    for document in ordered:
        size_class = sum(document.n_bytes >= limit for limit in SIZE_CLASSES)
        classes.setdefault(size_class, []).append(document)
    held_out: set[str] = set()
    for members in classes.values():
        room = val_fraction * sum(document.n_bytes for document in members)
        for document in members:
            if document.n_bytes <= room:
                held_out.add(document.name)
                room -= document.n_bytes
    if not held_out:  # a handful of files
        held_out.add(min(ordered, key=lambda document: document.n_bytes).name)
    return {
        "val": [document for document in ordered if document.name in held_out],
        "train": [document for document in ordered if document.name not in held_out],
    }


def build(
    roots: dict[str, Path],
    out: str | Path,
    tokenizer: str = "bytes",
    shard_size: int = 10**8,
    val_fraction: float = 0.05,
) -> dict[str, Any]:
    """Make the dataset in folder `out`, or find it finished there; returns what dataset.json holds.

    Args:
        roots: folders of sources by the prefix of their files' names; see `source_roots`.
        shard_size: tokens per shard.
        val_fraction: share of the bytes held out, in (0, 1).
    Raises:
        UserError: no sources, an unknown tokeniser, a folder that cannot be written or is another's.
    """
    out = Path(out)
    encoding = get_tokenizer(tokenizer)
    settings = {
        "tokenizer": tokenizer,
        "shard_size": shard_size,
        "val_fraction": val_fraction,
        "site_packages": len(roots) > 1,
    }
    finished = _finished(out, settings)
    if finished is not None:
        python = finished.get("python", "?")
        print(f"{out}: finished before, from Python {python}; nothing to do (delete it to build it anew)")
        return finished
    documents, skipped = collect(roots)
    splits = split_documents(documents, val_fraction)
    begin_dataset(out)
    for stale in out.glob(f"{DATASET}_*_*.bin"):
        stale.unlink()
    info = _new_info(encoding, settings)
    n_long = _write_splits(out, splits, encoding, shard_size, info)
    finish_dataset(out, info)
    _print_summary(out, info, sum(document.n_bytes for document in documents), skipped, n_long)
    return dataset_info(out)


def _new_info(encoding: tiktoken.Encoding, settings: dict[str, Any]) -> dict[str, Any]:
    """dataset.json before anything is written."""
    python = platform.python_version()
    packages = " and installed packages" if settings["site_packages"] else ""
    return {
        "dataset": DATASET,
        "tokenizer": settings["tokenizer"],
        "vocab_size": encoding.n_vocab,
        "source": f"Python {python} library sources{packages}",
        "python": python,
        "settings": settings,
        "splits": {},
        "shards": [],
    }


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """dataset.json of a folder that is complete and was made with these settings, else None."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise UserError(f"{out}: expected a folder or nothing there")
    foreign = [path.name for path in out.glob("*.bin") if not path.name.startswith(f"{DATASET}_")]
    if foreign:
        raise UserError(f"{out}: holds {foreign[0]}, another dataset: choose another folder with --out")
    if not (out / INFO_NAME).exists() and not (out / UNFINISHED_NAME).exists():
        return None
    try:
        info = dataset_info(out)
        for split in ("val", "train"):
            TokenStream(out, split)
    except UserError as e:
        print(f"building anew: {e}")
        return None
    if info.get("dataset") != DATASET:
        raise UserError(f"{out}: holds another dataset: choose another folder with --out")
    for key, value in settings.items():
        made_with = info.get("settings", {}).get(key)
        if made_with != value:
            print(f"{out}: building anew: made with {key} = {made_with}, now {value}")
            return None
    return info


def _write_splits(
    out: Path,
    splits: dict[str, list[Document]],
    encoding: tiktoken.Encoding,
    shard_size: int,
    info: dict[str, Any],
) -> int:
    """Tokenise and write; fills info's "splits" and "shards". Returns the tokens in long documents."""
    n_long = index = 0
    n_bytes = sum(document.n_bytes for documents in splits.values() for document in documents)
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="tokenising", disable=None) as bar:
        for split, documents in splits.items():
            with ShardWriter(out, DATASET, split, shard_size, index) as writer:
                for document in documents:
                    tokens = [encoding.eot_token, *encoding.encode_ordinary(document.text)]
                    writer.add(tokens)
                    n_long += len(tokens) if len(tokens) >= LONG_DOCUMENT else 0
                    bar.update(document.n_bytes)
            index = writer.index
            info["shards"] += writer.files
            info["splits"][split] = writer.counts(len(documents))
    return n_long


def _print_summary(out: Path, info: dict[str, Any], n_bytes: int, skipped: Counter[str], n_long: int) -> None:
    splits = info["splits"]
    n_tokens = sum(split["tokens"] for split in splits.values())
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "none"
    print(f"source   {info['source']}")
    n_files = sum(split["documents"] for split in splits.values())
    print(f"files    {n_files}, {n_bytes / 1e6:.2f} MB; skipped: {left_out}")
    for name, split in splits.items():
        print(
            f"{name:8} {split['tokens']:,} {info['tokenizer']} tokens, {split['documents']} documents, "
            f"{split['shards']} shards, sha256 {split['sha256']}"
        )
    print(f"long     {n_long / n_tokens:.0%} of tokens in documents of {LONG_DOCUMENT:,} tokens or more")
    print(f"written  {out}")


def _shard_size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {MAX_TOKENS}")
    return value


def _val_fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number between 0 and 1")
    return value


def _parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--tokenizer",
        choices=TOKENIZERS,
        default="bytes",
        help="bytes: 257 tokens, no download; gpt2: 50257 tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write (default: data/python_<tokenizer> in this repo)"
    )
    parser.add_argument(
        "--site-packages", action="store_true", help="take the installed packages' sources too"
    )
    parser.add_argument(
        "--shard-size",
        metavar="N",
        type=_shard_size,
        default=10**8,
        help="tokens per shard (default: %(default)s)",
    )
    parser.add_argument(
        "--val-fraction",
        metavar="F",
        type=_val_fraction,
        default=0.05,
        help="share of the text held out for validation, in whole files (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    args = _parse_args()
    out = Path(args.out) if args.out else ROOT / "data" / f"python_{args.tokenizer}"
    build(source_roots(args.site_packages), out, args.tokenizer, args.shard_size, args.val_fraction)


if __name__ == "__main__":
    run_main(main)
