"""The comparison of variants under one recipe, from run folders to results/comparison.

A scale is a folder of runs, `runs/comparison_A`. Runs at other learning rates may lie in
`runs/comparison_A_<word>`, short runs at several rates, named <variant>_<lr>, in `runs/comparison_A_lr`.
A run is named <variant> or <variant>_seed=<seed>. A variant is a file of configs/comparison/A or <scale>.
Each run leaves a line in <out>/<scale>.jsonl, from which tables and figures are drawn. The tasks of
lab.recall are a scale of their own, `runs/comparison_recall`.

The first quarter of the evaluated blocks chooses the RoPE scaling, by the loss at the longest length, then
the learning rate, by the loss at 1x. Every loss in the tables is of the other blocks. Evaluations of text
after them (`eval_length.py --skip`), on which nothing was chosen, are reported apart. The costs of a step are
those of train_step.json, which `benchmarks.train_step --out` writes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from config import expand_sweep, load_config
from evals.output import MARKERS, format_length, format_rope, legend_below, save_figure
from evals.rows import text_key
from infra.cli import UserError
from infra.files import read_json, read_jsonl, write_atomically
from lab.figures import draw_lines, log_ticks
from lab.runs import FinishedRun, main_text, read_runs
from lab.tables import CONFIGS, DASH, PAPERS_FOLDER, markdown, mean_and_spread
from normalisers.base import NORMALISERS

BASELINE = "softmax"
Record = dict[str, Any]
spread = partial(mean_and_spread, digits=3)
rounded = partial(pd.DataFrame.map, func="{:.3f}".format, na_action="ignore")


# ---------------------------------------------------------------- records
def record_of(run: FinishedRun) -> Record:
    """What the comparison keeps of a run. Its variant stands under "contestant", its seed under "which".

    Raises UserError: evaluations of too little text, or of several texts behind it.
    """
    losses = run.losses
    last = losses[losses.step == run.config.train.max_steps]
    seen = last[last.text == main_text(last)]
    data = text_of(run, seen)
    unseen = last[last.skipped_tokens >= data["blocks"] * data["block_length"]]
    if data["blocks"] < 4 or unseen.text.nunique() > 1 or (unseen.blocks < 2).any():
        raise UserError(f"{run.folder}: expected 4 blocks of text or more, one --skip, and 2 blocks after it")
    whole = seen[seen.length == data["block_length"]].dropna(subset="value")
    ends = whole.measure.str.extract(r"loss\[(\d+):(\d+)\]").dropna().astype(int)
    positions = ends.assign(loss=whole.value).groupby(whole.rope).apply(lambda each: each.values.tolist())
    n_steps = losses[losses.skipped_tokens == 0].groupby("text").step.nunique()
    kept = losses[losses.text.isin(n_steps[n_steps > 1].index) & (losses.measure == "loss")].dropna()
    record = {
        "kind": "run",
        "contestant": run.name,
        "which": run.config.seed,
        "lr": run.config.optimizer.lr,
        "parameters": run.n_params,
        "train_len": run.config.train.seq_len,
        "steps": run.steps_before + run.config.train.max_steps,
        "step_tokens": run.config.train.batch_tokens,
        "data": data,
        "validations": run.validations,
        "lengths": losses_of(seen),
        "positions": positions.to_dict(),
        "checkpoints": nested(kept.groupby(["rope", "step", "length"]).value.mean()),
        "needle": {format_rope(result): needle_choices(result) for result in run.results("eval_needle")},
    }
    if len(unseen):
        record |= {"unseen": losses_of(unseen), "unseen_data": text_of(run, unseen)}
    return record


def text_of(run: FinishedRun, losses: pd.DataFrame) -> Record:
    """Which text, as in the result of eval_length.py."""
    first = losses.iloc[0]
    parts = {key: int(first[key]) for key in ("skipped_tokens", "blocks", "block_length")}
    return {"dir": run.config.data.dir, "fingerprint": first.text.partition("+")[0], **parts}


def losses_of(losses: pd.DataFrame) -> Record:
    """By RoPE scaling and length the losses of all blocks: over all tokens, and over the same targets."""
    blocks = losses.dropna(subset=["block", "value"]).sort_values("block")
    by_length = blocks.groupby(["rope", "length", "measure"]).value.agg(list).unstack()
    return nested(by_length[["loss", "same_targets"]].apply(list, axis=1))


def nested(values: pd.Series) -> Record:
    """A dictionary for each level of the index, with strings as keys."""
    tree: Record = {}
    for (*outer, key), value in values.items():
        branch = tree
        for name in outer:
            branch = branch.setdefault(str(name), {})
        branch[str(key)] = value
    return tree


def needle_choices(result: Record) -> dict[str, float]:
    """By length the share of needles whose right number is the likeliest of ten, over all depths."""
    shares = [(str(c["length"]), c["choice"]["share"]) for c in result["cells"] if c["reason"] is None]
    return pd.DataFrame(shares).groupby(0, sort=False)[1].mean().to_dict() if shares else {}


def recalls_of(folder: Path) -> Iterator[Record]:
    """The shares of right answer tokens of the runs that lab.recall evaluated, by task and length."""
    for run in read_runs([str(folder)]):
        for result in run.results("eval_recall"):
            entries = [entry for entry in result["lengths"] if entry["reason"] is None]
            shares = {
                task: {str(entry["length"]): entry[task]["tokens"]["share"] for entry in entries}
                for task in [*result["tasks"], "mean"]
            }
            which = {"contestant": run.name, "which": run.config.seed, "rope": format_rope(result)}
            yield {"kind": "recall", **which, "shares": shares}


def rates_and_costs_of(folder: Path) -> Iterator[Record]:
    """The validation losses of short runs, <variant>_<lr>; the time of a step over the baseline's."""
    short = folder.with_name(f"{folder.name}_lr")
    for run in read_runs([str(short)]) if short.is_dir() else ():
        which = {"contestant": run.config.name.rpartition("_")[0], "which": run.config.optimizer.lr}
        yield {"kind": "rate", **which, "loss": run.validations[-1][1]}
    path = folder / "train_step.json"
    times = read_json(path) if path.exists() else {}
    if times and BASELINE not in times:
        raise UserError(f"{path}: expected {BASELINE} among the configs")
    for name, time in times.items():
        yield {"kind": "cost", "contestant": name, "which": "step", "ratio": time / times[BASELINE]}


def update(folder: Path, out: Path) -> None:
    """Write the records of a scale's runs; those of runs that are no longer there stay.

    Raises:
        UserError: not a folder of a scale, no finished or evaluated run in it, runs that do not compare with
            those on record, or see `record_of`.
    """
    prefix, scale, *_ = [*folder.name.split("_"), ""]
    if prefix != "comparison" or not scale:
        raise UserError(f"{folder}: expected the folder of a scale's runs: --comparison runs/comparison_A")
    if scale == "recall":
        new = [*recalls_of(folder)]
    else:
        new = [record_of(run) for run in read_runs([str(folder)]) if run.is_evaluated]
        new += rates_and_costs_of(folder)
    if not new:
        raise UserError(f"{folder}: expected evaluated runs, found none")
    path = out / f"{scale}.jsonl"
    keys = ("kind", "contestant", "which", "lr", "rope")
    records = {tuple(record.get(key) for key in keys): record for record in [*read_jsonl(path), *new]}
    check_comparable([record for record in records.values() if record["kind"] == "run"])
    lines = [json.dumps(records[key], ensure_ascii=False, allow_nan=False) for key in sorted(records)]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


def check_comparable(runs: Iterable[Record], data: str = "data") -> None:
    """Raises UserError unless all is the same that losses, and errors paired over text, depend on."""
    first: Record = {}
    for run in runs:
        setting = {"text": text_key({"skipped_tokens": 0} | run[data])}
        setting |= {key: run[key] for key in ("contestant", "steps", "step_tokens", "train_len")}
        first = first or setting
        for key in setting.keys() - {"contestant"}:
            if setting[key] != first[key]:
                label = f"{run['contestant']}_seed={run['which']}: {key} = {setting[key]}"
                raise UserError(f"{label}: expected {first[key]}, as {first['contestant']} has")


# ---------------------------------------------------------------- choice of RoPE scaling and rate
class Scale(NamedTuple):
    """Runs of one scale, each variant at its better RoPE scaling and learning rate.

    A table of losses has a row for each block of text: variant, lr, rope, seed, training, length, block, loss
    and same (the loss over the same targets at every length). A length that a seed lacks is left out.
    """

    runs: pd.DataFrame  # variant, lr, rope, seed, label (the rate as tables show it), record
    losses: pd.DataFrame  # of the blocks that are reported
    unseen: pd.DataFrame  # of the text on which nothing was chosen
    rates: pd.DataFrame  # as `losses`, at every learning rate, of the seeds that they share, if any


def read_scale(records: list[Record]) -> Scale:
    """Raises UserError: runs that do not compare, seeds without a RoPE scaling in common."""
    runs = [record for record in records if record["kind"] == "run"]
    check_comparable(runs)
    losses = tidy(runs)
    is_choice = (losses.text == "lengths") & (losses.block < runs[0]["data"]["blocks"] // 4)
    is_reported = (losses.text == "lengths") & ~is_choice
    keys = ["variant", "lr", "rope", "seed"]
    choices = losses[is_choice].pivot_table("loss", keys, "length")
    at_rope = better_ropes(choices.reset_index())
    rates = of_shared_seeds(at_rope)
    shortest = choices.columns[0]
    best = rates.groupby(["variant", "lr"])[shortest].mean(skipna=False).reset_index()
    best["label"] = best.lr.map("{:g}".format)
    n_rates = best.groupby("variant").lr.transform("nunique")
    if n_rates.max() > 1:
        best["label"] += (n_rates == 1).map({True: "*", False: ""})
    best = best.sort_values([shortest, "lr"]).drop_duplicates("variant")
    chosen = at_rope.merge(best[["variant", "lr", "label"]])
    by_run = pd.DataFrame([(r["contestant"], r["lr"], r["which"], r) for r in runs])
    by_run.columns = ["variant", "lr", "seed", "record"]
    reported = complete(losses[is_reported], chosen)
    unseen = complete(losses[losses.text == "unseen"], chosen)
    return Scale(chosen.merge(by_run), reported, unseen, complete(losses[is_reported], rates))


def tidy(runs: list[Record]) -> pd.DataFrame:
    """A row for each loss of a block. Trainings that differ beyond the training length only are one."""
    rows = [
        (run["contestant"], run["lr"], rope, run["which"], json.dumps([run["which"], run["validations"]]),
         text, int(length), range(len(losses)), losses, same_target_losses)
        for run in runs
        for text in ("lengths", "unseen")
        for rope, by_length in run.get(text, {}).items()
        for length, (losses, same_target_losses) in by_length.items()
    ]  # fmt: skip
    columns = ["variant", "lr", "rope", "seed", "training", "text", "length", "block", "loss", "same"]
    blocks = pd.DataFrame(rows, columns=columns).explode(["block", "loss", "same"], ignore_index=True)
    return blocks.astype({"block": int, "loss": float, "same": float})


def better_ropes(choices: pd.DataFrame) -> pd.DataFrame:
    """Of variant, lr, rope, seed and losses by length the rows at the better scaling at the longest."""
    n_seeds = choices.groupby(["variant", "lr"]).seed.transform("nunique")
    of_all = choices[choices.groupby(["variant", "lr", "rope"]).seed.transform("nunique") == n_seeds]
    if missing := set(choices.variant) - set(of_all.variant):
        raise UserError(f"{min(missing)}: expected seeds evaluated at one RoPE scaling at least")
    longest = choices.columns[-1]
    means = of_all.groupby(["variant", "lr", "rope"])[longest].mean(skipna=False).reset_index()
    best = means.sort_values([longest, "rope"]).drop_duplicates(["variant", "lr"])
    return of_all.merge(best[["variant", "lr", "rope"]])


def of_shared_seeds(choices: pd.DataFrame) -> pd.DataFrame:
    """Those of the seeds that all learning rates of a variant share; all of a variant without such seeds."""
    n_rates = choices.groupby("variant").lr.transform("nunique")
    is_shared = choices.groupby(["variant", "seed"]).lr.transform("nunique") == n_rates
    return choices[is_shared | ~is_shared.groupby(choices.variant).transform("any")]


def complete(losses: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """The losses of the chosen runs, without the lengths that a seed of a variant lacks."""
    n_seeds = chosen.groupby(["variant", "lr"]).seed.nunique().rename("n_seeds").reset_index()
    losses = losses.merge(chosen[["variant", "lr", "rope", "seed"]]).merge(n_seeds)
    return losses[losses.groupby(["variant", "lr", "length"]).seed.transform("nunique") == losses.n_seeds]


# ---------------------------------------------------------------- tables
def seed_means(losses: pd.DataFrame) -> pd.DataFrame:
    """By variant and seed the mean loss at each length."""
    return losses.pivot_table("loss", ["variant", "seed"], "length")


def main_table(runs: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """By variant its losses at each length and its differences to the baseline.

    The baseline comes first, the others by their loss at the longest length.
    """
    means = seed_means(losses)
    lengths = [*means]
    order = means[lengths[-1]].groupby("variant").mean().sort_values(kind="stable").index
    order = [name for name in order if name == BASELINE] + [name for name in order if name != BASELINE]
    means["growth"] = means[lengths[-1]] - means[lengths[0]]
    means["same"] = losses[losses.length == lengths[-1]].groupby(["variant", "seed"]).same.mean()
    cells = means.groupby("variant").agg(spread)
    cells.columns = [*map(format_length, lengths), "16x − 1x", "same targets, 16x"]
    by_variant = runs.groupby("variant")
    table = by_variant.agg(RoPE=("rope", "first"), seeds=("seed", "nunique"), lr=("label", "first"))
    table = table.join(cells).loc[order]
    for factor, length in (("1x", lengths[0]), ("16x", lengths[-1])):
        table[f"− {BASELINE}, {factor}"] = [difference(losses, BASELINE, name, length) for name in order]
    return table


def paired(losses: pd.DataFrame, *pair: str) -> list[pd.DataFrame]:
    """The losses of both, of the trainings that they share (they differ beyond T only), else of all."""
    both = [losses[losses.variant == name] for name in pair]
    shared = set(both[0].training) & set(both[1].training)
    return [each[each.training.isin(shared)] if shared else each for each in both]


def difference(losses: pd.DataFrame, old: str, new: str, length: int) -> str:
    """Means over seeds, new - old, ± the standard error paired over blocks of text; see `paired`.

    A dash for the baseline itself, and where a loss is missing.
    """
    before, after = (b[b.length == length].groupby("block").loss.mean() for b in paired(losses, old, new))
    gaps = (after - before).dropna()
    return DASH if old == new or gaps.empty else f"{gaps.mean():+.3f} ±{gaps.sem():.3f}"


def seed_text(losses: pd.DataFrame, order: pd.Index) -> str:
    """How far one seed moves a loss: the standard deviation pooled over variants with several seeds.

    Variants that differ beyond the training length only have the same trainings: they count once.
    """
    ends = seed_means(losses).iloc[:, [0, -1]].dropna().groupby("variant")
    variances = ends.var().dropna().reindex(order).dropna()
    trainings = losses.groupby("variant").training.unique().map(lambda each: "".join(sorted(each)))
    variances = variances[~trainings[variances.index].duplicated(keep="last")]
    if variances.empty:
        return "One seed each: how far a seed moves a loss is not known at this scale."
    freedom = ends.size()[variances.index] - 1
    short, long = (variances.mul(freedom, axis=0).sum() / freedom.sum()) ** 0.5
    several = f"standard deviation, pooled over the {len(variances)} variants with several seeds"
    return f"One seed moves a loss by {short:.3f} at 1x and {long:.3f} at 16x ({several})."


def changes_table(scale: Scale, changes: list[dict[str, str]]) -> pd.DataFrame:
    """One change at a time: from a variant to the one that differs in it alone."""
    labels = scale.runs.groupby("variant").label.first()
    lengths = scale.losses.length
    rows = []
    for change in changes:
        old = change["from"]
        new = change["to"]
        if {old, new} <= set(labels.index):
            seeds = ", ".join(str(each.seed.nunique()) for each in paired(scale.losses, old, new))
            ends = [difference(scale.losses, old, new, length) for length in (lengths.min(), lengths.max())]
            rows.append([change["change"], old, new, seeds, f"{labels[old]}, {labels[new]}", *ends])
    return pd.DataFrame(rows, columns=["change", "from", "to", "seeds", "lr", "1x", "16x"])


def rates_table(scale: Scale) -> pd.DataFrame:
    """Losses at both ends of variants with several learning rates, over the seeds they share."""
    several = scale.rates[scale.rates.groupby("variant").lr.transform("nunique") > 1]
    if several.empty:
        return several
    by_seed = several.pivot_table("loss", ["variant", "seed"], ["length", "lr"])
    ends = {several.length.min(): "1x", several.length.max(): "16x"}
    means = by_seed[[*ends]].groupby("variant").mean()
    return rounded(means.set_axis([f"{ends[length]}, {lr:g}" for length, lr in means], axis=1))


def short_rates_table(records: list[Record]) -> pd.DataFrame:
    """Validation losses of the short runs at each learning rate."""
    rates = [(r["contestant"], r["which"], r["loss"]) for r in records if r["kind"] == "rate"]
    losses = pd.DataFrame(rates, columns=["variant", "lr", "loss"]).pivot_table("loss", "variant", "lr")
    return rounded(losses).rename(columns="{:g}".format)


def needle_table(scale: Scale, order: pd.Index) -> pd.DataFrame:
    """In per cent, by length, of the first run of each variant."""
    first = scale.runs.drop_duplicates("variant").set_index("variant").loc[order]
    shares = pd.DataFrame([run.record["needle"].get(run.rope, {}) for run in first.itertuples()], order)
    shares = (100 * shares.dropna(how="all")).map("{:.0f} %".format, na_action="ignore")
    return shares.rename(columns=lambda length: format_length(int(length)))


def recall_table(records: list[Record]) -> pd.DataFrame:
    """In per cent the mean over tasks by length, and each task at 16x, at the RoPE scaling better at 16x."""
    rows = [
        (record["contestant"], record["rope"], record["which"], task, int(length), 100 * share)
        for record in records
        for task, by_length in record["shares"].items()
        for length, share in by_length.items()
    ]
    shares = pd.DataFrame(rows, columns=["variant", "RoPE", "seed", "task", "length", "share"])
    lengths = sorted(shares.length.unique())
    longest = lengths[:5][-1]
    choices = shares[(shares.task == "mean") & (shares.length == longest)].groupby(["variant", "RoPE"])
    best = choices.share.mean().sort_values(ascending=False, kind="stable").reset_index()
    best = best.drop_duplicates("variant")[["variant", "RoPE"]]
    shares = shares.merge(best)
    cells = shares.groupby(["variant", "task", "length"]).share.agg(partial(mean_and_spread, digits=0))
    tasks = [task for task in records[0]["shares"] if task != "mean"]
    cells = cells.unstack(["task", "length"])[[("mean", n) for n in lengths] + [(t, longest) for t in tasks]]
    cells.columns = [str(n) if task == "mean" else f"{task}, {n}" for task, n in cells]
    table = best.set_index("variant").assign(seeds=shares.groupby("variant").seed.nunique())
    return table.join(cells)


def summary_table(tables: dict[str, pd.DataFrame], recall: pd.DataFrame) -> pd.DataFrame:
    """Both ends of every scale beside recall, of the variants that have more than one of these."""
    parts = []
    for name, table in tables.items():
        ends = table.iloc[:, [3, table.columns.get_loc("16x − 1x") - 1]]
        parts.append(ends.set_axis([f"loss, {name}, 1x", f"loss, {name}, 16x"], axis=1))
    if len(recall):
        means = recall.drop(columns=["RoPE", "seeds"]).iloc[:, :5:2]
        labels = ["recall, 1x", "recall, 4x", "recall, 16x"][: means.shape[1]]
        parts.append(means.set_axis(labels, axis=1))
    summary = pd.concat(parts, axis=1)
    return summary[[sum(name in part.index for part in parts) > 1 for name in summary.index]]


# ---------------------------------------------------------------- figures
def plane_figure(title: str, losses: pd.DataFrame, shown: list[str]) -> Figure:
    """Loss at 1x against loss at 16x, a dot for each variant that has both; grey: not `shown`."""
    ends = seed_means(losses).iloc[:, [0, -1]].dropna().groupby("variant")
    means = ends.mean()
    spreads = ends.std()
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    others = means.drop(shown, errors="ignore").to_numpy()
    axes.plot(*others.T, ".", color="0.7", label="the others of the table" if len(others) else "")
    for i, name in enumerate(name for name in shown if name in means.index):
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i % 10}", "label": name}
        axes.errorbar(*means.loc[name], *spreads.loc[name][::-1], capsize=2, linestyle="none", **style)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 4 * low))
    start = max(low, axes.get_xlim()[0])
    axes.axline((start, start), slope=1, color="0.6", linestyle=":", label="flat: 16x = 1x")
    axes.set(title=title, xlabel="loss at 1x (nats per token)", ylabel="loss at 16x")
    axes.grid(alpha=0.3)
    legend_below(figure, 3)
    return figure


def scale_figures(title: str, scale: Scale, shown: list[str]) -> Iterator[tuple[str, str, Figure]]:
    """Kind, caption and figure."""
    figure = plane_figure(f"{title}: lower left is better", scale.losses, shown)
    yield "plane", "Loss at 1x against loss at 16x", figure
    lengths = sorted(scale.losses.length.unique())
    runs = scale.runs[scale.runs.variant.isin(shown)]
    by_length = seed_means(scale.losses).loc[runs.variant.unique()].stack().reset_index()
    by_length.columns = ["name", "seed", "x", "y"]
    figure = draw_lines(by_length, title, "length (tokens)", shown=shown)
    yield "lengths", "Loss by length", log_ticks(figure, lengths)
    positions = [
        (run.variant, (first + end) / 2, loss)
        for run in runs.itertuples()
        for first, end, loss in run.record["positions"].get(run.rope, [])
    ]
    if positions:
        points = pd.DataFrame(positions, columns=["name", "x", "y"])
        figure = draw_lines(points, title, "position in windows of 16x (tokens)", shown=shown)
        yield "positions", "Loss by position", log_ticks(figure, lengths)
    training = [
        (run.variant, factor, int(step) * run.record["step_tokens"] / 1e6, by_length[str(length)])
        for run in scale.runs.drop_duplicates("variant").itertuples()
        for length, factor in ((lengths[0], "1x"), (lengths[-1], "16x"))
        for step, by_length in run.record["checkpoints"].get(run.rope, {}).items()
        if by_length.get(str(length)) is not None
    ]
    if training:
        points = pd.DataFrame(training, columns=["name", "panel", "x", "y"])
        yield "training", "Loss over training tokens", draw_lines(points, title, "training tokens (millions)")


# ---------------------------------------------------------------- results/comparison/README.md
INTRODUCTION = """\
Which normaliser keeps its loss at lengths that it was never trained on, if all have the same model, data,
steps and evaluation? Drawn by `python -m lab.report --comparison` from the `.jsonl` files beside it."""
SUMMARY = """\
Loss at 1x and 16x the training length (nats per token, ± standard deviation over seeds), and right answers of
the recall tasks in per cent (guessing: 25), of the variants that have more than one of these:"""
RECALL = """\
Right answer tokens in per cent (guessing: 25), at the RoPE scaling that is better at 16x. Means over tasks by
length, then each task at 16x, over seeds ± standard deviation."""
SCALE = """\
{variants} configurations of {normalisers} of the {registered} registered normalisers. {size:.2f}M
parameters, T = {train_len}, {steps:,} steps of {step_tokens:,} tokens from {data[dir]}. Evaluated on
{data[blocks]} blocks of {data[block_length]:,} held-out tokens. The first quarter of them chose the RoPE
scaling and, by the loss at 1x, the learning rate. The others are reported. A star marks a rate that is the
only one of its variant. Losses are means over seeds ± standard deviation. Differences are ± standard error
paired over text, of the shared seeds where two variants share trainings because they differ beyond T only.
{seeds}"""


def write_report(folders: list[str], out: Path) -> None:
    """Update the records of these scales, then draw every scale that has records in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in map(Path, folders):
        update(folder, out)
    records = {path.stem: read_jsonl(path) for path in sorted(out.glob("*.jsonl"))}
    if not records:
        raise UserError(f"{out}: no records; expected the folders of a scale: --comparison runs/comparison_A")
    recall = recall_table(records.pop("recall")) if "recall" in records else pd.DataFrame()
    settings = tomllib.loads((PAPERS_FOLDER / "comparison.toml").read_text())
    scales = {name: read_scale(each) for name, each in records.items()}
    tables = {name: main_table(scale.runs, scale.losses) for name, scale in scales.items()}
    parts = ["# The comparison", INTRODUCTION]
    summary = summary_table(tables, recall)
    if len(summary):
        parts += [SUMMARY, markdown(summary.reset_index(names="variant"))]
    findings = out / "findings.md"
    parts += [findings.read_text().strip()] if findings.exists() else []
    for name, scale in scales.items():
        parts += scale_parts(name, scale, tables[name], records[name], settings["shown"], out)
        parts.append(
            write_csv_tables(name, scale, tables[name].index, records[name], settings["changes"], out)
        )
    if len(recall):
        parts += ["## Synthetic recall", RECALL, markdown(recall.reset_index(), n_left=2)]
    write_atomically(out / "README.md", ("\n\n".join(parts) + "\n").encode())
    print(f"wrote {out / 'README.md'}")


def variant_files(scale: str, variants: Iterable[str]) -> dict[str, Path]:
    """By name the config file of each variant: of the scale, or of scale A under another base."""
    folders = CONFIGS / "comparison/A", CONFIGS / "comparison" / scale
    files = {path.stem: path for folder in folders for path in folder.glob("*.toml")}
    return {name: files[name] for name in sorted(variants) if name in files}


def scale_parts(
    name: str, scale: Scale, table: pd.DataFrame, records: list[Record], shown: list[str], out: Path
) -> Iterator[str]:
    """The paragraphs of one scale; writes its figures."""
    costs = {r["contestant"]: f"{r['ratio']:.2f}" for r in records if r["kind"] == "cost"}
    if costs:
        table = table.assign(**{f"step / {BASELINE}'s": pd.Series(costs)})
    files = variant_files(name, table.index).values()
    normalisers = {load_config(f, expand_sweep(f)[0].overrides).attention.normaliser for f in files}
    counts = {"variants": len(table), "normalisers": len(normalisers), "registered": len(NORMALISERS)}
    run = scale.runs.record.iloc[0]
    seeds = seed_text(scale.losses, table.index)
    text = SCALE.format(size=run["parameters"] / 1e6, seeds=seeds, **counts, **run)
    yield from (f"## Scale {name}", text, markdown(table.reset_index(), n_left=2))
    for kind, caption, figure in scale_figures(f"Scale {name}", scale, shown):
        save_figure(figure, out / f"{name}_{kind}.png", dpi=110)
        yield f"![{caption}]({name}_{kind}.png)"


def write_csv_tables(
    name: str, scale: Scale, order: pd.Index, records: list[Record], changes: list[Any], out: Path
) -> str:
    """Links to the other tables of a scale."""
    files = variant_files(name, order)
    comments = {variant: f.read_text().split("\n", 1)[0].removeprefix("# ") for variant, f in files.items()}
    unseen = pd.DataFrame()
    if len(scale.unseen):
        check_comparable(scale.runs[scale.runs.variant.isin(scale.unseen.variant)].record, "unseen_data")
        unseen = main_table(scale.runs, scale.unseen).reindex(order.intersection(scale.unseen.variant))
    tables = {
        "variants": ("What each variant is", pd.DataFrame({"what it is": comments})),
        "unseen": ("The table above on text on which nothing was chosen", unseen),
        "changes": ("One change at a time", changes_table(scale, changes).set_index("change")),
        "rates": ("Full runs at each learning rate, over the seeds that they share", rates_table(scale)),
        "short_rates": ("Validation loss of short runs at each rate, one seed", short_rates_table(records)),
        "needle": ("Share of needles whose number is the likeliest of ten", needle_table(scale, order)),
    }
    links = []
    for kind, (caption, table) in tables.items():
        if len(table):
            file = f"{name}_{kind}.csv"
            label = "change" if kind == "changes" else "variant"
            write_atomically(out / file, table.fillna(DASH).to_csv(index_label=label).encode())
            links.append(f"- [{file}]({file}): {caption}.")
    return "\n".join(links)
