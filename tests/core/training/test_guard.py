"""Bad steps: found on every rank, skipped without a trace in the weights, or the end of the run."""

import math
from copy import deepcopy

import pytest
import torch
from launch import break_at, build, finish, fork_ranks, records, resume

import train
from infra.cli import UserError
from training.checkpoint import find_checkpoints
from training.run_log import RunLog


def test_the_problem_names_the_rank():
    assert train.find_problem([1.0, 2.0], [1.0, 1.0]) == ""
    assert train.find_problem([1.0, math.nan], [1.0, 1.0]) == "loss nan on rank 1"
    assert train.find_problem([1.0, 1.0], [math.inf, math.inf]) == "gradient norm inf on rank 0"


FORGETFUL = """
import torch
from normalisers.family import Softmax

class Mine(Softmax, name="mine"):
    def learned(self, n_head, train_len):
        return {"tau": torch.zeros(n_head)}

    def weights(self, x, context):
        return (x * torch.exp(-context.learned["tau"]) + DAMAGE).softmax(-1)
"""


@pytest.mark.parametrize("damage", ["0", "0 * context.learned['tau'].sqrt()"])
def test_the_problem_names_the_parameter(tiny_config, own_file, damage):
    """Only the derivative of the square root at 0 spoils a gradient; the hidden keys do not."""
    own_file.write_text(FORGETFUL.replace("DAMAGE", damage))
    state = build(tiny_config, "--attention.normaliser", f"{own_file}:Mine")
    if damage == "0":
        resume(state)
        return
    with pytest.raises(
        UserError, match=r"gradient norm nan .* blocks\.1\.attention\.normaliser\.tau, "
    ):
        resume(state)


def test_a_formula_that_forgets_a_dimension_is_named(tiny_config, own_file):
    own_file.write_text(
        FORGETFUL.replace("DAMAGE", "0").replace("softmax(-1)", "softmax(-1).mean(-1)")
    )
    with pytest.raises(
        UserError, match="mine: weights of shape .*; expected one weight for each score"
    ):
        resume(build(tiny_config, "--attention.normaliser", f"{own_file}:Mine"))


def test_a_nan_stops_the_run_before_the_update(tiny_config, monkeypatch):
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
    resume(build(tiny_config, "--train.on-bad-step", "skip"))
    assert [r["step"] for r in records(folder) if "skipped" in r] == [8, 9]
    assert records(folder)[-1]["step"] == 12


def test_a_skipped_step_changes_nothing(tiny_config, monkeypatch):
    state = build(tiny_config, "--train.on-bad-step", "skip")
    log = RunLog(state)
    train.train_step(state, log)

    def tensors():
        return deepcopy(
            [state.raw_model.state_dict(), [o.state_dict()["state"] for o in state.optimizers]]
        )

    before = tensors()
    break_at({2}, monkeypatch)
    train.train_step(state, log)
    assert state.step == 2 and all(p.grad is None for p in state.raw_model.parameters())
    torch.testing.assert_close(tensors(), before, rtol=0, atol=0)


def test_too_many_skips_in_a_row_stop_the_run(tiny_config, monkeypatch):
    break_at({2, 4, 5, 7, 8, 9, 10}, monkeypatch)
    with pytest.raises(UserError, match="step 9: .*stopped after 3 bad steps in a row"):
        resume(build(tiny_config, "--train.on-bad-step", "skip", "--train.max-skips", "3"))


def test_skips_in_a_row_are_counted_across_a_resume(tiny_config, monkeypatch):
    flags = ["--train.on-bad-step", "skip", "--train.max-skips", "3"]
    break_at({5, 6, 7}, monkeypatch)
    for skipped_before in (0, 2):  # from scratch, and from the checkpoint of step 6
        state = build(tiny_config, *flags)
        log = train.start_or_resume(state)
        assert state.n_skipped == skipped_before
        with pytest.raises(UserError, match="step 7: .*stopped after 3 bad steps in a row"):
            train.train(state, log)


def test_a_nan_on_one_rank_ends_all(tiny_config, monkeypatch):
    break_at({5}, monkeypatch, rank=1)
    for _, stderr in finish(fork_ranks(train.main, tiny_config), status=2):
        assert stderr.startswith("error: step 5: loss nan on rank 1"), stderr
