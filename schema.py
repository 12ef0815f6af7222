"""The schema of a config: every key, its meaning, its bounds and its default.

One frozen pydantic class for each section. config.py reads files and command lines into a `Config`.
A normaliser's options are the fields of its class (normalisers/) and keys of [attention].
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from infra.cli import suggest
from normalisers.own import Normaliser, find_normaliser, list_normalisers

NAME_RULE = "letters, digits and . _ = + -, the first a letter or a digit"
Engine = Literal["auto", "dense", "rows", "sdpa", "triton", "flex"]


class Problem(NamedTuple):
    keys: tuple[str, ...]  # dotted: the one to mend, then those that it depends on
    text: str  # "key = value: expected ..."


class Section(BaseModel):
    """Common rules: no unknown keys, no silent conversions, no assignments, all problems at once.

    With a list as pydantic's context the problems are appended to it, and nothing is raised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    prefix: ClassVar[str] = ""

    @classmethod
    def known_keys(cls, values: Any) -> list[str]:
        """The keys that may stand beside these values."""
        return list(cls.model_fields)

    def conflicts(self) -> Iterator[Problem]:
        """Of keys that are right alone and not together."""
        yield from ()

    def conflict(self, expected: str, *keys: str) -> Problem:
        """Of the first key, whose value the others do not allow."""
        dotted = tuple(self.prefix + key for key in keys)
        return Problem(dotted, f"{dotted[0]} = {attrgetter(keys[0])(self)!r}: {expected}")

    @model_validator(mode="wrap")
    @classmethod
    def _report(cls, values: Any, handler: Callable[[Any], Self], info: ValidationInfo) -> Self:
        """Defaults take the place of wrong keys, so that conflicts of the others are found, too."""
        problems: list[Problem] = [] if info.context is None else info.context
        while True:
            try:
                section = handler(values)
                break
            except ValidationError as e:
                found = problems_of(e, cls.prefix, cls.known_keys(values))
            known = [problem.keys[0] for problem in problems]
            problems += [each for each in found if not overlap(each.keys[1:], known)]
            wrong = {key.removeprefix(cls.prefix) for key, *_ in (each.keys for each in found)}
            if not isinstance(values, dict) or wrong.isdisjoint(values):
                raise ValueError("\n".join(dict.fromkeys(each.text for each in found)))
            values = {key: value for key, value in values.items() if key not in wrong}
        all_wrong = [problem.keys[0] for problem in problems]
        problems += [each for each in section.conflicts() if not overlap(each.keys, all_wrong)]
        if problems and info.context is None:
            raise ValueError("\n".join(problem.text for problem in problems))
        return section


def overlap(keys: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a dotted key is, or is within, one of the others, or the other way round."""
    pairs = [(f"{key}.", f"{other}.") for key in keys for other in others]
    return any(key.startswith(other) or other.startswith(key) for key, other in pairs)


def without_nul(path: str) -> str:
    if "\0" in path:
        raise PydanticCustomError("nul", "no NUL")
    return path


PathText = Annotated[str, AfterValidator(without_nul)]


def key(default: Any, meaning: str, **bounds: Any) -> Any:
    """A field with its default, what --help says of it, and its bounds."""
    return Field(default, description=meaning, **bounds)


# Keys that may differ when a run resumes. A free one changes neither the model nor the loss curve.
# A resumable one would give another curve from the start.
free = partial(key, json_schema_extra={"resume": "free"})
resumable = partial(key, json_schema_extra={"resume": "resumable"})


class ModelConfig(Section):
    prefix = "model."
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
    key_shift: bool = key(
        False, "Mix a learned share of the key before into each (Olsson et al. 2022)."
    )
    position: Literal["rope", "p_rope", "none", "alibi"] = key(
        "rope",
        "p_rope: RoPE on the highest frequencies alone. alibi: a bias on the scores.",
    )
    window: int = key(
        0, "The last keys that a query sees, its own included. 0: all.", ge=0, le=2**31
    )
    rope_theta: float = key(10000.0, "Base of the rotary position embedding.", gt=0)
    rope_fraction: float = key(0.75, "p_rope: share of frequencies that rotate.", ge=0, le=1)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def rotating(self) -> float:
        """The part of RoPE's frequencies that rotate."""
        return {"rope": 1.0, "p_rope": self.rope_fraction}.get(self.position, 0.0)

    @property
    def heads(self) -> str:
        grouped = f" ({self.n_kv_head} of keys and values)" if self.n_kv_head else ""
        return f"{self.n_head} heads{grouped}"

    def conflicts(self) -> Iterator[Problem]:
        if self.n_head % self.kv_heads:
            expected = f"expected a divisor of model.n_head = {self.n_head}"
            yield self.conflict(expected, "n_kv_head", "n_head")
        if self.n_embd % self.n_head:
            expected = f"expected a multiple of model.n_head = {self.n_head}"
            yield self.conflict(expected, "n_embd", "n_head")
        elif self.rotating and self.head_dim % 2:
            expected = f"RoPE needs an even head size, n_embd / n_head = {self.head_dim}"
            yield self.conflict(expected, "n_embd", "n_head", "position")
        if self.position != "p_rope" and self.rope_fraction != 0.75:
            expected = "only read by model.position = p_rope"
            yield self.conflict(expected, "rope_fraction", "position")


class AttentionConfig(Section):
    """The attention normaliser, its options (the fields of its class), its re-weighting."""

    prefix = "attention."
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

    @classmethod
    def known_keys(cls, values: Any) -> list[str]:
        with suppress(ValueError):
            formula = find_normaliser(values.get("normaliser", "softmax"))
            return [*cls.model_fields, *formula.model_fields]
        return list(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _state_options(cls, values: Any) -> Any:
        """With every option of the normaliser's class: a resolved config says all that it means."""
        name = values.get("normaliser", "softmax") if isinstance(values, dict) else None
        if not isinstance(name, str):
            return values
        try:
            formula = find_normaliser(name)
            for option in formula.model_fields.keys() & cls.model_fields.keys():
                problem = f"has an option {option}, which is a key of [attention]"
                raise ValueError(f"{problem}: expected another name")
        except ValueError as e:
            raise ValueError(f"normaliser = {name!r}: {e}") from None
        options = {key: value for key, value in values.items() if key not in cls.model_fields}
        return values | formula.model_validate(options).model_dump()

    def conflicts(self) -> Iterator[Problem]:
        if self.reweight_p and not self.definition.sums_to_one:
            needs = "re-weighting needs non-negative rows that sum to one, which"
            expected = f"{needs} {self.definition.name} with these options does not give"
            yield self.conflict(expected, "reweight_p", "normaliser", *(self.model_extra or {}))
        if self.reweight_p_warmup and self.reweight_p < 2:
            expected = "only read with reweight_p >= 2"
            yield self.conflict(expected, "reweight_p_warmup", "reweight_p")


class DataConfig(Section):
    """Where the tokens come from and in which order."""

    prefix = "data."
    dir: PathText = resumable(
        "data/fineweb10B", "Folder of prepared shards (python -m data.prepare)."
    )
    order: Literal["sequential", "shuffled"] = key(
        "sequential", "Stream order, or permuted by the seed."
    )
    skip_steps: int = key(0, "Batches left out at the start.", ge=0, le=10**9)


class TrainConfig(Section):
    """How long, how much at a time, on what."""

    prefix = "train."
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

    def conflicts(self) -> Iterator[Problem]:
        n_seq, rest = divmod(self.batch_tokens, self.seq_len)
        if rest:
            expected = f"expected a multiple of train.seq_len = {self.seq_len}"
            yield self.conflict(expected, "batch_tokens", "seq_len")
        elif n_seq % min(self.micro_batch, n_seq):
            sequences = f"{n_seq} sequences in a step (batch_tokens / seq_len)"
            expected = f"expected a divisor of the {sequences}, or more than them"
            yield self.conflict(expected, "micro_batch", "batch_tokens", "seq_len")
        if self.val_tokens < self.seq_len:
            expected = f"expected at least train.seq_len = {self.seq_len}"
            yield self.conflict(expected, "val_tokens", "seq_len")
        if self.loss_gamma != "inf" and self.loss != "norm_softmax":
            yield self.conflict("only read by train.loss = norm_softmax", "loss_gamma", "loss")
        if self.loss_tau != "auto" and self.loss == "softmax":
            yield self.conflict("not read by train.loss = softmax", "loss_tau", "loss")


class OptimizerConfig(Section):
    prefix = "optimizer."
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
    prefix = "log."
    dir: PathText = free("runs", "Run folders are made here, as <dir>/<name>.")
    every: int = free(10, "Steps between progress lines; metrics.jsonl has every step.", ge=1)
    wandb: bool = free(False, "Also log to Weights & Biases.")
    wandb_project: str = free("attention-normalisers", "W&B project.")


class LayerKeys(Section):
    """An entry of [[layers]]: which layers, and their own keys of [model] and [attention]."""

    at: list[int] = []
    every: int = 1
    position: Any = None
    window: Any = None
    rope_theta: Any = None
    rope_fraction: Any = None
    attention: dict[str, Any] = {}


class Config(Section):
    """A whole run. `base`, `name` and [sweep] are not inherited; `name` defaults to the file's
    stem.
    """

    name: str = free(
        "unnamed", "Name of the run folder.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$"
    )
    seed: int = key(1337, "Seed of initialisation and data order.", ge=0, lt=2**63)
    init_from: PathText = key("", "Run folder or checkpoint whose weights this run starts from.")
    layers: list[dict[str, Any]] = key(
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

    def conflicts(self) -> Iterator[Problem]:
        max_steps = self.train.max_steps
        warmup_steps = self.optimizer.warmup_steps
        decay_steps = self.optimizer.decay_fraction * max_steps
        if max_steps == 0 and not self.init_from:
            expected = "expected at least 1, or a run named by init_from"
            yield self.conflict(expected, "train.max_steps", "init_from")
        for key in ("optimizer.warmup_steps", "attention.reweight_p_warmup"):
            if attrgetter(key)(self) > max_steps:
                expected = f"expected at most train.max_steps = {max_steps}"
                yield self.conflict(expected, key, "train.max_steps")
        is_wsd = self.optimizer.schedule == "wsd"
        if is_wsd and warmup_steps <= max_steps < warmup_steps + decay_steps:
            share = f"{1 - warmup_steps / max_steps:.4g} of train.max_steps = {max_steps}"
            rest = f"the rest after optimizer.warmup_steps = {warmup_steps}"
            keys = [f"optimizer.{key}" for key in ("decay_fraction", "warmup_steps", "schedule")]
            yield self.conflict(f"expected at most {share}, {rest}", *keys, "train.max_steps")
        read = ("layers", "model", "attention")
        yield from (Problem(read, line) for line in self._layer_problems())

    def _layer_problems(self) -> Iterator[str]:
        """Of the entries of [[layers]], else of the layers, each with the first that has it."""
        n_layer = self.model.n_layer
        lines = []
        for n, entry in enumerate(self.layers):
            problems: list[Problem] = []
            keys = LayerKeys.model_validate(entry, context=problems)
            lines += [f"layers[{n}].{problem.text}" for problem in problems]
            exists = all(-n_layer <= i < n_layer for i in keys.at) and 1 <= keys.every <= n_layer
            if not exists or ("at" in entry) == ("every" in entry):
                either = f"either at, of layers 0 to {n_layer - 1}, or every, 1 to {n_layer}"
                lines.append(f"layers[{n}] = {entry}: expected {either}")
            if "reweight_p_warmup" in keys.attention:
                expected = "expected reweight_p_warmup in [attention], for all"
                lines.append(f"layers[{n}].attention: {expected}")
        yield from lines
        first_layers: dict[str, int] = {}
        for i in range(n_layer if self.layers and not lines else 0):
            problems = []
            LayerSections.model_validate(self._sections_of(i), context=problems)
            for problem in problems:
                first_layers.setdefault(problem.text, i)
        yield from (f"layers: in layer {i} {text}" for text, i in first_layers.items())

    def _sections_of(self, i: int) -> dict[str, Any]:
        """[model] and [attention] with what the entries of [[layers]] that name layer i state, in
        order.

        Their `attention` changes keys of [attention] or, with a normaliser, takes the section's
        place.
        """
        model = self.model.model_dump()
        attention = self.attention.model_dump(exclude={"reweight_p_warmup"})
        for entry in self.layers:
            at = [each % self.model.n_layer for each in entry.get("at", [])]
            if i in at or ("every" in entry and (i + 1) % entry["every"] == 0):
                if "position" in entry:  # [model] may have the share of another position
                    model["rope_fraction"] = ModelConfig.model_fields["rope_fraction"].default
                if entry.get("position") == "p_rope":
                    model["rope_fraction"] = self.model.rope_fraction
                model |= {key: value for key, value in entry.items() if key in model}
                options = entry.get("attention", {})
                attention = options if "normaliser" in options else attention | options
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
        return {model.rope_theta for model in models if model.rotating > 0}

    @property
    def run_dir(self) -> Path:
        return Path(self.log.dir) / self.name


class LayerSections(Section):
    """What a layer has of its own."""

    model: ModelConfig
    attention: AttentionConfig


# What a variant of the attention states: the first parts of its dotted keys.
VARIANT_KEYS = (
    "attention.", "layers",
    *(f"model.{key}" for key in ("position", "rope", "window", "attention_gate", "key_shift")),
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
        keys = {"position", "window", "key_shift", "attention_gate"}
        keys |= {"rope_theta", "rope_fraction"} if model.rotating else set()
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


def problems_of(error: ValidationError, prefix: str, names: list[str]) -> list[Problem]:
    """What is wrong with a section's values. names: its keys."""
    problems: list[Problem] = []
    expected: dict[tuple[str, str], list[str]] = {}  # a union has one error for each alternative
    for e in error.errors(include_url=False):
        if e["type"] == "value_error":  # of a validator, whose message is complete
            for line in str(e["ctx"]["error"]).split("\n"):
                keys = tuple(prefix + word for word in re.findall(r"\w+", line))
                problems.append(Problem(keys, prefix + line))
            continue
        key = f"{prefix}{e['loc'][0]}" if e["loc"] else prefix.removesuffix(".")
        head = f"{key} = {'a section' if isinstance(e['input'], dict) else repr(e['input'])}: "
        if e["type"] == "extra_forbidden":
            keys = (key, f"{prefix}normaliser")  # whose options are other ones
            problems.append(Problem(keys, head + _unknown(key, names)))
            continue
        what = re.sub(r"^(Input|String) should (be )?(a valid )?", "", e["msg"])
        what = NAME_RULE if e["type"] == "string_pattern_mismatch" else what
        what = "a section" if e["type"] == "model_type" else what
        expected.setdefault((key, head), []).append(what)
    for (key, head), alternatives in expected.items():
        alternatives = list(dict.fromkeys(alternatives))
        problems.append(Problem((key,), f"{head}expected {' or '.join(alternatives)}"))
    return problems


def _unknown(dotted: str, names: list[str]) -> str:
    """The problem of an unknown key, with what its writer may have meant."""
    section, _, key = dotted.rpartition(".")
    for name, other in SECTIONS.items():
        if key in other.model_fields:
            return f"unknown key; did you mean {name}.{key}?"
    return "unknown key; " + suggest(key, names, f"{section}." if section else "")
