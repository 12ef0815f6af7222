"""Checkpoint files: complete or absent, found when damaged, pruned."""

import errno
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import one_line
from launch import build, curve, resume, run

from infra.cli import UserError
from training.checkpoint import (
    find_checkpoints,
    load_checkpoint,
    load_model,
    load_newest,
    save_checkpoint,
)


def damage(path, how):
    content = path.read_bytes()
    middle = len(content) // 2
    path.unlink()
    bad = {
        "truncated": content[:middle],
        "bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
    }
    if how == "pickle":  # an object of a class: not plain tensors and values
        torch.save({"format": Path()}, path)
    else:
        path.write_bytes(bad[how])


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory, tiny_dataset):
    folder = tmp_path_factory.mktemp("run")
    weights = torch.arange(30000.0)
    for step in (3, 6):
        state: dict[str, Any] = {"step": step, "config": {}, "model": {"w": weights}}
        state |= {"optimizers": [], "rng": [], "data": {"tokenizer": "bytes"}}
        save_checkpoint(folder, state, keep_last=2)
    return folder


@pytest.mark.parametrize("how", ["truncated", "bit", "empty", "pickle"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_used(
    two_checkpoints, tmp_path, how, capsys
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


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        MemoryError(),
        RuntimeError("can't allocate memory"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_now_stops_the_start(error, tiny_config, monkeypatch):
    """It may be whole: an older one in its place would take the later lines of metrics.jsonl away."""
    folder = run(tiny_config)
    expected = curve(folder)

    def unread(path, *_):
        raise error

    with monkeypatch.context() as patch, one_line("no readable checkpoint", str(error)):
        patch.setattr(zipfile, "ZipFile", unread)
        run(tiny_config)
    assert curve(folder) == expected


def test_a_failed_write_ends_the_run_with_the_reason(tiny_config, monkeypatch):
    write = torch.save

    def full(content, file):
        write(content, file)
        if content["step"] == 6:
            raise OSError("No space left on device")

    state = build(tiny_config, "--train.val-every", "100")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="step_000006.pt: .*No space left on device"):
        resume(state)
    names = [path.name for path in (state.config.run_dir / "checkpoints").iterdir()]
    assert state.step == 6 and names == ["step_000003.pt"]


def test_what_is_kept(tiny_config):
    flags = ["--train.keep-last", "1", "--train.keep-every", "6", "--train.val-every", "100"]
    folder = run(tiny_config, *flags)
    assert [path.stem for path in find_checkpoints(folder)] == ["step_000012", "step_000006"]


def test_what_a_kill_leaves(tiny_config):
    """Half a file is removed, the new checkpoint kept though a later one is damaged."""
    folder = run(tiny_config)
    expected = curve(folder)
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_000099.pt").write_bytes(b"damaged")
    (checkpoints / ".step_000009.pt.tmp").write_bytes(b"half")
    (checkpoints / "step_000012.pt").unlink()
    run(tiny_config, "--train.keep-last", "1")
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step_000099.pt", "step_000012.pt"} and curve(folder) == expected


def test_parameters_that_do_not_fit_the_config_are_named(tiny_config):
    path = find_checkpoints(run(tiny_config))[0]
    content = load_checkpoint(path)
    del content["model"]["final_norm.weight"]
    torch.save(content, path)
    with one_line(path, "does not fit its config", "final_norm.weight"):
        load_model(path)
    with one_line(path, "does not fit its config", "final_norm.weight"):
        build(tiny_config).restore(path, content)


def test_what_another_version_has_written_is_named(tiny_config):
    path = find_checkpoints(run(tiny_config))[0]
    content = load_checkpoint(path)
    content["optimizers"][0]["param_groups"].pop()
    with one_line(path, "its optimisers or random numbers do not fit"):
        build(tiny_config).restore(path, content)
    newest = path.with_name("step_000099.pt")
    torch.save(content | {"format": 99}, newest)
    with one_line(newest, "not a checkpoint of this version"):  # an older one would lose steps
        load_newest(path.parents[1])
    del content["rng"]
    torch.save(content, path)
    with one_line(path, "rng: Field required"):
        load_checkpoint(path)
    with one_line(tiny_config, "expected a run folder or a checkpoint file"):
        load_checkpoint(tiny_config)
