"""The schema of a config: every key, its meaning, its bounds and its default.

One frozen pydantic class for each section; config.py reads files and command lines into a `Config`. A
normaliser's options are the fields of its class (normalisers.py, rivals.py) and keys of [attention].
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from normalisers import adaptive, family, others  # noqa: F401  (their classes register themselves)
from normalisers.base import NORMALISERS, Normaliser

Engine = Literal["auto", "dense", "rows", "sdpa", "triton", "flex"]


class Section(BaseModel):
    """Common rules of all sections: no unknown keys, no silent conversions, no changes later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def free(default: Any, **options: Any) -> Any:
    """A field that may differ when a run resumes: it changes neither the model nor the loss curve."""
    return Field(default, json_schema_extra={"may_change": True}, **options)


def resumable(default: Any, **options: Any) -> Any:
    """A field that may differ when a run resumes, though from the start it would give another loss curve."""
    return Field(default, json_schema_extra={"may_change": True, "another_run": True}, **options)


class ModelConfig(Section):
    """The transformer."""

    n_layer: int = Field(12, ge=1, le=1024, description="Number of transformer blocks.")
    n_head: int = Field(12, ge=1, le=1024, description="Attention heads per block.")
    n_kv_head: int = Field(
        0,
        ge=0,
        le=1024,
        description="Heads of keys and values, each shared by n_head / n_kv_head query heads; 0: n_head.",
    )
    n_embd: int = Field(768, ge=1, le=65536, description="Width of the residual stream.")
    vocab_size: int = Field(
        50257,
        ge=2,
        le=65536,
        description="Tokens of the tokeniser; padded to a multiple of 128 in the model.",
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Normalisation layer.")
    mlp: Literal["gelu", "swiglu"] = Field("gelu", description="Feed-forward block.")
    gelu: Literal["tanh", "exact"] = Field(
        "tanh",
        description="GPT-2's tanh approximation, or erf, 2.5 to 4 times faster on a CPU. They differ by up "
        "to 5e-4: evaluate a checkpoint with its own.",
    )
    mlp_hidden: int = Field(0, ge=0, le=2**20, description="Hidden width of the MLP; 0: 4 * n_embd.")
    bias: bool = Field(True, description="Biases in the linear layers and in LayerNorm.")
    tie_embeddings: bool = Field(True, description="Share the token embedding with the output layer.")
    attention_gate: bool = Field(
        False,
        description="Multiply the heads' output by sigmoid(W x), x the layer's input (arXiv 2505.06708).",
    )
    position: Literal["rope", "p_rope", "none", "alibi"] = Field(
        "rope",
        description="p_rope: RoPE on the highest frequencies (rope_fraction). alibi: a bias on the scores.",
    )
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary position embedding.")
    rope_fraction: float = Field(
        0.75, ge=0, le=1, description="p_rope: the part of the frequencies, from the highest on, that rotate."
    )

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
        return f"{self.n_head} heads" + f" ({self.n_kv_head} of keys and values)" * bool(self.n_kv_head)

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks = {
            f"model.n_kv_head = {self.n_kv_head}: expected a divisor of model.n_head = {self.n_head}":
                self.n_head % self.kv_heads,
            f"model.n_embd = {self.n_embd}: expected a multiple of model.n_head = {self.n_head}":
                self.n_embd % self.n_head,
            f"model.n_embd = {self.n_embd}: RoPE needs an even head size, n_embd / n_head = {self.head_dim}":
                self.rotating and self.head_dim % 2 and not self.n_embd % self.n_head,
            f"model.rope_fraction = {self.rope_fraction}: only read by model.position = p_rope":
                self.position != "p_rope" and self.rope_fraction != 0.75,
        }  # fmt: skip
        return raise_found(self, checks)


def raise_found(section: Any, checks: dict[str, Any]) -> Any:
    """The section; raises ValueError with the messages whose value is true."""
    if problems := [message for message, found in checks.items() if found]:
        raise ValueError("\n".join(problems))
    return section


def raise_problems(problems: list[str]) -> None:
    """Raises ValueError with all of the messages, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


class OptionErrors(ValueError):
    """Problems with a normaliser's options, as `problems_of` returns them: its only argument."""


class AttentionConfig(Section):
    """The attention normaliser, its options (fields of its class in normalisers.py), its re-weighting."""

    model_config = ConfigDict(extra="allow")  # checked against the class, below

    normaliser: str = Field(
        "softmax", description="The formula; its options are keys here (--help after a config shows them)."
    )
    reweight_p: int = Field(
        0, ge=0, le=256, description="Power p of the LSSAR re-weighting ReLU(n A - O)^p; 0: no re-weighting."
    )
    reweight_p_warmup: int = Field(
        0,
        ge=0,
        description="Training steps over which p rises from 1 to reweight_p; 0: p is reweight_p from the "
        "first step, as in the paper. Evaluations use reweight_p, validations in training the p of their "
        "step.",
    )

    @property
    def definition(self) -> Normaliser:
        """The normaliser's class with its options."""
        return NORMALISERS[self.normaliser].model_validate(self.model_extra)

    @model_validator(mode="after")
    def _check(self) -> Self:
        cls = NORMALISERS.get(self.normaliser)
        if cls is None:
            hint = _suggest(self.normaliser, list(NORMALISERS))
            raise ValueError(f"attention.normaliser = {self.normaliser!r}: unknown; {hint}")
        try:
            definition = cls.model_validate(self.model_extra)
        except ValidationError as e:
            raise OptionErrors(problems_of(e, "attention", cls)) from None
        p = self.reweight_p
        problems = []
        if p and not definition.sums_to_one:
            problems.append(
                f"attention.reweight_p = {p}: re-weighting needs non-negative rows that sum to one, which "
                f"{self.normaliser} with these options does not give"
            )
        if self.reweight_p_warmup and p < 2:
            problems.append(
                f"attention.reweight_p_warmup = {self.reweight_p_warmup}: only read with reweight_p >= 2"
            )
        raise_problems(problems)
        assert self.model_extra is not None
        self.model_extra.update(definition.model_dump())  # a resolved config states every option
        return self


class DataConfig(Section):
    """Where the tokens come from and in which order."""

    dir: str = resumable(
        "data/fineweb10B", description="Folder of prepared shards (`python -m data.fineweb`)."
    )
    order: Literal["sequential", "shuffled"] = Field(
        "sequential", description="Windows in stream order, or in a permutation fixed by the seed."
    )
    skip_steps: int = Field(
        0, ge=0, description="Batches left out at the start, e.g. those that the run of init_from has seen."
    )


class TrainConfig(Section):
    """How long, how much at a time, on what."""

    max_steps: int = Field(
        18865,
        ge=0,
        description="Optimiser steps of the whole run; 0: evaluate the init_from weights untrained.",
    )
    seq_len: int = Field(1024, ge=2, description="Training length T in tokens.")
    batch_tokens: int = Field(524288, ge=2, description="Tokens of one optimiser step, over all processes.")
    micro_batch: int = free(
        32,
        ge=1,
        description="Sequences in one forward pass of one process, at most: halve it when out of memory.",
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Autocast type of the forward pass; weights stay float32."
    )
    device: Literal["auto", "cpu", "cuda"] = free("auto", description="auto: cuda where there is one.")
    compile: Literal["auto"] | bool = free("auto", description="torch.compile the model; auto: on cuda.")
    engine: Engine = Field(
        "auto",
        exclude=True,  # a choice of this machine, in no checkpoint
        description="Attention engine. auto: the first of sdpa, triton (fused kernels), flex (FlexAttention) "
        "and rows that runs this normaliser here. dense holds (T, T).",
    )
    grad_clip: float = Field(1.0, ge=0, description="Largest gradient norm; 0: no clipping.")
    loss: Literal["softmax", "norm_softmax", "logit_norm"] = Field(
        "softmax", description="How logits become the probabilities of the cross-entropy (NormSoftmax paper)."
    )
    loss_gamma: PositiveFloat | Literal["inf"] = Field(
        "inf", description="norm_softmax: upper bound of the logits' standard deviation."
    )
    loss_tau: PositiveFloat | Literal["auto"] = Field(
        "auto", description="Temperature. auto: 1 for norm_softmax, vocab_size^(-1/2) for logit_norm."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of each target's probability that is spread evenly over the vocabulary; in the "
        "training loss only, not in validation.",
    )
    reduction: Literal["mean", "sum"] = Field(
        "mean",
        description="sum: the gradient is that of the sum of a step's token losses, so grad_clip, and "
        "grad_norm in the log, are those of the sum; losses are logged per token either way.",
    )
    val_every: int = free(250, ge=1, description="Steps between validations (always after the last step).")
    val_tokens: int = Field(
        10_485_760,
        ge=2,
        description="Validation tokens, from the val shard's start; 100000000: all of it (the LSSAR paper).",
    )
    checkpoint_every: int = free(500, ge=1, description="Steps between checkpoints (always the last).")
    keep_last: int = free(2, ge=1, description="Newest checkpoints to keep.")
    keep_every: int = free(0, ge=0, description="Also keep checkpoints of multiples of this step; 0: none.")
    on_bad_step: Literal["stop", "skip"] = resumable(
        "stop", description="A loss or gradient norm that is not finite stops the run, or is skipped."
    )
    max_skips: int = resumable(10, ge=1, description="Consecutive skipped steps after which the run stops.")
    outlier_z: float = resumable(
        0.0, ge=0, description="Skip steps this many standard deviations above the last 128; 0: never."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        n_seq, rest = divmod(self.batch_tokens, self.seq_len)
        checks = {
            f"train.batch_tokens = {self.batch_tokens}: expected a multiple of train.seq_len = "
            f"{self.seq_len}": rest,
            f"train.micro_batch = {self.micro_batch}: expected a divisor of the {n_seq} sequences in a step "
            "(batch_tokens / seq_len), or more than them":
                not rest and n_seq % min(self.micro_batch, n_seq),
            f"train.val_tokens = {self.val_tokens}: expected at least train.seq_len = {self.seq_len}":
                self.val_tokens < self.seq_len,
            f"train.loss_gamma = {self.loss_gamma!r}: only read by train.loss = norm_softmax":
                self.loss_gamma != "inf" and self.loss != "norm_softmax",
            f"train.loss_tau = {self.loss_tau}: not read by train.loss = softmax":
                self.loss_tau != "auto" and self.loss == "softmax",
        }  # fmt: skip
        return raise_found(self, checks)


class OptimizerConfig(Section):
    """The optimiser and its learning-rate schedule."""

    name: Literal["adamw", "muon", "sgd"] = Field(
        "adamw", description="muon: for hidden matrices, with adamw for all else."
    )
    lr: float = Field(6e-4, gt=0, description="Peak learning rate.")
    muon_lr: float = Field(0.02, gt=0, description="Peak learning rate of muon's matrices.")
    beta1: float = Field(0.9, ge=0, lt=1, description="adamw: decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="adamw: decay of the second moment.")
    momentum: float = Field(0.95, ge=0, lt=1, description="muon, sgd: momentum.")
    weight_decay: float = Field(
        0.1, ge=0, description="Weight decay, on matrices only (decoupled in adamw and muon)."
    )
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine", description="Shape after warm-up. wsd: constant, then linear over the last decay_fraction."
    )
    warmup_steps: int = Field(700, ge=0, description="Steps of linear warm-up from 0.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate over peak.")
    decay_fraction: float = Field(0.2, gt=0, le=1, description="wsd: share of max_steps spent decaying.")


class LogConfig(Section):
    """What a run records."""

    dir: str = free("runs", description="Run folders are made here, as <dir>/<name>.")
    every: int = free(10, ge=1, description="Steps between progress lines; metrics.jsonl has every step.")
    attention_every: int = free(0, ge=0, description="Steps between qk_std, entropy and logit_std; 0: never.")
    wandb: bool = free(False, description="Also log to Weights & Biases.")
    wandb_project: str = free("attention-normalisers", description="W&B project.")


class Config(Section):
    """A whole run. `base`, `name` and [sweep] are not inherited; `name` defaults to the file's stem."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$", description="Name of the run and of its folder."
    )
    seed: int = Field(1337, ge=0, lt=2**63, description="Seed of initialisation and data order.")
    init_from: str = Field(
        "", description="Run folder or checkpoint whose weights this run starts from; empty: random weights."
    )
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, decay = self.optimizer.warmup_steps, self.optimizer.decay_fraction
        power_steps, max_steps = self.attention.reweight_p_warmup, self.train.max_steps
        at_most = f"expected at most train.max_steps = {max_steps}"
        checks = {
            "train.max_steps = 0: expected at least 1, or a run named by init_from":
                max_steps == 0 and not self.init_from,
            f"optimizer.warmup_steps = {steps}: {at_most}": steps > max_steps,
            f"attention.reweight_p_warmup = {power_steps}: {at_most}": power_steps > max_steps,
            f"optimizer.decay_fraction = {decay}: expected at most {1 - steps / max(1, max_steps):.4g}, the "
            "share of the steps after warm-up":
                self.optimizer.schedule == "wsd" and steps <= max_steps < steps + decay * max_steps,
        }  # fmt: skip
        return raise_found(self, checks)

    @property
    def run_dir(self) -> Path:
        return Path(self.log.dir) / self.name


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "attention": AttentionConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "log": LogConfig,
}


def describe_attention(options: AttentionConfig, model: ModelConfig | None = None) -> str:
    """The [attention] section in a few words, 'lssa (reweight_p = 15)', and of [model] ', alibi, gate'."""
    stated = options.definition.model_dump(exclude_defaults=True)
    for key in ("reweight_p", "reweight_p_warmup"):
        if getattr(options, key):
            stated[key] = getattr(options, key)
    listed = ", ".join(f"{key} = {value}" for key, value in stated.items())
    text = options.normaliser + (f" ({listed})" if listed else "")
    if model is not None and model.position != "rope":
        text += ", no positions" if model.position == "none" else f", {model.position}"
    return text + ", gate" * (model is not None and model.attention_gate)


def may_change_on_resume(key: str) -> bool:
    """Whether a dotted key may differ between a run and its resumption (`free` and `resumable` fields)."""
    return "may_change" in _marks(key)


def makes_another_run(key: str) -> bool:
    """Whether runs that differ in a dotted key may have other loss curves (all but `free` fields)."""
    marks = _marks(key)
    return "may_change" not in marks or "another_run" in marks


def _marks(key: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    field = SECTIONS.get(section, Config).model_fields.get(name)
    extra = field.json_schema_extra if field else None
    return extra if isinstance(extra, dict) else {}


# ---------------------------------------------------------------- what pydantic finds, in words


def problems_of(error: ValidationError, section: str, cls: type[BaseModel]) -> list[tuple[str, str]]:
    """(dotted key, "key = value: expected ...") of each problem; no key where several keys disagree."""
    found: list[tuple[str, str]] = []
    expected: dict[tuple[str, str], list[str]] = {}  # a union yields one error per alternative: join them
    prefix = f"{section}." if section else ""
    for e in error.errors(include_url=False):
        if e["type"] == "value_error":  # from our own validators: complete messages
            cause = e["ctx"]["error"]
            inner = cause.args[0] if isinstance(cause, OptionErrors) else None
            found += inner or [("", prefix + line) for line in str(cause).split("\n")]
            continue
        loc = [str(part) for part in e["loc"]]  # without pydantic's union tags:
        key = prefix + ".".join(loc[:2] if not section and loc[0] in SECTIONS else loc[:1])
        head = f"{key} = {'a section' if isinstance(e['input'], dict) else repr(e['input'])}: "
        if e["type"] == "extra_forbidden":
            found.append((key, f"{head}unknown key; {_nearest(key, cls)}"))
        elif e["type"] == "string_pattern_mismatch":
            found.append((key, f"{head}expected letters, digits and . _ = + - alone; choose another --name"))
        else:
            what = e["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            expected.setdefault((key, head), []).append("a section" if e["type"] == "model_type" else what)
    joined = {at: " or ".join(dict.fromkeys(what)) for at, what in expected.items()}
    return found + [(key, f"{head}expected {what}") for (key, head), what in joined.items()]


def _nearest(dotted: str, cls: type[BaseModel]) -> str:
    """What the writer of an unknown key may have meant; cls: the normaliser's class in [attention]."""
    *section, key = dotted.split(".")
    if dotted == "base":
        return "a base is named in a config file"
    for name, other in SECTIONS.items():
        if key in other.model_fields:
            return f"did you mean {name}.{key}?"
    names = list((SECTIONS[section[0]] if section else Config).model_fields)
    names += list(cls.model_fields) if section == ["attention"] else [] if section else ["base"]
    return _suggest(key, names, ".".join([*section, ""]))


def _suggest(word: str, names: list[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {prefix}{near[0]}?" if near else f"expected one of {', '.join(names)}"
