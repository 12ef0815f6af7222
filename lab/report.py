"""The papers' tables and figures from run folders: published numbers beside ours.

    python -m lab.report runs/*                                     # all three papers -> runs/report/
    python -m lab.report runs/comparison_A --out runs/papers            # a folder of runs
    python -m lab.report runs/lssa* runs/softmax* --paper lssar
    python -m lab.report --comparison runs/comparison_A                     # configs/comparison -> runs/comparison_report/
    python -m lab.report --comparison                                   # redrawn from results/comparison/*.jsonl

Writes report.md, report.json (every number of ours) and PNGs into --out. A row of a table is an experiment, a
file in configs/. A run belongs to a row if its attention, positions, loss, kind of optimiser and the runs it
started from (init_from) are the file's, whatever its size and name. Every number has its scale: runs of one
scale share a letter, and runs that differ in their seed alone share a line, mean ± standard deviation;
figures of needles and of attention in training show the first of them. Rows without a number are listed
below a table. Losses are eval_length.py's, at multiples of the training length, in nats per token.
Unfinished runs are skipped.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from config import load_config
from evals.output import Result, format_rope
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import atomic_file, write_atomically, write_json
from lab import comparison, needle
from lab.figures import LogFit, all_figures, fit_p_n
from lab.runs import FACTORS, FinishedRun, Group, RunIndex, read_runs, scale_of
from lab.tables import (
    CONFIGS,
    DASH,
    PAPERS,
    markdown,
    mean_and_spread,
    read_published,
    read_rows,
    read_tables,
)

HERE = Path(__file__).resolve().parent
PAPER_SCALES = {
    "gpt2_124m.toml": "the LSSAR paper's model, length, steps and data; the rest of the recipe is ours",
    "ssmax_paper/base_162m.toml": "the SSMax paper's scale",
    "ssmax_paper/pn_162m.toml": "the SSMax paper's scale in its Section 2.1",
}


def main() -> None:
    args = parse_args()
    if args.comparison:
        default = (
            Path(args.runs[0]).parent / "comparison_report"
            if args.runs
            else HERE.parent / "results/comparison"
        )
        comparison.write_report(args.runs, make_folder(Path(args.out or default)))
        return
    papers = list(PAPERS) if args.paper is None else [args.paper]
    index = RunIndex(read_runs(args.runs))
    out = make_folder(Path(args.out) if args.out else default_out(index.runs))
    learned = [run for run in index.runs if run.config.attention.normaliser == "ssmax_pn"]
    fits = [fit_p_n(run) for run in learned if "ssmax" in papers]
    captions = {}
    figures = [all_figures(index, papers, fits), needle_figures(index) if "ssmax" in papers else ()]
    for name, caption, figure in chain(*figures):
        if figure is not None:
            while name in captions:  # runs of one name, in several folders
                name = name.replace(".png", "_.png")
            captions[name] = caption
            with atomic_file(out / name) as f:
                figure.savefig(f, format="png", dpi=130)
    write_atomically(out / "report.md", report_text(index, papers, captions).encode())
    write_json(report_numbers(index, fits), out / "report.json")
    print("\n".join(f"wrote {out / name}" for name in ["report.md", "report.json", *captions]))


def needle_figures(index: RunIndex) -> Iterator[tuple[str, str, Figure]]:
    """(file name, caption, figure) of each experiment with needle results, and of those measured alike."""
    alike: dict[tuple[Any, ...], list[Result]] = {}
    for group in (group for scale in index.letters.values() for group in index.at_scale(scale)):
        for result in group.runs[0].results("eval_needle"):
            if "trials" not in result:
                old = group.runs[0].folder / "eval_needle*.json"
                print(f"skipped: {old}: a needle of an earlier version; run lab.needle again")
                continue
            key = (group.scale, format_rope(result), *(str(result[key]) for key in ("lengths", "haystack")))
            alike.setdefault(key, []).append(result)
    for i, ((scale, rope, *_), results) in enumerate(alike.items()):
        for shown in [[result] for result in results] + [results] * (len(results) > 1):
            name = shown[0]["run"] if len(shown) == 1 else f"{scale}_all"
            caption = f"SSMax, Figures 6 to 8: needle in a haystack, {name} (scale {scale}), RoPE {rope}"
            yield f"needle_{i}_{name.replace('/', '_')}.png", caption, needle.draw(shown)


def make_folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {out}: cannot be created: {e.strerror}") from None
    return out


def default_out(runs: list[FinishedRun]) -> Path:
    """report/ in the folder that holds the runs."""
    return Path(os.path.commonpath([run.folder.resolve().parent for run in runs])) / "report"


# ---------------------------------------------------------------- report.md


def report_text(index: RunIndex, papers: list[str], captions: dict[str, str]) -> str:
    parts = [
        "# Report",
        "Made by `report.py` from run folders. Losses are in nats per token of each run's own tokeniser, at "
        "multiples of the training length; ± is the standard deviation over seeds. A dash: the run rejects "
        "the length or was not evaluated there, or the paper's text has no such number. The papers' numbers "
        "(`papers/published.toml`) have the line of the text each was read from.",
        f"## Scales\n\n{scales_text(index)}",
    ]
    parts += [
        f"## All runs of scale {scale}, by increase of loss with length\n\n{runs_table(index, scale)}"
        for scale in index.letters.values()
    ]
    parts += [f"![{caption}]({file})\n\n{caption}." for file, caption in captions.items()]
    tables, published = read_tables(), read_published()
    for paper in papers:
        for table in tables[paper]:
            by_steps = table.get("by_steps", False)
            text = steps_table(table, index) if by_steps else paper_table(table, index, published[paper])
            parts += [f"### {table['title']}", text]
            for where in table.get("numbers", ()):
                parts.append(numbers_table(where, [n for n in published[paper] if n["where"] == where]))
    return "\n\n".join(parts) + "\n"


def scales_text(index: RunIndex) -> str:
    paper_scales = {scale_of(load_config(CONFIGS / file)): text for file, text in PAPER_SCALES.items()}
    lines = []
    for scale, letter in index.letters.items():
        runs = [run for run in index.runs if run.scale == scale]
        params = sorted({run.n_params for run in runs})
        size = " to ".join(f"{n:,}" for n in dict.fromkeys((params[0], params[-1])))
        tokens = sorted({result["data"]["tokens"] for run in runs for result in run.evaluations.values()})
        evaluated = f" Evaluated on {' or '.join(f'{n:,}' for n in tokens)} tokens." if tokens else ""
        whose = f"This is {paper_scales[scale]}." if scale in paper_scales else (
            "**Not a published scale**: compare trends only."
        )  # fmt: skip
        lines.append(f"- **{letter}** ({len(runs)} runs): {scale}; {size} parameters.{evaluated} {whose}")
    return "\n".join(lines)


def runs_table(index: RunIndex, scale: str) -> str:
    """Every experiment of a scale: losses at 1x and 16x and their difference, for each RoPE scaling."""
    header = ["run", "seeds", "parameters", "validation"]
    header += [f"{what} ({rope})" for rope in index.ropes for what in ("1x", "16x", "16x - 1x")]

    def order(group: Group) -> float:
        increases = group.increases(index.ropes[0]) if index.ropes else []
        return statistics.fmean(increases) if increases else math.inf

    lines = []
    for group in sorted(index.at_scale(scale), key=order):
        cells = [final_validation(group)]
        for rope in index.ropes:
            values = (group.losses(rope, 1), group.losses(rope, 16), group.increases(rope))
            cells += map(mean_and_spread, values)
        seeds = ", ".join(str(run.config.seed) for run in group.runs)
        lines.append([group.name, seeds, f"{group.runs[0].n_params:,}", *cells])
    return markdown(header, lines, n_left=1)


def paper_table(table: dict[str, Any], index: RunIndex, published: list[dict[str, Any]]) -> str:
    """A paper's table: for each row the published numbers, then ours for each scale and RoPE scaling."""
    lines, missing, left = [], [], published
    for row in read_rows(table["folder"], table["files"]):
        numbers = [number for number in left if number.get("config") in row.keys]
        left = [number for number in left if number not in numbers]  # those of a whole [sweep] stand once
        of_row = [published_cells(numbers)] if numbers else []
        groups = index.of_row(row)
        for group in groups:
            ours = f"ours, scale {group.scale}" + (f", {n} seeds" if (n := len(group.runs)) > 1 else "")
            if sum(other.scale == group.scale for other in groups) > 1:  # another rate or schedule
                ours += f" (`{group.name}`)"
            for rope in index.ropes:
                cells = [mean_and_spread(group.losses(rope, factor)) for factor in FACTORS]
                of_row.append([f"{ours}, RoPE {rope}", *cells])
            if not any(run.evaluations for run in group.runs):
                of_row.append([f"{ours}, validation in training", final_validation(group), *[DASH] * 4])
        name = f"`{row.config.name}`"
        lines += [["" if i else name, *cells] for i, cells in enumerate(of_row)]
        missing += [] if of_row else [name]
    header = [f"row (`configs/{table['folder']}/`)", "source", *(f"{factor}x" for factor in FACTORS)]
    parts = [markdown(header, lines, n_left=2)] if lines else []
    parts += [f"Neither published nor run: {', '.join(missing)}."] if missing else []
    return "\n\n".join(parts)


def published_cells(numbers: list[dict[str, Any]]) -> list[str]:
    """The source and a loss for each of FACTORS; numbers that are no loss are part of the source."""
    losses, source = [DASH] * len(FACTORS), []
    for number in numbers:
        where = f"{number['where']}, line {number['line']}"
        if number["column"] == "val loss, 1x":
            losses[0] = number["printed"]
            source.append(where)
        else:
            what = f"{number['row']}, {number['column']}"
            source.append(f"{where}: {what} {number['printed']} {number['unit']}")
    return [f"paper, {'; '.join(source)}", *losses]


def steps_table(table: dict[str, Any], index: RunIndex) -> str:
    """Our final validation losses by steps of training, for each size."""
    sizes = index.training_lengths(read_rows(table["folder"], table["files"]))
    parts = [] if sizes else ["No runs of two lengths of training."]
    for size, losses in sizes.items():
        steps = sorted(set().union(*losses.values()))
        lines = [[f"{n:,}", *(mean_and_spread(found.get(n, [])) for found in losses.values())] for n in steps]
        parts.append(f"{size}:\n\n{markdown(['steps', *losses], lines, n_left=0)}")
    return "\n\n".join(parts)


def numbers_table(where: str, numbers: list[dict[str, Any]]) -> str:
    """A paper's table whose numbers have no config: its rows, with their unit and line."""
    numbers = [number for number in numbers if "config" not in number]
    columns = list(dict.fromkeys(number["column"] for number in numbers))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for n in numbers:
        lines.setdefault((n["row"], n["unit"], f"line {n['line']}"), {})[n["column"]] = n["printed"]
    cells = [[*row, *(values.get(column, DASH) for column in columns)] for row, values in lines.items()]
    return markdown([f"paper only: {where}", "unit", "line", *columns], cells, n_left=3)


def final_validation(group: Group) -> str:
    return mean_and_spread([run.validations[-1][1] for run in group.runs])


# ---------------------------------------------------------------- report.json, command line


def report_numbers(index: RunIndex, fits: list[LogFit]) -> dict[str, Any]:
    """All numbers of ours that the tables and figures are made of."""
    runs = [
        {
            "run": run.config.name,
            "scale": index.letters[run.scale],
            "seed": run.config.seed,
            "parameters": run.n_params,
            "attention": run.config.attention.model_dump(),
            "validations": run.validations,
            "lengths": {rope: result["lengths"] for rope, result in run.evaluations.items()},
        }
        for run in index.runs
    ]
    p_n = [{"run": fit.run.config.name, "a1": fit.a1, "a2": fit.a2, "r2": fit.r2} for fit in fits]
    scales = {letter: scale for scale, letter in index.letters.items()}
    return {"scales": scales, "runs": runs, "p_n": p_n}


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders of run folders")
    comparison_help = "the comparison of configs/comparison instead; RUN: a folder of runs for each scale"
    parser.add_argument("--comparison", action="store_true", help=comparison_help)
    parser.add_argument("--paper", choices=PAPERS, help="only this paper (default: all three)")
    out_help = (
        "(default: report/ in the folder that holds the runs; with --comparison, which adds to what DIR "
    )
    out_help += "has, comparison_report/ beside them)"
    parser.add_argument("--out", metavar="DIR", help=out_help)
    args = parser.parse_args()
    if args.comparison and args.paper:
        raise UserError(f"--paper {args.paper}: not together with --comparison")
    if not args.runs and not args.comparison:
        raise UserError("expected run folders: report.py runs/* (or --help)")
    return args


if __name__ == "__main__":
    run_main(main)
