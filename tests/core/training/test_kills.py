"""Signals and kills: the step is finished and saved if there is time, and the curve is the same
after all.
"""

import os
import signal
import time

import pytest
from launch import Forked, curve, finish, fork_ranks, records, run

import train
from config import load_config, to_toml
from infra.distributed import StopSignals
from training.checkpoint import find_checkpoints, load_checkpoint
from training.run_log import RunLog
from training.validation import validate


@pytest.fixture
def hang_up():
    """SIGHUP as in a terminal, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def forward_with_signal(step, number):
    """`train.forward_backward` that receives a signal in the step after `step`."""
    forward = train.forward_backward

    def run_step(state, batch):
        if state.step == step:
            os.kill(os.getpid(), number)
        return forward(state, batch)

    return run_step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_the_same_command_resumes(
    tiny_config, number, monkeypatch, hang_up
):
    whole = run(tiny_config, "--name", "whole")
    before = {n: signal.getsignal(n) for n in StopSignals.SIGNALS}
    with monkeypatch.context() as patch:
        patch.setattr(train, "forward_backward", forward_with_signal(6, number))
        stopped = run(tiny_config, "--name", "stopped")
    assert {n: signal.getsignal(n) for n in StopSignals.SIGNALS} == before
    assert find_checkpoints(stopped)[0].name == "step_000007.pt"
    assert curve(stopped)[-1][0] == 7
    run(tiny_config, "--name", "stopped")
    assert curve(stopped) == curve(whole)


def test_a_hang_up_that_nohup_ignores_stays_ignored(hang_up):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.fixture
def rising_config(tiny_config):
    """While p is raised: a validation is of the last step's p."""
    power = ["--attention.normaliser", "lssa", "--attention.reweight-p", "7"]
    rising = load_config(tiny_config, [*power, "--attention.reweight-p-warmup", "12"])
    tiny_config.write_text(to_toml(rising))
    return tiny_config


def test_a_signal_during_validation_ends_the_run_after_the_next_step(rising_config, monkeypatch):
    whole = run(rising_config, "--name", "whole")

    def validate_with_signal(state, log):
        if state.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(state, log)

    with monkeypatch.context() as patch:
        patch.setattr(train, "validate", validate_with_signal)
        stopped = run(rising_config, "--name", "stopped")
    assert find_checkpoints(stopped)[0].name == "step_000009.pt"
    assert [r["step"] for r in records(stopped) if "val_loss" in r] == [4, 8]
    run(rising_config, "--name", "stopped")
    assert curve(stopped) == curve(whole)


def test_a_stop_leaves_the_validation_of_its_step_to_the_resumed_run(rising_config, monkeypatch):
    """Who sent the signal may not wait for it."""
    whole = run(rising_config, "--name", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(train, "forward_backward", forward_with_signal(7, signal.SIGTERM))
        stopped = run(rising_config, "--name", "stopped")
    assert find_checkpoints(stopped)[0].name == "step_000008.pt"
    assert [r["step"] for r in records(stopped) if "val_loss" in r] == [4]
    run(rising_config, "--name", "stopped")
    assert curve(stopped) == curve(whole)


@pytest.mark.parametrize("function", ["validate", "save"])
def test_a_kill_around_the_last_validation(function, tiny_config, monkeypatch):
    """It is done again, and there once."""
    whole = run(tiny_config, "--name", "whole")
    original = getattr(train, function)

    def killed(state, *log):
        if state.step == 12:
            raise KeyboardInterrupt
        original(state, *log)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, function, killed)
        run(tiny_config, "--name", "killed")
    assert curve(run(tiny_config, "--name", "killed")) == curve(whole)


def test_a_second_ctrl_c_does_not_wait():
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, from torchrun and from the terminal
        assert stop.number == signal.SIGINT
        stop._interrupted -= 2
        os.kill(os.getpid(), signal.SIGINT)


def wait_for_checkpoint(folder):
    end = time.monotonic() + 60
    while not find_checkpoints(folder) and time.monotonic() < end:
        time.sleep(0.01)


def test_a_killed_run_resumes_to_the_same_curve(tiny_config):
    """SIGKILL at a random moment after the first checkpoint; benchmarks/chaos.py does it at length."""
    flags = ["--train.max-steps", "60", "--train.checkpoint-every", "10", "--train.val-every", "60"]
    whole = run(tiny_config, *flags, "--name", "whole")
    killed = tiny_config.parent / "runs" / "killed"
    process = Forked(train.main, tiny_config, *flags, "--name", "killed")
    wait_for_checkpoint(killed)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and curve(killed) != curve(whole)
    run(tiny_config, *flags, "--name", "killed")
    assert curve(killed) == curve(whole)


def test_a_signal_to_one_of_two_processes_stops_both(tiny_config):
    """As SLURM may send it: both stop after the same step, with status 0."""
    ranks = fork_ranks(train.main, tiny_config, "--train.max-steps", "100000")
    folder = tiny_config.parent / "runs" / "tiny"
    wait_for_checkpoint(folder)
    ranks[1].send_signal(signal.SIGUSR1)
    output = finish(ranks)
    assert "stopped by SIGUSR1 after step" in output[0][0] and output[1][0] == ""
    assert load_checkpoint(find_checkpoints(folder)[0])["step"] == curve(folder)[-1][0]


@pytest.mark.parametrize("status", ["stopped by SIGUSR1", "finished in"])
def test_a_signal_after_the_last_step_changes_nothing(status, tiny_config, monkeypatch):
    """As a second one, or one that a slower machine gets while another saves."""
    close = RunLog.close

    def late(log, line):
        os.kill(os.getpid(), signal.SIGUSR1)
        close(log, line)

    def early(state, log):
        os.kill(os.getpid(), signal.SIGUSR1)
        return step(state, log)

    step = train.train_step
    monkeypatch.setattr(RunLog, "close", late)
    if "stopped" in status:
        monkeypatch.setattr(train, "train_step", early)
    process = Forked(train.main, tiny_config)
    assert status in process.communicate()[0]
    assert process.returncode == 0


def test_a_rank_waits_for_the_checkpoint(tiny_config, monkeypatch):
    """One that ended before would let its launcher kill the rank that writes."""
    write, save = train.save_checkpoint, train.save

    def slow(*args):
        time.sleep(0.3)
        write(*args)

    def checked(state):
        save(state)
        assert (state.config.run_dir / f"checkpoints/step_{state.step:06d}.pt").exists()

    monkeypatch.setattr(train, "save_checkpoint", slow)
    monkeypatch.setattr(train, "save", checked)
    finish(fork_ranks(train.main, tiny_config))


def test_a_run_without_steps_is_validated_once(tiny_config):
    flags = ["--name", "still", "--init-from", str(run(tiny_config)), "--train.max-steps", "0"]
    flags += ["--optimizer.warmup-steps", "0"]
    for _ in range(2):
        still = run(tiny_config, *flags)
        assert [*records(still)[0]] == ["step", "val_loss"] and len(records(still)) == 1
        assert find_checkpoints(still)[0].name == "step_000000.pt"
