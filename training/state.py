"""The state of a run: what it starts from, what changes from step to step, what a checkpoint saves."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from config import Config, changed_keys, config_from_dict, may_change_on_resume
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import StopSignals, World
from model import GPT
from training.checkpoint import load_model, load_parameters
from training.guard import Guard
from training.loader import BatchLoader

UNREPORTED_KEYS = ("name", "init_from", "log.")  # config changes not printed at init_from


@dataclass
class TrainState:
    """The parts of a run.

    Attributes:
        raw_model, local_model, model: the same parameters: with plain names, compiled, and under DDP.
        step: optimiser steps done, skipped ones included.
        validation: the newest and the best one (see `training.checkpoint`).
    """

    config: Config
    world: World
    batches: BatchLoader
    val_stream: TokenStream
    raw_model: GPT
    local_model: nn.Module
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    guard: Guard
    stop: StopSignals = field(default_factory=StopSignals)
    step: int = 0
    validation: dict[str, Any] = field(
        default_factory=lambda: {"step": -1, "loss": None, "best": None, "best_step": None}
    )

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.max_steps

    @property
    def is_best(self) -> bool:
        """This step has the lowest validation loss so far."""
        return self.validation["best_step"] == self.step

    @property
    def needs_validation(self) -> bool:
        """A validation is due and not done; at step 0 one is due only if the run has no steps."""
        done = self.validation["step"] == self.step or self.step == 0 < self.config.train.max_steps
        return not done and self.is_due(self.config.train.val_every)

    def record_validation(self, loss: float) -> None:
        best = self.validation["best"]
        self.validation |= {"step": self.step, "loss": loss}
        if math.isfinite(loss) and (best is None or loss < best):
            self.validation |= {"best": loss, "best_step": self.step}

    def data_info(self) -> dict[str, str]:
        """The identity of the data, which a resumed run must share."""
        train, val = self.batches.stream, self.val_stream
        return {"tokenizer": train.info["tokenizer"], "train": train.fingerprint, "val": val.fingerprint}

    def to_checkpoint(self) -> dict[str, Any]:
        """What `training.checkpoint` writes. A collective: it gathers the RNG state of every rank."""
        rng = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.world.device)
        return {
            "step": self.step,
            "config": self.config.model_dump(),
            "model": self.raw_model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "validation": self.validation,
            "guard": self.guard.state_dict(),
            "rng": self.world.gather_objects(rng),
            "data": self.data_info(),
        }

    def restore(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint of this run (UserError if it is another's: `check_same_run`)."""
        check_same_run(path, checkpoint, self.config, self.data_info())
        load_parameters(self.raw_model, checkpoint["model"], path)
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.validation = checkpoint["step"], checkpoint["validation"]
        self.guard.load_state_dict(checkpoint["guard"])
        if len(checkpoint["rng"]) == self.world.size:
            rng = checkpoint["rng"][self.world.rank]
            torch.set_rng_state(rng["cpu"])
            if "cuda" in rng and torch.cuda.is_available():
                torch.cuda.set_rng_state(rng["cuda"])


def check_same_run(path: Path, checkpoint: dict[str, Any], config: Config, data: dict[str, str]) -> None:
    """Resuming with another config or corpus would mix two runs in one curve.

    Raises:
        UserError: with every difference between the checkpoint and the current config and `data_info`.
    """
    changed = changed_keys(config_from_dict(checkpoint["config"], str(path)), config)
    changed = {key: values for key, values in changed.items() if not may_change_on_resume(key)}
    found = [f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items()]
    before = checkpoint["data"]
    found += [f"data: {key} was {before[key]}, now {data[key]}" for key in data if before[key] != data[key]]
    if found:
        raise UserError(f"{config.run_dir}: holds another run ({'; '.join(found)}): choose another --name")


def init_from_run(model: GPT, source: str | Path, tokenizer: str) -> list[str]:
    """Copy each parameter that another run's model shares, bit for bit; leave the others.

    By section of the config: [model] must fit, [attention] may add and drop parameters, [data] must have the
    same tokeniser; [train], [optimizer] and the step count start afresh.

    Args:
        model: freshly initialised.
        source: run folder (its newest checkpoint) or checkpoint file.
        tokenizer: of the data to train on.
    Returns:
        The summary for the log: what is copied, new, dropped and changed.
    Raises:
        UserError: nothing there, another tokeniser, or a parameter of another shape, with its name.
    """
    old = load_model(source)
    prefix = f"init_from = {str(source)!r}"
    if old.tokenizer != tokenizer:
        raise UserError(f"{prefix}: trained on tokens of {old.tokenizer}, the data has {tokenizer}")
    theirs, ours = old.model.state_dict(), model.state_dict()
    changed = changed_keys(old.config, model.config)
    changed = {key: values for key, values in changed.items() if not key.startswith(UNREPORTED_KEYS)}
    changes = [f"{key} {was!r} -> {now!r}" for key, (was, now) in changed.items()]
    if problems := shape_mismatches(ours, theirs, model.config.model.tie_embeddings):
        shapes = [text for text in changes if text.startswith(("model.", "train.seq_len"))]
        raise UserError(f"{prefix}: does not fit: {'; '.join(problems)} ({', '.join(shapes)})")
    copied = {name: theirs[name] for name in ours if name in theirs}
    model.load_state_dict(copied, strict=False)
    n_values = sum({ours[name].data_ptr(): ours[name].numel() for name in copied}.values())  # tied ones once
    return [
        f"init_from {source}, step {old.step}",
        f"  copied      {len(copied)} tensors, {n_values:,} values",
        f"  new         {missing_names(ours, theirs)}; the optimiser's state",
        f"  dropped     {missing_names(theirs, ours)}",
        f"  changed     {', '.join(changes) or 'nothing'}",
    ]


def shape_mismatches(ours: dict[str, Tensor], theirs: dict[str, Tensor], tied: bool) -> list[str]:
    """Why the parameters in `theirs` cannot be copied to `ours`; tied: our output layer is the embedding."""
    shapes = {name: (tuple(ours[name].shape), tuple(theirs[name].shape)) for name in ours if name in theirs}
    found = [f"{any_layer(name)} is {a} here, {b} there" for name, (a, b) in shapes.items() if a != b]
    if tied and not torch.equal(theirs["lm_head.weight"], theirs["embedding.weight"]):
        found.append("lm_head.weight is tied to the embedding here, not there")
    return list(dict.fromkeys(found))


def missing_names(some: dict[str, Tensor], others: dict[str, Tensor]) -> str:
    """The names in `some` that `others` lacks, all layers as one."""
    counts = Counter(any_layer(name) for name in some if name not in others)
    return ", ".join(f"{name} ({n} tensors)" if n > 1 else name for name, n in counts.items()) or "nothing"


def any_layer(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
