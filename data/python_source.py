"""Prepare a corpus that needs no download: the sources of Python's own standard library.

    python -m data.python_source                       # bytes tokeniser -> data/python_bytes
    python -m data.python_source --tokenizer gpt2      # -> data/python_gpt2; or a tokenizer.json

About 12 MB of text with many long files: every .py file of the standard library except tests
(folders named test, tests, idle_test: three times as much again) and files generated when Python is
built (config-*, _sysconfigdata*). Empty files, files that are not UTF-8 and copies of another file
are skipped. The corpus differs between Python versions; the sha256 printed at the end, also in
dataset.json, identifies it.

Whole files are held out for validation, chosen by a hash of their relative path, the same share of
the bytes of short and of long ones. Documents are ordered by that hash, not by folder, so
neighbouring windows are not all of one package. `<|endoftext|>` precedes each document.

Writes python_val_000000.bin, python_train_000001.bin, ... (format: data/shards.py), and at the end
dataset.json. A finished folder is left unchanged, a damaged one is rebuilt.
"""

import hashlib
import platform
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from data import dataset
from data.tokenizer import encode, get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import exclusive_lock

DATASET = "python"
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
VAL_SHARE = 0.05  # of the bytes
SIZE_CLASSES = (16 * 1024, 64 * 1024)  # bytes; the validation split takes its share of each class


class Document(NamedTuple):
    rank: str  # a hash of its path, which orders documents and chooses the held-out ones
    text: str
    n_bytes: int


def collect(root: Path) -> list[Document]:
    """All documents below the root, in hash order."""
    documents: list[Document] = []
    seen: set[str] = set()  # a copy in the other split would leak into validation
    for relative in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        *folders, file = relative.split("/")
        generated = file.startswith("_sysconfigdata") or any(
            f.startswith("config-") for f in folders
        )
        if generated or not SKIPPED_FOLDERS.isdisjoint(folders):
            continue
        try:
            content = (root / relative).read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text and text not in seen:
            seen.add(text)
            rank = hashlib.sha256(relative.encode("utf-8", "surrogateescape")).hexdigest()
            documents.append(Document(rank, text, len(content)))
    return sorted(documents)


def split_documents(documents: list[Document], val_fraction: float) -> dict[str, list[Document]]:
    """{"val": ..., "train": ...} of documents in hash order, which both keep.

    val has about `val_fraction` of the bytes. In each size class, files are held out in hash order
    as long as they fit into the class's share. So one very long file cannot be most of the split,
    and the long files, on which length extrapolation is measured, are not left to chance. Raises
    UserError: too few documents.
    """
    held_out: set[str] = set()
    for size_class in range(len(SIZE_CLASSES) + 1):
        members = [
            d for d in documents if sum(d.n_bytes >= limit for limit in SIZE_CLASSES) == size_class
        ]
        room = val_fraction * sum(document.n_bytes for document in members)
        for document in members:
            if document.n_bytes <= room:
                held_out.add(document.rank)
                room -= document.n_bytes
    if not held_out:
        raise UserError(f"{len(documents)} Python files with text: expected more, to hold some out")
    return {
        "val": [document for document in documents if document.rank in held_out],
        "train": [document for document in documents if document.rank not in held_out],
    }


def build(
    root: Path, out: Path, tokenizer: str = "bytes", val_fraction: float = VAL_SHARE
) -> dict[str, Any]:
    """Make the dataset of the sources below `root` in `out`, or find it there; returns
    dataset.json.

    Raises UserError: no sources, an unknown tokeniser, or a folder that has another dataset.
    """
    encoding = get_tokenizer(tokenizer)
    settings = {"tokenizer": encoding.name, "val_fraction": val_fraction}
    finished = dataset.made_before(out, DATASET, settings)
    if finished:
        return finished
    splits = split_documents(collect(root), val_fraction)
    tokens = {
        split: [encode(encoding, document.text) for document in members]
        for split, members in splits.items()
    }
    python = platform.python_version()
    source = f"Python {python} library sources"
    info = {"dataset": DATASET, "source": source, "python": python, "settings": settings}
    return dataset.write_dataset(out, info, tokens, encoding)


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--tokenizer", default="bytes", help="bytes, gpt2 or a tokenizer.json (default: bytes)")
    add(
        "--out", type=Path, metavar="DIR", help="folder to write (default: data/python_<tokenizer>)"
    )
    args = parser.parse_args()
    out = args.out or Path(__file__).parent / f"python_{Path(args.tokenizer).stem}"
    with exclusive_lock(out):
        info = build(Path(sysconfig.get_path("stdlib")), out, args.tokenizer)
    dataset.print_summary(info, out)


if __name__ == "__main__":
    run_main(main)
