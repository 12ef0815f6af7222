"""Tokens per second of whole training steps, softmax and LSSAR in turn in one run.

    python benchmarks/train_step.py                                   # the demo's model on CPU
    python benchmarks/train_step.py configs/softmax.toml configs/lssar.toml --steps 20

Both trainers live in one process and take their steps alternately, so that a drifting machine slows
both; the ratio is the median over the pairs. Data must be prepared (python data/python_source.py).
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from attention import describe_attention
from config import load_config
from infra.cli import ArgumentParser, run_main
from infra.distributed import join_world
from train import Trainer
from training.run_log import DryLog


def timed_step(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.train_step(DryLog(trainer.config, trainer.world, trainer.flops_per_step))
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "configs", nargs="*", default=["configs/demo_softmax.toml", "configs/demo_lssar.toml"],
        help="the first is the baseline",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=15, help="steps of each (default: 15)")
    parser.add_argument("--seq-len", type=int, help="override train.seq_len, at the same tokens per step")
    args = parser.parse_args()
    overrides = []
    if args.seq_len:
        overrides = ["--train.seq_len", str(args.seq_len), "--train.micro_batch", "1"]
    configs = [load_config(path, overrides) for path in args.configs]
    with join_world(configs[0].train.device) as world:
        trainers = [Trainer(config, world) for config in configs]
    for trainer in trainers:
        timed_step(trainer), timed_step(trainer)  # warm-up, and compilation
    times = [[timed_step(trainer) for trainer in trainers] for _ in range(args.steps)]

    train = configs[0].train
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {trainers[0].world.device.type}, "
          f"{trainers[0].raw_model.n_params() / 1e6:.2f}M parameters, T = {train.seq_len}, "
          f"{train.batch_tokens} tokens a step, {args.steps} steps\n")  # fmt: skip
    print("| attention                  | tokens/s | step time over the first |")
    print("|----------------------------|---------:|-------------------------:|")
    for i, config in enumerate(configs):
        rate = train.batch_tokens / statistics.median(row[i] for row in times)
        ratios = [row[i] / row[0] for row in times]
        print(f"| {describe_attention(config.attention):26} | {rate:8.0f} | {statistics.median(ratios):8.2f} "
              f"({min(ratios):.2f}-{max(ratios):.2f})      |")  # fmt: skip


if __name__ == "__main__":
    run_main(main)
