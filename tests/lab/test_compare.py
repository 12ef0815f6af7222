"""python -m lab.compare: a variant in a file of its own, trained and put among published records."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import one_line

import eval_length
import sweep
import train
from infra.distributed import StopSignals
from infra.files import read_jsonl
from lab import compare


@pytest.fixture
def scale(tiny_config, own_file, tmp_path, call, monkeypatch, no_drawing) -> list[str]:
    """The tiny config at T = 4 as scale A, no records. Returns the commands that are run, in this
    process.
    """
    text = tiny_config.read_text().replace("seq_len = 16", "seq_len = 4")
    tiny_config.write_text(re.sub(r"\[log\].*", "", text, flags=re.DOTALL))
    (tmp_path / "mine.toml").write_text('[attention]\nnormaliser = "mine.py:Mine"\n')
    (tmp_path / "softmax.toml").write_text("")
    commands = []

    def run(stop: StopSignals, script: str, *arguments: str) -> None:
        if script == "eval_length.py":
            call(eval_length, *arguments, "--device", "cpu")
            commands.append(script)
            return
        n_configs = next(i for i, word in enumerate(arguments) if word.startswith("-"))
        options = list(arguments[n_configs:])
        n_tokens = options[options.index("--eval-tokens") + 1]
        for job in sweep.make_jobs(
            list(arguments[:n_configs]), options[: options.index("--eval-tokens")], None
        ):
            if not job.is_trained():
                call(train, *job.arguments)
                call(eval_length, *job.evaluation(int(n_tokens)))
                commands.append(f"train {job.config.name} at {job.config.optimizer.lr:g}")

    monkeypatch.chdir(tmp_path)
    for name, value in {
        "run": run,
        "BASE": tiny_config,
        "RESULTS": tmp_path,
        "N_TOKENS": 256,
    }.items():
        monkeypatch.setattr(compare, name, value)
    return commands


@pytest.mark.slow
def test_a_file_of_ones_own_among_published_records(scale, own_file, call, capsys, no_drawing):
    call(compare, "softmax.toml", "--fresh", "--rates", "4e-3")
    runs = [compare.read_run(path) for path in Path("runs/compare/softmax/lr=0.004").iterdir()]
    published = [compare.comparison.record_of(run) for run in runs if run]
    Path("A.jsonl").write_text("".join(json.dumps(record) + "\n" for record in published))
    scale.clear()
    call(compare, "mine.toml")
    expected = ["train mine at 0.002", "train mine at 0.004"]
    assert scale == [*expected, *["eval_length.py"] * 2]
    table = (Path("runs/compare/mine/README.md")).read_text()
    assert "| softmax | " in table and "| mine | " in table
    assert {path.name for path in Path("runs/compare/mine").iterdir()} >= {
        "A_lengths.png",
        "A_unseen.csv",
    }
    assert capsys.readouterr().out.count("| mine | ") == 1

    call(compare, "mine.toml")  # again: nothing is left to do
    assert len(scale) == 4 and (Path("runs/compare/mine/README.md")).read_text() == table

    own_file.write_text(own_file.read_text().replace("0.5", "0.7"))
    with one_line("mine/lr=0.002/mine: a run of other code: remove it, or choose --out"):
        call(compare, "mine.toml")
    assert len(scale) == 4


def test_what_does_not_compare_is_refused_before_the_training(scale, call):
    data = {"fingerprint": "0123456789ab"}
    Path("A.jsonl").write_text(
        json.dumps({"kind": "run", "contestant": "softmax", "data": data}) + "\n"
    )
    with one_line("bytes tokens, sha256 ", "sha256 0123456789ab, or --fresh"):
        call(compare, "mine.toml")
    with one_line("mine: train.seq_len = 8: expected 4, as all of scale A have"):
        call(compare, "mine.toml", "--train.seq-len", "8")
    Path("A.jsonl").write_text(Path("A.jsonl").read_text().replace("0123456789ab", fingerprint()))
    with one_line("mine: init_from = 'elsewhere': expected none"):
        call(compare, "mine.toml", "--init-from", "elsewhere")
    Path("other.toml").write_text('name = "softmax_seed=4"')
    for file in ("softmax.toml", "other.toml"):
        with one_line("softmax: a published variant has this name"):
            call(compare, file)
    record = {"kind": "run", "contestant": "fox", "data": {"train": "ba9876543210"}}
    with open("A.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")
    with one_line("train has bytes tokens, sha256 ", "sha256 ba9876543210, or --fresh"):
        call(compare, "mine.toml")
    assert scale == [] and not Path("runs").exists()


def fingerprint() -> str:
    config = compare.load_config(compare.BASE)
    return compare.TokenStream(config.data.dir, "val").fingerprint.removeprefix("sha256 ")[:12]


def test_a_stopped_run_is_not_reported(scale, call, monkeypatch):
    monkeypatch.setattr(compare, "run", lambda *arguments: None)
    with one_line("stopped before the last step of a run"):
        call(compare, "mine.toml", "--fresh")
    assert not read_jsonl(Path("runs/compare/mine/A.jsonl"))


def test_a_signal_reaches_the_script_that_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    with StopSignals() as stop, pytest.raises(SystemExit) as exit_info:
        compare.run(stop, str(script))
    assert exit_info.value.code == 128 + signal.SIGINT
    assert time.monotonic() - began < 50  # it was told to stop
