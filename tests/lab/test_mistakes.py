"""Commands of lab/ with damaged files and options that make no sense: one line, nothing written."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import make_byte_run, one_line

from benchmarks import mutants
from config import to_toml
from data.tokenizer import get_tokenizer
from infra.cli import UserError
from lab import compare, comparison, needle, replace, report, squad, text_gain
from training.checkpoint import read_config

ROOT = Path(__file__).parents[2]
HEADER = "run,seed,lr,step,evaluation,rope,text,length,block,measure,value"


def finished_run(tiny_config: Path) -> Path:
    folder = make_byte_run(tiny_config, "--name", "bytes")
    (folder / "config.toml").write_text(to_toml(read_config(folder)[0]))
    (folder / "metrics.jsonl").write_text('{"step": 12, "val_loss": 2.0}\n')
    return folder


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("metrics.jsonl", line) for line in ("3", "[]", "null")),
        *(
            ("rows.csv", text)
            for text in (
                "",
                "a,b\n1,2\n",
                f"{HEADER}\nmy\n",
                f"{HEADER}\na,b,c,d,e,f,g,h,i,j,k\n",
                "\x00",
            )
        ),
        *(("config.toml", text) for text in ("", "{", "name = 3", "[model]\nwidth = 8\n")),
    ],
)
def test_damaged_run_files(file: str, content: str, tiny_config: Path, call: Callable[..., None]):
    folder = finished_run(tiny_config)
    (folder / file).write_text(content)
    with pytest.raises(UserError) as error:
        call(report, folder, "--out", tiny_config.with_name("out"))
    assert "\n" not in str(error.value) and not tiny_config.with_name("out").exists()


def test_lost_metrics_are_named(tiny_config: Path, call: Callable[..., None], capsys):
    folder = finished_run(tiny_config)
    (folder / "metrics.jsonl").unlink()
    (folder / "starts.jsonl").touch()
    with one_line("no finished run in these folders"):
        call(report, folder)
    assert f"{folder}: metrics.jsonl is lost, and the last loss with it" in capsys.readouterr().out
    (folder / "starts.jsonl").unlink()  # as in a folder that lab.import_ wrote
    with one_line("no finished run in these folders"):
        call(report, folder)
    assert "is lost" not in capsys.readouterr().out


@pytest.mark.parametrize("longest", [4, 16, 64])
def test_the_longest_length_is_labelled_as_what_it_is(longest: int):
    assert comparison.end_labels(pd.DataFrame({"factor": [1.0, 2.0, longest]})) == [
        "1x",
        f"{longest}x",
    ]


def test_recall_of_a_variant_that_rejects_longer_texts(tiny_config: Path):
    """ssmax_pn is evaluated up to T alone. Evaluated only beyond T it has no share at all."""
    folder = finished_run(tiny_config)
    result = {"rope": {"kind": "ntk", "theta": None}, "tasks": ["copy"], "step": 12}
    rejected = {"length": 64, "reason": "ssmax_pn ends at 16"}
    (folder / "eval_recall.json").write_text(json.dumps(result | {"lengths": [rejected]}))
    assert [*comparison.recalls_of(folder)] == []

    share = {"tokens": {"share": 0.5}}
    lengths = [{"length": 16, "reason": None, "copy": share, "mean": share}, rejected]
    (folder / "eval_recall.json").write_text(json.dumps(result | {"lengths": lengths}))
    (record,) = comparison.recalls_of(folder)
    shares = {"16": 0.4, "64": 0.2}
    longer = record | {"contestant": "softmax", "shares": dict.fromkeys(("copy", "mean"), shares)}
    assert comparison.recall_table([longer, record]).index.tolist() == ["softmax"]


def test_every_sample_of_the_needle_is_tried_before_the_models():
    """A name of a city may be a letter too long, and none of the first samples has it."""
    tokenizer = get_tokenizer("bytes")
    stream: Any = SimpleNamespace(
        read=lambda start, n: np.zeros(n, np.uint8), n_tokens=9000, folder="data"
    )
    haystack = needle.Haystack(stream, tokenizer)

    def fits(length: int, index: int) -> bool:
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
        ((replace, "model", "--normaliser", "ssmax", "--val-text", "v", "--lr", "-1"), "--lr"),
        ((replace, "model", "--normaliser", "ssmax", "--val-text", "v", "--lr", "nan"), "--lr"),
        (
            (replace, "model", "--normaliser", "ssmax", "--val-text", "v", "--steps", "-1"),
            "--steps",
        ),
        (
            (
                replace,
                "model",
                "--normaliser",
                "ssmax",
                "--val-text",
                "v",
                "--steps",
                0,
                "--save",
                "x",
            ),
            "save",
        ),
        (
            (replace, "m", "--normaliser", "lssa", "--val-text", "v", "--reweight-p-warmup", 9),
            "not raised",
        ),
        ((text_gain, "data", "--out", "/dev/null/x"), "expected a folder that can be written"),
        ((text_gain, "data", "--sees", "window"), "only read with --model"),
        ((compare, "mine.toml", "--optimizer.lr", "1e-3"), "--optimizer.lr: expected --rates"),
        ((compare, "mine.toml", "--log.dir", "x"), "--log.dir: expected --out"),
        ((squad, "--seq-len", 10**20), "--seq-len"),
        ((needle, "run", "--samples", 10**20), "--samples"),
    ],
)
def test_options_that_make_no_sense(
    arguments: tuple[Any, ...], message: str, call: Callable[..., None], tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with one_line(message):
        call(*arguments)
    assert not [*tmp_path.iterdir()]


def test_reports_of_another_kind_are_spared(
    tmp_path: Path, tiny_config: Path, call: Callable[..., None]
):
    mine = tmp_path / "README.md"
    mine.write_text("mine")
    with one_line(tmp_path, "has another README.md"):
        call(compare, "mine.toml", "--out", tmp_path)
    with one_line(tmp_path, "has another README.md"):
        call(report, "--comparison", "--out", tmp_path)
    (tmp_path / report.RECORDS).touch()
    with one_line(tmp_path, "expected --papers"):
        call(report, finished_run(tiny_config), "--out", tmp_path)
    (tmp_path / report.RECORDS).unlink()
    (tmp_path / "report.md").write_text("mine")
    with one_line(tmp_path, "has another report.md"):
        call(report, finished_run(tiny_config), "--out", tmp_path)
    assert not [*tmp_path.glob("*.png")]
    assert mine.read_text() == "mine"


RECALL = {"step": 12, "rope": {"kind": "ntk", "theta": None}, "tasks": ["copy"]}
ENTRY = {
    "length": 16,
    "reason": None,
    "copy": {"tokens": {"share": 0.5}},
    "mean": {"tokens": {"share": 0.5}},
}


LENGTHS: list[Any] = [None, 3, {"a": 1}, [3], [{}], [{"reason": None}], [ENTRY | {"copy": {}}]]
TASKS: list[Any] = ["copy", None, [[]], ["query"]]
DAMAGES: list[dict[str, Any]] = [
    *(
        {"lengths": lengths}
        for lengths in [*LENGTHS, [ENTRY | {"mean": {"tokens": {"share": "x"}}}]]
    ),
    *({"lengths": [ENTRY], "tasks": tasks} for tasks in TASKS),
    *(
        {"lengths": [ENTRY], "rope": rope}
        for rope in ("ntk", {"kind": "ntk"}, {"kind": 3, "theta": "x"})
    ),
    {},
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_results_of_recall(damage: dict[str, Any], tiny_config: Path):
    path = finished_run(tiny_config) / "eval_recall.json"
    path.write_text(json.dumps(RECALL | damage))
    with one_line(path):
        [*comparison.recalls_of(path.parent)]


@pytest.mark.parametrize(
    "content",
    ["3", "[]", '{"softmax": "x"}', '{"softmax": 0}', '{"softmax": NaN}', '{"softmax": null}', "["],
)
def test_damaged_costs_of_a_step(content: str, tmp_path: Path):
    (tmp_path / "train_step.json").write_text(content)
    with one_line(tmp_path / "train_step.json"):
        [*comparison.costs_of(tmp_path)]


FILES = [*ROOT.glob("lab/*.py"), ROOT / "hub/export.py"]
COMMANDS = [file for file in FILES if "run_main(main)" in file.read_text()]


@pytest.mark.parametrize("file", COMMANDS, ids=lambda file: file.stem)
def test_help(file: Path, call, capsys):
    with pytest.raises(SystemExit) as end:
        call(import_module(f"{file.parent.name}.{file.stem}"), "--help")
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: ") and not printed.err and end.value.code == 0


def test_each_mutant_is_found_once():
    for mutant in mutants.read_list():
        mutant.check()
