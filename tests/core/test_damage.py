"""Damaged files, odd paths and absurd numbers: one line, at once, and nothing is lost."""

import errno
import fcntl
import io
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
import sample
import sweep
import train
from data import prepare
from infra import files
from infra.cli import run_main
from infra.files import append_synced, atomic_file, exclusive_lock, read_jsonl
from training.checkpoint import find_checkpoints, load_model

# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_dataset):
    """A config file whose run has done 3 of 12 steps."""
    folder = tmp_path_factory.mktemp("trained")
    path = folder / "tiny.toml"
    path.write_text(TINY.format(vocab=VOCAB, data=tiny_dataset, runs=folder / "runs"))
    run(path)
    for checkpoint in find_checkpoints(folder / "runs/tiny")[:-1]:
        checkpoint.unlink()
    return path


@pytest.mark.parametrize("bad", [{"format": 3}, {}, [], torch.zeros(3)])
def test_what_is_no_checkpoint_of_this_version(bad, tmp_path):
    path = tmp_path / "step_000001.pt"
    torch.save(bad, path)
    with one_line(path, "not a checkpoint of this version"):
        load_model(path)


# ---------------------------------------------------------------- run files

ODD_LINES = ["3", "[]", '"x"', "null"]
NESTED = "[" * 100_000


@pytest.mark.parametrize("line", ODD_LINES)
def test_odd_lines_of_metrics(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 1, "at": "\u2028"}}\n{{"st')
    assert read_jsonl(path) == [{"step": 1, "at": "\u2028"}]


def test_metrics_that_never_end(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("content", [*ODD_LINES, NESTED, "{", "\xff"])
def test_odd_results_of_an_evaluation(content, tiny_config):
    """The line names the file: sweep.py prints it and goes on with the other runs."""
    path = make_byte_run(tiny_config) / "rows.csv"
    path.write_bytes(content.encode("latin-1"))
    with one_line(path):
        eval_length.is_measured([str(path.parent)])
    log = path.with_name("metrics.jsonl")
    log.write_text(f"{NESTED}\n")  # as a line that a kill has cut
    assert read_jsonl(log) == []


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


def test_a_lock_is_a_file(tmp_path):
    """NFS passes no lock of a folder on to other machines."""
    folder = tmp_path / "run"
    for _ in range(2):  # the second time the file is there, as after a kill
        with (
            exclusive_lock(folder),
            (folder / ".lock").open("ab") as other,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_cannot_be_had(tmp_path, monkeypatch):
    """Work goes on in a read-only folder and without a file system's locks, but not on a full disk."""
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
        with exclusive_lock(tmp_path):
            pass
    for number, goes_on in ((errno.EACCES, True), (errno.EROFS, True), (errno.ENOSPC, False)):
        with monkeypatch.context() as patch:
            patch.setattr(files, "open", Mock(side_effect=OSError(number, "why")), raising=False)
            expected = nullcontext() if goes_on else one_line(tmp_path, "cannot be written: why")
            with expected, exclusive_lock(tmp_path):
                pass


def test_writers_of_one_file_at_the_same_time(tmp_path):
    """As two evaluations of one run, one by a link: each file is whole, and the last one stays."""
    path = tmp_path / "run/eval_length.png"
    path.parent.mkdir()
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    with (
        atomic_file(path, shared=True) as first,
        atomic_file(link / path.name, shared=True) as second,
    ):
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first" and [*path.parent.iterdir()] == [path]


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
def test_a_full_disk_under_a_file_is_one_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with one_line(path, "cannot be written: No space left on device"):
        append_synced(path, "a line\n")


@pytest.mark.parametrize("where", ["/proc/runs", "{tmp}/file/runs"])
def test_folders_that_cannot_be_made(where, tiny_config, call):
    (tiny_config.parent / "file").write_text("")
    folder = where.format(tmp=tiny_config.parent)
    with one_line(folder, "cannot be written"):
        call(train, tiny_config, "--log.dir", folder)


def test_a_read_only_run_folder(tiny_config, call, monkeypatch):
    """Named before the evaluation. (Permissions do not bind root, as whom tests may run.)"""
    folder = make_byte_run(tiny_config)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    with one_line(folder, "cannot be written; the results go there"):
        call(eval_length, folder)


# ---------------------------------------------------------------- endless input, absurd numbers


@pytest.mark.parametrize(
    "arguments",
    [
        (eval_length, "{run}", "--tokens", 10**25),
        (eval_length, "{run}", "--tokens", "1" * 5000),
        (eval_length, "{run}", "--lengths", 10**25),
        (sample, "{run}", "--tokens", 2 * 10**9),
        (sample, "{run}", "--samples", 10**12),
        (sample, "{run}", "--temperature", 1e308),
        (sample, "{run}", "--temperature", "nan"),
        (sample, "{run}", "--top-p", 1e-320),
        (sample, "{run}", "--top-k", -1),
        (sample, "{run}", "--prompt", "\udc80"),
        (sample, "{run}\udc80"),
        (sample, "{run}", "--prompt-file", "\udc80"),
        (train, "{run}\udc80.toml"),
        (prepare, "--files", "{run}/fifo.jsonl", "--tokenizer", "bytes", "--out", "{run}/out"),
        (prepare, "--files", "/dev/zero", "--tokenizer", "bytes", "--out", "{run}/out"),
    ],
    ids=lambda arguments: (
        f"{arguments[0].__name__} {' '.join(ascii(a)[:20] for a in arguments[-2:])}"
    ),
)
def test_input_that_would_never_end(arguments, byte_run, call):
    script, *rest = arguments
    with one_line("expected"):
        call(script, *(str(argument).format(run=byte_run) for argument in rest))
    assert not (byte_run / "out").exists() and not (byte_run / "rows.csv").exists()


@pytest.fixture(scope="module")
def byte_run(trained):
    """A run with random weights, and a pipe that nobody writes to."""
    folder = make_byte_run(trained, "--name", "bytes")
    os.mkfifo(folder / "fifo.jsonl")
    return folder


def test_out_of_memory_is_one_line(capsys):
    def greedy():
        torch.empty(2**50)

    with pytest.raises(SystemExit) as e:
        run_main(greedy)
    assert e.value.code == 2 and capsys.readouterr().err.startswith("error: out of memory: ")


def test_output_that_cannot_be_encoded_is_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    run_main(lambda: print("é ±"))
    assert out.buffer.getvalue() == b"\\xe9 \\xb1\n"


def test_a_closed_stream_takes_what_is_printed(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    run_main(lambda: print("x"))


def test_what_torch_cannot_repeat_is_one_line(capsys):
    def put():
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))

    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(SystemExit) as e:
            run_main(put)
    finally:
        torch.use_deterministic_algorithms(False)
    error = "error: train.deterministic = True: put_ does not have a deterministic implementation in torch"
    assert e.value.code == 2 and capsys.readouterr().err.startswith(error)


def test_no_compiler_is_one_line(capsys):
    @torch.compile
    def double(x):
        return 2 * x

    missing = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with torch._inductor.config.patch(missing), pytest.raises(SystemExit) as e:
        run_main(lambda: double(torch.ones(3)))
    (line,) = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and line.startswith("error: torch cannot compile here (InvalidCxx")
    assert line.endswith("expected train.compile = false, or a C++ compiler")


def test_a_typo_of_an_option(call):
    with one_line("unrecognized arguments: --token; did you mean --tokens?"):
        call(eval_length, "run", "--token", 3)
