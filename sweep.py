"""Train and evaluate every run that config files describe, one after the other or --jobs at a time.

    python sweep.py configs/lssa.toml --attention.reweight-p 1 3 15     # a run for each value
    python sweep.py configs/softmax.toml --optimizer.lr 3e-4 6e-4 --seed 1 2    # for each combination
    python sweep.py configs/a.toml configs/b.toml --nproc 8             # several files: all their runs
    python sweep.py configs/a.toml configs/b.toml --jobs 2              # two at a time, half the cores each
    python sweep.py configs/a.toml --list                               # names and states of the runs
    python sweep.py configs/a.toml --index $SLURM_ARRAY_TASK_ID         # only one of them

A file may have values of its own in a [sweep] (see config.py). Each run is `train.py CONFIG ...` in
its folder <log.dir>/<file>_<key>=<value>, then eval_length.py on it. Finished work is skipped. A
run whose init_from is another one of them waits for it. After a failure the next run starts. The
sweep ends with a table, a picture of the loss against what was swept, and all failures (exit
status 1). Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 let the current runs save their step and exit; the
same command resumes. With several jobs the output of a run goes to <log.dir>/<name>.log.
"""

import infra.packages  # noqa: F401

import argparse
import itertools
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from queue import SimpleQueue
from signal import SIGTERM
from typing import Any, NamedTuple

import torch
from pandas import DataFrame

import eval_length
import measure
from config import expand_sweep, load_config, run_identity, split_lists
from infra.cli import ArgumentParser, UserError, n_cores, positive_int, run_main
from infra.distributed import StopSignals
from measure import Curve
from schema import Config
from training.checkpoint import find_checkpoints, step_of

HERE = Path(__file__).resolve().parent
COLUMNS = {  # of the table: times the training length, whether in a rolling window, scaling
    "1x": (1, False, "none"),
    "16x": (16, False, "none"),
    "16x NTK": (16, False, "ntk"),
    "16x window": (16, True, "none"),
}
DRAWN = ("validation", "16x NTK", "16x")  # of the columns


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the overrides for train.py."""
    parser = ArgumentParser(__doc__)
    parser.usage = "sweep.py CONFIG.toml [CONFIG.toml ...] [options] [--section.key VALUE ...]"
    add = parser.add_argument
    add("--index", type=int, metavar="I", help="only run number I, from 0")
    add("--list", action="store_true", help="print the runs and exit")
    nproc_help = "processes of a run (default: its share of the GPUs)"
    add("--nproc", type=positive_int, metavar="N", help=nproc_help)
    jobs_help = "runs at the same time (default: 1)"
    add("--jobs", type=positive_int, default=1, metavar="J", help=jobs_help)
    tokens_help = "of the evaluation, in all (default: 2^20; 0: no evaluation)"
    add("--eval-tokens", type=int, default=2**20, metavar="N", help=tokens_help)
    args, overrides = parse_with_configs(parser, argv)
    args.splits = [None]  # of each run's data, the default one
    return args, overrides


def parse_with_configs(
    parser: ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """The parser's options and, as `configs`, the files before them; then all other options."""
    n_configs = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    # no override's value is taken for a file
    args, overrides = parser.parse_known_args(argv[n_configs:])
    args.configs = argv[:n_configs]
    if not args.configs:
        raise UserError(f"expected config files first: {parser.prog} mine.toml (or --help)")
    return args, overrides


def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    jobs = make_jobs(args.configs, overrides)
    if args.index is not None:
        if args.index not in range(len(jobs)):
            expected = f"expected 0 to {len(jobs) - 1}, the number of a run"
            raise UserError(f"--index {args.index}: {expected}")
        jobs = [jobs[args.index]]
    if args.list:
        for i, job in enumerate(jobs):
            try:
                state = "finished" if job.is_trained() else "to run"
            except (ValueError, OSError) as e:  # of a damaged folder: the others may be fine
                state = str(e)
            print(f"{i:3}  {job.run_dir}  {state}")
        return
    failures = run_all(jobs, args)
    show(jobs, failures, Path(args.configs[0]).stem)
    evaluated = " and evaluated" if args.eval_tokens else ""
    print(f"{failures.count('')} of {len(jobs)} runs are trained{evaluated}")
    for failure in filter(None, failures):
        print(failure)
    if any(failures):
        sys.exit(1)


# ---------------------------------------------------------------- jobs
class Job(NamedTuple):
    """A command of train.py, which is done once its run folder has the last checkpoint."""

    arguments: list[str]
    config: Config  # to which they resolve
    swept: dict[str, Any]  # dotted key -> the value of this run

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def is_trained(self) -> bool:
        """Whether its folder has the last step of this config. Of another config or file train.py
        names the difference.
        """
        stored = self.run_dir / "config.toml"  # which train.py writes
        checkpoints = find_checkpoints(self.run_dir)
        if not checkpoints or not stored.exists():
            return False
        is_last = step_of(checkpoints[0]) == self.config.train.max_steps
        return is_last and run_identity(load_config(stored)) == run_identity(self.config)

    def evaluations(self, args: argparse.Namespace) -> list[list[str]]:
        """The arguments of eval_length.py, for each split."""
        if not args.eval_tokens:
            return []
        options = ["--tokens", str(args.eval_tokens), "--data", self.config.data.dir]
        common = [str(self.run_dir), *options, "--device", self.config.train.device]
        return [[*common, *(["--split", split] if split else [])] for split in args.splits]


def make_jobs(configs: Sequence[str], overrides: list[str]) -> list[Job]:
    """All runs of all files, checked before the first one starts, each after the one that it starts
    from.

    Says which repeat another run, and leaves them out. Raises UserError: a config with a problem;
    two runs of one name; runs that start from each other.
    """
    plain, _ = split_lists(overrides)
    jobs: dict[Path, Job] = {}
    known: dict[str, Path] = {}  # by what decides their losses
    for run in itertools.chain(*(expand_sweep(path, overrides) for path in configs)):
        arguments = [*run.overrides, *plain]
        config = load_config(run.path, arguments)
        folder = config.run_dir
        if folder.absolute() in jobs:
            raise UserError(f"{run.path}: two runs would be called {folder}; expected other names")
        twin = known.setdefault(run_identity(config), folder)
        if twin != folder:
            print(f"left out: {folder}, the same run as {twin}")
        else:
            jobs[folder.absolute()] = Job([str(run.path), *arguments], config, run.swept)
    sources = {folder: sources_of(job, jobs) for folder, job in jobs.items()}
    try:
        return [jobs[folder] for folder in TopologicalSorter(sources).static_order()]
    except CycleError as e:
        raise UserError(f"init_from of {e.args[1][0]}: these runs start from each other") from None


def sources_of(job: Job, folders: Container[Path]) -> list[Path]:
    """The run folder among `folders` that the job starts from, or from a checkpoint in it."""
    if not job.config.init_from:
        return []
    path = Path(job.config.init_from).absolute()
    return [place for place in (path, *path.parents) if place in folders]


# ---------------------------------------------------------------- running
def run_all(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Run the jobs, --jobs at a time. Exits after a signal.

    Returns: Of each job a line that says how it failed, or "".
    """
    uses_gpus = any(job.config.train.device != "cpu" for job in jobs)
    gpus = torch.cuda.device_count() if uses_gpus else 0
    args.nproc = args.nproc or max(1, gpus // args.jobs)
    if gpus and args.jobs > 1 and args.jobs * args.nproc > gpus:  # CUDA would show the last none
        processes = f"--jobs {args.jobs} --nproc {args.nproc}"
        raise UserError(f"{processes}: expected at most {gpus} processes, one a GPU")
    slots: SimpleQueue[int] = SimpleQueue()  # free shares of the machine
    for slot in range(args.jobs):
        slots.put(slot)

    def do(i: int, sources: list[Future[str]]) -> str:
        for source in sources:
            source.result()  # waits
        slot = slots.get()
        try:
            failure = run_job(jobs[i], f"{i + 1}/{len(jobs)}", args, slot, stop)
        except (ValueError, OSError) as e:  # of a damaged folder: the others may be fine
            failure = str(e)
        finally:
            slots.put(slot)
        if failure and not stop.number:
            failure = f"failed: {jobs[i].run_dir}: {failure}"
            print(failure, flush=True)
        return failure

    with StopSignals() as stop:
        results: dict[Path, Future[str]] = {}
        with ThreadPoolExecutor(args.jobs) as pool:
            for i, job in enumerate(jobs):
                sources = [results[folder] for folder in sources_of(job, results)]
                results[job.run_dir.absolute()] = pool.submit(do, i, sources)
        if stop.number:
            print(f"stopped by {stop.name_of(stop.number)}: the same command resumes")
            sys.exit()
    return [result.result() for result in results.values()]


def run_job(job: Job, number: str, args: argparse.Namespace, slot: int, stop: StopSignals) -> str:
    """Do what is not done of the job. Returns the failure; "": success, or a signal came."""
    log = job.run_dir.with_name(f"{job.run_dir.name}.log") if args.jobs > 1 else None
    # wandb reads its group itself
    environment = {"WANDB_RUN_GROUP": Path(job.arguments[0]).stem} | share_of_machine(args, slot)
    python = [sys.executable]
    if args.nproc > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]

    def failure_of(script: str, arguments: list[str]) -> str:
        if stop.number:
            return ""
        print(f"== {number}  {job.run_dir}: {script}", flush=True)
        status = run([*python, str(HERE / script), *arguments], stop, environment, log)
        see_log = f", see {log}" if log else ""
        return f"{script} ended with status {status}{see_log}" if status else ""

    was_trained = job.is_trained()
    if not was_trained:
        if failure := failure_of("train.py", job.arguments):
            return failure
        if not job.is_trained():  # it received a signal itself
            return "train.py stopped before its last step; the same command resumes it"
    for arguments in job.evaluations(args):
        if was_trained and eval_length.is_measured(arguments):
            continue
        if failure := failure_of("eval_length.py", arguments):
            return failure
    return ""


def share_of_machine(args: argparse.Namespace, slot: int) -> dict[str, str]:
    """The environment that gives one of several jobs its CPU threads and GPUs, and time to save.

    A given OMP_NUM_THREADS is every process's; a given CUDA_VISIBLE_DEVICES is what the jobs share.
    """
    patient = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"} | os.environ  # 30 s: then torchrun kills
    if args.jobs == 1:
        return patient
    threads = str(max(1, n_cores() // (args.jobs * args.nproc)))
    share = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads} | patient
    if gpus := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        own = visible.split(",")[slot * args.nproc : (slot + 1) * args.nproc]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return share


def run(command: list[str], stop: StopSignals, env: dict[str, str], log: Path | None) -> int:
    """Run a command to its end, forwarding a signal to it once. Returns its exit status."""
    print(f"$ {shlex.join(command)}", flush=True)
    with (
        open(log, "ab") if log else nullcontext() as output,
        # New session: the terminal's SIGINT reaches only this process.
        subprocess.Popen(
            command, start_new_session=True, env=env, stdout=output, stderr=output
        ) as process,
    ):
        while not stop.number:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.1)  # a notebook kills this process soon after Ctrl-C
        process.send_signal(SIGTERM)  # torchrun forwards this one to its workers
        return process.wait()


# ---------------------------------------------------------------- table and picture
def show(jobs: list[Job], failures: list[str], stem: str) -> None:
    """Print the table of all runs, and draw the picture if a key has several values.

    A run that failed has no numbers: those in its folder may be another's.
    """
    pairs = zip(jobs, failures, strict=True)
    known = [{} if failure else losses_of(job) for job, failure in pairs]
    table = DataFrame(known, columns=["validation", *COLUMNS], dtype=float)
    if table.isna().all(axis=None):
        return
    shown = table.dropna(axis="columns", how="all").map("{:.3f}".format).replace("nan", "-")
    lines = [["run", *shown.columns]]
    for job, cells in zip(jobs, shown.to_numpy(), strict=True):
        lines.append([job.config.name, *cells])
    print(f"\n{measure.format_table(lines)}")
    keys = {key: {str(job.swept.get(key)) for job in jobs} for job in jobs for key in job.swept}
    keys.pop("seed", None)
    key = max(keys, key=lambda each: len(keys[each]), default="")
    if key and len(keys[key]) > 1:
        draw(jobs, table, key, jobs[0].run_dir.parent / f"{stem}_sweep.png")


def losses_of(job: Job) -> dict[str, float]:
    """The last validation loss, and the COLUMNS' of the same targets after the last step."""
    losses: dict[str, float] = {}
    for row in measure.validation_rows(job.run_dir):
        if row[3] == "val_loss":
            losses["validation"] = row[-1]
    step = job.config.train.max_steps
    rows = measure.read_rows(job.run_dir)
    rows = measure.select(rows, run=job.config.name, step=step, measure="same_targets")
    newest = rows["text"].tail(1)
    rows = rows[rows["text"].isin(newest)]
    means = rows.groupby(["length", "window", "scaling"])["value"].mean()
    train_len = job.config.train.seq_len
    for name, (factor, is_rolling, scaling) in COLUMNS.items():
        window = train_len if is_rolling else 0
        losses[name] = means.get((factor * train_len, str(window), scaling), math.nan)
    return losses


def draw(jobs: list[Job], table: DataFrame, key: str, path: Path) -> None:
    """The loss against one key: a curve for each combination of the others, the mean over seeds."""
    names = []
    for job in jobs:
        others = {name: value for name, value in job.swept.items() if name not in (key, "seed")}
        names.append("".join(f"{name.rpartition('.')[2]} = {others[name]}, " for name in others))
    table = table.assign(name=names, x=[job.swept.get(key) for job in jobs])
    curves = []
    for measured in DRAWN:
        for name, group in table.dropna(subset=[measured, "x"]).groupby("name", sort=False):
            means = group.groupby("x")[measured].mean()
            curves.append(Curve(f"{name}{measured}", means.index.tolist(), means.tolist()))
    measure.draw_curves(path, curves, f"Loss by {key}", "loss (nats)", xlabel=key)


if __name__ == "__main__":
    run_main(main)
