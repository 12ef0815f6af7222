"""The papers' tables and figures from run folders: published numbers beside ours.

    python -m lab.report runs/*                              # all three papers -> runs/report/
    python -m lab.report runs/comparison_A --out runs/papers # a folder of runs
    python -m lab.report runs/lssa* runs/softmax* --paper lssar
    python -m lab.report --comparison runs/comparison_A      # the comparison -> runs/comparison_report/
    python -m lab.report --comparison                        # redrawn from results/comparison/*.jsonl

Writes report.md and PNGs into --out. A row of a table is an experiment, a file in configs/. A run belongs to
a row if its attention, positions, loss, kind of optimiser and the runs it started from (init_from) are the
file's, whatever its name and its size, unless the file sweeps over sizes. Runs of one scale share a letter.
Runs that differ in their seed alone share a line, mean ± standard deviation. Losses are eval_length.py's, at
multiples of the training length, in nats per token. Unfinished runs are skipped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from config import load_config
from evals.output import save_figure
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import write_atomically
from lab import comparison
from lab.figures import all_figures
from lab.runs import FACTORS, Runs, read_runs, scale_of, tabulate
from lab.tables import CONFIGS, PAPERS, markdown, mean_and_spread, read_published, read_rows, read_tables

RESULTS = CONFIGS.parent / "results"
PAPER_SCALES = {
    "gpt2_124m.toml": "the LSSAR paper's model, length, steps and data; the rest of the recipe is ours",
    "ssmax_paper/base_162m.toml": "the SSMax paper's scale",
    "ssmax_paper/pn_162m.toml": "the SSMax paper's scale in its Section 2.1",
}
INTRODUCTION = """\
Made by `python -m lab.report` from run folders. Losses are in nats per token of each run's own tokeniser, at
multiples of the training length; ± is the standard deviation over seeds. A dash: the run rejects the length
or was not evaluated there, or the paper's text has no such number."""


def main() -> None:
    args = parse_args()
    if args.comparison:
        beside = Path(args.runs[0]).parent / "comparison_report" if args.runs else RESULTS / "comparison"
        comparison.write_report(args.runs, Path(args.out or beside))
        return
    runs = tabulate(read_runs(args.runs))
    papers = [args.paper] if args.paper else [*PAPERS]
    out = Path(args.out or runs.table.run.iloc[0].folder.resolve().parent / "report")
    out.mkdir(parents=True, exist_ok=True)
    captions = {}
    for file, caption, figure in all_figures(runs, papers):
        save_figure(figure, out / file, dpi=130)
        captions[file] = caption
    write_atomically(out / "report.md", report_text(runs, papers, captions).encode())
    print(f"wrote {out / 'report.md'}")


def report_text(runs: Runs, papers: list[str], captions: dict[str, str]) -> str:
    parts = ["# Report", INTRODUCTION, f"## Scales\n\n{scales_text(runs)}"]
    losses = runs.means()
    for scale, of_scale in runs.table.groupby("scale"):
        heading = f"## All runs of scale {scale}, by increase of loss with length"
        parts += [heading, runs_table(of_scale, losses[losses.scale == scale])]
    parts += [f"![{caption}]({file})\n\n{caption}." for file, caption in captions.items()]
    published = read_published()
    for paper in papers:
        of_paper = published[published.paper == paper]
        for table in read_tables()[paper]:
            parts += [f"### {table['title']}", paper_table(table, runs, of_paper)]
            for where in table.get("numbers", ()):
                parts.append(numbers_table(of_paper[(of_paper["where"] == where) & (of_paper.config == "")]))
    return "\n\n".join(parts) + "\n"


def scales_text(runs: Runs) -> str:
    paper_scales = {scale_of(load_config(CONFIGS / file)): text for file, text in PAPER_SCALES.items()}
    lines = []
    for (scale, scale_text), of_scale in runs.table.groupby(["scale", "scale_text"]):
        parameters = sorted({run.n_params for run in of_scale.run})
        size = " to ".join(f"{n:,}" for n in dict.fromkeys((parameters[0], parameters[-1])))
        texts = runs.losses[runs.losses.scale == scale]
        tokens = f" Evaluated on {(texts.blocks * texts.block_length).max():,} tokens." if len(texts) else ""
        whose = "**Not a published scale**: compare trends only."
        if scale_text in paper_scales:
            whose = f"This is {paper_scales[scale_text]}."
        lines.append(
            f"- **{scale}** ({len(of_scale)} runs): {scale_text}; {size} parameters.{tokens} {whose}"
        )
    return "\n".join(lines)


def final_losses(table: pd.DataFrame) -> pd.Series:
    """By line the final validation loss."""
    final = pd.Series([run.validations[-1][1] for run in table.run], table.line)
    return final.groupby(level=0).agg(mean_and_spread)


def runs_table(table: pd.DataFrame, losses: pd.DataFrame) -> str:
    """Every line of a scale: losses at 1x and 16x and their difference, for each RoPE scaling."""
    by_line = table.groupby("line")
    lines = by_line.agg(run=("name", "first"), seeds=("seed", lambda seeds: ", ".join(map(str, seeds))))
    lines["parameters"] = [f"{run.n_params:,}" for run in by_line.run.first()]
    lines["validation"] = final_losses(table)
    wide = losses.pivot(index=["line", "seed"], columns=["rope", "factor"], values="loss")
    increases = []
    for rope in sorted(losses.rope.unique()):
        ends = wide[rope].reindex(columns=[1, 16])
        ends["increase"] = ends[16] - ends[1]
        increases.append(ends.increase.groupby("line").mean())
        cells = ends.groupby("line").agg(lambda each: mean_and_spread(each.dropna()))
        lines = lines.join(cells.set_axis([f"1x ({rope})", f"16x ({rope})", f"16x - 1x ({rope})"], axis=1))
    order = increases[0].reindex(lines.index).sort_values(kind="stable").index if increases else lines.index
    return markdown(lines.loc[order])


def paper_table(table: dict[str, Any], runs: Runs, published: pd.DataFrame) -> str:
    """A paper's table: for each row the published numbers, then ours for each scale and RoPE scaling."""
    ours = (
        runs.means()
        .groupby(["line", "rope", "factor"])
        .loss.agg(mean_and_spread)
        .unstack()
        .reindex(columns=FACTORS)
    )
    validations = final_losses(runs.table)
    cells: list[list[str]] = []
    missing = []
    for row in read_rows(table["folder"], table["files"]):
        numbers = published[published.config.isin(row.keys)]
        published = published.drop(numbers.index)  # those of a whole [sweep] stand once
        of_row = [published_cells(numbers)] if len(numbers) else []
        of_scale = runs.of_row(row).groupby(["scale", "line"])
        n_lines = of_scale.size().groupby("scale").size()
        for (scale, line), of_line in of_scale:
            source = f"ours, scale {scale}" + (f", {len(of_line)} seeds" if len(of_line) > 1 else "")
            if n_lines[scale] > 1:  # another rate or schedule
                source += f" (`{of_line.name.iloc[0]}`)"
            if line not in ours.index:
                of_row.append([f"{source}, validation in training", validations[line]])
                continue
            of_row += [[f"{source}, RoPE {rope}", *losses] for rope, losses in ours.loc[line].iterrows()]
        name = f"`{row.config.name}`"
        cells += [["" if i else name, *line_cells] for i, line_cells in enumerate(of_row)]
        missing += [] if of_row else [name]
    header = [f"row (`configs/{table['folder']}/`)", "source", *(f"{factor}x" for factor in FACTORS)]
    lines = [dict(zip(header, line_cells, strict=False)) for line_cells in cells]
    parts = [markdown(pd.DataFrame(lines, columns=header), n_left=2)] if cells else []
    parts += [f"Neither published nor run: {', '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def published_cells(numbers: pd.DataFrame) -> list[str]:
    """The source and the loss at 1x; numbers that are no loss are part of the source."""
    is_loss = numbers.column == "val loss, 1x"
    what = ": " + numbers.row + ", " + numbers.column + " " + numbers.printed + " " + numbers.unit
    sources = numbers["where"] + what.where(~is_loss, "")
    return [f"paper, {'; '.join(sources)}", *numbers[is_loss].printed[-1:]]


def numbers_table(numbers: pd.DataFrame) -> str:
    """A paper's table whose numbers have no config: its rows, with their unit."""
    cells = numbers.set_index(["row", "unit", "column"]).printed.unstack(sort=False).reset_index()
    where = numbers["where"].iloc[0]
    return markdown(cells.rename(columns={"row": f"paper only: {where}"}), n_left=2)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders of run folders")
    parser.add_argument(
        "--comparison", action="store_true", help="the comparison; RUN: a folder for each scale"
    )
    parser.add_argument("--paper", choices=PAPERS, help="only this paper (default: all three)")
    parser.add_argument(
        "--out", metavar="DIR", help="(default: see above, in the folder that holds the runs)"
    )
    args = parser.parse_args()
    if args.comparison and args.paper:
        raise UserError(f"--paper {args.paper}: not together with --comparison")
    if not args.runs and not args.comparison:
        raise UserError("expected run folders: python -m lab.report runs/* (or --help)")
    return args


if __name__ == "__main__":
    run_main(main)
