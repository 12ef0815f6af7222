"""Finished runs as tables: which experiment, scale and seed each run is, and its losses at every
length.
"""

import inspect
import json
import re
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import BaseModel

from config import changed_keys, load_config
from infra.cli import UserError
from infra.files import read_jsonl, read_text
from lab.rows import read_rows
from lab.tables import TableRow, all_rows
from model import GPT
from normalisers.family import Phi
from schema import AttentionConfig, Config, resume_rule
from training.checkpoint import find_checkpoints, load_model


@dataclass(frozen=True)
class FinishedRun:
    folder: Path  # or the file that holds its record
    config: Config
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    # the rows of eval_length.py after the last step, with the parts of their text
    losses: pd.DataFrame
    begun: str  # init_from.txt: what it began from, and which keys changed
    n_params: int
    kept_p_n: tuple[float, ...] = ()  # of a record

    @property
    def p_n(self) -> tuple[float, ...]:
        """The learned p_n of ssmax_pn, from n = 1 on; empty for another normaliser, or if it was
        not kept.
        """
        if "ssmax_pn" not in self.config.normalisers or not find_checkpoints(self.folder):
            return self.kept_p_n
        weights = load_model(self.folder).model.state_dict()  # of its layers, which share one
        return next(tuple(p_n.tolist()) for name, p_n in weights.items() if name.endswith(".p_n"))

    def logged(self, key: str) -> dict[int, Any]:
        """Step -> what metrics.jsonl has under a key, where it is finite."""
        return {r["step"]: r[key] for r in self.metrics if r.get(key) is not None}

    @property
    def name(self) -> str:
        return without_seed(self.config.name)

    @property
    def steps_before(self) -> int:
        """Steps of the run whose normaliser, or power p, it replaced; 0 if it began in another way."""
        step = re.search(r"^init_from .*, step (\d+)$", self.begun, re.MULTILINE)
        changed = re.search(r"attention\.(normaliser|reweight_p) ", self.begun)
        return int(step[1]) if step and changed and "data.dir " not in self.begun else 0

    @property
    def experiment(self) -> str:
        """As `experiment_of`; of no row of a paper if it began in another way than those of the
        paper.
        """
        is_of_row = not self.config.init_from or self.steps_before
        return experiment_of(self.config) + (
            "" if is_of_row else f" after {self.begun.splitlines()[-1:]}"
        )


# ---------------------------------------------------------------- what a run is
def without_seed(name: str) -> str:
    """A run's name without its seed: "softmax" of "softmax_seed=2"."""
    return re.sub(r"_?seed=?\d+", "", name)


def scale_of(config: Config, steps_before: int = 0) -> str:
    """Size and amount of training: losses compare within one scale only."""
    m = config.model
    t = config.train
    kind = f"{m.norm}, {m.mlp}, {'tied' if m.tie_embeddings else 'untied'} embeddings"
    steps = steps_before + t.max_steps
    before = " after those of another run" if config.init_from and not steps_before else ""
    return (
        f"{m.n_layer} layers, {m.heads} of {m.head_dim}, {kind}, vocabulary {m.vocab_size}; "
        f"T = {t.seq_len}; steps of {t.batch_tokens:,} tokens from {config.data.dir}; "
        f"{steps:,} steps ({steps * t.batch_tokens / 1e6:,.1f}M tokens){before}"
    )


def is_part(member: Any) -> bool:
    """Whether a member of a normaliser's class is part of its formula."""
    return inspect.isfunction(member) or isinstance(member, property)


PHI_PARTS = [name for name, _ in inspect.getmembers(Phi, is_part) if not hasattr(BaseModel, name)]


def formula_of(attention: AttentionConfig) -> dict[str, Any]:
    """The options of a normaliser. A preset of the family that adds no formula is `phi` with its
    options.
    """
    preset = type(attention.definition)
    is_phi = issubclass(preset, Phi) and all(
        inspect.getattr_static(preset, name) is inspect.getattr_static(Phi, name)
        for name in PHI_PARTS
    )
    return attention.model_dump() | ({"normaliser": Phi.name} if is_phi else {})


def experiment_of(config: Config) -> str:
    """Formula, positions, loss and kind of optimiser: what experiments differ in, at any scale."""
    m = config.model
    t = config.train
    o = config.optimizer
    attention = formula_of(config.attention)
    if config.init_from:
        attention.pop("scale_init", None)  # depends on the length
    rest = {
        "model": (m.position, m.rotating, m.window, m.attention_gate, m.key_shift),
        "layers": config.layers,
        "loss": (t.loss, t.loss_gamma, t.loss_tau, t.label_smoothing, t.reduction),
        "optimizer": (o.name, t.max_steps > 0 and o.warmup_steps == 0, o.weight_decay == 0),
        "start": (config.init_from != "", t.max_steps == 0),
    }
    return json.dumps(attention | rest, sort_keys=True)


def recipe_of(config: Config, *but: str) -> dict[str, Any]:
    """All keys that a loss curve depends on and that are not at their defaults, with their values.

    Those that tell the seeds of a line apart are left out. but: starts of keys to leave out as
    well.
    """
    changed = changed_keys(Config(name="default"), config)
    left_out = ("name", "seed", "init_from", *but)
    return {
        key: new
        for key, (_, new) in changed.items()
        if resume_rule(key) != "free" and not key.startswith(left_out)
    }


# ---------------------------------------------------------------- reading run folders
def read_runs(sources: list[str]) -> list[FinishedRun]:
    """The finished runs among the folders, or in them; prints which ones it skips.

    Raises UserError: there are none, or a run folder is damaged. OSError: one cannot be read.
    """
    folders: list[Path] = []
    for source in map(Path, sources):
        if not source.exists():
            raise UserError(f"{source}: no such run folder")
        inside = [each for each in sorted(source.glob("*")) if not each.name.startswith("old_")]
        folders += [each for each in (source, *inside) if (each / "config.toml").is_file()]
    runs = [run for folder in dict.fromkeys(folders) if (run := read_run(folder)) is not None]
    if not runs:
        raise UserError(
            f"{' '.join(sources)}: no finished run in these folders; train.py makes them"
        )
    return runs


def read_run(folder: Path) -> FinishedRun | None:
    """None, with a line on the console, if the run is not finished or has no finite last loss."""
    config = load_config(folder / "config.toml")
    rows = read_rows([folder])
    last = rows[rows.step == config.train.max_steps]
    if last[last.measure == "val_loss"].value.dropna().empty:
        print(f"skipped: {folder} is not finished, or its last loss is not finite")
        started = (folder / "starts.jsonl").exists()  # else import_ wrote it
        if started and find_checkpoints(folder) and not (folder / "metrics.jsonl").exists():
            print(f"{folder}: metrics.jsonl is lost, and the last loss with it")
        return None
    losses = last[last.evaluation == "eval_length"]
    parts = losses.text.str.extract(
        r"\+(?P<skipped_tokens>\d+)x(?P<blocks>\d+)x(?P<block_length>\d+)"
    )
    path = folder / "init_from.txt"
    begun = read_text(path) if path.exists() else ""
    metrics = read_jsonl(folder / "metrics.jsonl")
    with torch.device("meta"):  # no memory, no initialisation
        n_params = GPT(config, device="meta").n_params()
    return FinishedRun(folder, config, metrics, losses.join(parts.astype(int)), begun, n_params)


def main_text(losses: pd.DataFrame) -> str:
    """The text that most runs were evaluated on: of several the one that skips least, then the
    longest.
    """
    texts = losses.groupby(["text", "skipped_tokens", "blocks"]).run.nunique().reset_index()
    return texts.sort_values(
        ["run", "skipped_tokens", "blocks"], ascending=[False, True, False]
    ).text.iloc[0]


# ---------------------------------------------------------------- tables of runs
@dataclass(frozen=True)
class Runs:
    """Runs that share a `line` differ in their seed alone. Scale A is the one with the most runs."""

    # a row for each run: run, line, name, scale, scale_text, experiment, recipe, seed
    table: pd.DataFrame
    # rows of eval_length.py after the last step, with folder, line, name, scale, factor
    losses: pd.DataFrame

    @cached_property
    def in_order(self) -> pd.DataFrame:
        return self.table.sort_values(["scale", "line"])

    @cached_property
    def of_sizes(self) -> set[str]:
        """Scales all of whose runs are of rows that sweep over sizes."""
        sized = [self.matching(row) for row in all_rows() if row.sizes]
        is_sized = pd.concat([*sized, self.table[:0]]).index
        return {*self.table.scale} - {*self.table.drop(is_sized).scale}

    def matching(self, row: TableRow) -> pd.DataFrame:
        """The runs of a row's experiment and, if it sweeps over them, of its sizes."""
        experiment = experiment_of(row.config)
        is_of_row = [
            of_run == experiment
            and all(attrgetter(key)(run.config) == size for key, size in row.sizes.items())
            for of_run, run in zip(self.in_order.experiment, self.in_order.run, strict=True)
        ]
        return self.in_order[is_of_row]

    def means(self) -> pd.DataFrame:
        """Means over blocks: line, name, scale, seed, rope, factor (x training length), length,
        loss.
        """
        keys = ["line", "name", "scale", "seed", "rope", "factor", "length"]
        means = self.losses[self.losses.measure == "loss"].groupby(keys).value.mean(skipna=False)
        return means.dropna().rename("loss").reset_index()

    def of_row(self, row: TableRow) -> pd.DataFrame:
        """The runs that belong to a row of a paper, by scale.

        A row without sizes leaves out the scales `of_sizes`, unless it has no other runs.
        """
        runs = self.matching(row)
        usual = runs[~runs.scale.isin(self.of_sizes)]
        return runs if row.sizes or usual.empty else usual


def names_of(table: pd.DataFrame) -> pd.Series:
    """The name of each line's first run, with its dtype where it is not the scale's commonest.

    And with its learning rate where another line of the scale has the name, then with its folder.
    """
    dtypes = table.run.map(lambda run: run.config.train.dtype)
    commonest = dtypes.groupby(table.scale).transform(lambda each: each.mode()[0])
    names = table.run.map(lambda run: run.name) + (", " + dtypes).where(dtypes != commonest, "")
    rates = table.run.map(lambda run: f", lr {run.config.optimizer.lr:g}")
    folders = table.run.map(lambda run: f", {run.folder}")
    for additions in (rates, folders):
        n_lines = table.assign(name=names).groupby(["scale", "name"]).line.transform("nunique")
        names += additions.where(n_lines > 1, "")
    return names


def tabulate(runs: list[FinishedRun]) -> Runs:
    """The tables of runs; prints those that repeat another with its seed, which are left out.

    The losses of a scale are of the text that most of its runs were evaluated on. Raises UserError:
    a run was evaluated, but not on that text.
    """
    table = pd.DataFrame({"run": runs, "seed": [run.config.seed for run in runs]})
    table["scale_text"] = [scale_of(run.config, run.steps_before) for run in runs]
    table["experiment"] = [run.experiment for run in runs]
    table["recipe"] = [str(recipe_of(run.config)) for run in runs]
    line = ["scale_text", "experiment", "recipe"]
    repeats = table.duplicated([*line, "seed"])
    for run in table[repeats].run:
        print(f"left out: {run.folder}, a repeat of another run with its seed")
    table = table[~repeats]
    scales = [*table.scale_text.value_counts().index]
    letters = {scale: chr(ord("A") + i) for i, scale in enumerate(scales)}
    by_line = table.groupby(line, sort=False)
    table["scale"] = table.scale_text.map(letters)
    table["line"] = by_line.ngroup()
    table["name"] = names_of(table.assign(run=by_line.run.transform("first")))
    losses = []
    for row in table.itertuples():
        factor = row.run.losses.length / row.run.config.train.seq_len
        columns = {
            "folder": str(row.run.folder),
            "line": row.line,
            "name": row.name,
            "scale": row.scale,
        }
        losses.append(row.run.losses.assign(**columns, seed=row.seed, factor=factor))
    every = pd.concat(losses, ignore_index=True)
    texts = {scale: main_text(of_scale) for scale, of_scale in every.groupby("scale")}
    shared = every[every.text == every.scale.map(texts)]
    others = every[~every.folder.isin(shared.folder)]
    if len(others):
        first = others.iloc[0]
        expected = (
            f"expected {texts[first.scale]}, as most runs of its scale: eval_length.py --tokens"
        )
        raise UserError(f"{first.folder}: evaluated on the text {first.text}: {expected}")
    return Runs(table, shared)
