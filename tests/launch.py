"""Runs for tests: train.py in this process or in others, and what is in their folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from config import load_config
from infra.distributed import World
from training.state import TrainState

ROOT = Path(__file__).parents[1]
CPU = World(0, 1, torch.device("cpu"))


def build(path: Path, *overrides: str) -> TrainState:
    return TrainState(load_config(path, list(overrides)), CPU)


def resume(state: TrainState) -> Path:
    """Train from the newest checkpoint or from scratch; returns the run folder."""
    train.train(state, train.start_or_resume(state))
    return state.config.run_dir


def run(path: Path, *overrides: str) -> Path:
    return resume(build(path, *overrides))


def records(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, in which each step must be once and in order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "val_loss"):
        steps = [line["step"] for line in lines if key in line]
        assert steps == sorted(set(steps)), f"{key} of a step twice or out of order: {steps}"
    return lines


def metrics(run_dir: Path, key: str) -> dict[int, float]:
    return {record["step"]: record[key] for record in records(run_dir) if key in record}


def curve(run_dir: Path) -> list[tuple[Any, ...]]:
    """What must not depend on kills and clocks."""
    return [tuple(r.get(key) for key in ("step", "loss", "grad_norm", "val_loss")) for r in records(run_dir)]


def start(*args: object, script: str = "train.py", processes: int = 1, **env: Any) -> subprocess.Popen[str]:
    """train.py in processes of its own, under torchrun if there are several."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen(
        [*command, script, *map(str, args)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **env},
    )  # fmt: skip


def run_script(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    process = start(*args, **options)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start_ranks(*args: object, **options: Any) -> list[subprocess.Popen[str]]:
    """Two ranks as torchrun starts them, without a process of its own, which takes as long as one of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [start(*args, RANK=str(i), LOCAL_RANK=str(i), **world, **options) for i in (0, 1)]


# train.py whose forward_backward does something at step 5 of one rank: {what}
PATCHED = """
import math, os, sys
sys.path.insert(0, {root!r})
import train
from infra.cli import UserError, run_main

forward = train.forward_backward

def patched(state, batch):
    loss = forward(state, batch)
    if state.world.rank == {rank} and state.step == 4:
        {what}
    return loss

train.forward_backward = patched
run_main(train.main)
"""


def patched_script(folder: Path, what: str, rank: int = 0) -> str:
    path = folder / "patched.py"
    path.write_text(PATCHED.format(root=str(ROOT), what=what, rank=rank))
    return str(path)


def break_at(steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss and gradients of these steps NaN."""
    forward = train.forward_backward

    def broken(state: TrainState, batch: Any) -> torch.Tensor:
        loss = forward(state, batch)
        if state.step + 1 not in steps:
            return loss
        for p in state.raw_model.parameters():
            assert p.grad is not None
            p.grad.fill_(torch.nan)
        return loss * torch.nan

    monkeypatch.setattr(train, "forward_backward", broken)
