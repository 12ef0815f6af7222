"""Bad steps: found on every rank, skipped without a trace in the weights, or the end of the run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import break_at, build, patched_script, records, resume, start

import train
from infra.cli import UserError
from schema import TrainConfig
from training.checkpoint import copy_to_cpu, find_checkpoints
from training.guard import WINDOW, Guard
from training.run_log import RunLog


def make_guard(**keys: Any) -> Guard:
    return Guard(TrainConfig(**keys))


def test_the_guard_names_the_rank():
    assert make_guard().check([1.0, 2.0], [1.0, 1.0]) == ""
    assert make_guard().check([1.0, math.nan], [1.0, 1.0]) == "loss nan on rank 1"
    assert make_guard().check([1.0, 1.0], [math.inf, math.inf]) == "gradient norm inf on rank 0"


def test_outliers_are_found_once_the_window_is_full():
    guard = make_guard(outlier_z=5.0)
    rng = np.random.default_rng(0)
    values = (3 + 0.1 * rng.standard_normal(2 * WINDOW)).tolist()
    values[WINDOW - 1] = 9.0  # the window is not full
    assert not any(guard.check([value], [1 + value]) for value in values)
    assert "loss 9, " in guard.check([9.0], [4.0]) and guard.is_outlier and guard.n_rejected == 1
    assert "gradient norm 9, " in guard.check([3.0], [9.0]) and guard.n_rejected == 2
    assert guard.handle_bad_step("step 3") == "step 3: skipped"  # though on_bad_step is "stop"
    assert guard.check([2.0], [4.0]) == "" and guard.n_rejected == 0  # a low loss is no outlier
    again = make_guard(outlier_z=5.0)
    again.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert again.state_dict() == guard.state_dict()


def test_a_nan_stops_the_run_before_the_update(tiny_config: Path, monkeypatch: pytest.MonkeyPatch):
    state = build(tiny_config)
    with monkeypatch.context() as patch:
        break_at({8}, patch)
        message = r"step 8: loss nan on rank 0, on sequences 56 to 63 .*on_bad_step"
        with pytest.raises(UserError, match=message):
            resume(state)
    assert all(p.isfinite().all() for p in state.raw_model.parameters())
    folder = state.config.run_dir
    assert find_checkpoints(folder)[0].name == "step_000006.pt"
    last = records(folder)[-1]
    assert last["step"] == 8 and last["loss"] is None and last["skipped"] == "loss nan on rank 0"
    # A run started with "stop" may resume with "skip", and its curve is complete.
    break_at({8, 9}, monkeypatch)
    resume(build(tiny_config, "--train.on-bad-step", "skip", "--log.attention-every", "4"))
    assert [r["step"] for r in records(folder) if "skipped" in r] == [8, 9]
    assert [r["step"] for r in records(folder) if "qk_std" in r] == [12]
    assert records(folder)[-1]["step"] == 12


def test_a_skipped_step_changes_nothing(tiny_config: Path, monkeypatch: pytest.MonkeyPatch):
    state = build(tiny_config, "--train.on-bad-step", "skip")
    log = RunLog(state)
    train.train_step(state, log)

    def tensors() -> Any:
        return copy_to_cpu(
            [state.raw_model.state_dict(), [o.state_dict()["state"] for o in state.optimizers]]
        )

    before = tensors()
    break_at({2}, monkeypatch)
    train.train_step(state, log)
    assert state.step == 2 and all(p.grad is None for p in state.raw_model.parameters())
    torch.testing.assert_close(tensors(), before, rtol=0, atol=0)


def test_too_many_skips_in_a_row_stop_the_run(tiny_config: Path, monkeypatch: pytest.MonkeyPatch):
    break_at({2, 4, 5, 7, 8, 9, 10}, monkeypatch)
    with pytest.raises(UserError, match="step 9: .*stopped after 3 bad steps in a row"):
        resume(build(tiny_config, "--train.on-bad-step", "skip", "--train.max-skips", "3"))


ERROR = "raise UserError('data/x.bin: cannot be read')", "rank 1: data/x.bin: cannot be read"


@pytest.mark.parametrize(
    ("what", "expected"),
    [("loss = loss * math.nan", "step 5: loss nan on rank 1"), pytest.param(*ERROR, marks=pytest.mark.slow)],
)
def test_what_happens_on_one_rank_ends_all(tiny_config: Path, tmp_path: Path, what: str, expected: str):
    process = start(tiny_config, script=patched_script(tmp_path, what, rank=1), processes=2)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode != 0
    assert f"error: {expected}" in stderr, stderr
    assert "exitcode  : 2" in stderr  # torchrun's own report
