"""Time of whole training steps, softmax and LSSAR (or any configs) in turn in one run.

    python -m benchmarks.train_step                                   # the demo's model on CPU
    python -m benchmarks.train_step configs/softmax.toml configs/lssar.toml --steps 20
    python -m benchmarks.train_step --train.seq-len 1024 --train.micro-batch 1    # overrides, of all configs
    python -m benchmarks.train_step --plain                           # what log and loader cost

All models are in one process and take their steps alternately, so that a drifting machine slows
all. A ratio is the median over the rounds. CPU time is that of the process: with one thread it
leaves out what other processes take. Data must be prepared (python -m data.python_source). --plain
adds a first row: the first config by the plainest correct loop with the same model.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import train
from benchmarks.timing import print_header, print_row, ratio, seconds
from config import load_config
from infra.cli import ArgumentParser, positive_int, run_main
from infra.distributed import join_world
from training.optim import set_learning_rates
from training.run_log import RunLog
from training.state import TrainState


def train_step(state: TrainState) -> None:
    train.train_step(state, RunLog(state))


def plain_step(state: TrainState) -> None:
    """A step without log, a look for NaN and reading ahead."""
    set_learning_rates(
        state.optimizers, state.config.optimizer, state.step, state.config.train.max_steps
    )
    batch = state.batches.read(state.step)
    for micro_batch in batch:
        x, y = (tokens.to(state.world.device) for tokens in micro_batch)
        with state.raw_model.autocast():
            loss = state.model(x, y) / len(batch)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(state.raw_model.parameters(), state.config.train.grad_clip)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1


def timed(step: Callable[[TrainState], None], state: TrainState) -> tuple[float, float]:
    """Seconds of a step: elapsed, and of the process's CPU time."""

    def whole() -> None:
        step(state)
        if state.world.device.type == "cuda":
            torch.cuda.synchronize()

    start = time.process_time()
    elapsed = seconds(whole)
    return elapsed, time.process_time() - start


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.usage = "%(prog)s [CONFIG.toml ...] [--steps N] [--section.key VALUE ...]"
    parser.add_argument("--steps", type=positive_int, default=15, help="of each config (15)")
    parser.add_argument("--plain", action="store_true", help="also the plainest loop")
    is_option = [word.startswith("-") for word in sys.argv]
    first = is_option.index(True) if any(is_option) else len(sys.argv)
    args, overrides = parser.parse_known_args(sys.argv[first:])
    paths = sys.argv[1:first] or ["configs/demo_softmax.toml", "configs/demo_lssar.toml"]
    configs = [load_config(path, overrides) for path in paths]
    names = [config.name for config in configs]
    steps = [train_step] * len(configs)
    if args.plain:
        configs.insert(0, configs[0])
        names.insert(0, "plain loop")
        steps.insert(0, plain_step)
    with join_world(configs[0].train.device) as world:
        states = [TrainState(config, world) for config in configs]
        # The models share their code, and torch would silently run it uncompiled beyond the limit.
        torch._dynamo.config.recompile_limit *= len(configs)
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for state in states:
            state.step = state.config.attention.reweight_p_warmup  # from the full p on
        rounds = [list(map(timed, steps, states)) for _ in range(3 + args.steps)]
    rounds = rounds[3:]  # without warm-up and compilation
    settings = configs[0].train
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {world.device.type}, "
        f"{states[0].raw_model.n_params() / 1e6:.2f}M parameters, T = {settings.seq_len}, "
        f"{settings.batch_tokens} tokens a step, {args.steps} steps\n"
    )
    print_header("config", "tokens/s", "step time over the first", "CPU time over the first")
    times = np.array(rounds)  # (rounds, configs, clocks)
    for i, name in enumerate(names):
        rate = settings.batch_tokens / np.median(times[:, i, 0])
        ratios = [ratio(times[:, i, clock], times[:, 0, clock]) for clock in (0, 1)]
        print_row(name, f"{rate:.0f}", *ratios)


if __name__ == "__main__":
    run_main(main)
