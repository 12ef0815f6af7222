"""metrics.jsonl, starts.jsonl and the W&B run of a folder."""

import os
import shutil
import signal
import sys
from unittest.mock import Mock

import pytest
import torch
from conftest import one_line
from launch import Forked, build, curve, metrics, records, resume, run

import train
from config import load_config
from infra.cli import UserError, run_main
from infra.files import exclusive_lock, read_jsonl
from training import run_log
from training.run_log import RunLog


def test_starts_and_timing(tiny_config, monkeypatch):
    monkeypatch.setattr("training.run_log.peak_flops", lambda device: 1e7)
    state = build(tiny_config, "--train.max-steps", "4")
    folder = resume(state)
    flops = state.raw_model.flops_per_token()
    (first,) = read_jsonl(folder / "starts.jsonl")
    assert (
        first["step"] == 0
        and first["processes"] == 1
        and first["versions"]["torch"] == torch.__version__
    )
    assert isinstance(first["command"], list) and len(first["commit"] or "0" * 40) in (40, 41)
    timed = [r for r in records(folder) if "step_ms" in r]
    assert [r["step"] for r in timed] == [2, 3, 4]  # every second one, and each that is saved
    for r in timed:
        assert r["tokens_per_s"] == pytest.approx(128 / (r["step_ms"] / 1000), rel=0.01)
        assert r["mfu"] == pytest.approx(flops * r["tokens_per_s"] / 1e7, rel=0.01)
        assert r["memory_gb"] > 0


def test_the_commit_of_a_checkout_of_another_user(monkeypatch):
    commit = run_log.git_commit()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert run_log.git_commit() == commit


def test_the_first_step_which_compiles_is_not_in_the_speed(tiny_config, monkeypatch):
    clock = [0]
    forward = train.forward_backward

    def forward_for_a_while(state, batch):
        clock[0] += 60 if state.step == 0 else 1
        return forward(state, batch)

    monkeypatch.setattr("training.run_log.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(train, "forward_backward", forward_for_a_while)
    timed = [r["step_ms"] for r in records(run(tiny_config)) if "step_ms" in r]
    assert len(timed) > 2 and set(timed) == {1000}


def test_a_run_without_checkpoints_keeps_its_numbers(tiny_config):
    """Only what a kill before the first checkpoint has left gives way."""
    folder = run(tiny_config, "--train.max-steps", "6")
    shutil.rmtree(folder / "checkpoints")
    metrics_of_old = (folder / "metrics.jsonl").read_text()
    with one_line(folder, "has numbers of a run whose checkpoints are gone"):
        run(tiny_config, "--train.max-steps", "6")
    assert (folder / "metrics.jsonl").read_text() == metrics_of_old
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1}\n')
    (folder / "rows.csv").touch()  # would pass for the new weights'
    with one_line(folder, "has numbers of a run whose checkpoints are gone"):
        run(tiny_config)
    (folder / "rows.csv").unlink()
    assert list(metrics(run(tiny_config), "loss")) == [*range(1, 13)]


def test_a_run_is_saved_though_nobody_reads_its_output(tiny_config, monkeypatch):
    """As after Ctrl-C in `train.py ... | tee log`, which reaches both."""
    forward = train.forward_backward

    def interrupted(state, batch):
        if state.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(state, batch)

    monkeypatch.setattr(train, "forward_backward", interrupted)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        run_main(lambda: resume(build(tiny_config)))
    assert (tiny_config.parent / "runs/tiny/checkpoints/step_000005.pt").exists()


def test_one_process_writes_a_run_folder(tiny_config, call):
    config = load_config(tiny_config)
    with (
        exclusive_lock(config.run_dir),
        pytest.raises(UserError, match="another process is writing there"),
    ):
        call(train, tiny_config)
    assert not (config.run_dir / "metrics.jsonl").exists()


def test_a_start_that_fails_leaves_a_lock_alone(tiny_config, call):
    runs = tiny_config.with_name("runs")
    with pytest.raises(UserError, match="nowhere"):
        call(train, tiny_config, "--init-from", "nowhere", "--log.dir", runs)
    assert [path.name for path in runs.rglob("*") if path.is_file()] == [".lock"]


def test_a_link_that_leads_nowhere_is_not_the_start_of_a_run(tiny_config):
    folder = load_config(tiny_config).run_dir
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "checkpoints").symlink_to("not-mounted")
    with one_line(folder / "checkpoints", "expected a folder that can be written"):
        RunLog(build(tiny_config)).open_folder([])
    assert not (folder / "config.toml").exists()


def test_lines_of_a_killed_run_are_not_doubled(tiny_config):
    """Nor kept are those of steps after the checkpoint."""
    state = build(tiny_config)
    state.step = 2
    state.is_resumed = True
    path = state.config.run_dir / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(
        '{"step": 1}\n{"step": 2}\n{"step": 2, "val_loss": 1.0}\nnot json\n{"step": 3}\n{"st'
    )
    RunLog(state).open_folder([])
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 2, "val_loss": 1.0}]


def test_a_run_outlives_wandb(tiny_config, monkeypatch, capsys):
    dead = Mock(log=Mock(side_effect=ConnectionResetError("Connection lost")))
    monkeypatch.setattr(run_log, "open_wandb", lambda *_: dead)
    assert curve(run(tiny_config, "--log.wandb", "true"))[-1][0] == 12
    assert capsys.readouterr().out.count("log.wandb ends here") == 1


@pytest.mark.slow
def test_wandb_offline_logs_and_resumes_the_same_run(tiny_config, tmp_path, monkeypatch):
    """With the real package, without a network."""
    pytest.importorskip("wandb")
    folder = tmp_path / "runs" / "tiny"
    forward = train.forward_backward

    def stop(state, batch):
        if state.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(state, batch)

    for function in (stop, forward):
        monkeypatch.setattr(train, "forward_backward", function)
        process = Forked(
            train.main,
            tiny_config,
            "--log.wandb",
            "true",
            WANDB_MODE="offline",
            WANDB_SILENT="true",
        )
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    ids = {path.name.split("-")[3] for path in runs}  # offline-run-<time>-<id>, -1 within a second
    assert len(runs) == 2 and len(ids) == 1
    assert curve(folder)[-1][0] == 12
    assert [record["step"] for record in read_jsonl(folder / "starts.jsonl")] == [0, 5]
