"""Tidy rows: one number of one run a row, in rows.csv of the run folder. Its columns are `Row`'s.

All columns but `value` are a row's key. Writing replaces the rows of the same key and keeps all
others. docs/runs.md reads them with pandas.
"""

import fcntl
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from infra.cli import UserError
from infra.files import write_atomically

FILE = "rows.csv"
FACTORS = (1, 2, 4, 8, 16)  # multiples of the training length at which eval_length.py scores
Cell = tuple[int, int | None, str, float | None]  # length, block, measure and value of a row


class Row(NamedTuple):
    """A measure is loss (all tokens), same_targets[128] (the last 128 of a block), loss[0:128]
    (positions of a window), cut[128] (the last 128 of a block with their context cut at `length`,
    unscaled positions in a row of any RoPE scaling), cut[0:128] (positions of a block), document
    (how many have begun by the end of a block), val_loss, ..."""

    run: str  # name in the run's config
    seed: int
    lr: float  # the peak learning rate
    step: int  # optimiser steps done
    evaluation: str  # the script that measured, such as eval_length
    rope: str  # RoPE scaling: none, ntk, linear, yarn, theta = 500000
    text: str  # what was read, see `text_key`; of another evaluation what its script says
    length: int  # tokens of a window
    block: int | None  # number of a block of the text from 0; empty for means over all of them
    measure: str
    value: float | None  # empty where the model rejects the length or the number is not finite


def text_key(data: dict[str, Any]) -> str:
    """The column `text` of scored blocks, from the key "data" of a result.

    Example: "8f3a01b2c4d5+0x32x4096" is 32 blocks of 4096 tokens of the stream with that sha256
    after its first 0 tokens. Without dataset.json it is a fingerprint.
    """
    identity = identity_of(data["fingerprint"])
    return f"{identity}+{data['skipped_tokens']}x{data['blocks']}x{data['block_length']}"


def identity_of(fingerprint: str) -> str:
    """A stream in the column `text`: "8f3a01b2c4d5" of "sha256 8f3a01b2c4d5...", or its other
    fingerprint.
    """
    return fingerprint.removeprefix("sha256 ")[:12]


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Add rows to the folder's file, in place of those with the same key. The file is written
    atomically.

    Another evaluation that writes there waits (.rows.lock). Raises UserError: it cannot be read or
    written.
    """
    path = folder / FILE
    new = pandas.DataFrame(rows, columns=Row._fields, dtype=object)
    table = new.where(new.notna(), "").astype(str)
    with ExitStack() as stack:
        with suppress(OSError):  # no locks there, or a lock of another user
            fcntl.flock(stack.enter_context(open(folder / ".rows.lock", "ab")), fcntl.LOCK_EX)
        if path.exists():
            old = read_table(path, dtype=str, keep_default_na=False)
            table = pandas.concat([old, table]).drop_duplicates([*Row._fields[:-1]], keep="last")
        write_atomically(path, table.to_csv(index=False, lineterminator="\n").encode())


def read_table(path: Path, **options: Any) -> pandas.DataFrame:
    """A rows.csv. Raises UserError: it is none."""
    try:
        table = pandas.read_csv(path, usecols=Row._fields, skip_blank_lines=False, **options)
    except (OSError, ValueError) as e:  # pandas' own errors are ValueErrors
        raise UserError(
            f"{path}: expected the rows.csv of a run: {' '.join(str(e).split())}"
        ) from None
    is_torn = table["measure"].isna() | (table["measure"] == "")
    if is_torn.any():
        raise UserError(f"{path}: line {2 + is_torn.argmax()}: some of its values are lost")
    return table
