"""Tokens per second of whole training steps, softmax and LSSAR in turn in one run.

    python -m benchmarks.train_step                                   # the demo's model on CPU
    python -m benchmarks.train_step configs/softmax.toml configs/lssar.toml --steps 20

Both models are in one process and take their steps alternately, so that a drifting machine slows both; the
ratio is the median over the pairs. Data must be prepared (python -m data.python_source).
"""

import statistics
import time

import torch

import train
from attention import describe_attention
from config import load_config
from infra.cli import ArgumentParser, run_main
from infra.distributed import join_world
from training.run_log import RunLog
from training.state import TrainState


def timed_step(state: TrainState) -> float:
    start = time.perf_counter()
    train.train_step(state, RunLog(state))
    if state.world.device.type == "cuda":
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
        states = [TrainState(config, world) for config in configs]
        for state in states:
            timed_step(state), timed_step(state)  # warm-up, and compilation
        times = [[timed_step(state) for state in states] for _ in range(args.steps)]

    first = configs[0].train
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {world.device.type}, "
        f"{states[0].raw_model.n_params() / 1e6:.2f}M parameters, T = {first.seq_len}, "
        f"{first.batch_tokens} tokens a step, {args.steps} steps\n"
    )
    print("| attention                  | tokens/s | step time over the first |")
    print("|----------------------------|---------:|-------------------------:|")
    for i, config in enumerate(configs):
        rate = first.batch_tokens / statistics.median(row[i] for row in times)
        ratios = [row[i] / row[0] for row in times]
        print(
            f"| {describe_attention(config.attention):26} | {rate:8.0f} | {statistics.median(ratios):8.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})      |"
        )


if __name__ == "__main__":
    run_main(main)
