"""What a run leaves behind besides checkpoints, written by the main process.

config.toml      the resolved config; `train.py` takes it like any other
metrics.jsonl    a line for each step: step, loss, lr, grad_norm; where one was printed also tokens_per_s,
                 step_ms and its parts, mfu, memory_gb; every log.attention_every steps score_std and entropy,
                 {"layer_0": ...} each; {"step", "val_loss"} where it was validated, with "val_cross_entropy",
                 that of the bare logits, if train.loss is not softmax
init_from.txt    with init_from: what was taken over, what is new, what was dropped
starts.jsonl     a line for each start: time, step, command, git commit, versions, hardware
wandb_id         with log.wandb: the W&B run that a resumed run goes on with
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch

from config import Config, to_toml
from infra.cli import UserError
from infra.distributed import World
from infra.files import write_atomically


class RunLog:
    """metrics.jsonl, the console and W&B. Records wait for a `flush`; only the main process writes."""

    def __init__(self, config: Config, world: World, step: int, val_step: int, flops_per_step: float):
        self.config, self.world, self.flops_per_step = config, world, flops_per_step
        self.pending: list[dict[str, Any]] = []
        self.clock = Clock(world.device)
        self.started = time.time()
        self.wandb: Any = None
        if not world.is_main:
            return
        run_dir = config.run_dir
        self.metrics = run_dir / "metrics.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if step == 0 and val_step < 0 and self.metrics.exists():
                old = self.metrics.rename(run_dir / "metrics.jsonl.old")
                self.say(f"{run_dir} has no checkpoint: starting from step 0, its metrics are now {old.name}")
            write_atomically(run_dir / "config.toml", to_toml(config).encode())
            write_atomically(self.metrics, "".join(lines_up_to(self.metrics, step, val_step)).encode())
            with open(run_dir / "starts.jsonl", "a") as f:
                f.write(json.dumps(start_record(world, step)) + "\n")
        except OSError as e:
            raise UserError(f"{run_dir}: the run folder cannot be written: {e.strerror}") from None
        if config.log.wandb:
            self.wandb = open_wandb(config)

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def add_step(self, step: int, loss: float, grad_norm: float, lr: float, skipped: str = "") -> None:
        record = {"step": step, "loss": finite(loss), "lr": lr, "grad_norm": finite(grad_norm)}
        self.pending.append(record | ({"skipped": skipped} if skipped else {}))

    def add_to_step(self, values: dict[str, Any]) -> None:
        """More about the step that was added last."""
        self.pending[-1] |= values

    def flush(self) -> None:
        """Write the pending records, force them to the disk, print the newest."""
        if not self.pending:
            return
        last, max_steps = self.pending[-1], self.config.train.max_steps
        last |= self.clock.report(self.config.train.batch_tokens, self.flops_per_step, self.world.size)
        self.write(self.pending)
        step, self.pending = last["step"], []
        left = duration((max_steps - step) * last["step_ms"] / 1000)
        cells = [
            f"step {step:>{len(str(max_steps))}}/{max_steps}",
            f"loss {last['loss']:.4f}" if last["loss"] is not None else "loss not finite",
            f"lr {last['lr']:.2e}",
            f"grad norm {last['grad_norm']:.2f}" if last["grad_norm"] is not None else "grad norm not finite",
            f"{short(last['tokens_per_s'])} tokens/s",
            *([f"mfu {last['mfu']:.1%}"] if "mfu" in last else []),
            f"{left} left",
        ]
        self.say(" | ".join(cells))

    def add_validation(self, step: int, val_loss: float, plain: float | None = None) -> None:
        record = {"step": step, "val_loss": finite(val_loss)}
        text = f"step {step:>{len(str(self.config.train.max_steps))}} | validation loss {val_loss:.4f}"
        if plain is not None:
            record["val_cross_entropy"] = finite(plain)
            text += f" | cross-entropy of the bare logits {plain:.4f}"
        self.write([record])
        self.say(text)

    def write_file(self, name: str, lines: list[str]) -> None:
        if self.world.is_main:
            write_atomically(self.config.run_dir / name, "\n".join([*lines, ""]).encode())

    def write(self, records: list[dict[str, Any]]) -> None:
        if not self.world.is_main:
            return
        try:
            with open(self.metrics, "a") as f:
                f.writelines(json.dumps(record) + "\n" for record in records)
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise UserError(f"{self.metrics}: cannot be written: {e.strerror}") from None
        if self.wandb is not None:
            for record in records:
                self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def seconds(self) -> float:
        return time.time() - self.started

    def close(self, text: str) -> None:
        self.say(text)
        if self.wandb is not None:
            self.wandb.finish()


class DryLog(RunLog):
    """A log that leaves nothing behind."""

    def __init__(self, config: Config, world: World, flops_per_step: float):
        self.config, self.world, self.flops_per_step = config, world, flops_per_step
        self.pending, self.clock, self.wandb = [], Clock(world.device), None

    def write(self, records: list[dict[str, Any]]) -> None:
        pass


class Clock:
    """Where a step's time goes: data, forward and backward, optimiser, and the rest.

    Work on a GPU is waited for only where the step waits anyway (for the decision whether to take it), so
    the optimiser's kernels count where their end is waited for: at the next step's forward and backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """What has passed since the last step was not training."""
        self.parts = {"data": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        self.n_steps = 0
        self.began = self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        """The time since the last mark went into `part`."""
        now = time.perf_counter()
        if part in self.parts:
            self.parts[part] += now - self.last
        self.last = now

    def report(self, tokens_per_step: int, flops_per_step: float, n_processes: int) -> dict[str, Any]:
        """Means over the steps since the last report."""
        seconds = max(time.perf_counter() - self.began, 1e-9) / max(1, self.n_steps)
        parts = {f"{name}_ms": 1000 * total / max(1, self.n_steps) for name, total in self.parts.items()}
        parts["other_ms"] = 1000 * seconds - sum(parts.values())
        record = {"tokens_per_s": round(tokens_per_step / seconds), "step_ms": 1000 * seconds} | parts
        record = {key: round(value, 2) for key, value in record.items()}
        peak = peak_flops(self.device)
        if peak:
            record["mfu"] = round(flops_per_step / seconds / (peak * n_processes), 4)
        record["memory_gb"] = round(peak_memory(self.device) / 1e9, 3)
        self.restart()
        return record


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 matrix-multiplication FLOP/s from the maker's data sheet; None: not in this list."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    sheets = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
    return next((flops for key, flops in sheets.items() if key in name), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def start_record(world: World, step: int) -> dict[str, Any]:
    """What one would want to know of a start when its run looks odd a month later."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "command": sys.orig_argv,
        "commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": numpy.__version__,
        },
        "host": platform.node(),
        "device": gpu or platform.processor() or platform.machine(),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def git_commit() -> str | None:
    """The commit of the code, with "+" if files differ from it; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def open_wandb(config: Config) -> Any:
    """The W&B run that belongs to this run folder, new or resumed."""
    import wandb

    path = config.run_dir / "wandb_id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(4).encode())
    return wandb.init(
        project=config.log.wandb_project,
        name=config.name,
        id=path.read_text().strip(),
        resume="allow",
        dir=str(config.run_dir),
        config=config.model_dump(),
    )


def lines_up_to(metrics: Path, step: int, val_step: int) -> list[str]:
    """The lines of a metrics.jsonl that a run resumed at `step` keeps; later ones will come again.

    Args:
        val_step: of the newest validation that the checkpoint knows of.
    """
    if not metrics.exists():
        return []
    kept = []
    for line in metrics.read_text().splitlines(keepends=True):
        try:
            record = json.loads(line)
            if record["step"] <= (val_step if "val_loss" in record else step):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # cut short when the run was killed
    return kept


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, but for a line that was cut short; none if it is not there."""
    path, records = run_dir / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def short(number: float) -> str:
    """1234567 -> '1.23M'."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3725 -> '1h02m'."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"
