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

import argparse
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from signal import SIGTERM
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

import eval_length
import measure
from config import (
    MAX_RUNS,
    SweepRun,
    expand_sweep,
    load_config,
    parse_overrides,
    run_identity,
    same_run,
)
from infra.cli import ArgumentParser, UserError, n_cores, positive_int, run_main
from infra.distributed import StopSignals
from infra.files import exclusive_lock, read_jsonl
from schema import Config
from training.checkpoint import find_checkpoints, load_checkpoint, step_of, stored_config
from training.loader import open_streams
from training.state import changed_data, data_info

HERE = Path(__file__).resolve().parent
LONGEST = 16  # times the training length: the last length of an evaluation
NAME_WIDTH = 30  # of a run in the table


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
    add("--tag", metavar="WORD", help="added to the names of all runs")
    n_configs = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    # no override's value is taken for a file
    args, overrides = parser.parse_known_args(argv[n_configs:])
    args.configs = argv[:n_configs]
    if not args.configs:
        raise UserError(
            "expected config files first: sweep.py configs/demo_softmax.toml (or --help)"
        )
    return args, overrides


# ---------------------------------------------------------------- jobs
class Job(NamedTuple):
    """A command of train.py, and the run that is finished once it has the last checkpoint."""

    arguments: list[str]
    config: Config  # to which they resolve
    swept: dict[str, Any]  # dotted key -> the value of this run

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def is_trained(self, lazily: bool = True) -> bool:
        """Whether its folder has the last checkpoint of this config, on its data. Validation came
        before.

        lazily: without the sums of its tensors.
        """
        checkpoints = find_checkpoints(self.run_dir)
        if not checkpoints or step_of(checkpoints[0]) != self.config.train.max_steps:
            return False
        # train.py rewrites it, as for data that have moved
        stored = self.run_dir / "config.toml"
        old = load_config(stored) if stored.exists() else None
        try:
            content = load_checkpoint(checkpoints[0], lazily)
            old = old or stored_config(content, checkpoints[0])
            if not same_run(old, self.config):  # train.py names the difference
                return False
            if not Path(self.config.data.dir).is_dir():  # gone since
                return True
            return not changed_data(content["data"], data_info(*open_streams(self.config)))
        except UserError:  # train.py says why, or resumes from the checkpoint before
            return False

    @property
    def state(self) -> str:
        """For --list."""
        try:
            return "finished" if self.is_trained() else "to run"
        except (ValueError, OSError) as e:
            return str(e)

    def evaluation(self, tokens: int) -> list[str]:
        """The arguments of eval_length.py."""
        options = ["--tokens", str(tokens), "--data", self.config.data.dir]
        return [str(self.run_dir), *options, "--device", self.config.train.device]

    def is_evaluated(self, tokens: int) -> bool:
        """Whether its folder has the rows of the last step that `run_job` asks for."""
        if not find_checkpoints(self.run_dir):
            return False
        if not Path(self.config.data.dir).is_dir():  # gone since
            return bool(len(measure.read_rows(self.run_dir)))
        return eval_length.is_measured(self.evaluation(tokens))


def split_lists(overrides: list[str]) -> tuple[list[str], list[list[str]]]:
    """The overrides of all runs, and those with several values, each as [--key, value, value, ...]."""
    words: list[list[str]] = []
    for word in overrides:
        if word.startswith("--") or not words:
            words.append([word])
        else:
            words[-1].append(word)
    plain = [word for each in words if len(each) < 3 for word in each]
    return plain, [each for each in words if len(each) > 2]


def make_jobs(configs: list[str], overrides: list[str], tag: str | None) -> list[Job]:
    """All runs of all files, checked before the first one starts; prints which repeat another: left
    out. A run comes after the one that its init_from names.

    Raises UserError: a config with a problem; two runs of one name.
    """
    if any(word.partition("=")[0] == "--name" for word in overrides):
        raise UserError(
            "--name: runs are named after their files; expected --tag WORD, added to each name"
        )
    plain, lists = split_lists(overrides)
    jobs: dict[Path, Job] = {}
    known: dict[object, Path] = {}  # by what decides their losses
    for run in (run for path in configs for run in expand(path, plain, lists)):
        arguments = [*run.overrides, *plain]
        config = load_config(run.path, arguments)
        if tag:
            arguments += ["--name", f"{config.name}_{tag}"]
            config = load_config(run.path, arguments)
        if config.run_dir in jobs:
            raise UserError(
                f"{run.path}: two runs would be called {config.run_dir}; expected other names"
            )
        twin = known.setdefault(run_identity(config), config.run_dir)
        if twin != config.run_dir:
            print(f"left out: {config.run_dir}, the same run as {twin}")
        else:
            jobs[config.run_dir] = Job([str(run.path), *arguments], config, run.swept)
    return in_order(list(jobs.values()))


def expand(path: str, overrides: list[str], lists: list[list[str]]) -> list[SweepRun]:
    """The runs of a file's [sweep], each with every combination of the lists of values."""
    n_runs = math.prod(len(words) - 1 for words in lists)
    if n_runs > MAX_RUNS:
        raise UserError(f"{n_runs} runs: expected at most {MAX_RUNS}")
    runs: list[SweepRun] = []
    for values in itertools.product(*(words[1:] for words in lists)):
        chosen = [
            word for words, value in zip(lists, values, strict=True) for word in (words[0], value)
        ]
        swept = parse_overrides(chosen)
        suffix = "".join(f"_{key.rpartition('.')[2]}={value}" for key, value in swept.items())
        for run in expand_sweep(path, [*overrides, *chosen]):
            name = re.sub(r"[^A-Za-z0-9._=+-]", "-", run.name + suffix)
            runs.append(SweepRun(run.path, name, run.swept | swept))
    return runs


def in_order(jobs: list[Job]) -> list[Job]:
    """Each job after the one whose weights it starts from; else as they are.

    Raises UserError: runs start from each other.
    """
    ordered: list[Job] = []
    rest = jobs
    while rest:
        ready = [job for job in rest if source_of(job, rest) is None]
        if not ready:
            raise UserError(f"init_from of {rest[0].run_dir}: these runs start from each other")
        ordered += ready
        rest = [job for job in rest if job not in ready]
    return ordered


def source_of(job: Job, jobs: list[Job]) -> int | None:
    """The number of the job whose run folder, or a checkpoint in it, the job starts from."""
    if not job.config.init_from:
        return None
    path = Path(job.config.init_from).absolute()
    places = {path, *path.parents}
    return next((i for i, each in enumerate(jobs) if each.run_dir.absolute() in places), None)


# ---------------------------------------------------------------- running
def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    jobs = make_jobs(args.configs, overrides, args.tag)
    if args.index is not None and args.index not in range(len(jobs)):
        raise UserError(f"--index {args.index}: expected 0 to {len(jobs) - 1}, the number of a run")
    if args.list:
        for i, job in enumerate(jobs):
            print(f"{i:3}  {job.run_dir}  {job.state}")
        return
    if args.index is not None:
        jobs = [jobs[args.index]]
    failures = run_all(jobs, args)
    if failures is None:
        return
    show(jobs, Path(args.configs[0]).stem)
    evaluated = " and evaluated" if args.eval_tokens else ""
    print(f"{len(jobs) - len(failures)} of {len(jobs)} runs are trained{evaluated}")
    if failures:
        print("\n".join(failures))
        sys.exit(1)


def check_resources(args: argparse.Namespace, jobs: list[Job], gpus: int) -> None:
    """Raises UserError for too few tokens of an evaluation, or more processes than GPUs."""
    needed = LONGEST * max(job.config.train.seq_len for job in jobs)
    if args.eval_tokens and args.eval_tokens < needed:
        raise UserError(
            f"--eval-tokens {args.eval_tokens}: expected at least {needed}, one block, or 0"
        )
    # CUDA would show the last runs none
    if gpus and args.jobs > 1 and args.jobs * args.nproc > gpus:
        processes = f"--jobs {args.jobs} --nproc {args.nproc}"
        raise UserError(f"{processes}: expected at most {gpus} processes, one a GPU")


def run_all(jobs: list[Job], args: argparse.Namespace) -> list[str] | None:
    """Run the jobs, --jobs at a time. Returns a line for each failure; None after a signal."""
    uses_gpus = any(job.config.train.device != "cpu" for job in jobs)
    gpus = torch.cuda.device_count() if uses_gpus else 0
    args.nproc = args.nproc or max(1, gpus // args.jobs)
    check_resources(args, jobs, gpus)
    slots: SimpleQueue[int] = SimpleQueue()  # free shares of the machine
    for slot in range(args.jobs):
        slots.put(slot)
    ended = [Event() for _ in jobs]

    def failure_of(i: int) -> str | None:
        source = source_of(jobs[i], jobs)
        if source is not None and source != i:
            ended[source].wait()
        slot = slots.get()
        try:
            failure = run_job(jobs[i], f"{i + 1}/{len(jobs)}", args, slot, stop)
        except (ValueError, OSError) as e:  # an unreadable run folder: the others may be fine
            failure = str(e)
        finally:
            slots.put(slot)
            ended[i].set()
        if failure is None or stop.number:
            return None
        line = f"failed: {jobs[i].run_dir}: {failure}"
        print(line, flush=True)
        return line

    with StopSignals() as stop:
        with ThreadPoolExecutor(args.jobs) as pool:
            failures = [line for line in pool.map(failure_of, range(len(jobs))) if line]
        if stop.number:
            print(f"stopped by {stop.name_of(stop.number)}: the same command resumes")
            return None
    return failures


def run_job(
    job: Job, number: str, args: argparse.Namespace, slot: int, stop: StopSignals
) -> str | None:
    """Do the job's unfinished commands. Returns the failure; None: success, or a signal came."""
    run_dir = job.run_dir
    is_evaluated = not args.eval_tokens or job.is_evaluated(args.eval_tokens)
    with exclusive_lock(run_dir):  # of a training
        commands = [] if job.is_trained(lazily=is_evaluated) else [["train.py", *job.arguments]]
    if not is_evaluated or (commands and args.eval_tokens):
        commands.append(["eval_length.py", *job.evaluation(args.eval_tokens)])
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
    python = [sys.executable, *(torchrun if args.nproc > 1 else [])]
    log = run_dir.with_name(f"{run_dir.name}.log") if args.jobs > 1 else None
    for script, *arguments in commands:
        if stop.number:
            return None
        print(f"== {number}  {run_dir}: {script}", flush=True)
        group = {"WANDB_RUN_GROUP": Path(job.arguments[0]).stem}  # which wandb reads itself
        environment = group | share_of_machine(args, slot)
        status = run([*python, str(HERE / script), *arguments], stop, environment, log)
        if status:
            return f"{script} ended with status {status}" + (f", see {log}" if log else "")
        if script == "train.py" and not job.is_trained():  # it received a signal itself
            return "train.py stopped before its last step; the same command resumes it"
        if script == "eval_length.py" and not job.is_evaluated(args.eval_tokens):
            return "eval_length.py has measured another step"
    return None


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


def run(command: list[str], stop: StopSignals, env: dict[str, str] | None, log: Path | None) -> int:
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
                return process.wait(timeout=1)
        process.send_signal(SIGTERM)  # torchrun forwards this one to its workers
        return process.wait()


# ---------------------------------------------------------------- table and picture
def numbers(job: Job) -> dict[str, float]:
    """The last validation loss, and at the last step the losses of the same targets at 1x and 16x.

    Empty of a run that is not trained: the numbers there may be another run's.
    """
    values: dict[str, float] = {}
    with suppress(ValueError, OSError):  # of a damaged folder, which is among the failures
        if not job.is_trained():
            return {}
        for record in read_jsonl(job.run_dir / "metrics.jsonl"):
            if isinstance(record.get("val_loss"), float):
                values["validation"] = record["val_loss"]
        step = job.config.train.max_steps
        rows = measure.read_rows(job.run_dir)
        rows = measure.select(rows, run=job.config.name, step=step, measure="same_targets")
        rows = measure.select(rows, text=rows["text"].iloc[-1]) if len(rows) else rows
        length = job.config.train.seq_len
        longest = {"length": LONGEST * length}
        wanted: dict[str, dict[str, Any]] = {
            "1x": {"length": length, "window": 0, "scaling": "none"},
            "16x": longest | {"window": 0, "scaling": "none"},
            "16x NTK": longest | {"window": 0, "scaling": "ntk"},
            "16x window": longest | {"window": length},
        }
        for name, where in wanted.items():
            losses = measure.select(rows, **where)["value"]
            if len(losses) and losses.notna().all():
                values[name] = losses.mean()
    return values


def show(jobs: list[Job], stem: str) -> None:
    """Print the table of all runs, and draw the picture if a key has several values."""
    known = [numbers(job) for job in jobs]
    columns = list(dict.fromkeys(name for each in known for name in each))
    names = short_names([job.config.name for job in jobs])
    lines = [["run", *columns]]
    for name, values in zip(names, known, strict=True):
        cells = [f"{values[column]:.3f}" if column in values else "-" for column in columns]
        lines.append([name, *cells])
    print(measure.format_table(lines))
    keys = {key for job in jobs for key in job.swept if key != "seed"}
    by_key = {key: {repr(job.swept.get(key)) for job in jobs} for key in keys}
    key = max(sorted(keys), key=lambda each: len(by_key[each]), default="")
    if key and len(by_key[key]) > 1 and any(known):
        draw(jobs, known, key, jobs[0].run_dir.parent / f"{stem}_sweep.png")


def short_names(names: list[str], width: int = NAME_WIDTH) -> list[str]:
    """Names of at most `width` letters: without what all begin with, else without their middle."""
    prefix = os.path.commonprefix(names) if len(names) > 1 else ""
    start = prefix.rfind("_") + 1
    is_long = max(map(len, names), default=0) > width
    shortened = []
    for name in names:
        name = name[start:] if is_long else name
        half = width // 2
        shortened.append(f"{name[: half - 1]}…{name[-half:]}" if len(name) > width else name)
    return shortened


def draw(jobs: list[Job], known: list[dict[str, float]], key: str, path: Path) -> None:
    """The loss against one key: a line for each combination of the others, the mean over seeds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    groups: dict[str, dict[Any, list[float]]] = {}
    for job, values in zip(jobs, known, strict=True):
        if key not in job.swept:
            continue
        others = {k: v for k, v in job.swept.items() if k not in (key, "seed")}
        label = ", ".join(f"{k.rpartition('.')[2]} = {v}" for k, v in others.items())
        for measured in ("validation", "16x NTK", "16x"):
            if measured in values:
                name = f"{label}, {measured}" if label else measured
                by_value = groups.setdefault(name, {})
                by_value.setdefault(job.swept[key], []).append(values[measured])
    swept = [job.swept[key] for job in jobs if key in job.swept]
    are_numbers = all(isinstance(value, int | float) for value in swept)
    for i, (label, by_value) in enumerate(groups.items()):
        x = sorted(by_value) if are_numbers else list(by_value)
        y = [np.mean(by_value[value]) for value in x]
        marker = measure.MARKERS[i % len(measure.MARKERS)]
        places: list[Any] = x if are_numbers else [str(value) for value in x]
        axes.plot(places, y, marker=marker, label=measure.escape(label))
    if are_numbers and min(swept) > 0 and max(swept) >= 4 * min(swept):
        axes.set_xscale("log")
        axes.set_xticks(sorted({*swept}), [f"{value:g}" for value in sorted({*swept})])
        axes.set_xticks([], minor=True)
    axes.set(xlabel=measure.escape(key), ylabel="loss (nats)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    measure.save_figure(figure, path)


if __name__ == "__main__":
    run_main(main)
