"""The state of a run: what it starts from, what changes from step to step, what a checkpoint saves."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.nn.parallel import DistributedDataParallel

from config import changed_keys
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import StopSignals, World
from model import GPT
from schema import Config, describe_layers, resume_rule
from training.checkpoint import load_parameters, load_source, stored_config
from training.loader import BatchLoader, open_streams
from training.optim import lr_factor, make_optimizers, power_at

# the tokeniser of tokens that take the place of missing data, which any run may begin from
RANDOM = "random"


class TrainState:
    """The parts of a run, built from the config and its seed.

    Attributes:
        data_info: of the start, whatever is edited while it trains.
        raw_model: the model, perhaps compiled. model: the same, perhaps under DDP.
        step: optimiser steps done.
        is_resumed: it comes from a checkpoint.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        train_stream, self.val_stream = open_streams(config)
        self.data_info = data_info(train_stream, self.val_stream)
        self.batches = BatchLoader(train_stream, config, world)
        self.tokenizer_file = train_stream.tokenizer_file
        torch.manual_seed(config.seed)
        if config.train.deterministic:
            # read at cuBLAS's first product
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.train.deterministic)
        self.raw_model = GPT(config, world.device)
        setting = config.train.compile
        self.compiles = world.device.type == "cuda" if setting == "auto" else setting
        # With gradients and without, with the loss's scale and without, in parts between graph
        # breaks: beyond the default of 8 a model runs eagerly.
        torch._dynamo.config.recompile_limit = 32
        if self.compiles:
            self.raw_model.compile()
        self.model: Any = self.raw_model
        if world.size > 1:
            # DDP splits a compiled graph. While p rises torch mixes up which buffers its parts may
            # reuse.
            functorch_config.donated_buffer = not config.attention.reweight_p_warmup
            self.model = DistributedDataParallel(self.raw_model, gradient_as_bucket_view=True)
        self.optimizers = make_optimizers(self.raw_model, config.optimizer)
        self.stop = StopSignals()
        self.step = 0
        self.is_resumed = False

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.max_steps

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
            "rng": self.world.gather_objects(rng),
            "data": self.data_info,
            "tokenizer": self.tokenizer_file,
        }

    def extends(self, old: Config, step: int) -> bool:
        """Whether max_steps of a run's old config gave the steps so far the learning rates of ours."""
        max_steps = self.config.train.max_steps
        last = max(0, step - 1)  # the steps before agree if it does
        factors = {lr_factor(old.optimizer, last, n) for n in (old.train.max_steps, max_steps)}
        return len(factors) == 1 and step < max_steps

    def restore(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint of this run, which may have another train.max_steps: see
        `extends`.

        Raises UserError: lists every difference in config and data; resuming would join two runs'
        curves.
        """
        old = stored_config(checkpoint, path)
        changed = changed_keys(old, self.config)
        if "train.max_steps" in changed and self.extends(old, checkpoint["step"]):
            del changed["train.max_steps"]
        changed.pop("data.dir", None)  # where the same data lie
        # then its curve has no other value
        is_finished = checkpoint["step"] >= self.config.train.max_steps
        rules = {"fixed", "resumable"} if is_finished else {"fixed"}
        changed = {key: pair for key, pair in changed.items() if resume_rule(key) in rules}
        changed |= changed_data(checkpoint["data"], self.data_info)
        if changed:
            listed = "; ".join(
                f"{key} was {old!r}, now {new!r}" for key, (old, new) in changed.items()
            )
            problem = f"{path.parents[1]}: holds another run ({listed}): choose another --name"
            step = checkpoint["step"]
            if "train.max_steps" in changed and step >= self.config.train.max_steps:
                problem += f"; {step} steps are done"
            elif "train.max_steps" in changed:
                source = path.parents[1] if step == old.train.max_steps else path
                only = "only a constant schedule, or wsd before its decay"
                same = "has the same learning rates with another train.max_steps"
                problem += f" and --init-from {source}; {only}, {same}"
            raise UserError(problem)
        load_parameters(self.raw_model, checkpoint["model"], path)
        try:
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except ValueError as e:
            raise UserError(f"{path}: its optimisers do not fit those of today: {e}") from None
        if len(checkpoint["rng"]) == self.world.size:
            rng = checkpoint["rng"][self.world.rank]
            torch.set_rng_state(rng["cpu"])
            if "cuda" in rng and torch.cuda.is_available():
                torch.cuda.set_rng_state(rng["cuda"])
        self.step = checkpoint["step"]
        # of its last step, as a validation may come before the next
        self.raw_model.set_power(power_at(self.config.attention, max(0, self.step - 1)))
        self.is_resumed = True


def data_info(*streams: TokenStream) -> dict[str, str]:
    """The identity of the data, as a checkpoint keeps it."""
    masks = [stream.mask for stream in streams if stream.mask]
    info = {stream.split: stream.fingerprint for stream in (*streams, *masks)}
    return {"tokenizer": streams[0].info["tokenizer"]} | info


def changed_data(
    before: dict[str, str], now: dict[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """What resumed runs must share of `data_info`, and do not."""
    # v0.1.0 has the normalisers' code there, too
    keys = [key for key in before | now if key in now or key.startswith(("train", "val"))]
    pairs = {key: (before.get(key), now.get(key)) for key in keys}
    return {f"data: {key}": pair for key, pair in pairs.items() if pair[0] != pair[1]}


def init_from_run(model: GPT, source: str | Path, tokenizer: str) -> list[str]:
    """Copy each parameter that another run's model shares, bit for bit, and leave the others.

    source is the folder of a finished run, or a checkpoint file, of the same tokeniser. Parameters
    that only one of them has are new or dropped.

    Returns: The summary for the log: what is copied, new, dropped and changed.
    Raises UserError: nothing there, an unfinished run, another tokeniser, or a parameter of another
    shape.
    """
    prefix = f"init_from = {str(source)!r}"
    try:
        path, content = load_source(source)
    except UserError as e:
        raise UserError(f"{prefix}: {e}") from None
    old = stored_config(content, path)
    if Path(source).is_dir() and 0 < content["step"] < old.train.max_steps:  # 0: of lab.import_
        raise UserError(f"{prefix}: expected a finished run, or a checkpoint file: {path}")
    trained_on = content["data"]["tokenizer"]
    if tokenizer not in (trained_on, RANDOM):
        raise UserError(f"{prefix}: trained on tokens of {trained_on}, the data has {tokenizer}")
    theirs = content["model"]
    changes = [
        f"{key} {was!r} -> {now!r}"
        for key, (was, now) in changed_keys(old, model.config).items()
        if not key.startswith(("name", "init_from", "log."))
    ]
    was = describe_layers(old)
    now = describe_layers(model.config)
    is_tied = torch.equal(theirs["lm_head.weight"], theirs["embedding.weight"])
    if model.config.model.tie_embeddings and not is_tied:
        raise UserError(f"{prefix}: lm_head.weight is tied to the embedding here, not there")
    try:
        missing, unexpected = model.load_state_dict(theirs, strict=False)
    except RuntimeError as e:  # shapes
        first = str(e).splitlines()[1].strip().removesuffix(".")
        raise UserError(f"{prefix}: {first} ({', '.join(changes)})") from None
    learned = [name for name in theirs if ".normaliser." in name and name not in unexpected]
    is_kept = bool(learned) and any(
        change.startswith(("attention.", "layers")) for change in changes
    )
    return [
        f"init_from {source}, step {content['step']}",
        *([f"  normaliser  {was} -> {now}"] if was != now else []),
        f"  copied      {len(model.state_dict()) - len(missing)} tensors",
        *(
            [f"  kept        {join_names(learned)}: as learned there, not begun anew"]
            if is_kept
            else []
        ),
        f"  new         {join_names(missing)}; the optimiser's state",
        f"  dropped     {join_names(unexpected)}",
        f"  changed     {', '.join(changes) or 'nothing'}",
    ]


def join_names(names: list[str]) -> str:
    """The names of parameters, those of all layers as one."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return (
        ", ".join(f"{name} ({n} tensors)" if n > 1 else name for name, n in counts.items())
        or "nothing"
    )
