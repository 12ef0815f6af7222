"""Prepare a text dataset: documents in, GPT-2 tokens out, as shards that train.py reads.

    python -m data.prepare                              # FineWeb sample-10BT -> data/fineweb10B
    python -m data.prepare --dataset HuggingFaceFW/fineweb-edu --name sample-100BT
    python -m data.prepare --files 'dir/*.txt' --out data/mine   # .md, .parquet, .jsonl, .json; .gz, .zst
    python -m data.prepare --files dir --out data/mine           # all of these below the folder
    python -m data.prepare --dataset DIR --separator '<|endoftext|>' --out data/stories
    hf download kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir data/fineweb10B    # ready shards

Each document is `<|endoftext|>` and its text in GPT-2's BPE, or by another --tokenizer.
Special-token text inside a document is encoded as ordinary text. Rows without text are skipped.
Invalid UTF-8 becomes U+FFFD; a file with much of it is refused.

The first shard is validation, of --val-tokens if they are given, the rest training. Of local files
it is a twentieth of the documents, chosen by a hash of the text, unless a number of tokens is given;
where documents are few, it is the end of each.

Stop it at any moment, by Ctrl-C or by pulling the plug, and run the same command again: it resumes
after the last finished shard, and the shards are byte for byte those of an uninterrupted run, for
any --workers.

Writes fineweb_val_000000.bin, fineweb_train_000001.bin, ..., of local files text_val_000000.bin
(format: data/shards.py), manifest.jsonl (the row of the input at which each shard ends), and at the
end dataset.json.
"""

import argparse
import json
import os
import re
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data import dataset, documents
from data.documents import Block, Cursor, Input, Source
from data.shards import MAX_TOKENS, TOKEN, ShardWriter
from data.tokenizer import Tokenizer, encode, get_tokenizer
from infra.cli import ArgumentParser, UserError, integer, n_cores, positive_int, run_main
from infra.files import exclusive_lock, read_jsonl, write_atomically

DATA = Path(__file__).resolve().parent
FINEWEB = "HuggingFaceFW/fineweb"
SHARD_SIZE = 10**8
MANIFEST_NAME = "manifest.jsonl"
OPTIONS = ("tokenizer", "shard_size", "max_tokens", "val_tokens")  # that change the shards
VAL_SHARE = 0.05  # of local files, if nothing else is asked for
ENOUGH_DOCUMENTS = 100  # held out: then their share of the text is near VAL_SHARE
BLOCKS_AHEAD = 4  # per thread: enough to work on while a shard is forced to disk


class Part(NamedTuple):
    """What a pass over the input takes: all, or the part of one split.

    Validation is of whole documents, or, where these are few, of the end of each.
    """

    split: str = ""  # val, train; "": all
    is_of_ends: bool = False


def is_held_out(text: str) -> bool:
    """By the text alone, so equal documents are of one split, and their order does not matter."""
    return zlib.crc32(text.encode()) < VAL_SHARE * 2**32


def takes_ends(inputs: list[Input]) -> bool:
    """Whether whole documents would be far from VAL_SHARE of the text, as few or large ones are."""
    n_held_out = n_characters = n_documents = 0
    for block in documents.read_blocks(inputs, Cursor()):
        for text in block.texts:
            n_characters += len(text)
            if text and is_held_out(text):
                n_held_out += len(text)
                n_documents += 1
        if n_documents >= ENOUGH_DOCUMENTS:
            return False
    return not VAL_SHARE / 2 <= n_held_out / max(1, n_characters) <= VAL_SHARE * 2


def tokens_of(text: str, encoding: Tokenizer, part: Part) -> np.ndarray:
    """The part's tokens of a text, (n,) uint16 that begin with `<|endoftext|>`; none for an empty
    one.
    """
    eot = np.array([encoding.eot_token], TOKEN)
    is_of_whole = bool(part.split) and not part.is_of_ends
    if not text or (is_of_whole and is_held_out(text) != (part.split == "val")):
        return eot[:0]
    tokens = np.append(eot, encode(encoding, text))
    if not part.is_of_ends:
        return tokens
    n_train = len(tokens) - round(VAL_SHARE * len(tokens))
    if part.split == "train":
        return tokens[:n_train]
    return np.append(eot, tokens[n_train:]) if n_train < len(tokens) else eot[:0]


def tokenised_blocks(
    blocks: Iterator[Block], encoding: Tokenizer, workers: int, part: Part
) -> Iterator[tuple[Block, list[np.ndarray]]]:
    """Each block and its tokens, in order; threads encode the next ones, without the GIL."""

    def tokenise(block: Block) -> tuple[Block, list[np.ndarray]]:
        return block, [tokens_of(text, encoding, part) for text in block.texts]

    pending: deque[Any] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for block in blocks:
            pending.append(pool.submit(tokenise, block))
            if len(pending) > BLOCKS_AHEAD * workers:
                yield pending.popleft().result()
        for tokenised in pending:
            yield tokenised.result()


class ShardCutter:
    """Cuts documents into shards, the first for validation, and records each in the manifest."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        options = header["options"]
        self.folder = folder
        self.header = header
        self.max_tokens: int = options["max_tokens"] or sys.maxsize
        self.shard_size: int = options["shard_size"]
        self.is_share: bool = bool(options.get("val_share"))  # of all documents, in one shard
        val_size = MAX_TOKENS if self.is_share else options["val_tokens"] or self.shard_size
        self.val = ShardWriter(folder, options["dataset"], "val", val_size, 0)
        self.train = ShardWriter(folder, options["dataset"], "train", self.shard_size, 1)
        self.cursor = Cursor()  # the first token that is not yet in a shard
        self.shards: list[dict[str, Any]] = []  # the manifest's lines on shards
        self._documents = 0  # that begin in the current shard

    @property
    def n_tokens(self) -> int:
        return self.val.n_tokens + self.train.n_tokens

    @property
    def is_complete(self) -> bool:
        """--max-tokens is reached, or the last, shorter shard is written."""
        is_last = len(self.shards) > 1 and self.shards[-1]["tokens"] < self.shard_size
        return is_last or self.n_tokens == self.max_tokens

    @property
    def _writer(self) -> ShardWriter:
        return self.train if self.val.files else self.val

    def adopt(self, shards: list[dict[str, Any]]) -> None:
        """Continue after the shards of an earlier run, up to the first damaged one."""
        try:
            for shard in shards:
                self._writer.adopt(shard)
                self.shards.append(shard)
                self.cursor = Cursor(*shard["next"])
        except UserError as e:
            print(f"made again from here on: {e}", file=sys.stderr)

    def add(self, block: Block, tokens: list[np.ndarray]) -> None:
        """Append a block that begins in the cursor's row, from the cursor on, up to --max-tokens."""
        for row, document in enumerate(tokens, block.row):
            begin = self.cursor.token
            self._documents += begin == 0 and len(document) > 0
            while begin < len(document):
                writer = self._writer
                end = min(
                    len(document), begin + writer.room, begin + self.max_tokens - self.n_tokens
                )
                writer.add(document[begin:end])
                self.cursor = Cursor(block.input, row, end)
                self._record_shard()
                if self.is_complete:
                    return
                begin = end
            self.cursor = Cursor(block.input, row + 1)

    def finish_val(self) -> None:
        """Write the validation shard of a share, and go back to the input's beginning."""
        self.val.flush()
        self.cursor = Cursor()
        self._record_shard()

    def finish(self) -> None:
        """Write the last, shorter shard. Raises UserError if there are no training tokens."""
        if not self.train.n_tokens:
            elsewhere = " and another --out" if self.shards else ""
            expected = (
                f"expected more, to hold some out; try --val-tokens {1 + self.n_tokens // 20}"
            )
            raise UserError(
                f"{self.folder}: {self.n_tokens:,} tokens of text: {expected}{elsewhere}"
            )
        self.train.flush()
        self._record_shard()

    def _record_shard(self) -> None:
        """Record a shard that was finished since the last call, if there is one."""
        files = self.val.files + self.train.files
        if len(files) > len(self.shards):
            self.shards.append(files[-1] | {"documents": self._documents, "next": self.cursor})
            self._documents = 0
            self.save_manifest()

    def save_manifest(self) -> None:
        lines = [json.dumps(record) + "\n" for record in (self.header, *self.shards)]
        write_atomically(self.folder / MANIFEST_NAME, "".join(lines).encode())


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """manifest.jsonl: a line on the input and the options, and then one for each finished shard.

    A shard's line has its file, tokens and sha256, the documents that begin in it, and where the
    next shard begins (`next`: a Cursor).
    """
    records = read_jsonl(folder / MANIFEST_NAME)
    if records and not records[0].keys() >= {"options", "files"}:
        raise UserError(f"{folder / MANIFEST_NAME}: damaged: delete {folder} to start over")
    return records


def begun_shards(out: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """The shards of an interrupted or finished run, as the manifest lists them.

    Raises UserError: the folder was begun from other input or with other options, or holds shards
    of another dataset.
    """
    records = read_manifest(out)
    shards = records[1:]
    dataset_name = header["options"]["dataset"]
    own = [shard["file"] for shard in shards]
    if records:  # a kill may have left one shard out of the manifest
        own.append(f"{dataset_name}_{'train' if shards else 'val'}_{len(shards):06d}.bin")
    dataset.refuse_others(out, tuple(own))
    if not shards:
        return []
    old, new = (each["options"] | {"files": each["files"]} for each in (records[0], header))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            change = f"begun with {key} = {str(old.get(key))[:80]}, not {str(new.get(key))[:80]}"
            expected = "give what it was begun with, another --out, or delete it to start over"
            raise UserError(f"{out}: {change}: {expected}")
    return shards


def build(source: Source, out: Path, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Make the dataset in folder `out`, resume it, or find it finished; returns dataset.json's
    content.

    options: dataset, tokenizer (see `get_tokenizer`), shard_size, max_tokens (None: all),
    val_tokens (of the first shard, which is validation; None: shard_size), val_share (None, or in
    place of val_tokens a share of all documents). Threads (`workers`) change only the speed.
    Raises UserError: one line; finished shards stay, and the same call resumes after them.
    """
    encoding = get_tokenizer(options["tokenizer"])
    identity = options | {"tokenizer": encoding.name} | source.settings
    header = {"source": source.description, "options": identity, "files": source.files}
    folder = out.resolve()
    for path in map(Path.resolve, source.paths):
        if path.is_relative_to(folder) or folder.is_relative_to(path):
            raise UserError(f"--out {out}: expected another folder than the input's, {path}")
    with exclusive_lock(out):
        shards = begun_shards(out, header)
        if shards and (info := dataset.made_before(out, options["dataset"], {})):
            return info
        cutter = ShardCutter(out, header)
        cutter.adopt(shards)
        inputs = [] if cutter.is_complete else source.open()  # before any shard is removed
        finished = [shard["file"] for shard in cutter.shards]
        dataset.begin_dataset(out, options["dataset"], keep=finished)
        cutter.save_manifest()
        if not cutter.is_complete:
            _cut_source(inputs, cutter, encoding, workers)
        cutter.finish()
        val, *train = (shard["documents"] for shard in cutter.shards)
        info = {
            "dataset": options["dataset"],
            "source": source.description,
            "splits": {"val": cutter.val.counts(val), "train": cutter.train.counts(sum(train))},
            "shards": cutter.val.files + cutter.train.files,
        }
        return dataset.finish_dataset(out, info, encoding)


def _cut_source(
    inputs: list[Input], cutter: ShardCutter, encoding: Tokenizer, workers: int
) -> None:
    """Everything from the cutter's cursor on; a share of validation is a pass of its own before."""
    if not cutter.is_share:
        _cut_part(inputs, cutter, encoding, workers, Part())
        return
    is_of_ends = takes_ends(inputs)
    if not cutter.val.files:
        _cut_part(inputs, cutter, encoding, workers, Part("val", is_of_ends))
        cutter.finish_val()
    _cut_part(inputs, cutter, encoding, workers, Part("train", is_of_ends))


def _cut_part(
    inputs: list[Input], cutter: ShardCutter, encoding: Tokenizer, workers: int, part: Part
) -> None:
    """A pass over the input from the cutter's cursor on, with a bar over tokens."""
    total = cutter.header["options"]["max_tokens"]
    blocks = documents.read_blocks(inputs, cutter.cursor)
    with tqdm(
        total=total, initial=cutter.n_tokens, unit="tok", unit_scale=True, disable=None
    ) as bar:
        for block, tokens in tokenised_blocks(blocks, encoding, workers, part):
            cutter.add(block, tokens)
            bar.update(cutter.n_tokens - bar.n)
            if cutter.is_complete:
                break


def _parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    dataset_help = f"a text dataset on the hub, or a folder (default: {FINEWEB})"
    add("--dataset", metavar="REPO", help=dataset_help)
    add("--name", help="its configuration (default: FineWeb's sample-10BT; none for others)")
    add("--split", help="its split (default: train)")
    add("--revision", metavar="REV", help="its branch, tag or commit on the hub (default: main)")
    files_help = "tokenise local files or folders of them instead, in order of their paths"
    add("--files", nargs="+", metavar="PATTERN", help=files_help)
    separator_help = "split texts there into documents, such as '<|endoftext|>'"
    add("--separator", metavar="TEXT", help=separator_help)
    seed = integer(0, 2**32 - 1)
    add("--shuffle", type=seed, metavar="SEED", help="shuffle the documents of --files, in memory")
    add("--column", default="text", help="the column, or JSON key, with the text (default: text)")
    out_help = "folder to write (default: data/fineweb10B, data/text for --files, and so on)"
    add("--out", type=Path, metavar="DIR", help=out_help)
    n_tokens = integer(1, MAX_TOKENS)
    size_help = f"in tokens (default: {SHARD_SIZE:,}); the first is validation"
    add("--shard-size", type=n_tokens, metavar="N", help=size_help)
    val_help = (
        "tokens of validation, the first (default: a shard; without any of these three options "
        f"{VAL_SHARE:.0%}% of local files, taken from all documents)"
    )
    add("--val-tokens", type=n_tokens, metavar="N", help=val_help)
    most_help = "stop after N, validation included (default: all)"
    add("--max-tokens", type=positive_int, metavar="N", help=most_help)
    workers_help = "threads (default: cores)"
    add("--workers", type=integer(1, 1024), metavar="N", default=n_cores(), help=workers_help)
    add("--tokenizer", default="gpt2", help="gpt2, bytes or a tokenizer.json (default: gpt2)")
    args = parser.parse_args()
    if args.files and (args.dataset or args.name or args.split or args.revision):
        parser.error("--files: expected no --dataset, --name, --split or --revision with it")
    if args.shuffle is not None and not args.files:
        expected = "expected --files; data.order of train.py shuffles windows"
        parser.error(f"--shuffle: {expected}")
    if args.max_tokens and args.max_tokens <= (args.val_tokens or args.shard_size or SHARD_SIZE):
        expected = "expected more than the tokens of validation (--val-tokens)"
        parser.error(f"--max-tokens {args.max_tokens}: {expected}")
    return args


def _open_source(args: argparse.Namespace) -> tuple[Source, str, Path]:
    """The source, the name of its dataset, and the folder to write."""
    if args.files:
        source = documents.local_files(args.files, args.column, args.shuffle, args.separator)
        return source, "text", args.out or DATA / "text"
    repo = args.dataset or FINEWEB
    split = args.split or "train"
    name = args.name or ("sample-10BT" if repo == FINEWEB else None)
    # no "_", which separates the split
    label = re.sub(r"[^A-Za-z0-9-]+", "-", Path(repo).resolve().name)
    folder = "-".join(filter(None, (label, name)))
    out = args.out or DATA / folder.replace("fineweb-sample-10BT", "fineweb10B")
    given = (repo, name, split, args.column)
    if Path(repo).is_dir():
        return documents.folder_dataset(*given, args.separator), label, out
    revision = args.revision or "main"
    records = read_manifest(out)
    begun = records[0]["options"] if records else {}
    is_same = (begun.get("repo"), begun.get("revision")) == (repo, revision)
    commit = begun.get("commit") if is_same else None  # a resumed run stays at its commit
    source = documents.hub_dataset(*given, revision, commit, args.separator)
    return source, label, out


def main() -> None:
    args = _parse_args()
    source, label, out = _open_source(args)
    options = {"dataset": label} | {key: getattr(args, key) for key in OPTIONS}
    is_sized = any((args.shard_size, args.val_tokens, args.max_tokens))
    options["val_share"] = VAL_SHARE if source.paths and not is_sized else None
    options["shard_size"] = args.shard_size or SHARD_SIZE
    try:
        info = build(source, out, options, args.workers)
    except KeyboardInterrupt:
        os._exit(130)  # at once: an orderly exit would abort in the threads that read ahead
    dataset.print_summary(info, out)


if __name__ == "__main__":
    run_main(main)
