"""Checkpoint files: complete or absent, found when damaged, written while training continues."""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import break_at, build, curve, resume, run

from infra.cli import UserError
from training import checkpoint
from training.checkpoint import (
    CheckpointWriter,
    copy_to_cpu,
    find_checkpoints,
    load_checkpoint,
    load_newest,
    save_checkpoint,
)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.unlink()  # not overwritten: best.pt may be the same file
    bad = {
        "truncated": content[:middle],
        "zeros": bytes(len(content)),
        "random": np.random.default_rng(0).bytes(len(content)),
        "bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
    }
    if how == "pickle":  # an object of a class: not plain tensors and values
        torch.save({"format": Path()}, path)
    else:
        path.write_bytes(bad[how])


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    weights = torch.arange(30000.0)
    state = {key: {} for key in checkpoint.KEYS} | {"format": checkpoint.FORMAT, "model": {"w": weights}}
    for step in (3, 6):
        save_checkpoint(folder, state | {"step": step}, keep_last=2)
    return folder


@pytest.mark.parametrize("how", ["truncated", "zeros", "random", "bit", "empty", "pickle"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_used(
    two_checkpoints: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(two_checkpoints, tmp_path / "run")
    newest, previous = find_checkpoints(folder)
    damage(newest, how)
    loaded = load_newest(folder)
    assert loaded is not None and loaded[0] == previous and loaded[1]["step"] == 3
    assert f"warning: {newest}: " in capsys.readouterr().err
    previous.unlink()
    with pytest.raises(UserError, match="none of the 1 checkpoints loads"):
        load_newest(folder)


def test_a_damaged_run_resumes_to_the_same_curve(tiny_config: Path, capsys: pytest.CaptureFixture[str]):
    folder = run(tiny_config)
    expected = curve(folder)
    newest = find_checkpoints(folder)[0]
    damage(newest, "truncated")
    run(tiny_config)
    assert f"warning: {newest}: damaged" in capsys.readouterr().err
    assert curve(folder) == expected and load_checkpoint(newest)["step"] == 12


def delay_writes(monkeypatch: pytest.MonkeyPatch, until: threading.Event, seconds: float) -> None:
    def delayed(*args: Any) -> None:
        until.wait(seconds)
        save_checkpoint(*args)

    monkeypatch.setattr(checkpoint, "save_checkpoint", delayed)


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file has the state at `save`, whatever happens to the tensors meanwhile."""
    may_write = threading.Event()
    delay_writes(monkeypatch, may_write, 20)
    writer = CheckpointWriter(tmp_path, keep_last=2, keep_every=0)
    weight = torch.ones(3)
    values = {"format": checkpoint.FORMAT, "step": 1, "model": weight}
    writer.save({key: {} for key in checkpoint.KEYS} | values, False)
    weight.zero_()  # the next step
    assert not find_checkpoints(tmp_path)
    may_write.set()
    writer.finish()
    assert torch.equal(load_checkpoint(find_checkpoints(tmp_path)[0])["model"], torch.ones(3))


def test_copies_share_nothing_but_tied_weights():
    tensor = torch.ones(2)
    copied = copy_to_cpu({"a": [tensor, (tensor.detach(), 3)], "b": "text"})
    tensor.zero_()
    assert copied["a"][0].tolist() == [1, 1] and copied["a"][0] is copied["a"][1][0]
    assert copied["a"][1][1] == 3 and copied["b"] == "text"


@pytest.mark.parametrize("error", [UserError("No space left on device"), MemoryError("no memory")])
def test_a_failed_write_ends_the_run_with_the_reason(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def full(run_dir: Path, state: dict[str, Any], *args: Any) -> None:
        if state["step"] == 6:
            raise error
        save_checkpoint(run_dir, state, *args)

    state = build(tiny_config, "--train.val-every", "100")
    monkeypatch.setattr(checkpoint, "save_checkpoint", full)
    with pytest.raises(type(error), match=str(error)):
        resume(state)
    assert state.step < 12
    assert [path.name for path in find_checkpoints(state.config.run_dir)] == ["step_000003.pt"]


def test_a_write_in_progress_is_finished_when_the_run_fails(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
):
    delay_writes(monkeypatch, threading.Event(), 0.5)
    break_at({4}, monkeypatch)
    state = build(tiny_config)
    with pytest.raises(UserError, match="step 4: loss nan"):
        resume(state)
    assert find_checkpoints(state.config.run_dir)[0].name == "step_000003.pt"


def test_what_is_kept(tiny_config: Path):
    flags = ["--train.keep-last", "1", "--train.keep-every", "6", "--train.val-every", "100"]
    folder = run(tiny_config, *flags)
    assert [path.stem for path in find_checkpoints(folder)] == ["step_000012", "step_000006"]


def test_what_a_kill_leaves(tiny_config: Path):
    """Half a file is removed, the new checkpoint kept though a later one is damaged, best.pt linked again."""
    folder = run(tiny_config)
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_000099.pt").write_bytes(b"damaged")
    (checkpoints / ".step_000009.pt.tmp").write_bytes(b"half")
    (checkpoints / "step_000012.pt").unlink()
    run(tiny_config, "--train.keep-last", "1")
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step_000099.pt", "step_000012.pt", "best.pt"}
    for _ in range(2):  # killed before best.pt was linked; and not killed
        (checkpoints / "best.pt").unlink(missing_ok=True)
        run(tiny_config)
        assert load_checkpoint(checkpoints / "best.pt")["step"] == 12
    run(tiny_config)
    assert not list(checkpoints.glob(".*"))
