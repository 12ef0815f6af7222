"""lab/choose_rate.py: the best of the asked rates, and when it is held against llm.c."""

import json

import pytest
from conftest import one_line

from config import load_config, to_toml
from lab import choose_rate
from training import validation

STEPS = 2000
EXPECTED = 3.8585  # llm.c's at that step


@pytest.fixture
def runs(tiny_config, tmp_path, monkeypatch):
    """Writes a run at a rate with these last lines of metrics.jsonl, as of llm.c's data and batch."""
    config = load_config(tiny_config)
    monkeypatch.setattr(validation, "LLM_C_TOKENS", config.train.batch_tokens)
    monkeypatch.setattr(choose_rate.TokenStream, "is_fineweb", True)

    def write(rate, *lines):
        run = tmp_path / f"softmax_lr={rate:g}"
        run.mkdir()
        overrides = config.optimizer.model_copy(update={"lr": rate})
        stored = config.model_copy(update={"optimizer": overrides})
        (run / "config.toml").write_text(to_toml(stored))
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return write


def choose(call, folder, *rates):
    call(choose_rate, folder, STEPS, *rates)


def lines(val_loss):
    return {"step": 1500, "val_loss": 1.0}, {"step": STEPS, "val_loss": val_loss}


def test_the_best_of_those_asked_for(runs, call, tmp_path, capsys):
    runs(3e-4, *lines(3.9))
    runs(6e-4, *lines(3.87))
    runs(1.2e-3, {"step": 1500, "val_loss": 4.0}, {"step": 1501, "loss": None, "grad_norm": 1.0})
    runs(9e-4)  # which nobody asks for
    choose(call, tmp_path, 3e-4, 6e-4, 1.2e-3)
    out, err = capsys.readouterr()
    assert float(out) == 6e-4
    assert "rate 0.0012: diverged" in err and f"llm.c at step {STEPS}: {EXPECTED}" in err


@pytest.mark.parametrize("above", [0.09, 0.11])
def test_off_the_curve(above, runs, call, tmp_path, capsys, monkeypatch):
    runs(6e-4, *lines(EXPECTED + above))
    if above < choose_rate.MOST_ABOVE:
        return choose(call, tmp_path, 6e-4)
    with pytest.raises(SystemExit) as end:
        choose(call, tmp_path, 6e-4)
    assert end.value.code == 5 and float(capsys.readouterr().out) == 6e-4
    monkeypatch.setattr(choose_rate.TokenStream, "is_fineweb", False)
    choose(call, tmp_path, 6e-4)  # of another text nothing is known
    assert "not compared" in capsys.readouterr().err


def test_runs_that_are_not_there_yet(runs, call, tmp_path):
    with one_line("no rate has a loss at step 2000"):
        choose(call, tmp_path, 3e-4)
    runs(3e-4, {"step": 1500, "val_loss": 4.0})
    with one_line("has not done its 2000 steps"):
        choose(call, tmp_path, 3e-4)
