"""The papers' tables: which config is which row (tables.toml), and the published numbers (published.toml)."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from config import Config, expand_sweep, load_config

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "configs"
PAPERS = ("lssar", "ssmax", "normsoftmax")


class TableRow(NamedTuple):
    """One experiment of a paper."""

    keys: tuple[str, ...]  # as in published.toml: the file, and the file with its swept value
    config: Config
    model_keys: dict[str, Any]  # swept keys of [model]: a run of this row has the same values


def read_rows(folder: str, files: str) -> list[TableRow]:
    """One row for each run that the files configs/<folder>/<name>.toml describe."""
    rows = []
    for name in files.split():
        path, key = CONFIGS / folder / f"{name}.toml", f"{folder}/{name}"
        for overrides in expand_sweep(path):
            config = load_config(path, overrides)
            swept = dict(zip(overrides[:-2:2], overrides[1:-2:2], strict=True))  # --key: value as in TOML
            keys = [key, *(f"{key}: {json.loads(value)}" for value in swept.values())]
            model_keys = [option[8:] for option in swept if option.startswith("--model.")]
            rows.append(TableRow(tuple(keys), config, {k: getattr(config.model, k) for k in model_keys}))
    return rows


def read_tables() -> dict[str, list[dict[str, str]]]:
    """Paper -> its tables, each with title, folder and files."""
    return tomllib.loads((HERE / "tables.toml").read_text(encoding="utf-8"))


def read_published() -> dict[str, list[dict[str, Any]]]:
    """Paper -> its numbers: where, row, column, value, printed, unit, line, and config where one fits."""
    content = tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))
    return {paper: entry["number"] for paper, entry in content.items()}
