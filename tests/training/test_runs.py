"""Runs that are left alone: signals, checkpoints, bad numbers, ranks that fail, what the run folder tells."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from config import TrainConfig, load_config
from data.shards import write_shard
from infra.cli import UserError
from infra.distributed import StopSignals, World
from model import GPT
from train import GUARD_WINDOW, Guard, Trainer, take_flags
from training import checkpoint
from training.checkpoint import CheckpointWriter, find_checkpoints, in_main_memory, load_checkpoint
from training.run_log import DryLog, lines_up_to

ROOT = Path(__file__).parents[2]
CPU = World(0, 1, torch.device("cpu"))
CONFIG = """
[model]
n_layer = 1
n_head = 2
n_embd = 32
vocab_size = 64
[data]
dir = "{folder}/data"
[train]
max_steps = 12
seq_len = 16
batch_tokens = 128
micro_batch = 4
dtype = "float32"
val_every = 4
val_tokens = 320
checkpoint_every = 3
keep_last = 20
[optimizer]
lr = 1e-2
warmup_steps = 2
[log]
dir = "{folder}/runs"
every = 2
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A config whose data are a fixed random walk."""
    tokens = np.random.default_rng(0).integers(0, 3, 4000).cumsum() % 64
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "x_val_000000.bin", tokens[:600])
    write_shard(tmp_path / "data" / "x_train_000001.bin", tokens[600:])
    path = tmp_path / "tiny.toml"
    # Without dataset.json the vocabulary is gpt2's.
    path.write_text(CONFIG.format(folder=tmp_path).replace("vocab_size = 64", "vocab_size = 50257"))
    return path


def trainer_of(path: Path, *overrides: str) -> Trainer:
    return Trainer(load_config(path, list(overrides)), CPU)


def run(path: Path, *overrides: str) -> Path:
    trainer = trainer_of(path, *overrides)
    trainer.run()
    return trainer.config.run_dir


def records(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "val_loss"):
        steps = [line["step"] for line in lines if key in line]
        assert steps == sorted(set(steps)), "each step once, in order"
    return lines


def curve(run_dir: Path) -> list[tuple[int, Any, Any, Any]]:
    return [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("val_loss")) for r in records(run_dir)]


def start(*args: object, script: str = "train.py", processes: int = 1, **env: Any) -> subprocess.Popen[str]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen(
        [*command, script, *map(str, args)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_the_same_command_goes_on(
    config_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    whole = run(config_path, "--name", "whole")
    trainer = trainer_of(config_path, "--name", "stopped")
    forward = trainer.forward_backward

    def forward_with_signal(batch: Any) -> Any:
        if trainer.step == 6:
            os.kill(os.getpid(), number)
        return forward(batch)

    monkeypatch.setattr(trainer, "forward_backward", forward_with_signal)
    before = {n: signal.getsignal(n) for n in StopSignals.SIGNALS}
    trainer.run()
    assert {n: signal.getsignal(n) for n in StopSignals.SIGNALS} == before
    stopped = trainer.config.run_dir
    assert f"stopped by {number.name} after step 7 of 12, saved" in capsys.readouterr().out
    assert find_checkpoints(stopped)[0].name == "step_000007.pt"
    assert curve(stopped)[-1][0] == 7
    run(config_path, "--name", "stopped")
    assert curve(stopped) == curve(whole)


def test_a_signal_during_validation_is_heard_and_the_validation_comes_later(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = run(config_path, "--name", "whole")
    trainer = trainer_of(config_path, "--name", "stopped")
    original, asked = trainer.any_stop, []

    def any_stop() -> str | None:
        asked.append(trainer.step)
        if asked.count(8) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original()

    monkeypatch.setattr(trainer, "any_stop", any_stop)
    trainer.run()
    stopped = trainer.config.run_dir
    assert asked.count(8) == 2 and trainer.step == 8
    assert [r["step"] for r in records(stopped) if "val_loss" in r] == [4]
    run(config_path, "--name", "stopped")
    assert curve(stopped) == curve(whole)


def test_a_second_ctrl_c_does_not_wait():
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, from torchrun and from the terminal
        assert stop.number == signal.SIGINT
        assert stop._interrupted is not None
        stop._interrupted -= 2
        os.kill(os.getpid(), signal.SIGINT)


def test_one_of_two_processes_hears_a_signal(config_path: Path):
    """As SLURM may send it: both stop after the same step, with status 0."""
    env: dict[str, Any] = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        start(config_path, "--train.max-steps", "100000", RANK=str(i), LOCAL_RANK=str(i), **env)
        for i in (0, 1)
    ]
    run_dir = config_path.parent / "runs" / "tiny"
    end = time.monotonic() + 60
    while not find_checkpoints(run_dir) and time.monotonic() < end:
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert "stopped by SIGUSR1 after step" in outputs[0][0] and outputs[1][0] == ""
    assert load_checkpoint(find_checkpoints(run_dir)[0])["step"] == curve(run_dir)[-1][0]


# ---------------------------------------------------------------- checkpoints


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is written is the state at `save`, whatever happens to the tensors meanwhile."""
    may_write = threading.Event()
    save = checkpoint.save_checkpoint
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda *args: may_write.wait(20) and save(*args))
    writer = CheckpointWriter(tmp_path, keep_last=2, keep_every=None)
    weight = torch.ones(3)
    state = {"config": {}, "model": {"w": weight}, "optimizers": [], "validation": {}, "guard": {}, "rng": []}
    writer.save({"step": 1, "data": {}, **state}, is_best=False)
    weight.zero_()  # the next step
    assert not find_checkpoints(tmp_path)
    may_write.set()
    writer.finish()
    assert torch.equal(load_checkpoint(find_checkpoints(tmp_path)[0])["model"]["w"], torch.ones(3))


def test_copies_share_nothing():
    tensor = torch.ones(2)
    copied = in_main_memory({"a": [tensor, (tensor, 3)], "b": "text"})
    tensor.zero_()
    assert copied["a"][0].tolist() == copied["a"][1][0].tolist() == [1, 1]
    assert copied["a"][1][1] == 3 and copied["b"] == "text"


def test_a_failed_write_ends_the_run_with_the_reason(config_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(config_path, "--train.max-steps", "3", "--optimizer.schedule", "constant")
    trainer = trainer_of(config_path, "--name", "full")
    save = checkpoint.save_checkpoint

    def full(run_dir: Path, state: dict[str, Any], *args: Any) -> Path:
        if state["step"] == 6:
            raise UserError(f"{run_dir}: No space left on device")
        return save(run_dir, state, *args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    with pytest.raises(UserError, match="No space left"):
        trainer.run()
    assert trainer.step < 12
    assert load_checkpoint(find_checkpoints(trainer.config.run_dir)[0])["step"] < 6


def test_a_checkpoint_in_the_writing_is_finished_when_the_run_fails(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save = checkpoint.save_checkpoint
    slow = threading.Event()  # never set
    monkeypatch.setattr(checkpoint, "save_checkpoint", lambda *args: slow.wait(0.5) or save(*args))
    trainer = trainer_of(config_path)
    break_at(trainer, {4}, monkeypatch)
    with pytest.raises(UserError, match="step 4: loss nan"):
        trainer.run()
    assert find_checkpoints(trainer.config.run_dir)[0].name == "step_000003.pt"


def test_any_error_of_the_writer_ends_the_run(config_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(checkpoint, "save_checkpoint", fail)
    with pytest.raises(MemoryError):
        trainer_of(config_path).run()


def test_a_folder_in_the_place_of_a_checkpoint(config_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = run(config_path)
    expected = curve(run_dir)
    newest = find_checkpoints(run_dir)[0]
    newest.unlink()
    newest.mkdir()
    run(config_path)
    assert f"warning: {newest}: damaged" in capsys.readouterr().err
    assert curve(run_dir) == expected and newest.is_file()


def test_a_kill_before_best_was_linked_is_made_good(config_path: Path):
    run_dir = run(config_path, "--train.max-steps", "12")
    best = run_dir / "checkpoints" / "best.pt"
    newest = find_checkpoints(run_dir)[0]
    assert load_checkpoint(best)["step"] == load_checkpoint(newest)["validation"]["best_step"] == 12
    best.unlink()
    run(config_path, "--train.max-steps", "12")
    assert load_checkpoint(best)["step"] == 12


def validate_to(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Make the run's validations come out as these losses."""
    left = iter(losses)

    def summed(world: World, sums: torch.Tensor) -> torch.Tensor:
        total, _, n_targets = sums
        total.copy_(next(left) * n_targets)
        return sums

    monkeypatch.setattr(World, "sum", summed)


def test_a_validation_that_is_not_finite_is_never_the_best(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_of(config_path)
    validate_to(monkeypatch, [math.nan, 2.0, 2.5])
    trainer.run()
    assert trainer.validation["best_step"] == 8
    steps = [path.name for path in find_checkpoints(trainer.config.run_dir)]
    assert steps == [f"step_{step:06d}.pt" for step in (12, 9, 8, 6, 3)]
    assert [r["val_loss"] for r in records(trainer.config.run_dir) if "val_loss" in r] == [None, 2.0, 2.5]


def test_what_is_kept(config_path: Path):
    run_dir = run(
        config_path, "--train.keep-last", "1", "--train.keep-every", "6", "--train.val-every", "100"
    )
    assert [path.stem for path in find_checkpoints(run_dir)] == ["step_000012", "step_000006"]


def test_the_best_checkpoint_is_kept_apart(config_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_of(config_path, "--train.keep-last", "1")
    validate_to(monkeypatch, [3.0, 2.0, 2.5])
    trainer.run()
    best = load_checkpoint(trainer.config.run_dir / "checkpoints" / "best.pt")
    assert best["step"] == 8 and best["validation"] == {"step": 8, "loss": 2.0, "best": 2.0, "best_step": 8}
    assert trainer.validation == {"step": 12, "loss": 2.5, "best": 2.0, "best_step": 8}


def test_leftovers_of_a_killed_write_are_cleared_away(config_path: Path):
    run_dir = run(config_path, "--train.max-steps", "6")
    (run_dir / "checkpoints" / ".step_000009.pt.tmp").write_bytes(b"half")
    newest = find_checkpoints(run_dir)[0]
    newest.unlink()
    run(config_path, "--train.max-steps", "6")
    assert not list((run_dir / "checkpoints").glob(".*"))


# ---------------------------------------------------------------- bad numbers


def guard(**keys: Any) -> Guard:
    return Guard(TrainConfig(**keys))


def test_the_guard_names_the_rank():
    assert guard().judge([1.0, 2.0], [1.0, 1.0]) == ""
    assert guard().judge([1.0, math.nan], [1.0, 1.0]) == "loss nan on rank 1"
    assert guard().judge([1.0, 1.0], [math.inf, math.inf]) == "gradient norm inf on rank 0"


def test_outliers_are_found_once_there_is_something_to_compare_with():
    g = guard(outlier_z=5.0)
    rng = np.random.default_rng(0)
    for value in 3 + 0.1 * rng.standard_normal(GUARD_WINDOW - 1):
        assert g.judge([float(value)], [1.0 + float(value)]) == ""
    assert g.judge([9.0], [4.0]) == ""  # the window is not full
    for value in 3 + 0.1 * rng.standard_normal(GUARD_WINDOW):
        assert g.judge([float(value)], [1.0 + float(value)]) == ""
    assert "loss 9, " in g.judge([9.0], [4.0]) and g.is_outlier and g.skipped == 1
    assert "gradient norm 9, " in g.judge([3.0], [9.0]) and g.skipped == 2
    assert g.judge([2.0], [4.0]) == "" and g.skipped == 0  # a low loss is no outlier
    again = guard(outlier_z=5.0)
    again.load_state_dict(json.loads(json.dumps(g.state_dict())))
    assert again.state_dict() == g.state_dict()


def break_at(trainer: Trainer, steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and gradients of these steps are not finite."""
    forward = trainer.forward_backward

    def broken(batch: Any) -> Any:
        loss = forward(batch)
        if trainer.step + 1 in steps:
            next(trainer.raw_model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
            return loss * math.nan
        return loss

    monkeypatch.setattr(trainer, "forward_backward", broken)


def test_a_loss_that_is_not_finite_stops_the_run_before_the_step(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainer_of(config_path)
    break_at(trainer, {8}, monkeypatch)
    with pytest.raises(UserError, match=r"step 8: loss nan on rank 0, on sequences 56 to 63 .*on_bad_step"):
        trainer.run()
    assert all(p.isfinite().all() for p in trainer.raw_model.parameters())
    run_dir = trainer.config.run_dir
    assert find_checkpoints(run_dir)[0].name == "step_000006.pt"
    last = records(run_dir)[-1]
    assert last["step"] == 8 and last["loss"] is None and last["skipped"] == "loss nan on rank 0"
    # skipping is allowed to a run that was begun with stopping, and the curve is whole
    trainer = trainer_of(config_path, "--train.on-bad-step", "skip")
    break_at(trainer, {8, 9}, monkeypatch)
    trainer.run()
    skipped = [r["step"] for r in records(run_dir) if "skipped" in r]
    assert skipped == [8, 9] and records(run_dir)[-1]["step"] == 12


def test_a_skipped_step_changes_nothing(config_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_of(config_path, "--train.on-bad-step", "skip")
    log = DryLog(trainer.config, CPU, 1.0)
    trainer.train_step(log)
    before = in_main_memory([trainer.raw_model.state_dict(), [o.state_dict() for o in trainer.optimizers]])
    break_at(trainer, {2}, monkeypatch)
    trainer.train_step(log)
    after = in_main_memory([trainer.raw_model.state_dict(), [o.state_dict() for o in trainer.optimizers]])
    assert trainer.step == 2 and all(p.grad is None for p in trainer.raw_model.parameters())
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    for a, b in zip(before[1], after[1], strict=True):
        for i in a["state"]:
            assert all(torch.equal(a["state"][i][key], b["state"][i][key]) for key in a["state"][i])


def test_too_many_skips_in_a_row_stop_the_run(config_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trainer_of(config_path, "--train.on-bad-step", "skip", "--train.max-skips", "3")
    break_at(trainer, {2, 4, 5, 7, 8, 9, 10}, monkeypatch)
    with pytest.raises(UserError, match="step 9: .*stopped after 3 such steps in a row"):
        trainer.run()


BROKEN = """
import math, sys
sys.path.insert(0, {root!r})
import train
from infra.cli import UserError, run_main

forward = train.Trainer.forward_backward

def broken(self, batch):
    loss = forward(self, batch)
    if self.world.rank == 1 and self.step == 4:
        {what}
    return loss

train.Trainer.forward_backward = broken
run_main(train.main)
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("loss = loss * math.nan", "step 5: loss nan on rank 1"),
        ("raise UserError('data/x.bin: cannot be read')", "rank 1: data/x.bin: cannot be read"),
    ],
)
def test_what_happens_on_one_rank_is_said(config_path: Path, tmp_path: Path, what: str, said: str):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(root=str(ROOT), what=what))
    process = start(config_path, script=str(script), processes=2)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode != 0
    assert f"error: {said}" in stderr, stderr
    assert "exitcode  : 2" in stderr  # torchrun's own account of it


# ---------------------------------------------------------------- what the run folder tells


def test_starts_and_timing(config_path: Path):
    run_dir = run(config_path, "--train.max-steps", "4")
    (first,) = (json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines())
    assert first["step"] == 0 and first["processes"] == 1 and first["versions"]["torch"] == torch.__version__
    assert isinstance(first["command"], list) and len(first["commit"] or "0" * 40) in (40, 41)
    timed = [r for r in records(run_dir) if "step_ms" in r]
    assert [r["step"] for r in timed] == [2, 3, 4]  # every second, and each that is saved
    for r in timed:
        parts = sum(r[f"{part}_ms"] for part in ("data", "forward_backward", "optimizer", "other"))
        assert parts == pytest.approx(r["step_ms"], abs=0.05)
        assert r["tokens_per_s"] == pytest.approx(128 / (r["step_ms"] / 1000), rel=0.01)
        assert r["memory_gb"] > 0


def test_lines_that_a_killed_run_left_are_not_doubled(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1.0}\nnot json\n{"step": 3}\n{"st')
    assert lines_up_to(path, 2, 0) == ['{"step": 1}\n', '{"step": 2}\n']
    assert lines_up_to(path, 2, 2) == ['{"step": 1}\n', '{"step": 2}\n', '{"step": 2, "val_loss": 1.0}\n']


def test_flops_per_token(config_path: Path):
    """By hand for the tiny model: 6 per multiplied weight, 6 T C per layer for causal attention."""
    config = load_config(config_path)
    model = GPT(config)
    c, vocab = 32, model.padded_vocab
    assert model.flops_per_token() == 6 * (vocab * c + 4 * c * c + 8 * c * c) + 6 * 16 * c


def test_flags():
    argv = ["train.py", "c.toml", "--seed", "1", "--profile", "5"]
    assert take_flags(argv) == (False, 5)
    assert argv == ["train.py", "c.toml", "--seed", "1"]
    assert take_flags(["train.py", "--dry-run", "c.toml"]) == (True, 0)
    assert take_flags(argv) == (False, 0)
    assert take_flags(["train.py", "c.toml", "--profile=3"]) == (False, 3)
    assert take_flags(["train.py", "--help", "--profile"]) == (False, 0)
    for bad in (["--profile"], ["--profile", "x"], ["--profile=0"], ["--dry-run", "--profile", "1"]):
        with pytest.raises(UserError, match="--profile"):
            take_flags(bad)


def test_dry_run_tells_and_leaves_nothing(config_path: Path):
    process = start(config_path, "--dry-run")
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    assert not (config_path.parent / "runs").exists()
    for words in ("parameters", "engine sdpa", "memory ", "steps to a shard of 3,400", "s a step", "all 12"):
        assert words in stdout


def test_profile_writes_a_trace(config_path: Path):
    trainer = trainer_of(config_path)
    trainer.run(profiled=2)
    with gzip.open(trainer.config.run_dir / "profile.json.gz") as f:
        trace = json.load(f)
    steps = {e["name"] for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")}
    assert len(steps) == 2


def test_wandb_offline_logs_and_resumes_the_same_run(config_path: Path):
    """With the real package, without a network."""
    pytest.importorskip("wandb")
    env: dict[str, Any] = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run_dir = config_path.parent / "runs" / "tiny"
    ids = []
    for max_steps in ("6", "12"):
        extra = ["--train.max-steps", "12", "--log.wandb", "true"]
        if max_steps == "6":
            script = config_path.parent / "stop.py"
            what = "pass\n    if self.step == 5:\n        import os; os.kill(os.getpid(), 15)"
            script.write_text(BROKEN.format(root=str(ROOT), what=what))
            process = start(config_path, *extra, script=str(script), **env)
        else:
            process = start(config_path, *extra, **env)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        ids.append((run_dir / "wandb_id").read_text())
    assert ids[0] == ids[1]
    runs = sorted((run_dir / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and all(path.name.endswith(ids[0]) for path in runs)
    assert curve(run_dir)[-1][0] == 12
