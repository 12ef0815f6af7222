"""The comparison of variants under one recipe, from run folders to results/comparison.

A scale is a folder of runs, `runs/comparison_A`. Runs at other learning rates may lie in
`runs/comparison_A_<word>`. A run is named <variant> or <variant>_seed=<seed>. A variant is a file
of configs/comparison/A or <scale>. Each run leaves a line in <out>/<scale>.jsonl, from which tables
and figures are drawn. The tasks of lab.recall are a scale of their own, `runs/comparison_recall`.

The first quarter of the evaluated blocks chooses the RoPE scaling, by the loss at the longest
length, then the learning rate, by the loss at 1x. Every loss in the tables is of the other blocks.
Evaluations of text after them (`eval_length.py --skip`), on which nothing was chosen, are reported
apart. The costs of a step are those of train_step.json, which `benchmarks.train_step --out` writes.
"""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from pydantic import PositiveFloat, RootModel

from evals.output import format_length, format_rope, legend_below, save_figure
from evals.rows import identity_of, text_key
from infra.cli import UserError
from infra.files import read_json, read_jsonl, read_text, write_atomically
from lab.figures import draw_lines, log_ticks
from lab.level import verdict
from lab.records import Record, write_records
from lab.runs import FinishedRun, main_text, read_runs, recipe_of
from lab.styles import GREY, N_SHOWN, variant_styles
from lab.tables import CONFIGS, DASH, PAPERS_FOLDER, check_ours, markdown, mean_and_spread
from schema import VARIANT_KEYS, Config, describe_layers
from training.checkpoint import find_checkpoints, load_checkpoint

TITLE = "# The comparison"
BASELINE = "softmax"
OWN_KEYS = (*VARIANT_KEYS, "data.dir")  # of a run, not of the recipe of all: starts of keys
MARGIN = 0.01  # nats of no account, at the training length


# ---------------------------------------------------------------- records
def variant_of(config: Config, *but: str) -> Record:
    """What `check_comparable` compares of a config. A run that began from another one has no
    recipe.
    """
    recipe = {} if config.init_from else {"recipe": recipe_of(config, *OWN_KEYS, *but)}
    return {"attention": describe_layers(config), **recipe}


def record_of(run: FinishedRun) -> Record:
    """What the comparison keeps of a run. Its variant stands under "contestant", its seed under
    "which".

    Raises UserError: evaluations of too little text, of several texts behind it, or of shorter
    windows alone.
    """
    train_len = run.config.train.seq_len
    measures = ("loss", f"same_targets[{train_len}]")
    losses = run.losses
    seen = losses[losses.text == main_text(losses)]
    data = text_of(run, seen)
    for path in find_checkpoints(run.folder)[:1]:
        data["train"] = identity_of(load_checkpoint(path, lazily=True)["data"]["train"])
    unseen = losses[losses.skipped_tokens >= data["blocks"] * data["block_length"]]
    if data["blocks"] < 4 or unseen.text.nunique() > 1 or (unseen.blocks < 2).any():
        raise UserError(
            f"{run.folder}: expected 4 blocks of text or more, one --skip, and 2 blocks after it"
        )
    by_length = losses_of(seen, measures)
    if not by_length:
        raise UserError(f"{run.folder}: expected eval_length.py --lengths from {train_len} on")
    whole = seen[seen.length == data["block_length"]].dropna(subset="value")
    ends = whole.measure.str.extract(r"loss\[(\d+):(\d+)\]").dropna().astype(int)
    positions = (
        ends.assign(loss=whole.value).groupby(whole.rope).apply(lambda each: each.values.tolist())
    )
    record = {
        "kind": "run",
        "contestant": run.name,
        "which": run.config.seed,
        "lr": run.config.optimizer.lr,
        **variant_of(run.config, "optimizer.lr"),
        "parameters": run.n_params,
        "train_len": train_len,
        "steps": run.steps_before + run.config.train.max_steps,
        "step_tokens": run.config.train.batch_tokens,
        "data": data,
        "validations": [*run.logged("val_loss").items()],
        "lengths": by_length,
        "positions": positions.to_dict(),
    }
    if len(unseen):
        record |= {"unseen": losses_of(unseen, measures), "unseen_data": text_of(run, unseen)}
    return record


def text_of(run: FinishedRun, losses: pd.DataFrame) -> Record:
    """Which text, as in the result of eval_length.py."""
    first = losses.iloc[0]
    parts = {key: int(first[key]) for key in ("skipped_tokens", "blocks", "block_length")}
    return {"dir": run.config.data.dir, "fingerprint": first.text.partition("+")[0], **parts}


def losses_of(
    losses: pd.DataFrame, measures: tuple[str, str]
) -> dict[str, dict[str, list[list[float]]]]:
    """By RoPE scaling and length the losses of all blocks, by the two measures in turn."""
    blocks = (
        losses[losses.measure.isin(measures)].dropna(subset=["block", "value"]).sort_values("block")
    )
    n_measures = blocks.groupby(["rope", "length"]).measure.transform("nunique")
    blocks = blocks[n_measures == len(measures)]  # others scored other targets
    by_length: dict[str, dict[str, list[list[float]]]] = {}
    for (rope, length, _), each in blocks.groupby(["rope", "length", "measure"]).value:
        by_length.setdefault(rope, {}).setdefault(str(length), []).append(each.tolist())
    return by_length


def recalls_of(folder: Path) -> Iterator[Record]:
    """The shares of right answer tokens of the runs that lab.recall evaluated, by task and length.

    Several evaluations of a run at one RoPE scaling, of other lengths, are one record.
    """
    for run in read_runs([str(folder)]):
        by_rope: dict[str, dict[str, dict[str, float]]] = {}
        for path in sorted(run.folder.glob("eval_recall*.json")):
            result = read_json(path)
            try:
                entries = [entry for entry in result["lengths"] if entry["reason"] is None]
                shares = {
                    task: {
                        str(entry["length"]): float(entry[task]["tokens"]["share"])
                        for entry in entries
                    }
                    for task in [*result["tasks"], "mean"]
                }
                rope = format_rope(result)
            except (LookupError, TypeError, ValueError) as e:
                reason = f"{type(e).__name__}: {e}"
                raise UserError(f"{path}: expected a result of lab.recall: {reason}") from None
            if entries and result["step"] == run.config.train.max_steps:
                at_rope = by_rope.setdefault(rope, {})
                for task, by_length in shares.items():
                    at_rope.setdefault(task, {}).update(by_length)
        for rope, of_tasks in by_rope.items():
            which = {"contestant": run.name, "which": run.config.seed, "rope": rope}
            yield {"kind": "recall", **which, **variant_of(run.config), "shares": of_tasks}


class StepTimes(RootModel[dict[str, PositiveFloat]]):
    """The content of train_step.json, by the names of configs."""


def costs_of(folder: Path) -> Iterator[Record]:
    """The time of a step of each variant over the baseline's."""
    path = folder / "train_step.json"
    times = read_json(path, StepTimes) if path.exists() else {}
    if times and BASELINE not in times:
        raise UserError(f"{path}: expected {BASELINE} among the configs")
    for name, time in times.items():
        yield {"kind": "cost", "contestant": name, "which": "step", "ratio": time / times[BASELINE]}


def update(folder: Path, out: Path) -> None:
    """Write the records of a scale's runs; those of runs that are no longer there stay.

    Raises UserError: no folder of a scale, no evaluated run in it, or runs that do not compare.
    """
    prefix, scale, *_ = [*folder.name.split("_"), ""]
    if prefix != "comparison" or not scale:
        raise UserError(
            f"{folder}: expected the folder of a scale's runs: --comparison runs/comparison_A"
        )
    if scale == "recall":
        new = [*recalls_of(folder)]
    else:
        runs = read_runs([str(folder)])
        evaluated = [
            run for run in runs if run.losses[run.losses.measure == "loss"].value.notna().any()
        ]
        new = [*map(record_of, evaluated), *(costs_of(folder) if evaluated else ())]
    if not new:
        raise UserError(f"{folder}: expected evaluated runs, found none")
    path = out / f"{scale}.jsonl"
    keys = ("kind", "contestant", "which", "lr", "rope")
    records = {
        tuple(record.get(key) for key in keys): record for record in [*read_jsonl(path), *new]
    }
    check_comparable([record for record in records.values() if record["kind"] != "cost"])
    write_records(records, path)


def check_comparable(runs: list[Record]) -> None:
    """Raises UserError unless all is the same that losses, and errors paired over text, depend on."""
    expected: dict[str, tuple[str, Any]] = {}
    recipes = {key for run in runs for key in run.get("recipe", ())}
    for run in runs:
        sizes = ("steps", "step_tokens", "train_len")
        setting: dict[str, Any] = {key: run[key] for key in sizes if key in run}
        texts = {
            key: {"skipped_tokens": 0} | run[key] for key in ("data", "unseen_data") if key in run
        }
        setting |= {key: text_key(text) for key, text in texts.items()}
        if "recipe" in run:
            setting |= {key: run["recipe"].get(key, "the default") for key in recipes}
        if "shares" in run:
            setting["tasks"] = sorted(run["shares"])
        of_variant = {key: run[key] for key in ("attention", "parameters") if key in run}
        setting |= {f"{key} of {run['contestant']}": value for key, value in of_variant.items()}
        for key, value in setting.items():
            name, first = expected.setdefault(key, (run["contestant"], value))
            if value != first:
                label = f"{run['contestant']}_seed={run['which']}"
                raise UserError(f"{label}: {key} = {value}: expected {first}, as {name} has")


# ---------------------------------------------------------------- choice of RoPE scaling and rate
class Scale(NamedTuple):
    """Runs of one scale, each variant at its better RoPE scaling and learning rate.

    A row for each block of text: variant, lr, rope, seed, training, length, its multiple of the
    training length as factor, block, loss and same (the loss over the same targets at every
    length). A length that a seed lacks is left out.
    """

    runs: pd.DataFrame  # variant, lr, rope, seed, label (the rate as tables show it), record
    losses: pd.DataFrame  # of the blocks that are reported
    unseen: pd.DataFrame  # of the text on which nothing was chosen
    rates: pd.DataFrame  # as `losses`, at every learning rate, of the seeds that they share, if any


def read_scale(records: list[Record]) -> Scale:
    """Raises UserError: seeds without a RoPE scaling in common."""
    runs = [record for record in records if record["kind"] == "run"]
    losses = tidy(runs)
    losses["factor"] = losses.length / runs[0]["train_len"]
    seen = losses[losses.text == "lengths"]
    is_choice = seen.block < runs[0]["data"]["blocks"] // 4
    choices = seen[is_choice].pivot_table("loss", ["variant", "lr", "rope", "seed"], "length")
    at_rope = better_ropes(choices.reset_index())
    rates = of_shared_seeds(at_rope)
    shortest = choices.columns[0]
    best = rates.groupby(["variant", "lr"])[shortest].mean(skipna=False).reset_index()
    n_rates = best.groupby("variant").lr.transform("nunique")
    is_only = (n_rates == 1) & (n_rates.max() > 1)
    best["label"] = best.lr.map("{:g}".format) + is_only.map({True: "*", False: ""})
    best = best.sort_values([shortest, "lr"]).drop_duplicates("variant")
    chosen = at_rope.merge(best[["variant", "lr", "label"]])
    by_run = pd.DataFrame(runs)[["contestant", "lr", "which"]].set_axis(
        ["variant", "lr", "seed"], axis=1
    )
    unseen = losses[losses.text == "unseen"]
    return Scale(
        chosen.merge(by_run.assign(record=runs)),
        complete(seen[~is_choice], chosen),
        complete(unseen, chosen),
        complete(seen[~is_choice], rates),
    )


def tidy(runs: list[Record]) -> pd.DataFrame:
    """A row for each loss of a block. Trainings that differ beyond the training length only are
    one.

    Another base of RoPE (`theta = 500000`), which raises the loss at the training length, is left
    out.
    """
    rows = [
        (run["contestant"], run["lr"], rope, run["which"], json.dumps([run["which"], run["validations"]]),
         text, int(length), range(len(losses)), losses, same_target_losses)
        for run in runs
        for text in ("lengths", "unseen")
        for rope, by_length in run.get(text, {}).items()
        if not rope.startswith("theta")
        for length, (losses, same_target_losses) in by_length.items()
    ]  # fmt: skip
    columns = [
        "variant",
        "lr",
        "rope",
        "seed",
        "training",
        "text",
        "length",
        "block",
        "loss",
        "same",
    ]
    blocks = pd.DataFrame(rows, columns=columns).explode(
        ["block", "loss", "same"], ignore_index=True
    )
    return blocks.astype({"block": int, "loss": float, "same": float})


def end_labels(losses: pd.DataFrame) -> list[str]:
    """The shortest and the longest length as multiples of the training length: ["1x", "16x"]."""
    return [f"{factor:g}x" for factor in (losses.factor.min(), losses.factor.max())]


def better_ropes(choices: pd.DataFrame) -> pd.DataFrame:
    """Of variant, lr, rope, seed and losses by length the rows at the better scaling at the
    longest.
    """
    n_seeds = choices.groupby(["variant", "lr"]).seed.transform("nunique")
    of_all = choices[
        choices.groupby(["variant", "lr", "rope"]).seed.transform("nunique") == n_seeds
    ]
    if missing := set(choices.variant) - set(of_all.variant):
        raise UserError(f"{min(missing)}: expected seeds evaluated at one RoPE scaling at least")
    longest = choices.columns[-1]
    means = of_all.groupby(["variant", "lr", "rope"])[longest].mean(skipna=False).reset_index()
    best = means.sort_values([longest, "rope"]).drop_duplicates(["variant", "lr"])
    return of_all.merge(best[["variant", "lr", "rope"]])


def of_shared_seeds(choices: pd.DataFrame) -> pd.DataFrame:
    """Those of the seeds that all learning rates of a variant share; all of a variant without such
    seeds.
    """
    n_rates = choices.groupby("variant").lr.transform("nunique")
    is_shared = choices.groupby(["variant", "seed"]).lr.transform("nunique") == n_rates
    return choices[is_shared | ~is_shared.groupby(choices.variant).transform("any")]


def complete(losses: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """The losses of the chosen runs, without the lengths that a seed of a variant lacks."""
    n_seeds = chosen.groupby(["variant", "lr"]).seed.nunique().rename("n_seeds").reset_index()
    losses = losses.merge(chosen[["variant", "lr", "rope", "seed"]]).merge(n_seeds)
    return losses[
        losses.groupby(["variant", "lr", "length"]).seed.transform("nunique") == losses.n_seeds
    ]


# ---------------------------------------------------------------- tables
def seed_means(losses: pd.DataFrame) -> pd.DataFrame:
    """By variant and seed the mean loss at each length."""
    return losses.pivot_table("loss", ["variant", "seed"], "length")


def main_table(runs: pd.DataFrame, losses: pd.DataFrame) -> pd.DataFrame:
    """By variant its losses at each length, and its differences to the baseline, which comes first."""
    means = seed_means(losses)
    lengths = [*means]
    order = means[lengths[-1]].groupby("variant").mean().sort_values(kind="stable").index
    order = [name for name in order if name == BASELINE] + [
        name for name in order if name != BASELINE
    ]
    means["growth"] = means[lengths[-1]] - means[lengths[0]]
    means["same"] = losses[losses.length == lengths[-1]].groupby(["variant", "seed"]).same.mean()
    cells = means.groupby("variant").agg(mean_and_spread, digits=3)
    short, long = end_labels(losses)
    cells.columns = [*map(format_length, lengths), f"{long} − {short}", f"same targets, {long}"]
    by_variant = runs.groupby("variant")
    table = by_variant.agg(RoPE=("rope", "first"), seeds=("seed", "nunique"), lr=("label", "first"))
    table = table.join(cells).loc[order]
    for label, length in ((short, lengths[0]), (long, lengths[-1])):
        table[f"− {BASELINE}, {label}"] = [
            difference(losses, BASELINE, name, length) for name in order
        ]
    at_short = losses[losses.length == lengths[0]]
    by_seed = at_short.pivot_table("loss", ["variant", "text", "block"], "seed")
    shown = dict.fromkeys(order, DASH)
    if BASELINE in by_seed.index:
        over_baseline = by_seed.drop(BASELINE).sub(by_seed.loc[BASELINE])
        shown |= {
            name: verdict(each, MARGIN, {}) for name, each in over_baseline.groupby("variant")
        }
    table[f"{short}, margin {MARGIN}"] = pd.Series(shown)
    return table


def paired(losses: pd.DataFrame, *pair: str) -> list[pd.DataFrame]:
    """The losses of both, of the trainings that they share (they differ beyond T only), else of
    all.
    """
    both = [losses[losses.variant == name] for name in pair]
    shared = set(both[0].training) & set(both[1].training)
    return [each[each.training.isin(shared)] if shared else each for each in both]


def difference(losses: pd.DataFrame, old: str, new: str, length: int) -> str:
    """Means over seeds, new - old, ± the standard error paired over blocks of text; see `paired`."""
    before, after = (
        b[b.length == length].groupby("block").loss.mean() for b in paired(losses, old, new)
    )
    gaps = (after - before).dropna()
    return DASH if old == new or gaps.empty else f"{gaps.mean():+.3f} ±{gaps.sem():.3f}"


def seed_text(losses: pd.DataFrame) -> str:
    """How far one seed moves a loss: the standard deviation pooled over variants with several
    seeds.

    Variants that differ beyond the training length only have the same trainings: they count once.
    """
    ends = seed_means(losses).iloc[:, [0, -1]].dropna().groupby("variant")
    trainings = losses.groupby("variant").training.agg(frozenset)
    variances = ends.var().drop(trainings[trainings.duplicated()].index, errors="ignore").dropna()
    if variances.empty:
        return "One seed each: how far a seed moves a loss is not known at this scale."
    freedom = ends.size()[variances.index] - 1
    short, long = (variances.mul(freedom, axis=0).sum() / freedom.sum()) ** 0.5
    n = len(variances)
    several = (
        f"standard deviation, pooled over {n} variants with several seeds, shared trainings once"
    )
    at_short, at_long = end_labels(losses)
    return f"One seed moves a loss by {short:.3f} at {at_short} and {long:.3f} at {at_long} ({several})."


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
            ends = [
                difference(scale.losses, old, new, length)
                for length in (lengths.min(), lengths.max())
            ]
            rows.append([change["change"], old, new, seeds, f"{labels[old]}, {labels[new]}", *ends])
    columns = ["change", "from", "to", "seeds", "lr", *end_labels(scale.losses)]
    return pd.DataFrame(rows, columns=columns).set_index("change")


def rates_table(scale: Scale) -> pd.DataFrame:
    """Losses at both ends of variants with several learning rates, over the seeds they share."""
    lengths = scale.losses.length
    several = scale.rates[scale.rates.groupby("variant").lr.transform("nunique") > 1]
    means = (
        several.pivot_table("loss", ["variant", "seed"], ["length", "lr"]).groupby("variant").mean()
    )
    ends = dict(zip((lengths.min(), lengths.max()), end_labels(scale.losses), strict=True))
    columns = {
        f"{ends[length]}, {lr:g}": means[length, lr] for length, lr in means if length in ends
    }
    return pd.DataFrame(columns, means.index).map("{:.3f}".format, na_action="ignore")


def recall_table(records: list[Record]) -> pd.DataFrame:
    """In per cent the mean over tasks by length, and each task at the longest of five lengths.

    The RoPE scaling is the better one at the length before it, whose samples are others. Lengths
    that a seed of a variant lacks have a dash.
    """
    rows = [
        (record["contestant"], record["rope"], record["which"], task, int(length), 100 * share)
        for record in records
        for task, by_length in record["shares"].items()
        for length, share in by_length.items()
    ]
    shares = pd.DataFrame(rows, columns=["variant", "RoPE", "seed", "task", "length", "share"])
    lengths = sorted(shares.length.unique())
    *_, choice, longest = [lengths[0], *lengths[:5]]
    by_rope = shares[(shares.task == "mean") & (shares.length == choice)].groupby(
        ["variant", "RoPE"]
    )
    best = by_rope.share.mean().sort_values(ascending=False, kind="stable").reset_index()
    shares = shares.merge(best.drop_duplicates("variant")[["variant", "RoPE"]])
    at_longest = shares[(shares.task == "mean") & (shares.length == longest)].groupby(
        ["variant", "RoPE"]
    )
    best = (
        at_longest.share.mean()
        .sort_values(ascending=False, kind="stable")
        .reset_index("RoPE")[["RoPE"]]
    )
    n_seeds = shares.groupby("variant").seed.transform("nunique")
    has_all = shares.groupby(["variant", "task", "length"]).seed.transform("nunique") == n_seeds
    cells = (
        shares[has_all].groupby(["variant", "task", "length"]).share.agg(mean_and_spread, digits=0)
    )
    cells = cells.unstack(["task", "length"], fill_value=DASH)
    best["seeds"] = shares.groupby("variant").seed.nunique()
    columns = {
        str(length): cells["mean", length] for length in lengths if ("mean", length) in cells
    }
    tasks = [task for task in records[0]["shares"] if task != "mean"]
    return best.assign(**columns, **{f"{task}, {longest}": cells[task, longest] for task in tasks})


def summary_table(tables: dict[str, pd.DataFrame], recall: pd.DataFrame) -> pd.DataFrame:
    """Both ends of every scale beside recall, of the variants that have more than one of these."""
    parts = []
    for name, table in tables.items():
        growth = next(column for column in table if " − " in column)
        ends = table.iloc[:, [3, table.columns.get_loc(growth) - 1]]
        long, _, short = growth.partition(" − ")
        parts.append(ends.set_axis([f"loss, {name}, {short}", f"loss, {name}, {long}"], axis=1))
    if len(recall):
        means = recall[[column for column in recall if column.isdigit()][:5:2]]
        labels = [f"recall, {int(length) / int(means.columns[0]):g}x" for length in means]
        parts.append(means.set_axis(labels, axis=1))
    summary = pd.concat(parts, axis=1)
    return summary[[sum(name in part.index for part in parts) > 1 for name in summary.index]]


# ---------------------------------------------------------------- figures
def plane_figure(title: str, losses: pd.DataFrame, shown: list[str]) -> Figure:
    """Loss at the shortest against the longest length, a dot for each variant. Grey: not `shown`."""
    short, long = end_labels(losses)
    ends = seed_means(losses).iloc[:, [0, -1]].dropna().groupby("variant")
    means = ends.mean()
    spreads = ends.std()
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    others = means.drop(shown, errors="ignore").to_numpy()
    axes.plot(*others.T, ".", color=GREY, label="the others of the table" if len(others) else "")
    for name, style in variant_styles(shown).items():
        if name in means.index:
            x, y = means.loc[name]
            x_error, y_error = spreads.loc[name]
            axes.errorbar(x, y, y_error, x_error, label=name, capsize=2, **style)
    low, high = axes.get_ylim()
    axes.set_ylim(low, min(high, 4 * low))
    start = max(low, axes.get_xlim()[0])
    axes.axline(
        (start, start), slope=1, color="0.6", linestyle=":", label=f"flat: {long} = {short}"
    )
    axes.set(title=title, xlabel=f"loss at {short} (nats per token)", ylabel=f"loss at {long}")
    axes.grid(alpha=0.3)
    legend_below(figure, 3)
    return figure


def scale_figures(title: str, scale: Scale, shown: list[str]) -> Iterator[tuple[str, str, Figure]]:
    """Kind, caption and figure."""
    figure = plane_figure(f"{title}: lower left is better", scale.losses, shown)
    short, long = end_labels(scale.losses)
    yield "plane", f"Loss at {short} against loss at {long}", figure
    lengths = sorted(scale.losses.length.unique())
    by_length = (
        seed_means(scale.losses).stack().reset_index().set_axis(["name", "seed", "x", "y"], axis=1)
    )
    figure = draw_lines(by_length, title, "length (tokens)", shown=shown)
    yield "lengths", "Loss by length", log_ticks(figure, lengths)
    positions = [
        (run.variant, (first + end) / 2, loss)
        for run in scale.runs.itertuples()
        for first, end, loss in run.record["positions"].get(run.rope, [])
    ]
    if positions:
        points = pd.DataFrame(positions, columns=["name", "x", "y"])
        figure = draw_lines(points, title, f"position in windows of {long} (tokens)", shown=shown)
        yield "positions", "Loss by position", log_ticks(figure, lengths)


# ---------------------------------------------------------------- results/comparison/README.md
def write_report(folders: list[str], out: Path) -> None:
    """Update the records of these scales, then draw every scale that has records in `out`.

    Raises UserError: no records, or another README.md there.
    """
    check_ours(out / "README.md", f"{TITLE}\n")
    for folder in map(Path, folders):
        update(folder, out)
    records = {path.stem: read_jsonl(path) for path in sorted(out.glob("*.jsonl"))}
    if not records:
        raise UserError(
            f"{out}: no records; expected the folders of a scale: --comparison runs/comparison_A"
        )
    recall = recall_table(records.pop("recall")) if "recall" in records else pd.DataFrame()
    settings = tomllib.loads(read_text(PAPERS_FOLDER / "comparison.toml"))
    scales = {name: read_scale(of_scale) for name, of_scale in records.items()}
    tables = {name: main_table(scale.runs, scale.losses) for name, scale in scales.items()}
    parts = [TITLE, settings["introduction"]]
    summary = summary_table(tables, recall)
    if len(summary):
        parts += [settings["summary"], markdown(summary.reset_index(names="variant"))]
    findings = out / "findings.md"
    parts += [read_text(findings).strip()] if findings.exists() else []
    for name, scale in scales.items():
        costs = {r["contestant"]: f"{r['ratio']:.2f}" for r in records[name] if r["kind"] == "cost"}
        if costs:
            tables[name][f"step / {BASELINE}'s"] = pd.Series(costs)
        parts += scale_parts(name, scale, tables[name], settings, out)
    if len(recall):
        parts += [
            "## Synthetic recall",
            settings["recall"],
            markdown(recall.reset_index(), n_left=2),
        ]
    write_atomically(out / "README.md", ("\n\n".join(parts) + "\n").encode())
    print(f"wrote {out / 'README.md'}")


def scale_parts(
    name: str, scale: Scale, table: pd.DataFrame, settings: Record, out: Path
) -> Iterator[str]:
    """The paragraphs of one scale; writes its figures and its other tables."""
    folders = CONFIGS / "comparison/A", CONFIGS / "comparison" / name
    files = {path.stem: path for folder in folders for path in folder.glob("*.toml")}
    files = {variant: files[variant] for variant in sorted(table.index) if variant in files}
    run = scale.runs.record.iloc[0]
    text = settings["scale"].format(
        variants=len(table), size=run["parameters"] / 1e6, seeds=seed_text(scale.losses), **run
    )
    yield from (f"## Scale {name}", text, markdown(table.reset_index(), n_left=2))
    own = [variant for variant in table.index if variant not in files]
    known = [variant for variant in settings["shown"] if variant in table.index]
    shown = [*dict.fromkeys([*own, *known, *table.index])][: max(N_SHOWN, len(own))]
    for kind, caption, figure in scale_figures(f"Scale {name}", scale, shown):
        save_figure(figure, out / f"{name}_{kind}.png", dpi=110)
        yield f"![{caption}]({name}_{kind}.png)"
    comments = {
        variant: read_text(f).split("\n", 1)[0].removeprefix("# ") for variant, f in files.items()
    }
    what = pd.Series(comments, name="what it is").rename_axis("variant").to_frame()
    has_unseen = table.index.intersection(scale.unseen.variant)
    unseen = (
        main_table(scale.runs, scale.unseen).loc[has_unseen] if len(has_unseen) else pd.DataFrame()
    )
    tables = {
        "variants": ("What each variant is", what),
        "unseen": ("The table above on text on which nothing was chosen", unseen),
        "changes": ("One change at a time", changes_table(scale, settings["changes"])),
        "rates": (
            "Full runs at each learning rate, over the seeds that they share",
            rates_table(scale),
        ),
    }
    links = []
    for kind, (caption, of_kind) in tables.items():
        if len(of_kind):
            file = f"{name}_{kind}.csv"
            write_atomically(out / file, of_kind.fillna(DASH).to_csv().encode())
            links.append(f"- [{file}]({file}): {caption}.")
    yield "\n".join(links)
