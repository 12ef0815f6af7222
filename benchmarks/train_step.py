"""Time of whole training steps, softmax and LSSAR (or any configs) in turn in one run.

    python -m benchmarks.train_step                                   # the demo's model on CPU
    python -m benchmarks.train_step configs/softmax.toml configs/lssar.toml --steps 20
    python -m benchmarks.train_step --train.seq-len 1024 --train.micro-batch 1    # overrides, of all configs

All models are in one process and take their steps alternately, so that a drifting machine slows all; a ratio
is the median over the rounds. CPU time is that of the process: with one thread it leaves out what other
processes take. Data must be prepared (python -m data.python_source). With --out FILE also {name: median ratio
of CPU time, on CUDA of step time} as JSON, which `python -m lab.report --comparison` reads.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

import train
from config import load_config
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import join_world
from infra.files import write_json
from training.run_log import RunLog
from training.state import TrainState


def timed_step(state: TrainState) -> tuple[float, float]:
    """Seconds of a step: elapsed, and of the process's CPU time."""
    start, cpu_start = time.perf_counter(), time.process_time()
    train.train_step(state, RunLog(state))
    if state.world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu_start


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.usage = "%(prog)s [CONFIG.toml ...] [--steps N] [--section.key VALUE ...]"
    parser.add_argument("--steps", type=positive_int, default=15, help="steps of each config (default: 15)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the ratios as JSON")
    first = next((i for i, arg in enumerate(sys.argv) if i and arg.startswith("-")), len(sys.argv))
    args, overrides = parser.parse_known_args(sys.argv[first:])
    if args.out and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: expected a file in a folder that exists")
    paths = sys.argv[1:first] or ["configs/demo_softmax.toml", "configs/demo_lssar.toml"]
    configs = [load_config(path, overrides) for path in paths]
    with join_world(configs[0].train.device) as world:
        states = [TrainState(config, world) for config in configs]
        for state in states:
            state.step = state.config.attention.reweight_p_warmup  # from the full p on
            timed_step(state), timed_step(state)  # warm-up, and compilation
        times = [[timed_step(state) for state in states] for _ in range(args.steps)]

    train_config = configs[0].train
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {world.device.type}, "
        f"{states[0].raw_model.n_params() / 1e6:.2f}M parameters, T = {train_config.seq_len}, "
        f"{train_config.batch_tokens} tokens a step, {args.steps} steps\n"
    )
    print("| config                     | tokens/s | step time over the first | CPU time over the first |")
    print("|----------------------------|---------:|-------------------------:|------------------------:|")
    medians = {}
    for i, config in enumerate(configs):
        rate = config.train.batch_tokens / statistics.median(row[i][0] for row in times)
        cells = []
        for clock in (0, 1):
            ratios = sorted(row[i][clock] / row[0][clock] for row in times)
            cells.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
            if clock == (world.device.type == "cpu"):
                medians[config.name] = statistics.median(ratios)
        name = config.name
        print(f"| {name:26} | {rate:8.0f} | {cells[0]:>24} | {cells[1]:>23} |")
    if args.out:
        write_json(medians, args.out)


if __name__ == "__main__":
    run_main(main)
