"""Finished runs as tables: which experiment, scale and seed each run is, and its losses at every length."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from config import changed_keys, load_config
from evals.rows import read_rows
from infra.cli import UserError
from infra.files import read_json, read_jsonl
from lab.tables import TableRow, ancestors_of
from model import GPT
from normalisers.adaptive import NormSoftmax
from schema import Config, makes_another_run

FACTORS = (1, 2, 4, 8, 16)  # multiples of the training length


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    config: Config
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    losses: pd.DataFrame  # the rows of eval_length.py, with the parts of their text
    steps_before: int = 0  # of all that it descends from by init_from
    ancestors: tuple[Config, ...] = ()  # what it descends from by init_from, the newest first

    def logged(self, key: str) -> dict[int, Any]:
        """Step -> what metrics.jsonl has under a key, where it is finite."""
        return {r["step"]: r[key] for r in self.metrics if r.get(key) is not None}

    def results(self, script: str) -> list[dict[str, Any]]:
        """What an evaluation wrote of the last step, with each --tag."""
        results = [read_json(path) for path in sorted(self.folder.glob(f"{script}*.json"))]
        return [result for result in results if result["step"] == self.config.train.max_steps]

    @property
    def is_evaluated(self) -> bool:
        """Whether eval_length.py read its last step."""
        return bool((self.losses.step == self.config.train.max_steps).any())

    @property
    def name(self) -> str:
        """Its name without the seed."""
        return re.sub(r"_?seed=?\d+", "", self.config.name)

    @property
    def validations(self) -> list[tuple[int, float]]:
        return list(self.logged("val_loss").items())

    @cached_property
    def n_params(self) -> int:
        with torch.device("meta"):  # no memory, no initialisation
            return GPT(self.config, device="meta").n_params()


# ---------------------------------------------------------------- what a run is
def size_of(config: Config) -> str:
    """Size of the model, length, batch and data."""
    m = config.model
    t = config.train
    kind = f"{m.norm}, {m.mlp}, {'tied' if m.tie_embeddings else 'untied'} embeddings"
    return (
        f"{m.n_layer} layers, {m.heads} of {m.head_dim}, {kind}, vocabulary {m.vocab_size}; "
        f"T = {t.seq_len}; steps of {t.batch_tokens:,} tokens from {config.data.dir}"
    )


def scale_of(config: Config, steps_before: int = 0, *ancestors: Config) -> str:
    """Size and amount of training: losses compare within one scale only."""
    steps = steps_before + config.train.max_steps
    before = ""
    if ancestors and size_of(ancestors[0]) != size_of(config):  # fine-tuned, not continued
        steps = config.train.max_steps
        before = f" after {steps_before:,} steps from {ancestors[0].data.dir}"
    tokens = steps * config.train.batch_tokens
    return f"{size_of(config)}; {steps:,} steps ({tokens / 1e6:,.1f}M tokens){before}"


def experiment_of(config: Config, *ancestors: Config) -> str:
    """Attention, positions, loss, kind of optimiser and descent: what experiments differ in, at any scale.

    Args:
        ancestors: what the config descends from by init_from, the newest first.
    """
    a = config.attention
    m = config.model
    t = config.train
    o = config.optimizer
    attention = a.model_dump()
    if isinstance(a.definition, NormSoftmax):  # sqrt_d is a number, too
        gamma = a.definition.gamma_number(m.head_dim)
        attention["gamma"] = "sqrt_d" if gamma == math.sqrt(m.head_dim) else str(gamma)
        attention.pop("gamma_factor")
    start: Any = None
    if config.init_from:
        attention.pop("scale_init", None)  # depends on the length
        start = config.init_from, t.max_steps == 0  # unknown descent: of no row
        if ancestors:
            elsewhere = {"data.dir", "train.seq_len"} & changed_keys(ancestors[0], config).keys()
            start = experiment_of(*ancestors), t.max_steps == 0, sorted(elsewhere)
    tau = 1.0 if (t.loss, t.loss_tau) == ("norm_softmax", "auto") else t.loss_tau
    rest = {
        "model": (m.position, m.rotating, m.attention_gate),
        "loss": (t.loss, t.loss_gamma, tau, t.label_smoothing, t.reduction),
        "optimizer": (o.name, t.max_steps > 0 and o.warmup_steps == 0, o.weight_decay == 0),
        "start": start,
    }
    return json.dumps(attention | rest, sort_keys=True)


def recipe_of(config: Config) -> str:
    """All keys that a loss curve depends on, but for those that tell the seeds of a line apart."""
    changed = changed_keys(Config(name="default"), config)
    seeds = "name", "seed", "init_from"
    return str({k: new for k, (_, new) in changed.items() if makes_another_run(k) and k not in seeds})


# ---------------------------------------------------------------- reading run folders
def read_runs(sources: list[str]) -> list[FinishedRun]:
    """The finished runs among the folders, or in them; prints which ones it skips.

    Raises:
        UserError: there are none, or a run folder cannot be read.
    """
    folders: list[Path] = []
    for source in map(Path, sources):
        if not source.exists():
            raise UserError(f"{source}: no such run folder")
        inner = [source] if (source / "config.toml").is_file() else sorted(source.glob("*"))
        folders += [folder for folder in inner if (folder / "config.toml").is_file()]
    runs = [run for folder in dict.fromkeys(folders) if (run := read_run(folder)) is not None]
    if not runs:
        raise UserError(f"{' '.join(sources)}: no finished run in these folders; train.py makes them")
    return runs


def read_run(folder: Path) -> FinishedRun | None:
    """None, with a line on the console, if the run is not finished or has no finite last loss."""
    config = load_config(folder / "config.toml")
    metrics = read_jsonl(folder / "metrics.jsonl")
    last_step = config.train.max_steps
    last_losses = [
        record["val_loss"] for record in metrics if record.get("step") == last_step and "val_loss" in record
    ]
    if not last_losses or last_losses[-1] is None:
        print(
            f"skipped: {folder} {'ended at a loss that is not finite' if last_losses else 'is not finished'}"
        )
        return None
    rows = read_rows([folder])
    losses = rows[rows.evaluation == "eval_length"]
    parts = losses.text.str.extract(
        r"\+(?P<skipped_tokens>\d+)x(?P<blocks>\d+)x(?P<block_length>\d+)"
    ).astype(int)
    return FinishedRun(folder, config, metrics, losses.join(parts), *read_ancestors(folder, config))


def main_text(losses: pd.DataFrame) -> str:
    """The text that most runs were evaluated on: of several the one that skips least, then the longest."""
    texts = losses.groupby(["text", "skipped_tokens", "blocks"]).run.nunique().reset_index()
    return texts.sort_values(["run", "skipped_tokens", "blocks"], ascending=[False, True, False]).text.iloc[0]


def read_ancestors(folder: Path, config: Config) -> tuple[int, tuple[Config, ...]]:
    """What a run descends from, and the steps of it all.

    Prints the run of which no folder is where init_from has it, or beside.
    """
    seen = [folder.resolve()]

    def find(run: Path) -> Path | None:
        for path in (run, folder.parent / run.name):
            if (path / "config.toml").is_file() and path.resolve() not in seen:
                seen.append(path.resolve())
                return path / "config.toml"
        print(f"{folder} descends from {run}, which is not there: it is in no row of a paper")
        return None

    ancestors = ancestors_of(config, find)
    summaries = [path / "init_from.txt" for path in seen if (path / "init_from.txt").exists()]
    steps = [re.search(r", step (\d+)$", path.read_text(), re.MULTILINE) for path in summaries]
    return sum(int(step[1]) for step in steps if step), ancestors


# ---------------------------------------------------------------- tables of runs
class Runs(NamedTuple):
    """Runs that share a `line` differ in their seed alone. Scale A is the one with the most runs."""

    table: pd.DataFrame  # a row for each run: run, line, name, scale, scale_text, experiment, recipe, seed
    losses: pd.DataFrame  # rows of eval_length.py after the last step, with line, name, scale and factor

    def means(self) -> pd.DataFrame:
        """Means over blocks: line, name, scale, seed, rope, factor (x training length), length, loss."""
        keys = ["line", "name", "scale", "seed", "rope", "factor", "length"]
        means = self.losses[self.losses.measure == "loss"].groupby(keys).value.mean(skipna=False)
        return means.dropna().rename("loss").reset_index()

    def of_row(self, row: TableRow) -> pd.DataFrame:
        """The runs that belong to a row of a paper, by scale."""
        of_experiment = self.table[self.table.experiment == experiment_of(row.config, *row.ancestors)]
        dumps = [run.config.model_dump() for run in of_experiment.run]
        alike = [
            all(dump[k.split(".")[0]][k.split(".")[1]] == v for k, v in row.sizes.items()) for dump in dumps
        ]
        return of_experiment[pd.Series(alike, of_experiment.index, dtype=bool)].sort_values(["scale", "line"])


def tabulate(runs: list[FinishedRun]) -> Runs:
    """The tables of runs; prints those that repeat another with its seed, which are left out.

    The losses of a scale are of the text that most of its runs were evaluated on.
    """
    table = pd.DataFrame({"run": runs, "seed": [run.config.seed for run in runs]})
    table["scale_text"] = [scale_of(run.config, run.steps_before, *run.ancestors) for run in runs]
    table["experiment"] = [experiment_of(run.config, *run.ancestors) for run in runs]
    table["recipe"] = [recipe_of(run.config) for run in runs]
    line = ["scale_text", "experiment", "recipe"]
    repeats = table.duplicated([*line, "seed"])
    for run in table[repeats].run:
        print(f"left out: {run.folder}, a repeat of another run with its seed")
    table = table[~repeats]
    scales = [*table.scale_text.value_counts().index]
    letters = {scale: chr(ord("A") + i) if i < 26 else f"S{i}" for i, scale in enumerate(scales)}
    by_line = table.groupby(line, sort=False)
    table["scale"] = table.scale_text.map(letters)
    table["line"] = by_line.ngroup()
    table["name"] = by_line.run.transform("first").map(lambda run: run.name)
    losses = []
    for row in table.itertuples():
        factor = row.run.losses.length / row.run.config.train.seq_len
        of_run = row.run.losses.assign(line=row.line, name=row.name, scale=row.scale, factor=factor)
        losses.append(of_run[of_run.step == row.run.config.train.max_steps])
    every = pd.concat(losses, ignore_index=True)
    texts = {scale: main_text(of_scale) for scale, of_scale in every.groupby("scale")}
    return Runs(table, every[every.text == every.scale.map(texts)])
