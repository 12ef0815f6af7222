"""lab.gains: gains are paired over blocks, and the committed tables are what the records give."""

from pathlib import Path

import pandas as pd
import pytest

from evals.rows import read_table
from infra.cli import UserError
from lab.gains import gain_table
from lab.tables import markdown

CONTEXT = Path(__file__).parents[2] / "results/context"


def rows_of(run, losses, cut):
    """Losses of two blocks by length, and those with the context cut at 8."""
    key = {"run": run, "seed": 1, "rope": "none", "text": "t"}
    rows = [key | {"length": 8, "block": i, "measure": "cut[8]", "value": v} for i, v in enumerate(cut)]
    for length, values in losses.items():
        rows += [
            key | {"length": length, "block": i, "measure": "same_targets[8]", "value": v}
            for i, v in enumerate(values)
        ]
    return rows


def test_gains_are_paired():
    rows = pd.DataFrame(
        [
            *rows_of("long", {8: [3.0, 1.0], 16: [2.0, 0.4]}, [2.5, 0.5]),
            *rows_of("x", {16: [2, 0.9]}, [2.5, 0.5]),
        ]
    )
    table = gain_table(rows, ceiling="long").set_index("run")
    assert table.loc["long", "cut"] == "1.500"
    assert table.loc["long", "8"] == "−0.500 ±0.000"
    assert table.loc["long", "16"] == "+0.300 ±0.200"
    assert table.loc["x", "share of the ceiling"] == "17%"  # 0.05 of 0.3


def test_mistakes():
    rows = pd.DataFrame(rows_of("short", {16: [3.0, 1.0]}, [2.5, 0.5]))
    with pytest.raises(UserError, match="--ceiling short: expected a run among the rows with a gain above 0"):
        gain_table(rows, ceiling="short")
    with pytest.raises(UserError, match="no row has a cut"):
        gain_table(rows[rows.measure != "cut[8]"])


@pytest.mark.parametrize(("file", "ceiling"), [("rows.csv", ""), ("rows_4k.csv", "softmax_continued")])
def test_committed_tables(file, ceiling):
    assert (
        markdown(gain_table(read_table(CONTEXT / file), ceiling), n_left=3)
        in (CONTEXT / "README.md").read_text()
    )
