"""Speed and memory of turning documents into shards and of reading batches, and resuming after kills.

    python -m benchmarks.tokenization web_sample.parquet     # any parquet file with a text column

Writing: the file's rows, repeated to --tokens, through
  one process    a loop over tiktoken's encode_ordinary, nothing written: the reference
  usual recipe   multiprocessing.Pool.imap over rows, chunksize 16, lists of tokens handed to the writer
  data.fineweb   `python -m data.fineweb --files`, everything included: start-up, hashing, fsync
each in turn, --rounds times, with as many processes as there are cores. Memory is the peak over time of
the process tree's proportional set size (PSS: shared pages are counted once).

Reading: batches at T = 1024 out of 20 shards, --batches of them in each order.

Stopping: data.fineweb killed by SIGKILL at --kills random moments and started again each time; every file it
leaves must be, byte for byte, that of an uninterrupted run.

Prints Markdown tables for benchmarks/RESULTS.md. (Not called tokenize.py: that is a module of Python's.)
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken

from data.batches import train_batch
from data.dataset import TokenStream
from data.fineweb import n_cores
from data.shards import write_shard
from data.tokenizer import get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main

ROOT = Path(__file__).resolve().parents[1]
SHARD_SIZE = 10**8  # the default of data.fineweb
N_SHARDS, SHARD_TOKENS = 20, 10_000_000  # of the reading part


# ---------------------------------------------------------------- writing


def rows(path: Path) -> Iterator[str]:
    for batch in pq.ParquetFile(path).iter_batches(64, columns=["text"]):
        yield from batch.column(0).to_pylist()


def one_process(path: Path, out: Path) -> None:
    encoding = tiktoken.get_encoding("gpt2")
    for text in rows(path):
        encoding.encode_ordinary(text)


def encode(text: str) -> list[int]:
    encoding = tiktoken.get_encoding("gpt2")
    return [encoding.eot_token, *encoding.encode_ordinary(text)]


def usual_recipe(path: Path, out: Path) -> None:
    shard, filled, index = np.empty(SHARD_SIZE, np.uint16), 0, 0
    with multiprocessing.Pool(n_cores()) as pool:
        for document in pool.imap(encode, rows(path), chunksize=16):
            tokens = np.array(document)
            while len(tokens):
                part, tokens = np.split(tokens, [SHARD_SIZE - filled])
                shard[filled : filled + len(part)] = part
                filled += len(part)
                if filled == SHARD_SIZE:
                    (out / f"{index}.bin").write_bytes(shard.tobytes())
                    filled, index = 0, index + 1
    (out / f"{index}.bin").write_bytes(shard[:filled].tobytes())


def commands(path: Path, out: Path) -> dict[str, list[str]]:
    """The three ways, each as a command."""
    call = "from sys import argv; from benchmarks.tokenization import *; {}(Path(argv[1]), Path(argv[2]))"
    return {
        "one process": [sys.executable, "-c", call.format("one_process"), str(path), str(out)],
        "usual recipe": [sys.executable, "-c", call.format("usual_recipe"), str(path), str(out)],
        "data.fineweb": [sys.executable, "-m", "data.fineweb", "--files", str(path), "--out", str(out)],
    }


def proportional_size(root: int) -> int:
    """Bytes of PSS of a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    total, todo = 0, [root]
    while todo:
        process = todo.pop()
        todo += children.get(process, [])
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += 1024 * sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def measure(command: list[str], out: Path) -> tuple[float, int]:
    """Seconds and peak bytes of one way."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    peak, done = 0, threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.2):
            peak = max(peak, proportional_size(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    if process.returncode:
        raise UserError(f"{' '.join(command)[:200]}: exit status {process.returncode}")
    return seconds, peak


def repeated(path: Path, n_tokens: int, folder: Path) -> tuple[Path, int]:
    """A parquet file with the rows of `path` repeated, and its number of tokens."""
    texts = list(rows(path))
    encoding = get_tokenizer("gpt2")
    once = sum(1 + len(tokens) for tokens in encoding.encode_ordinary_batch(texts, num_threads=n_cores()))
    times = -(-n_tokens // once)
    big = folder / "repeated.parquet"
    table = pa.table({"text": texts})
    with pq.ParquetWriter(big, table.schema, compression="zstd") as writer:
        for _ in range(times):
            writer.write_table(table, row_group_size=1000)
    return big, times * once


def writing(path: Path, n_tokens: int, rounds: int, folder: Path) -> None:
    big, n_tokens = repeated(path, n_tokens, folder)
    out, n_bytes = folder / "out", big.stat().st_size
    ways = commands(big, out)
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, command in ways.items():
            taken[name].append(measure(command, out))
    shutil.rmtree(out)
    big.unlink()
    print(f"{n_tokens:,} tokens, {n_bytes / 1e6:.0f} MB of parquet, {n_cores()} cores, {rounds} rounds\n")
    print("| | M tokens/s | one process' time over it | usual recipe's time over it | peak memory, MB |")
    print("|---|---:|---:|---:|---:|")
    for name, results in taken.items():
        rate = n_tokens / statistics.median(seconds for seconds, _ in results) / 1e6
        ratios = [
            [other / own for (other, _), (own, _) in zip(taken[reference], results, strict=True)]
            for reference in ("one process", "usual recipe")
        ]
        cells = [f"{statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})" for r in ratios]
        peak = max(peak for _, peak in results) / 1e6
        print(f"| {name} | {rate:.2f} | {cells[0]} | {cells[1]} | {peak:.0f} |", flush=True)


# ---------------------------------------------------------------- stopping and reading


def stopping(path: Path, kills: int, folder: Path) -> None:
    big, n_tokens = repeated(path, 10_000_000, folder)
    print(f"\n{n_tokens:,} tokens in shards of 200,000, killed at random moments")
    fineweb = [sys.executable, "-m", "data.fineweb", "--files", str(big), "--shard-size", "200000"]
    alone = folder / "alone"
    start = time.perf_counter()
    subprocess.run([*fineweb, "--out", str(alone)], check=True, capture_output=True, cwd=ROOT)
    whole = time.perf_counter() - start
    rng, killed = np.random.default_rng(0), 0
    while killed < kills:
        out, shards = folder / f"stopped{killed}", []
        command = [*fineweb, "--out", str(out)]
        finished = False
        while not finished and killed < kills:
            process = subprocess.Popen(command, stdout=-3, stderr=-3, cwd=ROOT)
            try:
                finished = process.wait(timeout=rng.uniform(0.3, 0.8) * whole) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
                shards.append(len(list(out.glob("*.bin"))))
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        if digests(out) != digests(alone):
            raise UserError(f"{out}: not the bytes of {alone}")
        print(f"{killed} kills so far, after {shards} shards: the same bytes", flush=True)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def resident() -> str:
    """MB of anonymous and of file-backed memory of this process."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = {line[0]: int(line[1]) / 1e3 for line in lines if line[0] in ("RssAnon:", "RssFile:")}
    return f"{found['RssAnon:']:.0f} + {found['RssFile:']:.0f}"


def reading(n_batches: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    for index in range(1, N_SHARDS + 1):
        tokens = rng.integers(0, 50257, SHARD_TOKENS, dtype=np.uint16)
        write_shard(folder / f"random_train_{index:06d}.bin", tokens)
    stream = TokenStream(folder, "train")
    print(
        f"\n{N_SHARDS} shards, {stream.n_tokens:,} tokens, one process, {n_batches:,} batches of each kind\n"
    )
    print("| order | rows a batch | M tokens/s | MB at the start, own + mapped | MB at the end |")
    print("|---|---:|---:|---:|---:|")
    orders: tuple[Literal["sequential", "shuffled"], ...] = ("sequential", "shuffled")
    for order, n_seq in itertools.product(orders, (8, 32)):
        train_batch(stream, 0, n_seq, 1024, order, seed=1)
        before, start = resident(), time.perf_counter()
        for step in range(n_batches):
            train_batch(stream, step, n_seq, 1024, order, seed=1)
        rate = n_batches * n_seq * 1024 / (time.perf_counter() - start) / 1e6
        print(f"| {order} | {n_seq} | {rate:.0f} | {before} | {resident()} |", flush=True)


def main() -> None:
    parser = ArgumentParser(__doc__, prog="python -m benchmarks.tokenization")
    add = parser.add_argument
    add("parquet", type=Path, help="documents in a column named text")
    add("--tokens", type=int, default=110_000_000, help="at least, more than a shard (default: %(default)s)")
    add("--rounds", type=int, default=3, help="default: %(default)s")
    add("--batches", type=int, default=100_000, help="of the reading part (default: %(default)s)")
    add("--kills", type=int, default=20, help="of the stopping part (default: %(default)s)")
    args: argparse.Namespace = parser.parse_args()
    if not args.parquet.is_file():
        raise UserError(f"{args.parquet}: no such file")
    with tempfile.TemporaryDirectory() as folder:
        writing(args.parquet, args.tokens, args.rounds, Path(folder))
        reading(args.batches, Path(folder))
        stopping(args.parquet, args.kills, Path(folder))


if __name__ == "__main__":
    run_main(main)
