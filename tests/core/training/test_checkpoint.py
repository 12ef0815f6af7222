"""Checkpoint files: complete or absent, found when damaged, pruned."""

import errno
import shutil
import zipfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, VOCAB, one_line
from launch import build, curve, resume, run

from infra.cli import UserError
from training.checkpoint import (
    find_checkpoints,
    load_checkpoint,
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


@pytest.fixture(scope="module")
def content(tmp_path_factory, tiny_dataset):
    path = tmp_path_factory.mktemp("content") / "tiny.toml"
    path.write_text(TINY.format(vocab=VOCAB, data=tiny_dataset, runs=path.parent / "runs"))
    return load_checkpoint(find_checkpoints(run(path))[0])


BAD_CONTENT = {
    "step": (-1, "step = -1: Input should be greater than or equal to 0"),
    "config": ([], "config = []: Input should be a valid dictionary"),
    "config.seed": ("x", "seed = 'x': expected integer"),
    "config.layers": ([3], "layers.0 = 3: expected a section"),
    "model.final_norm.weight": (3, "does not fit its config"),
    "model.lm_head.weight": (torch.zeros(3), "does not fit its config"),
    "optimizers": ([{}], "its optimisers or random numbers do not fit"),
    "optimizers.0.param_groups": (3, "its optimisers or random numbers do not fit"),
    "optimizers.0.param_groups.0.peak_lr": (None, "peak_lr = None: expected a number"),
    # a fused step would crash
    "optimizers.0.state.0.exp_avg": (torch.zeros(3), "exp_avg of shape (3,): expected (128, 32)"),
    "rng": ([{"cpu": torch.zeros(3)}], "its optimisers or random numbers do not fit"),
    "data": ({}, "data.tokenizer: Field required"),
}


@pytest.mark.parametrize("key", BAD_CONTENT)
def test_a_checkpoint_made_by_hand(key, content, tiny_config):
    value, expected = BAD_CONTENT[key]
    changed = deepcopy(content)
    part, rest = changed, key
    while rest not in part and "." in rest:
        name, rest = rest.split(".", 1)
        part = part[int(name) if name.isdecimal() else name]
    part[rest] = value
    path = tiny_config.with_name("runs") / "tiny/checkpoints/step_000012.pt"
    path.parent.mkdir(parents=True)
    torch.save(changed, path)
    with one_line(path, expected):
        run(tiny_config)


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
