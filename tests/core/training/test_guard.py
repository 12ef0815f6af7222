"""A loss or gradient that is not finite ends the run, on every rank, before the update."""

import math

import pytest
from launch import break_at, build, curve, finish, fork_ranks, records, resume, run

import train
from infra.cli import UserError
from training.checkpoint import find_checkpoints


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
    whole = run(tiny_config, "--name", "whole")
    state = build(tiny_config)
    message = r"step 8: loss nan on rank 0, on sequences 56 to 63 in sequential order: stopped"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=message):
        break_at({8}, patch)
        resume(state)
    assert all(p.isfinite().all() for p in state.raw_model.parameters())
    folder = state.config.run_dir
    assert find_checkpoints(folder)[0].name == "step_000006.pt"
    last = records(folder)[-1]
    assert last["step"] == 8 and last["loss"] is None
    assert curve(run(tiny_config)) == curve(whole)


def test_a_nan_on_one_rank_ends_all(tiny_config, monkeypatch):
    break_at({5}, monkeypatch, rank=1)
    for _, stderr in finish(fork_ranks(train.main, tiny_config), status=2):
        assert "\nerror: step 5: loss nan on rank 1" in "\n" + stderr, stderr
