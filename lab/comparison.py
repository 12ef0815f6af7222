"""The league: every normaliser under one recipe, from run folders to results/comparison.

A scale is a folder of runs, `runs/comparison_A`; more of its runs, at other learning rates, may lie in
`runs/comparison_A_<word>`, and short runs at several rates, named <contestant>_<lr>, in `runs/comparison_A_lr`. A run
is named <contestant> or <contestant>_seed=<seed>; a contestant is a file of configs/comparison/A/ or <scale>/. Each run
leaves one line in <out>/<scale>.jsonl; tables and figures are drawn from these lines, so no run folder is
needed to redraw.

The synthetic tasks of lab.recall are a scale of their own, `runs/comparison_recall`.

Text: of the evaluated blocks the first quarter chooses the RoPE scaling, by the loss at the longest length,
and then the learning rate, by the loss at 1x; every loss in the tables is of the other blocks. Evaluations of
text behind it (`eval_length.py --skip`), on which nothing was chosen, are reported apart. Costs:
train_step.json of `benchmarks.train_step --out`.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evals.common import mean_and_stderr
from evals.output import MARKERS, format_length, format_rope, save_figure
from infra.cli import UserError
from infra.files import read_json, read_jsonl, write_atomically
from lab.figures import LOSS, draw_means, new_axes, with_legend
from lab.runs import FinishedRun, read_runs, without_seed
from lab.tables import CONFIGS, DASH, HERE, markdown, mean_and_spread

BASELINE = "softmax"
Record = dict[str, Any]


# ---------------------------------------------------------------- records
def record_of(run: FinishedRun) -> Record:
    """What the league keeps of a run.

    Raises:
        UserError: evaluations by an earlier version, of other or too little text.
    """
    results = {rope: [e for e in r["lengths"] if e["reason"] is None] for rope, r in run.evaluations.items()}
    if any("block_losses" not in entry for entries in results.values() for entry in entries):
        raise UserError(f"{run.folder}: evaluated by an earlier version; run eval_length.py again")
    data, *others = (result["data"] for result in run.evaluations.values())
    if any(other != data for other in others) or data["blocks"] < 4:
        raise UserError(f"{run.folder}: expected evaluations of one text, in 4 blocks or more")
    checkpoints: dict[str, Record] = defaultdict(dict)
    for path in sorted(run.folder.glob("eval_length*_step_*.json")):
        result = read_json(path)
        if result["data"].get("skipped_tokens"):
            continue
        by_length = {str(e["length"]): e.get("loss") for e in result["lengths"]}
        checkpoints[format_rope(result)][str(result["step"])] = by_length
    return {
        "kind": "run",
        "contestant": without_seed(run.config.name),
        "which": run.config.seed,
        "lr": run.config.optimizer.lr,
        "parameters": run.n_params,
        "train_len": run.config.train.seq_len,
        "steps": run.steps_before + run.config.train.max_steps,
        "step_tokens": run.config.train.batch_tokens,
        "data": data,
        "validations": run.validations,
        "lengths": {rope: losses_of(entries) for rope, entries in results.items()},
        "positions": {
            rope: [[part["from"], part["to"], part["loss"]] for part in entries[-1]["buckets"]]
            for rope, entries in results.items()
            if entries and entries[-1]["length"] == data["block_length"]
        },
        **unseen_losses(run, data),
        "checkpoints": checkpoints,
        "needle": {format_rope(r): needle_choices(r) for r in run.results("eval_needle")},
    }


def losses_of(entries: list[Record]) -> Record:
    """By length the losses of all blocks: all tokens, same targets."""
    return {
        str(e["length"]): [e["block_losses"], e["block_same_target_losses"]]
        for e in entries
        if e["reason"] is None
    }


def unseen_losses(run: FinishedRun, data: Record) -> Record:
    """By RoPE scaling `losses_of` text behind that of `data`, and which text it is; {} without any.

    Raises:
        UserError: evaluations of several texts, or of one block.
    """
    last = run.results("eval_length")
    found = [r for r in last if r["data"].get("skipped_tokens", 0) >= data["blocks"] * data["block_length"]]
    if any(r["data"] != found[0]["data"] for r in found):
        raise UserError(f"{run.folder}: expected evaluations with one --skip and one --tokens")
    if found and found[0]["data"]["blocks"] < 2:
        raise UserError(f"{run.folder}: expected --tokens of two blocks or more after --skip")
    losses = {format_rope(result): losses_of(result["lengths"]) for result in found}
    return {"unseen": losses, "unseen_data": found[0]["data"]} if found else {}


def needle_choices(result: Record) -> dict[str, float]:
    """By length the share of needles whose right number is the likeliest of ten, over all depths."""
    shares: dict[str, list[float]] = defaultdict(list)
    for cell in result["cells"]:
        if cell["reason"] is None:
            shares[str(cell["length"])].append(cell["choice"]["share"])
    return {length: statistics.fmean(values) for length, values in shares.items()}


def recalls_of(folder: Path) -> Iterator[Record]:
    """The shares of right answer tokens of the runs that lab.recall evaluated, by task and length."""
    for run in read_runs([str(folder)]):
        for result in run.results("eval_recall"):
            entries = [entry for entry in result["lengths"] if entry["reason"] is None]
            shares = {
                task: {str(entry["length"]): entry[task]["tokens"]["share"] for entry in entries}
                for task in [*result["tasks"], "mean"]
            }
            name, seed, rope = without_seed(run.config.name), run.config.seed, format_rope(result)
            yield {"kind": "recall", "contestant": name, "which": seed, "rope": rope, "shares": shares}


def rates_of(folder: Path) -> Iterator[Record]:
    """The validation losses of short runs at several learning rates: <contestant>_<lr>."""
    for run in read_runs([str(folder)]) if folder.is_dir() else ():
        name, lr = run.config.name.rpartition("_")[0], run.config.optimizer.lr
        yield {"kind": "rate", "contestant": name, "which": lr, "loss": run.validations[-1][1]}


def update(folder: Path, out: Path) -> None:
    """Write the records of a scale's runs; those of runs that are no longer there stay.

    Raises:
        UserError: not a folder of a scale, no finished or evaluated run in it, runs that do not compare with
            those on record, or see `record_of`.
    """
    prefix, _, scale = folder.name.partition("_")
    scale = scale.partition("_")[0]
    if prefix != "comparison" or not scale:
        raise UserError(f"{folder}: expected the folder of a scale's runs: --comparison runs/comparison_A")
    if scale == "recall":
        new = list(recalls_of(folder))
    else:
        new = [record_of(run) for run in read_runs([str(folder)]) if run.evaluations]
        new += rates_of(folder.with_name(f"{folder.name}_lr"))
        path = folder / "train_step.json"
        times = read_json(path) if path.exists() else {}
        if times and BASELINE not in times:
            raise UserError(f"{path}: expected {BASELINE} among the configs")
        for name, time in times.items():
            ratio = time / times[BASELINE]
            new.append({"kind": "cost", "contestant": name, "which": "step", "ratio": ratio})
    if not new:
        raise UserError(f"{folder}: expected evaluated runs, found none")
    path = out / f"{scale}.jsonl"
    keys = ("kind", "contestant", "which", "lr", "rope")
    records = {tuple(record.get(key) for key in keys): record for record in [*read_jsonl(path), *new]}
    check_comparable([record for record in records.values() if record["kind"] == "run"])
    lines = [json.dumps(records[key], ensure_ascii=False, allow_nan=False) for key in sorted(records)]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


# ---------------------------------------------------------------- contestants
class Contestant(NamedTuple):
    """All seeds of a contestant at one learning rate and RoPE scaling."""

    name: str
    runs: list[Record]
    rope: str
    text: Literal["lengths", "unseen"] = "lengths"  # which evaluations: key of a record

    def blocks(self, length: int, same_targets: bool = False, choosing: bool = False) -> Tensor:
        """(seeds, blocks) losses of the reported blocks, or of those that choose RoPE scaling and rate.

        (0, 0) if a seed has none at this length: rejected or not finite.
        """
        found = [run[self.text][self.rope].get(str(length)) for run in self.runs]
        losses = [each[same_targets] for each in found if None not in found]
        blocks = torch.tensor(losses, dtype=torch.float64).view(len(losses), -1 if losses else 0)
        n = blocks.shape[1] // 4 if self.text == "lengths" else 0
        return blocks[:, :n] if choosing else blocks[:, n:]

    def loss(self, length: int, same_targets: bool = False) -> list[float]:
        """Of each seed; empty if one has none."""
        return self.blocks(length, same_targets).mean(1).tolist()

    def choice_loss(self, length: int) -> float:
        """On the blocks that choose; infinite if a seed has none."""
        return self.blocks(length, choosing=True).mean().nan_to_num(math.inf).item()

    @property
    def lr(self) -> float:
        return self.runs[0]["lr"]


class Scale(NamedTuple):
    name: str
    lengths: list[int]  # 1x to 16x the training length
    contestants: dict[str, Contestant]  # by name, the baseline first, then by the loss at 16x
    rates: dict[str, list[Contestant]]  # by name, the seeds that its learning rates share, or all

    @property
    def has_rates(self) -> bool:
        """Whether a contestant was trained at several learning rates."""
        return any(len(rates) > 1 for rates in self.rates.values())


def check_comparable(runs: list[Record], data: str = "data") -> None:
    """Raises UserError unless all is the same that losses, and errors paired over text, depend on."""

    def setting_of(run: Record) -> dict[str, Any]:
        text = {key: run[data].get(key) for key in ("fingerprint", "blocks", "block_length")}
        run_keys = {key: run[key] for key in ("steps", "step_tokens", "train_len")}
        return {**text, "skipped_tokens": run[data].get("skipped_tokens", 0), **run_keys}

    for run in runs:
        for key, first in setting_of(runs[0]).items():
            if (value := setting_of(run)[key]) != first:
                label = f"{run['contestant']}_seed={run['which']}"
                raise UserError(f"{label}: {key} = {value}: expected {first}, as {runs[0]['contestant']} has")


def read_scale(name: str, records: list[Record]) -> Scale:
    """The contestants of a scale, each at its better RoPE scaling and learning rate.

    Raises:
        UserError: runs that do not compare, seeds without a RoPE scaling in common.
    """
    runs = [record for record in records if record["kind"] == "run"]
    check_comparable(runs)
    lengths = sorted({int(n) for run in runs for losses in run["lengths"].values() for n in losses})
    by_rate: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_rate[run["contestant"]][run["lr"]].append(run)
    contestants, rates = [], {}
    for contestant, each in by_rate.items():
        full = [at_better_rope(contestant, each[rate], lengths[-1]) for rate in sorted(each)]
        shared = set.intersection(*({run["which"] for run in c.runs} for c in full))
        common = [c._replace(runs=[r for r in c.runs if r["which"] in shared]) for c in full]
        rates[contestant] = common if shared else full
        losses = [c.choice_loss(lengths[0]) for c in rates[contestant]]
        contestants.append(full[losses.index(min(losses))])
    contestants.sort(key=lambda c: (c.name != BASELINE, statistics.fmean(c.loss(lengths[-1]) or [math.inf])))
    return Scale(name, lengths, {c.name: c for c in contestants}, rates)


def at_better_rope(name: str, seeds: list[Record], length: int) -> Contestant:
    ropes = sorted(set.intersection(*({*run["lengths"]} for run in seeds)))
    if not ropes:
        raise UserError(f"{name}: expected seeds evaluated at one RoPE scaling at least")
    return min((Contestant(name, seeds, rope) for rope in ropes), key=lambda c: c.choice_loss(length))


# ---------------------------------------------------------------- tables
def main_table(scale: Scale, costs: dict[str, float]) -> str:
    """Losses by length; differences to the baseline with their errors over text; step times over its."""
    ends = scale.lengths[0], scale.lengths[-1]
    header = ["contestant", "RoPE", "seeds", "lr", *map(format_length, scale.lengths)]
    header += ["16x − 1x", "same targets, 16x", f"− {BASELINE}, 1x", f"− {BASELINE}, 16x"]
    header += [f"step / {BASELINE}'s"] if costs else []
    rows: list[list[str]] = []
    for c in scale.contestants.values():
        growth = [b - a for a, b in zip(*map(c.loss, ends), strict=False)]
        losses = [*map(c.loss, scale.lengths), growth, c.loss(ends[1], same_targets=True)]
        differences = [difference(scale.contestants.get(BASELINE), c, n) for n in ends]
        cells = [mean_and_spread(each, digits=3) for each in losses]
        rows.append([c.name, c.rope, str(len(c.runs)), rate_label(scale, c), *cells, *differences])
        if costs:
            rows[-1].append(f"{costs[c.name]:.2f}" if c.name in costs else DASH)
    return markdown(header, rows, n_left=2)


def rate_label(scale: Scale, c: Contestant) -> str:
    """The learning rate, with a star if it is the only one of a contestant and others have several."""
    return f"{c.lr:g}{'*' if len(scale.rates[c.name]) == 1 and scale.has_rates else ''}"


def difference(old: Contestant | None, new: Contestant, length: int) -> str:
    """Means over seeds, new - old, ± the standard error paired over blocks of text; see `paired_runs`.

    A dash for the baseline itself, and where a loss is missing.
    """
    if old is None or old is new or not (old.loss(length) and new.loss(length)):
        return DASH
    old, new = paired_runs(old, new)
    mean, error = mean_and_stderr(new.blocks(length).mean(0) - old.blocks(length).mean(0))
    return f"{mean:+.3f} ±{error:.3f}"


def paired_runs(*pair: Contestant) -> list[Contestant]:
    """Both, restricted to the trainings that they share (they differ beyond T only); else unchanged."""
    runs = [{json.dumps([run["which"], run["validations"]]): run for run in c.runs} for c in pair]
    keys = [key for key in runs[0] if key in runs[1]]
    return [c._replace(runs=[r[key] for key in keys or r]) for c, r in zip(pair, runs, strict=True)]


def seed_text(scale: Scale) -> str:
    """How far one seed moves a loss: the standard deviation pooled over contestants with several seeds.

    Contestants that differ beyond the training length only have the same validations: they count once.
    """
    ends = scale.lengths[0], scale.lengths[-1]
    found = [c for c in scale.contestants.values() if len(c.runs) > 1 and all(map(c.loss, ends))]
    several = list({json.dumps([run["validations"] for run in c.runs]): c for c in found}.values())
    if not several:
        return "One seed each: how far a seed moves a loss is not known at this scale."
    freedom = [len(c.runs) - 1 for c in several]
    variances = [[statistics.variance(c.loss(n)) for c in several] for n in ends]
    short, long = (math.sqrt(statistics.fmean(each, freedom)) for each in variances)
    return (
        f"One seed moves a loss by {short:.3f} at 1x and {long:.3f} at 16x (standard deviation, "
        f"pooled over the {len(several)} contestants with several seeds)."
    )


def comparison_table(scale: Scale, comparisons: list[dict[str, str]]) -> str:
    """One change at a time: from a contestant to the one that differs in it alone."""
    rows = []
    for each in comparisons:
        old, new = (scale.contestants.get(each[key]) for key in ("from", "to"))
        if old and new:
            cells = [difference(old, new, n) for n in (scale.lengths[0], scale.lengths[-1])]
            seeds = ", ".join(str(len(c.runs)) for c in paired_runs(old, new))
            lr = ", ".join(rate_label(scale, c) for c in (old, new))
            rows.append([each["change"], f"`{old.name}` → `{new.name}`", seeds, lr, *cells])
    return markdown(["change", "from → to", "seeds", "lr", "1x", "16x"], rows, n_left=2)


def grid(cells: dict[str, dict[Any, str]], label: Callable[[Any], str]) -> str:
    """A row for each contestant, a column for each key, which `label` formats; dashes for the missing."""
    keys = sorted(set().union(*cells.values()))
    rows = [[name, *(each.get(key, DASH) for key in keys)] for name, each in cells.items()]
    return markdown(["contestant", *map(label, keys)], rows, n_left=1)


class Recall(NamedTuple):
    """All seeds of a contestant at one RoPE scaling."""

    rope: str
    records: list[Record]

    def shares(self, task: str, length: str) -> list[float]:
        """Of each seed that has it, in per cent."""
        found = (record["shares"].get(task, {}).get(length) for record in self.records)
        return [100 * share for share in found if share is not None]

    def mean(self, length: str) -> float:
        """Over tasks and seeds; 0 without any."""
        return statistics.fmean(self.shares("mean", length) or [0.0])


def best_recalls(records: list[Record]) -> dict[str, Recall]:
    """By contestant, at the RoPE scaling whose mean over tasks at 16x is the better; the best first."""
    longer = recall_lengths(records)[:5][-1]
    by_rope: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        by_rope[record["contestant"], record["rope"]].append(record)
    found = [(name, Recall(rope, each)) for (name, rope), each in by_rope.items()]
    best: dict[str, Recall] = {}
    for name, recall in sorted(found, key=lambda pair: -pair[1].mean(longer)):
        best.setdefault(name, recall)
    return best


def recall_lengths(records: list[Record]) -> list[str]:
    """1x, 2x, 4x, ... the training length."""
    return sorted({n for r in records for n in r["shares"]["mean"]}, key=int)


def recall_table(records: list[Record]) -> str:
    """Mean over tasks by length, and each task at 16x the training length."""
    lengths = recall_lengths(records)
    tasks = [task for task in records[0]["shares"] if task != "mean"]
    columns = [("mean", n) for n in lengths] + [(task, lengths[:5][-1]) for task in tasks]
    rows = []
    for name, recall in best_recalls(records).items():
        cells = [mean_and_spread(recall.shares(*column), digits=0) for column in columns]
        rows.append([name, recall.rope, str(len(recall.records)), *cells])
    header = [n if task == "mean" else f"{task}, {n}" for task, n in columns]
    return markdown(["contestant", "RoPE", "seeds", *header], rows, n_left=2)


def summary_table(scales: list[Scale], recalls: list[Record]) -> str:
    """Both ends of every scale beside recall, of the contestants that have more than one of these, if any."""
    cells: dict[str, dict[Any, str]] = defaultdict(dict)
    for scale in scales:
        for c in scale.contestants.values():
            for factor, n in ((1, scale.lengths[0]), (16, scale.lengths[-1])):
                if losses := c.loss(n):
                    cells[c.name][f"loss, {scale.name}", factor] = mean_and_spread(losses, digits=3)
    for name, recall in best_recalls(recalls).items() if recalls else ():
        for factor, length in zip((1, 4, 16), recall_lengths(recalls)[::2], strict=False):
            cells[name]["recall", factor] = mean_and_spread(recall.shares("mean", length), digits=0)
    several = {name: each for name, each in cells.items() if len({kind for kind, _ in each}) > 1}
    return grid(several, lambda key: f"{key[0]}, {key[1]}x") if several else ""


def rate_table(records: list[Record]) -> str:
    """Validation losses of the short runs, the best of several bold."""
    losses: dict[str, dict[float, float]] = defaultdict(dict)
    for record in records:
        if record["kind"] == "rate":
            losses[record["contestant"]][record["which"]] = record["loss"]
    cells = {name: with_best_bold(each) for name, each in sorted(losses.items())}
    return grid(cells, "{:g}".format)


def full_rate_table(scale: Scale) -> str:
    """Losses at both ends of contestants with several learning rates, over the seeds they share."""
    cells: dict[str, dict[Any, str]] = {}
    for name, rates in sorted(scale.rates.items()):
        if len(rates) > 1:
            cells[name] = {}
            for factor, length in ((1, scale.lengths[0]), (16, scale.lengths[-1])):
                losses = {(factor, c.lr): c.loss(length) for c in rates}
                cells[name] |= with_best_bold({key: statistics.fmean(x) for key, x in losses.items() if x})
    return grid(cells, lambda key: f"{key[0]}x, {key[1]:g}")


def with_best_bold(losses: dict[Any, float]) -> dict[Any, str]:
    best = min(losses.values()) if len(losses) > 1 else None
    return {key: f"**{x:.3f}**" if x == best else f"{x:.3f}" for key, x in losses.items()}


def definitions(scale: Scale) -> str:
    """What each contestant is: its config file's comment."""
    folders = (CONFIGS / "comparison" / scale.name, CONFIGS / "comparison/A")
    paths = [folder / f"{name}.toml" for name in sorted(scale.contestants) for folder in folders]
    comments = {p.stem: p.read_text().split("\n", 1)[0] for p in reversed(paths) if p.exists()}
    return "\n".join(f"- `{name}`: {text.removeprefix('# ')}" for name, text in sorted(comments.items()))


# ---------------------------------------------------------------- figures
def plane_figure(scale: Scale, shown: list[Contestant]) -> Figure:
    """Loss at 1x against loss at 16x, a dot for each contestant that has both; grey: not `shown`."""
    title = f"Scale {scale.name}: lower left is better"
    figure, axes = new_axes(title, "loss at 1x (nats per token)", "loss at 16x", height=7)
    others = [c for c in scale.contestants.values() if c not in shown]
    for i, c in enumerate([*shown, *others]):
        losses = c.loss(scale.lengths[0]), c.loss(scale.lengths[-1])
        if all(losses):
            dx, dy = (statistics.stdev(each) if len(each) > 1 else 0.0 for each in losses)
            style: dict[str, Any] = {"color": "0.7", "marker": ".", "zorder": 1}
            if i < len(shown):
                style = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "label": c.name}
            elif i == len(shown):
                style["label"] = "the others of the table"
            axes.errorbar(*map(statistics.fmean, losses), dy, dx, capsize=2, linestyle="none", **style)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 4 * low))
    line = [max(axes.get_xlim()[0], axes.get_ylim()[0]), min(axes.get_xlim()[1], axes.get_ylim()[1])]
    if line[0] < line[1]:
        axes.plot(line, line, color="0.6", linestyle=":", label="flat: 16x = 1x")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def length_figure(scale: Scale, shown: list[Contestant]) -> Figure | None:
    figure, axes = new_axes(f"Scale {scale.name}", "length (tokens)", LOSS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(scale.lengths, map(format_length, scale.lengths))
    for i, c in enumerate(shown):
        draw_means(axes, i, c.name, {n: losses for n in scale.lengths if (losses := c.loss(n))})
    return with_legend(figure)


def position_figure(scale: Scale, shown: list[Contestant]) -> Figure | None:
    """Loss by position in windows of the longest length, over all evaluated blocks."""
    figure, axes = new_axes(f"Scale {scale.name}", "position in windows of 16x (tokens)", LOSS)
    axes.set_xscale("log", base=2)
    for i, c in enumerate(shown):
        parts = zip(*(run["positions"].get(c.rope, []) for run in c.runs), strict=False)
        middle = {(seeds[0][0] + seeds[0][1]) / 2: [x for *_, x in seeds] for seeds in parts}
        draw_means(axes, i, c.name, middle)
    return with_legend(figure)


def training_figure(scale: Scale) -> Figure | None:
    """Loss at 1x and at 16x over the tokens trained, from kept checkpoints at the full p, one seed each."""
    title = f"Scale {scale.name}: 1x dashed, 16x solid"
    figure, axes = new_axes(title, "training tokens (millions)", LOSS)
    found = [c for c in scale.contestants.values() if c.rope in c.runs[0]["checkpoints"]]
    for i, c in enumerate(found):
        checkpoints, millions = c.runs[0]["checkpoints"][c.rope], c.runs[0]["step_tokens"] / 1e6
        for n, linestyle, label in ((scale.lengths[0], "--", ""), (scale.lengths[-1], "-", c.name)):
            known = {step: checkpoints[step].get(str(n)) for step in sorted(checkpoints, key=int)}
            values = {int(step) * millions: [x] for step, x in known.items() if x is not None}
            draw_means(axes, i, label, values, linestyle)
    return with_legend(figure)


# ---------------------------------------------------------------- results/comparison/README.md
INTRODUCTION = (
    "Which normaliser keeps its loss at lengths that it was never trained on, if all have the same model, "
    "data, steps and evaluation? Drawn by `report.py --comparison` from the `.jsonl` files beside it, one line a "
    "run."
)
SUMMARY = (
    "Loss at 1x and 16x the training length (nats per token, ± standard deviation over seeds), and right "
    "answers of the recall tasks in per cent (guessing: 25), of the contestants that have more than one of "
    "these:"
)
RECALL = (
    "Right answer tokens in per cent (guessing: 25), at the RoPE scaling that is better at 16x: means over "
    "tasks by length, then each task at 16x; over seeds ± standard deviation."
)


def write_report(folders: list[str], out: Path) -> None:
    """Update the records of these scales, then draw every scale that has records in `out`."""
    for folder in map(Path, folders):
        update(folder, out)
    paths = sorted(out.glob("*.jsonl"))
    if not paths:
        raise UserError(f"{out}: no records; expected the folders of a scale: --comparison runs/comparison_A")
    comparisons = tomllib.loads((HERE / "papers/comparison.toml").read_text())
    records = {path.stem: read_jsonl(path) for path in paths}
    recalls = records.pop("recall", [])
    scales = {name: read_scale(name, each) for name, each in records.items()}
    parts = ["# The league: every normaliser under one recipe", INTRODUCTION]
    if summary := summary_table([*scales.values()], recalls):
        parts += [SUMMARY, summary]
    findings = out / "findings.md"
    parts += [findings.read_text().strip()] if findings.exists() else []
    for name, scale in scales.items():
        parts += scale_parts(scale, records[name], comparisons, out)
    if recalls:
        parts += ["## Synthetic recall", RECALL, recall_table(recalls)]
    write_atomically(out / "README.md", ("\n\n".join(parts) + "\n").encode())
    print(f"wrote {out / 'README.md'}")


def scale_text(scale: Scale) -> str:
    run = next(iter(scale.contestants.values())).runs[0]
    data = run["data"]
    trained = f"{run['steps']:,} steps of {run['step_tokens']:,} tokens from {data['dir']}"
    return (
        f"{run['parameters'] / 1e6:.2f}M parameters, T = {run['train_len']}, {trained}. Evaluated on "
        f"{data['blocks']} blocks of {data['block_length']:,} held-out tokens: the first "
        f"{data['blocks'] // 4} chose the RoPE scaling and, by the loss at 1x, the learning rate; the others "
        f"are reported. Losses: mean over seeds ± standard deviation. Differences: ± standard error paired "
        f"over text; where contestants share trainings, because they differ beyond T only, those of the "
        f"shared seeds. {seed_text(scale)}"
    )


def unseen_parts(scale: Scale) -> list[str]:
    """The table of the text on which nothing was chosen, if there are evaluations of it."""
    every = scale.contestants.values()
    found = [c for c in every if all(c.rope in run.get("unseen", {}) for run in c.runs)]
    if not found:
        return []
    check_comparable([run for c in found for run in c.runs], "unseen_data")
    lengths = sorted({int(n) for c in found for run in c.runs for n in run["unseen"][c.rope]})
    unseen = scale._replace(lengths=lengths, contestants={c.name: c._replace(text="unseen") for c in found})
    text = "The {blocks} blocks of {dir} after its first {skipped_tokens:,} tokens, those of the table above."
    text = text.format(**found[0].runs[0]["unseen_data"])
    return ["### Text on which nothing was chosen", text, main_table(unseen, {})]


def scale_parts(scale: Scale, records: list[Record], comparisons: dict[str, Any], out: Path) -> list[str]:
    """The paragraphs of one scale; writes its figures."""
    parts = [f"## Scale {scale.name}"]
    if scale.contestants:
        costs = {record["contestant"]: record["ratio"] for record in records if record["kind"] == "cost"}
        parts += [scale_text(scale), main_table(scale, costs)]
        shown = [scale.contestants[c] for c in comparisons["shown"] if c in scale.contestants]
        figures = {
            "plane": ("Loss at 1x against loss at 16x", plane_figure(scale, shown)),
            "lengths": ("Loss by length", length_figure(scale, shown)),
            "positions": ("Loss by position", position_figure(scale, shown)),
            "training": ("Loss over training tokens", training_figure(scale)),
        }
        for kind, (caption, figure) in figures.items():
            if figure is not None:
                save_figure(figure, out / f"{scale.name}_{kind}.png", dpi=110)
                parts.append(f"![{caption}]({scale.name}_{kind}.png)")
        found = [c for c in scale.contestants.values() if c.rope in c.runs[0]["needle"]]
        needles = {c.name: c.runs[0]["needle"][c.rope] for c in found}
        if needles:
            text = "Share of needles whose number is the likeliest of ten (chance: 10 %), by length."
            cells = {c: {int(n): f"{100 * x:.0f} %" for n, x in each.items()} for c, each in needles.items()}
            parts += ["### Needle", text, grid(cells, format_length)]
        parts += unseen_parts(scale)
        parts += ["### One change at a time", comparison_table(scale, comparisons["comparison"])]
        if scale.has_rates:
            text = "Losses of full runs at each rate, over the seeds that a contestant's rates share. "
            text += "Those with a star in the tables above were trained at one rate."
            parts += ["### Learning rates, full runs", text, full_rate_table(scale)]
    if any(record["kind"] == "rate" for record in records):
        text = "Validation loss of short runs at each rate, one seed."
        parts += ["### Learning rates, short runs", text, rate_table(records)]
    return [*parts, "### Contestants", definitions(scale)]
