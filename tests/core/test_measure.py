"""measure.py: sets of rows, kills, the table of runs, statistics against simulation, tables."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import one_line
from pandas import DataFrame

import measure
import train
from config import load_config
from measure import COLUMNS, Estimate, Losses, estimate

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = [("a", 7, "0123", "loss", 16, 0, "none", block, block // 2, 1.5) for block in range(4)]


def change(rows, **values):
    return [
        tuple(values.get(name, v) for name, v in zip(COLUMNS, row, strict=True)) for row in rows
    ]


def test_a_written_set_replaces_the_whole_old_one(tmp_path):
    """Fewer blocks leave none behind; every other set stays; parts by position are one set."""
    others = [change(ROWS, **{key: value}) for key, value in (
        ("run", "b"), ("step", 8), ("text", "4567"), ("measure", "same_targets"),
        ("window", "16 recomputed"), ("scaling", "ntk"),
    )]  # fmt: skip
    measure.write_rows(tmp_path, sum(others, ROWS))
    measure.write_rows(tmp_path, change(ROWS[:2], value=0.123456789, length=32))
    rows = measure.read_rows(tmp_path)
    assert list(rows.columns) == COLUMNS and len(rows) == 6 * 4 + 2
    new = measure.select(
        rows, run="a", step=7, text="0123", measure="loss", window=0, scaling="none"
    )
    assert new["length"].tolist() == [32, 32] and new["value"].tolist() == [0.1234568] * 2
    parts = change(ROWS[:1], block=None, document=None)
    measure.write_rows(
        tmp_path, change(parts, measure="loss[0:8]") + change(parts, measure="loss[8:16]")
    )
    measure.write_rows(tmp_path, change(parts, measure="loss[0:16]", value=math.nan))
    rows = measure.read_rows(tmp_path)
    assert len(rows) == 6 * 4 + 3 and rows["measure"].tolist()[-1] == "loss[0:16]"
    assert rows["value"].isna().sum() == rows["block"].isna().sum() == 1


def test_a_kill_leaves_the_old_rows_or_the_new_ones(tmp_path):
    measure.write_rows(tmp_path, ROWS)
    before = (tmp_path / "rows.csv").read_bytes()
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path.cwd())!r})
import measure
replace = os.replace
def die(*paths):
    if sys.argv[1] == "after":
        replace(*paths)
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = die
measure.write_rows(measure.Path({str(tmp_path)!r}), [("a", 7, "0123", "loss", 16, 0, "none", 0, 0, 9.0)])
"""
    for moment in ("before", "after"):
        done = subprocess.run([sys.executable, "-c", code, moment], env=os.environ)
        assert done.returncode == -signal.SIGKILL
        content = (tmp_path / "rows.csv").read_bytes()
        assert (content == before) == (moment == "before")
        rows = measure.read_rows(tmp_path)
        assert len(rows) == (4 if moment == "before" else 1)


def test_other_files_are_refused(tmp_path):
    for content in ("x,y\n1,2\n", ",".join(COLUMNS) + "\na,seven,0,loss,16,0,none,0,0,1\n"):
        (tmp_path / "rows.csv").write_text(content)
        with one_line("rows.csv: expected rows with run, step"):
            measure.write_rows(tmp_path, ROWS)
        assert (tmp_path / "rows.csv").read_text() == content


def test_collected_runs(tmp_path, tiny_config, call, capsys):
    for seed in (1, 2):
        call(train, tiny_config, "--seed", seed, "--name", f"tiny_seed={seed}")
    runs = [tmp_path / f"runs/tiny_seed={seed}" for seed in (1, 2)]
    for run in runs:
        measure.write_rows(run, change(ROWS, run=run.name))
    call(measure, *runs, "--out", tmp_path)
    table = measure.read_runs(tmp_path)
    first = table.iloc[0].to_dict()
    expected = {
        "run": "tiny_seed=1",
        "variant": "tiny",
        "options": "softmax",
        "seed": "1",
        "rate": "0.01",
    }
    expected |= {"T": "16", "steps": "12", "dtype": "float32", "sha256": ""}
    assert expected.items() <= first.items()
    assert int(first["parameters"]) > 1000 and float(first["minutes"]) >= 0 and first["date"]
    before = (tmp_path / "rows.csv.gz").read_bytes()
    rows = measure.read_rows(tmp_path / "rows.csv.gz")
    assert len(rows) == 2 * (4 + 3) and (rows["measure"] == "val_loss").sum() == 6
    (tmp_path / "runs/tiny_seed=2.log").touch()  # of sweep.py --jobs, where runs/* finds it
    beside = tmp_path / "runs/tiny_seed=2.log"
    call(measure, runs[1], beside, "--out", tmp_path)  # again: the other run's rows stay
    assert len(measure.read_runs(tmp_path)) == 2
    call(measure, *runs, "--out", tmp_path)
    again = measure.read_rows(tmp_path / "rows.csv.gz")
    assert again.equals(rows) and (tmp_path / "rows.csv.gz").read_bytes() == before
    assert "14 rows of 2 runs" in capsys.readouterr().out
    with one_line("two of the folders have a run of this name"):
        call(measure, runs[0], runs[0], "--out", tmp_path)
    another = table.assign(options="another")
    another.to_csv(tmp_path / "runs.csv", index=False)
    with one_line("tiny_seed=2: options is softmax: ", "runs.csv has another: expected another"):
        call(measure, runs[1], "--out", tmp_path)


# t tables: P(|T| < t) = 0.95
@pytest.mark.parametrize(
    "freedom, t",
    [(1, 12.7062), (2, 4.30265), (2.5, 3.574655), (10, 2.22814), (255, 1.96931), (1e5, 1.95999)],
)
def test_students_distribution(freedom, t):
    angles, shares = measure.student(freedom)
    found = math.sqrt(freedom) * math.tan(np.interp(0.95, shares, angles))
    assert found == pytest.approx(t, rel=1e-5)


def draw(rng, seeds, documents, of_blocks):
    """What the blocks have in common, an effect of each seed, and one of each document."""
    own = rng.normal(0, 0.02, documents.max() + 1)[documents]
    values = of_blocks + rng.normal(0, 0.01, (seeds, 1)) + own
    return Losses(values, tuple(enumerate(documents.tolist())))


@pytest.mark.parametrize("seeds, others, per_document", [(3, 6, 1), (3, 3, 4), (1, 1, 1)])
def test_without_a_difference_5_percent_are_found(seeds, others, per_document):
    rng = np.random.default_rng(0)
    documents = np.arange(64) // per_document
    n_found = 0
    for _ in range(2000):
        of_blocks = rng.normal(2, 0.3, 64)  # much more than the models differ
        first, second = (draw(rng, n, documents, of_blocks) for n in (seeds, others))
        if seeds == 1:  # nothing to measure the effect of a seed with
            first, second = (
                Losses(x.values - x.values.mean() + 2, x.blocks) for x in (first, second)
            )
            second = second._replace(values=second.values + rng.normal(0, 0.02 * math.sqrt(2 / 64)))
        found = estimate(first, second)
        assert (found.p < 0.05) == (abs(found.value) > found.half)
        n_found += found.p < 0.05
    assert 0.03 < n_found / 2000 < 0.07


def test_estimates_of_few(tmp_path):
    one = Losses(np.array([[1.5]]), ((0, 0),))
    assert estimate(one).value == 1.5 and math.isnan(estimate(one).half)
    two = Losses(np.array([[1.0, 2.0]]), ((0, 0), (1, 1)))
    assert estimate(two).half == pytest.approx(12.7062 * 0.5, rel=1e-5)
    assert estimate(two, two) == Estimate(0.0, 0.0, 1.0)
    same_document = Losses(np.array([[1.0, 2.0]]), ((0, 0), (1, 0)))
    assert math.isnan(estimate(same_document).half)
    with one_line("scored on other blocks"):
        estimate(two, same_document)


def test_two_settings_of_the_same_runs_are_paired():
    """What the seeds differ by is in both, and is no part of the difference's interval."""
    rows = DataFrame(ROWS + change(ROWS, run="b", value=2.5), columns=COLUMNS)
    losses = measure.read_losses(rows)
    better = losses._replace(values=losses.values - 0.25)
    assert estimate(losses, better) == Estimate(0.25, 0.0, 0.0)
    assert estimate(losses, better._replace(runs=("c", "d"))).half > 1


def test_losses_of_rows():
    rows = DataFrame(ROWS + change(ROWS, run="b", value=2.5), columns=COLUMNS)
    losses = measure.read_losses(rows)
    assert losses.values.tolist() == [[1.5] * 4, [2.5] * 4]
    assert losses.blocks == ((0, 0), (1, 0), (2, 1), (3, 1))
    assert measure.read_losses(rows[:0]) is None
    assert measure.read_losses(rows.assign(value=math.nan)) is None
    with one_line("a, b: scored on other blocks"):
        measure.read_losses(rows[:-1])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("softmax", "softmax"), ("lssa", "LSSA"), ("lssar", "LSSAR"),
        ("demo_ssmax", "SSMax, QK-norm"), ("demo_hybrid", "windows of 16 + FoX"),
        ("variants/nope", "softmax, NoPE"), ("variants/gate", "softmax, output gate"),
        ("variants/stick_breaking", "stick-breaking"), ("variants/window_32", "windows of 32"),
    ],
)  # fmt: skip
def test_names_of_models(file, name):
    assert measure.name_model(load_config(CONFIGS / f"{file}.toml")) == name


def test_holm():
    assert measure.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])


def test_digits_that_the_error_allows():
    for value, half, text in (
        (0.5, 0.03, "+.50 ±.03"), (-0.5, 0.0033, "-.500 ±.003"), (1.5, 0.014, "+1.500 ±.014"),
        (0.5, math.nan, "+.500"),
    ):  # fmt: skip
        assert measure.format_difference(Estimate(value, half, 0.5)) == text
    assert measure.format_loss(Estimate(1.634, 0.02, 0)) == "1.63"


def test_a_wide_table_continues_below():
    """No column is left out; a heading takes no width."""
    header = ["context", *(str(2**i) for i in range(10))]
    lines = [header, ["a long name of a model"], *([name, *["+.02 ±.01"] * 10] for name in "ab")]
    text = measure.format_table(lines)
    assert max(map(len, text.splitlines())) <= 80
    upper, lower = text.split("\n\n")
    assert upper.split("\n")[0].split() + lower.split("\n")[0].split()[1:] == header
    assert text.count("+.02 ±.01") == 20 and text.count("a long name of a model\n") == 2


@pytest.mark.parametrize("x", [[128, 2048], [0.001, 0.002], ["none", "ntk"], [*range(1, 99)]])
def test_curves_of_any_axis(tmp_path, x):
    curve = measure.Curve("a $", x, [1.0] * len(x), [0.1] * len(x))
    measure.draw_curves(tmp_path / "a.png", [curve], "title", "loss", [128] if x[0] == 128 else [])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
