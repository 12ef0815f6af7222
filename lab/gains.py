"""What context is worth, as a table: the loss with the context cut at T, and the gain of each length over it.

    python -m lab.gains results/context/rows.csv
    python -m lab.gains results/context/rows_4k.csv --ceiling softmax_continued
    python -m lab.gains runs/context/*/rows.csv

Reads rows of eval_length.py. A line is a run at one RoPE scaling. A gain is the loss of the cut minus that of
a window of the length, on the same targets, ± the standard error paired over blocks. Below 0 it is damage.
With --ceiling the last column is the gain at the longest length as a share of the ceiling's best gain.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from evals.rows import read_table
from infra.cli import ArgumentParser, UserError, run_main
from lab.tables import markdown

LINE = ["run", "seed", "rope", "text"]  # what identifies a line


def paired_gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each line, length and block: `cut` (loss with the context cut at T) and `gain` over it."""
    at_cut = rows[rows.measure.str.fullmatch(r"cut\[\d+\]")]
    at_length = rows[rows.measure.str.fullmatch(r"same_targets\[\d+\]")]
    pairs = at_length.merge(at_cut, on=[*LINE, "block"], suffixes=("", "_cut"))
    return pairs.assign(cut=pairs.value_cut, gain=pairs.value_cut - pairs.value)


def gain_table(rows: pd.DataFrame, ceiling: str = "") -> pd.DataFrame:
    """The table, in the order of the runs. Raises UserError: no row of a cut, no `ceiling` with a gain."""
    pairs = paired_gains(rows)
    if pairs.empty:
        raise UserError("no row has a cut: expected the rows of eval_length.py")
    lines = pairs.groupby(LINE, sort=False)
    table = pd.DataFrame({"cut": lines.cut.mean().map("{:.3f}".format)})
    gains = pairs.groupby([*LINE, "length"], sort=False).gain
    mean = gains.mean().unstack().sort_index(axis=1)
    error = gains.sem().unstack()
    for length in mean:
        text = mean[length].map("{:+.3f}".format) + error[length].map(" ±{:.3f}".format)
        table[f"{length:,}"] = text.str.replace("-", "−")
    if ceiling:
        best = mean[mean.index.get_level_values("run") == ceiling].max().max()
        if not best > 0:
            raise UserError(f"--ceiling {ceiling}: expected a run among the rows with a gain above 0")
        table["share of the ceiling"] = (
            (mean[mean.columns[-1]] / best).map("{:.0%}".format).str.replace("-", "−")
        )
    table.index = table.index.droplevel("text")
    return table.reset_index()


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="ROWS.csv")
    parser.add_argument("--ceiling", default="", metavar="RUN", help="a run that was trained at long lengths")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rows = pd.concat([read_table(path) for path in args.files], ignore_index=True)
    print(markdown(gain_table(rows, args.ceiling), n_left=3))


if __name__ == "__main__":
    run_main(main)
