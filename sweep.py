"""Train and evaluate every run that config files describe, one after the other or --jobs at a time.

    python sweep.py configs/lssar_paper/figure2_lssa.toml               # all values of its [sweep]
    python sweep.py configs/lssar_paper/table3_*.toml --nproc 8         # several files: all their runs
    python sweep.py configs/lssar_paper/figure2_lssa.toml --index $SLURM_ARRAY_TASK_ID   # only one of them
    python sweep.py configs/lssar_paper/*.toml --list                   # names and states of the runs
    python sweep.py configs/comparison/A/*.toml --jobs 2                # two at a time, half the cores each
    python sweep.py configs/lssar_paper/table4_*.toml --base configs/comparison/A.toml  # smaller

Each run is `train.py CONFIG ...` in its folder <log.dir>/<file>_<key>=<value>, then eval_length.py
on it with NTK-scaled RoPE (eval_length.json), without scaling (eval_length_none.json) and, if its
RoPE has one base, at 50 times that (eval_length_theta.json, as in the SSMax paper). Finished work
is skipped. After a failure the next run starts. The sweep ends with a table of its runs, and all
failures (exit status 1). Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 let the current runs save their step
and exit; the same command resumes. With several jobs the output of a run goes to
<log.dir>/<name>.log.
"""

import argparse
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from signal import SIGTERM
from typing import Any, NamedTuple

import torch

from config import config_from_dict, expand_sweep, load_config, same_run
from evals.output import format_table
from evals.rows import FACTORS
from infra.cli import ArgumentParser, UserError, n_cores, positive_int, run_main
from infra.distributed import StopSignals
from infra.files import exclusive_lock, read_json, read_jsonl
from normalisers import own
from schema import Config
from training.checkpoint import find_checkpoints, load_checkpoint, step_of, warn_of_changed_code
from training.loader import open_streams
from training.state import changed_data, data_info

HERE = Path(__file__).resolve().parent
THETA_FACTOR = 50  # from RoPE's base of training to that of --rope theta


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the overrides for train.py."""
    parser = ArgumentParser(__doc__)
    parser.usage = "sweep.py CONFIG.toml [CONFIG.toml ...] [options] [--section.key value ...]"
    add = parser.add_argument
    add("--index", type=int, metavar="I", help="only run number I, from 0")
    add("--list", action="store_true", help="print the runs and exit")
    add(
        "--nproc",
        type=positive_int,
        metavar="N",
        help="processes of a run (default: its share of the GPUs)",
    )
    add(
        "--jobs",
        type=positive_int,
        default=1,
        metavar="J",
        help="runs at the same time (default: 1)",
    )
    add(
        "--eval-tokens",
        type=int,
        default=2**20,
        metavar="N",
        help="in all (default: 2^20; 0: none)",
    )
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


class Job(NamedTuple):
    """One run: the command line of train.py, and the config that it resolves to."""

    arguments: list[str]
    config: Config

    def is_trained(self, lazily: bool = True) -> bool:
        """Whether its folder has the last checkpoint of this config, on its data. Validation came
        before.

        lazily: without the sums of its tensors.
        """
        run_dir = self.config.run_dir
        checkpoints = find_checkpoints(run_dir)
        if not checkpoints or step_of(checkpoints[0]) != self.config.train.max_steps:
            return False
        stored = run_dir / "config.toml"  # which train.py rewrites, as for data that have moved
        old = load_config(stored) if stored.exists() else None
        try:
            content = load_checkpoint(checkpoints[0], lazily)
            old = old or config_from_dict(content["config"], str(checkpoints[0]))
            if not same_run(old, self.config):  # train.py names the difference
                return False
            if not Path(self.config.data.dir).is_dir():  # gone since
                return True
            return not changed_data(
                content["data"], data_info(self.config, *open_streams(self.config))
            )
        except UserError:  # train.py says why, or resumes from the checkpoint before
            return False

    def warn_of_changed_code(self) -> list[str]:
        """Warns of, and returns, normalisers whose code is not that of its last checkpoint."""
        for path in find_checkpoints(self.config.run_dir)[:1]:
            with suppress(UserError):  # damaged: train.py says so
                before = load_checkpoint(path, lazily=True)["data"]
                return warn_of_changed_code(before, own.fingerprints(self.config.normalisers), path)
        return []

    @property
    def state(self) -> str:
        """For --list."""
        try:
            return "finished" if self.is_trained() else "to run"
        except (ValueError, OSError) as e:
            return str(e)

    @property
    def evaluations(self) -> dict[str, float | None]:
        """RoPE scalings of its evaluations, each with the base that it sets."""
        bases = self.config.rope_bases
        theta = {"theta": THETA_FACTOR * bases.pop()} if len(bases) == 1 else {}
        return {"ntk": None, "none": None, **theta}

    def evaluation(self, tokens: int) -> list[str]:
        """The arguments of eval_length.py, for all of its evaluations in one process."""
        options = ["--replace", "--tokens", str(tokens), "--data", self.config.data.dir]
        options += ["--device", self.config.train.device]
        scalings = [
            rope + (f"={theta}" if theta else "") for rope, theta in self.evaluations.items()
        ]
        return [str(self.config.run_dir), *options, "--also", *scalings[1:]]

    def read_evaluation(self, rope: str) -> dict[str, Any]:
        """The result at a RoPE scaling; empty without one."""
        path = self.config.run_dir / (
            "eval_length.json" if rope == "ntk" else f"eval_length_{rope}.json"
        )
        return read_json(path) if path.exists() else {}

    def is_evaluated(self, tokens: int) -> bool:
        """Whether its folder has the results of the last step that `run_job` asks for."""
        config = self.config
        lengths = [factor * config.train.seq_len for factor in FACTORS]
        options = {
            "tokens": tokens,
            "skip": 0,
            "data": str(Path(config.data.dir)),
            "lengths": lengths,
        }
        for rope, theta in self.evaluations.items():
            asked = options | {"rope": rope, "rope_theta": theta}
            expected = {"step": config.train.max_steps, "options": asked}
            if not expected.items() <= self.read_evaluation(rope).items():
                return False
        return True

    def numbers(self) -> dict[str, str]:
        """Its line in the table: steps, validation loss, loss over all tokens at 1x and 16x."""
        line = {"run": str(self.config.run_dir), "steps": "-"}
        with suppress(ValueError, OSError):  # of a damaged folder, which is among the failures
            if not self.is_trained():  # the numbers there may be another run's
                return line
            for each in read_jsonl(self.config.run_dir / "metrics.jsonl"):
                if "val_loss" in each:
                    line |= {
                        "steps": str(each["step"]),
                        "validation": format_loss(each["val_loss"]),
                    }
            for rope in self.evaluations:
                result = self.read_evaluation(rope)
                entries = (
                    result["lengths"] if result.get("step") == self.config.train.max_steps else []
                )
                losses = {each["length"]: each.get("loss") for each in entries}
                for factor in (1, 16) if losses else ():
                    line[f"{rope} {factor}x"] = format_loss(
                        losses.get(factor * self.config.train.seq_len)
                    )
        return line


def format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    jobs = make_jobs(args.configs, overrides, args.tag)
    if args.index is not None and args.index not in range(len(jobs)):
        raise UserError(f"--index {args.index}: expected 0 to {len(jobs) - 1}, the number of a run")
    if args.list:
        for i, job in enumerate(jobs):
            print(f"{i:3}  {job.config.run_dir}  {job.state}")
        return
    if args.index is not None:
        jobs = [jobs[args.index]]
    uses_gpus = any(job.config.train.device != "cpu" for job in jobs)
    gpus = torch.cuda.device_count() if uses_gpus else 0
    args.nproc = args.nproc or max(1, gpus // args.jobs)
    check_resources(args, jobs, gpus)
    with StopSignals() as stop:
        failures = run_all(jobs, args, stop)
        if stop.number:
            print(f"stopped by {stop.name_of(stop.number)}: the same command resumes")
            return
    lines = [job.numbers() for job in jobs]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    print(
        format_table([columns, *([line.get(column, "-") for column in columns] for line in lines)])
    )
    evaluated = " and evaluated" if args.eval_tokens else ""
    print(f"{len(jobs) - len(failures)} of {len(jobs)} runs are trained{evaluated}")
    if failures:
        print("\n".join(failures))
        sys.exit(1)


def make_jobs(configs: list[str], overrides: list[str], tag: str | None) -> list[Job]:
    """All runs of all files, checked before the first one starts; prints which repeat another: left
    out.

    Raises UserError: a config with a problem; two runs of one name.
    """
    if any(word.partition("=")[0] == "--name" for word in overrides):
        raise UserError(
            "--name: runs are named after their files; expected --tag WORD, added to each name"
        )
    jobs: dict[Path, Job] = {}
    for run in (run for path in configs for run in expand_sweep(path, overrides)):
        arguments = [*run.overrides, *overrides]
        config = load_config(run.path, arguments)
        if tag:
            arguments += ["--name", f"{config.name}_{tag}"]
            config = load_config(run.path, arguments)
        if config.run_dir in jobs:
            raise UserError(
                f"{run.path}: two runs would be called {config.run_dir}; expected other names"
            )
        twin = next((job.config for job in jobs.values() if same_run(job.config, config)), None)
        if twin:
            print(f"left out: {config.run_dir}, the same run as {twin.run_dir}")
        else:
            jobs[config.run_dir] = Job([str(run.path), *arguments], config)
    return list(jobs.values())


def check_resources(args: argparse.Namespace, jobs: list[Job], gpus: int) -> None:
    """Raises UserError for too few tokens of an evaluation, or more processes than GPUs."""
    needed = 16 * max(job.config.train.seq_len for job in jobs)
    if args.eval_tokens and args.eval_tokens < needed:
        raise UserError(
            f"--eval-tokens {args.eval_tokens}: expected at least {needed}, 16 windows, or 0"
        )
    # CUDA would show the last runs none
    if gpus and args.jobs > 1 and args.jobs * args.nproc > gpus:
        processes = f"--jobs {args.jobs} --nproc {args.nproc}"
        raise UserError(f"{processes}: expected at most {gpus} processes, one a GPU")


def run_all(jobs: list[Job], args: argparse.Namespace, stop: StopSignals) -> list[str]:
    """Run the jobs, --jobs at a time. Returns a line for each failure."""
    slots: SimpleQueue[int] = SimpleQueue()  # free shares of the machine
    for slot in range(args.jobs):
        slots.put(slot)

    def failure_of(i: int) -> str | None:
        slot = slots.get()
        run_dir = jobs[i].config.run_dir
        try:
            failure = run_job(jobs[i], f"{i + 1}/{len(jobs)}", args, slot, stop)
        except (ValueError, OSError) as e:  # an unreadable run folder: the others may be fine
            failure = str(e)
        finally:
            slots.put(slot)
        if failure is None or stop.number:
            return None
        line = f"failed: {run_dir}: {failure}"
        print(line, flush=True)
        return line

    with ThreadPoolExecutor(args.jobs) as pool:
        return [line for line in pool.map(failure_of, range(len(jobs))) if line]


def run_job(
    job: Job, number: str, args: argparse.Namespace, slot: int, stop: StopSignals
) -> str | None:
    """Do the job's unfinished commands. Returns the failure; None: success, or a signal came."""
    run_dir = job.config.run_dir
    is_evaluated = not args.eval_tokens or job.is_evaluated(args.eval_tokens)
    with exclusive_lock(run_dir):  # of a training
        commands = [] if job.is_trained(lazily=is_evaluated) else [["train.py", *job.arguments]]
        if not commands and is_evaluated:  # train.py and eval_length.py warn themselves
            job.warn_of_changed_code()
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


if __name__ == "__main__":
    run_main(main)
