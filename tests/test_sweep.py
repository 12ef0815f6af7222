"""sweep.py: what it runs, skips and goes on after; report.py: rows, spreads, scales, and dashes."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import report
import sweep
from config import load_config, to_toml
from data.shards import write_shard
from infra.cli import UserError
from infra.distributed import StopSignals
from report import FACTORS, Ours, Run, experiment, fit_log, paper_table, read_rows, read_runs

ROOT = Path(__file__).parents[1]
SWEEP = """
base = "{root}/configs/gpt2_124m.toml"
[model]
n_layer = 1
n_head = 2
n_embd = 32
vocab_size = 64
[data]
dir = "{folder}/data"
[train]
max_steps = 3
seq_len = 16
batch_tokens = 64
val_tokens = 256
dtype = "float32"
device = "cpu"
[optimizer]
warmup_steps = 1
[log]
dir = "{folder}/runs"
[sweep]
"attention.normaliser" = ["softmax", "lssa"]
seed = [1, 2]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    tokens = torch.randint(0, 64, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    shards = []
    for split in ("train", "val"):
        name = f"x_{split}_000000.bin"
        shards.append({"file": name, "tokens": 600, "sha256": write_shard(tmp_path / "data" / name, tokens)})
    info = {"format_version": 1, "dataset": "x", "tokenizer": "bytes", "vocab_size": 64, "source": "a test"}
    counts = {"tokens": 0, "documents": 0, "shards": 0, "sha256": ""}
    splits = {"train": counts, "val": counts}
    (tmp_path / "data/dataset.json").write_text(json.dumps(info | {"splits": splits, "shards": shards}))
    path = tmp_path / "s.toml"
    path.write_text(SWEEP.format(root=ROOT, folder=tmp_path))
    return path


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, args)])
    sweep.main()


class Fake:
    """Takes the place of torchrun: leaves what train.py and eval_length.py would, or fails."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.commands = failing, []  # type: ignore[var-annotated]

    def run(self, command: list[str], stop: Any) -> int:
        script = Path(next(arg for arg in command if arg.endswith(".py")))
        arguments = command[command.index(str(script)) + 1 :]
        self.commands.append([script.name, *arguments])
        if self.failing and self.failing in " ".join(arguments) and script.name == "train.py":
            return 2
        if script.name == "train.py":
            leave_run(load_config(arguments[0], arguments[1:]))
        else:
            tag = arguments[arguments.index("--tag") + 1] if "--tag" in arguments else ""
            name = f"eval_length_{tag}.json" if tag else "eval_length.json"
            (Path(arguments[0]) / name).write_text('{"step": 3}')
        return 0


def leave_run(config: Any) -> None:
    (config.run_dir / "checkpoints").mkdir(parents=True)
    (config.run_dir / "checkpoints/step_000003.pt").touch()
    (config.run_dir / "config.toml").write_text(to_toml(config))
    (config.run_dir / "metrics.jsonl").write_text('{"step": 3, "val_loss": 4.0}\n')


def test_runs_all_skips_what_is_finished_and_goes_on_after_a_failure(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fake = Fake(failing="normaliser=softmax_seed=2")
    monkeypatch.setattr(sweep, "run", fake.run)
    with pytest.raises(SystemExit) as e:
        call(monkeypatch, path, "--optimizer.lr", "0.01")
    out = capsys.readouterr().out
    assert e.value.code == 1 and "3 of 4 runs are trained and evaluated" in out
    run = path.parent / "runs/s_normaliser=softmax_seed=2"
    assert out.splitlines()[-1] == f"failed: {run}: train.py ended with status 2"
    scripts = [command[0] for command in fake.commands]
    assert scripts == 1 * ["train.py"] + 2 * ["eval_length.py"] + ["train.py"] + 2 * [
        "train.py", "eval_length.py", "eval_length.py"
    ]  # fmt: skip
    assert all("--optimizer.lr" in command for command in fake.commands if command[0] == "train.py")
    ropes = [command[command.index("--rope") + 1] for command in fake.commands if "--rope" in command]
    assert ropes == 3 * ["ntk", "none"]

    again = Fake()
    monkeypatch.setattr(sweep, "run", again.run)
    call(monkeypatch, path, "--optimizer.lr", "0.01")
    assert [command[0] for command in again.commands] == ["train.py", "eval_length.py", "eval_length.py"]
    assert "4 of 4 runs are trained and evaluated" in capsys.readouterr().out


def test_another_config_under_the_name_is_left_to_train(path: Path, monkeypatch: pytest.MonkeyPatch):
    """train.py says what differs; skipping would pass off the old run as the new one."""
    fake = Fake()
    monkeypatch.setattr(sweep, "run", fake.run)
    call(monkeypatch, path, "--index", "3")
    monkeypatch.setattr(sweep, "run", Fake(failing="lr").run)
    with pytest.raises(SystemExit):
        call(monkeypatch, path, "--index", "3", "--optimizer.lr", "0.01")


def test_list_and_mistakes(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    call(monkeypatch, path, "--list", "--tag", "x")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "s_normaliser=lssa_seed=1_x" in lines[2] and "to run" in lines[2]
    call(monkeypatch, path, "--list", "--seed", "7")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[-1].split()[0] for line in lines] == ["s_normaliser=softmax", "s_normaliser=lssa"]
    mistakes: list[tuple[list[object], str]] = [
        ([], "expected config files"),
        ([path, "--index", "4"], "--index 4: expected 0 to 3"),
        ([path, "--train.max_step", "4"], "did you mean train.max_steps"),
        ([path, path], "two runs would be called"),
        ([path, "--nproc", "0"], "--nproc 0"),
        ([path, "--name", "x"], "expected --tag WORD"),
    ]
    for args, expected in mistakes:
        with pytest.raises(UserError, match=expected):
            call(monkeypatch, *args)


def test_sweep_and_report_from_end_to_end(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through torchrun: a run and an evaluation; then the report of the folder."""
    run = path.parent / "runs/s_normaliser=softmax_seed=1"
    monkeypatch.setattr(sweep, "EVALUATIONS", (("none", "none"),))
    call(monkeypatch, path, "--index", 0, "--nproc", 1, "--eval-tokens", 256)
    evaluation = json.loads((run / "eval_length_none.json").read_text())
    assert evaluation["rope"]["kind"] == "none" and evaluation["step"] == 3
    assert [row["length"] for row in evaluation["lengths"]] == [16, 32, 64, 128, 256]
    monkeypatch.setattr(sys, "argv", ["report.py", str(path.parent / "runs")])
    report.main()
    folder = path.parent / "runs/report"
    text = (folder / "report.md").read_text()
    assert "s_normaliser=softmax" in text and "This is no paper's scale" in text
    loss = evaluation["lengths"][0]["loss"]
    assert f"{loss:.4f}" in "".join(cells(text, "table1_softmax")[1])
    assert json.loads((folder / "report.json").read_text())["runs"][0]["lengths"]["none"][0]["loss"] == loss
    pictures = re.findall(r"\]\((.*?\.png)\)", text)
    assert {"positions_A_none.png", "ssmax_figure1.png"} <= set(pictures)
    assert all((folder / picture).stat().st_size for picture in pictures)
    with pytest.raises(UserError, match="no finished run"):
        read_runs([str(path.parent / "data")])
    with pytest.raises(UserError, match="nowhere: no such run folder"):
        read_runs(["nowhere"])


def test_a_signal_is_handed_on_as_sigterm():
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(60)"
    with StopSignals() as stop:
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        assert sweep.run([sys.executable, "-c", child], stop) == 7
        assert stop.number == signal.SIGINT


# ---------------------------------------------------------------- the report


def make_run(folder: Path, name: str, losses: list[float], *overrides: str, step: int = 3) -> None:
    """A run folder with evaluations whose losses at 1x, 2x, ... are given."""
    args = [
        "--name",
        name,
        "--log.dir",
        str(folder),
        "--train.max-steps",
        "3",
        "--optimizer.warmup-steps",
        "1",
    ]
    config = load_config(ROOT / "configs/demo_softmax.toml", [*args, *overrides])
    leave_run(config)
    lengths = [
        {"length": 128 * f, "reason": None, "loss": loss, "buckets": [{"from": 0, "to": 128, "loss": loss}]}
        for f, loss in zip(FACTORS, losses, strict=True)
    ]
    result = {
        "step": step,
        "rope": {"kind": "ntk", "theta": None},
        "lengths": lengths,
        "data": {"tokens": 4096},
    }
    (config.run_dir / "eval_length.json").write_text(json.dumps(result))


def cells(text: str, row: str) -> list[list[str]]:
    """The lines of a row in a table of the report: the one that names it, and those below without a name."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    first = next(i for i, line in enumerate(lines) if line and line[0] == f"`{row}`")
    return [lines[first], *itertools.takewhile(lambda line: line and line[0] == "", lines[first + 1 :])]


def test_tables_match_runs_by_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed, shift in ((1, 0.0), (2, 0.1), (3, 0.2)):
        make_run(tmp_path, f"any{seed}", [2 + shift] * 4 + [3 + shift], "--seed", str(seed))
    make_run(tmp_path, "p15", [2.0] * 5, "--attention.normaliser", "lssa", "--attention.reweight-p", "15")
    make_run(tmp_path, "bold", [9.0] * 5, "--optimizer.weight-decay", "0.0")
    make_run(tmp_path, "stale", [7.0] * 5, "--attention.normaliser", "relu_li", step=2)
    (tmp_path / "p15/metrics.jsonl").write_text('{"step": 2, "val_loss": 4.0}\n')
    with open(tmp_path / "any1/metrics.jsonl", "a") as f:
        f.write('{"step": 3, "val')  # cut short by a kill
    ours = Ours(read_runs([str(tmp_path)]))
    assert "left out" in capsys.readouterr().out
    text = paper_table(report.TABLES["lssar"][3], ours)
    paper, found = cells(text, "table4_softmax")
    assert paper == ["`table4_softmax`", "the paper", "3.1911 [a]", "4.17 [b]", "5.45 [b]", "6.28 [b]", ""]
    assert found[1:] == ["ours, scale A, 3 seeds, RoPE ntk", *4 * ["2.1000 ±0.1000"], "3.1000 ±0.1000"]
    assert cells(text, "table4_lssa_p15")[1] == ["", "ours", *5 * ["–"]], "not finished: no number"
    assert cells(text, "table4_relu_shen")[0][1:3] == ["the paper: not at hand; ours", "–"]
    assert cells(text, "table4_relu_li")[2][1:4] == ["ours, scale A, validation in training", "4.0000", "–"]
    robust = paper_table(report.TABLES["normsoftmax"][2], ours)
    assert cells(robust, "no_weight_decay_normaliser=softmax")[1][2] == "9.0000"


def test_pictures_of_runs_of_which_one_is_not_evaluated(tmp_path: Path):
    for seed in (1, 2):
        make_run(tmp_path, f"any{seed}", [2.0] * 4 + [3.0], "--seed", str(seed))
    (tmp_path / "any2/eval_length.json").unlink()
    drawn, _ = report.draw_all(Ours(read_runs([str(tmp_path)])), ["lssar"], tmp_path)
    assert drawn.keys() >= {"lssar_figure1_A_ntk.png", "positions_A_ntk.png"}


def test_a_scale_is_never_another_one(tmp_path: Path):
    make_run(tmp_path, "a", [2.0] * 5)
    make_run(tmp_path, "b", [3.0] * 5, "--model.n-layer", "2")
    ours = Ours(read_runs([str(tmp_path)]))
    lines = cells(paper_table(report.TABLES["lssar"][0], ours), "table1_softmax")
    assert sorted(line[1:3] for line in lines[1:]) == [
        ["ours, scale A, RoPE ntk", "2.0000"], ["ours, scale B, RoPE ntk", "3.0000"]
    ] or sorted(line[2] for line in lines[1:]) == ["2.0000", "3.0000"]  # fmt: skip
    assert len(ours.letters) == 2 and report.scales_text(ours).count("no paper's scale") == 2
    base = Run(Path(), load_config(ROOT / "configs/gpt2_124m.toml"), [(18865, 3.2)], {}, 0)
    assert "the LSSAR paper's scale" in report.scales_text(Ours([base]))


def test_every_row_is_another_experiment():
    """Else a run would stand in two rows of one table that mean different things."""
    for tables in report.TABLES.values():
        for table in tables:
            rows = read_rows(table.folder, table.files)
            keys = [(experiment(row.config), tuple(row.exact.items())) for row in rows]
            doubles = {row.config.name for row, key in zip(rows, keys, strict=True) if keys.count(key) > 1}
            same = {"norm_softmax", "gamma_gamma=8.0", "tau_tau=1.0"}
            same |= {"loss_norm_softmax_loss_gamma=inf", "loss_tau_loss_tau=1.0"}
            assert doubles <= same, doubles
    names = {path.stem for folder in ("lssar_paper", "normsoftmax_paper")
             for path in (ROOT / "configs" / folder).glob("*.toml")}  # fmt: skip
    shown = {name for paper in ("lssar", "normsoftmax") for table in report.TABLES[paper]
             for name in table.files.split()}  # fmt: skip
    assert names == shown
    assert {key for key in report.PUBLISHED if not (ROOT / f"configs/{key}.toml").exists()} == set()


def test_fit_of_p_n_finds_its_own_formula():
    n = torch.arange(1, 201, dtype=torch.float64)
    p_n = 0.7 * n.log() - 0.2
    p_n[0] = 1.0  # never trained
    assert fit_log(p_n) == pytest.approx((0.7, -0.2, 1.0), rel=1e-9)
    noisy = p_n + 0.1 * torch.sin(n)
    assert fit_log(noisy)[2] < 1


def test_largest_weight_is_that_of_the_vector():
    """SSMax, Figure 1: (-2, ..., -2, 3)."""
    z = torch.full((50,), -2.0, dtype=torch.float64)
    z[-1] = 3.0
    for scale in (1.0, 0.43 * math.log(50)):
        weight = report.largest_weight(torch.tensor(50.0, dtype=torch.float64), torch.tensor(5.0 * scale))
        assert weight.item() == pytest.approx((scale * z).softmax(0)[-1].item(), rel=1e-6)
