"""Finished runs, grouped by experiment and scale: the runs that belong to a row of a paper."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import changed_keys, load_config, same_run
from evals.output import format_rope
from infra.cli import UserError
from infra.files import read_json, read_jsonl
from lab.tables import TableRow, ancestors_of
from model import GPT
from normalisers.adaptive import NormSoftmax
from schema import Config, describe_attention

FACTORS = (1, 2, 4, 8, 16)  # multiples of the training length


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    config: Config
    validations: list[tuple[int, float]]  # (step, loss)
    evaluations: dict[str, dict[str, Any]]  # RoPE scaling -> the result of eval_length.py
    steps_before: int = 0  # of all that it descends from by init_from
    ancestors: tuple[Config, ...] = ()  # what it descends from by init_from, the newest first
    losses: tuple[float, ...] = ()  # of the training steps; NaN where one was not finite

    def results(self, script: str) -> list[dict[str, Any]]:
        """What an evaluation wrote of the last step, with each --tag."""
        results = [read_json(path) for path in sorted(self.folder.glob(f"{script}*.json"))]
        return [result for result in results if result["step"] == self.config.train.max_steps]

    def loss(self, rope: str, factor: int) -> float | None:
        """At `factor` times the training length, over all tokens."""
        for row in self.evaluations.get(rope, {"lengths": []})["lengths"]:
            if row["length"] == factor * self.config.train.seq_len and row["reason"] is None:
                return row["loss"]
        return None

    @cached_property
    def scale(self) -> str:
        return scale_of(self.config, self.steps_before, *self.ancestors)

    @cached_property
    def n_params(self) -> int:
        with torch.device("meta"):  # no memory, no initialisation
            return GPT(self.config, device="meta").n_params()


def size_of(config: Config) -> str:
    """Size of the model, length, batch and data."""
    m, t = config.model, config.train
    kind = f"{m.norm}, {m.mlp}, {'tied' if m.tie_embeddings else 'untied'} embeddings"
    return (
        f"{m.n_layer} layers, {m.heads} of {m.head_dim}, {kind}, vocabulary {m.vocab_size}; "
        f"T = {t.seq_len}; steps of {t.batch_tokens:,} tokens from {config.data.dir}"
    )


def scale_of(config: Config, steps_before: int = 0, *ancestors: Config) -> str:
    """Size and amount of training: losses compare within one scale only."""
    steps, before = steps_before + config.train.max_steps, ""
    if ancestors and size_of(ancestors[0]) != size_of(config):  # fine-tuned, not continued
        steps, before = config.train.max_steps, f" after {steps_before:,} steps from {ancestors[0].data.dir}"
    tokens = steps * config.train.batch_tokens
    return f"{size_of(config)}; {steps:,} steps ({tokens / 1e6:,.1f}M tokens){before}"


def experiment_of(config: Config, *ancestors: Config) -> str:
    """Attention, positions, loss, kind of optimiser and descent: what experiments differ in, at any scale.

    Args:
        ancestors: what the config descends from by init_from, the newest first.
    """
    a, m, t, o = config.attention, config.model, config.train, config.optimizer
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
    records = read_jsonl(folder / "metrics.jsonl")
    validations = [(r["step"], r["val_loss"]) for r in records if r.get("val_loss") is not None]
    if not validations or validations[-1][0] != config.train.max_steps:
        last = records[-1] if records else {}
        diverged = last.get("step") == config.train.max_steps and "val_loss" in last
        print(f"skipped: {folder} {'ended at a loss that is not finite' if diverged else 'is not finished'}")
        return None
    evaluations: dict[str, dict[str, Any]] = {}  # of several at one RoPE scaling the usual one
    usual = ("eval_length", "eval_length_none")
    for path in sorted(folder.glob("eval_length*.json"), key=lambda path: (path.stem not in usual, path)):
        result = read_json(path)
        text = result["data"]
        if Path(text.get("dir", config.data.dir)) != Path(config.data.dir):
            print(f"skipped: {path}: of {text['dir']}, the run's data are {config.data.dir}")
        elif result["step"] == config.train.max_steps and not text.get("skipped_tokens"):
            evaluations.setdefault(format_rope(result), result)
    steps_before, ancestors = read_ancestors(folder, config)
    losses = tuple(math.nan if r["loss"] is None else r["loss"] for r in records if "loss" in r)
    return FinishedRun(folder, config, validations, evaluations, steps_before, ancestors, losses)


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
    return sum(int(found[1]) for found in steps if found), ancestors


def without_seed(name: str) -> str:
    return re.sub(r"_?seed=?\d+", "", name)


class Group(NamedTuple):
    """Runs of one experiment at one scale, one of each seed."""

    scale: str  # its letter
    experiment: str
    runs: list[FinishedRun]

    @property
    def name(self) -> str:
        """The name of the first run, without its seed."""
        return without_seed(self.runs[0].config.name)

    def losses(self, rope: str, factor: int) -> list[float]:
        """Of the runs that were evaluated at `factor` times the training length."""
        return [loss for run in self.runs if (loss := run.loss(rope, factor)) is not None]

    def increases(self, rope: str) -> list[float]:
        """Loss at 16x minus loss at 1x, of the runs that have both."""
        pairs = [(run.loss(rope, 1), run.loss(rope, 16)) for run in self.runs]
        return [b - a for a, b in pairs if a is not None and b is not None]


class RunIndex:
    """All runs, grouped by scale and experiment; prints those that repeat another with its seed: left out.

    Attributes:
        letters: scale -> its letter, A for the one with the most runs.
        ropes: the RoPE scalings that runs were evaluated with.
    """

    def __init__(self, runs: list[FinishedRun]) -> None:
        self.runs = runs
        scales = sorted({run.scale for run in runs}, key=lambda s: -sum(run.scale == s for run in runs))
        self.letters = {scale: chr(ord("A") + i) if i < 26 else f"S{i}" for i, scale in enumerate(scales)}
        self.ropes = sorted({rope for run in runs for rope in run.evaluations})
        self.groups: list[Group] = []
        for run in runs:
            key = (self.letters[run.scale], experiment_of(run.config, *run.ancestors))
            candidates = (g for g in self.groups if (g.scale, g.experiment) == key)
            varied = "name", "seed", "init_from"
            group = next((g for g in candidates if same_run(g.runs[0].config, run.config, *varied)), None)
            if group is None:
                self.groups.append(Group(*key, [run]))
            elif twin := next((r for r in group.runs if r.config.seed == run.config.seed), None):
                print(f"left out: {run.folder}, a repeat of {twin.folder} with its seed")
            else:
                group.runs.append(run)

    def of_row(self, row: TableRow) -> list[Group]:
        """The groups that belong to a row of a paper, by scale."""
        wanted = experiment_of(row.config, *row.ancestors)
        return [
            group
            for group in sorted(self.groups, key=lambda group: group.scale)
            if group.experiment == wanted
            and row.model_keys.items() <= vars(group.runs[0].config.model).items()
        ]

    def training_lengths(self, rows: list[TableRow]) -> dict[str, dict[str, dict[int, list[float]]]]:
        """Size -> attention -> steps -> final validation losses of the rows' experiments.

        Of the sizes with two training lengths or more (NormSoftmax, Figure 3a).
        """
        sizes: dict[str, dict[str, dict[int, list[float]]]] = {}
        for name, row in {describe_attention(row.config.attention): row for row in rows}.items():
            for group in sorted(self.of_row(row), key=lambda group: group.runs[0].config.train.max_steps):
                config, final = group.runs[0].config, [run.validations[-1][1] for run in group.runs]
                sizes.setdefault(size_of(config), {}).setdefault(name, {})[config.train.max_steps] = final
        return {size: found for size, found in sizes.items() if len(set().union(*found.values())) > 1}

    def at_scale(self, letter: str) -> list[Group]:
        return [group for group in self.groups if group.scale == letter]
