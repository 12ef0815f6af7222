"""lab/per_position.py against eval_length.py's losses of the same windows."""

import pytest
from conftest import one_line
from test_eval_length import data, make_run, read

import eval_length
from lab import per_position
from lab.rows import read_rows

__all__ = ["data"]  # a fixture


def test_parts_average_to_the_loss_of_eval_length(tmp_path, data, call, capsys):
    a = make_run(tmp_path / "runs", "a", data, normaliser="ssmax")
    # has no length beyond training
    b = make_run(tmp_path / "runs", "b", data, normaliser="ssmax_pn")
    options = ("--lengths", 64, "--device", "cpu")
    call(eval_length, a, *options)
    call(per_position, b, a, *options, "--parts", 3)
    (entry,) = read(a / "per_position.json")["lengths"]
    assert [(part["from"], part["to"]) for part in entry["parts"]] == [(0, 21), (21, 42), (42, 64)]
    losses = [part["loss"] for part in entry["parts"]]
    (whole,) = read(a / "eval_length.json")["lengths"]
    assert sum(n * x for n, x in zip((21, 21, 22), losses, strict=True)) / 64 == pytest.approx(
        whole["loss"]
    )
    rows = read_rows([a]).query("evaluation == 'per_position'")
    expected = dict(zip(("loss[0:21]", "loss[21:42]", "loss[42:64]"), losses, strict=True))
    assert dict(zip(rows.measure, rows.value, strict=True)) == pytest.approx(expected)
    output = capsys.readouterr().out
    assert f"{losses[2]:.4f}" in output and "42-63" in output and "b at 64: no result" in output
    assert (tmp_path / "runs" / "per_position.png").read_bytes().startswith(b"\x89PNG")


def test_more_parts_than_tokens(tmp_path, data, call):
    run = make_run(tmp_path / "runs", "a", data)
    with one_line("--parts 65: expected at most 64, the longest length"):
        call(per_position, run, "--lengths", 64, "--parts", 65, "--device", "cpu")
