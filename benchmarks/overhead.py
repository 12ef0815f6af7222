"""What safety costs: train.py's steps against the plainest correct loop with the same model code.

    python -m benchmarks.overhead                          # the demo's model on CPU, 200 steps of each
    python -m benchmarks.overhead configs/softmax.toml --steps 100

Takes in turn, in blocks of 50 steps in one process,
  plain       read, forward, backward, clip, optimiser step: no log, no guard, no checkpoint
  train.py    the same steps as train.py takes them: guard, metrics.jsonl, a line every log.every steps
  + saving    the same with a checkpoint after 25 of the 50, in the background, until it is written
and prints the ratios of the times. The ratio of two plain loops is the noise.
"""

import gc
import tempfile
import time
from collections.abc import Callable

import torch

import train
from config import load_config
from infra.cli import ArgumentParser, positive_int, run_main
from infra.distributed import World, join_world
from schema import Config
from training.checkpoint import CheckpointWriter
from training.optim import set_learning_rates
from training.run_log import RunLog
from training.state import TrainState

BLOCK = 50


def plain(config: Config, world: World) -> Callable[[], None]:
    state = TrainState(config, world)

    def step() -> None:
        set_learning_rates(state.optimizers, config.optimizer, state.step, config.train.max_steps)
        batch = state.batches.read(state.step)
        for micro_batch in batch:
            x, y = (tokens.to(world.device) for tokens in micro_batch)
            with state.raw_model.autocast():
                loss = state.model(x, y) / len(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(state.raw_model.parameters(), config.train.grad_clip)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.step += 1

    return step


def guarded(config: Config, world: World, save: bool) -> Callable[[], None]:
    state = TrainState(config, world)
    log = RunLog(state)
    log.open_folder([])
    log.print = lambda *lines: None  # type: ignore[method-assign]
    writer = CheckpointWriter(config.run_dir, 2, 0)

    def step() -> None:
        train.train_step(state, log)
        writer.check()
        if state.is_due(config.log.every):
            log.flush()
        if save and state.step % BLOCK == BLOCK // 2:
            train.save(state, writer)
        if state.step % BLOCK == 0:
            writer.finish()

    return step


def timed_block(step: Callable[[], None], world: World) -> float:
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("config", nargs="?", default="configs/demo_softmax.toml")
    parser.add_argument("--steps", type=positive_int, default=200, help="of each (default: %(default)s)")
    args = parser.parse_args()
    gc.disable()  # as in train.py
    n_blocks = max(1, args.steps // BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        configs = [load_config(args.config, ["--log.dir", folder, "--name", name]) for name in "abcd"]
        with join_world(configs[0].train.device) as world:
            steps = {
                "plain": plain(configs[0], world),
                "plain again": plain(configs[1], world),
                "train.py": guarded(configs[2], world, save=False),
                "+ saving": guarded(configs[3], world, save=True),
            }
            rounds = [[timed_block(step, world) for step in steps.values()] for _ in range(1 + n_blocks)]
    print(f"{args.config}, {n_blocks} blocks of {BLOCK} steps, {torch.get_num_threads()} threads\n")
    print("| | mean ms a step | total time over plain |\n|---|---:|---:|")
    totals = [sum(seconds) for seconds in zip(*rounds[1:], strict=True)]  # the first block is warm-up
    for name, total in zip(steps, totals, strict=True):
        print(f"| {name} | {1000 * total / n_blocks / BLOCK:.1f} | {total / totals[0]:.3f} |")


if __name__ == "__main__":
    run_main(main)
