"""python -m lab.report --comparison: records, the choice of a RoPE scaling, paired differences, redrawing without runs."""

import json
import math
import shutil
from pathlib import Path

import pytest

from config import load_config, to_toml
from infra.cli import UserError
from infra.files import read_jsonl
from lab import comparison, report

# Losses of eight blocks: they differ more than the contestants.
TEXT = [2.0, 1.0, 3.0, 1.5, 2.5, 1.2, 2.8, 2.0]
NOISE = [0.0, 0.0, 0.01, -0.01, 0.01, -0.01, 0.01, -0.01]


def leave_run(folder: Path, config_path: Path, name: str, lr: float, offsets: dict[str, list[float]]) -> None:
    """A finished run with losses `offsets[rope]` above TEXT, at 1x, 2x, ..."""
    config = load_config(config_path, ["--name", name, "--log.dir", str(folder), "--optimizer.lr", str(lr)])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(to_toml(config))
    step = config.train.max_steps
    (config.run_dir / "metrics.jsonl").write_text(json.dumps({"step": step, "val_loss": 2 + lr}) + "\n")
    for rope, each in offsets.items():
        lengths = []
        for i, offset in enumerate(each):
            losses = [loss + offset + noise for loss, noise in zip(TEXT, NOISE, strict=True)]
            lengths.append(
                {
                    "length": config.train.seq_len * 2**i,
                    "reason": None if math.isfinite(offset) else "the model computed NaN or infinity",
                    "loss": sum(losses) / 8,
                    "block_losses": losses,
                    "block_same_target_losses": losses,
                    "buckets": [{"from": 0, "to": 16, "loss": 2.0}, {"from": 16, "to": 32, "loss": 3.0}],
                }
            )
        data = {"dir": config.data.dir, "blocks": 8, "block_length": 2 * config.train.seq_len}
        result = {"step": step, "rope": {"kind": rope, "theta": None}, "data": data, "lengths": lengths}
        (config.run_dir / f"eval_length_{rope}.json").write_text(json.dumps(result))


def test_comparison_from_runs_and_again_without_them(tiny_config, tmp_path, call, capsys):
    runs, out = tmp_path / "runs/comparison_A", tmp_path / "results"
    for seed, shift in ((1, -0.1), (2, 0.1)):
        name, seeded = f"softmax_seed={seed}", tmp_path / f"seed_{seed}.toml"
        seeded.write_text(f'base = "{tiny_config}"\nseed = {seed}\n')
        leave_run(runs, seeded, name, 0.002, {"ntk": [shift, 0.5 + shift], "none": [shift, 0.9 + shift]})
    leave_run(runs, tiny_config, "lssa", 0.001, {"ntk": [0.2, 0.4], "none": [0.2, 0.3]})
    # Twice the rate is better at 16x, and 1x chooses.
    leave_run(tmp_path / "runs/comparison_A_fast", tiny_config, "lssa", 0.002, {"ntk": [0.3, 0.1]})
    for lr in (0.001, 0.002):
        leave_run(tmp_path / "runs/comparison_A_lr", tiny_config, f"lssa_{lr:g}", lr, {})
    recall = {"rope": {"kind": "ntk", "theta": None}, "tasks": ["copy"]}
    recall["step"] = load_config(tiny_config).train.max_steps
    for seed, share in ((1, 0.2), (2, 0.3)):
        shares, name = {"tokens": {"share": share}}, f"lssa_seed={seed}"
        recall["lengths"] = [{"length": 64, "reason": None, "copy": shares, "mean": shares}]
        leave_run(tmp_path / "runs/comparison_recall", tmp_path / f"seed_{seed}.toml", name, 0.1, {})
        (tmp_path / f"runs/comparison_recall/{name}/eval_recall.json").write_text(json.dumps(recall))
    cells = [{"length": 64, "depth": d, "reason": None, "choice": {"share": d / 100}} for d in (10, 30)]
    needle = recall | {"rope": {"kind": "none", "theta": None}, "cells": cells}
    (runs / "lssa/eval_needle.json").write_text(json.dumps(needle))
    # A checkpoint file's evaluation is a point of the training figure, even at the last step.
    last = json.loads((runs / "softmax_seed=1/eval_length_ntk.json").read_text())
    last["lengths"][0]["block_losses"] = [9.0] * 8
    (runs / f"softmax_seed=1/eval_length_ntk_step_{last['step']:06d}.json").write_text(json.dumps(last))
    # Text on which nothing was chosen: all of its blocks count. A step's cost.
    unseen = last | {"data": {**last["data"], "skipped_tokens": 256}}
    for run, loss in (("softmax_seed=1", 3.0), ("softmax_seed=2", 5.0), ("lssa", 4.5)):
        for rope in ("none", "ntk"):
            unseen["rope"]["kind"] = rope
            for entry in unseen["lengths"]:
                entry["block_losses"] = [loss - 7] + 7 * [loss + 1]
            (runs / run / f"eval_length_unseen_{rope}.json").write_text(json.dumps(unseen))
    (runs / "train_step.json").write_text(json.dumps({"lssa": 2.5, "softmax": 2.0}))
    call(report, "--comparison", runs, f"{runs}_fast", tmp_path / "runs/comparison_recall", "--out", out)
    text = (out / "README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    mean = sum(TEXT[2:]) / 6  # two of eight blocks choose the RoPE scaling
    softmax, lssa = (next(r for r in rows if r[0] == name and len(r) > 6) for name in ("softmax", "lssa"))
    assert softmax[1:4] == ["ntk", "2", "0.002*"] and lssa[1:4] == ["none", "1", "0.001"]
    assert softmax[4:6] == [f"{mean:.3f} ±0.141", f"{mean + 0.5:.3f} ±0.141"]
    assert lssa[4:6] == [f"{mean + 0.2:.3f}", f"{mean + 0.3:.3f}"] and lssa[6] == "0.100"
    # The same text and noise: the paired error vanishes, though the blocks differ by 0.7.
    assert lssa[-3:] == ["+0.200 ±0.000", "-0.200 ±0.000", "1.25"]
    unseen_rows = [row for row in rows if row[0] == "lssa" and row[4:5] == ["4.500"]]
    assert len(unseen_rows) == 1 and unseen_rows[0][-2:] == 2 * ["+0.500 ±0.000"]
    assert "One seed moves a loss by 0.141 at 1x and 0.141 at 16x" in text
    assert ["lssa", "**2.001**", "2.002"] in rows
    ends = [f"**{mean + 0.2:.3f}**", f"{mean + 0.3:.3f}", f"{mean + 0.3:.3f}", f"**{mean + 0.1:.3f}**"]
    assert ["lssa", *ends] in rows
    assert ["lssa", "20 %"] in rows and ["lssa", "ntk", "2", "25 ±7", "25 ±7"] in rows
    assert ["lssa", f"{mean + 0.2:.3f}", f"{mean + 0.3:.3f}", "25 ±7"] in rows  # both ends and recall
    for picture in ("A_plane.png", "A_lengths.png", "A_positions.png", "A_training.png"):
        assert (out / picture).read_bytes()[:4] == b"\x89PNG" and picture in text

    shutil.rmtree(tmp_path / "runs")
    call(report, "--comparison", "--out", out)
    assert (out / "README.md").read_text() == text
    assert len(read_jsonl(out / "A.jsonl")) == 8


def test_errors_are_paired_over_text():
    def contestant(*seeds: list[float], trainings: list[float] | None = None) -> comparison.Contestant:
        runs = []
        for i, offsets in enumerate(seeds):
            losses = [loss + offset for loss, offset in zip(TEXT, offsets, strict=True)]
            validations = trainings[i] if trainings else offsets
            runs.append(
                {"lengths": {"ntk": {"16": [losses, losses]}}, "which": i, "validations": validations}
            )
        return comparison.Contestant("x", runs, "ntk")

    zero, mixed = contestant([0] * 8), contestant([9, 9, 1, 2, 1, 2, 1, 2])
    assert comparison.difference(zero, mixed, 16) == f"+1.500 ±{math.sqrt(0.3 / 6):.3f}"
    assert comparison.difference(zero, contestant([0] * 8), 16) == "+0.000 ±0.000"
    # Seed 0 is one training under two length scales: seed 1, which only one has, is left out.
    old, new = contestant([0] * 8, [4] * 8, trainings=[1.0, 2.0]), contestant([1] * 8, trainings=[1.0])
    assert comparison.difference(old, new, 16) == "+1.000 ±0.000"


def test_lengths_without_a_loss_are_dashes(tiny_config, tmp_path, call):
    """A scaling with a loss at 16x is chosen; seeds without one leave a dash, and the rest of the table."""
    runs, nan = tmp_path / "comparison_A", math.nan
    leave_run(runs, tiny_config, "softmax_seed=1", 0.1, {"ntk": [0.0, 1.0], "none": [0.0, nan]})
    leave_run(runs, tiny_config, "ssmax_seed=1", 0.1, {"ntk": [0.0, nan], "none": [0.0, nan]})
    other_seed = tmp_path / "seed_2.toml"
    other_seed.write_text(f'base = "{tiny_config}"\nseed = 2\n')
    leave_run(runs, other_seed, "ssmax_seed=2", 0.2, {"ntk": [1.0, nan], "none": [1.0, nan]})
    call(report, "--comparison", runs, "--out", tmp_path)
    text = (tmp_path / "README.md").read_text()
    rows = {row[0]: row for line in text.splitlines() if len(row := line.strip("| ").split(" | ")) > 5}
    assert rows["softmax"][1] == "ntk" and rows["ssmax"][5:] == [*"–––", "+0.000 ±0.000", "–"]


def test_mistakes(tiny_config, tmp_path, call):
    with pytest.raises(UserError, match="no records; expected the folders of a scale"):
        call(report, "--comparison", "--out", tmp_path)
    with pytest.raises(UserError, match="expected run folders"):
        call(report)
    leave_run(tmp_path / "comparison_A", tiny_config, "softmax_seed=1", 0.1, {"ntk": [0.0]})
    path = tmp_path / "comparison_A/softmax_seed=1/eval_length_ntk.json"
    path.write_text(path.read_text().replace("block_losses", "old"))
    with pytest.raises(UserError, match="evaluated by an earlier version; run eval_length.py again"):
        call(report, "--comparison", tmp_path / "comparison_A", "--out", tmp_path)
    path.write_text(path.read_text().replace("old", "block_losses"))
    leave_run(tmp_path / "comparison_A", tiny_config, "lssa_seed=1", 0.1, {"ntk": [0.0]})
    other = tmp_path / "comparison_A/lssa_seed=1/eval_length_ntk.json"
    other.write_text(other.read_text().replace('"blocks": 8', '"blocks": 9'))
    with pytest.raises(UserError, match="softmax_seed=1337: blocks = 8: expected 9, as lssa has"):
        call(report, "--comparison", tmp_path / "comparison_A", "--out", tmp_path)
    with pytest.raises(UserError, match="softmax_seed=1337: blocks"):  # comparison_report/ beside the runs
        call(report, "--comparison", tmp_path / "comparison_A")
    assert (tmp_path / "comparison_report").is_dir() and not list(tmp_path.glob("**/A.jsonl"))
    other.unlink()
    for run, blocks in (("softmax_seed=1", 8), ("lssa_seed=1", 4)):
        result = json.loads(path.read_text())
        (path.parent.with_name(run) / "eval_length_ntk.json").write_text(json.dumps(result))
        result["data"] |= {"skipped_tokens": 256, "blocks": blocks}
        (path.parent.with_name(run) / "eval_length_unseen.json").write_text(json.dumps(result))
    with pytest.raises(UserError, match="lssa_seed=1337: blocks = 4: expected 8, as softmax has"):
        call(report, "--comparison", tmp_path / "comparison_A", "--out", tmp_path)
    (tmp_path / "comparison_A/train_step.json").write_text('{"lssa": 1.0}')
    with pytest.raises(UserError, match="train_step.json: expected softmax among the configs"):
        call(report, "--comparison", tmp_path / "comparison_A", "--out", tmp_path)
    with pytest.raises(UserError, match="expected the folder of a scale's runs"):
        call(report, "--comparison", tmp_path / "comparison_A/lssa_seed=1", "--out", tmp_path)
    (tmp_path / "comparison_recall").mkdir()
    with pytest.raises(UserError, match="comparison_recall: no finished run in these folders"):
        call(report, "--comparison", tmp_path / "comparison_recall", "--out", tmp_path)
