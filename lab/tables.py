"""The papers' tables: which config is which row, and the published numbers; the one writer of
tables.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from config import expand_sweep, load_config
from infra.cli import UserError
from infra.files import read_text
from schema import Config

PAPERS_FOLDER = Path(__file__).resolve().parent / "papers"
CONFIGS = PAPERS_FOLDER.parents[1] / "configs"
DASH = "–"


class TableRow(NamedTuple):
    """One experiment of a paper."""

    keys: tuple[str, ...]  # as in published.toml: the file, and the file with its swept value
    config: Config
    # swept keys of [model], and the steps: a run of this row has the same values
    sizes: dict[str, Any]


def check_ours(report: Path, title: str) -> None:
    """Raises UserError: a file is there that does not begin with the title, so it is not ours to
    replace.
    """
    if report.exists() and not read_text(report).startswith(title):
        raise UserError(
            f"--out {report.parent}: has another {report.name}: expected a new folder or our own"
        )


@cache
def read_rows(folder: str, files: str) -> list[TableRow]:
    """One row for each run that the files configs/<folder>/<name>.toml describe."""
    rows = []
    for name in files.split():
        path = CONFIGS / folder / f"{name}.toml"
        key = f"{folder}/{name}"
        for chosen in expand_sweep(path):
            config = load_config(path, chosen.overrides)
            keys = (key, *(f"{key}: {value}" for value in chosen.swept.values()))
            sizes = {
                k: v for k, v in chosen.swept.items() if k.startswith(("model.", "train.max_steps"))
            }
            rows.append(TableRow(keys, config, sizes))
    return rows


def read_tables() -> dict[str, list[dict[str, Any]]]:
    """Paper -> its tables: title, folder, files; numbers: `where` of those that no config belongs
    to.
    """
    return tomllib.loads((PAPERS_FOLDER / "tables.toml").read_text(encoding="utf-8"))


def all_rows() -> list[TableRow]:
    """The rows of all papers' tables."""
    tables = [table for of_paper in read_tables().values() for table in of_paper]
    return [row for table in tables for row in read_rows(table["folder"], table["files"])]


def read_published() -> pd.DataFrame:
    """A row for each published number: paper, where, unit, source, row, column, printed, config.

    `source` is "" for a paper's text, else whose notes they are. `config` is "" where there is
    none.
    """
    content = tomllib.loads((PAPERS_FOLDER / "published.toml").read_text(encoding="utf-8"))
    papers = []
    for name, entry in content.items():
        whose = {"paper": entry.get("paper", name), "source": entry.get("source", "")}
        papers.append(pd.DataFrame(entry["numbers"]).assign(**whose))
    numbers = pd.concat(papers).explode("values", ignore_index=True)
    columns = ["row", "column", "printed", "config"]
    cells = pd.DataFrame([dict(zip(columns, each, strict=False)) for each in numbers["values"]])
    return numbers[["paper", "where", "unit", "source"]].join(cells.fillna(""))


def markdown(table: pd.DataFrame, n_left: int = 1) -> str:
    """The columns of `table`, the first `n_left` aligned left, the others right; a dash if missing."""
    align = ["---" if i < n_left else "---:" for i in range(len(table.columns))]
    rows = table.astype(object).where(table.notna(), DASH).astype(str).to_numpy().tolist()
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [[*table.columns], align, *rows])


def mean_and_spread(values: pd.Series, digits: int = 4) -> str:
    """'2.5012 ±0.0031': mean and standard deviation; the mean of one value; a dash if one is
    missing.
    """
    if values.isna().any() or values.empty:
        return DASH
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{values.std():.{digits}f}"
