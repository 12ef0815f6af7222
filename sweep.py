"""Train and evaluate every run that config files describe, one after the other or --jobs at a time.

    python sweep.py configs/lssar_paper/figure2_lssa.toml               # all values of its [sweep]
    python sweep.py configs/lssar_paper/table3_*.toml --nproc 8         # several files: all their runs
    python sweep.py configs/crossings/*.toml --seed 2 --tag seed2       # overrides go to every run
    python sweep.py configs/lssar_paper/figure2_lssa.toml --index $SLURM_ARRAY_TASK_ID   # only one of them
    python sweep.py configs/lssar_paper/*.toml --list                   # names and states of the runs
    python sweep.py configs/comparison/A/*.toml --jobs 2                    # two at a time, half the cores each
    python sweep.py configs/rivals/*.toml --jobs 8                      # on 8 GPUs: one run on each

Each run is `torchrun train.py CONFIG ...` in its folder <log.dir>/<file>_<key>=<value>, then evaluated by
eval_length.py with NTK-scaled RoPE (eval_length.json) and without scaling (eval_length_none.json). Finished
work is skipped; after a failure the next run starts, and all failures are listed at the end (exit status 1).
Ctrl-C and SIGTERM let the current runs save their step and exit; the same command resumes. With several jobs
the output of a run goes to <log.dir>/<name>.log.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from signal import SIGTERM
from typing import NamedTuple

import torch

from config import expand_sweep, load_config, same_run
from infra.cli import ArgumentParser, UserError, n_cores, positive_int, run_main
from infra.distributed import StopSignals
from infra.files import read_json, read_jsonl
from schema import Config
from training.checkpoint import find_checkpoints, step_of

HERE = Path(__file__).resolve().parent
EVALUATIONS = (("ntk", None), ("none", "none"))  # --rope, --tag


class Job(NamedTuple):
    """One run: the command line of train.py, and the config that it resolves to."""

    arguments: list[str]
    config: Config

    @property
    def is_trained(self) -> bool:
        """Whether its folder has the last checkpoint of exactly this config, and its validation."""
        run_dir, max_steps = self.config.run_dir, self.config.train.max_steps
        checkpoints = find_checkpoints(run_dir)
        if not checkpoints or step_of(checkpoints[0]) != max_steps:
            return False
        if not same_run(load_config(run_dir / "config.toml"), self.config):
            return False  # train.py names the difference
        last = (read_jsonl(run_dir / "metrics.jsonl") or [{}])[-1]
        return "val_loss" in last and last["step"] == max_steps

    @property
    def state(self) -> str:
        """For --list."""
        try:
            return "finished" if self.is_trained else "to run"
        except (ValueError, OSError) as e:
            return str(e)

    def is_evaluated(self, tag: str | None) -> bool:
        path = self.config.run_dir / (f"eval_length_{tag}.json" if tag else "eval_length.json")
        return path.exists() and read_json(path)["step"] == self.config.train.max_steps


def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    jobs = make_jobs(args.configs, overrides, args.tag)
    first = args.index or 0
    if args.index is not None:
        if args.index not in range(len(jobs)):
            raise UserError(
                f"--index {args.index}: expected 0 to {len(jobs) - 1}: there are {len(jobs)} runs"
            )
        jobs = [jobs[args.index]]
    if args.list:
        for i, job in enumerate(jobs, first):
            print(f"{i:3}  {job.config.run_dir}  {job.state}")
        return
    for config in (job.config for job in jobs if args.eval_tokens):
        if args.eval_tokens < (needed := 16 * config.train.seq_len):
            raise UserError(f"--eval-tokens {args.eval_tokens}: {config.name} needs at least {needed}, or 0")
    check_gpus(args, jobs)
    slots: SimpleQueue[int] = SimpleQueue()  # free shares of the machine
    for slot in range(args.jobs):
        slots.put(slot)

    def failure_of(i: int, stop: StopSignals) -> str | None:
        if stop.number:
            return None
        slot = slots.get()
        print(f"== {i + 1}/{len(jobs)}  {jobs[i].config.run_dir}", flush=True)
        try:
            failure = run_job(jobs[i], args, slot, stop)
        except (ValueError, OSError) as e:  # an unreadable run folder: the others may be fine
            failure = str(e)
        finally:
            slots.put(slot)
        if failure is None or stop.number:
            return None
        print(text := f"failed: {jobs[i].config.run_dir}: {failure}", flush=True)
        return text

    with StopSignals() as stop, ThreadPoolExecutor(args.jobs) as pool:
        found = [pool.submit(failure_of, i, stop) for i in range(len(jobs))]
        failures = [text for text in (future.result() for future in found) if text]
        if stop.number:
            print(f"stopped by {stop.name_of(stop.number)}: the same command resumes")
            return
    print(f"{len(jobs) - len(failures)} of {len(jobs)} runs are trained and evaluated")
    if failures:
        print("\n".join(failures))
        sys.exit(1)


def make_jobs(configs: list[str], overrides: list[str], tag: str | None) -> list[Job]:
    """All runs of all files, checked before the first one starts; prints which repeat another: left out.

    Raises:
        UserError: a config with a problem; two runs of one name.
    """
    if any(text.partition("=")[0] == "--name" for text in overrides):
        raise UserError("--name: runs are named after their files; expected --tag WORD, added to each name")
    jobs: dict[Path, Job] = {}
    for path in configs:
        for chosen in expand_sweep(path, overrides):
            name = (chosen[-1] if chosen else Path(path).stem) + (f"_{tag}" if tag else "")
            arguments = [path, *chosen[:-2], *overrides, "--name", name]
            config = load_config(path, arguments[1:])
            if config.run_dir in jobs:
                raise UserError(f"{path}: two runs would be called {config.run_dir}; expected other names")
            twin = next((job.config for job in jobs.values() if same_run(job.config, config, "name")), None)
            if twin:
                print(f"left out: {config.run_dir}, the same run as {twin.run_dir}")
            else:
                jobs[config.run_dir] = Job(arguments, config)
    return list(jobs.values())


def run_job(job: Job, args: argparse.Namespace, slot: int, stop: StopSignals) -> str | None:
    """Do the job's unfinished commands. Returns the failure; None: success, or a signal came."""
    commands = {} if job.is_trained else {"train.py": ["train.py", *job.arguments]}
    for rope, tag in EVALUATIONS if args.eval_tokens else ():
        if not job.is_evaluated(tag):
            command = ["eval_length.py", str(job.config.run_dir), "--rope", rope]
            command += ["--tokens", str(args.eval_tokens), "--device", job.config.train.device]
            commands[f"eval_length.py --rope {rope}"] = command + (["--tag", tag] if tag else [])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    log = job.config.run_dir.with_name(f"{job.config.run_dir.name}.log") if args.jobs > 1 else None
    for label, (script, *arguments) in commands.items():
        command = [*torchrun, f"--nproc_per_node={args.nproc}", str(HERE / script), *arguments]
        status = run(command, stop, share_of_machine(args, slot), log)
        if stop.number:
            return None
        if status:
            return f"{label} ended with status {status}" + (f", see {log}" if log else "")
        if script == "train.py" and not job.is_trained:  # it received a signal itself
            return "train.py stopped before its last step; the same command resumes it"
    return None


def check_gpus(args: argparse.Namespace, jobs: list[Job]) -> None:
    """Raises UserError for more processes at a time than GPUs: CUDA would show the last runs none."""
    gpus, needed = torch.cuda.device_count(), args.jobs * args.nproc
    if args.jobs > 1 and 0 < gpus < needed and any(job.config.train.device != "cpu" for job in jobs):
        raise UserError(
            f"--jobs {args.jobs} --nproc {args.nproc}: expected at most {gpus} processes, one a GPU"
        )


def share_of_machine(args: argparse.Namespace, slot: int) -> dict[str, str]:
    """The environment that gives one of several jobs its CPU threads and GPUs, and time to save.

    A given OMP_NUM_THREADS is every process's; a given CUDA_VISIBLE_DEVICES is what the jobs share.
    """
    patient = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"} | os.environ  # 30 s: then torchrun kills
    if args.jobs == 1:
        return patient
    threads = max(1, n_cores() // (args.jobs * args.nproc))
    share = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)} | patient
    if gpus := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        mine = visible.split(",")[slot * args.nproc : (slot + 1) * args.nproc]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return share


def run(
    command: list[str], stop: StopSignals, env: dict[str, str] | None = None, log: Path | None = None
) -> int:
    """Run a command to its end, forwarding a signal to it once. Returns its exit status."""
    print(f"$ {shlex.join(command)}", flush=True)
    forwarded = False
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "ab") if log else nullcontext() as output,
        # New session: the terminal's SIGINT reaches only this process.
        subprocess.Popen(command, start_new_session=True, env=env, stdout=output, stderr=output) as process,
    ):
        while True:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if stop.number and not forwarded:
                    process.send_signal(SIGTERM)  # torchrun forwards this one to its workers
                    forwarded = True


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the overrides for train.py."""
    parser = ArgumentParser(__doc__)
    parser.usage = "sweep.py CONFIG.toml [CONFIG.toml ...] [options] [--section.key value ...]"
    add = parser.add_argument
    nproc_help = "processes of a run (default: the GPUs of this machine over J, or 1)"
    jobs_help = "runs at the same time, with N processes each (default: 1)"
    tokens_help = "tokens that each evaluation scores, if it is not there yet; 0: none (default: %(default)s)"
    add("--index", type=int, metavar="I", help="only run number I, from 0")
    add("--list", action="store_true", help="print the runs and exit")
    add("--nproc", type=positive_int, metavar="N", help=nproc_help)
    add("--jobs", type=positive_int, default=1, metavar="J", help=jobs_help)
    add("--eval-tokens", type=int, default=2**20, metavar="N", help=tokens_help)
    add("--tag", metavar="WORD", help="added to the names of all runs")
    first = next((i for i, arg in enumerate(argv) if arg.startswith("-")), len(argv))
    args, overrides = parser.parse_known_args(argv[first:])  # no override's value is taken for a file
    args.configs = argv[:first]
    args.nproc = args.nproc or max(1, torch.cuda.device_count() // args.jobs)
    if args.eval_tokens < 0:
        raise UserError(f"--eval-tokens {args.eval_tokens}: expected 0 or more")
    if not args.configs:
        raise UserError("expected config files: sweep.py configs/lssar_paper/figure2_lssa.toml (or --help)")
    return args, overrides


if __name__ == "__main__":
    run_main(main)
