"""The schema of a config: every key, its meaning, its bounds and its default.

One frozen pydantic class for each section. config.py reads files and command lines into a `Config`.
A normaliser's options are the fields of its class (normalisers/) and keys of [attention].
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from infra.cli import suggest
from normalisers.own import Normaliser, find_normaliser, list_normalisers

Engine = Literal["auto", "dense", "rows", "sdpa", "triton", "flex"]
Position = Literal["rope", "p_rope", "none", "alibi"]
Window = Annotated[int, Field(ge=0, le=2**31)]
RopeTheta = Annotated[float, Field(gt=0)]
RopeFraction = Annotated[float, Field(ge=0, le=1)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$"
PATH = r"^[^\x00]*$"
PATTERNS = {
    NAME: "letters, digits and . _ = + -, the first a letter or a digit",
    PATH: "no NUL",
}
PathText = Annotated[str, StringConstraints(pattern=PATH)]


class Section(BaseModel):
    """Common rules: no unknown keys, no silent conversions, no assignments."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[str]:
        """Of keys that are right alone and not together: a line each, which names them all."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if lines := list(self.conflicts()):
            raise ValueError("\n".join(lines))
        return self


def key(default: Any, meaning: str, **bounds: Any) -> Any:
    """A field with its default, what --help says of it, and its bounds."""
    return Field(default, description=meaning, **bounds)


# Keys that may differ when a run resumes. A free one changes neither the model nor the loss curve.
# A resumable one would give another curve from the start.
free = partial(key, json_schema_extra={"resume": "free"})
resumable = partial(key, json_schema_extra={"resume": "resumable"})


class ModelConfig(Section):
    n_layer: int = key(12, "Number of transformer blocks.", ge=1, le=1024)
    n_head: int = key(12, "Attention heads per block.", ge=1, le=1024)
    n_kv_head: int = key(0, "Heads of keys and values. 0: n_head.", ge=0, le=1024)
    n_embd: int = key(768, "Width of the residual stream.", ge=1, le=65536)
    vocab_size: int = key(
        50257, "Tokens of the tokeniser, padded to a multiple of 128.", ge=2, le=65536
    )
    norm: Literal["layernorm", "rmsnorm"] = key("layernorm", "Normalisation layer.")
    norm_eps: float = key(1e-5, "Epsilon of the normalisation layers.", gt=0)
    mlp: Literal["gelu", "swiglu"] = key("gelu", "Feed-forward block.")
    gelu: Literal["tanh", "exact"] = key(
        "tanh", "GPT-2's approximation, or erf (they differ by 5e-4)."
    )
    mlp_hidden: int = key(0, "Hidden width of the MLP; 0: 4 * n_embd.", ge=0, le=2**20)
    bias: bool = key(True, "Biases in the linear layers and in LayerNorm.")
    tie_embeddings: bool = key(True, "Share the token embedding with the output layer.")
    attention_gate: bool = key(
        False, "Multiply the heads' output by sigmoid(W x) (arXiv 2505.06708)."
    )
    exclusive: bool = key(
        False, "Take the part along the query's own value off its output (XSA, arXiv 2603.09078)."
    )
    key_shift: Literal["unrotated"] | bool = key(
        False,
        "Mix a learned share of the key before into each (Olsson et al. 2022). unrotated: in "
        "channels that RoPE does not turn, as with p_rope.",
    )
    position: Position = key(
        "rope",
        "p_rope: RoPE on the highest frequencies alone. alibi: a bias on the scores.",
    )
    window: Window = key(0, "The last keys that a query sees, its own included. 0: all.")
    rope_theta: RopeTheta = key(10000.0, "Base of the rotary position embedding.")
    rope_fraction: RopeFraction = key(0.75, "p_rope: share of frequencies that rotate.")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def rope_share(self) -> float:
        """The part of RoPE's frequencies that rotate."""
        return {"rope": 1.0, "p_rope": self.rope_fraction}.get(self.position, 0.0)

    @property
    def rotating(self) -> int:
        """How many channels of a head RoPE turns, from the first on."""
        return 2 * int(self.rope_share * (self.head_dim // 2) + 1e-9)  # 0.58 * 50 is 28.999...

    @property
    def heads(self) -> str:
        grouped = f" ({self.n_kv_head} of keys and values)" if self.n_kv_head else ""
        return f"{self.n_head} heads{grouped}"

    def conflicts(self) -> Iterator[str]:
        of_heads = f"model.n_head = {self.n_head}"
        if self.n_head % self.kv_heads:
            yield f"n_kv_head = {self.n_kv_head}: expected a divisor of {of_heads}"
        if self.n_embd % self.n_head:
            yield f"n_embd = {self.n_embd}: expected a multiple of {of_heads}"
        elif self.rope_share and self.head_dim % 2:
            size = f"n_embd / n_head = {self.head_dim}"
            yield f"n_embd = {self.n_embd}: position = {self.position} needs an even head size, {size}"
        elif self.key_shift == "unrotated" and self.rotating == self.head_dim:
            yield "key_shift = unrotated: all rotate: expected position = p_rope, rope_fraction < 1"
        if self.position != "p_rope" and self.rope_fraction != 0.75:
            expected = "only read by model.position = p_rope"
            yield f"rope_fraction = {self.rope_fraction}: {expected}"


class AttentionConfig(Section):
    """The attention normaliser, its options (the fields of its class), its re-weighting."""

    model_config = ConfigDict(extra="allow")  # checked against the class, below

    normaliser: str = key("softmax", f"file.py:Class, or one of {', '.join(list_normalisers())}.")
    reweight_p: int = key(0, "Power p of LSSAR's re-weighting. 0: none.", ge=0, le=256)
    reweight_p_warmup: int = key(
        0, "Steps over which p rises from 1; in a file or option also a share of max_steps.", ge=0
    )

    @cached_property
    def definition(self) -> Normaliser:
        """The normaliser's class with its options."""
        return find_normaliser(self.normaliser).model_validate(self.model_extra)

    @model_validator(mode="before")
    @classmethod
    def _state_options(cls, values: Any) -> Any:
        """With every option of the normaliser's class: a resolved config says all that it means."""
        name = values.get("normaliser", "softmax") if isinstance(values, dict) else None
        if not isinstance(name, str):
            return values
        try:
            formula = find_normaliser(name)
        except ValueError as e:
            raise ValueError(f"normaliser = {name!r}: {e}") from None
        for option in formula.model_fields.keys() & cls.model_fields.keys():
            problem = f"has an option {option}, which is a key of [attention]"
            raise ValueError(f"normaliser = {name!r}: {problem}: expected another name")
        options = {key: value for key, value in values.items() if key not in cls.model_fields}
        return values | formula.model_validate(options).model_dump()

    def conflicts(self) -> Iterator[str]:
        if self.reweight_p and not self.definition.sums_to_one:
            needs = "re-weighting needs non-negative rows that sum to one"
            has = f"normaliser = {self.definition.name} with these options has none"
            yield f"reweight_p = {self.reweight_p}: {needs}, {has}"
        if self.reweight_p_warmup and self.reweight_p < 2:
            yield f"reweight_p_warmup = {self.reweight_p_warmup}: only read with reweight_p >= 2"


class DataConfig(Section):
    """Where the tokens come from and in which order."""

    dir: PathText = resumable(
        "data/fineweb10B", "Folder of prepared shards (python -m data.prepare)."
    )
    order: Literal["sequential", "shuffled"] = key(
        "sequential", "Stream order, or permuted by the seed."
    )
    skip_steps: int = key(0, "Batches left out at the start.", ge=0, le=10**9)
    documents: bool = key(False, "A query sees the keys of its own document alone.")


class TrainConfig(Section):
    """How long, how much at a time, on what."""

    max_steps: int = key(
        18865, "Optimiser steps. 0: evaluate the weights of init_from.", ge=0, le=10**9
    )
    seq_len: int = key(1024, "Training length T in tokens.", ge=2, le=2**31)
    batch_tokens: int = key(
        524288, "Tokens of one optimiser step, over all processes.", ge=2, le=2**31
    )
    micro_batch: int = free(32, "Sequences of a forward pass. Halve it when out of memory.", ge=1)
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "Autocast type; weights stay float32.")
    device: Literal["auto", "cpu", "cuda"] = free("auto", "auto: cuda where there is one.")
    compile: Literal["auto"] | bool = free("auto", "torch.compile the model; auto: on cuda.")
    deterministic: bool = resumable(
        False, "Bit-identical steps on CUDA where torch can, and slower."
    )
    engine: Engine = key(
        "auto",
        "The first of sdpa, triton, flex and rows that runs this here. dense holds (T, T).",
        exclude=True,  # a choice of this machine, in no checkpoint
    )
    grad_clip: float = key(1.0, "Largest gradient norm; 0: no clipping.", ge=0)
    loss: Literal["softmax", "norm_softmax", "logit_norm"] = key(
        "softmax", "Normaliser of the logits."
    )
    loss_gamma: PositiveFloat | Literal["inf"] = key(
        "inf", "norm_softmax: bound of the logits' sigma."
    )
    loss_tau: PositiveFloat | Literal["auto"] = key(
        "auto", "auto: 1, or for logit_norm vocab_size^(-1/2)."
    )
    label_smoothing: float = key(
        0.0, "Share of each target spread evenly, in training only.", ge=0, lt=1
    )
    reduction: Literal["mean", "sum"] = key(
        "mean", "Over a step's tokens, for gradients and grad_clip."
    )
    val_every: int = free(250, "Steps between validations (always after the last step).", ge=1)
    val_tokens: int = key(
        10_485_760, "Validation tokens, from the start of the shard.", ge=2, le=2**40
    )
    checkpoint_every: int = free(500, "Steps between checkpoints (always the last).", ge=1)
    keep_last: int = free(2, "Newest checkpoints to keep.", ge=1)
    keep_every: int = free(0, "Also keep checkpoints of multiples of this step; 0: none.", ge=0)

    def conflicts(self) -> Iterator[str]:
        of_window = f"train.seq_len = {self.seq_len}"
        n_seq, rest = divmod(self.batch_tokens, self.seq_len)
        if rest:
            yield f"batch_tokens = {self.batch_tokens}: expected a multiple of {of_window}"
        elif n_seq % min(self.micro_batch, n_seq):
            sequences = f"{n_seq} sequences in a step (batch_tokens / seq_len)"
            expected = f"expected a divisor of the {sequences}, or more than them"
            yield f"micro_batch = {self.micro_batch}: {expected}"
        if self.val_tokens < self.seq_len:
            yield f"val_tokens = {self.val_tokens}: expected at least {of_window}"
        if self.loss_gamma != "inf" and self.loss != "norm_softmax":
            yield f"loss_gamma = {self.loss_gamma}: only read by train.loss = norm_softmax"
        if self.loss_tau != "auto" and self.loss == "softmax":
            yield f"loss_tau = {self.loss_tau}: not read by train.loss = softmax"


class OptimizerConfig(Section):
    name: Literal["adamw", "muon", "sgd"] = key("adamw", "muon: hidden matrices, adamw the rest.")
    lr: float = key(6e-4, "Peak learning rate.", gt=0)
    muon_lr: float = key(0.02, "Peak learning rate of muon's matrices.", gt=0)
    muon_split: Literal["qkv", "head", "none"] = key(
        "qkv", "muon: q, k and v apart, each of their heads apart, or as the one matrix they are."
    )
    beta1: float = key(0.9, "adamw: decay of the first moment.", ge=0, lt=1)
    beta2: float = key(0.95, "adamw: decay of the second moment.", ge=0, lt=1)
    momentum: float = key(0.95, "muon, sgd: momentum.", ge=0, lt=1)
    weight_decay: float = key(0.1, "On matrices only; decoupled in adamw and muon.", ge=0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = key("cosine", "Shape after warm-up.")
    warmup_steps: int = key(700, "Steps of linear warm-up.", ge=0)
    min_lr_ratio: float = key(0.0, "Final learning rate over peak.", ge=0, le=1)
    decay_fraction: float = key(
        0.2, "wsd: share of max_steps, at the end, of linear decay.", gt=0, le=1
    )


class LogConfig(Section):
    dir: PathText = free("runs", "Run folders are made here, as <dir>/<name>.")
    every: int = free(10, "Steps between progress lines; metrics.jsonl has every step.", ge=1)
    wandb: bool = free(False, "Also log to Weights & Biases.")
    wandb_project: str = free("attention-normalisers", "W&B project.")


class LayerKeys(Section):
    """An entry of [[layers]]: which layers, and what they state of [model] and [attention]."""

    at: list[int] = []
    every: int = Field(0, ge=1)
    position: Position = "rope"
    window: Window = 0
    rope_theta: RopeTheta = 10000.0
    rope_fraction: RopeFraction = 0.75
    attention: dict[str, Any] = {}

    @model_serializer
    def _stated(self) -> dict[str, Any]:
        return {key: value for key, value in self if key in self.model_fields_set}

    def names(self, layer: int, n_layer: int) -> bool:
        at = [each % n_layer for each in self.at]
        return layer in at or (self.every > 0 and (layer + 1) % self.every == 0)


class Config(Section):
    """A whole run. `base`, `name` and [sweep] are not inherited; `name` defaults to the file's
    stem.
    """

    name: str = free("unnamed", "Name of the run folder.", pattern=NAME)
    seed: int = key(1337, "Seed of initialisation and data order.", ge=0, lt=2**63)
    init_from: PathText = key("", "Run folder or checkpoint whose weights this run starts from.")
    layers: list[LayerKeys] = key(
        [],
        "[[layers]]: what layers at = [0, -1] (first, last) or every = 4 (3, 7, ...) have of their own: "
        "position, window, rope_theta, rope_fraction, attention = { ... }.",
    )
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    log: LogConfig = LogConfig()

    def conflicts(self) -> Iterator[str]:
        max_steps = self.train.max_steps
        of_run = f"train.max_steps = {max_steps}"
        warmup_steps = self.optimizer.warmup_steps
        fraction = self.optimizer.decay_fraction
        if max_steps == 0 and not self.init_from:
            yield f"{of_run}: expected at least 1, or a run named by init_from"
        for key in ("optimizer.warmup_steps", "attention.reweight_p_warmup"):
            if attrgetter(key)(self) > max_steps:
                yield f"{key} = {attrgetter(key)(self)}: expected at most {of_run}"
        is_wsd = self.optimizer.schedule == "wsd"
        if is_wsd and warmup_steps <= max_steps < warmup_steps + fraction * max_steps:
            share = f"{1 - warmup_steps / max_steps:.4g} of {of_run}"
            rest = f"the rest after optimizer.warmup_steps = {warmup_steps}"
            key = "optimizer.decay_fraction"
            yield f"{key} = {fraction}: expected at most {share}, {rest}, by optimizer.schedule = wsd"
        yield from self._layer_conflicts()

    def _layer_conflicts(self) -> Iterator[str]:
        """Of the entries of [[layers]], else of the layers, each with the first that has it."""
        n_layer = self.model.n_layer
        lines = []
        for n, entry in enumerate(self.layers):
            exists = all(-n_layer <= i < n_layer for i in entry.at) and entry.every <= n_layer
            if not exists or len({"at", "every"} & entry.model_fields_set) != 1:
                either = f"either at, of layers 0 to {n_layer - 1}, or every, 1 to {n_layer}"
                lines.append(f"layers.{n} = {entry.model_dump()}: expected {either}")
            if "reweight_p_warmup" in entry.attention:
                expected = "expected reweight_p_warmup in [attention], for all"
                lines.append(f"layers.{n}.attention: {expected}")
        yield from lines
        first_layers: dict[str, int] = {}
        for i in range(n_layer if self.layers and not lines else 0):
            sections = self._sections_of(i)
            try:
                LayerSections.model_validate(sections)
            except ValidationError as e:
                for line in problems_of(e, sections):
                    first_layers.setdefault(line, i)
        yield from (f"layers: in layer {i} {line}" for line, i in first_layers.items())

    def _sections_of(self, i: int) -> dict[str, Any]:
        """[model] and [attention] with what the entries of [[layers]] that name layer i state, in
        order.

        Their `attention` changes keys of [attention] or, with a normaliser, takes the section's
        place.
        """
        model = self.model.model_dump()
        attention = self.attention.model_dump(exclude={"reweight_p_warmup"})
        for entry in self.layers:
            if entry.names(i, self.model.n_layer):
                model |= {key: own for key, own in entry.model_dump().items() if key in model}
                options = entry.attention
                attention = options if "normaliser" in options else attention | options
        if model["position"] != "p_rope":
            del model["rope_fraction"]
        return {"model": model, "attention": attention}

    @cached_property
    def layer_configs(self) -> tuple["Config", ...]:
        """The config of each layer."""
        n_layer = self.model.n_layer
        if not self.layers:
            return (self,) * n_layer
        own = [LayerSections.model_validate(self._sections_of(i)) for i in range(n_layer)]
        return tuple(self.model_copy(update={**dict(each), "layers": []}) for each in own)

    @property
    def normalisers(self) -> list[str]:
        """Those of all layers, each once."""
        return list(dict.fromkeys(layer.attention.normaliser for layer in self.layer_configs))

    @property
    def rope_bases(self) -> set[float]:
        """The bases of the layers whose positions rotate."""
        models = [layer.model for layer in self.layer_configs]
        return {model.rope_theta for model in models if model.rotating}

    @property
    def run_dir(self) -> Path:
        return Path(self.log.dir) / self.name


class LayerSections(Section):
    """What a layer has of its own."""

    model: ModelConfig
    attention: AttentionConfig


# What a variant of the attention states: the first parts of its dotted keys.
VARIANT_KEYS = (
    "attention.", "layers", "model.position", "model.rope", "model.window",
    "model.attention_gate", "model.exclusive", "model.key_shift",
)  # fmt: skip
SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig, "attention": AttentionConfig, "data": DataConfig,
    "train": TrainConfig, "optimizer": OptimizerConfig, "log": LogConfig,
}  # fmt: skip


def describe_attention(options: AttentionConfig, model: ModelConfig | None = None) -> str:
    """What [attention], and [model] of attention, state in a few words: 'lssa (reweight_p = 15)'."""
    stated = options.definition.model_dump(exclude_defaults=True)
    stated |= options.model_dump(include={"reweight_p", "reweight_p_warmup"}, exclude_defaults=True)
    if model is not None:
        keys = {"position", "window", "key_shift", "attention_gate", "exclusive", "rope_fraction"}
        if model.rotating:
            keys.add("rope_theta")
        stated |= model.model_dump(include=keys, exclude_defaults=True)
    listed = ", ".join(f"{key} = {value}" for key, value in stated.items())
    return options.definition.name + (f" ({listed})" if listed else "")


def describe_layers(config: Config) -> str:
    """`describe_attention` of each: 'layers 0, 1: softmax, window 128; layer 2: lssa' where they
    differ.
    """
    groups: dict[str, list[int]] = {}
    for i, layer in enumerate(config.layer_configs):
        groups.setdefault(describe_attention(layer.attention, layer.model), []).append(i)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(
        f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}: {text}"
        for text, layers in groups.items()
    )


def field_of(key: str) -> FieldInfo | None:
    """The field of a dotted key; None for an unknown key and for a normaliser's option."""
    section, _, name = key.rpartition(".")
    return SECTIONS.get(section, Config).model_fields.get(name)


def resume_rule(key: str) -> object:
    """Of a dotted key: "free" or "resumable" (see there), or "fixed" if it may not differ on
    resume.
    """
    field = field_of(key)
    extra = field.json_schema_extra if field else None
    return extra["resume"] if isinstance(extra, dict) else "fixed"


# ---------------------------------------------------------------- what pydantic finds, in words


def problems_of(error: ValidationError, values: dict[str, Any]) -> dict[str, list[str]]:
    """A line for each problem of the sections in `values`, "key = value: expected ...", and the keys
    that it may depend on, first the one to mend.
    """
    problems: dict[str, list[str]] = {}
    expected: dict[str, list[str]] = {}  # a union has one error for each alternative
    for e in error.errors(include_url=False):
        depth = {"layers": 3, **dict.fromkeys(SECTIONS, 2)}.get(str([*e["loc"], ""][0]), 1)
        key = ".".join(map(str, e["loc"][:depth]))
        if e["type"] == "value_error":  # of a validator, whose message is complete
            prefix = f"{key}." if key else ""
            for line in str(e["ctx"]["error"]).split("\n"):
                names = re.findall(r"[\w.]+", line)
                problems[prefix + line] = [*(prefix + name for name in names), *names]
            continue
        head = f"{key} = {'a section' if isinstance(e['input'], dict) else repr(e['input'])}: "
        if e["type"] == "extra_forbidden":
            of_class = ["attention.normaliser"] if e["loc"][0] == "attention" else []
            problems[head + _unknown(key, values)] = [key, *of_class]
            continue
        what = re.sub(r"^(Input|String) should (be )?(a valid )?", "", e["msg"])
        if e["type"] == "string_pattern_mismatch":
            what = PATTERNS[e["ctx"]["pattern"]]
        elif e["type"] == "model_type":
            what = "a section"
        expected.setdefault(head, []).append(what)
    for head, alternatives in expected.items():
        line = f"{head}expected {' or '.join(dict.fromkeys(alternatives))}"
        problems[line] = [head.partition(" = ")[0]]
    return problems


def _unknown(dotted: str, values: dict[str, Any]) -> str:
    """The problem of an unknown key, with what its writer may have meant."""
    section, _, key = dotted.rpartition(".")
    for name, other in SECTIONS.items():
        if key in other.model_fields:
            return f"unknown key; did you mean {name}.{key}?"
    fields = SECTIONS.get(section, LayerKeys if section else Config).model_fields
    names = list(fields)
    if section == "attention":
        with suppress(ValueError):
            names += find_normaliser(values[section].get("normaliser", "softmax")).model_fields
    return "unknown key; " + suggest(key, names, f"{section}." if section else "")
