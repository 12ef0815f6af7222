"""Signals and kills: the step is finished and saved if there is time, and the curve is the same after all."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Forked, build, curve, finish, fork_ranks, records, resume, run

import train
from config import load_config, to_toml
from infra.distributed import StopSignals, World
from training.checkpoint import find_checkpoints, load_checkpoint
from training.state import TrainState


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_the_same_command_resumes(
    tiny_config: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    whole = run(tiny_config, "--name", "whole")
    forward = train.forward_backward

    def forward_with_signal(state: TrainState, batch: Any) -> torch.Tensor:
        if state.step == 6:
            os.kill(os.getpid(), number)
        return forward(state, batch)

    before = {n: signal.getsignal(n) for n in StopSignals.SIGNALS}
    with monkeypatch.context() as patch:
        patch.setattr(train, "forward_backward", forward_with_signal)
        stopped = run(tiny_config, "--name", "stopped")
    assert {n: signal.getsignal(n) for n in StopSignals.SIGNALS} == before
    assert find_checkpoints(stopped)[0].name == "step_000007.pt"
    assert curve(stopped)[-1][0] == 7
    run(tiny_config, "--name", "stopped")
    assert curve(stopped) == curve(whole)


def test_a_signal_during_validation_stops_it_and_it_is_done_on_resume(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also while p is raised: the validation is of the last step's p."""
    power = ["--attention.normaliser", "lssa", "--attention.reweight-p", "7"]
    tiny_config.write_text(to_toml(load_config(tiny_config, [*power, "--attention.reweight-p-warmup", "12"])))
    whole = run(tiny_config, "--name", "whole")
    state = build(tiny_config, "--name", "stopped")
    asked = []
    on_any_rank = StopSignals.on_any_rank

    def on_any_rank_with_signal(stop: StopSignals, world: World) -> str | None:
        asked.append(state.step)
        if asked.count(8) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return on_any_rank(stop, world)

    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "on_any_rank", on_any_rank_with_signal)
        stopped = resume(state)
    assert asked.count(8) == 2 and state.step == 8
    assert [r["step"] for r in records(stopped) if "val_loss" in r] == [4]
    run(tiny_config, "--name", "stopped")
    assert curve(stopped) == curve(whole)


def test_a_second_ctrl_c_does_not_wait():
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, from torchrun and from the terminal
        assert stop.number == signal.SIGINT
        stop._interrupted -= 2
        os.kill(os.getpid(), signal.SIGINT)


def wait_for_checkpoint(folder: Path) -> None:
    end = time.monotonic() + 60
    while not find_checkpoints(folder) and time.monotonic() < end:
        time.sleep(0.01)


def test_a_killed_run_resumes_to_the_same_curve(tiny_config: Path):
    """SIGKILL at a random moment after the first checkpoint; benchmarks/chaos.py does it at length."""
    flags = ["--train.max-steps", "120", "--train.checkpoint-every", "20", "--train.val-every", "120"]
    whole = run(tiny_config, *flags, "--name", "whole")
    killed = tiny_config.parent / "runs" / "killed"
    process = Forked(train.main, tiny_config, *flags, "--name", "killed")
    wait_for_checkpoint(killed)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and curve(killed) != curve(whole)
    run(tiny_config, *flags, "--name", "killed")
    assert curve(killed) == curve(whole)


def test_a_signal_to_one_of_two_processes_stops_both(tiny_config: Path):
    """As SLURM may send it: both stop after the same step, with status 0."""
    ranks = fork_ranks(train.main, tiny_config, "--train.max-steps", "100000")
    folder = tiny_config.parent / "runs" / "tiny"
    wait_for_checkpoint(folder)
    ranks[1].send_signal(signal.SIGUSR1)
    output = finish(ranks)
    assert "stopped by SIGUSR1 after step" in output[0][0] and output[1][0] == ""
    assert load_checkpoint(find_checkpoints(folder)[0])["step"] == curve(folder)[-1][0]
