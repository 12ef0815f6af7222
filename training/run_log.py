"""The log of a run, written by rank 0 to its folder.

metrics.jsonl has a line per step and one per validation, in which null is NaN or infinity:

    step, loss, lr, grad_norm
    tokens_per_s, step_ms, mfu, memory_gb at logged steps
    val_loss, and val_cross_entropy of the unscaled logits if train.loss is not softmax
"""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from config import to_toml
from infra.cli import UserError, drop_output
from infra.distributed import World
from infra.files import append_synced, read_jsonl, write_atomically
from normalisers.own import files_of
from schema import Config, describe_layers
from training.state import TrainState


class RunLog:
    """metrics.jsonl, the console and W&B. Only rank 0 prints and writes.

    Records wait for a `flush`. Before `open_folder` nothing is written to disk.
    """

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.config = state.config
        self.world = state.world
        self.pending: list[dict[str, Any]] = []
        self.restart_clock()
        self.metrics: Path | None = None
        self.lacks_validation = False  # of the step that was resumed
        self.wandb: Any = None

    def open_folder(self, init_summary: list[str]) -> None:
        """Make the run folder, and drop metrics of steps after those in the state.

        init_summary is what init_from copied. Raises UserError: the folder cannot be written, or
        has the numbers of other weights.
        """
        if not self.world.is_main:
            return
        run_dir = self.config.run_dir
        step = self.state.step
        self.metrics = run_dir / "metrics.jsonl"
        checkpoints = run_dir / "checkpoints"
        is_writable = checkpoints.is_dir() and os.access(checkpoints, os.W_OK)
        if os.path.lexists(checkpoints) and not is_writable and step < self.config.train.max_steps:
            raise UserError(f"{checkpoints}: expected a folder that can be written")
        run_dir.mkdir(parents=True, exist_ok=True)
        logged = [each for each in read_jsonl(self.metrics) if isinstance(each.get("step"), int)]
        unsaved = max((each["step"] for each in logged), default=0)
        has_rows = (run_dir / "rows.csv").exists()
        if not self.state.is_resumed and (has_rows or unsaved > self.config.train.checkpoint_every):
            problem = "has numbers of a run whose checkpoints are gone"
            raise UserError(f"{run_dir}: {problem}: choose another --name, or remove the folder")
        kept = [each for each in logged if each["step"] <= step]
        is_validated = any(each["step"] == step for each in kept if "val_loss" in each)
        self.lacks_validation = (
            step > 0 and self.state.is_due(self.config.train.val_every) and not is_validated
        )
        for file, source in files_of(self.config.normalisers).items():
            write_atomically(run_dir / file, source)
        write_atomically(run_dir / "config.toml", to_toml(self.config).encode())
        write_atomically(self.metrics, to_jsonl(kept).encode())
        append_synced(run_dir / "starts.jsonl", to_jsonl([start_record(self.world, step)]))
        if init_summary:
            write_atomically(run_dir / "init_from.txt", "\n".join([*init_summary, ""]).encode())
            self.print(*init_summary)
        if self.config.log.wandb:
            self.wandb = open_wandb(self.config, run_dir / "starts.jsonl")

    def restart_clock(self) -> None:
        """Exclude the time so far, and the pending steps: it was not training alone."""
        self._began = time.perf_counter()
        self._n_untimed = len(self.pending)

    def print(self, *lines: str) -> None:
        if not self.world.is_main:
            return
        try:
            print(*lines, sep="\n", flush=True)
        # Ctrl-C has ended `| tee`, too, or its disk is full: this run still has to save
        except OSError as e:
            drop_output()
            with suppress(OSError):
                print(f"warning: no more output: {e.strerror}", file=sys.stderr, flush=True)

    def add_step(self, loss: float, grad_norm: float, lr: float) -> None:
        record = {"step": self.state.step, "loss": loss, "lr": lr, "grad_norm": grad_norm}
        self.pending.append(record)

    def flush(self) -> None:
        """Write the pending records, the newest with the mean speed, sync them to disk, print the
        newest.
        """
        if not self.pending:
            return
        max_steps = self.config.train.max_steps
        last = self.pending[-1]
        seconds = (time.perf_counter() - self._began) / max(1, len(self.pending) - self._n_untimed)
        tokens_per_s = self.config.train.batch_tokens / seconds
        last |= {"tokens_per_s": round(tokens_per_s), "step_ms": round(1000 * seconds, 2)}
        peak = peak_flops(self.world.device)
        if peak is not None:
            flops_per_s = self.state.raw_model.flops_per_token() * tokens_per_s
            last["mfu"] = round(flops_per_s / (peak * self.world.size), 4)
        last["memory_gb"] = round(peak_memory(self.world.device) / 1e9, 3)
        self._write(self.pending)
        self.pending = []
        self.restart_clock()
        left = format_duration((max_steps - last["step"]) * seconds)
        mfu = f" | mfu {last['mfu']:.1%}" if "mfu" in last else ""
        step = f"step {last['step']}/{max_steps} | loss {last['loss']:.4f} | lr {last['lr']:.2e}"
        speed = f"{last['tokens_per_s']:,} tokens/s{mfu} | {left} left"
        self.print(f"{step} | grad norm {last['grad_norm']:.2f} | {speed}")

    def add_validation(
        self,
        val_loss: float,
        unscaled: float | None = None,
        expected: float | None = None,
    ) -> None:
        """unscaled: cross-entropy of unscaled logits. expected: llm.c's loss at this step. None: does
        not apply.
        """
        record = {"step": self.state.step, "val_loss": val_loss}
        line = f"step {self.state.step} | validation loss {val_loss:.4f}"
        if unscaled is not None:
            record["val_cross_entropy"] = unscaled
            line += f" | cross-entropy of the unscaled logits {unscaled:.4f}"
        if expected is not None:
            line += f" | {val_loss - expected:+.4f} to llm.c's {expected:.4f}"
        self._write([record])
        self.print(line)

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self.metrics is None:
            return
        append_synced(self.metrics, to_jsonl(records))
        try:
            for record in records if self.wandb else ():
                self.wandb.log(record)
        except Exception as e:  # its process may be killed before this one has saved
            self.wandb = None
            self.print(f"warning: log.wandb ends here, metrics.jsonl goes on: {e}")

    def close(self, line: str) -> None:
        self.print(line)
        if self.wandb:
            self.wandb.finish()

    def describe_run(self) -> None:
        """Print model, attention, data and step, a line each."""
        config = self.config
        train = config.train
        raw_model = self.state.raw_model
        n_tokens = self.state.batches.stream.n_tokens
        epochs = train.max_steps * train.batch_tokens / n_tokens
        n_val = min(train.val_tokens, self.state.val_stream.n_tokens)
        processes = "1 process" if self.world.size == 1 else f"{self.world.size} processes"
        self.print(
            f"run      {config.run_dir}",
            f"model    {raw_model.n_params() / 1e6:.2f}M parameters, {config.model.n_layer} layers, "
            f"{config.model.heads}, width {config.model.n_embd}",
            f"attention {describe_layers(config)}, engine {raw_model.engine_note}",
            f"data     {config.data.dir}: {n_tokens:,} training tokens ({epochs:.2f} epochs), "
            f"{n_val:,} of validation",
            f"step     {train.batch_tokens:,} tokens, {self.state.batches.micro} sequences at a time, "
            f"T = {train.seq_len}, {processes} on {self.world.device.type}, {train.dtype}",
        )
        if self.state.compiles:
            self.print("compiling the model: the first step takes a minute or more")


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 matrix-multiplication FLOP/s from the data sheet; None for a device not in this
    list.
    """
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheets = {
        "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H200": 989e12, "H100": 989e12,
        "GB200": 2500e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12,
    }  # fmt: skip
    return next((flops for card, flops in sheets.items() if card in device_name), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def start_record(world: World, step: int) -> dict[str, Any]:
    """What explains a start later: command, commit, versions, hardware."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "command": sys.orig_argv,
        "commit": git_commit(),
        # with that of CUDA
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "host": platform.node(),
        "device": gpu or platform.processor() or platform.machine(),
        "processes": world.size,
        "threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """The commit of the code, with "+" if tracked files differ from it; None outside a git
    checkout.
    """
    command = ["git", "-c", "safe.directory=*"]  # also where the checkout is another user's
    command += ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        here = Path(__file__).parent
        described = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
        return described.stdout.strip() or None
    return None


def open_wandb(config: Config, starts: Path) -> Any:
    """The W&B run of the folder whose first start `starts` has, new or resumed.

    Raises UserError: no key, no network.
    """
    import wandb

    first_start = starts.read_text("utf-8").partition("\n")[0]
    try:
        run = wandb.init(
            project=config.log.wandb_project,
            name=config.name,
            id=sha256(first_start.encode()).hexdigest()[:8],
            resume="allow",
            dir=str(config.run_dir),
            config=config.model_dump(),
        )
    except wandb.Error as e:
        raise UserError(f"log.wandb: {' '.join(str(e).split())}") from None
    run.define_metric("*", step_metric="step")  # its own steps could not go back, as after a kill
    return run


def to_jsonl(records: list[dict[str, Any]]) -> str:
    """A line per record, with null for NaN and infinity, which JSON does not have."""
    without_nan = (
        json.loads(json.dumps(record), parse_constant=lambda name: None) for record in records
    )
    return "".join(json.dumps(record) + "\n" for record in without_nan)


def format_duration(seconds: float) -> str:
    """3725 -> '1:02:05'."""
    return str(timedelta(seconds=round(seconds)))
