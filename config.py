"""The typed config: a TOML file plus `--section.key value` overrides become one frozen `Config`.

    python config.py configs/lssar.toml --train.max-steps 5000      # print the resolved config
    python config.py configs/variants/fox.toml --base configs/track.toml    # a variant in that recipe
    python config.py --variants                                    # a table of configs/variants
    python config.py --help                                        # every key, its meaning, its default

[[layers]] sections state what some layers have of their own, as in configs/variants/hybrid.toml. On
the command line they are one value, --layers '[{every = 4, position = "none"}]'.

A file may start with `base = "other.toml"` (relative to itself, any depth) and then lists only what
it changes. `--base` on the command line takes the place of that line. A file with a [sweep] section
describes several runs, one for each combination of its values, `"attention.reweight_p" = [1, 3,
15]`. Several [[sweep]] sections describe the runs of each. Numbers that follow from the sizes of a
run may be left to it:

    attention.scale or scale_init = "ln_d_ln_L"           ln d * ln L, d the head size, L = train.seq_len
    attention.scale or scale_init = "sqrt_d_over_ln_L"    sqrt(d) / ln L
    attention.scale or scale_init = "1.3 sqrt_d"          1.3 sqrt(d), a gain on QK-norm's softmax
    attention.reweight_p_warmup                           below 1: a share of train.max_steps, rounded down

Files are data: nothing in them is executed, but `normaliser = "file.py:Class"` imports that file.
All problems with keys are reported at once, a line each, with the file or override, the key, its
value and what was expected; if there are none, all those between keys of a section, then of several.
"""

import argparse
import itertools
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from infra.cli import ArgumentParser, UserError, run_main
from normalisers.own import VARIANTS, identify
from schema import SECTIONS, VARIANT_KEYS, Config, field_of, problems_of, resume_rule

HELP = {"-h", "--help"}
MAX_RUNS = 10_000  # of a sweep
PATHS = ("data.dir", "log.dir", "init_from")
# keys of earlier versions -> their values that change nothing of a run
GONE: dict[str, Container[Any]] = {
    "attention.gamma_factor": [1.0],
    "data.document_mask": [False],
    "log.attention_every": range(2**31),
    "optimizer.scalar_lr": [0.0],
    "train.flash": ["FA2"],
    "train.residual": ["float32"],
    "train.memory_budget": [1.0, 0.99],
    "train.on_bad_step": ["stop"],
    "train.max_skips": range(1, 2**63),
}


class Stated(NamedTuple):
    """A value and where it is from: a file, its [sweep], the command line."""

    value: Any
    source: str
    folder: Path = Path()  # that a normaliser's file is looked for in


Values = dict[str, Stated]  # by dotted key, what was stated last first
# what a stored config of before a key means, where that is not the key's default
BEFORE: Values = {"optimizer.muon_split": Stated("none", "a config of before this key")}


# ---------------------------------------------------------------- reading and writing


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a config file with its bases, apply overrides, validate.

    Args:
        overrides: what follows the file on the command line: `--a.b-c 1`, `--a.b_c=1`, `--base
            other.toml`. Values are as in TOML, without quotes around strings. A value for each key
            chooses from a [sweep].
    Raises UserError: one line for each problem.
    """
    path = Path(path)
    chosen = parse_overrides(overrides or [])
    values, sweeps = _read_file(path, chosen.pop("base", None), chosen)
    values.setdefault("name", Stated(path.stem, str(path)))
    for key, value in chosen.items():
        given = {key: Stated(value, "command line")}
        if any(value in sweep.get(key, ()) for sweep in sweeps):
            given = {key: Stated(value, f"{path}: [sweep]", path.parent)}
        values = given | values | given
    missing = [sorted(sweep.keys() - chosen.keys()) for sweep in sweeps]
    if all(missing):
        options = ", or by ".join(" ".join(f"--{key} ..." for key in keys) for keys in missing)
        raise UserError(
            f"{path}: describes a sweep: python sweep.py {path}, or choose one run by {options}"
        )
    return _validate(values, str(path))


class SweepRun(NamedTuple):
    """One of the runs that a file and lists on the command line describe."""

    path: Path
    swept: dict[str, Any]  # dotted key -> the value of this run; empty without a sweep
    overrides: list[str]  # of these values and the run's name; empty without a sweep


def expand_sweep(path: str | Path, overrides: list[str] | None = None) -> list[SweepRun]:
    """The runs of a file's [sweep] and of the overrides with several values; without both, one.

    Several keys give their product, the last one fastest; several [[sweep]] sections follow each
    other. Keys that `overrides` set are not swept. A run is named after the file and its values.

    Raises UserError: the file cannot be read, a key has no list of values, or too many runs.
    """
    path = Path(path)
    plain, lists = split_lists(overrides or [])
    chosen = parse_overrides(plain)
    base = chosen.pop("base", None)
    runs: dict[str, SweepRun] = {}  # two sections may differ in a key that an override sets
    for section in _read_file(path, base, {*chosen, *lists})[1]:
        values = {key: section[key] for key in section if key not in chosen} | lists
        n_runs = math.prod(map(len, values.values()))
        if n_runs > MAX_RUNS:
            raise UserError(f"{path}: sweep: {n_runs} runs: expected at most {MAX_RUNS}")
        for combination in itertools.product(*values.values()):
            swept = dict(zip(values, combination, strict=True))
            choices = [word for key in swept for word in (f"--{key}", _toml_value(swept[key]))]
            if swept:
                choices += ["--name", name_run(path, swept)]
            runs.setdefault(repr(swept), SweepRun(path, swept, choices))
    return list(runs.values())


def name_run(path: Path, swept: dict[str, Any]) -> str:
    """The file's name and _<key>=<value> of each swept key."""
    parts = [path.stem, *(f"{key.rpartition('.')[2]}={value}" for key, value in swept.items())]
    return re.sub(r"[^A-Za-z0-9._=+-]", "-", "_".join(parts))


def split_lists(overrides: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """The overrides with one value each, and the values of those with several, by dotted key."""
    groups: list[list[str]] = []
    for word in overrides:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    plain: list[str] = []
    lists: dict[str, list[Any]] = {}
    for option, *texts in groups:
        if len(texts) < 2:
            plain += [option, *texts]
        else:
            key = option.removeprefix("--").replace("-", "_")
            lists[key] = [_parse_value(key, text) for text in texts]
    return plain, lists


def config_from_dict(values: dict[str, Any], source: str, folder: Path = Path()) -> Config:
    """The inverse of `Config.model_dump()`, for configs kept in checkpoints of a run folder.

    Raises UserError: naming `source`, for each key that this version of the code does not accept.
    """
    stated = {key: Stated(value, source, folder) for key, value in _flatten(values).items()}
    return _validate(BEFORE | stated, source)


def to_toml(config: Config) -> str:
    """The resolved config as a TOML file that `load_config` reads back to an equal `Config`."""
    values = config.model_dump()
    lines = [f"{key} = {_toml_value(values[key])}" for key in values if key not in SECTIONS]
    for section in SECTIONS:
        lines += [
            "",
            f"[{section}]",
            *(f"{key} = {_toml_value(v)}" for key, v in values[section].items()),
        ]
    return "\n".join(lines) + "\n"


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with (old value, new value)."""
    before = _flatten(old.model_dump())
    after = _flatten(new.model_dump())
    pairs = {key: (before.get(key), after.get(key)) for key in before | after}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def run_identity(config: Config) -> str:
    """The values of all keys that affect the loss curve, as text."""
    values = _flatten(config.model_dump())
    kept = {key: values[key] for key in sorted(values) if resume_rule(key) != "free"}
    return json.dumps(kept)


def parse_command_line(parser: ArgumentParser) -> tuple[Config, argparse.Namespace]:
    """`script CONFIG.toml [--section.key value ...] [the parser's own flags]`.

    --help prints the parser's flags, then every key with its type, value and meaning, without a
    file those of the defaults.

    Returns: The config, and the values of the parser's own flags.
    Raises UserError: no config file, or a problem with it or with an override.
    """
    parser.usage = "%(prog)s CONFIG.toml [--base BASE.toml] [--section.key VALUE ...] [options]"
    files = [arg for arg in sys.argv[1:2] if not arg.startswith("-")]
    if {*sys.argv[1:]} & HELP:
        given = parser.parse_known_args([word for word in sys.argv[2:] if word not in HELP])[1]
        overrides = [*expand_sweep(files[0])[0].overrides, *given] if files else []
        config = load_config(files[0], overrides) if files else Config(name="CONFIG")
        print(f"{parser.format_help()}\n{describe_keys(config)}")
        sys.exit(0)
    if not files:
        raise UserError(
            f"expected a config file first: {parser.prog} configs/lssar.toml (or --help)"
        )
    args, overrides = parser.parse_known_args(sys.argv[2:])
    return load_config(files[0], overrides), args


def describe_keys(config: Config) -> str:
    """Each key as an option with its value, then what it takes and means, in 80 columns."""
    attention = config.attention
    parts: list[tuple[str, str, BaseModel]] = [("top level", "", config)]
    parts += [(f"[{name}]", f"{name}.", getattr(config, name)) for name in SECTIONS]
    heading = f"[attention], options of normaliser = {attention.normaliser}"
    parts.insert(3, (heading, "attention.", attention.definition))
    lines = ["config keys, in the file or as options, with their values:"]
    for heading, prefix, values in parts:
        lines += ["", heading]
        stated = dict(values) | values.model_dump()
        for name, schema in type(values).model_json_schema()["properties"].items():
            if name in SECTIONS:
                continue
            option = f"--{prefix}{name.replace('_', '-')} {_toml_value(stated[name])}"
            lines.append(fill(option, 80, initial_indent="  ", subsequent_indent="      "))
            # A class that states another default alone inherits the description.
            fields = [getattr(base, "model_fields", {}).get(name) for base in type(values).__mro__]
            meaning = next(
                (field.description for field in fields if field and field.description), ""
            )
            text = f"{_kind(schema)}: {meaning}"
            lines.append(fill(text, 80, initial_indent="      ", subsequent_indent="      "))
    return "\n".join(lines)


def _kind(schema: dict[str, Any]) -> str:
    """What a key takes, from its JSON schema: its choices or its type."""
    kinds = [
        each.get("enum", [each.get("const", each["type"])])
        for each in schema.get("anyOf", [schema])
    ]
    return "|".join(itertools.chain(*kinds))


def _read_file(
    path: Path,
    other_base: str | None = None,
    chosen: Container[str] = (),
    seen: tuple[Path, ...] = (),
) -> tuple[Values, list[dict[str, list[Any]]]]:
    """A file's values on top of its base's, and its own [sweep] sections, an empty one if there is
    none.

    `other_base` takes the place of its own base, of which then no VARIANT_KEYS may be lost but
    those that are `chosen` elsewhere. `seen` are the files that have this one as a base.
    """
    own = read_toml(path, seen)
    base = own.pop("base", None)
    if isinstance(own.get("name"), dict):
        raise UserError(f"{path}: name = a section: expected a string, the name of the run folder")
    sweeps = _sweeps_of(path, own.pop("sweep", {}))
    stated = {key: Stated(value, str(path), path.parent) for key, value in _flatten(own).items()}
    values: Values = {}
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{path}: base = {base!r}: expected the name of a config file")
        base_path = path.parent / os.path.expanduser(base)
        values, _ = _read_file(base_path, seen=(*seen, path.resolve()))
    if other_base is not None:
        before = values
        swept = set.intersection(*map(set, sweeps))
        values, _ = _read_file(Path(os.path.expanduser(other_base)), seen=(path.resolve(),))
        for key, (value, *_) in before.items():
            is_stated = key in stated or key in chosen or key in swept
            if key.startswith(VARIANT_KEYS) and not is_stated and _value(values, key) != value:
                problem = f"{path} would lose {key} = {value!r} of its own base"
                raise UserError(
                    f"--base {other_base}: {problem}; expected it in the file or as an option"
                )
    values.pop("name", None)
    if base is None and {"name", *SECTIONS} <= own.keys():  # a run's config.toml
        values |= BEFORE
    return stated | values | stated, sweeps


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Raises UserError: no file, or no TOML. OSError: it cannot be read."""
    if not path.is_file():  # a pipe would wait for its writer
        raise UserError(f"{path}: no such config file")
    if path.resolve() in seen:
        chain = " -> ".join(file.name for file in (*seen, path.resolve()))
        raise UserError(f"{path}: base files form a cycle: {chain}")
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid TOML: {e}") from None


def _sweeps_of(path: Path, sweep: Any) -> list[dict[str, list[Any]]]:
    sections = sweep if isinstance(sweep, list) else [sweep]  # [[sweep]] or [sweep]
    if not sections or not all(isinstance(section, dict) for section in sections):
        raise UserError(
            f"{path}: sweep = {sweep!r}: expected a section, or several [[sweep]] sections"
        )
    sweeps = [_flatten(section) for section in sections]
    for key, values in itertools.chain(*(section.items() for section in sweeps)):
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: sweep: {key} = {values!r}: expected a list of values")
        if key in ("base", "name", *SECTIONS) or "-" in key:
            expected = "expected keys such as train.seq_len; names of runs follow from their values"
            raise UserError(f"{path}: sweep: {key} = {values!r}: {expected}")
    return sweeps


def _value(values: Values, key: str) -> Any:
    """The given value of a key, or its default."""
    field = field_of(key)
    return values[key].value if key in values else field.default if field else None


# ---------------------------------------------------------------- from what is stated to a Config


def _settle(values: Values) -> Values:
    """With what follows from the sizes of the run: see the top of this file.

    A rise of p that a file states does nothing where p, stated elsewhere, leaves nothing to rise.
    """

    def size(key: str) -> int:
        value = _value(values, key)
        # validation names a bad one
        return value if isinstance(value, int) and 0 < value < 2**63 else 1

    head_dim = max(1, size("model.n_embd") // size("model.n_head"))
    log_len = math.log(max(2, size("train.seq_len")))
    scales = {
        "ln_d_ln_L": math.log(head_dim) * log_len,
        "sqrt_d_over_ln_L": math.sqrt(head_dim) / log_len,
    }

    def settle(key: str, value: Any, folder: Path) -> Any:
        if key == "layers" and isinstance(value, list):
            return [settle("layer", entry, folder) for entry in value]
        if key in ("layer", "attention") and isinstance(value, dict):
            prefix = "attention." if key == "attention" else ""
            return {name: settle(prefix + name, own, folder) for name, own in value.items()}
        if key == "attention.normaliser" and isinstance(value, str):
            beside = str(folder / os.path.expanduser(value))
            value = beside if Path(beside.rpartition(":")[0]).is_file() else value
            with suppress(ValueError):  # which validation raises again
                return identify(value)
        if key in ("attention.scale", "attention.scale_init") and isinstance(value, str):
            if gain := re.fullmatch(r"(\d+\.?\d*) sqrt_d", value):
                return round(float(gain[1]) * math.sqrt(head_dim), 4)
            return round(scales[value], 2) if value in scales else value
        if key == "attention.reweight_p_warmup" and isinstance(value, float) and 0 < value < 1:
            return int(value * size("train.max_steps") + 1e-9)
        return os.path.expanduser(value) if key in PATHS and isinstance(value, str) else value

    settled = {
        key: stated._replace(value=settle(key, stated.value, stated.folder))
        for key, stated in values.items()
    }
    p = settled.get("attention.reweight_p")
    rise = settled.get("attention.reweight_p_warmup")
    if p and rise and p.value in (0, 1) and p.source != rise.source:
        settled["attention.reweight_p_warmup"] = Stated(0, rise.source)
    return settled


def _validate(values: Values, path: str) -> Config:
    """Raises UserError: a line for each problem, with where the last of its keys was stated."""
    nested = _nest(_settle(values))
    try:
        return Config.model_validate(nested)
    except ValidationError as e:
        problems = problems_of(e, nested)
    except RecursionError:
        raise UserError(f"{path}: a value is nested too deeply") from None
    lines = [f"{_source(keys, values, path)}: {line}" for line, keys in problems.items()]
    raise UserError("\n".join(lines))


def _source(keys: list[str], values: Values, path: str) -> str:
    """Where the last of the keys, or of what is in the section of that name, was stated."""
    stated = [own.source for key, own in values.items() if key in keys]
    within = [own.source for key, own in values.items() if key.startswith(f"{keys[0]}.")]
    return [*stated, *within, path][0]


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Sections of keys as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and "." not in key
        inner = {f"{key}.{name}": own for name, own in value.items()} if is_section else {}
        flat |= inner if is_section else {key: value}
    return {key: value for key, value in flat.items() if value not in GONE.get(key, ())}


def _nest(values: Values) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, *_) in values.items():
        section, dot, name = key.partition(".")
        if not dot:
            nested[key] = value
        elif isinstance(nested.setdefault(section, {}), dict):  # else its own value is the problem
            nested[section][name] = value
    return nested


def parse_overrides(args: list[str]) -> dict[str, Any]:
    """Dotted key -> value of each `--section.key value`."""
    values: dict[str, Any] = {}
    rest = list(args)
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
        values[key] = _parse_value(key, text)
    return _flatten(values)


def _parse_value(key: str, text: str) -> Any:
    field = field_of(key)
    is_string = key == "base" or (field is not None and field.annotation is str)
    if is_string and not text.startswith('"'):
        return text  # a run may be called 7 or 2024-11-20
    try:
        value = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")[
            "value"
        ]
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        return text
    return "inf" if value == math.inf else value  # no key takes the number


def _toml_value(value: Any) -> str:
    if isinstance(value, bool | str):  # in these two JSON is TOML, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml_value(own)}' for key, own in value.items())}}}"
    return repr(value)


def list_variant_files() -> str:
    """Each file of configs/variants and the first line of its comment, as a table in Markdown."""
    lines = ["| `configs/variants/` | |", "|---|---|"]
    for path in sorted(VARIANTS.glob("*.toml")):
        comment = path.read_text(encoding="utf-8").split("\n\n")[0]
        words = " ".join(line.removeprefix("# ") for line in comment.splitlines())
        lines.append(f"| `{path.name}` | {words} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] == ["--variants"]:
        print(list_variant_files())
        return
    print(to_toml(parse_command_line(ArgumentParser(__doc__))[0]), end="")


if __name__ == "__main__":
    run_main(main)
