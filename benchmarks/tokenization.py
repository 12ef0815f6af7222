"""Speed of turning documents into shards, and of reading batches.

    python -m benchmarks.tokenization web_sample.parquet     # any parquet file with a text column

Writing: the file's rows, repeated to --tokens, go through
  one process    a loop over tiktoken's encode_ordinary, which writes nothing: the reference
  usual recipe   multiprocessing.Pool.imap over rows, chunksize 16, lists of tokens handed to the writer
  data.prepare   `python -m data.prepare --files`, with start-up, hashing and fsync
each in turn, --rounds times.

Reading: --batches of batches at T = 1024 out of 20 shards, in each order.
"""

import itertools
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
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
from data.shards import ShardWriter
from infra.cli import ArgumentParser, UserError, n_cores, positive_int, run_main

ROOT = Path(__file__).resolve().parents[1]


def texts(path: Path) -> Iterator[str]:
    for batch in pq.ParquetFile(path).iter_batches(64, columns=["text"]):
        yield from batch.column(0).to_pylist()


def encode(text: str) -> list[int]:
    return [50256, *tiktoken.get_encoding("gpt2").encode_ordinary(text)]


def one_process(path: Path) -> int:
    return sum(len(encode(text)) for text in texts(path))


def usual_recipe(path: Path, out: Path) -> None:
    with multiprocessing.Pool(n_cores()) as pool, (out / "tokens.bin").open("wb") as file:
        for tokens in pool.imap(encode, texts(path), chunksize=16):
            file.write(np.array(tokens, np.uint16).tobytes())


def writing(path: Path, n_tokens: int, rounds: int, folder: Path) -> None:
    sample = pa.table({"text": list(texts(path))})
    once = one_process(path)
    repeats = -(-n_tokens // once)
    repeated, out = folder / "repeated.parquet", folder / "out"
    with pq.ParquetWriter(repeated, sample.schema, compression="zstd") as writer:
        for _ in range(repeats):
            writer.write_table(sample, row_group_size=1000)
    python = [
        sys.executable,
        "-c",
        "import sys; from benchmarks.tokenization import *; exec(sys.argv[1])",
    ]
    commands = {
        "one process": [*python, f"one_process(Path({str(repeated)!r}))"],
        "usual recipe": [*python, f"usual_recipe(Path({str(repeated)!r}), Path({str(out)!r}))"],
        "data.prepare": [
            sys.executable,
            "-m",
            "data.prepare",
            "--files",
            str(repeated),
            "--val-tokens",
            "1000000",
            "--out",
            str(out),
        ],
    }
    seconds: dict[str, list[float]] = {way: [] for way in commands}
    for _, way in itertools.product(range(rounds), commands):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        start = time.perf_counter()
        subprocess.run(commands[way], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds[way].append(time.perf_counter() - start)
    print(f"{repeats * once:,} tokens, {n_cores()} cores, {rounds} rounds\n")
    print(
        "| | M tokens/s | one process' time over it | usual recipe's time over it |\n|---|---:|---:|---:|"
    )
    for way in commands:
        ratios = [
            np.divide(seconds[other], seconds[way]) for other in ("one process", "usual recipe")
        ]
        cells = " | ".join(f"{np.median(r):.2f} ({r.min():.2f}-{r.max():.2f})" for r in ratios)
        print(
            f"| {way} | {repeats * once / np.median(seconds[way]) / 1e6:.2f} | {cells} |",
            flush=True,
        )


def reading(n_batches: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, "random", "train", 10**7, 1)
    for _ in range(20):
        writer.add(rng.integers(0, 50257, 10**7, dtype=np.uint16))
    stream = TokenStream(folder, "train")
    print(
        f"\n20 shards, {stream.n_tokens:,} tokens, one process, {n_batches:,} batches of each kind\n"
    )
    print("| order | rows a batch | M tokens/s |\n|---|---:|---:|")
    orders: tuple[Literal["sequential", "shuffled"], ...] = ("sequential", "shuffled")
    for order, n_seq in itertools.product(orders, (8, 32)):
        start = time.perf_counter()
        for step in range(n_batches):
            train_batch(stream, step, n_seq, 1024, order, seed=1)
        rate = n_batches * n_seq * 1024 / (time.perf_counter() - start) / 1e6
        print(f"| {order} | {n_seq} | {rate:.0f} |", flush=True)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("parquet", type=Path, help="documents in a column named text")
    parser.add_argument(
        "--tokens",
        type=positive_int,
        default=110_000_000,
        help="at least, more than a shard (%(default)s)",
    )
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--batches", type=positive_int, default=2000, help="to read (%(default)s)")
    args = parser.parse_args()
    try:
        columns = pq.read_schema(args.parquet).names
    except (OSError, pa.ArrowInvalid) as e:
        raise UserError(
            f"{args.parquet}: expected a parquet file: {str(e).splitlines()[0]}"
        ) from None
    if "text" not in columns:
        raise UserError(f"{args.parquet}: has {', '.join(columns)}: expected a column named text")
    with tempfile.TemporaryDirectory() as folder:
        writing(args.parquet, args.tokens, args.rounds, Path(folder))
        reading(args.batches, Path(folder))


if __name__ == "__main__":
    run_main(main)
