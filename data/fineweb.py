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
import re
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from data import dataset, documents
from data.documents import Block, Cursor, Source, Tokens
from data.pretokenized import fetch_pretokenized
from data.shards import MAX_TOKENS, ShardWriter
from data.tokenizer import TOKENIZERS, get_tokenizer
from infra.cli import ArgumentParser, UserError, n_cores, positive_int, run_main
from infra.files import exclusive_lock, read_jsonl, write_atomically

Record = dict[str, Any]

DATA = Path(__file__).resolve().parent
FINEWEB = "HuggingFaceFW/fineweb"
MANIFEST_NAME = "manifest.jsonl"
SHARD_KEYS = {"file", "tokens", "sha256", "documents", "next", "rows"}  # of its lines on shards
BLOCKS_AHEAD = 4  # per thread: enough to work on while a shard is forced to disk
UNUSED = {  # options that would be silently ignored
    "dataset": "shards",
    "files": "dataset name split revision pretokenized shards",
    "pretokenized": "dataset name split column revision shard_size max_tokens workers tokenizer",
}


# ---------------------------------------------------------------- threads


def tokenised_blocks(blocks: Iterator[Block], workers: int, tokenizer: str) -> Generator[Tokens, None, None]:
    """The tokens of each block, in order; threads encode the next ones: tiktoken releases the GIL."""
    pool, encoding = ThreadPoolExecutor(workers), get_tokenizer(tokenizer)
    pending: deque[Future[Tokens]] = deque()
    try:
        for block in blocks:
            pending.append(pool.submit(documents.tokenise, block, encoding))
            if len(pending) > BLOCKS_AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- shards


def read_manifest(folder: Path) -> tuple[Record, list[Record]]:
    """manifest.jsonl: its first line, on the input and the options, and then those of the finished shards.

    A shard's line has its file, tokens and sha256, the documents that begin in it, where the next shard
    begins (`next`: a Cursor), and counts of the rows skipped or repaired so far. Damaged lines do not count.
    """
    records = [record for record in read_jsonl(folder / MANIFEST_NAME) if isinstance(record, dict)]
    headers = [record for record in records if record.keys() >= {"source", "options", "files"}]
    shards = [record for record in records if record.keys() >= SHARD_KEYS]
    if shards and not headers:
        raise UserError(f"{folder / MANIFEST_NAME}: damaged: delete {folder} to start over")
    return (headers[0] if headers else {}), shards


class ShardCutter:
    """Cuts the stream of tokens into shards, the first for validation, and records each in the manifest.

    Attributes:
        cursor: the first token that is not yet in a shard, or at the end of the input.
        rows: counts of the rows before the cursor that were skipped or repaired.
        shards: the manifest's lines.
    """

    def __init__(self, folder: Path, header: Record) -> None:
        self.folder, self.header, options = folder, header, header["options"]
        self.shard_size, self.max_tokens = options["shard_size"], options["max_tokens"] or sys.maxsize
        self.val, self.train = (
            ShardWriter(folder, options["dataset"], split, self.shard_size, index)
            for index, split in enumerate(("val", "train"))
        )
        self.cursor, self.rows = Cursor(), Counter[str]()
        self.shards: list[Record] = []
        self._documents = 0  # that begin in the current shard

    @property
    def n_tokens(self) -> int:
        return self.val.n_tokens + self.train.n_tokens

    @property
    def is_complete(self) -> bool:
        """--max-tokens is reached, or the last, shorter shard is written."""
        is_last = bool(self.shards) and self.shards[-1]["tokens"] < self.shard_size
        return is_last or self.n_tokens == self.max_tokens

    @property
    def _writer(self) -> ShardWriter:
        return self.train if self.val.files else self.val

    def adopt(self, shard: Record) -> None:
        """Continue after a shard of an earlier run. Raises UserError naming it if it is damaged."""
        self._writer.adopt(shard)
        self.shards.append(shard)
        self.cursor, self.rows = Cursor(*shard["next"]), Counter(shard["rows"])

    def add(self, block: Tokens) -> None:
        """Append a block that begins at the cursor's row, from the cursor on, up to --max-tokens."""
        ends, rows_before = np.cumsum(block.lengths), self.rows
        starts = (ends - block.lengths)[block.lengths > 0]

        def move_to(row: int, token: int) -> None:
            self.cursor = Cursor(block.input, block.row + row, token)
            self.rows = rows_before + Counter(documents.NOTES[note] for note in block.notes[:row] if note)

        at = self.cursor.token
        while at < len(block.tokens) and not self.is_complete:
            writer = self._writer
            to = min(len(block.tokens), at + writer.room, at + self.max_tokens - self.n_tokens)
            writer.add(block.tokens[at:to])
            self._documents += int(((at <= starts) & (starts < to)).sum())
            row = int(np.searchsorted(ends, to))  # of the last token added
            token = to - int(ends[row] - block.lengths[row])
            move_to(*((row, token) if to < ends[row] else (row + 1, 0)))
            self._record_shard()
            at = to
        if not self.is_complete:
            move_to(len(block.lengths), 0)

    def finish(self) -> None:
        """Write the last, shorter shard. Raises UserError if there are no training tokens."""
        if not self.train.n_tokens:
            raise UserError(
                f"{self.folder}: the input has {self.n_tokens:,} tokens of text: expected more than a shard "
                f"of {self.shard_size:,}, which is validation; try --shard-size {1 + self.n_tokens // 10}"
            )
        self._writer.flush()
        self._record_shard()

    def _record_shard(self) -> None:
        """Record a shard that was finished since the last call in the manifest, if there is one."""
        files = self.val.files + self.train.files
        if len(files) > len(self.shards):
            rows = dict(sorted(self.rows.items()))
            shard = files[-1] | {"documents": self._documents, "next": self.cursor, "rows": rows}
            self.shards.append(shard)
            self._documents = 0
            self.save_manifest()

    def save_manifest(self) -> None:
        lines = [json.dumps(value) + "\n" for value in (self.header, *self.shards)]
        write_atomically(self.folder / MANIFEST_NAME, "".join(lines).encode())


def build(source: Source, out: Path, options: Record, workers: int) -> Record:
    """Make the dataset in folder `out`, resume it, or find it finished; returns dataset.json's content.

    Args:
        options: dataset, tokenizer, shard_size, max_tokens (None: all).
        workers: threads that tokenise. Their number changes only the speed.
    Raises:
        UserError: one line; finished shards stay, and the same call resumes after them.
    """
    header = {"source": source.description, "options": options | source.settings, "files": source.files}
    with exclusive_lock(out):
        begun, shards = read_manifest(out)
        _check_same(out, begun, shards, header)
        if shards and (info := dataset.finished_info(out)):
            print(f"{out}: finished before; nothing to do (`python -m data.verify verify {out}` checks it)")
            return info
        cutter = ShardCutter(out, header)
        _adopt_shards(cutter, shards)
        dataset.begin_dataset(out, options["dataset"], keep=[shard["file"] for shard in cutter.shards])
        cutter.save_manifest()
        if not cutter.is_complete:
            _tokenise_all(source, cutter, options["tokenizer"], workers)
        val, *train = (shard["documents"] for shard in cutter.shards)
        info = {key: options[key] for key in ("dataset", "tokenizer")} | {
            "vocab_size": TOKENIZERS[options["tokenizer"]],
            "source": source.description,
            "rows": dict(sorted(cutter.rows.items())),
            "splits": {"val": cutter.val.counts(val), "train": cutter.train.counts(sum(train))},
            "shards": cutter.val.files + cutter.train.files,
        }
        dataset.finish_dataset(out, info)
    return dataset.dataset_info(out)


def _check_same(out: Path, begun: Record, shards: list[Record], header: Record) -> None:
    """Raises UserError if the folder has foreign shards, or was begun from other input or options."""
    listed = {shard["file"] for shard in shards}
    prefix = f"{header['options']['dataset']}_"
    for path in out.glob("*.bin"):
        is_ours = bool(begun) and path.name.startswith(prefix)  # a shard that is not yet listed
        if path.name not in listed and not is_ours:
            raise UserError(f"{out}: holds {path.name}, another dataset's: choose another --out")
    old, new = ({"files": h["files"]} | h["options"] for h in (begun if shards else header, header))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise UserError(
                f"{out}: begun with {key} = {str(old.get(key))[:80]}, not {str(new.get(key))[:80]}: "
                "give what it was begun with, another --out, or delete it to start over"
            )


def _adopt_shards(cutter: ShardCutter, shards: list[Record]) -> None:
    """Continue after the finished shards, up to the first damaged one."""
    try:
        for shard in shards:
            cutter.adopt(shard)
    except UserError as e:
        print(f"made again from here on: {e}", file=sys.stderr)


def _tokenise_all(source: Source, cutter: ShardCutter, tokenizer: str, workers: int) -> None:
    """Everything from the cutter's cursor on, with a bar over tokens."""
    total = min(source.n_tokens or sys.maxsize, cutter.max_tokens)
    bar = dataset.progress_bar(
        cutter.folder.name, total if total < sys.maxsize else None, "tok", cutter.n_tokens
    )
    with (
        bar,
        closing(documents.read_blocks(source, cutter.cursor)) as blocks,
        closing(tokenised_blocks(blocks, workers, tokenizer)) as found,
    ):
        for tokens in found:
            cutter.add(tokens)
            bar.update(cutter.n_tokens - bar.n)
            if cutter.is_complete:
                break
        cutter.finish()


# ---------------------------------------------------------------- command line


def _parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    n: Record = {"type": positive_int, "metavar": "N"}
    add("--dataset", metavar="REPO", help=f"a text dataset on the hub, or a folder (default: {FINEWEB})")
    add("--name", help="its configuration (default: FineWeb's sample-10BT; none for others)")
    add("--split", help="its split (default: train)")
    add("--column", help="the column, or JSON key, with the text (default: text)")
    add("--revision", metavar="REV", help="branch, tag or commit on the hub (default: main)")
    add("--files", nargs="+", metavar="PATTERN", help="tokenise local files instead, in order of their paths")
    add("--pretokenized", action="store_true", help="fetch the ready shards of kjj0/fineweb10B-gpt2 instead")
    add("--shards", **n, help="--pretokenized: training shards (default: all)")
    add("--out", type=Path, metavar="DIR", help="folder to write (default: data/fineweb10B and so on)")
    add("--shard-size", **n, help="tokens per shard (default: 10^8)")
    add("--max-tokens", **n, help="stop after N tokens (default: all)")
    add("--workers", **n, help=f"threads (default: the cores, {n_cores()})")
    add("--tokenizer", choices=TOKENIZERS, help="(default: gpt2)")
    args = parser.parse_args()
    mode = "files" if args.files else "pretokenized" if args.pretokenized else "dataset"
    for option in UNUSED[mode].split():
        if getattr(args, option):
            other = "only with --pretokenized" if mode == "dataset" else f"not together with --{mode}"
            parser.error(f"--{option.replace('_', '-')}: {other}")
    shard_size = args.shard_size = args.shard_size or 10**8
    if shard_size > MAX_TOKENS:
        parser.error(f"--shard-size {shard_size}: expected at most {MAX_TOKENS}")
    if (args.max_tokens or sys.maxsize) <= shard_size:
        parser.error(f"--max-tokens {args.max_tokens}: expected more than one shard of {shard_size}")
    return args


def _prepare(args: argparse.Namespace) -> tuple[Path, Record]:
    """The folder, and its dataset.json's content."""
    if args.pretokenized:
        out = args.out or DATA / "fineweb10B"
        return out, fetch_pretokenized(out, args.shards)
    tokenizer, column, workers = args.tokenizer or "gpt2", args.column or "text", args.workers or n_cores()
    options = {"tokenizer": tokenizer, "shard_size": args.shard_size, "max_tokens": args.max_tokens}
    if args.files:
        out = args.out or DATA / "fineweb_files"
        return out, build(
            documents.local_files(args.files, column), out, options | {"dataset": "fineweb"}, workers
        )
    repo, revision = args.dataset or FINEWEB, args.revision or "main"
    name = args.name or ("sample-10BT" if repo == FINEWEB else None)
    label = re.sub(r"[^A-Za-z0-9-]+", "-", Path(repo).resolve().name)  # no "_", which separates the split
    default = re.sub(r"^fineweb-sample-(\d+)BT$", r"fineweb\1B", f"{label}-{name}" if name else label)
    out = args.out or DATA / default
    begun = read_manifest(out)[0].get("options", {})
    same = (begun.get("repo"), begun.get("revision")) == (repo, revision)
    commit = begun.get("commit") if same else None  # a resumed run stays at its commit
    source = documents.hub_dataset(repo, name, args.split or "train", column, revision, commit)
    return out, build(source, out, options | {"dataset": label}, workers)


def main() -> None:
    args = _parse_args()
    try:
        out, info = _prepare(args)
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume after the finished shards", file=sys.stderr)
        if args.pretokenized:
            os._exit(130)  # at once: threads may be downloading
        raise
    print(f"source   {info['source']}")
    if info["rows"]:
        print(f"rows     {', '.join(f'{n:,} {note}' for note, n in sorted(info['rows'].items()))}")
    dataset.print_splits(info)
    print(f"folder   {out}")


if __name__ == "__main__":
    run_main(main)
