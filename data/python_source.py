"""Prepare a corpus that needs no download: the sources of Python's own standard library.

    python -m data.python_source                       # bytes tokeniser -> data/python_bytes
    python -m data.python_source --tokenizer gpt2      # -> data/python_gpt2
    python -m data.python_source --site-packages       # installed packages too

About 12 MB of text with many long files: every .py file of the standard library except tests (folders named
test, tests, idle_test: three times as much again) and files generated when Python is built (config-*,
_sysconfigdata*). Skipped and counted: empty files, files that are not UTF-8, copies of another file. The
corpus differs between Python versions; the sha256 printed at the end, also in dataset.json, identifies it.

Whole files are held out for validation, chosen by a hash of their relative path, the same share of the bytes
of short and of long ones. Documents are ordered by that hash, not by folder, so neighbouring windows are not
all of one package. `<|endoftext|>` precedes each document.

Writes python_val_000000.bin, python_train_000001.bin, ... (format: data/shards.py), and at the end
dataset.json. A finished folder is left unchanged; what is damaged or was made with other options is rebuilt.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data import dataset
from data.shards import MAX_TOKENS
from data.tokenizer import TOKENIZERS, get_tokenizer
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.files import exclusive_lock

DATASET = "python"
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
SIZE_CLASSES = (16 * 1024, 64 * 1024)  # bytes; the validation split takes its share of each class


class Document(NamedTuple):
    name: str  # path relative to its root, with "/" on any platform
    text: str
    n_bytes: int

    @property
    def rank(self) -> str:
        """Orders documents and chooses the held-out ones; depends on the name alone."""
        return hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()


def source_roots(site_packages: bool) -> dict[str, Path]:
    """Folders to read, by the prefix of their files' names.

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
    """All documents below the roots, and the number of skipped files by reason.

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
    return documents, skipped


def _python_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in SKIPPED_FOLDERS and not f.startswith("config-")]
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                yield path.relative_to(root).as_posix(), path


def split_documents(documents: list[Document], val_fraction: float) -> dict[str, list[Document]]:
    """{"val": ..., "train": ...}, each in hash order; val has about `val_fraction` of the bytes.

    In each size class, files are held out in hash order as long as they fit into the class's share. So one
    very long file cannot be most of the split, and the long files, on which length extrapolation is measured,
    are not left to chance.

    Raises:
        UserError: fewer than two documents.
    """
    if len(documents) < 2:
        raise UserError(f"{len(documents)} Python files with text: expected at least 2, one for each split")
    ordered = sorted(documents, key=lambda document: document.rank)
    held_out: set[str] = set()
    for size_class in range(len(SIZE_CLASSES) + 1):
        members = [d for d in ordered if sum(d.n_bytes >= limit for limit in SIZE_CLASSES) == size_class]
        room = val_fraction * sum(document.n_bytes for document in members)
        for document in members:
            if document.n_bytes <= room:
                held_out.add(document.name)
                room -= document.n_bytes
    if not held_out:  # a handful of files
        held_out.add(min(ordered, key=lambda document: document.n_bytes).name)
    splits: dict[str, list[Document]] = {"val": [], "train": []}
    for document in ordered:
        splits["val" if document.name in held_out else "train"].append(document)
    return splits


def build(
    roots: dict[str, Path],
    out: Path,
    tokenizer: str = "bytes",
    shard_size: int = 10**8,
    val_fraction: float = 0.05,
) -> dict[str, Any]:
    """Make the dataset in folder `out`, or find it finished there; returns the content of dataset.json.

    Args:
        roots: as `source_roots` returns them.
        shard_size: tokens per shard.
        val_fraction: share of the bytes held out, in (0, 1).
    Raises:
        UserError: no sources, an unknown tokeniser, a folder that cannot be written or has another dataset.
    """
    encoding = get_tokenizer(tokenizer)
    settings = {"tokenizer": tokenizer, "shard_size": shard_size, "val_fraction": val_fraction}
    settings["site_packages"] = len(roots) > 1
    if finished := _finished(out, settings):
        print(f"{out}: finished before, from {finished['source']}; nothing to do (delete it to rebuild it)")
        return finished
    documents, skipped = collect(roots)
    splits = split_documents(documents, val_fraction)
    dataset.begin_dataset(out, DATASET)
    python = platform.python_version()
    packages = " and installed packages" if settings["site_packages"] else ""
    info: dict[str, Any] = {
        "dataset": DATASET, "tokenizer": tokenizer, "vocab_size": encoding.n_vocab,
        "source": f"Python {python} library sources{packages}", "python": python, "settings": settings,
        "splits": {}, "shards": [],
    }  # fmt: skip
    for split, members in splits.items():
        rows = ([encoding.eot_token, *encoding.encode_ordinary(document.text)] for document in members)
        dataset.write_split(out, info, split, rows, len(members), shard_size)
    dataset.finish_dataset(out, info)
    _print_summary(out, info, sum(document.n_bytes for document in documents), skipped)
    return dataset.dataset_info(out)


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The content of dataset.json if the folder is complete and was made with these settings, else None."""
    info = dataset.finished_info(out)
    if info and "settings" not in info:
        raise UserError(f"{out}: holds another dataset: choose another --out")
    for key, value in settings.items() if info else ():
        if info and info["settings"].get(key) != value:
            print(f"{out}: rebuilding: made with {key} = {info['settings'].get(key)}, now {value}")
            return None
    return info


def _print_summary(out: Path, info: dict[str, Any], n_bytes: int, skipped: Counter[str]) -> None:
    n_files = sum(split["documents"] for split in info["splits"].values())
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "none"
    print(f"source   {info['source']}")
    print(f"files    {n_files}, {n_bytes / 1e6:.2f} MB; skipped: {left_out}")
    dataset.print_splits(info)
    print(f"written  {out}")


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--tokenizer", choices=TOKENIZERS, default="bytes", help="gpt2 needs a download (default: bytes)")
    add("--out", type=Path, metavar="DIR", help="folder to write (default: data/python_<tokenizer>)")
    add("--site-packages", action="store_true", help="take the installed packages' sources too")
    add("--shard-size", metavar="N", type=positive_int, default=10**8, help="tokens (default: %(default)s)")
    add("--val-fraction", metavar="F", type=float, default=0.05, help="held out (default: %(default)s)")
    args = parser.parse_args()
    if args.shard_size > MAX_TOKENS:
        parser.error(f"--shard-size {args.shard_size}: expected at most {MAX_TOKENS}")
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val-fraction {args.val_fraction}: expected a number between 0 and 1")
    out = args.out or Path(__file__).parent / f"python_{args.tokenizer}"
    with exclusive_lock(out):
        build(source_roots(args.site_packages), out, args.tokenizer, args.shard_size, args.val_fraction)


if __name__ == "__main__":
    run_main(main)
