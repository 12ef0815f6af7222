"""What safety costs: train.py's steps against the plainest correct loop with the same model code.

    python benchmarks/overhead.py                          # the demo's model on CPU, 200 steps of each
    python benchmarks/overhead.py configs/softmax.toml --steps 100

Takes in turn, in blocks of 50 steps in one process,
  plain       read, forward, backward, clip, optimiser step: no log, no guard, no checkpoint
  train.py    the same steps as train.py takes them: guard, metrics.jsonl, a line each log.every steps
  + saving    the same with a checkpoint after 25 of the 50, in the background; its end is waited for
and reports the ratios of the times. The quotient of one plain loop over another shows the noise.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from config import Config, load_config
from data.batches import train_batch
from infra.cli import ArgumentParser, run_main
from infra.distributed import World, join_world
from train import Trainer, no_collections, set_learning_rates
from training.checkpoint import CheckpointWriter
from training.run_log import RunLog

BLOCK = 50


def plain(config: Config, world: World) -> Callable[[], None]:
    trainer = Trainer(config, world)
    model, train = trainer.model, config.train

    def step() -> None:
        set_learning_rates(trainer.optimizers, config.optimizer, trainer.step, train.max_steps)
        n_micro = trainer.per_rank // trainer.micro
        for i in range(n_micro):
            batch = train_batch(
                trainer.train_stream, trainer.step, trainer.per_rank, train.seq_len, config.data.order,
                config.seed, i * trainer.micro, trainer.micro,
            )  # fmt: skip
            x, y = (torch.from_numpy(a).to(world.device) for a in batch)
            with trainer.raw_model.autocast():
                loss = model(x, y) / n_micro
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        for optimizer in trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        trainer.step += 1

    return step


def guarded(config: Config, world: World, save: bool) -> Callable[[], None]:
    trainer = Trainer(config, world)
    log = RunLog(config, world, 0, 0, trainer.flops_per_step)
    log.say = lambda text: None  # type: ignore[method-assign]
    writer = CheckpointWriter(config.run_dir, 2, None)

    def step() -> None:
        trainer.train_step(log)
        writer.check()
        if trainer.step % config.log.every == 0:
            log.flush()
        if save and trainer.step % BLOCK == BLOCK // 2:
            trainer.save(log, writer)
        if trainer.step % BLOCK == 0:
            writer.finish()

    return step


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("config", nargs="?", default="configs/demo_softmax.toml")
    parser.add_argument("--steps", type=int, default=200, help="of each (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        configs = [load_config(args.config, ["--log.dir", folder, "--name", name]) for name in "abcd"]
        with join_world(configs[0].train.device) as world, no_collections():
            ways = {
                "plain": plain(configs[0], world),
                "plain again": plain(configs[1], world),
                "train.py": guarded(configs[2], world, save=False),
                "+ saving": guarded(configs[3], world, save=True),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for block in range(1 + args.steps // BLOCK):  # the first is warm-up
                for name, step in ways.items():
                    start = time.perf_counter()
                    for _ in range(BLOCK):
                        step()
                    if world.device.type == "cuda":
                        torch.cuda.synchronize()
                    times[name] += [time.perf_counter() - start] if block else []
    n_blocks, n_threads = args.steps // BLOCK, torch.get_num_threads()
    print(f"{args.config}, {n_blocks} blocks of {BLOCK} steps of each in turn, {n_threads} threads\n")
    print("| | mean ms a step | total time over plain | median of the blocks' ratios |")
    print("|---|---:|---:|---:|")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["plain"], strict=True))
        total = sum(own) / sum(times["plain"])
        print(f"| {name} | {1000 * statistics.fmean(own) / BLOCK:.1f} | {total:.3f} | {ratio:.3f} |")


if __name__ == "__main__":
    run_main(main)
