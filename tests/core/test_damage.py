"""Damaged files, odd paths and absurd numbers: one line, at once, and nothing is lost."""

import errno
import fcntl
import importlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY, VOCAB, make_byte_run, one_line
from launch import records, run

import eval_length
import sweep
from infra.cli import run_main
from infra.files import append_synced, atomic_file, exclusive_lock, read_jsonl, write_atomically
from training.checkpoint import find_checkpoints, load_model

NESTED = "[" * 100_000
NEVER_ENDING = {  # commands and a part of their one line
    "eval_length {run} --tokens 1" + "0" * 25: "expected",
    "eval_length {run} --tokens 1" + "0" * 5000: "expected",
    "eval_length {run} --lengths 1" + "0" * 25: "expected",
    "eval_length {run} --token 3": "unrecognized arguments: --token; did you mean --tokens?",
    "eval_length {run} --data {piped}": "tiny_val_000000.bin: expected a file",
    "sample {run} --tokens 2000000000": "expected",
    "sample {run} --samples 1000000000000": "expected",
    "sample {run} --temperature 1e308": "expected",
    "sample {run} --temperature nan": "expected",
    "sample {run} --top-p 1e-320": "expected",
    "sample {run} --top-k -1": "expected",
    "sample {run} --prompt \udc80": "expected UTF-8",
    "sample {run}\udc80": "expected UTF-8",
    "sample {run} --prompt-file \udc80": "expected UTF-8",
    "train {run}\udc80.toml": "expected UTF-8",
    "train {config} --log.dir /proc/runs": "/proc/runs/tiny: cannot be written",
    "train {config} --log.dir {run}/file": "{run}/file/tiny: cannot be written",
    "data.prepare --files {run}/fifo.jsonl --tokenizer bytes --out {run}/out": "expected",
    "data.prepare --files /dev/zero --tokenizer bytes --out {run}/out": "expected",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_dataset):
    """A run with random weights, pipes that nobody writes to, a dataset of one."""
    folder = tmp_path_factory.mktemp("places")
    config = folder / "tiny.toml"
    config.write_text(TINY.format(vocab=VOCAB, data=tiny_dataset, runs=folder / "runs"))
    byte_run = make_byte_run(config, "--name", "bytes")
    (byte_run / "file").touch()
    os.mkfifo(byte_run / "fifo.jsonl")
    (folder / "piped").mkdir()
    os.mkfifo(folder / "piped/tiny_val_000000.bin")
    return {"config": config, "run": byte_run, "piped": folder / "piped"}


@pytest.mark.parametrize("command", NEVER_ENDING, ids=lambda command: ascii(command)[-40:])
def test_input_that_would_never_end(command, places, call):
    script, *arguments = command.format(**places).split()
    with one_line(NEVER_ENDING[command].format(**places)):
        call(importlib.import_module(script), *arguments)
    assert not (places["run"] / "out").exists() and not (places["run"] / "rows.csv").exists()


@pytest.mark.parametrize("bad", [{"format": 3}, {}, [], torch.zeros(3)])
def test_what_is_no_checkpoint_of_this_version(bad, tmp_path):
    path = tmp_path / "step_000001.pt"
    torch.save(bad, path)
    with one_line(path, "not a checkpoint of this version"):
        load_model(path)


# ---------------------------------------------------------------- run files


@pytest.mark.parametrize("content", ["3", "[]", '"x"', "null", NESTED, "{", "\xff"])
def test_odd_lines(content, tiny_config):
    """metrics.jsonl is read without them, a rows.csv of them is named."""
    rows = make_byte_run(tiny_config) / "rows.csv"
    rows.write_bytes(content.encode("latin-1"))
    with one_line(rows):
        eval_length.is_measured([str(rows.parent)])
    metrics = rows.with_name("metrics.jsonl")
    metrics.write_text(f'{content}\n{{"step": 1, "at": "\u2028"}}\n{{"st')
    assert read_jsonl(metrics) == [{"step": 1, "at": "\u2028"}]
    metrics.unlink()
    os.mkfifo(metrics)
    assert read_jsonl(metrics) == []


def test_lost_metrics_leave_the_run_finished(tiny_config):
    folder = run(tiny_config)
    last = records(folder)[-1]
    (folder / "metrics.jsonl").unlink()
    (job,) = sweep.make_jobs([str(tiny_config)], [])
    assert job.is_trained()
    run(tiny_config)
    # the validation of a checkpoint is made again
    assert records(folder) == [last] and "val_loss" in last


# ---------------------------------------------------------------- other processes, other disks


def test_a_lock_says_who_holds_it(tmp_path):
    """It is a file, since NFS passes no lock of a folder on to other machines."""
    for _ in range(2):  # the second time the file is there, as after a kill
        expected = (
            f"{tmp_path}: another process is writing there: wait for process {os.getpid()} of"
        )
        with exclusive_lock(tmp_path), one_line(expected), exclusive_lock(tmp_path):
            pass


@pytest.mark.parametrize(
    ("module", "number", "expected"),
    [
        (fcntl, errno.ENOLCK, ""), (os, errno.EACCES, ""), (os, errno.EROFS, ""),
        (os, errno.ENOSPC, "cannot be written: why"),
    ],
)  # fmt: skip
def test_a_lock_that_cannot_be_had(module, number, expected, tmp_path, monkeypatch):
    """Work goes on in a read-only folder and without a file system's locks, but not on a full disk."""
    function = "flock" if module is fcntl else "open"
    monkeypatch.setattr(module, function, Mock(side_effect=OSError(number, "why")))
    with one_line(tmp_path, expected) if expected else nullcontext(), exclusive_lock(tmp_path):
        pass


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_written_through_a_link(shared, tmp_path):
    """A temporary file that a link stands for is replaced, a lock that is one is refused."""
    target = tmp_path / "target"
    path = tmp_path / "run/eval_length.png"
    path.parent.mkdir()
    for name in (".eval_length.png.tmp", ".lock", "eval_length.png"):
        (path.parent / name).symlink_to(target)
    with atomic_file(path, shared) as first, atomic_file(path, shared=True) as second:
        first.write(b"first")
        second.write(b"second")  # of another process at the same time
    assert path.read_bytes() == b"first" and not target.exists()
    with one_line(path.parent, "cannot be written"), exclusive_lock(path.parent):
        pass
    assert not target.exists()


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


@needs_full
def test_a_full_disk_under_the_output_ends_no_run(tiny_config, monkeypatch, capsys):
    """python train.py ... > /dev/full"""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        folder = run(tiny_config, "--train.max-steps", "4")
    assert "warning: no more output: No space left on device" in capsys.readouterr().err
    assert find_checkpoints(folder)[0].name == "step_000004.pt"


@needs_full
def test_a_full_disk_says_what_is_needed(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with one_line(path, "cannot be written: No space left on device (disk full: ", " GB free"):
        append_synced(path, "a line\n")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with one_line("GB free, 0.02 needed"):
        write_atomically(path, bytes(2 * 10**7))
    assert not list(tmp_path.glob(".*"))


def test_a_read_only_run_folder(places, call, monkeypatch):
    """Named before the evaluation. (Permissions do not bind root, as whom tests may run.)"""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != places["run"])
    with one_line(places["run"], "cannot be written; the results go there"):
        call(eval_length, places["run"])


# ---------------------------------------------------------------- errors of torch


def greedy():
    torch.empty(2**50)


def put():
    torch.use_deterministic_algorithms(True)
    torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))


@torch.compile
def double(x):
    return 2 * x


def compile_double():
    missing = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with torch._inductor.config.patch(missing):
        double(torch.ones(3))


@pytest.mark.parametrize(
    ("main", "line"),
    [
        (compile_double, "torch cannot compile here (InvalidCxx"),
        (greedy, "out of memory: "),
        (put, "train.deterministic = True: put_ does not have a deterministic implementation in torch"),
    ],
)  # fmt: skip
def test_one_line(main, line, capsys):
    with pytest.raises(SystemExit) as e:
        run_main(main)
    torch.use_deterministic_algorithms(False)
    (printed,) = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and printed.startswith(f"error: {line}")
