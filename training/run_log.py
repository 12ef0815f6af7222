"""The log of a run, written by rank 0 to its folder.

config.toml      the resolved config; `train.py` takes it like any other
metrics.jsonl    a line per step and one per validation; null is NaN or infinity
                   step, loss, lr, grad_norm
                   tokens_per_s, step_ms and its parts, mfu, memory_gb at logged steps
                   qk_std and entropy as {"layer_0": ...}, logit_std every log.attention_every steps
                   val_loss, and val_cross_entropy of the unscaled logits if train.loss is not softmax
init_from.txt    with init_from: what was copied, what is new, what was dropped
starts.jsonl     a line per start: time, step, command, git commit, versions, hardware
wandb_id         with log.wandb: the W&B run, which a resumed run continues
"""

import itertools
import json
import os
import platform
import resource
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch

from config import to_toml
from data.batches import val_windows
from infra.cli import UserError, drop_output
from infra.distributed import World
from infra.files import append_synced, read_jsonl, write_atomically
from schema import Config, describe_attention
from training.state import TrainState


class RunLog:
    """metrics.jsonl, the console and W&B. Only rank 0 prints and writes.

    Records wait for a `flush`. Before `open_folder` (in a dry run) nothing is written to disk.
    """

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.config = state.config
        self.world = state.world
        self.pending: list[dict[str, Any]] = []
        self.clock = Clock(state)
        self.metrics: Path | None = None
        self.wandb: Any = None

    def open_folder(self, init_summary: list[str]) -> None:
        """Make the run folder, and drop metrics of steps and validations after those in the state.

        init_summary is what init_from copied. Raises UserError: the folder cannot be written.
        """
        if not self.world.is_main:
            return
        run_dir = self.config.run_dir
        step = self.state.step
        val_step = self.state.validation["step"]
        self.metrics = run_dir / "metrics.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        if step == 0 and val_step < 0 and read_jsonl(self.metrics):
            old = set_aside(run_dir)
            self.print(f"{run_dir} has no checkpoint: starting at step 0, its results are now in {old}")
        write_atomically(run_dir / "config.toml", to_toml(self.config).encode())
        kept = records_up_to(read_jsonl(self.metrics), step, val_step)
        write_atomically(self.metrics, to_jsonl(kept).encode())
        append_synced(run_dir / "starts.jsonl", to_jsonl([start_record(self.world, step)]))
        if init_summary:
            write_atomically(run_dir / "init_from.txt", "\n".join([*init_summary, ""]).encode())
            self.print(*init_summary)
        if self.config.log.wandb:
            self.wandb = open_wandb(self.config)

    def print(self, *lines: str) -> None:
        if not self.world.is_main:
            return
        try:
            print(*lines, sep="\n", flush=True)
        except BrokenPipeError:  # Ctrl-C has ended `| tee`, too, and this run still has to save
            drop_output()

    def add_step(self, loss: float, grad_norm: float, lr: float, skipped: str = "") -> None:
        record = {"step": self.state.step, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        self.pending.append(record | ({"skipped": skipped} if skipped else {}))

    def flush(self) -> None:
        """Write the pending records, sync them to disk, print the newest."""
        if not self.pending:
            return
        max_steps = self.config.train.max_steps
        last = self.pending[-1]
        last |= self.clock.report()
        self._write(self.pending)
        self.pending = []
        left = format_duration((max_steps - last["step"]) * last["step_ms"] / 1000)
        mfu = f" | mfu {last['mfu']:.1%}" if "mfu" in last else ""
        self.print(
            f"step {last['step']:>{len(str(max_steps))}}/{max_steps} | loss {last['loss']:.4f} | "
            f"lr {last['lr']:.2e} | grad norm {last['grad_norm']:.2f} | "
            f"{last['tokens_per_s']:,} tokens/s{mfu} | {left} left"
        )

    def add_validation(self, val_loss: float, unscaled: float | None = None) -> None:
        record = {"step": self.state.step, "val_loss": val_loss}
        width = len(str(self.config.train.max_steps))
        line = f"step {self.state.step:>{width}} | validation loss {val_loss:.4f}"
        if unscaled is not None:
            record["val_cross_entropy"] = unscaled
            line += f" | cross-entropy of the unscaled logits {unscaled:.4f}"
        self._write([record])
        self.print(line)

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self.metrics is None:
            return
        append_synced(self.metrics, to_jsonl(records))
        if self.wandb is not None:
            for record in records:
                self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self, line: str) -> None:
        self.print(line)
        if self.wandb is not None:
            self.wandb.finish()

    def describe_run(self) -> None:
        """Print model, attention, data and step, a line each."""
        config = self.config
        model = config.model
        train = config.train
        batches = self.state.batches
        raw_model = self.state.raw_model
        n_tokens = batches.stream.n_tokens
        epochs = train.max_steps * train.batch_tokens / n_tokens
        n_val = train.seq_len * val_windows(self.state.val_stream, train.val_tokens, train.seq_len)
        n_micro = batches.per_rank // batches.micro
        self.print(
            f"run      {config.run_dir}",
            f"model    {raw_model.n_params() / 1e6:.2f}M parameters, {model.n_layer} layers, "
            f"{model.heads}, width {model.n_embd}",
            f"attention {describe_attention(config.attention, model)}, engine {raw_model.engine.note}",
            f"data     {config.data.dir}: {n_tokens:,} training tokens ({epochs:.2f} epochs), "
            f"validation on {n_val:,}",
            f"step     {train.batch_tokens:,} tokens = {self.world.size} processes x {n_micro} micro-batches "
            f"x {batches.micro} sequences x {train.seq_len} on {self.world.device.type}, {train.dtype}",
        )
        if self.state.local_model is not raw_model:
            self.print("compiling the model: the first step takes a minute or more")


class Clock:
    """Where a step's time goes: data, forward and backward, optimiser, other.

    GPU work is timed only where the step syncs anyway, for the guard. The optimiser's kernels count where
    the host next waits, in the next step's forward and backward.
    """

    def __init__(self, state: TrainState) -> None:
        self.world = state.world
        self.tokens_per_step = state.config.train.batch_tokens
        self.flops_per_token = state.raw_model.flops_per_token()
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last step: it was not training."""
        self.parts = {"data": 0.0, "forward_backward": 0.0, "optimizer": 0.0, "other": 0.0}
        self.n_steps = 0
        self.began = self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`."""
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now

    def report(self) -> dict[str, Any]:
        """Means over the steps since the last report."""
        self.mark("other")
        seconds = max(self.last - self.began, 1e-9)
        tokens_per_s = self.n_steps * self.tokens_per_step / seconds
        record: dict[str, Any] = {"tokens_per_s": round(tokens_per_s)}
        for part, total in ({"step": seconds} | self.parts).items():
            record[f"{part}_ms"] = round(1000 * total / max(1, self.n_steps), 2)
        peak = peak_flops(self.world.device)
        if peak is not None:
            record["mfu"] = round(self.flops_per_token * tokens_per_s / (peak * self.world.size), 4)
        record["memory_gb"] = round(peak_memory(self.world.device) / 1e9, 3)
        self.restart()
        return record


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 matrix-multiplication FLOP/s from the data sheet; None for a device not in this list."""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheets = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
    return next((flops for card, flops in sheets.items() if card in device_name), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def start_record(world: World, step: int) -> dict[str, Any]:
    """What explains a start later: command, commit, versions, hardware."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "command": sys.orig_argv,
        "commit": git_commit(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "numpy": numpy.__version__,
        },
        "host": platform.node(),
        "device": gpu or platform.processor() or platform.machine(),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }  # fmt: skip


def git_commit() -> str | None:
    """The commit of the code, with "+" if tracked files differ from it; None outside a git checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    options: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, timeout=10, **options).stdout.strip() or None
    return None


def open_wandb(config: Config) -> Any:
    """The W&B run of this run folder, new or resumed. Raises UserError: no key, no network."""
    import wandb

    path = config.run_dir / "wandb_id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(4).encode())
    try:
        return wandb.init(
            project=config.log.wandb_project, name=config.name, id=path.read_text().strip(), resume="allow",
            dir=str(config.run_dir), config=config.model_dump(),
        )  # fmt: skip
    except wandb.Error as e:
        raise UserError(f"log.wandb: {' '.join(str(e).split())}") from None


def records_up_to(records: list[dict[str, Any]], step: int, val_step: int) -> list[dict[str, Any]]:
    """The metrics that a run resumed at `step` keeps, its newest validation being that of `val_step`."""
    return [record for record in records if record["step"] <= (val_step if "val_loss" in record else step)]


def to_jsonl(records: list[dict[str, Any]]) -> str:
    """A line per record, with null for NaN and infinity, which JSON does not have."""
    without_nan = (json.loads(json.dumps(record), parse_constant=lambda name: None) for record in records)
    return "".join(json.dumps(record) + "\n" for record in without_nan)


def format_duration(seconds: float) -> str:
    """3725 -> '1:02:05'."""
    return str(timedelta(seconds=round(seconds)))


def set_aside(run_dir: Path) -> Path:
    """Move what a training left of which no checkpoint is there to <run_dir>/old_1, or old_2, ..."""
    old = next(path for i in itertools.count(1) if not (path := run_dir / f"old_{i}").exists())
    old.mkdir()
    for pattern in ("metrics.jsonl", "eval_*", "rows.csv", "init_from.txt"):
        for path in run_dir.glob(pattern):
            path.rename(old / path.name)
    return old
