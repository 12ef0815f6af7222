"""By how much losses over all tokens are over a baseline's, and what that shows: level, lower or
higher.

    python -m lab.level runs/softmax/rows.csv runs/mine/rows.csv --baseline softmax
    python -m lab.level runs/*_seed=*/rows.csv --baseline softmax --margin 0.01

Reads rows of eval_length.py. Runs whose names differ in their seeds alone (mine_seed=1,
mine_seed=2) are one line. A difference is paired over seeds and blocks. The baseline has at each
length its best RoPE scaling. ± is the standard error over documents, each with its blocks, or over
blocks where no row says their documents or all are of one. From two seeds on it is that of seeds
and text together.

--margin adds what three seeds show. Each limit is the mean ± three standard errors.

    level        within ±margin
    lower        below 0
    higher       above 0
    not higher   at most the margin above 0
    not shown    none of these
"""

import argparse
import math
from pathlib import Path

import pandas as pd

from evals.rows import read_table
from infra.cli import ArgumentParser, UserError, run_main
from lab.runs import without_seed
from lab.tables import DASH, markdown

LINE = ["run", "rope", "text"]  # what identifies a line
MIN_SEEDS = 3
# the number of the document that a block of a text ends in
Documents = dict[tuple[str, int], float]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="ROWS.csv")
    parser.add_argument(
        "--baseline", required=True, metavar="RUN", help="its name without the seed"
    )
    parser.add_argument(
        "--margin", type=float, default=0.0, metavar="NATS", help="differences of no account"
    )
    args = parser.parse_args()
    if args.margin < 0:
        raise UserError(f"--margin {args.margin}: expected a number above 0")
    return args


def check_rows(rows: pd.DataFrame, values: dict[str, str]) -> None:
    """Raises UserError: a run has several of these values, {column: what it holds}, or a row twice."""
    for column, what in values.items():
        n_values = rows.groupby(["run", "text"])[column].nunique()
        if (n_values > 1).any():
            raise UserError(
                f"{n_values.idxmax()[0]}: rows of several {what}: expected one, or another name"
            )
    twice = rows[rows.duplicated([*LINE, "seed", "length", "block", "measure"])]
    if len(twice):
        run, seed = twice.iloc[0][["run", "seed"]]
        expected = "expected each file once, and one run of a name and seed"
        raise UserError(f"{run}, seed {seed}: rows given twice: {expected}")


def documents_of(rows: pd.DataFrame) -> Documents:
    """The document of each text and block whose rows say it, of texts with several documents."""
    documents = rows[rows.measure == "document"].drop_duplicates(["text", "block"])
    documents = documents[documents.groupby("text").value.transform("nunique") > 1]
    return documents.set_index(["text", "block"]).value.to_dict()


def over_baseline(losses: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """By how much losses are over the baseline's best: index LINE, length, block; a column for each
    seed.

    The best is of the RoPE scalings that all of its seeds have at a length.

    Args:
        losses: run, rope, text, seed, length, block and value, which is a loss.
    Raises UserError: no run `baseline`.
    """
    of_baseline = losses[losses.run == baseline]
    if of_baseline.empty:
        raise UserError(f"--baseline {baseline}: expected a run among the rows")
    by_rope = of_baseline.groupby(["text", "length", "rope"])
    ropes = by_rope.agg(n_seeds=("seed", "nunique"), loss=("value", "mean"))
    ropes = ropes.sort_values(
        ["n_seeds", "loss"], ascending=[False, True], kind="stable"
    ).reset_index()
    best_rope = ropes.drop_duplicates(["text", "length"])[["text", "length", "rope"]]
    key = ["text", "seed", "length", "block"]
    both = losses.merge(of_baseline.merge(best_rope), on=key, suffixes=("", "_baseline"))
    both["difference"] = both.value - both.value_baseline
    return both.set_index([*LINE, "length", "block", "seed"]).difference.unstack()


def standard_error(values: pd.Series, documents: Documents) -> float:
    """That of the mean, whose index ends with text and block; the blocks of a document err
    together.
    """
    blocks = zip(*map(values.index.get_level_values, ("text", "block")), strict=True)
    groups = pd.Series([documents.get(block, block) for block in blocks], index=values.index)
    sums = (values - values.mean()).groupby(groups).sum()
    n = len(sums)
    return math.sqrt(sums.pow(2).sum() * n / (n - 1)) / len(values) if n > 1 else math.nan


def mean_and_error(differences: pd.DataFrame, documents: Documents) -> tuple[float, float]:
    """Of differences (blocks, seeds) the mean and its standard error; variances of text and seeds
    add up.
    """
    over_text = standard_error(differences.mean(axis="columns"), documents)
    n_seeds = differences.shape[1]
    over_seeds = differences.mean(axis="index").sem() if n_seeds > 1 else 0.0
    return differences.mean(axis=None), math.hypot(over_text, over_seeds)


def verdict(differences: pd.DataFrame, margin: float, documents: Documents) -> str:
    """What differences of losses (blocks, seeds) show, a dash for less than three seeds.

    Each bound is a one-sided test at 5 %, three standard errors away: with three seeds t is 2.92.
    "level" is one test at either end of ±margin (Schuirmann 1987). Of equal models one in ten gets
    "lower" or "higher".
    """
    differences = differences.dropna(axis="columns")
    if differences.shape[1] < MIN_SEEDS:
        return DASH
    mean, error = mean_and_error(differences, documents)
    low = mean - 3 * error
    high = mean + 3 * error
    if -margin < low and high < margin:
        return "level"
    if high < 0:
        return "lower"
    if low > 0:
        return "higher"
    return "not higher" if high < margin else "not shown"


def level_table(rows: pd.DataFrame, baseline: str, margin: float = 0.0) -> pd.DataFrame:
    """A row for each line: its seeds, and at each length the difference and what it shows.

    A length that a seed lacks, in any block, has a dash.

    Raises UserError: no run `baseline`, or losses of a run at several rates or steps.
    """
    losses = rows[(rows.measure == "loss") & rows.block.notna()]
    losses = losses.assign(run=losses.run.map(without_seed))
    check_rows(losses, {"lr": "rates", "step": "steps"})
    documents = documents_of(rows)

    def cell(differences: pd.DataFrame) -> str:
        if differences.isna().any(axis=None):
            return DASH
        mean, error = mean_and_error(differences, documents)
        text = f"{mean:+.3f} ±{error:.3f}".replace("-", "−").replace("nan", DASH)
        return text + (f", {verdict(differences, margin, documents)}" if margin else "")

    by_line = over_baseline(losses, baseline).groupby(LINE, sort=False)
    of_seeds = {line: each.dropna(axis="columns", how="all") for line, each in by_line}
    cells = pd.DataFrame(
        {line: each.groupby("length").apply(cell) for line, each in of_seeds.items()}
    ).T
    table = (
        cells.sort_index(axis="columns")
        .rename(columns="{:,}".format)
        .rename_axis(LINE)
        .fillna(DASH)
    )
    table.insert(0, "seeds", [each.shape[1] for each in of_seeds.values()])
    n_texts = table.index.get_level_values("text").nunique()
    return table.reset_index("text", drop=n_texts == 1).reset_index()


def main() -> None:
    args = parse_args()
    rows = pd.concat([read_table(path) for path in args.files], ignore_index=True)
    print(markdown(level_table(rows, args.baseline, args.margin), n_left=2))


if __name__ == "__main__":
    run_main(main)
