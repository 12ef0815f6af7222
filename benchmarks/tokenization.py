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

import hashlib
import itertools
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken

from data.batches import train_batch
from data.dataset import TokenStream
from data.shards import ShardWriter
from data.tokenizer import get_tokenizer
from infra.cli import ArgumentParser, UserError, n_cores, run_main

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


def proportional_size(group: int) -> int:
    """Bytes of PSS of a process group."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                lines = (stat.parent / "smaps_rollup").read_text().splitlines()
                total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measure(command: list[str], out: Path) -> tuple[float, float]:
    """Seconds and peak MB of one way."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    peak, start = 0, time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=-3, stderr=-3, start_new_session=True)
    while process.poll() is None:
        peak = max(peak, proportional_size(process.pid))
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    if process.returncode:
        raise UserError(f"{' '.join(command)[:200]}: exit status {process.returncode}")
    return time.perf_counter() - start, peak / 1e6


def repeated(path: Path, n_tokens: int, folder: Path) -> tuple[Path, int]:
    """A parquet file with the rows of `path` repeated, and its number of tokens."""
    table = pa.table({"text": list(rows(path))})
    tokens = get_tokenizer("gpt2").encode_ordinary_batch(table["text"].to_pylist(), num_threads=n_cores())
    once = sum(map(len, tokens)) + len(tokens)
    times, big = -(-n_tokens // once), folder / "repeated.parquet"
    with pq.ParquetWriter(big, table.schema, compression="zstd") as writer:
        for _ in range(times):
            writer.write_table(table, row_group_size=1000)
    return big, times * once


def writing(path: Path, n_tokens: int, rounds: int, folder: Path) -> None:
    big, n_tokens = repeated(path, n_tokens, folder)
    ways = commands(big, folder / "out")
    taken = {name: np.empty((rounds, 2)) for name in ways}  # seconds, peak MB
    for i, (name, command) in itertools.product(range(rounds), ways.items()):
        taken[name][i] = measure(command, folder / "out")
    print(f"{n_tokens:,} tokens, {n_cores()} cores, {rounds} rounds\n")
    print("| | M tokens/s | one process' time over it | usual recipe's time over it | peak memory, MB |")
    print("|---|---:|---:|---:|---:|")
    for name, (seconds, peak) in ((name, results.T) for name, results in taken.items()):
        ratios = [taken[reference][:, 0] / seconds for reference in ("one process", "usual recipe")]
        cells = " | ".join(f"{np.median(r):.2f} ({r.min():.2f}-{r.max():.2f})" for r in ratios)
        rate = n_tokens / np.median(seconds) / 1e6
        print(f"| {name} | {rate:.2f} | {cells} | {peak.max():.0f} |", flush=True)


# ---------------------------------------------------------------- stopping and reading


def stopping(path: Path, kills: int, folder: Path) -> None:
    big, n_tokens = repeated(path, 10_000_000, folder)
    print(f"\n{n_tokens:,} tokens in shards of 200,000, killed at random moments")
    fineweb = [sys.executable, "-m", "data.fineweb", "--files", str(big), "--shard-size", "200000", "--out"]
    start = time.perf_counter()
    subprocess.run([*fineweb, str(folder / "alone")], check=True, capture_output=True, cwd=ROOT)
    whole = time.perf_counter() - start
    rng, killed = np.random.default_rng(0), 0
    while killed < kills:
        out, finished = folder / f"stopped{killed}", False
        while not finished:
            limit = rng.uniform(0.3, 0.8) * whole if killed < kills else None
            try:  # at its limit `run` sends SIGKILL
                subprocess.run([*fineweb, str(out)], check=True, capture_output=True, cwd=ROOT, timeout=limit)
                finished = True
            except subprocess.TimeoutExpired:
                killed += 1
        if digests(out) != digests(folder / "alone"):
            raise UserError(f"{out}: not the bytes of {folder / 'alone'}")
        print(f"{killed} kills so far: the same bytes", flush=True)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def resident() -> str:
    """MB of anonymous and of file-backed memory of this process."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return " + ".join(f"{int(found[key].split()[0]) / 1e3:.0f}" for key in ("RssAnon", "RssFile"))


def reading(n_batches: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    with ShardWriter(folder, "random", "train", SHARD_TOKENS, 1) as writer:
        for _ in range(N_SHARDS):
            writer.add(rng.integers(0, 50257, SHARD_TOKENS, dtype=np.uint16))
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
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("parquet", type=Path, help="documents in a column named text")
    add("--tokens", type=int, default=110_000_000, help="at least, more than a shard (default: %(default)s)")
    add("--rounds", type=int, default=3, help="default: %(default)s")
    add("--batches", type=int, default=100_000, help="of the reading part (default: %(default)s)")
    add("--kills", type=int, default=20, help="of the stopping part (default: %(default)s)")
    args = parser.parse_args()
    if not args.parquet.is_file():
        raise UserError(f"{args.parquet}: no such file")
    with tempfile.TemporaryDirectory() as folder:
        writing(args.parquet, args.tokens, args.rounds, Path(folder))
        reading(args.batches, Path(folder))
        stopping(args.parquet, args.kills, Path(folder))


if __name__ == "__main__":
    run_main(main)
