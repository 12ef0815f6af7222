"""The typed config: a TOML file plus `--section.key value` overrides become one frozen `Config`.

    python config.py configs/lssar.toml --attention.reweight-p 3    # print the resolved config
    python config.py --help                                        # every key, its meaning, its default

A file may start with `base = "other.toml"` (relative to itself, any depth) and then lists only what
it changes. A file with a [sweep] section describes several runs, one for each combination of its values:

    [sweep]
    "attention.reweight_p" = [1, 3, 15]

Files are data: nothing in them is executed. Every problem is reported at once, one line each, naming the
file or override, the key, its value and what was expected.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from infra.cli import ArgumentParser, UserError, run_main


class Section(BaseModel):
    """Common rules of all sections: no unknown keys, no silent conversions, no changes later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The transformer."""

    n_layer: int = Field(12, ge=1, description="Number of transformer blocks.")
    n_head: int = Field(12, ge=1, description="Attention heads per block.")
    n_embd: int = Field(768, ge=1, description="Width of the residual stream.")
    vocab_size: int = Field(
        50257, ge=2, description="Tokens of the tokeniser; padded to a multiple of 128 inside the model."
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Normalisation layer.")
    mlp: Literal["gelu", "swiglu"] = Field("gelu", description="Feed-forward block.")
    mlp_hidden: int | None = Field(None, ge=1, description="Hidden width of the MLP; unset: 4 * n_embd.")
    bias: bool = Field(True, description="Biases in the linear layers and in LayerNorm.")
    tie_embeddings: bool = Field(True, description="Share the token embedding with the output layer.")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary position embedding.")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"model.n_embd = {self.n_embd}: expected a multiple of model.n_head = {self.n_head}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.n_embd = {self.n_embd}: RoPE needs an even head size, "
                f"but n_embd / n_head = {self.head_dim}"
            )
        return self


Phi = Literal["exp", "identity", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish"]


class AttentionConfig(Section):
    """The attention normaliser and the engine that runs it.

    Keys below `engine` and `compile_rows` are options of particular normalisers (README, "Normalisers");
    one that the chosen normaliser does not read is an error.
    """

    normaliser: str = Field("softmax", description="How scores become weights: a name from attention.py.")
    engine: Literal["auto", "dense", "rows", "sdpa", "triton"] = Field(
        "auto",
        description="auto: sdpa where the normaliser allows it, else triton (fused kernels) on CUDA if they "
        "pass a check, else rows. dense holds (T, T).",
    )
    compile_rows: bool = Field(
        False, description="torch.compile the rows engine (on CPU this needs a C++ compiler)."
    )
    reweight_p: int | None = Field(
        None, ge=1, description="Power p of the LSSAR re-weighting ReLU(A n - O)^p; unset: no re-weighting."
    )
    phi: Phi | None = Field(None, description="phi: the elementwise function; unset: softplus.")
    l1: bool | None = Field(
        None, description="phi, sigmoid: divide rows by their l1 norm; unset: phi true, sigmoid false."
    )
    bias: bool | Literal["log_train_len", "log_len", "log_n"] | None = Field(
        None,
        description="sigmoid: what is subtracted from the scores (unset: log_n). "
        "ssmax: true adds the learned bias b (unset: false).",
    )
    scale: Literal["learned", "one"] | None = Field(
        None, description="ssmax: s learned per layer and head, or fixed to 1; unset: learned."
    )
    scale_init: float | None = Field(None, gt=0, description="ssmax, ssmax_pn: initial value of s; unset: 1.")
    divide_by: Literal["train_len", "n"] | None = Field(
        None, description="relu_wortsman: the divisor, training length or visible keys; unset: train_len."
    )
    gamma: float | Literal["sqrt_d", "inf"] | None = Field(
        None,
        description="norm_softmax: upper bound of the score deviation (unset: sqrt_d). "
        "relu_shen: a number (unset: 1).",
    )
    gamma_factor: float | None = Field(
        None, gt=0, description="norm_softmax: multiplies gamma = sqrt_d; unset: 1."
    )
    tau: float | None = Field(
        None, gt=0, description="Temperature. norm_softmax: unset 1. logit_norm: unset n^(-1/2)."
    )
    variant: Literal["standard", "affine", "inverse"] | None = Field(
        None, description="norm_softmax: standard, affine (f1: w x / sigma), inverse (f2: max(sigma, gamma))."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        from attention import config_problems  # here, because attention.py imports this file

        if problems := config_problems(self):
            raise ValueError("\n".join(f"attention.{problem}" for problem in problems))
        return self


class DataConfig(Section):
    """Where the tokens come from and in which order."""

    dir: str = Field("data/fineweb10B", description="Folder of prepared shards (data/*.py make them).")
    order: Literal["sequential", "shuffled"] = Field(
        "sequential", description="Windows in stream order, or in a permutation fixed by the seed."
    )
    skip_steps: int = Field(
        0,
        ge=0,
        description="Batches left out at the start: those that the run of init_from has seen.",
    )


class TrainConfig(Section):
    """How long, how much at a time, on what."""

    max_steps: int = Field(
        18865,
        ge=0,
        description="Optimiser steps of the whole run; 0 (with init_from): none, as it is.",
    )
    seq_len: int = Field(1024, ge=2, description="Training length T in tokens.")
    batch_tokens: int = Field(524288, ge=2, description="Tokens of one optimiser step, over all processes.")
    micro_batch: int = Field(
        32, ge=1, description="At most so many sequences in one forward pass of one process."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Autocast type of the forward pass; weights stay float32."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one.")
    compile: Literal["auto"] | bool = Field("auto", description="torch.compile the model; auto: on cuda.")
    grad_clip: float = Field(1.0, ge=0, description="Largest gradient norm; 0: no clipping.")
    loss: Literal["softmax", "norm_softmax", "logit_norm"] = Field(
        "softmax", description="How logits become the probabilities of the cross-entropy (NormSoftmax paper)."
    )
    loss_gamma: float | Literal["inf"] | None = Field(
        None, description="loss norm_softmax: upper bound of the logits' deviation; unset: inf."
    )
    loss_tau: float | None = Field(
        None, gt=0, description="Temperature. norm_softmax: unset 1. logit_norm: unset vocab_size^(-1/2)."
    )
    val_every: int = Field(250, ge=1, description="Steps between validations (always after the last step).")
    val_tokens: int = Field(10_485_760, ge=2, description="Validation tokens, from the val shard's start.")
    checkpoint_every: int = Field(500, ge=1, description="Steps between checkpoints (always the last).")
    keep_last: int = Field(2, ge=1, description="How many of the newest checkpoints to keep.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep checkpoints of steps that this divides; unset: no such."
    )
    on_bad_step: Literal["stop", "skip"] = Field(
        "stop", description="A loss or gradient norm that is not finite stops the run, or is skipped."
    )
    max_skips: int = Field(10, ge=1, description="Steps skipped in a row after which the run stops.")
    outlier_z: float | None = Field(
        None, gt=0, description="Skip steps whose loss or gradient norm lies so many deviations above the "
        "mean of the last 128; unset: none."
    )  # fmt: skip

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.batch_tokens % self.seq_len:
            problems.append(
                f"train.batch_tokens = {self.batch_tokens}: expected a multiple of "
                f"train.seq_len = {self.seq_len}"
            )
        elif (n_seq := self.batch_tokens // self.seq_len) % min(self.micro_batch, n_seq):
            problems.append(
                f"train.micro_batch = {self.micro_batch}: expected a divisor of the {n_seq} sequences in a "
                "step (batch_tokens / seq_len), or more than them"
            )
        if self.val_tokens < self.seq_len:
            problems.append(
                f"train.val_tokens = {self.val_tokens}: expected at least train.seq_len = {self.seq_len}"
            )
        if self.loss_gamma is not None and self.loss != "norm_softmax":
            problems.append(f"train.loss_gamma = {self.loss_gamma!r}: only read by train.loss = norm_softmax")
        if isinstance(self.loss_gamma, float) and self.loss_gamma <= 0:
            problems.append(f"train.loss_gamma = {self.loss_gamma}: expected a number above 0")
        if self.loss_tau is not None and self.loss == "softmax":
            problems.append(f"train.loss_tau = {self.loss_tau}: not read by train.loss = softmax")
        if problems:
            raise ValueError("\n".join(problems))
        return self


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
    """What a run leaves behind."""

    dir: str = Field("runs", description="Run folders are made here, as <dir>/<name>.")
    every: int = Field(10, ge=1, description="Steps between progress lines; metrics.jsonl has every step.")
    attention_every: int | None = Field(
        None, ge=1, description="Steps between measurements of each layer's score deviation and entropy."
    )
    wandb: bool = Field(False, description="Also log to Weights & Biases.")
    wandb_project: str = Field("attention-normalisers", description="W&B project.")


class Config(Section):
    """A whole run. `base`, `name` and [sweep] are not inherited; `name` is the file's stem unless given."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$",
        description="Name of the run and of its folder; unset: the config file's stem.",
    )
    seed: int = Field(1337, ge=0, lt=2**63, description="Seed of initialisation and data order.")
    init_from: str | None = Field(
        None, description="Run folder or checkpoint whose weights this run starts from; unset: random ones."
    )
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, max_steps = self.optimizer.warmup_steps, self.train.max_steps
        if max_steps == 0 and self.init_from is None:
            raise ValueError("train.max_steps = 0: expected at least 1, or a run named by init_from")
        if steps > max_steps:
            raise ValueError(
                f"optimizer.warmup_steps = {steps}: expected at most train.max_steps = {max_steps}"
            )
        decay = self.optimizer.decay_fraction
        if self.optimizer.schedule == "wsd" and steps + decay * max_steps > max_steps:
            raise ValueError(
                f"optimizer.decay_fraction = {decay}: expected at most {1 - steps / max_steps:.4g}, "
                "the share of the steps after warm-up"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.log.dir) / self.name


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a config file with its bases, apply `--section.key value` overrides, validate.

    Args:
        path: a TOML file.
        overrides: what follows it on the command line; `--a.b-c 1`, `--a.b_c=1`, values as in TOML
            (quotes around strings may be left out). They choose a value for each key of a [sweep].
    Raises:
        UserError: one line for each problem found.
    """
    path = Path(path)
    values, sources = _read_file(path, ())
    sweep = values.pop("sweep", {})
    values.setdefault("name", path.stem)
    for key, value in _parse_overrides(overrides or []):
        _put(values, key.split("."), value, "command line", sources)
        sweep.pop(key, None)
    if sweep:
        options = " ".join(f"--{key} ..." for key in sweep)
        raise UserError(f"{path}: describes a sweep: python sweep.py {path}, or choose one run by {options}")
    return _validate(values, sources, str(path))


def expand_sweep(path: str | Path, overrides: list[str] | None = None) -> list[list[str]]:
    """The overrides of each run that a file's [sweep] describes; without a [sweep], none for one run.

    Several keys give their product, the last one fastest. A run is called <file's stem>_<key>=<value>.

    Args:
        overrides: keys that they set are not swept.
    Raises:
        UserError: the file cannot be read, or a key has no list of values.
    """
    path = Path(path)
    sweep = _read_file(path, ())[0].get("sweep", {})
    for key, _ in _parse_overrides(overrides or []):
        sweep.pop(key, None)
    runs = []
    for values in itertools.product(*sweep.values()):
        chosen = dict(zip(sweep, values, strict=True))
        overrides = [text for key, value in chosen.items() for text in (f"--{key}", _toml_value(value))]
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items()]
        name = re.sub(r"[^A-Za-z0-9._=+-]", "-", "_".join([path.stem, *parts]))
        runs.append([*overrides, "--name", name] if sweep else [])
    return runs


def config_from_dict(values: dict[str, Any], source: str) -> Config:
    """The inverse of `Config.model_dump()`, for configs kept in checkpoints.

    Raises:
        UserError: naming `source`, for each key that this version of the code does not accept.
    """
    return _validate(values, {}, source)


def to_toml(config: Config) -> str:
    """The resolved config as a TOML file that `load_config` reads back to an equal `Config`."""
    lines, sections = [], []
    for key, value in config.model_dump(exclude_none=True).items():
        if isinstance(value, dict):
            sections += ["", f"[{key}]", *(f"{k} = {_toml_value(v)}" for k, v in value.items())]
        else:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines + sections) + "\n"


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with (old value, new value)."""
    a, b = _flatten(old.model_dump()), _flatten(new.model_dump())
    return {key: (a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key)}


def parse_command_line(parser: ArgumentParser) -> tuple[Config, argparse.Namespace]:
    """`script CONFIG.toml [--section.key value ...] [the parser's own flags]`.

    --help prints the parser's flags, then every key of the config with its type, its value (that of the file,
    if one is named) and its meaning, and exits with status 0.

    Returns:
        The config, and the values of the parser's own flags.
    Raises:
        UserError: no config file, or a problem with it or with an override.
    """
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the config file")
    parser.usage = "%(prog)s CONFIG.toml [--section.key VALUE ...] [options]"
    if {"-h", "--help"} & set(sys.argv[1:]):
        named = [arg for arg in sys.argv[1:2] if not arg.startswith("-")]
        print(parser.format_help() + "\n" + describe_keys(load_config(*named) if named else None))
        sys.exit(0)
    args, overrides = parser.parse_known_args()
    if args.config is None or not sys.argv[1:2] or sys.argv[1].startswith("-"):
        raise UserError(f"expected a config file: {parser.prog} configs/lssar.toml (or --help)")
    return load_config(args.config, overrides), args


def describe_keys(config: Config | None) -> str:
    """Every key as "--section.key  TYPE = VALUE" and, below it, its meaning; without a config the defaults."""
    lines = ["config keys (in the file, or as options):"]
    sections = {"": Config, **SECTIONS}
    for section, cls in sections.items():
        values = (config if not section else getattr(config, section)) if config else None
        for name, field in cls.model_fields.items():
            if name in SECTIONS:
                continue
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            value = default if values is None else getattr(values, name)
            kind = str(field.annotation).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            option = f"--{section}.{name}" if section else f"--{name}"
            lines.append(f"\n  {option.replace('_', '-')}  {kind} = {value!r}\n      {field.description}")
    return "\n".join(lines)


def _read_file(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """A file's values on top of its bases', and for each dotted key the file it came from."""
    if path.resolve() in seen:
        chain = " -> ".join(str(p.name) for p in (*seen, path.resolve()))
        raise UserError(f"{path}: base files form a cycle: {chain}")
    try:
        with open(path, "rb") as f:
            own = tomllib.load(f)
    except FileNotFoundError:
        via = f" (named as base by {seen[-1].name})" if seen else ""
        raise UserError(f"{path}: no such config file{via}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read as a config file: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not valid TOML: {e}") from None

    base = own.pop("base", None)
    sweep = own.pop("sweep", {})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{path}: base = {base!r}: expected the name of a config file")
        values, sources = _read_file(path.parent / base, (*seen, path.resolve()))
        values.pop("name", None)
        values.pop("sweep", None)
    for key, value in _flatten(own).items():
        _put(values, key.split("."), value, str(path), sources)
    if not isinstance(sweep, dict):
        raise UserError(f"{path}: sweep = {sweep!r}: expected a section")
    for key, value in _flatten(sweep).items():
        if not isinstance(value, list) or not value:
            raise UserError(f"{path}: sweep: {key} = {value!r}: expected a list of values")
    if sweep:
        values["sweep"] = _flatten(sweep)
    return values, sources


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _put(values: dict[str, Any], keys: list[str], value: Any, source: str, sources: dict[str, str]) -> None:
    """Set values[a][b] = value. What stands in the way is left for validation to name."""
    sources[".".join(keys)] = source
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = values[key] = {}
        values = inner
    values[keys[-1]] = value


def _parse_overrides(args: list[str]) -> list[tuple[str, Any]]:
    pairs, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--") or len(arg) == 2:
            raise UserError(f"{arg!r}: expected an override of the form --section.key value")
        key, equals, text = arg[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{arg}: expected a value after it")
            text = rest.pop(0)
        key = key.replace("-", "_")
        pairs.append((key, _parse_value(key, text)))
    return pairs


def _parse_value(key: str, text: str) -> Any:
    section, _, name = key.rpartition(".")
    field = SECTIONS.get(section, Config).model_fields.get(name)
    if field is not None and field.annotation is str and not text.startswith('"'):
        return text  # a run may be called 7 or 2024-11-20
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def _validate(values: dict[str, Any], sources: dict[str, str], path: str) -> Config:
    """The `Config`, or a UserError with every problem: those of single keys, then, with the offending
    keys taken out, those between keys."""
    lines: list[str] = []
    bad: list[str] = []
    while True:
        try:
            config = Config.model_validate(values)
            break
        except ValidationError as e:
            found, keys = _explain(e, sources, path)
            lines += [line for line in found if not any(f"{key} " in line for key in bad)]
            if not keys:
                break
            bad += keys
            values = _without(values, keys)
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return config


def _without(values: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {"name": "unnamed"}
    for key, value in _flatten(values).items():
        if not any(key == bad or key.startswith(f"{bad}.") for bad in keys):
            _put(kept, key.split("."), value, "", {})
    return kept


def _explain(error: ValidationError, sources: dict[str, str], path: str) -> tuple[list[str], list[str]]:
    """One line for each problem (source, key, value, what was expected); the keys that are wrong alone."""
    lines: list[str] = []
    expected: dict[str, list[str]] = {}  # a union yields one error per alternative: join them
    keys: list[str] = []
    for e in error.errors(include_url=False):
        if e["type"] == "value_error":  # from our own validators: complete messages
            messages = str(e["ctx"]["error"]).split("\n")
            lines += [f"{_source(message.split(' ')[0], sources, path)}: {message}" for message in messages]
            continue
        loc = [str(part) for part in e["loc"]]
        dotted = ".".join(loc[:2] if loc[0] in SECTIONS else loc[:1])  # without pydantic's union tags
        keys.append(dotted)
        head = f"{_source(dotted, sources, path)}: {dotted} = {_short(e['input'])}: "
        if e["type"] == "extra_forbidden":
            lines.append(f"{head}unknown key; {_nearest(dotted)}")
        elif e["type"] == "string_pattern_mismatch":
            lines.append(f"{head}expected letters, digits and . _ = + - alone; choose another --name")
        else:
            what = e["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            what = "a section" if e["type"] == "model_type" else what
            expected.setdefault(head, []).append(what)
    lines += [f"{head}expected {' or '.join(dict.fromkeys(what))}" for head, what in expected.items()]
    return lines, keys


def _source(dotted: str, sources: dict[str, str], path: str) -> str:
    """Where a key, or the first key of a section, was written."""
    inside = (source for key, source in sources.items() if key.startswith(f"{dotted}."))
    return sources.get(dotted) or next(inside, path)


def _short(value: Any) -> str:
    return "a section" if isinstance(value, dict) else repr(value)


def _nearest(dotted: str) -> str:
    """What the writer of an unknown key may have meant."""
    *section, key = dotted.split(".")
    if dotted == "base":
        return "a base is named in a config file"
    for name, cls in SECTIONS.items():
        if key in cls.model_fields:
            return f"did you mean {name}.{key}?"
    names = list(SECTIONS[section[0]].model_fields) if section else ["base", *Config.model_fields]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {'.'.join([*section, near[0]])}?" if near else f"expected one of {', '.join(names)}"


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "attention": AttentionConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "log": LogConfig,
}


def main() -> None:
    print(to_toml(parse_command_line(ArgumentParser(__doc__))[0]), end="")


if __name__ == "__main__":
    run_main(main)
