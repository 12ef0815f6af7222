"""Train and evaluate every run that config files describe, one after the other.

    python sweep.py configs/lssar_paper/figure2_lssa.toml               # all values of its [sweep]
    python sweep.py configs/lssar_paper/table3_*.toml --nproc 8         # several files: all their runs
    python sweep.py configs/small/*.toml --seed 2 --tag seed2           # overrides go to every run
    python sweep.py configs/lssar_paper/figure2_lssa.toml --index $SLURM_ARRAY_TASK_ID   # only one of them
    python sweep.py configs/lssar_paper/*.toml --list                   # what would be run

Each run is `torchrun train.py CONFIG ...` in its own folder runs/<file>_<key>=<value>, then evaluated by
eval_length.py with NTK-scaled RoPE (eval_length.json) and without scaling (eval_length_none.json). What is
finished is skipped; after a failure the next run is tried, and all failures are listed at the end (exit
status 1). Ctrl-C and SIGTERM let the run save its step and end; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

import torch

from config import Config, changed_keys, expand_sweep, load_config
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import StopSignals
from training.checkpoint import find_checkpoints
from training.run_log import read_metrics

HERE = Path(__file__).resolve().parent
EVALUATIONS = (("ntk", None), ("none", "none"))  # --rope, --tag


@dataclass(frozen=True)
class Job:
    """One run: the command line of train.py, and what it resolves to."""

    arguments: list[str]
    config: Config

    @property
    def is_trained(self) -> bool:
        """Whether its folder holds the last checkpoint of just this config, and its validation."""
        run_dir, max_steps = self.config.run_dir, self.config.train.max_steps
        checkpoints = find_checkpoints(run_dir)
        if not checkpoints or int(checkpoints[0].stem[5:]) != max_steps:
            return False
        if any(
            not key.startswith("log.")
            for key in changed_keys(load_config(run_dir / "config.toml"), self.config)
        ):
            return False  # train.py knows whether the two may be mixed
        last = (read_metrics(run_dir) or [{}])[-1]
        return "val_loss" in last and last["step"] == max_steps

    def is_evaluated(self, tag: str | None) -> bool:
        path = self.config.run_dir / (f"eval_length_{tag}.json" if tag else "eval_length.json")
        return path.exists() and json.loads(path.read_text())["step"] == self.config.train.max_steps


def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    jobs = make_jobs(args.configs, overrides, args.tag)
    if args.index is not None:
        if not 0 <= args.index < len(jobs):
            raise UserError(
                f"--index {args.index}: expected 0 to {len(jobs) - 1}, one of the {len(jobs)} runs"
            )
        jobs = [jobs[args.index]]
    if args.list:
        for i, job in enumerate(jobs):
            state = "finished" if job.is_trained else "to run"
            print(f"{i:3}  {job.config.run_dir}  {state}")
        return
    failures = []
    with StopSignals() as stop:
        for i, job in enumerate(jobs):
            print(f"== {i + 1}/{len(jobs)}  {job.config.run_dir}", flush=True)
            try:
                failure = run_job(job, args, stop)
            except UserError as e:  # a run folder that cannot be read: the others may be fine
                failure = str(e)
            if stop.number:
                print(f"stopped by {stop.name_of(stop.number)}: the same command goes on")
                return
            if failure:
                failures.append(f"{job.config.run_dir}: {failure}")
                print(f"failed: {failures[-1]}", flush=True)
    print(f"{len(jobs) - len(failures)} of {len(jobs)} runs are trained and evaluated")
    if failures:
        print("\n".join(f"failed: {failure}" for failure in failures))
        sys.exit(1)


def make_jobs(configs: list[str], overrides: list[str], tag: str | None) -> list[Job]:
    """All runs of all files, checked before the first is started.

    Raises:
        UserError: a config with a problem; two runs of one name.
    """
    if any(text.partition("=")[0] == "--name" for text in overrides):
        raise UserError(
            "--name: the runs are called after their files; expected --tag WORD, added to each name"
        )
    jobs: dict[Path, Job] = {}
    for path in configs:
        for chosen in expand_sweep(path, overrides):
            name = (chosen[-1] if chosen else Path(path).stem) + (f"_{tag}" if tag else "")
            arguments = [path, *chosen[:-2], *overrides, "--name", name]
            config = load_config(path, arguments[1:])
            if config.run_dir in jobs:
                raise UserError(
                    f"{path}: two runs would be called {config.run_dir}; expected different names"
                )
            jobs[config.run_dir] = Job(arguments, config)
    return list(jobs.values())


def run_job(job: Job, args: argparse.Namespace, stop: StopSignals) -> str | None:
    """Train and evaluate what is not yet. Returns what failed, None if nothing did or a signal came."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={args.nproc}",
    ]
    if not job.is_trained:
        status = run([*launcher, str(HERE / "train.py"), *job.arguments], stop)
        if stop.number:
            return None
        if status:
            return f"train.py ended with status {status}"
    for rope, tag in EVALUATIONS:
        if not job.is_evaluated(tag):
            command = [*launcher, str(HERE / "eval_length.py"), str(job.config.run_dir), "--rope", rope]
            command += ["--tokens", str(args.eval_tokens), "--device", job.config.train.device]
            status = run(command + (["--tag", tag] if tag else []), stop)
            if stop.number:
                return None
            if status:
                return f"eval_length.py --rope {rope} ended with status {status}"
    return None


def run(command: list[str], stop: StopSignals) -> int:
    """Run a command to its end; a signal that comes to us is passed on to it, once. Its exit status."""
    print(f"$ {shlex.join(command)}", flush=True)
    told = False
    # In a session of its own: Ctrl-C in a terminal reaches us alone, not us and it.
    with subprocess.Popen(command, start_new_session=True) as process:
        while True:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if stop.number and not told:
                    process.send_signal(SIGTERM)  # the one that torchrun hands on to its workers
                    told = True


def whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number")
    return int(text)


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the overrides for train.py."""
    parser = ArgumentParser(__doc__)
    parser.usage = "sweep.py CONFIG.toml [CONFIG.toml ...] [options] [--section.key value ...]"
    parser.add_argument("--index", type=whole_number, metavar="I", help="only run number I, from 0")
    parser.add_argument("--list", action="store_true", help="print the runs and leave")
    parser.add_argument(
        "--nproc",
        type=whole_number,
        default=max(1, torch.cuda.device_count()),
        metavar="N",
        help="processes of a run (default: the GPUs of this machine, or 1)",
    )
    parser.add_argument(
        "--eval-tokens",
        type=whole_number,
        default=1_048_576,
        metavar="N",
        help="tokens that each evaluation scores (default: %(default)s)",
    )
    parser.add_argument("--tag", metavar="WORD", help="added to the names of all runs")
    first = next((i for i, arg in enumerate(argv) if arg.startswith("-")), len(argv))
    args, overrides = parser.parse_known_args(argv[first:])  # so that no override's value counts as a file
    args.configs = argv[:first]
    if not args.configs:
        raise UserError("expected config files: sweep.py configs/lssar_paper/figure2_lssa.toml (or --help)")
    if not args.nproc:
        raise UserError("--nproc 0: expected at least 1")
    return args, overrides


if __name__ == "__main__":
    run_main(main)
