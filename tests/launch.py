"""Runs for tests: train.py in this process or in children of it, and what is in their folders."""

import json
import os
import socket
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch._inductor  # TrainState imports it. Here it is before the first freeze of conftest.py

import train
from config import load_config
from infra.cli import run_main
from infra.distributed import World
from training.state import TrainState

ROOT = Path(__file__).parents[1]
CPU = World(0, 1, torch.device("cpu"))


def build(path, *overrides):
    return TrainState(load_config(path, list(overrides)), CPU)


def resume(state):
    """Train from the newest checkpoint or from scratch; returns the run folder."""
    train.train(state, train.start_or_resume(state))
    return state.config.run_dir


def run(path, *overrides):
    return resume(build(path, *overrides))


def records(run_dir):
    """metrics.jsonl, in which each step must be once and in order."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "val_loss"):
        steps = [line["step"] for line in lines if key in line]
        assert steps == sorted(set(steps)), f"{key} of a step twice or out of order: {steps}"
    return lines


def metrics(run_dir, key):
    return {record["step"]: record[key] for record in records(run_dir) if key in record}


def curve(run_dir):
    """What must not depend on kills and clocks."""
    return [
        tuple(r.get(key) for key in ("step", "loss", "grad_norm", "val_loss"))
        for r in records(run_dir)
    ]


class Forked:
    """A script's main() in a child of this process, where torch is imported and patches hold.

    Its methods are those of subprocess.Popen.
    """

    def __init__(self, main, *args, **env):
        self._output = [TemporaryFile("w+") for _ in ("stdout", "stderr")]  # noqa: SIM115
        argv = [main.__module__, *map(str, args)]
        fork = get_context("fork")
        self._process = fork.Process(target=self._run, args=(main, argv, env), daemon=True)
        self._process.start()

    def _run(self, main, argv, env):
        for number, file in enumerate(self._output, start=1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))  # not pytest's
        sys.argv = argv
        os.environ |= env
        run_main(main)

    def send_signal(self, number):
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout=120):
        """What it printed. Raises AssertionError: it still runs after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError(f"no end after {timeout} s")
        for file in self._output:
            file.seek(0)
        stdout, stderr = (file.read() for file in self._output)
        return stdout, stderr

    @property
    def returncode(self):
        return self._process.exitcode


def fork_ranks(main, *args, second=()):
    """Two ranks as torchrun starts them on two machines, the second with more arguments."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    more = ((), second)
    return [Forked(main, *args, *more[rank], RANK=str(rank), **world) for rank in (0, 1)]


def finish(ranks, status=0):
    """stdout and stderr of each, which must end with this exit status."""
    output = [process.communicate() for process in ranks]
    assert [process.returncode for process in ranks] == [status, status], output
    return output


def break_at(steps, monkeypatch, rank=0):
    """Make the loss and gradients of these steps NaN, on one rank."""
    forward = train.forward_backward

    def broken(state, batch):
        loss = forward(state, batch)
        if state.step + 1 not in steps or state.world.rank != rank:
            return loss
        for p in state.raw_model.parameters():
            assert p.grad is not None
            p.grad.fill_(torch.nan)
        return loss * torch.nan

    monkeypatch.setattr(train, "forward_backward", broken)
