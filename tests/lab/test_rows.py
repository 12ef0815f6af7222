"""lab/rows.py: the rows of runs, with their validations."""

from pathlib import Path

from conftest import make_byte_run

from config import to_toml
from evals.rows import FILE, Row, read_table, write_rows
from lab.rows import read_rows
from training.checkpoint import read_config


def test_rows_and_validations(tiny_config: Path):
    run = make_byte_run(tiny_config, "--name", "bytes")
    (run / "config.toml").write_text(to_toml(read_config(run)[0]))
    (run / "metrics.jsonl").write_text('{"step": 7, "loss": 2}\n{"step": 7, "val_loss": 1.5}\n')
    own = Row("bytes", 1, 1e-2, 7, "eval_length", "none", "text", 16, None, "loss", None)
    write_rows(run, [own])
    rows = read_rows([run])
    assert tuple(rows.columns) == Row._fields and len(rows) == 2
    assert rows.value.isna().tolist() == [True, False]
    (validation,) = rows[rows.evaluation == "train"].itertuples()
    assert (validation.measure, validation.value, validation.length) == ("val_loss", 1.5, 16)


def test_new_rows_take_the_place_of_old_ones(tmp_path: Path):
    row = Row("a", 1, 0.1, 3, "eval_length", "none", "t", 16, None, "loss", 2.0)
    for value in (2.0, 1.0):
        write_rows(tmp_path, [row._replace(value=value), row._replace(rope="ntk", block=0)])
    table = read_table(tmp_path / FILE)
    assert len(table) == 2 and table[table.rope == "none"].value.tolist() == [1.0]
