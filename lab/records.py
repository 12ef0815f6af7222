"""Records of finished runs, a line of a .jsonl file each, from which the papers' report is redrawn.

A record has the keys of the config that are not the defaults, the block losses of eval_length.py by
RoPE scaling and length, the validations, and the training losses as means over hundredths of the
run. Of ssmax_pn it has p_n, of an older run its statistics of attention. A record may have a
`note` on where its numbers are from. The comparison's records are read as well.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from config import changed_keys, config_from_dict, load_config
from evals.rows import text_key
from infra.files import read_jsonl, write_atomically
from lab.runs import FinishedRun, main_text, recipe_of
from lab.tables import CONFIGS
from schema import Config

Record = dict[str, Any]
DIGITS = 6
ATTENTION = ("qk_std", "entropy")  # by layer


def record_of(run: FinishedRun) -> Record:
    """What is kept of an evaluated run: its losses are those of the text that it was mainly
    evaluated on.
    """
    losses = run.losses[(run.losses.text == main_text(run.losses)) & (run.losses.measure == "loss")]
    by_rope: dict[str, dict[str, list[float]]] = {}
    for (rope, length), each in losses.dropna(subset=["block", "value"]).groupby(
        ["rope", "length"]
    ):
        values = each.sort_values("block").value.round(DIGITS)
        by_rope.setdefault(str(rope), {})[str(length)] = values.tolist()
    record = {
        "config": stated_keys(run.config),
        "parameters": run.n_params,
        "begun": run.begun,
        "validations": rounded(run.logged("val_loss")),
        "hundredths": rounded(hundredths(run)),
        "text": losses.text.iloc[0],
        "losses": by_rope,
    }
    of_some = {"attention": attention_of(run), "p_n": [round(value, DIGITS) for value in run.p_n]}
    return record | {key: value for key, value in of_some.items() if value}


def attention_of(run: FinishedRun) -> list[Record]:
    """The lines of metrics.jsonl with statistics of attention, which earlier versions wrote."""
    return [
        {"step": r["step"]} | {key: rounded_layers(r[key]) for key in ATTENTION}
        for r in run.metrics
        if r.get(ATTENTION[0])
    ]


def rounded_layers(values: dict[str, float | None]) -> dict[str, float]:
    return {layer: round(value, DIGITS) for layer, value in values.items() if value is not None}


def stated_keys(config: Config) -> Record:
    """Dotted keys that are not the defaults, and all options of the normaliser, with its own
    defaults.
    """
    changed = changed_keys(Config(name="default"), config)
    stated = {key: value for key, (_, value) in changed.items() if not key.startswith("attention.")}
    return stated | {
        f"attention.{key}": value for key, value in config.attention.model_dump().items()
    }


def rounded(values: dict[int, float]) -> list[list[float]]:
    return [[step, round(value, DIGITS)] for step, value in values.items()]


def hundredths(run: FinishedRun) -> dict[int, float]:
    """Last step of each hundredth of the run -> its mean training loss."""
    losses = pd.DataFrame(run.logged("loss").items(), columns=["step", "loss"])
    parts = losses.groupby(losses.index * 100 // max(len(losses), 1))
    return dict(parts.agg({"step": "max", "loss": "mean"}).itertuples(index=False, name=None))


def run_of(record: Record, path: Path) -> FinishedRun:
    """The run of a record. Raises UserError: this version does not know a key or value of its
    config.
    """
    metrics: list[Record] = [
        {"step": int(step), "val_loss": value} for step, value in record["validations"]
    ]
    metrics += [{"step": int(step), "loss": value} for step, value in record["hundredths"]]
    metrics += record.get("attention", [])
    config = config_from_dict(record["config"], str(path))
    losses = table_of(config.name, record["losses"], record["text"])
    p_n = tuple(record.get("p_n", ()))
    return FinishedRun(path, config, metrics, losses, record["begun"], record["parameters"], p_n)


def table_of(name: str, by_rope: dict[str, dict[str, list[float]]], text: str) -> pd.DataFrame:
    """The losses of blocks as rows of eval_length.py, with the parts of their text."""
    skipped, blocks, block_length = text.rpartition("+")[2].split("x")
    rows = [
        (rope, int(length), block, loss)
        for rope, by_length in by_rope.items()
        for length, losses in by_length.items()
        for block, loss in enumerate(losses)
    ]
    table = pd.DataFrame(rows, columns=["rope", "length", "block", "value"])
    parts = {
        "skipped_tokens": int(skipped),
        "blocks": int(blocks),
        "block_length": int(block_length),
    }
    return table.assign(run=name, text=text, measure="loss", **parts)


def run_of_comparison(record: Record, path: Path) -> FinishedRun:
    """The run of one of the comparison's records, of the variant <path's stem>/<contestant>.toml or
    A/'s.
    """
    folder = CONFIGS / "comparison"
    name = f"{record['contestant']}.toml"
    file = next(
        (f for f in (folder / path.stem / name, folder / "A" / name) if f.exists()), folder / name
    )
    options = ["--seed", str(record["which"]), "--optimizer.lr", str(record["lr"])]
    config = load_config(file, [*options, "--base", str(folder / f"{path.stem}.toml")])
    steps_before = record["steps"] - config.train.max_steps
    normaliser = config.attention.normaliser
    begun = (
        f"init_from {config.init_from}, step {steps_before}\n"
        f"  changed  attention.normaliser {normaliser}\n"
    )
    losses = {
        rope: {length: of_blocks[0] for length, of_blocks in by_length.items()}
        for rope, by_length in record["lengths"].items()
    }
    metrics = [{"step": int(step), "val_loss": loss} for step, loss in record["validations"]]
    table = table_of(config.name, losses, text_key({"skipped_tokens": 0} | record["data"]))
    start = begun if config.init_from else ""
    return FinishedRun(path, config, metrics, table, start, record["parameters"])


def read_records(path: Path) -> list[FinishedRun]:
    """The runs of a file of records, of this module's or the comparison's."""
    records = read_jsonl(path)
    of_comparison = [run_of_comparison(each, path) for each in records if each.get("kind") == "run"]
    return of_comparison + [run_of(each, path) for each in records if "kind" not in each]


def merge(runs: list[FinishedRun]) -> list[FinishedRun]:
    """The runs without repeats of one training, whose losses at other RoPE scalings the first of
    them gets.

    A repeat has the experiment, recipe, seed and last validation of another.
    """
    merged: dict[tuple[str, ...], FinishedRun] = {}
    for run in runs:
        validation = round([*run.logged("val_loss").values()][-1], DIGITS)
        key = run.experiment, str(recipe_of(run.config)), str(run.config.seed), str(validation)
        first = merged.setdefault(key, run)
        if first is not run:
            new = run.losses[~run.losses.rope.isin(first.losses.rope)]
            merged[key] = replace(first, losses=pd.concat([first.losses, new], ignore_index=True))
    return [*merged.values()]


def keep(runs: list[FinishedRun], path: Path) -> None:
    """Write the records of these runs into a file, in place of those of the same config and start."""
    records = {identity(record): record for record in [*read_jsonl(path), *map(record_of, runs)]}
    write_records(records, path)


def write_records(records: dict[Any, Record], path: Path) -> None:
    """A line of JSON for each record, by increasing key."""
    lines = [
        json.dumps(records[key], ensure_ascii=False, allow_nan=False) for key in sorted(records)
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


def identity(record: Record) -> str:
    """The config that a record is of, but for where it was kept."""
    config = {key: value for key, value in record["config"].items() if not key.startswith("log.")}
    return json.dumps([config, record["begun"].partition("\n")[0]], sort_keys=True)
