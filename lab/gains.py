"""What context is worth, as a table: the loss with the context cut at T, and the gain of each
length over it.

    python -m lab.gains results/context/rows.csv
    python -m lab.gains results/context/rows_4k.csv --baseline softmax --ceiling softmax_continued
    python -m lab.gains runs/context/*/rows.csv

Reads rows of eval_length.py. A line is a run at one RoPE scaling, over its seeds, with the loss of
the cut and that at the longest length. A gain is the loss of the cut minus that of a window of the
length, on the same targets, paired over blocks, of which each is the mean over seeds. Below 0 it is
damage. ± is the standard error over documents, each with its blocks, or over blocks where no row
says their documents or all are of one. The last columns are of the longest length: the share of the
blocks that gain, and with --ceiling the gain as a share of the ceiling's, and minus half of it.
--baseline adds by how much the cut's loss is over that of another run, paired over seeds and
blocks, and with --margin what three seeds show of it. --out draws the losses by length.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from evals.common import Blocks
from evals.output import check_figure, save_figure
from evals.rows import Row, read_table, text_key, write_rows
from infra.cli import ArgumentParser, UserError, run_main
from lab.figures import draw_lines, log_ticks
from lab.level import (
    LINE,
    Documents,
    check_rows,
    documents_of,
    over_baseline,
    standard_error,
    verdict,
)
from lab.tables import DASH, markdown

MARGIN_ABOVE = 0.1  # nats, of the figure


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="ROWS.csv")
    parser.add_argument(
        "--baseline", default="", metavar="RUN", help="the run that cuts are compared with"
    )
    parser.add_argument(
        "--margin", type=float, default=0.0, metavar="NATS", help="differences of no account"
    )
    parser.add_argument(
        "--ceiling", default="", metavar="RUN", help="a run that was trained at long lengths"
    )
    parser.add_argument("--out", type=Path, metavar="FIGURE", help="figure to write")
    shown_help = "runs in its colours, RUN:LABEL to rename one, the others are grey (default: the first ones)"
    parser.add_argument("--shown", nargs="+", metavar="RUN", default=[], help=shown_help)
    args = parser.parse_args()
    check_figure(args.out)
    if args.shown and not args.out:
        raise UserError("--shown: expected --out as well, which is its figure")
    if args.margin and not (args.baseline and args.margin > 0):
        raise UserError(f"--margin {args.margin}: expected a number above 0, and --baseline")
    return args


def paired_gains(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each line, seed, length and block: `cut`, the loss with the context cut at T, and
    `gain`.

    A line whose seeds and blocks do not all have a number at a length has none there.
    Raises UserError: no row of a cut, a row twice, or losses of one run at several rates, steps or
    T.
    """
    parts = rows.measure.str.extract(r"^(?P<kind>cut|same_targets)\[(?P<train_len>\d+)\]$")
    rows = rows.assign(kind=parts.kind, train_len=parts.train_len.astype("Int64")).dropna(
        subset="kind"
    )
    check_rows(rows, {"lr": "rates", "step": "steps", "train_len": "training lengths"})
    at_cut = rows[rows.kind == "cut"]
    at_length = rows[rows.kind == "same_targets"]
    pairs = at_length.merge(at_cut, on=[*LINE, "seed", "block"], suffixes=("", "_cut"))
    if pairs.empty:
        raise UserError("no row has a cut: expected the rows of eval_length.py")
    pairs = pairs.assign(cut=pairs.value_cut, gain=pairs.value_cut - pairs.value)
    n_expected = pairs.groupby(LINE)[["seed", "block"]].transform("nunique").prod(axis="columns")
    is_whole = pairs.groupby([*LINE, "length"]).gain.transform("count") == n_expected
    return pairs.assign(value=pairs.value.where(is_whole), gain=pairs.gain.where(is_whole))


def with_errors(differences: pd.Series, documents: Documents) -> pd.Series:
    """'+0.071 ±0.024' of each line: mean ± standard error over blocks, the last level of the index."""
    lines = differences.groupby(level=[*range(differences.index.nlevels - 1)], sort=False)
    errors = lines.apply(lambda line: standard_error(line.dropna(), documents))
    text = lines.mean().map("{:+.3f}".format) + errors.map(" ±{:.3f}".format).str.replace(
        "nan", DASH
    )
    return text.str.replace("-", "−").where(lines.mean().notna(), DASH)


def gain_table(
    rows: pd.DataFrame, baseline: str = "", ceiling: str = "", margin: float = 0.0
) -> pd.DataFrame:
    """The table, in the order of the runs.

    Raises UserError: no row of a cut, no run `baseline`, no `ceiling` with a gain at the longest
    length.
    """
    pairs = paired_gains(rows)
    lines = pairs.drop_duplicates([*LINE, "seed", "block"]).groupby(LINE, sort=False)
    table = pd.DataFrame(
        {"seeds": lines.seed.nunique(), "cut": lines.cut.mean().map("{:.3f}".format)}
    )
    at_longest = pairs[pairs.length == pairs.length.max()].groupby(LINE, sort=False).value.mean()
    table[f"at {pairs.length.max():,}"] = at_longest.dropna().map("{:.3f}".format)
    documents = documents_of(rows)
    if baseline:
        cuts = pairs.drop_duplicates([*LINE, "seed", "block"])
        cuts = cuts.assign(value=cuts.cut, length=cuts.train_len)
        differences = over_baseline(cuts, baseline).droplevel("length")
        table[f"over {baseline}'s"] = with_errors(differences.mean(axis="columns"), documents)
        if margin:
            of_lines = differences.groupby(LINE, sort=False)
            table[f"margin {margin}"] = of_lines.apply(
                lambda line: verdict(line, margin, documents)
            )
    blocks = pairs.groupby([*LINE, "length", "block"], sort=False).gain.mean()
    mean = blocks.groupby([*LINE, "length"], sort=False).mean().unstack().sort_index(axis=1)
    text = with_errors(blocks, documents).unstack()
    for length in mean:
        table[f"{length:,}"] = text[length]
    longest = mean[mean.columns[-1]]
    is_gain = blocks.xs(mean.columns[-1], level="length").dropna() > 0
    table["blocks that gain"] = is_gain.groupby(LINE, sort=False).mean().map("{:.0%}".format)
    if ceiling:
        of_ceiling = longest[longest.index.get_level_values("run") == ceiling].dropna()
        best = of_ceiling.groupby("text").idxmax()
        if best.empty or not (longest[best] > 0).all():
            raise UserError(
                f"--ceiling {ceiling}: expected a run among the rows with a gain above 0"
            )
        share = longest.div(longest[best].droplevel(["run", "rope"])).reorder_levels(
            longest.index.names
        )
        table["of the ceiling"] = share.map("{:.0%}".format).where(share > 0, DASH)
        gains = blocks.xs(mean.columns[-1], level="length")
        its_gains = pd.concat(
            [gains.xs(line, level=LINE) for line in best], keys=best.index, names=["text"]
        )
        over_half = gains.sub(its_gains / 2).reorder_levels(gains.index.names)
        table["over half of it"] = with_errors(over_half, documents)
    n_texts = table.index.get_level_values("text").nunique()
    return table.reset_index("text", drop=n_texts == 1).reset_index()


def loss_figure(
    rows: pd.DataFrame, baseline: str = "", shown: Mapping[str, str] | None = None
) -> Figure:
    """The loss by length of context, mean ± standard deviation over seeds, at T that of the cut.

    Each run has the RoPE scaling that is better at the longest length. The dashed line is the
    baseline's cut. What is worse than a cut by more than MARGIN_ABOVE is not shown. shown: labels
    of the runs in colour.

    Raises UserError: rows of several texts, or no run with a loss at the longest length.
    """
    pairs = paired_gains(rows)
    if pairs.text.nunique() > 1:
        raise UserError(
            f"--out: rows of several texts, {', '.join(pairs.text.unique())}: expected one"
        )
    at_longest = (
        pairs[pairs.length == pairs.length.max()].groupby(["run", "rope"]).gain.mean().dropna()
    )
    if at_longest.empty:
        raise UserError("no run has a loss at the longest length: nothing to draw")
    best = at_longest.groupby("run").idxmax().tolist()
    pairs = pairs[pd.MultiIndex.from_frame(pairs[["run", "rope"]]).isin(best)]
    at_cut = pairs.drop_duplicates([*LINE, "seed", "block"])
    at_cut = at_cut.assign(length=at_cut.train_len, value=at_cut.cut)
    points = pd.concat([at_cut, pairs[pairs.length > pairs.train_len]])
    points = points.groupby(["run", "seed", "length"], sort=False).value.mean().reset_index()
    labels = shown or {}
    points = points.rename(columns={"run": "name", "length": "x", "value": "y"}).replace(
        {"name": labels}
    )
    title = "Who trains short and uses long context?"
    xlabel = "context in tokens, the first by a sliding window (cut)"
    figure = draw_lines(
        points, title, xlabel, "loss on the same targets, nats a token", [*labels.values()]
    )
    cuts = at_cut.groupby("run").value.mean()
    if baseline in cuts:  # not if it rejects the longest length
        figure.axes[0].axhline(cuts[baseline], color="black", linestyle="--", linewidth=1)
    lowest = points.groupby(["name", "x"]).y.mean().min()
    figure.axes[0].set_ylim(lowest - 0.02, min(points.y.max(), cuts.median() + MARGIN_ABOVE))
    return log_ticks(figure, sorted(points.x.unique()))


def output_folder(text: str) -> Path:
    """An argparse type: a folder that can be written, or made. Checked before the work."""
    folder = Path(text)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return folder
    raise argparse.ArgumentTypeError(f"{text}: expected a folder that can be written")


def publish(
    run: tuple[str, int, float, int, str, str],
    blocks: Blocks,
    cut: Sequence[float],
    losses: Mapping[int, Sequence[float]],
    out: Path | None,
) -> None:
    """Print the table of losses that another script than eval_length.py has measured, and write its
    rows.

    Args:
        run: the rows' key from the run's name to the RoPE scaling.
        cut: of each block, the loss of the targets with their context cut.
        losses: the same by length of context.
        out: folder of rows.csv, or None.
    """
    train_len = blocks.lengths[0]
    key = (*run, text_key(blocks.describe()))
    rows = [
        Row(*key, train_len, i, f"cut[{train_len}]", round(loss, 6)) for i, loss in enumerate(cut)
    ]
    for length, of_blocks in losses.items():
        measure = f"same_targets[{train_len}]"
        rows += [Row(*key, length, i, measure, round(loss, 6)) for i, loss in enumerate(of_blocks)]
    documents = enumerate(blocks.count_documents())
    rows += [Row(*key, blocks.longest, i, "document", number) for i, number in documents]
    print(markdown(gain_table(pd.DataFrame(rows, columns=Row._fields)), n_left=2))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_rows(out, rows)


def main() -> None:
    args = parse_args()
    rows = pd.concat([read_table(path) for path in args.files], ignore_index=True)
    shown = {run: label or run for run, _, label in (word.partition(":") for word in args.shown)}
    unknown = sorted(shown.keys() - {*rows.run})
    if unknown:
        raise UserError(f"--shown {', '.join(unknown)}: expected runs of the rows")
    if len({*rows.run.replace(shown)}) < rows.run.nunique():
        raise UserError("--shown: two runs would have one label")
    print(markdown(gain_table(rows, args.baseline, args.ceiling, args.margin), n_left=2))
    if args.out:
        save_figure(loss_figure(rows, args.baseline, shown), args.out)


if __name__ == "__main__":
    run_main(main)
