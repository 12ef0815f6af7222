"""python -m lab.report --comparison: records, choice of RoPE scaling and rate, paired differences."""

import csv
import itertools
import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from config import load_config, to_toml
from evals.rows import Row, write_rows
from infra.cli import UserError
from infra.files import read_jsonl
from lab import comparison, report

TEXT_KEY = "0123456789ab+0x8x32"  # eight blocks of 32 tokens
UNSEEN_KEY = "0123456789ab+256x8x32"
RESULTS = Path(__file__).parents[2] / "results/comparison"
# Losses of eight blocks: they differ more than the variants.
TEXT = [2.0, 1.0, 3.0, 1.5, 2.5, 1.2, 2.8, 2.0]
NOISE = [0.0, 0.0, 0.01, -0.01, 0.01, -0.01, 0.01, -0.01]


def leave_run(
    folder: Path,
    config_path: Path,
    name: str,
    lr: float,
    offsets: dict[str, list[float]],
    text: str = TEXT_KEY,
    options: Iterable[str] = (),
) -> None:
    """A finished run with losses `offsets[rope]` above TEXT, at 1x, 2x, ..."""
    settings = ["--name", name, "--log.dir", str(folder), "--optimizer.lr", str(lr), *options]
    config = load_config(config_path, settings)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(to_toml(config))
    step = config.train.max_steps
    (config.run_dir / "metrics.jsonl").write_text(
        json.dumps({"step": step, "val_loss": 2 + lr}) + "\n"
    )
    for rope, each in offsets.items():
        for i, offset in enumerate(each):
            losses = [loss + offset + noise for loss, noise in zip(TEXT, NOISE, strict=True)]
            leave_losses(config.run_dir, rope, 2**i, losses, text)


def leave_losses(run: Path, rope: str, factor: int, losses: list[float], text: str) -> None:
    """The rows of an evaluation at one length."""
    config = load_config(run / "config.toml")
    where = (config.train.max_steps, "eval_length", rope, text, factor * config.train.seq_len)
    names = ("loss", f"same_targets[{config.train.seq_len}]")
    measures: list[Any] = [
        (block, name, loss) for name in names for block, loss in enumerate(losses)
    ]
    measures += [(None, "loss[0:16]", 2.0), (None, "loss[16:32]", 3.0)]
    rows = [
        Row(config.name, config.seed, config.optimizer.lr, *where, *measure) for measure in measures
    ]
    write_rows(run, rows)


def table_rows(folder: Path) -> list[list[str]]:
    """The rows of all tables, of README.md and of the CSV files."""
    lines = (folder / "README.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return rows + [row for path in sorted(folder.glob("*.csv")) for row in csv.reader(path.open())]


@pytest.mark.slow
def test_committed_tables_come_out_of_the_committed_records(tmp_path, call, no_drawing):
    for path in [*RESULTS.glob("*.jsonl"), RESULTS / "findings.md"]:
        shutil.copy(path, tmp_path)
    call(report, "--comparison", "--out", tmp_path)
    assert table_rows(tmp_path) == table_rows(RESULTS)
    assert (RESULTS / "findings.md").read_text() in (RESULTS / "README.md").read_text()


@pytest.fixture
def runs(tiny_config, tmp_path) -> Path:
    """Softmax in two seeds, LSSA at two rates."""
    runs = tmp_path / "runs/comparison_A"
    for seed, shift in ((1, -0.1), (2, 0.1)):
        seeded = tmp_path / f"seed_{seed}.toml"
        seeded.write_text(f'base = "{tiny_config}"\nseed = {seed}\n')
        losses = {"ntk": [shift, 0.5 + shift], "none": [shift, 0.9 + shift]}
        leave_run(runs, seeded, f"softmax_seed={seed}", 0.002, losses)
    leave_run(runs, tiny_config, "lssa", 0.002, {"ntk": [0.2, 0.4], "none": [0.2, 0.3]})
    # Half the rate is better at 16x, and 1x chooses.
    leave_run(tmp_path / "runs/comparison_A_half", tiny_config, "lssa", 0.001, {"ntk": [0.3, 0.1]})
    return runs


def test_comparison_from_runs_and_again_without_them(runs, tiny_config, tmp_path, call):
    out = tmp_path / "results"
    step = load_config(tiny_config).train.max_steps
    recall = {"rope": {"kind": "ntk", "theta": None}, "tasks": ["copy"], "step": step}
    for seed, share in ((1, 0.2), (2, 0.3)):
        name = f"lssa_seed={seed}"
        shares = {"tokens": {"share": share}}
        recall["lengths"] = [{"length": 64, "reason": None, "copy": shares, "mean": shares}]
        leave_run(
            tmp_path / "runs/comparison_recall", tmp_path / f"seed_{seed}.toml", name, 0.1, {}
        )
        (tmp_path / f"runs/comparison_recall/{name}/eval_recall.json").write_text(
            json.dumps(recall)
        )
        recall["lengths"] = [{"length": 4096, "reason": None, "copy": shares, "mean": shares}]
        (tmp_path / f"runs/comparison_recall/{name}/eval_recall_long.json").write_text(
            json.dumps(recall)
        )
    # Text on which nothing was chosen: all of its blocks count. A step's cost.
    for run, loss in (("softmax_seed=1", 3.0), ("softmax_seed=2", 5.0), ("lssa", 4.5)):
        for rope, factor in itertools.product(("none", "ntk"), (1, 2)):
            leave_losses(runs / run, rope, factor, [loss - 7] + 7 * [loss + 1], UNSEEN_KEY)
    (runs / "train_step.json").write_text(json.dumps({"lssa": 2.5, "softmax": 2.0}))
    call(
        report,
        "--comparison",
        runs,
        f"{runs}_half",
        tmp_path / "runs/comparison_recall",
        "--out",
        out,
    )
    rows = table_rows(out)
    mean = sum(TEXT[2:]) / 6  # two of eight blocks choose the RoPE scaling
    softmax, lssa = (
        next(r for r in rows if r[0] == name and len(r) > 6) for name in ("softmax", "lssa")
    )
    assert softmax[1:4] == ["ntk", "2", "0.002*"] and lssa[1:4] == ["none", "1", "0.002"]
    assert softmax[4:6] == [f"{mean:.3f} ±0.141", f"{mean + 0.5:.3f} ±0.141"]
    assert lssa[4:6] == [f"{mean + 0.2:.3f}", f"{mean + 0.3:.3f}"] and lssa[6] == "0.100"
    # The same text and noise: the paired error vanishes, though the blocks differ by 0.7.
    assert lssa[-4:] == ["+0.200 ±0.000", "-0.200 ±0.000", "–", "1.25"]  # no verdict of one seed
    (unseen,) = (row for row in rows if row[0] == "lssa" and row[4:5] == ["4.500"])
    assert unseen[-3:] == [*2 * ["+0.500 ±0.000"], "–"]
    ends = [f"{mean + 0.3:.3f}", f"{mean + 0.2:.3f}", f"{mean + 0.1:.3f}", f"{mean + 0.3:.3f}"]
    assert ["lssa", *ends] in rows  # at both rates
    assert ["lssa", "ntk", "2", *3 * ["25 ±7"]] in rows  # of two evaluations
    # both ends and recall
    assert ["lssa", f"{mean + 0.2:.3f}", f"{mean + 0.3:.3f}", "25 ±7"] in rows
    text = (out / "README.md").read_text()
    assert "One seed moves a loss by 0.141 at 1x and 0.141 at 2x" in text and "16x" not in "".join(
        rows[0]
    )
    for picture in ("A_plane.png", "A_lengths.png", "A_positions.png"):
        assert (out / picture).read_bytes()[:4] == b"\x89PNG" and picture in text
    (record,) = (r for r in read_jsonl(out / "A.jsonl") if r["kind"] == "run" and r["which"] == 1)
    assert record["positions"]["none"] == [[0, 16, 2.0], [16, 32, 3.0]]

    shutil.rmtree(tmp_path / "runs")
    call(report, "--comparison", "--out", out)
    assert (out / "README.md").read_text() == text and table_rows(out) == rows
    assert len(read_jsonl(out / "A.jsonl")) == 6


def test_errors_are_paired_over_text():
    def losses(
        name: str, *seeds: list[float], trainings: list[float] | None = None
    ) -> pd.DataFrame:
        records = []
        for i, offsets in enumerate(seeds):
            blocks = [loss + offset for loss, offset in zip(TEXT, offsets, strict=True)]
            record = {
                "contestant": name,
                "which": i,
                "lr": 0.1,
                "lengths": {"ntk": {"16": [blocks, blocks]}},
            }
            records.append(record | {"validations": trainings[i] if trainings else [name, i]})
        return comparison.tidy(records).query("block >= 2")

    def difference(*parts: pd.DataFrame) -> str:
        return comparison.difference(pd.concat(parts), "old", "new", 16)

    zero = losses("old", [0] * 8)
    mixed = losses("new", [9, 9, 1, 2, 1, 2, 1, 2])
    assert difference(zero, mixed) == f"+1.500 ±{math.sqrt(0.3 / 6):.3f}"
    assert difference(zero, losses("new", [0] * 8)) == "+0.000 ±0.000"
    # Seed 0 is one training under two length scales: seed 1, which only one has, is left out.
    old = losses("old", [0] * 8, [4] * 8, trainings=[1.0, 2.0])
    assert difference(old, losses("new", [1] * 8, trainings=[1.0])) == "+1.000 ±0.000"


def test_the_spread_of_seeds_is_pooled_by_degrees_of_freedom():
    """Variances 2 of one degree and 9 of two; d has b's trainings and counts no more, c has one
    seed.
    """
    seeds = {"a": [0.0, 2.0], "b": [0.0, 3.0, 6.0], "c": [1.0], "d": [0.0, 3.0, 6.0]}
    rows = [
        (name, seed, f"{name.replace('d', 'b')}{seed}", length, length / 16, 0, loss * factor)
        for name, losses in seeds.items()
        for seed, loss in enumerate(losses)
        for length, factor in ((16, 1), (256, 2))
    ]
    columns = ["variant", "seed", "training", "length", "factor", "block", "loss"]
    text = comparison.seed_text(pd.DataFrame(rows, columns=columns))
    assert "by 2.582 at 1x and 5.164 at 16x" in text  # ((2 + 2 * 9) / 3) ** 0.5


def test_what_three_seeds_show_at_1x(tiny_config, tmp_path, call, no_drawing):
    """A variant that is 0.001 above the baseline in every seed is level, one that is 0.2 below it
    lower.
    """
    runs = tmp_path / "comparison_A"
    for seed, of_seed in ((1, 0.0), (2, 0.3), (3, -0.1)):
        config = tmp_path / f"seed_{seed}.toml"
        config.write_text(f'base = "{tiny_config}"\nseed = {seed}\n')
        for name, offset in (("softmax", 0.0), ("lssa", 0.001), ("ssmax", -0.2)):
            leave_run(runs, config, f"{name}_seed={seed}", 0.1, {"ntk": [of_seed + offset] * 2})
    call(report, "--comparison", runs, "--out", tmp_path)
    rows = {row[0]: row for row in table_rows(tmp_path) if len(row) > 7}
    assert rows["variant"][-1] == "1x, margin 0.01"
    assert [rows[name][-1] for name in ("softmax", "lssa", "ssmax")] == ["–", "level", "lower"]


def test_a_table_without_the_baseline(tiny_config, tmp_path, call, no_drawing):
    """As lab.compare --fresh draws one: differences and verdicts are dashes."""
    leave_run(tmp_path / "comparison_A", tiny_config, "ssmax_seed=1", 0.1, {"ntk": [0.0, 1.0]})
    call(report, "--comparison", tmp_path / "comparison_A", "--out", tmp_path)
    (row,) = (row for row in table_rows(tmp_path) if row[0] == "ssmax" and len(row) > 7)
    assert row[-3:] == ["–", "–", "–"]


def test_lengths_without_a_loss_are_dashes(tiny_config, tmp_path, call, no_drawing):
    """A scaling with a loss at 16x is chosen; seeds without one leave a dash, and the rest of the
    table.
    """
    runs = tmp_path / "comparison_A"
    nan = math.nan
    leave_run(runs, tiny_config, "softmax_seed=1", 0.1, {"ntk": [0.0, 1.0], "none": [0.0, nan]})
    leave_run(runs, tiny_config, "ssmax_seed=1", 0.1, {"ntk": [0.0, nan], "none": [0.0, nan]})
    only_pn = tmp_path / "comparison_B"
    leave_run(only_pn, tiny_config, "ssmax_pn", 0.1, {})
    leave_losses(only_pn / "ssmax_pn", "ntk", 2, [nan] * 8, TEXT_KEY)
    with pytest.raises(UserError, match="comparison_B: expected evaluated runs, found none"):
        call(report, "--comparison", only_pn, "--out", tmp_path)
    other_seed = tmp_path / "seed_2.toml"
    other_seed.write_text(f'base = "{tiny_config}"\nseed = 2\n')
    leave_run(runs, other_seed, "ssmax_seed=2", 0.2, {"ntk": [1.0, nan], "none": [1.0, nan]})
    # evaluated beyond T alone, which it rejects
    leave_run(runs, tiny_config, "ssmax_pn_seed=1", 0.1, {})
    leave_losses(runs / "ssmax_pn_seed=1", "ntk", 2, [nan] * 8, TEXT_KEY)
    call(report, "--comparison", runs, "--out", tmp_path)
    rows = {row[0]: row for row in table_rows(tmp_path) if len(row) > 7}
    assert rows["softmax"][1] == "ntk" and rows["ssmax"][5:] == [*"–––", "+0.000 ±0.000", "–", "–"]


def test_rates_compare_on_shared_seeds_and_scalings():
    """Rate 2 is better on seed 1, which both have; rate 1's second seed does not count."""
    choices = pd.DataFrame(
        [("a", 1, "ntk", 1, 2.0, 3.0), ("a", 1, "ntk", 2, 0.0, 3.0), ("a", 1, "none", 1, 2.0, 1.0),
         ("a", 2, "ntk", 1, 1.9, 9.0), ("a", 2, "none", 1, 1.9, 9.1)],
        columns=["variant", "lr", "rope", "seed", 16, 256],
    )  # fmt: skip
    at_rope = comparison.better_ropes(choices)
    assert set(at_rope.rope) == {"ntk"}  # "none" lacks a seed at rate 1 and is worse at rate 2
    assert comparison.of_shared_seeds(at_rope)[["lr", "seed"]].values.tolist() == [[1, 1], [2, 1]]
    with pytest.raises(UserError, match="a: expected seeds evaluated at one RoPE scaling at least"):
        comparison.better_ropes(choices.iloc[[1, 2]])


def test_a_model_of_another_size_is_no_run_of_a_variant():
    first = {"contestant": "a", "which": 1} | dict.fromkeys(
        ("steps", "step_tokens", "train_len"), 1
    )
    runs = [first | {"parameters": 10}, first | {"contestant": "b", "parameters": 20}]
    comparison.check_comparable(runs)
    with pytest.raises(UserError, match="a_seed=2: parameters of a = 20: expected 10, as a has"):
        comparison.check_comparable([*runs, first | {"which": 2, "parameters": 20}])


def test_another_recipe_or_formula_is_refused(runs, tiny_config, tmp_path, call, no_drawing):
    """By the runs' own configs, and by what the records kept of runs that are gone."""
    call(report, "--comparison", runs, "--out", tmp_path)
    records = (tmp_path / "A.jsonl").read_bytes()
    for options, problem in (
        (
            ["--optimizer.weight-decay", "0"],
            "optimizer.weight_decay = 0.0: expected the default, as lssa",
        ),
        (
            ["--attention.scores", "cosine"],
            "attention of softmax = .*cosine.*: expected softmax, as",
        ),
    ):
        shutil.rmtree(runs)
        leave_run(runs, tiny_config, "softmax_seed=4", 0.002, {"ntk": [0.0, 0.0]}, options=options)
        with pytest.raises(UserError, match=problem):
            call(report, "--comparison", runs, "--out", tmp_path)
        assert (tmp_path / "A.jsonl").read_bytes() == records
    recalls = [{"contestant": "a", "which": 1, "shares": {task: {}}} for task in ("copy", "mqar")]
    with pytest.raises(
        UserError, match=r"a_seed=1: tasks = \['mqar'\]: expected \['copy'\], as a has"
    ):
        comparison.check_comparable(recalls)


def test_mistakes(tiny_config, tmp_path, call, no_drawing):
    runs = tmp_path / "comparison_A"

    def check(message: str, *folders: Path) -> None:
        with pytest.raises(UserError, match=message):
            call(report, "--comparison", *folders, "--out", tmp_path)

    check("no records; expected the folders of a scale")
    with pytest.raises(UserError, match="expected run folders"):
        call(report)
    leave_run(runs, tiny_config, "softmax_seed=1", 0.1, {"ntk": [0.0]}, UNSEEN_KEY)
    leave_run(runs, tiny_config, "lssa_seed=1", 0.1, {"ntk": [0.0]})
    check(
        r"softmax_seed=1337: data = 0123456789ab\+256x8x32: expected 0123456789ab\+0x8x32, as lssa has",
        runs,
    )
    with pytest.raises(UserError, match="softmax_seed=1337: data"):
        call(report, "--comparison", runs)
    assert not list(tmp_path.glob("**/A.jsonl"))
    leave_losses(runs / "softmax_seed=1", "ntk", 1, TEXT, TEXT_KEY)
    leave_losses(runs / "lssa_seed=1", "ntk", 1, TEXT[:4], "0123456789ab+256x4x32")
    check(
        r"softmax_seed=1337: unseen_data = 0123456789ab\+256x8x32: expected .*x4x32, as lssa has",
        runs,
    )
    (runs / "train_step.json").write_text('{"lssa": 1.0}')
    check("train_step.json: expected softmax among the configs", runs)
    check("expected the folder of a scale's runs", runs / "lssa_seed=1")
    with pytest.raises(UserError, match="cannot be written"):
        call(report, "--comparison", "--out", runs / "train_step.json/out")
    (tmp_path / "comparison_recall").mkdir()
    check("comparison_recall: no finished run in these folders", tmp_path / "comparison_recall")
