"""Speed of turning documents into shards, and of reading batches.

    python -m benchmarks.tokenization web_sample.parquet     # any parquet file with a text column

Writing: the file's rows, repeated to --tokens, go through
  one process    a loop over tiktoken's encode_ordinary, which writes nothing: the reference
  data.prepare   `python -m data.prepare --files`, with start-up, hashing and fsync
each in turn, --rounds times.

Reading: --batches of batches at T = 1024 out of 20 shards, in each order.
"""

import itertools
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken

from benchmarks.timing import print_header, print_row, ratio, seconds
from data.batches import train_batch
from data.dataset import TokenStream
from data.shards import ShardWriter
from infra.cli import ArgumentParser, n_cores, positive_int, run_main

ROOT = Path(__file__).resolve().parents[1]


def texts(path: Path) -> Iterator[str]:
    for batch in pq.ParquetFile(path).iter_batches(64, columns=["text"]):
        yield from batch.column(0).to_pylist()


def encode(text: str) -> list[int]:
    return [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]


def one_process(path: Path) -> int:
    return sum(len(encode(text)) for text in texts(path))


def writing(path: Path, n_tokens: int, rounds: int, folder: Path) -> None:
    sample = pa.table({"text": list(texts(path))})
    once = one_process(path)
    repeats = -(-n_tokens // once)
    repeated, out = folder / "repeated.parquet", folder / "out"
    with pq.ParquetWriter(repeated, sample.schema, compression="zstd") as writer:
        for _ in range(repeats):
            writer.write_table(sample, row_group_size=1000)
    code = "import sys; from benchmarks.tokenization import *; exec(sys.argv[1])"
    options = ["--files", str(repeated), "--val-tokens", "1000000", "--out", str(out)]
    commands = {
        "one process": [sys.executable, "-c", code, f"one_process(Path({str(repeated)!r}))"],
        "data.prepare": [sys.executable, "-m", "data.prepare", *options],
    }
    times: dict[str, list[float]] = {way: [] for way in commands}
    for _, way in itertools.product(range(rounds), commands):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        run = partial(
            subprocess.run, commands[way], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        times[way].append(seconds(run))
    print(f"{repeats * once:,} tokens, {n_cores()} cores, {rounds} rounds\n")
    print_header("", "M tokens/s", "speed over one process")
    for way, each in times.items():
        rate = f"{repeats * once / statistics.median(each) / 1e6:.2f}"
        print_row(way, rate, ratio(times["one process"], each))


def reading(n_batches: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, "random", "train", 10**7, 1)
    for _ in range(20):
        writer.add(rng.integers(0, 50257, 10**7, dtype=np.uint16))
    stream = TokenStream(folder, "train")
    print(
        f"\n20 shards, {stream.n_tokens:,} tokens, one process, {n_batches:,} batches of each kind\n"
    )
    print_header("order", "rows a batch", "M tokens/s")
    orders: tuple[Literal["sequential", "shuffled"], ...] = ("sequential", "shuffled")
    for order, n_seq in itertools.product(orders, (8, 32)):

        def read() -> None:
            for step in range(n_batches):
                train_batch(stream, step, n_seq, 1024, order, seed=1)  # noqa: B023

        rate = n_batches * n_seq * 1024 / seconds(read) / 1e6
        print_row(order, n_seq, f"{rate:.0f}")


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("parquet", type=Path, help="documents in a column named text")
    tokens_help = "at least, more than a shard (%(default)s)"
    add("--tokens", type=positive_int, default=110_000_000, help=tokens_help)
    add("--rounds", type=positive_int, default=3)
    add("--batches", type=positive_int, default=2000, help="to read (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        writing(args.parquet, args.tokens, args.rounds, Path(folder))
        reading(args.batches, Path(folder))


if __name__ == "__main__":
    run_main(main)
