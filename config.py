"""The typed config: a TOML file plus `--section.key value` overrides become one frozen `Config`.

    python config.py configs/lssar.toml --attention.reweight-p 3    # print the resolved config
    python config.py --help                                        # every key, its meaning, its default

A file may start with `base = "other.toml"` (relative to itself, any depth) and then lists only what
it changes. A file with a [sweep] section describes several runs, one for each combination of its values:
`"attention.reweight_p" = [1, 3, 15]`. Several [[sweep]] sections describe the runs of each.

Files are data: nothing in them is executed. Every problem is reported at once, one line each, naming the
file or override, the key, its value and what was expected.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.cli import ArgumentParser, UserError, run_main
from normalisers.base import NORMALISERS, Normaliser
from schema import SECTIONS, AttentionConfig, Config, Section, makes_another_run, problems_of

# ---------------------------------------------------------------- reading and writing

Values = dict[str, tuple[Any, str]]  # dotted key -> (value, the file or "command line" that it is from)


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
    values, sweeps = _read_file(path, ())
    values.setdefault("name", (path.stem, str(path)))
    chosen = parse_overrides(overrides or [])
    values |= {key: (value, "command line") for key, value in chosen.items()}
    missing = [sorted(sweep.keys() - chosen.keys()) for sweep in sweeps]
    if all(missing):
        options = ", or by ".join(" ".join(f"--{key} ..." for key in keys) for keys in missing)
        raise UserError(f"{path}: describes a sweep: python sweep.py {path}, or choose one run by {options}")
    return _validate(values, str(path))


def expand_sweep(path: str | Path, overrides: list[str] | None = None) -> list[list[str]]:
    """The overrides of each run that a file's [sweep] describes; without a [sweep], none for one run.

    Several keys give their product, the last one fastest; several [[sweep]] sections follow each other. A run
    is called <file's stem>_<key>=<value>.

    Args:
        overrides: keys that they set are not swept.
    Raises:
        UserError: the file cannot be read, or a key has no list of values.
    """
    path, chosen = Path(path), parse_overrides(overrides or [])
    runs = []
    for sweep in _read_file(path, ())[1]:
        left = [[(key, value) for value in values] for key, values in sweep.items() if key not in chosen]
        runs += [_sweep_run(path.stem, pairs) for pairs in itertools.product(*left)]
    return [run for i, run in enumerate(runs) if run not in runs[:i]]  # overrides may make them equal


def _sweep_run(stem: str, pairs: tuple[tuple[str, Any], ...]) -> list[str]:
    """The overrides of one run of a [sweep], its name among them; none if nothing is swept."""
    if not pairs:
        return []
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in pairs]
    name = re.sub(r"[^A-Za-z0-9._=+-]", "-", "_".join([stem, *parts]))
    return [text for key, value in pairs for text in (f"--{key}", _toml_value(value))] + ["--name", name]


def config_from_dict(values: dict[str, Any], source: str) -> Config:
    """The inverse of `Config.model_dump()`, for configs kept in checkpoints.

    Raises:
        UserError: naming `source`, for each key that this version of the code does not accept.
    """
    return _validate({key: (value, source) for key, value in _flatten(values).items()}, source)


def to_toml(config: Config) -> str:
    """The resolved config as a TOML file that `load_config` reads back to an equal `Config`."""
    lines, sections = [], []
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            sections += ["", f"[{key}]", *(f"{k} = {_toml_value(v)}" for k, v in value.items())]
        else:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines + sections) + "\n"


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with (old value, new value)."""
    a, b = _flatten(old.model_dump()), _flatten(new.model_dump())
    return {key: (a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key)}


def same_run(first: Config, second: Config, *other: str) -> bool:
    """Whether the configs differ only in `other` and in keys that do not affect the loss curve."""
    return not any(map(makes_another_run, changed_keys(first, second).keys() - {*other}))


def parse_command_line(parser: ArgumentParser) -> tuple[Config, argparse.Namespace]:
    """`script CONFIG.toml [--section.key value ...] [the parser's own flags]`.

    --help prints the parser's flags, then every key with its type, its value (that of the file, if one is
    named) and its meaning, and exits with status 0.

    Returns:
        The config, and the values of the parser's own flags.
    Raises:
        UserError: no config file, or a problem with it or with an override.
    """
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the config file")
    parser.usage = "%(prog)s CONFIG.toml [--section.key VALUE ...] [options]"
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    if {"-h", "--help"} & set(sys.argv[1:]):
        files = [arg for arg in sys.argv[1:] if arg.endswith(".toml")]
        config = load_config(files[0], expand_sweep(files[0])[0]) if files else Config(name="CONFIG")
        print(f"{parser.format_help()}\n{describe_keys(config)}")
        sys.exit(0)
    args, overrides = parser.parse_known_args()
    if not named:
        raise UserError(f"expected a config file: {parser.prog} configs/lssar.toml (or --help)")
    return load_config(args.config, overrides), args


def describe_keys(config: Config) -> str:
    """Each key as "--section.key  TYPE = VALUE" and its meaning, the normaliser's options included."""
    lines = ["config keys (in the file, or as options) and their values:"]
    sections: dict[str, type[Section]] = {"": Config, **SECTIONS}
    for section, cls in sections.items():
        values = getattr(config, section) if section else config
        definition = type(values.definition) if isinstance(values, AttentionConfig) else None
        fields = cls.model_fields | (definition.model_fields if definition else {})
        for name, field in fields.items():
            if name not in SECTIONS:
                option = f"--{section}.{name}".replace("--.", "--").replace("_", "-")
                pattern = r"<class '(\w+)'>|typing\.|Annotated\[(\w+)[^\]]*\]"
                kind = re.sub(pattern, r"\1\2", str(field.annotation))
                meaning = field.description or _inherited_meaning(definition, name)
                meaning += f" One of {', '.join(NORMALISERS)}." * (name == "normaliser")
                lines.append(f"\n  {option}  {kind} = {getattr(values, name)!r}\n      {meaning}")
    return "\n".join(lines)


def _inherited_meaning(definition: type[Normaliser] | None, name: str) -> str:
    """The description of an option whose class states another default alone."""
    bases = definition.__mro__ if definition else ()
    fields = (base.model_fields.get(name) for base in bases if issubclass(base, Normaliser))
    return next((field.description for field in fields if field and field.description), "")


def _read_file(path: Path, seen: tuple[Path, ...]) -> tuple[Values, list[dict[str, list[Any]]]]:
    """A file's values on top of its bases', and its own [sweep] sections: an empty one if there is none."""
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

    base, sweep = own.pop("base", None), own.pop("sweep", {})
    values: Values = {}
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"{path}: base = {base!r}: expected the name of a config file")
        values, _ = _read_file(path.parent / base, (*seen, path.resolve()))
        values.pop("name", None)
    values |= {key: (value, str(path)) for key, value in _flatten(own).items()}
    sections = sweep if isinstance(sweep, list) else [sweep]
    if not sections or not all(isinstance(section, dict) for section in sections):
        raise UserError(f"{path}: sweep = {sweep!r}: expected a section, or several [[sweep]] sections")
    sweeps = [_flatten(section) for section in sections]
    for key, value in (item for section in sweeps for item in section.items()):
        if not isinstance(value, list) or not value:
            raise UserError(f"{path}: sweep: {key} = {value!r}: expected a list of values")
    return values, sweeps


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _nest(values: Values) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, _) in values.items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            if not isinstance(inner.get(section), dict):  # overwritten; validation reports it
                inner[section] = {}
            inner = inner[section]
        inner[name] = value
    return nested


def parse_overrides(args: list[str]) -> dict[str, Any]:
    values, rest = {}, list(args)
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
    section, _, name = key.rpartition(".")
    field = SECTIONS.get(section, Config).model_fields.get(name)
    if field is not None and field.annotation is str and not text.startswith('"'):
        return text  # a run may be called 7 or 2024-11-20
    try:
        value = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return "inf" if value == math.inf else value  # no key takes the number


def _toml_value(value: Any) -> str:
    if isinstance(value, bool | str):  # in these two JSON is TOML
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


# ---------------------------------------------------------------- every problem at once


def _validate(values: Values, path: str) -> Config:
    """The `Config`, or a UserError with every problem: those of single keys, then, with the offending
    keys taken out, those between keys."""
    lines: list[str] = []
    bad: list[str] = []
    while True:
        try:
            config = Config.model_validate(_nest(values))
            break
        except ValidationError as e:
            found = problems_of(e, "", Config)
            lines += [
                f"{_source(text.split(' ')[0], values, path)}: {text}"
                for _, text in found
                if not any(f"{key} " in text for key in bad)  # a problem with the default in its place
            ]
            bad += [key for key, _ in found if key]
            if not any(key for key, _ in found):
                break
            values = {k: v for k, v in values.items() if not any(f"{k}.".startswith(f"{b}.") for b in bad)}
            values.setdefault("name", ("unnamed", path))
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return config


def _source(dotted: str, values: Values, path: str) -> str:
    """Where a key, or the first key of a section, was written."""
    keys = [dotted] if dotted in values else [key for key in values if key.startswith(f"{dotted}.")]
    return values[keys[0]][1] if keys else path


def main() -> None:
    print(to_toml(parse_command_line(ArgumentParser(__doc__))[0]), end="")


if __name__ == "__main__":
    run_main(main)
