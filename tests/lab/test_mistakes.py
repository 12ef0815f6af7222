"""Commands of lab/ with damaged files and options that make no sense: one line, nothing written."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import one_line

from benchmarks import mutants
from data.tokenizer import get_tokenizer
from infra.cli import UserError
from lab import needle, replace, squad, text_gain

ROOT = Path(__file__).parents[2]
REPLACE = (replace, "model", "--normaliser", "ssmax", "--val-text", "v")


def test_every_sample_of_the_needle_is_tried_before_the_models():
    """A name of a city may be a letter too long, and none of the first samples has it."""
    tokenizer = get_tokenizer("bytes")
    stream: Any = SimpleNamespace(
        read=lambda start, n: np.zeros(n, np.uint8), n_tokens=9000, folder="data"
    )
    haystack = needle.Haystack(stream, tokenizer)

    def fits(length, index):
        try:
            needle.make_trial(haystack, length, 50, index)
        except UserError:
            return False
        return True

    limit = next(length for length in range(100, 400) if fits(length, 0))
    assert not all(fits(limit, index) for index in range(50))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*REPLACE, "--lr", "-1"), "--lr"),
        ((*REPLACE, "--lr", "nan"), "--lr"),
        ((*REPLACE, "--steps", "-1"), "--steps"),
        ((*REPLACE, "--steps", 0, "--save", "x"), "save"),
        (
            (replace, "m", "--normaliser", "lssa", "--val-text", "v", "--reweight-p-warmup", 9),
            "not raised",
        ),
        ((text_gain, "data", "--out", "/dev/null/x"), "expected a folder that can be written"),
        ((text_gain, "data", "--sees", "window"), "only read with --model"),
        ((squad, "--seq-len", 10**20), "--seq-len"),
        ((needle, "run", "--samples", 10**20), "--samples"),
    ],
)
def test_options_that_make_no_sense(arguments, message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with one_line(message):
        call(*arguments)
    assert not [*tmp_path.iterdir()]


FILES = [*ROOT.glob("lab/*.py"), ROOT / "hub/export.py"]
COMMANDS = [file for file in FILES if "run_main(main)" in file.read_text()]


@pytest.mark.parametrize("file", COMMANDS, ids=lambda file: file.stem)
def test_help(file, call, capsys):
    with pytest.raises(SystemExit) as end:
        call(import_module(f"{file.parent.name}.{file.stem}"), "--help")
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: ") and not printed.err and end.value.code == 0


def test_each_mutant_is_found_once():
    for mutant in mutants.read_list():
        mutant.check()
