"""The papers' tables: which config is which row (tables.toml), and the published numbers (published.toml)."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from config import expand_sweep, load_config
from schema import Config

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "configs"
PAPERS = ("lssar", "ssmax", "normsoftmax")
DASH = "–"


class TableRow(NamedTuple):
    """One experiment of a paper."""

    keys: tuple[str, ...]  # as in published.toml: the file, and the file with its swept value
    config: Config
    ancestors: tuple[Config, ...]  # what it descends from by init_from
    model_keys: dict[str, Any]  # swept keys of [model]: a run of this row has the same values


def read_rows(folder: str, files: str) -> list[TableRow]:
    """One row for each run that the files configs/<folder>/<name>.toml describe."""
    rows = []
    for name in files.split():
        path, key = CONFIGS / folder / f"{name}.toml", f"{folder}/{name}"
        for chosen in expand_sweep(path):
            config = load_config(path, chosen.overrides)
            ancestors = ancestors_of(config, lambda run: CONFIGS / folder / f"{run.name}.toml")
            keys = [key, *(f"{key}: {value}" for value in chosen.swept.values())]
            model_keys = {k[6:]: value for k, value in chosen.swept.items() if k.startswith("model.")}
            rows.append(TableRow(tuple(keys), config, ancestors, model_keys))
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
    """Paper -> its tables: title, folder and files; numbers: `where` of those that no config belongs to;
    by_steps: the table compares lengths of training."""
    return tomllib.loads((HERE / "papers" / "tables.toml").read_text(encoding="utf-8"))


def read_published() -> dict[str, list[dict[str, Any]]]:
    """Paper -> its numbers: where, row, column, value, printed, unit, line, and config where one fits."""
    content = tomllib.loads((HERE / "papers" / "published.toml").read_text(encoding="utf-8"))
    published: dict[str, list[dict[str, Any]]] = {paper: [] for paper in content}
    for paper, entry in content.items():
        for group in entry["numbers"]:
            for cells in group["values"]:
                number = dict(zip(("row", "column", "printed", "line", "config"), cells, strict=False))
                value = re.match(r"[+-]?[\d.]+", number["printed"])
                assert value, number
                number |= {"where": group["where"], "unit": group["unit"], "value": float(value[0])}
                published[paper].append(number)
    return published


def markdown(header: list[str], rows: Iterable[list[str]], n_left: int) -> str:
    """A table whose first `n_left` columns are aligned left, the others right."""
    align = ["---" if i < n_left else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, align, *rows])


def mean_and_spread(values: list[float], digits: int = 4) -> str:
    """'2.5012 ±0.0031': mean and standard deviation; the mean of one value, a dash for none."""
    mean = f"{statistics.fmean(values):.{digits}f}" if values else DASH
    return f"{mean} ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean
