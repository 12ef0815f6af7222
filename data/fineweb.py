"""Prepare FineWeb: documents in, GPT-2 tokens out, as shards that train.py reads.

    python data/fineweb.py                              # sample-10BT, tokenised here -> data/fineweb10B
    python data/fineweb.py --max-tokens 300000000       # the first 3 shards of it
    python data/fineweb.py --edu --sample 100BT         # FineWeb-Edu -> data/fineweb_edu100B
    python data/fineweb.py --pretokenized --shards 10   # ready shards of kjj0/fineweb10B-gpt2
    python data/fineweb.py --files 'dir/*.parquet'      # or .jsonl, .jsonl.gz -> data/fineweb_files

The first shard is validation, the rest training. Each document is `<|endoftext|>` and its text in GPT-2's
BPE; special-token text inside a document is encoded as the ordinary text it is. Rows without text are
skipped, invalid UTF-8 becomes U+FFFD; both are counted.

Stop it at any moment, by Ctrl-C or by pulling the plug, and run the same command again: it goes on after
the last finished shard, and the shards come out byte for byte as without the stop, for any --workers.
Parquet files of the hub are fetched one ahead of the tokeniser and deleted once their shards are written.

Writes fineweb_val_000000.bin, fineweb_train_000001.bin, ... (format: data/shards.py), manifest.jsonl (at
which row of the input each shard ends), and last of all dataset.json.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import tiktoken
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.documents import (  # noqa: E402
    BLOCK_BYTES,
    BYTES_PER_TOKEN,
    Block,
    Cursor,
    HubFiles,
    LocalFiles,
    Source,
    read_blocks,
)
from data.pretokenized import DOWNLOADS_NAME, fetch_pretokenized  # noqa: E402
from data.shards import (  # noqa: E402
    INFO_NAME,
    MANIFEST_NAME,
    MAX_TOKENS,
    TOKEN,
    ShardWriter,
    TokenStream,
    begin_dataset,
    dataset_info,
    finish_dataset,
    only_one,
    progress_bar,
)
from data.tokenizer import TOKENIZERS, get_tokenizer  # noqa: E402
from infra.cli import ArgumentParser, UserError, run_main  # noqa: E402
from infra.files import write_atomically  # noqa: E402

BLOCKS_AHEAD = 4  # per worker: enough to work on while a shard is forced to disk
UNREAD = {  # options that would be silently ignored
    "--files": ("--pretokenized", "--edu", "--sample", "--revision", "--shards"),
    "--pretokenized": (
        "--edu", "--sample", "--revision", "--shard-size", "--max-tokens", "--workers", "--tokenizer"
    ),
}  # fmt: skip
SKIPPED = ("", "without text", "repaired UTF-8")  # what a row's note says


# ---------------------------------------------------------------- workers


class Tokens(NamedTuple):
    """The tokens of a block."""

    tokens: np.ndarray  # (n,) uint16, `<|endoftext|>` first in each document
    lengths: np.ndarray  # (rows,) int64: how many of them are each row's; 0 for one that was skipped
    notes: np.ndarray  # (rows,) uint8: an index of SKIPPED


def tokenise(rows: list[bytes | None], tokenizer: str, is_json: bool, name: str, first: int) -> Tokens:
    """The tokens of documents, in a worker process.

    Args:
        rows: texts as UTF-8, or lines of JSON with the key "text".
        name, first: the input's name and the number of its first row here, for messages.
    Raises:
        UserError: naming input and line, for a line that is not a JSON object with a text.
    """
    encoding = get_tokenizer(tokenizer)
    eot = np.array([encoding.eot_token], TOKEN)
    parts, lengths, notes = [np.empty(0, TOKEN)], np.zeros(len(rows), np.int64), np.zeros(len(rows), np.uint8)
    for i, row in enumerate(rows):
        text, repaired = _text(row, is_json, f"{name}, line {first + i + 1}")
        notes[i] = 1 if not text else 2 if repaired else 0
        if text:
            tokens = _encode(encoding, text)
            parts += [eot, tokens]
            lengths[i] = 1 + len(tokens)
    return Tokens(np.concatenate(parts), lengths, notes)


def _encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """The tokens of `encode_ordinary`, (n,) uint16, without a list of Python integers.

    Text that is too much for tiktoken's regex engine, such as a million spaces and a word, goes in halves:
    it decodes to the same text.
    """
    try:
        return encoding.encode_to_numpy(text, disallowed_special=()).astype(TOKEN)
    except ValueError:
        if len(text) < 2:
            raise
        half = len(text) // 2
        return np.concatenate([_encode(encoding, text[:half]), _encode(encoding, text[half:])])


def _text(row: bytes | None, is_json: bool, where: str) -> tuple[str, bool]:
    """A row's text, and whether it had to be repaired to be text."""
    try:
        text, repaired = (row or b"").decode("utf-8"), False
    except UnicodeDecodeError:
        text, repaired = (row or b"").decode("utf-8", "replace"), True
    if not is_json or not text.strip():
        return text if not is_json else "", repaired
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: not valid JSON: {e}") from None
    found = value.get("text", 0) if isinstance(value, dict) else 0
    if found is None:
        return "", repaired
    if not isinstance(found, str):
        raise UserError(f'{where}: {str(value)[:60]!r}: expected an object with a string "text"')
    try:
        found.encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
    return found, repaired


class Workers:
    """Processes that run `tokenise`, each with a pipe of its own, for the length of a with block.

    A pipe each, not a queue for all as in multiprocessing's pools: so a worker that is killed in the midst
    of a message is noticed, and workers end by themselves when this process is gone.
    """

    def __init__(self, n: int, tokenizer: str) -> None:
        self.n, self.tokenizer = n, tokenizer
        self._pipes: SimpleQueue[Connection] = SimpleQueue()  # of idle workers
        self._processes: list[SpawnProcess] = []
        self._threads = ThreadPoolExecutor(n)  # each waits for a worker

    def __enter__(self) -> Self:
        context = get_context("spawn")
        with put_off_signals():
            for _ in range(self.n):
                ours, theirs = context.Pipe()
                self._processes.append(context.Process(target=_serve, args=(theirs,), daemon=True))
                self._processes[-1].start()
                theirs.close()
                self._pipes.put(ours)
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)

    def submit(self, block: Block) -> Future[Tokens]:
        """The tokens of a block, to come. Their `result()` raises UserError, also if the worker has died."""
        return self._threads.submit(
            self._run, (block.rows, self.tokenizer, block.is_json, block.name, block.row)
        )

    def _run(self, job: tuple[Any, ...]) -> Tokens:
        pipe = self._pipes.get()
        try:
            pipe.send(job)
            result = pipe.recv()
        except (EOFError, OSError):
            raise UserError(
                "a worker process was killed (out of memory?): run the same command again to go on, "
                "perhaps with fewer --workers"
            ) from None
        finally:
            self._pipes.put(pipe)
        if isinstance(result, UserError):
            raise result
        return result


def _serve(pipe: Connection) -> None:
    """A worker's life: it ends when its parent does."""
    with suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            try:
                pipe.send(tokenise(*job))
            except UserError as e:
                pipe.send(e)


@contextmanager
def put_off_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of the block; processes started in it never get them."""
    resource_tracker.ensure_running()  # multiprocessing would start it in here, and that unblocks signals
    signals = (signal.SIGINT, signal.SIGTERM)
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda n, frame: came.append(n)) for number in signals}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for again in came:
            signal.raise_signal(again)


def tokenised_blocks(blocks: Iterator[Block], workers: Workers) -> Iterator[tuple[Block, Tokens]]:
    """Each block with its tokens, in order, while the next ones are in the workers' hands."""
    pending: deque[tuple[Block, int, Future[Tokens]]] = deque()
    ahead = 0
    for block in blocks:
        n_bytes = block.n_bytes
        pending.append((block._replace(rows=[]), n_bytes, workers.submit(block)))
        ahead += n_bytes
        while ahead > BLOCKS_AHEAD * BLOCK_BYTES * workers.n:
            block, n_bytes, future = pending.popleft()
            ahead -= n_bytes
            yield block, future.result()
    while pending:
        block, _, future = pending.popleft()
        yield block, future.result()


# ---------------------------------------------------------------- shards


class Manifest:
    """manifest.jsonl: a line on the input and the options, then one for each finished shard.

    A shard's line has its file, tokens and sha256, the documents that begin in it, where the next shard
    begins (`next`: a Cursor), and counts of the rows skipped or repaired so far. Lines are appended and
    forced to the disk; a line that a crash has cut off does not count.

    Attributes:
        header, shards: what the file says.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST_NAME
        self.header: dict[str, Any] | None = None
        self.shards: list[dict[str, Any]] = []
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return
        except OSError as e:
            raise UserError(f"{self.path}: cannot be read: {e.strerror}") from None
        try:
            values = [json.loads(line) for line in lines]
            if values:
                self.header, self.shards = dict(values[0]), values[1:]
                self.header["source"], self.header["options"]["shard_size"], self.header["inputs"][0]
            for shard in self.shards:
                Cursor(*shard["next"])
                shard["file"], shard["tokens"] + shard["documents"], shard["sha256"][:8], dict(shard["rows"])
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{self.path}: damaged: delete {folder} to start over") from None

    @property
    def cursor(self) -> Cursor:
        return Cursor(*self.shards[-1]["next"]) if self.shards else Cursor()

    def restart(self, header: dict[str, Any], shards: list[dict[str, Any]]) -> None:
        """Write the file anew with these shards."""
        self.header, self.shards = header, shards
        lines = [json.dumps(value) + "\n" for value in (header, *shards)]
        write_atomically(self.path, "".join(lines).encode())

    def append(self, shard: dict[str, Any]) -> None:
        try:
            with open(self.path, "ab") as f:
                f.write(json.dumps(shard).encode() + b"\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise UserError(f"{self.path}: cannot be written: {e.strerror}") from None
        self.shards.append(shard)


class ShardCutter:
    """Cuts the stream of tokens into shards, the first for validation, and tells the manifest of each.

    A context manager: on an exception the shard in hand is thrown away, the finished ones stay.
    """

    def __init__(self, folder: Path, manifest: Manifest, options: dict[str, Any]) -> None:
        dataset, shard_size = options["dataset"], options["shard_size"]
        self.folder, self.dataset = folder, dataset
        self.splits = {
            split: ShardWriter(folder, dataset, split, shard_size, index)
            for index, split in enumerate(("val", "train"))
        }
        self._manifest, self._max_tokens = manifest, options["max_tokens"]
        self.cursor = Cursor()
        self.notes: Counter[str] = Counter()  # rows behind the cursor that were skipped or repaired
        self._documents = 0  # that begin in the shard in hand

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        for writer in self.splits.values():
            writer.__exit__(*exception)

    @property
    def n_tokens(self) -> int:
        return sum(writer.n_tokens for writer in self.splits.values())

    @property
    def n_shards(self) -> int:
        return sum(len(writer.files) for writer in self.splits.values())

    @property
    def has_all(self) -> bool:
        """Nothing is to be added: --max-tokens is reached, or the last, shorter shard is written."""
        shards = self._manifest.shards
        short = bool(shards) and shards[-1]["tokens"] < self._writer.shard_size
        return short or self.n_tokens == self._max_tokens

    @property
    def first_input(self) -> int:
        """The first input that a restart would need."""
        return self._manifest.cursor.input

    @property
    def _writer(self) -> ShardWriter:
        return self.splits["train" if self.splits["val"].files else "val"]

    def adopt(self, shard: dict[str, Any]) -> None:
        """Go on after a shard of the manifest. Raises UserError naming it if it is damaged."""
        self._writer.adopt(shard)
        self.cursor = Cursor(*shard["next"])
        self.notes = Counter(shard["rows"])

    def add(self, block: Block, tokenised: Tokens) -> None:
        """Append a block's tokens, from the cursor if it is in the block, up to --max-tokens."""
        tokens, lengths, notes = tokenised
        ends = np.cumsum(lengths)
        starts = (ends - lengths)[lengths > 0]
        at = self.cursor.token if block[:2] == self.cursor[:2] else 0
        left = len(tokens) if self._max_tokens is None else self._max_tokens - self.n_tokens
        stop, noted = min(len(tokens), at + left), 0
        while at < stop:
            writer = self._writer
            to = min(stop, at + writer.room)
            writer.add(tokens[at:to])
            self._documents += int(np.searchsorted(starts, to) - np.searchsorted(starts, at))
            at = to
            row = int(np.searchsorted(ends, at))  # of the last token
            token = at - int(ends[row] - lengths[row])
            row, token = (row, token) if token < lengths[row] else (row + 1, 0)
            self.cursor = Cursor(block.input, block.row + row, token)
            self.notes.update(SKIPPED[note] for note in notes[noted:row] if note)
            noted = row
            if writer.room == writer.shard_size:
                self._record(writer)
        if at == len(tokens) and not self.has_all:
            self.cursor = Cursor(block.input, block.row + len(lengths))
            self.notes.update(SKIPPED[note] for note in notes[noted:] if note)

    def finish(self) -> None:
        """Write the last, shorter shard."""
        writer = self._writer
        if writer.room < writer.shard_size:
            writer.close()
            self._record(writer)

    def _record(self, writer: ShardWriter) -> None:
        documents, self._documents = self._documents, 0
        rows = dict(sorted(self.notes.items()))
        self._manifest.append(writer.files[-1] | {"documents": documents, "next": self.cursor, "rows": rows})


def build(source: Source, out: Path, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Make the dataset in folder `out`, go on with it, or find it finished; returns dataset.json's content.

    Args:
        source: the documents.
        options: dataset, tokenizer, shard_size, max_tokens (None: all).
        workers: processes that tokenise. Their number changes nothing but speed.
    Raises:
        UserError: one line; finished shards stay, and the same call goes on after them.
        KeyboardInterrupt: the same.
    """
    vocab_size = get_tokenizer(options["tokenizer"]).n_vocab
    with only_one(out):
        manifest = Manifest(out)
        _check_same(out, manifest, source, options)
        finished = _finished(out, manifest)
        if finished is not None:
            print(
                f"{out}: finished before; nothing to do "
                f"(`python data/shards.py verify {out}` checks every byte)"
            )
            return finished
        begin_dataset(out)
        with ShardCutter(out, manifest, options) as cutter:
            _adopt(out, cutter, manifest, _header(source, options))
            _check_space(out, source, options, cutter.n_tokens)
            try:
                _tokenise_all(source, cutter, options, Workers(workers, options["tokenizer"]))
            except UserError as e:
                if not _disk_full(e):
                    raise
                free = shutil.disk_usage(out).free
                raise UserError(
                    f"{e}; {free / 1e9:.1f} GB are free: make room and run the same command again"
                ) from None
        info = _info(cutter, manifest, vocab_size)
        finish_dataset(out, info)
        source.release(len(source.inputs))
    return dataset_info(out)


def _header(source: Source, options: dict[str, Any]) -> dict[str, Any]:
    inputs = [{"name": file.name, "bytes": file.n_bytes, "sha256": file.sha256} for file in source.inputs]
    return {"source": source.description, "options": options | source.settings, "inputs": inputs}


def _check_same(out: Path, manifest: Manifest, source: Source, options: dict[str, Any]) -> None:
    """
    Raises:
        UserError: the folder holds something else, or was begun from other input or with other options.
    """
    ours = {shard["file"] for shard in manifest.shards}
    begun = f"{options['dataset']}_" if manifest.header else None  # its shard in hand may be there too
    for path in out.glob("*.bin"):
        if path.name not in ours and not (begun and path.name.startswith(begun)):
            raise UserError(
                f"{out}: holds {path.name}, which this command did not write: choose another --out"
            )
    if not manifest.shards:
        return
    old, new = manifest.header or {}, _header(source, options)
    hint = "give what it was begun with, another --out, or delete it to start over"
    for key in sorted(old["options"].keys() | new["options"].keys()):
        was, now = old["options"].get(key), new["options"].get(key)
        if was != now:
            raise UserError(f"{out}: begun with {key} = {was}, not {now}: {hint}")
    was_there = [(file["bytes"], file["sha256"]) for file in old["inputs"]]
    if len(was_there) != len(source.inputs):
        raise UserError(f"{out}: begun with {len(was_there)} input files, not {len(source.inputs)}: {hint}")
    for before, file in zip(was_there, source.inputs, strict=True):
        if before != (file.n_bytes, file.sha256):
            raise UserError(f"{out}: {file.name} is not the file it was begun with: {hint}")


def _finished(out: Path, manifest: Manifest) -> dict[str, Any] | None:
    """dataset.json of a folder that is complete, else None."""
    if not manifest.shards or not (out / INFO_NAME).exists():
        return None
    try:
        for split in ("val", "train"):
            TokenStream(out, split)
        return dataset_info(out)
    except UserError as e:
        print(f"going on: {e}")
        return None


def _adopt(out: Path, cutter: ShardCutter, manifest: Manifest, header: dict[str, Any]) -> None:
    """Take over the finished shards, up to the first that is damaged; clear away what is no such shard."""
    shards = manifest.shards
    good = 0
    with tqdm(shards, desc="checking what is there", unit="shard", leave=False, disable=None) as bar:
        for shard in bar if shards else ():
            try:
                cutter.adopt(shard)
            except UserError as e:
                bar.write(f"made again from here on: {e}", file=sys.stderr)
                break
            good += 1
    manifest.restart(header, shards[:good])
    kept = {shard["file"] for shard in manifest.shards}
    for path in (*out.glob(f"{cutter.dataset}_*.bin"), *out.glob(f".{cutter.dataset}_*.bin.tmp")):
        if path.name not in kept:
            path.unlink()


def _expected_tokens(source: Source, options: dict[str, Any]) -> int:
    expected = source.expected_tokens
    if options["tokenizer"] == "bytes":
        expected = int(expected * BYTES_PER_TOKEN)
    return min(expected, options["max_tokens"] or expected)


def _check_space(out: Path, source: Source, options: dict[str, Any], n_tokens: int) -> None:
    """
    Raises:
        UserError: the disk has less room than the shards to come are expected to need.
    """
    need = 2 * max(0, _expected_tokens(source, options) - n_tokens) + source.temporary_bytes
    free = shutil.disk_usage(out).free
    if free < need:
        raise UserError(
            f"{out}: {free / 1e9:.1f} GB free: expected about {need / 1e9:.1f} GB for the tokens to come "
            "(--out chooses another disk, --max-tokens less of the data)"
        )


def _disk_full(error: UserError) -> bool:
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def _tokenise_all(source: Source, cutter: ShardCutter, options: dict[str, Any], workers: Workers) -> None:
    """Everything from the cutter's cursor on, with a bar over tokens."""
    if cutter.has_all:
        return
    bar = progress_bar(cutter.folder.name, _expected_tokens(source, options), "tok", cutter.n_tokens)
    with bar, workers:

        def show(refresh: bool = True) -> None:
            words = (f"{cutter.n_shards} shards", f"{workers.n} workers", source.status())
            bar.set_postfix_str(", ".join(word for word in words if word), refresh)

        source.while_waiting = lambda: show(refresh=sys.stderr.isatty())
        blocks = read_blocks(source, cutter.cursor)
        for block, tokens in tokenised_blocks(blocks, workers):
            cutter.add(block, tokens)
            source.release(cutter.first_input)
            if block.done > 0.01:  # enough to estimate from
                estimate = int(cutter.n_tokens / block.done)
                bar.total = min(estimate, options["max_tokens"] or estimate)
            show(refresh=False)
            bar.update(cutter.n_tokens - bar.n)
            if cutter.has_all:
                break
        _check_train(cutter, options)
        cutter.finish()
        show()


def _check_train(cutter: ShardCutter, options: dict[str, Any]) -> None:
    out, n_tokens = cutter.folder, cutter.n_tokens
    if n_tokens == 0:
        raise UserError(f"{out}: the input has no documents with text")
    if not cutter.splits["train"].n_tokens:
        raise UserError(
            f"{out}: the input has {n_tokens:,} tokens: expected more than one shard of "
            f"{options['shard_size']:,}, which is validation; try --shard-size {max(1, n_tokens // 10)}"
        )


def _info(cutter: ShardCutter, manifest: Manifest, vocab_size: int) -> dict[str, Any]:
    """What dataset.json is to hold."""
    header = manifest.header or {}
    documents = [shard["documents"] for shard in manifest.shards]
    splits = {
        split: writer.counts(sum(documents[:1] if split == "val" else documents[1:]))
        for split, writer in cutter.splits.items()
    }
    return {
        "dataset": cutter.dataset,
        "tokenizer": header["options"]["tokenizer"],
        "vocab_size": vocab_size,
        "source": header["source"],
        "rows": dict(sorted(cutter.notes.items())),
        "splits": splits,
        "shards": [file for writer in cutter.splits.values() for file in writer.files],
    }


# ---------------------------------------------------------------- command line


class Stopped(KeyboardInterrupt):
    """SIGTERM."""


def _stop(signum: int, frame: Any) -> NoReturn:
    raise Stopped


def _count(text: str) -> int:
    value = int(text.replace("_", "")) if text.replace("_", "").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return value


def _shard_size(text: str) -> int:
    value = _count(text)
    if value > MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at most {MAX_TOKENS}")
    return value


def _parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--sample",
        choices=("10BT", "100BT", "350BT"),
        default="10BT",
        help="how many tokens (default: %(default)s)",
    )
    add("--edu", action="store_true", help="FineWeb-Edu instead of FineWeb")
    add(
        "--revision",
        default="main",
        metavar="REV",
        help="branch, tag or commit on the hub (default: %(default)s)",
    )
    add("--files", nargs="+", metavar="PATTERN", help="tokenise local files instead, in order of their paths")
    add("--pretokenized", action="store_true", help="fetch the ready shards of kjj0/fineweb10B-gpt2 instead")
    add("--shards", type=_count, metavar="N", help="--pretokenized: training shards to fetch (default: all)")
    add("--out", metavar="DIR", help="folder to write (default: data/fineweb10B and so on in this repo)")
    add(
        "--shard-size",
        type=_shard_size,
        default=10**8,
        metavar="N",
        help="tokens per shard (default: %(default)s)",
    )
    add("--max-tokens", type=_count, metavar="N", help="stop after so many tokens (default: all there are)")
    add(
        "--workers",
        type=_count,
        default=n_cores(),
        metavar="N",
        help="processes that tokenise (default: %(default)s)",
    )
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="default: %(default)s")
    args = parser.parse_args()
    for mode, unread in UNREAD.items():
        if getattr(args, mode.removeprefix("--")):
            for option in unread:
                if any(arg.partition("=")[0] == option for arg in sys.argv[1:]):
                    parser.error(f"{option}: not together with {mode}")
    if args.shards and not args.pretokenized:
        parser.error("--shards: only with --pretokenized")
    if args.max_tokens and args.max_tokens <= args.shard_size:
        parser.error(
            f"--max-tokens {args.max_tokens}: expected more than --shard-size {args.shard_size}, "
            "the first shard of which is validation"
        )
    return args


def n_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    args = _parse_args()
    out = Path(args.out) if args.out else ROOT / "data" / _default_name(args)
    signal.signal(signal.SIGTERM, _stop)
    try:
        info = fetch_pretokenized(out, args.shards) if args.pretokenized else _build(args, out)
    except KeyboardInterrupt as e:
        print("stopped; what is finished stays: run the same command again to go on", file=sys.stderr)
        sys.stderr.flush()
        os._exit(143 if isinstance(e, Stopped) else 130)  # at once: a download may be under way
    _print_summary(out, info)


def _print_summary(out: Path, info: dict[str, Any]) -> None:
    print(f"source   {info['source']}")
    if info["rows"]:
        print(f"rows     {', '.join(f'{n:,} {note}' for note, n in sorted(info['rows'].items()))}")
    for name, split in info["splits"].items():
        print(
            f"{name:8} {split['tokens']:,} {info['tokenizer']} tokens, {split['documents']:,} documents, "
            f"{split['shards']} shards, sha256 {split['sha256']}"
        )
    print(f"folder   {out}")


def _default_name(args: argparse.Namespace) -> str:
    if args.files:
        return "fineweb_files"
    return f"{'fineweb_edu' if args.edu else 'fineweb'}{args.sample.removesuffix('T')}"


def _build(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    options = {
        "dataset": "fineweb_edu" if args.edu else "fineweb",
        "tokenizer": args.tokenizer,
        "shard_size": args.shard_size,
        "max_tokens": args.max_tokens,
    }
    get_tokenizer(args.tokenizer)  # if its files cannot be had, say so before anything is fetched
    if args.files:
        source: Source = LocalFiles(args.files)
    else:
        name = "HuggingFaceFW/fineweb-edu" if args.edu else "HuggingFaceFW/fineweb"
        known = Manifest(out).header
        source = HubFiles(name, f"sample/{args.sample}", args.revision, out / DOWNLOADS_NAME, known)
    return build(source, out, options, args.workers)


if __name__ == "__main__":
    run_main(main)
