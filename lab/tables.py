"""The papers' tables: which config is which row, and the published numbers; the one writer of tables."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from config import expand_sweep, load_config
from schema import Config

PAPERS_FOLDER = Path(__file__).resolve().parent / "papers"
CONFIGS = PAPERS_FOLDER.parents[1] / "configs"
PAPERS = ("lssar", "ssmax", "normsoftmax")
DASH = "–"


class TableRow(NamedTuple):
    """One experiment of a paper."""

    keys: tuple[str, ...]  # as in published.toml: the file, and the file with its swept value
    config: Config
    ancestors: tuple[Config, ...]  # what it descends from by init_from
    sizes: dict[str, Any]  # swept keys of [model], and the steps: a run of this row has the same values


def read_rows(folder: str, files: str) -> list[TableRow]:
    """One row for each run that the files configs/<folder>/<name>.toml describe."""
    rows = []
    for name in files.split():
        path = CONFIGS / folder / f"{name}.toml"
        key = f"{folder}/{name}"
        for chosen in expand_sweep(path):
            config = load_config(path, chosen.overrides)
            ancestors = ancestors_of(config, lambda run: CONFIGS / folder / f"{run.name}.toml")
            keys = (key, *(f"{key}: {value}" for value in chosen.swept.values()))
            sizes = {
                k: v for k, v in chosen.swept.items() if k.startswith("model.") or k == "train.max_steps"
            }
            rows.append(TableRow(keys, config, ancestors, sizes))
    return rows


def ancestors_of(config: Config, find: Callable[[Path], Path | None]) -> tuple[Config, ...]:
    """The configs of the runs that init_from leads back to, the newest first, as far as they are found.

    Args:
        find: from a run's folder to its config file.
    """
    ancestors: list[Config] = []
    while config.init_from:
        source = Path(config.init_from)
        path = find(source.parent.parent if source.suffix == ".pt" else source)  # runs/a/checkpoints/x.pt
        if path is None:
            break
        config = load_config(path)
        ancestors.append(config)
    return tuple(ancestors)


def read_tables() -> dict[str, list[dict[str, Any]]]:
    """Paper -> its tables: title, folder, files; numbers: `where` of those that no config belongs to."""
    return tomllib.loads((PAPERS_FOLDER / "tables.toml").read_text(encoding="utf-8"))


def read_published() -> pd.DataFrame:
    """A row for each published number: paper, where, unit, row, column, printed, and config or ""."""
    content = tomllib.loads((PAPERS_FOLDER / "published.toml").read_text(encoding="utf-8"))
    numbers = [
        [paper, group["where"], group["unit"], *cells, *[""] * (4 - len(cells))]
        for paper, entry in content.items()
        for group in entry["numbers"]
        for cells in group["values"]
    ]
    columns = ["paper", "where", "unit", "row", "column", "printed", "config"]
    return pd.DataFrame(numbers, columns=columns)


def markdown(table: pd.DataFrame, n_left: int = 1) -> str:
    """The columns of `table`, the first `n_left` aligned left, the others right; a dash if missing."""
    align = ["---" if i < n_left else "---:" for i in range(len(table.columns))]
    rows = table.astype(object).where(table.notna(), DASH).astype(str).to_numpy().tolist()
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [[*table.columns], align, *rows])


def mean_and_spread(values: pd.Series, digits: int = 4) -> str:
    """'2.5012 ±0.0031': mean and standard deviation; the mean of one value; a dash if one is missing."""
    if values.isna().any() or values.empty:
        return DASH
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{values.std():.{digits}f}"
