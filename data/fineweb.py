"""Prepare a text dataset: documents in, GPT-2 tokens out, as shards that train.py reads.

    python -m data.fineweb                              # FineWeb sample-10BT -> data/fineweb10B
    python -m data.fineweb --max-tokens 300000000       # its first 3 shards
    python -m data.fineweb --dataset HuggingFaceFW/fineweb-edu --name sample-100BT
    python -m data.fineweb --dataset USER/DATASET --split train --column content
    python -m data.fineweb --files 'dir/*.parquet'      # or .jsonl, .jsonl.gz -> data/fineweb_files
    python -m data.fineweb --pretokenized --shards 10   # ready shards of kjj0/fineweb10B-gpt2

The first shard is validation, the rest training. Each document is `<|endoftext|>` and its text in GPT-2's
BPE; special-token text inside a document is encoded as ordinary text. Rows without text are skipped, invalid
UTF-8 becomes U+FFFD; dataset.json counts both.

Stop it at any moment, by Ctrl-C or by pulling the plug, and run the same command again: it resumes after the
last finished shard, and the shards are byte for byte those of an uninterrupted run, for any --workers.

Writes fineweb_val_000000.bin, fineweb_train_000001.bin, ... (format: data/shards.py), manifest.jsonl (the row
of the input at which each shard ends), and at the end dataset.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from itertools import chain
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loky import BrokenProcessPool, ProcessPoolExecutor
from tqdm import tqdm

from data.dataset import (
    INFO_NAME,
    TokenStream,
    begin_dataset,
    dataset_info,
    finish_dataset,
    print_splits,
    progress_bar,
)
from data.documents import (
    SKIPPED,
    Block,
    Cursor,
    Source,
    Tokens,
    hub_dataset,
    local_files,
    read_blocks,
    tokenise_file,
)
from data.pretokenized import fetch_pretokenized
from data.shards import MAX_TOKENS, ShardWriter
from data.tokenizer import TOKENIZERS, get_tokenizer
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.files import exclusive_lock, read_jsonl, write_atomically

DATA = Path(__file__).resolve().parent
FINEWEB = "HuggingFaceFW/fineweb"
MANIFEST_NAME = "manifest.jsonl"
SHARD_KEYS = {"file", "tokens", "sha256", "documents", "next", "rows"}  # of its lines on shards
BLOCKS_NAME = ".blocks"  # prefix of a folder of blocks on their way to and from the workers
BLOCKS_AHEAD = 4  # per worker: enough to work on while a shard is forced to disk
SOURCE_OPTIONS = ("dataset", "name", "split", "column", "revision")
UNUSED = {  # options that would be silently ignored
    "files": ("dataset", "name", "split", "revision", "pretokenized", "shards"),
    "pretokenized": (*SOURCE_OPTIONS, "shard_size", "max_tokens", "workers", "tokenizer"),
}


# ---------------------------------------------------------------- workers


@contextmanager
def worker_pool(n: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one. Ctrl-C reaches only this process.

    Raises:
        UserError: one of them was killed.
    """
    pool = ProcessPoolExecutor(n, initializer=_end_with_parent, initargs=(os.getpid(),))
    resource_tracker.ensure_running()  # when it starts it unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the processes started here
    try:
        pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed (out of memory?): run the same command again to resume, perhaps "
            "with fewer --workers"
        ) from None
    finally:
        pool.shutdown(kill_workers=True)


def _end_with_parent(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def tokenised_blocks(
    blocks: Iterator[Block], pool: ProcessPoolExecutor, workers: int, tokenizer: str, folder: Path
) -> Iterator[tuple[Block, Tokens]]:
    """Each block, without its rows, and its tokens, in order, while the workers encode the next ones."""
    pending: deque[tuple[Block, Path, Future[None]]] = deque()
    for number, block in enumerate(chain(blocks, [None] * BLOCKS_AHEAD * workers)):
        if block is not None:
            path = folder / str(number)
            path.write_bytes(pickle.dumps(block))
            future = pool.submit(tokenise_file, path, tokenizer)
            pending.append((block._replace(rows=[]), path, future))
        if pending and (block is None or len(pending) > BLOCKS_AHEAD * workers):
            first, path, future = pending.popleft()
            future.result()
            yield first, pickle.loads(path.read_bytes())
            path.unlink()


# ---------------------------------------------------------------- shards


class Manifest:
    """manifest.jsonl: one line on the input and the options, then one per finished shard.

    A shard's line has its file, tokens and sha256, the documents that begin in it, where the next shard
    begins (`next`: a Cursor), and counts of the rows skipped or repaired so far. Damaged lines do not count.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST_NAME
        records = [record for record in read_jsonl(self.path) if isinstance(record, dict)]
        headers = [record for record in records if record.keys() >= {"source", "options", "files"}]
        self.header: dict[str, Any] = headers[0] if headers else {}
        self.shards = [record for record in records if record.keys() >= SHARD_KEYS]
        if self.shards and not self.header:
            raise UserError(f"{self.path}: damaged: delete {folder} to start over")

    def save(self) -> None:
        lines = [json.dumps(value) + "\n" for value in (self.header, *self.shards)]
        write_atomically(self.path, "".join(lines).encode())


class ShardCutter:
    """Cuts the stream of tokens into shards, the first for validation, and records each in the manifest."""

    def __init__(self, folder: Path, manifest: Manifest, options: dict[str, Any]) -> None:
        self.folder, self.shard_size = folder, options["shard_size"]
        self.splits = {
            split: ShardWriter(folder, options["dataset"], split, self.shard_size, index)
            for index, split in enumerate(("val", "train"))
        }
        self.cursor = Cursor()
        self.notes: Counter[str] = Counter()  # rows before the cursor that were skipped or repaired
        self._manifest, self._max_tokens = manifest, options["max_tokens"] or sys.maxsize
        self._documents = 0  # that begin in the current shard

    @property
    def n_tokens(self) -> int:
        return sum(writer.n_tokens for writer in self.splits.values())

    @property
    def is_complete(self) -> bool:
        """--max-tokens is reached, or the last, shorter shard is written."""
        shards = self._manifest.shards
        return self.n_tokens == self._max_tokens or bool(shards and shards[-1]["tokens"] < self.shard_size)

    @property
    def _writer(self) -> ShardWriter:
        return self.splits["train" if self.splits["val"].files else "val"]

    def adopt(self, shard: dict[str, Any]) -> None:
        """Continue after a shard of an earlier run. Raises UserError naming it if it is damaged."""
        self._writer.adopt(shard)
        self._manifest.shards.append(shard)
        self.cursor = Cursor(*shard["next"])
        self.notes = Counter(shard["rows"])

    def add(self, block: Block, encoded: Tokens) -> None:
        """Append a block's documents, the first from the cursor on, up to --max-tokens."""
        start = 0
        rows = zip(encoded.lengths.tolist(), encoded.notes, strict=True)
        for row, (length, note) in enumerate(rows, block.row):
            at = self.cursor.token if (block.input, row) == self.cursor[:2] else 0
            document, start = encoded.tokens[start : start + length], start + length
            self._documents += length > 0 and at == 0
            while at < length and not self.is_complete:
                if self._writer.room == self.shard_size:
                    self._check_space()
                to = min(length, at + self._writer.room, at + self._max_tokens - self.n_tokens)
                self._writer.add(document[at:to])
                at = to
                if at < length:
                    self._move_to(Cursor(block.input, row, at))
            if at == length:
                self.notes.update([SKIPPED[note]] if note else [])
                self._move_to(Cursor(block.input, row + 1))
            if self.is_complete:
                return

    def finish(self) -> None:
        """Write the last, shorter shard. Raises UserError if there are no training tokens."""
        if self.n_tokens == 0:
            raise UserError(f"{self.folder}: the input has no documents with text")
        if not self.splits["train"].n_tokens:
            raise UserError(
                f"{self.folder}: the input has {self.n_tokens:,} tokens: expected more than one shard of "
                f"{self.shard_size:,}, which is validation; try --shard-size {max(1, self.n_tokens // 10)}"
            )
        self._writer.flush()
        self._move_to(self.cursor)

    def _move_to(self, cursor: Cursor) -> None:
        """Set the cursor; if a shard was finished since the last call, record it."""
        self.cursor = cursor
        files = [file for writer in self.splits.values() for file in writer.files]
        if len(files) > len(self._manifest.shards):
            rows = dict(sorted(self.notes.items()))
            shard = files[-1] | {"documents": self._documents, "next": cursor, "rows": rows}
            self._manifest.shards.append(shard)
            self._manifest.save()
            self._documents = 0

    def _check_space(self) -> None:
        free, need = shutil.disk_usage(self.folder).free, 2 * min(self.shard_size, self._max_tokens)
        if free < need:
            raise UserError(
                f"{self.folder}: {free / 1e9:.2f} GB free: expected {need / 1e9:.2f} GB for the next shard; "
                "make room and run the same command again (or choose --out on another disk)"
            )


def build(source: Source, out: Path, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Make the dataset in folder `out`, resume it, or find it finished; returns dataset.json's content.

    Args:
        source: the documents.
        options: dataset, tokenizer, shard_size, max_tokens (None: all).
        workers: processes that tokenise. Their number changes only the speed.
    Raises:
        UserError: one line; finished shards stay, and the same call resumes after them.
        KeyboardInterrupt: the same.
    """
    vocab_size = get_tokenizer(options["tokenizer"]).n_vocab
    header = {"source": source.description, "options": options | source.settings, "files": source.files}
    with exclusive_lock(out):
        manifest = Manifest(out)
        _check_same(out, manifest, header)
        if manifest.shards and (info := _finished(out)):
            print(f"{out}: finished before; nothing to do (`python -m data.verify verify {out}` checks it)")
            return info
        begin_dataset(out)
        cutter = _resume(out, manifest, header, options)
        if not cutter.is_complete:
            _tokenise_all(source, cutter, options, workers)
        for leftover in out.glob(f"{BLOCKS_NAME}*"):  # of killed runs
            shutil.rmtree(leftover, ignore_errors=True)
        documents = [shard["documents"] for shard in manifest.shards]
        val, train = cutter.splits["val"], cutter.splits["train"]
        info = {
            "dataset": options["dataset"],
            "tokenizer": options["tokenizer"],
            "vocab_size": vocab_size,
            "source": header["source"],
            "rows": dict(sorted(cutter.notes.items())),
            "splits": {"val": val.counts(documents[0]), "train": train.counts(sum(documents[1:]))},
            "shards": val.files + train.files,
        }
        finish_dataset(out, info)
    return dataset_info(out)


def _check_same(out: Path, manifest: Manifest, header: dict[str, Any]) -> None:
    """Raises UserError if the folder has foreign shards, or was begun from other input or options."""
    listed = {shard["file"] for shard in manifest.shards}
    begun = f"{header['options']['dataset']}_" if manifest.header else None  # an unlisted shard may be ours
    for path in out.glob("*.bin"):
        if path.name not in listed and not (begun and path.name.startswith(begun)):
            raise UserError(
                f"{out}: holds {path.name}, which this command did not write: choose another --out"
            )
    if not manifest.shards:
        return
    old, new = manifest.header["options"], header["options"]
    hint = "give what it was begun with, another --out, or delete it to start over"
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(f"{out}: begun with {key} = {old.get(key)}, not {new.get(key)}: {hint}")
    if manifest.header["files"] != header["files"]:
        raise UserError(f"{out}: begun with other --files, or these have changed: {hint}")


def _finished(out: Path) -> dict[str, Any] | None:
    """The content of dataset.json if the folder is complete, else None."""
    if not (out / INFO_NAME).exists():
        return None
    try:
        for split in ("val", "train"):
            TokenStream(out, split)
        return dataset_info(out)
    except UserError as e:
        print(f"resuming: {e}")
        return None


def _resume(out: Path, manifest: Manifest, header: dict[str, Any], options: dict[str, Any]) -> ShardCutter:
    """Keep the finished shards up to the first damaged one; remove everything else of this dataset."""
    shards, manifest.shards, manifest.header = manifest.shards, [], header
    cutter = ShardCutter(out, manifest, options)
    try:
        for shard in tqdm(shards, desc="checking what is there", unit="shard", leave=False, disable=None):
            cutter.adopt(shard)
    except UserError as e:
        print(f"made again from here on: {e}", file=sys.stderr)
    manifest.save()
    kept = {shard["file"] for shard in manifest.shards}
    for path in (*out.glob(f"{options['dataset']}_*.bin"), *out.glob(f".{options['dataset']}_*.bin.tmp")):
        if path.name not in kept:
            path.unlink()
    return cutter


def _tokenise_all(source: Source, cutter: ShardCutter, options: dict[str, Any], workers: int) -> None:
    """Everything from the cutter's cursor on, with a bar over tokens."""
    total = min(filter(None, (source.n_tokens, options["max_tokens"])), default=None)
    bar = progress_bar(cutter.folder.name, total, "tok", cutter.n_tokens)
    blocks = read_blocks(source, cutter.cursor)
    # A folder of its own: workers of a killed run may live, and write, for a second after it.
    temporary = TemporaryDirectory(prefix=BLOCKS_NAME, dir=cutter.folder, ignore_cleanup_errors=True)
    try:
        with temporary as folder, bar, closing(blocks), worker_pool(workers) as pool:
            for block, tokens in tokenised_blocks(blocks, pool, workers, options["tokenizer"], Path(folder)):
                cutter.add(block, tokens)
                bar.set_postfix_str(f"{block.name.rpartition('/')[2]}, {workers} workers", refresh=False)
                bar.update(cutter.n_tokens - bar.n)
                if cutter.is_complete:
                    break
            cutter.finish()
    except OSError as e:  # of the files in `temporary`, also in a worker
        raise UserError(f"{temporary.name}: cannot be written: {e.strerror}") from None


# ---------------------------------------------------------------- command line


def _count(text: str) -> int:
    return positive_int(text.replace("_", ""))


def n_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__, prog="python -m data.fineweb")
    add = parser.add_argument
    add("--dataset", metavar="REPO", help=f"a text dataset on the hub, or a folder (default: {FINEWEB})")
    add("--name", help="its configuration (default: FineWeb's sample-10BT; none for others)")
    add("--split", help="its split (default: train)")
    add("--column", help="the column, or JSON key, with the text (default: text)")
    add("--revision", metavar="REV", help="branch, tag or commit on the hub (default: main)")
    add("--files", nargs="+", metavar="PATTERN", help="tokenise local files instead, in order of their paths")
    add("--pretokenized", action="store_true", help="fetch the ready shards of kjj0/fineweb10B-gpt2 instead")
    add("--shards", type=_count, metavar="N", help="--pretokenized: training shards (default: all)")
    add("--out", type=Path, metavar="DIR", help="folder to write (default: data/fineweb10B and so on)")
    add("--shard-size", type=_count, metavar="N", help="tokens per shard (default: 10^8)")
    add("--max-tokens", type=_count, metavar="N", help="stop after N tokens (default: all)")
    add("--workers", type=_count, metavar="N", help=f"processes (default: the cores, {n_cores()})")
    add("--tokenizer", choices=TOKENIZERS, help="(default: gpt2)")
    args = parser.parse_args()
    for mode, unused in UNUSED.items():
        for option in unused:
            if getattr(args, mode) and getattr(args, option):
                parser.error(f"--{option.replace('_', '-')}: not together with --{mode}")
    if args.shards and not args.pretokenized:
        parser.error("--shards: only with --pretokenized")
    args.shard_size = args.shard_size or 10**8
    if args.shard_size > MAX_TOKENS:
        parser.error(f"--shard-size {args.shard_size}: expected at most {MAX_TOKENS}")
    if args.max_tokens and args.max_tokens <= args.shard_size:
        parser.error(
            f"--max-tokens {args.max_tokens}: expected more than --shard-size {args.shard_size}, "
            "the first shard of which is validation"
        )
    return args


def _build(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    tokenizer, column = args.tokenizer or "gpt2", args.column or "text"
    get_tokenizer(tokenizer)  # fails, if it must, before anything is read
    options = {"tokenizer": tokenizer, "shard_size": args.shard_size, "max_tokens": args.max_tokens}
    if args.files:
        out = args.out or DATA / "fineweb_files"
        source = local_files(args.files, column)
        return out, build(source, out, options | {"dataset": "fineweb"}, args.workers or n_cores())
    repo, name = args.dataset or FINEWEB, args.name
    if repo == FINEWEB:
        name = name or "sample-10BT"
    label = re.sub(r"[^A-Za-z0-9-]+", "-", Path(repo).name)  # no "_", which separates the split
    default = re.sub(r"^fineweb-sample-(\d+)BT$", r"fineweb\1B", f"{label}-{name}" if name else label)
    out = args.out or DATA / default
    begun = Manifest(out).header.get("options", {})
    revision = args.revision or "main"
    same = (begun.get("repo"), begun.get("revision")) == (repo, revision)
    commit = begun.get("commit") if same else None  # a resumed run stays at its commit
    source = hub_dataset(repo, name, args.split or "train", column, revision, commit)
    return out, build(source, out, options | {"dataset": label}, args.workers or n_cores())


def main() -> None:
    args = _parse_args()
    try:
        if args.pretokenized:
            out = args.out or DATA / "fineweb10B"
            info = fetch_pretokenized(out, args.shards)
        else:
            out, info = _build(args)
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume after the finished shards", file=sys.stderr)
        sys.stderr.flush()
        if args.pretokenized:
            os._exit(130)  # at once: threads may be downloading
        sys.exit(130)
    print(f"source   {info['source']}")
    if info["rows"]:
        print(f"rows     {', '.join(f'{n:,} {note}' for note, n in sorted(info['rows'].items()))}")
    print_splits(info)
    print(f"folder   {out}")


if __name__ == "__main__":
    run_main(main)
