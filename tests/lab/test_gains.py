"""lab.gains: gains are paired over blocks, and the committed tables are what the records give."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import slow

from evals.rows import read_table
from infra.cli import UserError
from lab.gains import gain_table, loss_figure
from lab.tables import markdown

CONTEXT = Path(__file__).parents[2] / "results/context"


def rows_of(run, losses, cut, seed=1):
    """Losses of two blocks by length, and those with the context cut at 8."""
    key = {"run": run, "seed": seed, "lr": 0.1, "step": 1, "rope": "none", "text": "t"}
    rows = [
        key | {"length": 8, "block": i, "measure": "cut[8]", "value": v} for i, v in enumerate(cut)
    ]
    for length, values in losses.items():
        rows += [
            key | {"length": length, "block": i, "measure": "same_targets[8]", "value": v}
            for i, v in enumerate(values)
        ]
    return rows


def test_gains_are_paired():
    """Over blocks, of which each is the mean over seeds."""
    rows = pd.DataFrame(
        [
            *rows_of("long", {8: [3.0, 1.0], 16: [2.0, 0.4]}, [2.5, 0.5]),
            *rows_of("x", {16: [2, 0.9]}, [2.5, 0.5]),
            *rows_of("x", {16: [2.8, 0.9]}, [2.7, 0.7], seed=2),
        ]
    )
    table = gain_table(rows, "x", "long").set_index("run")
    assert table.loc["long", "cut"] == "1.500" and table.loc["long", "8"] == "−0.500 ±0.000"
    assert table.loc["long", "at 16"] == "1.200" and table.loc["x", "at 16"] == "1.650"
    assert (
        table.loc["long", "16"] == "+0.300 ±0.200"
        and table.loc["long", "blocks that gain"] == "100%"
    )
    of_x = table.loc["x"]  # gains of the blocks 0.5 and -0.4, -0.1 and -0.2: means 0.2 and -0.3
    assert (
        of_x["seeds"] == 2 and of_x["16"] == "−0.050 ±0.250" and of_x["blocks that gain"] == "50%"
    )
    assert [*table["of the ceiling"]] == ["100%", "–"]
    assert [*table["over x's"]] == ["+0.000 ±0.000", "+0.000 ±0.000"]  # of the seeds that both have
    axes = loss_figure(rows, "x").axes[0]
    assert [line.get_label() for line in axes.containers] == ["long", "x"]
    of_long, of_x = (container[0] for container in axes.containers)  # at T the cut, not the window
    assert np.allclose(of_long.get_xydata(), [(8, 1.5), (16, 1.2)])
    assert np.allclose(of_x.get_xydata(), [(8, 1.6), (16, 1.65)])
    assert np.allclose(axes.get_lines()[-1].get_ydata(), 1.6)
    in_colour = loss_figure(rows, "x", {"x": "best"}).axes[0].containers
    assert [line.get_label() for line in in_colour] == ["best"]


def test_a_rejected_length_and_several_ceilings():
    """The ceiling is the line that gains most on a text; a run without the longest length has no
    numbers.
    """
    short = rows_of("short", {8: [2.6, 0.6], 16: [np.nan, np.nan]}, [2.5, 0.5])
    ceiling = rows_of("long", {8: [2.6, 0.6], 16: [2.1, 0.1]}, [2.5, 0.5])
    worse = [
        row | {"rope": "ntk"}
        for row in rows_of("long", {8: [2.6, 0.6], 16: [4.0, 4.0]}, [2.5, 0.5])
    ]
    other = [
        row | {"text": "u"} for row in rows_of("long", {8: [2.6, 0.6], 16: [2.4, 0.4]}, [2.5, 0.5])
    ]
    rows = pd.DataFrame([*short, *ceiling, *worse, *other])
    table = gain_table(rows, ceiling="long").set_index(["run", "rope", "text"])
    assert table.loc[("long", "none", "t"), "of the ceiling"] == "100%"
    assert table.loc[("long", "none", "t"), "over half of it"] == "+0.200 ±0.000"
    assert table.loc[("long", "none", "u"), "of the ceiling"] == "100%"
    assert table.loc[("long", "ntk", "t"), "of the ceiling"] == "–"
    assert "nan" not in markdown(table.reset_index(), n_left=3)
    assert len(loss_figure(rows[rows.text == "t"]).axes) == 1
    with pytest.raises(UserError, match="--out: rows of several texts, t, u: expected one"):
        loss_figure(rows)


@pytest.mark.parametrize("lost", [{}, {16: [np.nan, 0.1]}], ids=["not evaluated", "NaN"])
def test_a_length_that_a_seed_lacks_has_no_mean(lost):
    of_seeds = [
        rows_of("x", {8: [2.6, 0.6]} | more, [2.5, 0.5], i)
        for i, more in enumerate(({16: [2, 0]}, lost))
    ]
    table = gain_table(pd.DataFrame(sum(of_seeds, []))).set_index("run")
    assert table.loc["x", "8"] == "−0.100 ±0.000" and table.loc["x", "16"] == "–"


def test_tables_take_documents_from_the_rows():
    rows = pd.DataFrame(rows_of("x", {16: [2.0, 2.0, 0.4]}, [2.5, 2.5, 0.5]))
    of_blocks = gain_table(rows)["16"][0]
    marks = rows[rows.measure == "cut[8]"].assign(measure="document", value=[3, 3, 4], length=16)
    of_documents = gain_table(pd.concat([rows, marks]))["16"][0]
    assert of_blocks == "+0.367 ±0.133" and of_documents == "+0.367 ±0.178"


def test_margin_pairs_seeds_and_blocks():
    """Two runs whose losses differ much over seeds and blocks, and by 0.001 from each other, are
    level.
    """
    cuts = {1: [2.5, 0.5], 2: [2.9, 0.4], 3: [2.1, 0.8]}
    rows = [row for seed, cut in cuts.items() for row in rows_of("x", {16: cut}, cut, seed)]
    for seed, cut in cuts.items():
        rows += rows_of("y", {16: cut}, [loss + 0.001 for loss in cut], seed)
    rows += rows_of("one_seed", {16: [1.0, 1.0]}, [1.0, 1.0])
    table = gain_table(pd.DataFrame(rows), "x", margin=0.01).set_index("run")
    assert table["margin 0.01"].to_dict() == {"x": "level", "y": "level", "one_seed": "–"}


def test_mistakes():
    rows = pd.DataFrame(rows_of("short", {16: [3.0, 1.0]}, [2.5, 0.5]))
    with pytest.raises(
        UserError, match="--ceiling short: expected a run among the rows with a gain above 0"
    ):
        gain_table(rows, ceiling="short")
    with pytest.raises(UserError, match="--baseline other: expected a run among the rows"):
        gain_table(rows, baseline="other")
    rejected = rows.assign(value=rows.value.where(rows.measure.str.startswith("cut")))
    with pytest.raises(UserError, match="--ceiling short: expected a run among the rows"):
        gain_table(rejected, ceiling="short")
    with pytest.raises(UserError, match="no run has a loss at the longest length"):
        loss_figure(rejected)
    with pytest.raises(UserError, match="no row has a cut"):
        gain_table(rows[rows.measure != "cut[8]"])
    shorter = rows.assign(measure=rows.measure.str.replace("8", "4"))
    for other in (rows.assign(step=2), rows.assign(lr=0.2), shorter):  # else they would be averaged
        with pytest.raises(
            UserError, match="short: rows of several (steps|rates|training lengths)"
        ):
            gain_table(pd.concat([rows, other]))


TABLES = {
    "rows.csv": (),
    "rows_tests_B.csv": ("", "softmax_continued"),
    "rows_tests_counts.csv": (),
    "rows_4k_counts.csv": (),
    "rows_tests_20_counts.csv": (),
    "rows_4k_20_counts.csv": (),
    "rows_4k_scalings.csv": (),
    "rows_4k_B.csv": ("softmax", "softmax_continued", 0.01),
    "rows_4k_20.csv": ("softmax", "softmax_continued", None),
    "rows_4k_controls.csv": ("softmax",),
    "rows_4k_plain.csv": (),
    "rows_web_counts.csv": (),
    "rows_124m.csv": ("softmax",),
    "rows_code_88m.csv": ("softmax",),
    "rows_t1024.csv": ("softmax",),
    "rows_t1024_seeds.csv": ("softmax",),
    "rows_4k_remapped.csv": (),
    "rows_tests_remapped.csv": (),
}
LARGE_TABLES = {
    "rows_4k.csv": ("softmax", "softmax_continued", 0.01),
    "rows_4k_8e-3.csv": ("softmax", "softmax_continued", 0.01),
    "rows_tests_8e-3.csv": ("softmax", "softmax_continued", 0.01),
    "rows_tests_20.csv": ("softmax", "softmax_continued", None),
    "rows_web.csv": ("softmax", "softmax_continued", 0.01),
    "rows_novels.csv": ("softmax", "softmax_continued"),
}


@pytest.mark.parametrize("file", [*TABLES, *slow(*LARGE_TABLES)])
def test_committed_tables(file):
    options = (TABLES | LARGE_TABLES)[file]
    table = markdown(gain_table(read_table(CONTEXT / file), *options), n_left=2)
    assert any(table in page.read_text() for page in CONTEXT.glob("*.md"))
