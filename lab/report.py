"""The papers' tables and figures from run folders: published numbers beside ours.

    python -m lab.report runs/*                              # all three papers -> runs/report/
    python -m lab.report runs/comparison_A --out runs/papers # a folder of runs
    python -m lab.report --papers                            # results/papers, redrawn from committed records
    python -m lab.report --papers runs/papers_A --out results/papers       # with the records of these runs
    python -m lab.report --comparison runs/comparison_A      # the comparison -> runs/comparison_report/
    python -m lab.report --comparison                        # redrawn from results/comparison/*.jsonl

Writes report.md and PNGs into --out, in place of an earlier report's. A row of a table is an
experiment, a file in configs/. A run belongs to a row if its formula, positions, loss and kind of
optimiser are the file's, whatever its name and its size, unless the file sweeps over sizes. A scale
all of whose runs are of such files stands in their rows alone. If the file has init_from, the run
has to replace another's normaliser.

--papers keeps a record of each run in <out>/runs.jsonl and reads the comparison's records of scale
A, of the rows of the papers.

Runs of one scale share a letter. Runs that differ in their seed alone share a line, mean ± standard
deviation. Losses are eval_length.py's, at multiples of the training length. Unfinished runs are
skipped.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import pandas as pd

from evals.common import common_folder
from evals.output import save_figure
from evals.rows import FACTORS
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import exclusive_lock, read_text, write_atomically
from lab import comparison
from lab.figures import all_figures
from lab.records import keep, merge, read_records
from lab.runs import FinishedRun, Runs, experiment_of, read_runs, tabulate
from lab.tables import (
    CONFIGS,
    DASH,
    all_rows,
    check_ours,
    markdown,
    mean_and_spread,
    read_published,
    read_rows,
    read_tables,
)

RESULTS = CONFIGS.parent / "results/comparison"
OF_PAPERS = CONFIGS.parent / "results/papers"
COUNTS = """\
Rows are those of the tables below, each with a config. Rows of one formula, loss and recipe are one
experiment. Run: how many of them have a run here, at any scale. Published numbers without a config are those
of images, of translation, and of what is no run."""
TITLE = "# Report"
RECORDS = "runs.jsonl"
LOSSES = [f"val loss, {factor}x" for factor in FACTORS]  # columns of published losses
INTRODUCTION = """\
Made by `python -m lab.report` from run folders or records. Losses are in nats per token of each run's own
tokeniser, at multiples of the training length; ± is the standard deviation over seeds. A number without ± is
of one seed, in a line of several seeds, too. A dash: the run rejects the length or was not evaluated there,
or the paper's text has no such number. Rows that nobody has a number of are left out. RoPE none is without
scaling, theta another base at every length. **A scale below is a published one only if its model, length,
steps and data are the paper's**: otherwise compare trends only. The letters of scales are this
report's own."""


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run folders, or folders of run folders"
    )
    parser.add_argument("--comparison", action="store_true", help="RUN: a folder for each scale")
    parser.add_argument(
        "--papers", action="store_true", help="from the records in --out, and of RUN"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="(default: beside the runs, without runs results/)"
    )
    args = parser.parse_args()
    if not args.runs and not args.comparison and not args.papers:
        raise UserError("expected run folders: python -m lab.report runs/* (or --help)")
    return args


def main() -> None:
    args = parse_args()
    if args.comparison:
        beside = Path(args.runs[0]).parent / "comparison_report" if args.runs else RESULTS
        out = Path(args.out or beside)
        with exclusive_lock(out):
            comparison.write_report(args.runs, out)
        return
    finished = read_runs(args.runs) if args.runs else []
    folders = [run.folder.absolute().parent for run in finished]
    beside = common_folder(folders) / "report" if finished else OF_PAPERS
    out = Path(args.out or beside)
    if not args.papers and (out / RECORDS).exists():
        raise UserError(f"{out}: has {RECORDS}: expected --papers, or another --out")
    check_ours(out / "report.md", f"{TITLE}\n")
    with exclusive_lock(out):
        if args.papers:
            finished = with_records([run for run in finished if len(run.losses)], out)
        runs = tabulate(finished)
        captions = {}
        for file, caption, figure in all_figures(runs):
            save_figure(figure, out / file, dpi=130)
            captions[file] = caption
        path = out / "report.md"
        earlier = re.findall(r"\]\(([^()/]+\.png)\)", read_text(path)) if path.exists() else []
        write_atomically(path, report_text(runs, captions).encode())
        for file in {*earlier} - {*captions}:
            (out / file).unlink(missing_ok=True)
    print(f"wrote {path}")


def with_records(runs: list[FinishedRun], out: Path) -> list[FinishedRun]:
    """Keep records of the runs in `out`. Returns: all runs there, and the comparison's that are of
    a row.
    """
    keep(runs, out / RECORDS)
    experiments = {experiment_of(row.config) for row in all_rows()}
    of_comparison = read_records(RESULTS / "A.jsonl")
    return merge(
        read_records(out / RECORDS)
        + [run for run in of_comparison if run.experiment in experiments]
    )


def report_text(runs: Runs, captions: dict[str, str]) -> str:
    parts = [TITLE, INTRODUCTION, f"## Scales\n\n{scales_text(runs)}"]
    losses = runs.means()
    for scale, of_scale in runs.table[~runs.table.scale.isin(runs.of_sizes)].groupby("scale"):
        heading = f"## All runs of scale {scale}, by increase of loss with length"
        parts += [heading, runs_table(of_scale, losses[losses.scale == scale])]
    parts += [f"![{caption}]({file})\n\n{caption}." for file, caption in captions.items()]
    published = read_published()
    parts += ["## Counts", COUNTS, markdown(counts_of(runs, published))]
    for paper, tables in read_tables().items():
        of_paper = published[published.paper == paper]
        for table in tables:
            parts += [f"### {table['title']}", paper_table(table, runs, of_paper)]
            for where in table.get("numbers", ()):
                parts.append(
                    numbers_table(of_paper[(of_paper["where"] == where) & (of_paper.config == "")])
                )
    return "\n\n".join(parts) + "\n"


def counts_of(runs: Runs, published: pd.DataFrame) -> pd.DataFrame:
    """A row for each paper, see COUNTS."""
    has_losses = runs.table.line.isin(runs.losses.line)
    lines = []
    for paper, tables in read_tables().items():
        rows = [row for table in tables for row in read_rows(table["folder"], table["files"])]
        experiments = {(experiment_of(row.config), *row.sizes.items()): row for row in rows}
        n_run = sum(has_losses[runs.of_row(row).index].any() for row in experiments.values())
        of_paper = published[published.paper == paper]
        own = of_paper[of_paper.source == ""]
        counts = [
            len(rows),
            len(experiments),
            n_run,
            len(own),
            own.config.ne("").sum(),
            len(of_paper) - len(own),
        ]
        lines.append([paper, *counts])
    columns = [
        "paper",
        "rows",
        "experiments",
        "run",
        "published numbers",
        "with a config",
        "second-hand",
    ]
    return pd.DataFrame(lines, columns=columns)


def scales_text(runs: Runs) -> str:
    lines = []
    for (scale, scale_text), of_scale in runs.table.groupby(["scale", "scale_text"]):
        sizes = {run.n_params for run in of_scale.run}
        parameters = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        lines.append(
            f"- **{scale}** ({len(of_scale)} runs): {scale_text}; {parameters} parameters."
        )
    return "\n".join(lines)


def runs_table(table: pd.DataFrame, losses: pd.DataFrame) -> str:
    """Every line of a scale: losses at 1x and 16x and their difference, for each RoPE scaling."""
    by_line = table.groupby("line")
    lines = by_line.agg(
        run=("name", "first"), seeds=("seed", lambda seeds: ", ".join(map(str, seeds)))
    )
    lines["parameters"] = [f"{run.n_params:,}" for run in by_line.run.first()]
    final = table.run.map(lambda run: run.logged("val_loss")[run.config.train.max_steps])
    lines["validation"] = final.groupby(table.line).agg(mean_and_spread)
    ends = losses.pivot(index=["rope", "line", "seed"], columns="factor", values="loss")
    ends = ends.reindex(columns=[1, 16])
    ends["increase"] = ends[16] - ends[1]
    cells = ends.groupby(["rope", "line"]).agg(lambda each: mean_and_spread(each.dropna()))
    for rope in cells.index.unique("rope"):
        columns = [f"1x ({rope})", f"16x ({rope})", f"16x - 1x ({rope})"]
        lines = lines.join(cells.loc[rope].set_axis(columns, axis=1))
    increases = ends.increase.groupby(["rope", "line"]).mean().groupby("line").first()
    return markdown(lines.loc[increases.reindex(lines.index).sort_values(kind="stable").index])


def paper_table(table: dict[str, Any], runs: Runs, published: pd.DataFrame) -> str:
    """A paper's table: for each row the published numbers, then ours for each scale and RoPE
    scaling.
    """
    by_line = runs.means().groupby(["line", "rope", "factor"]).loss
    ours = by_line.agg(mean_and_spread).unstack().reindex(columns=FACTORS)
    cells = []
    for row in read_rows(table["folder"], table["files"]):
        numbers = published[published.config.isin(row.keys)]
        published = published.drop(numbers.index)  # those of a whole [sweep] stand once
        of_row = [published_cells(of_source) for _, of_source in numbers.groupby("source")]
        for (scale, line), of_line in runs.of_row(row).groupby(["scale", "line"]):
            seeds = f", {len(of_line)} seeds" if len(of_line) > 1 else ""
            source = f"ours, scale {scale}{seeds} (`{of_line.name.iloc[0]}`)"
            losses = ours[ours.index.get_level_values("line") == line].droplevel("line")
            of_row += [[f"{source}, RoPE {rope}", *at_rope] for rope, at_rope in losses.iterrows()]
        names = [f"`{row.config.name}`"] + [""] * len(of_row)
        cells += [[name, *line_cells] for name, line_cells in zip(names, of_row, strict=False)]
    header = [
        f"row (`configs/{table['folder']}/`)",
        "source",
        *(f"{factor}x" for factor in FACTORS),
    ]
    lines = [dict(zip(header, line_cells, strict=False)) for line_cells in cells]
    return markdown(pd.DataFrame(lines, columns=header), n_left=2)


def published_cells(numbers: pd.DataFrame) -> list[str]:
    """The source and the losses; numbers that are no loss are part of the source."""
    is_loss = numbers.column.isin(LOSSES)
    what = ": " + numbers.row + ", " + numbers.column + " " + numbers.printed + " " + numbers.unit
    whose = numbers.source.iloc[0]
    sources = [f"second-hand ({whose})" if whose else "paper"]
    sources.append("; ".join((numbers["where"] + what.where(~is_loss, "")).unique()))
    losses = numbers[is_loss].drop_duplicates("column", keep="last").set_index("column").printed
    return [", ".join(sources), *losses.reindex(LOSSES).fillna(DASH)]


def numbers_table(numbers: pd.DataFrame) -> str:
    """A paper's table whose numbers have no config: its rows, with their unit."""
    cells = numbers.set_index(["row", "unit", "column"]).printed.unstack(sort=False).reset_index()
    where = numbers["where"].iloc[0]
    return markdown(cells.rename(columns={"row": f"paper only: {where}"}), n_left=2)


if __name__ == "__main__":
    run_main(main)
