"""The state of a run: what it starts from, what changes from step to step, what a checkpoint saves."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from config import changed_keys
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import StopSignals, World
from model import GPT
from schema import Config, LogConfig, describe_layers, resume_rule
from training.checkpoint import load_parameters, load_source, stored_config
from training.loader import BatchLoader, open_streams
from training.optim import lr_factor, make_optimizers, power_at

# the tokeniser of tokens that take the place of missing data, which any run may begin from
RANDOM = "random"
DATA = ("tokenizer", "train", "trainmask", "val", "valmask")  # keys of `data_info`


class TrainState:
    """The parts of a run, built from the config and its seed.

    Raises UserError: the data do not fit, or the processes have different configs or data.

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
        places = {"data": config.data.model_copy(update={"dir": ""}), "log": LogConfig()}
        if not world.agree([config.model_copy(update=places), self.data_info]):
            problem = "the processes have different configs or data"
            raise UserError(f"{config.run_dir}: {problem}; expected one run")
        self.batches = BatchLoader(train_stream, config, world)
        self.tokenizer_file = train_stream.tokenizer_file
        torch.manual_seed(config.seed)
        if config.train.deterministic:
            # read at cuBLAS's first product
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.train.deterministic)
        self.raw_model = GPT(config, world.device)
        if self.raw_model.end_of_text is not None:
            self.raw_model.end_of_text.fill_(find_end_of_text(train_stream))
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
            self.model = DistributedDataParallel(
                self.raw_model, broadcast_buffers=False, gradient_as_bucket_view=True
            )
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
        step = checkpoint["step"]
        changed = changed_keys(old, self.config)
        changed.pop("data.dir", None)  # where the same data lie
        if self.extends(old, step):
            changed.pop("train.max_steps", None)
        # a finished curve has no other value
        is_finished = step >= self.config.train.max_steps
        rules = {"fixed", "resumable"} if is_finished else {"fixed"}
        changed = {key: pair for key, pair in changed.items() if resume_rule(key) in rules}
        changed |= changed_data(checkpoint["data"], self.data_info)
        listed = [f"{key} was {was!r}, now {now!r}" for key, (was, now) in changed.items()]
        if listed:
            problem = f"{path.parents[1]}: holds another run ({'; '.join(listed)})"
            hint = "choose another --name"
            if "train.max_steps" in changed:
                hint += f" and --init-from {path}; {step} steps are done, and only a constant "
                hint += "schedule, or wsd before its decay, goes on with another train.max_steps"
            raise UserError(f"{problem}: {hint}")
        load_parameters(self.raw_model, checkpoint["model"], path)
        try:
            for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
                own_groups = [dict(group) for group in optimizer.param_groups]
                optimizer.load_state_dict(saved)
                check_state(optimizer, own_groups)
            if len(checkpoint["rng"]) == self.world.size:
                rng = checkpoint["rng"][self.world.rank]
                torch.set_rng_state(rng["cpu"])
                if "cuda" in rng and torch.cuda.is_available():
                    torch.cuda.set_rng_state(rng["cuda"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
            problem = "its optimisers or random numbers do not fit those of today"
            raise UserError(f"{path}: {problem}: {e!r}") from None
        self.step = step
        # of its last step, as a validation may come before the next
        self.raw_model.set_power(power_at(self.config.attention, max(0, self.step - 1)))
        self.is_resumed = True


def check_state(optimizer: Optimizer, own_groups: list[dict[str, Any]]) -> None:
    """Raises ValueError: a moment of another shape than its parameter, where a fused step crashes,
    or a group without a number that the optimiser had before it was loaded.
    """
    for group, own in zip(optimizer.param_groups, own_groups, strict=True):
        for name, value in own.items():
            if isinstance(value, float) and not isinstance(group[name], float):
                raise ValueError(f"{name} = {group[name]!r}: expected a number")
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.shape not in (parameter.shape, ()):
                shape, expected = tuple(moment.shape), tuple(parameter.shape)
                raise ValueError(f"{name} of shape {shape}: expected {expected}")


def find_end_of_text(stream: TokenStream) -> int:
    """The token before each document. Raises UserError: no token of the stream is it."""
    if not any((shard == stream.eot).any() for shard in stream.shards):
        problem = f"{stream.folder} has no end-of-text token, {stream.eot}, in {stream.split}"
        raise UserError(f"data.documents = true: {problem}; expected false")
    return stream.eot


def data_info(*streams: TokenStream) -> dict[str, str]:
    """The identity of the data, as a checkpoint keeps it."""
    masks = [stream.mask for stream in streams if stream.mask]
    info = {stream.split: stream.fingerprint for stream in (*streams, *masks)}
    return {"tokenizer": streams[0].info["tokenizer"]} | info


def changed_data(before: dict[str, str], now: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    """What resumed runs must share of `data_info`, and do not: each with both values."""
    pairs = {f"data: {key}": (before.get(key), now.get(key)) for key in DATA}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def init_from_run(model: GPT, source: str | Path, tokenizer: str) -> list[str]:
    """Copy each parameter that another run's model shares, bit for bit, and leave the others.

    source is the folder of a finished run, or a checkpoint file, of the same tokeniser. Parameters
    that only one of them has are new or dropped.

    Returns: The summary for the log: what is copied, new, dropped and changed.
    Raises UserError: nothing there, an unfinished run, another tokeniser, or a parameter of another
    shape.
    """
    prefix = f"init_from = {str(source)!r}"
    if Path(source, "config.json").is_file():
        evaluates = "eval_length.py evaluates it, python -m lab.replace changes its attention"
        raise UserError(f"{prefix}: a model of transformers: expected a run; {evaluates}")
    try:
        path, content = load_source(source)
    except UserError as e:
        raise UserError(f"{prefix}: {e}") from None
    old = stored_config(content, path)
    # step 0: imported weights, of an older version
    if Path(source).is_dir() and 0 < content["step"] < old.train.max_steps:
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
    try:
        missing, unexpected = model.load_state_dict(theirs, strict=False)
    except RuntimeError as e:  # shapes
        first = str(e).splitlines()[1].strip().removesuffix(".")
        raise UserError(f"{prefix}: {first} ({', '.join(changes)})") from None
    if model.config.model.tie_embeddings and not old.model.tie_embeddings:
        raise UserError(f"{prefix}: lm_head.weight is tied to the embedding here, not there")
    learned = [name for name in theirs if ".normaliser." in name and name not in unexpected]
    was, now = describe_layers(old), describe_layers(model.config)
    return [
        f"init_from {source}, step {content['step']}",
        f"  normaliser  {was} -> {now}",
        f"  copied      {len(theirs) - len(unexpected)} tensors; of normalisers {join_names(learned)}",
        f"  new         {join_names(missing)}; the optimiser's state",
        f"  dropped     {join_names(unexpected)}",
        f"  changed     {', '.join(changes) or 'nothing'}",
    ]


def join_names(names: Iterable[str]) -> str:
    """The names of parameters, those of all layers as one."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})) or "nothing"
