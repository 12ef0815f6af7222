"""The league: every normaliser under one recipe, from run folders to results/league.

A scale is a folder of runs, `runs/league_A`, with its learning rates beside it, `runs/league_A_lr`. A run is
named <contestant>_seed=<seed>, a contestant being a file of configs/league/<scale>/. Each run leaves one line
in <out>/<scale>.jsonl; tables and figures are drawn from these lines, so no run folder is needed to redraw.

The synthetic tasks of evals.recall are a scale of their own, `runs/league_recall`, with a run <contestant>.

Text: of the evaluated blocks the first quarter chooses the RoPE scaling, by the loss at the longest length;
every reported loss is of the other blocks.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attention import describe_attention
from evals.common import mean_and_stderr
from evals.output import format_length, save_figure
from infra.cli import UserError
from infra.files import read_jsonl, write_atomically
from papers.figures import MARKERS, new_axes, with_legend
from papers.runs import FinishedRun, read_runs
from papers.tables import CONFIGS, HERE, markdown

BASELINE = "softmax"
DASH = "–"
Record = dict[str, Any]


# ---------------------------------------------------------------- records
def record_of(run: FinishedRun) -> Record:
    """What the league keeps of a run."""
    lengths = {
        rope: {
            str(entry["length"]): [entry["block_losses"], entry["block_same_target_losses"]]
            for entry in result["lengths"]
            if entry["reason"] is None
        }
        for rope, result in run.evaluations.items()
    }
    checkpoints = {}
    for path in sorted(run.folder.glob("eval_length_step_*.json")):
        result = json.loads(path.read_text())
        checkpoints[str(result["step"])] = {str(e["length"]): e.get("loss") for e in result["lengths"]}
    return {
        "kind": "run",
        "contestant": run.config.name.rpartition("_seed=")[0],
        "which": run.config.seed,
        "lr": run.config.optimizer.lr,
        "attention": describe_attention(run.config.attention, run.config.model),
        "parameters": run.n_params,
        "train_len": run.config.train.seq_len,
        "step_tokens": run.config.train.batch_tokens,
        "data": next((result["data"] for result in run.evaluations.values()), None),
        "validations": run.validations,
        "lengths": lengths,
        "positions": {
            rope: [(part["from"], part["to"], part["loss"]) for part in result["lengths"][-1]["buckets"]]
            for rope, result in run.evaluations.items()
            if result["lengths"][-1]["reason"] is None
        },
        "checkpoints": checkpoints,
        "needle": needle_choices(run.folder / "eval_needle.json"),
    }


def needle_choices(path: Path) -> dict[str, float]:
    """By length the share of needles whose right number is the likeliest of ten, over all depths."""
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    shares: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        if cell["reason"] is None:
            shares[str(cell["length"])].append(cell["choice"]["share"])
    return {length: statistics.fmean(values) for length, values in shares.items()}


def recalls_of(folder: Path) -> Iterator[Record]:
    """The shares of right answer tokens of the runs that evals.recall evaluated, by task and length."""
    for path in sorted(folder.glob("*/eval_recall*.json")):
        result = json.loads(path.read_text())
        shares = {
            task: {str(e["length"]): e[task]["tokens"]["share"] for e in result["lengths"] if not e["reason"]}
            for task in [*result["tasks"], "mean"]
        }
        rope = result["rope"]["kind"]
        yield {"kind": "recall", "contestant": path.parent.name, "which": rope, "shares": shares}


def rates_of(folder: Path) -> Iterator[Record]:
    """The validation losses of short runs at several learning rates: <contestant>_<lr>."""
    for run in read_runs([str(folder)]) if folder.is_dir() else ():
        name, lr = run.config.name.rpartition("_")[0], run.config.optimizer.lr
        steps, loss = run.validations[-1]
        yield {"kind": "rate", "contestant": name, "which": lr, "steps": steps, "loss": loss}


def update(folder: Path, out: Path) -> None:
    """Write the records of a scale's runs; those of runs that are no longer there stay.

    Raises:
        UserError: the folder has no finished run, or one was evaluated by an earlier version.
    """
    path = out / f"{scale_name(folder)}.jsonl"
    if folder.name == "league_recall":
        new = list(recalls_of(folder))
    else:
        try:
            new = [record_of(run) for run in read_runs([str(folder)]) if run.evaluations]
        except KeyError:
            raise UserError(f"{folder}: evaluated by an earlier version; run eval_length.py again") from None
        new += rates_of(folder.with_name(f"{folder.name}_lr"))
    records = {(r["kind"], r["contestant"], r["which"]): r for r in [*read_jsonl(path), *new]}
    lines = [json.dumps(records[key], ensure_ascii=False, allow_nan=False) for key in sorted(records)]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


def scale_name(folder: Path) -> str:
    return folder.name.removeprefix("league_")


# ---------------------------------------------------------------- contestants
class Contestant(NamedTuple):
    """All seeds of a contestant, at the RoPE scaling that was chosen for it."""

    name: str
    runs: list[Record]
    rope: str

    def blocks(self, length: int, same_targets: bool = False) -> Tensor:
        """(seeds, blocks) losses of the reported blocks."""
        return torch.stack(
            [reported(run["lengths"][self.rope][str(length)][same_targets]) for run in self.runs]
        )

    def loss(self, length: int, same_targets: bool = False) -> list[float]:
        """Of each seed."""
        return self.blocks(length, same_targets).mean(1).tolist()

    def minus(self, other: Contestant, length: int) -> tuple[float, float | None]:
        """Difference of the means over seeds, and its standard error paired over blocks of text."""
        return mean_and_stderr(self.blocks(length).mean(0) - other.blocks(length).mean(0))


def n_choosing(n_blocks: int) -> int:
    return n_blocks // 4


def reported(losses: list[float]) -> Tensor:
    return torch.tensor(losses[n_choosing(len(losses)) :], dtype=torch.float64)


def contestants_of(records: list[Record]) -> dict[str, Contestant]:
    """By name, the baseline first, then by the loss at the longest length."""
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["kind"] == "run":
            by_name[record["contestant"]].append(record)
    found = []
    for name, runs in by_name.items():
        common = set.intersection(*({*run["lengths"]} for run in runs))
        longest = max(map(int, runs[0]["lengths"][next(iter(common))]))

        def choosing_loss(rope: str, runs: list[Record] = runs, longest: int = longest) -> float:
            losses = [run["lengths"][rope][str(longest)][0] for run in runs]
            return statistics.fmean(x for each in losses for x in each[: n_choosing(len(each))])

        found.append(Contestant(name, runs, min(sorted(common), key=choosing_loss)))
    found.sort(key=lambda c: (c.name != BASELINE, statistics.fmean(c.loss(lengths_of(c)[-1]))))
    return {c.name: c for c in found}


def lengths_of(contestant: Contestant) -> list[int]:
    return sorted(map(int, contestant.runs[0]["lengths"][contestant.rope]))


# ---------------------------------------------------------------- tables
def main_table(contestants: dict[str, Contestant]) -> str:
    """Losses by length; differences to the baseline with their errors over text."""
    base = contestants.get(BASELINE)
    lengths = lengths_of(next(iter(contestants.values())))
    first, last = lengths[0], lengths[-1]
    header = [
        "contestant",
        "RoPE",
        "seeds",
        "lr",
        *map(format_length, lengths),
        "16x − 1x",
        "same targets, 16x",
    ]
    header += [f"− {BASELINE}, 1x", f"− {BASELINE}, 16x"]
    rows = []
    for c in contestants.values():
        growth = [b - a for a, b in zip(c.loss(first), c.loss(last), strict=True)]
        differences = [c.minus(base, n) for n in (first, last)] if base and c is not base else []
        rows.append(
            [
                c.name,
                c.rope,
                str(len(c.runs)),
                f"{c.runs[0]['lr']:g}",
                *(over_seeds(c.loss(n)) for n in lengths),
                over_seeds(growth),
                over_seeds(c.loss(last, same_targets=True)),
                *(f"{mean:+.3f} ±{error or math.nan:.3f}" for mean, error in differences),
                *[DASH] * (2 - len(differences)),
            ]
        )
    return markdown(header, rows, n_left=2)


def over_seeds(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ±{statistics.stdev(values):.3f}" if len(values) > 1 else mean


def seed_text(contestants: dict[str, Contestant]) -> str:
    """How far one seed moves a loss: the standard deviation pooled over contestants with several seeds."""
    several = [c for c in contestants.values() if len(c.runs) > 1]
    if not several:
        return "One seed each: how far a seed moves a loss is not known at this scale."
    freedom = sum(len(c.runs) - 1 for c in several)

    def pooled(at: int) -> float:
        squares = (statistics.variance(c.loss(lengths_of(c)[at])) * (len(c.runs) - 1) for c in several)
        return math.sqrt(sum(squares) / freedom)

    return (
        f"One seed moves a loss by {pooled(0):.3f} at 1x and {pooled(-1):.3f} at 16x (standard deviation, "
        f"pooled over the {len(several)} contestants with several seeds)."
    )


def comparison_table(contestants: dict[str, Contestant], comparisons: list[dict[str, str]]) -> str:
    """One change at a time: from a contestant to the one that differs in it alone."""
    rows = []
    for each in comparisons:
        old, new = (contestants.get(each[key]) for key in ("from", "to"))
        if old is None or new is None:
            continue
        lengths = lengths_of(new)
        differences = [new.minus(old, n) for n in (lengths[0], lengths[-1])]
        cells = [f"{mean:+.3f} ±{error or math.nan:.3f}" for mean, error in differences]
        seeds = f"{len(old.runs)}, {len(new.runs)}"
        rows.append([each["change"], f"`{old.name}` → `{new.name}`", seeds, *cells])
    return markdown(["change", "from → to", "seeds", "1x", "16x"], rows, n_left=2)


def needle_table(contestants: dict[str, Contestant]) -> str | None:
    """The likelihood form of the needle, where it was measured."""
    found = {name: c.runs[0]["needle"] for name, c in contestants.items() if c.runs[0]["needle"]}
    if not found:
        return None
    lengths = sorted(set().union(*found.values()), key=int)
    rows = [
        [name, *(f"{100 * each[n]:.0f} %" if n in each else DASH for n in lengths)]
        for name, each in found.items()
    ]
    return markdown(["contestant", *(format_length(int(n)) for n in lengths)], rows, n_left=1)


def recall_table(records: list[Record]) -> str:
    """Mean over tasks by length at the better RoPE scaling, and each task at the training length and 16x."""
    by_name: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_name[record["contestant"]].append(record)
    lengths = sorted(records[0]["shares"]["mean"], key=int)
    tasks = [task for task in records[0]["shares"] if task != "mean"]
    longer = lengths[min(4, len(lengths) - 1)]
    best = [max(each, key=lambda r: r["shares"]["mean"].get(longer, 0.0)) for each in by_name.values()]
    best.sort(key=lambda r: -r["shares"]["mean"].get(longer, 0.0))
    rows = []
    for r in best:
        cells = [r["shares"]["mean"].get(n) for n in lengths] + [r["shares"][t].get(longer) for t in tasks]
        shown = [DASH if x is None else f"{100 * x:.0f}" for x in cells]
        rows.append([r["contestant"], r["which"], *shown])
    header = ["contestant", "RoPE", *(f"{n}" for n in lengths), *(f"{t}, {longer}" for t in tasks)]
    return markdown(header, rows, n_left=2)


def rate_table(records: list[Record]) -> str:
    """Validation losses of the short runs, the best one bold."""
    by_name: dict[str, dict[float, float]] = defaultdict(dict)
    for record in records:
        if record["kind"] == "rate":
            by_name[record["contestant"]][record["which"]] = record["loss"]
    rates = sorted(set().union(*by_name.values()))

    def cell(losses: dict[float, float], rate: float) -> str:
        if rate not in losses:
            return DASH
        return f"**{losses[rate]:.3f}**" if losses[rate] == min(losses.values()) else f"{losses[rate]:.3f}"

    rows = [[name, *(cell(losses, rate) for rate in rates)] for name, losses in sorted(by_name.items())]
    return markdown(["contestant", *(f"{rate:g}" for rate in rates)], rows, n_left=1)


def definitions(scale: str, contestants: dict[str, Contestant]) -> str:
    """What each contestant is: its config file's comment."""
    lines = []
    for name in sorted(contestants):
        path = CONFIGS / f"league/{scale}/{name}.toml"
        if path.exists():
            comment = path.read_text().split("\n", 1)[0].removeprefix("# ")
            lines.append(f"- `{name}`: {comment}")
    return "\n".join(lines)


# ---------------------------------------------------------------- figures
def plane_figure(scale: str, contestants: dict[str, Contestant]) -> Figure:
    """Loss at 1x against loss at 16x, a dot for each contestant."""
    figure, axes = new_axes(
        f"Scale {scale}: lower left is better", "loss at 1x (nats per token)", "loss at 16x", height=8
    )
    for i, c in enumerate(contestants.values()):
        lengths = lengths_of(c)
        x, y = c.loss(lengths[0]), c.loss(lengths[-1])
        spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in (x, y)]
        style = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "markersize": 6, "capsize": 2}
        axes.errorbar(statistics.fmean(x), statistics.fmean(y), spread[1], spread[0], label=c.name, **style)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 4 * low))
    line = [max(axes.get_xlim()[0], axes.get_ylim()[0]), min(axes.get_xlim()[1], axes.get_ylim()[1])]
    if line[0] < line[1]:
        axes.plot(line, line, color="0.6", linestyle=":", label="flat: 16x = 1x")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def length_figure(scale: str, contestants: dict[str, Contestant], shown: list[str]) -> Figure | None:
    """Loss against length of the contestants that matter."""
    figure, axes = new_axes(f"Scale {scale}", "length (tokens)", "loss (nats per token)")
    for i, c in enumerate(contestants[name] for name in shown if name in contestants):
        lengths = lengths_of(c)
        losses = [c.loss(n) for n in lengths]
        spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in losses]
        axes.errorbar(
            lengths, list(map(statistics.fmean, losses)), spread, label=c.name, marker=MARKERS[i], capsize=3
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, map(format_length, lengths))
    return with_legend(figure)


def position_figure(scale: str, contestants: dict[str, Contestant], shown: list[str]) -> Figure | None:
    """Loss by position in windows of the longest length, over all evaluated blocks: mean over seeds."""
    figure, axes = new_axes(f"Scale {scale}", "position in windows of 16x (tokens)", "loss (nats per token)")
    for i, c in enumerate(contestants[name] for name in shown if name in contestants):
        parts = [run["positions"][c.rope] for run in c.runs]
        middle = [math.sqrt(max(1, low) * high) for low, high, _ in parts[0]]
        losses = [statistics.fmean(part[2] for part in each) for each in zip(*parts, strict=True)]
        axes.plot(middle, losses, label=c.name, marker=MARKERS[i])
    axes.set_xscale("log", base=2)
    return with_legend(figure)


def training_figure(scale: str, contestants: dict[str, Contestant]) -> Figure | None:
    """Loss at 1x and at the longest length over the tokens trained, from kept checkpoints, one seed each."""
    figure, axes = new_axes(
        f"Scale {scale}: 1x dashed, 16x solid, RoPE ntk",
        "training tokens (millions)",
        "loss (nats per token)",
    )
    found = [c for c in contestants.values() if c.runs[0]["checkpoints"]]
    for i, c in enumerate(found):
        run, lengths = c.runs[0], lengths_of(c)
        steps = sorted(run["checkpoints"], key=int)
        x = [int(step) * run["step_tokens"] / 1e6 for step in steps]
        for length, linestyle, label in ((lengths[0], "--", None), (lengths[-1], "-", c.name)):
            y = [run["checkpoints"][step].get(str(length)) or math.nan for step in steps]
            axes.plot(x, y, color=f"C{i}", linestyle=linestyle, marker=MARKERS[i], label=label)
    return with_legend(figure)


# ---------------------------------------------------------------- results/league/README.md
def write_report(folders: list[str], out: Path) -> None:
    """Update the records of these scales, then draw every scale that has records in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in map(Path, folders):
        update(folder, out)
    paths = sorted(out.glob("*.jsonl"))
    if not paths:
        raise UserError(f"{out}: no records; expected the folders of a scale: --league runs/league_A")
    findings = out / "findings.md"
    parts = ["# The league: every normaliser under one recipe"]
    parts += [findings.read_text().strip()] if findings.exists() else []
    comparisons = tomllib.loads((HERE / "league.toml").read_text())
    for path in paths:
        records = read_jsonl(path)
        if path.stem == "recall":
            text = (
                "Right answer tokens in per cent, means over tasks by length, then each task at one length."
            )
            parts += ["## Synthetic recall", text, recall_table(records)]
        else:
            parts += scale_parts(path.stem, records, comparisons, out)
    write_atomically(out / "README.md", ("\n\n".join(parts) + "\n").encode())
    print(f"wrote {out / 'README.md'}")


def scale_text(contestants: dict[str, Contestant]) -> str:
    baseline = next(iter(contestants.values()))
    run, data = baseline.runs[0], baseline.runs[0]["data"]
    trained = f"{run['validations'][-1][0]:,} steps of {run['step_tokens']:,} tokens from {data['dir']}"
    return (
        f"{run['parameters'] / 1e6:.2f}M parameters, T = {run['train_len']}, {trained}. Evaluated on "
        f"{data['blocks']} blocks of {data['block_length']:,} held-out tokens: the first "
        f"{n_choosing(data['blocks'])} chose the RoPE scaling, the others are reported. Losses: mean over "
        "seeds ± standard deviation. Differences: ± standard error paired over text. "
        + seed_text(contestants)
    )


def scale_parts(scale: str, records: list[Record], comparisons: dict[str, Any], out: Path) -> list[str]:
    """The paragraphs of one scale; writes its figures."""
    contestants = contestants_of(records)
    parts = [f"## Scale {scale}"]
    if contestants:
        parts += [scale_text(contestants), main_table(contestants)]
        figures = {
            "plane": ("Loss at 1x against loss at 16x", plane_figure(scale, contestants)),
            "lengths": ("Loss by length", length_figure(scale, contestants, comparisons["shown"])),
            "positions": ("Loss by position", position_figure(scale, contestants, comparisons["shown"])),
            "training": ("Loss over training tokens", training_figure(scale, contestants)),
        }
        for name, (caption, figure) in figures.items():
            if figure is not None:
                save_figure(figure, out / f"{scale}_{name}.png", dpi=110)
                parts.append(f"![{caption}]({scale}_{name}.png)")
        if (table := needle_table(contestants)) is not None:
            text = "Share of needles whose number is the likeliest of ten (chance: 10 %), by length."
            parts += ["### Needle", text, table]
        parts += ["### One change at a time", comparison_table(contestants, comparisons["comparison"])]
    parts += [
        "### Learning rates",
        "Validation loss of short runs at each rate, one seed.",
        rate_table(records),
    ]
    return [*parts, "### Contestants", definitions(scale, contestants)]
