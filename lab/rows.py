"""The rows of several runs, with those of their validations, as one pandas DataFrame."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas

from config import load_config
from evals.rows import FILE, Row, read_table
from infra.files import read_jsonl

VALIDATIONS = {"val_loss", "val_cross_entropy"}  # keys of metrics.jsonl


def read_rows(folders: Iterable[str | Path]) -> pandas.DataFrame:
    """The rows of these run folders, with those of each run's validations: an empty value is NaN.

    A folder without rows adds none. Raises UserError: a run's config.toml cannot be read.
    """
    types: dict[str, Any] = dict.fromkeys(Row._fields, str)
    types |= {
        "seed": int,
        "lr": float,
        "step": int,
        "length": int,
        "block": "Int64",
        "value": float,
    }
    tables = []
    for folder in map(Path, folders):
        if (folder / FILE).exists():
            options = {"keep_default_na": False, "na_values": {"block": [""], "value": [""]}}
            tables.append(read_table(folder / FILE, dtype=types, **options))
        tables.append(pandas.DataFrame(validation_rows(folder), columns=Row._fields).astype(types))
    return pandas.concat(tables, ignore_index=True)


def validation_rows(folder: Path) -> Iterator[Row]:
    """The validations in metrics.jsonl; their text is empty, the first train.val_tokens of the
    config.
    """
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        return
    config = load_config(folder / "config.toml")
    run = (config.name, config.seed, config.optimizer.lr)
    length = config.train.seq_len
    for record in records:
        for measure in sorted(VALIDATIONS & record.keys()):
            yield Row(
                *run, record["step"], "train", "none", "", length, None, measure, record[measure]
            )
