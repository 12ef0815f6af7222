"""Resuming: bit for bit the same run, never another one."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import one_line, slow
from launch import build, curve, finish, fork_ranks, metrics, run

import train
from config import config_from_dict, load_config
from infra.cli import UserError
from infra.distributed import World
from infra.files import append_synced
from normalisers.family import Softmax
from normalisers.own import MODULES, SOURCES, list_variants
from schema import AttentionConfig, Config
from training.checkpoint import find_checkpoints, load_checkpoint, load_model

LSSAR = ["--attention.normaliser", "lssa", "--attention.reweight-p", "15"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--optimizer.name", "muon", "--data.order", "shuffled"],
        ["--data.documents", "true", "--model.key-shift", "true", "--attention.normaliser", "fox"],
        *slow(["--optimizer.name", "muon", "--optimizer.muon-split", "head"]),
        *slow(["--optimizer.name", "muon", "--optimizer.muon-split", "none"]),
        [*LSSAR, "--attention.reweight-p-warmup", "11"],  # killed at p = 4, and p changes once more
    ],
)
def test_a_resumed_run_is_the_same_run(tiny_config, flags, capsys):
    whole, resumed = (run(tiny_config, *flags, "--name", name) for name in ("whole", "resumed"))
    # as if killed after step 9: metrics are ahead of the checkpoint
    find_checkpoints(resumed)[0].unlink()
    assert find_checkpoints(resumed)[0].name == "step_000009.pt"
    append_synced(resumed / "metrics.jsonl", '{"step": 13, "lo')
    capsys.readouterr()
    run(tiny_config, *flags, "--name", "resumed")
    assert "resumed from" in capsys.readouterr().out
    assert curve(whole) == curve(resumed)
    a, b = (load_checkpoint(find_checkpoints(folder)[0]) for folder in (whole, resumed))
    for key in ("model", "optimizers", "rng"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


def test_another_run_in_the_same_folder_is_rejected(tiny_config, tiny_dataset, tmp_path):
    folder = run(tiny_config)
    assert run(tiny_config, "--train.micro-batch", "2", "--log.every", "1") == folder
    with pytest.raises(UserError, match="train.deterministic was False, now True.*another --name"):
        # free while it trains, but this curve did not use it
        run(tiny_config, "--train.deterministic", "true")
    other = shutil.copytree(tiny_dataset, tmp_path / "other")
    info = json.loads((other / "dataset.json").read_text())
    info["splits"]["train"]["sha256"] = "f00"
    (other / "dataset.json").write_text(json.dumps(info))
    found = r"optimizer.lr was 0.01, now 0.02; data: train was 'sha256 .*', now 'sha256 f00'.*another --name"
    with pytest.raises(UserError, match=found):
        run(tiny_config, "--optimizer.lr", "0.02", "--data.dir", str(other))


def test_a_renamed_folder_is_the_same_run(tiny_config, capsys):
    folder = run(tiny_config)
    folder.rename(folder.with_name("renamed"))
    run(tiny_config, "--name", "renamed")
    assert "12 of 12 steps done" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_run_is_extended_where_its_schedule_allows(tiny_config, schedule):
    """A finished constant run, and a wsd run before its decay: the same curve as at once."""
    flags = ["--optimizer.schedule", schedule, "--optimizer.decay-fraction", "0.2"]
    longer = ["--train.max-steps", "20"]
    whole, extended = (run(tiny_config, *flags, *(longer * (name == "whole")), "--name", name)
                       for name in ("whole", "extended"))  # fmt: skip
    if schedule == "wsd":
        with pytest.raises(
            UserError, match="train.max_steps was 12, now 20.*--init-from.*12 steps.*wsd before its"
        ):
            run(tiny_config, *flags, *longer, "--name", "extended")
        find_checkpoints(extended)[0].unlink()  # after step 9 the rate was still at its peak
    run(tiny_config, *flags, *longer, "--name", "extended")
    a, b = (load_checkpoint(find_checkpoints(folder)[0]) for folder in (whole, extended))
    assert curve(whole) == curve(extended) and a["step"] == b["step"] == 20
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    with pytest.raises(UserError, match="train.max_steps was 20, now 12.*20 steps are done"):
        run(tiny_config, *flags, "--name", "extended")
    find_checkpoints(whole)[0].unlink()  # after step 18
    for fewer in ("16", "18"):
        with pytest.raises(UserError, match=f"was 20, now {fewer}.*18 steps are done"):
            run(tiny_config, *flags, "--train.max-steps", fewer, "--name", "whole")


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_run_is_not_extended_where_its_rates_would_have_differed(tiny_config, schedule):
    flags = ["--optimizer.schedule", schedule]
    folder = run(tiny_config, *flags)
    longer = [*flags, "--train.max-steps", "13"]
    with pytest.raises(
        UserError, match="was 12, now 13.*--init-from .*/step_000012.pt; 12 steps are done"
    ):
        run(tiny_config, *longer)
    find_checkpoints(folder)[0].unlink()
    # without a validation
    with pytest.raises(UserError, match="was 12, now 9.*9 steps are done"):
        run(tiny_config, *flags, "--train.max-steps", "9")


def test_a_run_goes_on_with_another_engine(tiny_config, capsys):
    whole, resumed = (run(tiny_config, "--name", name) for name in ("whole", "resumed"))
    find_checkpoints(resumed)[0].unlink()
    capsys.readouterr()
    run(tiny_config, "--name", "resumed", "--train.engine", "dense")
    assert "engine dense" in capsys.readouterr().out
    assert curve(whole)[:9] == curve(resumed)[:9]
    for key in ("loss", "val_loss"):
        assert metrics(resumed, key) == pytest.approx(metrics(whole, key), rel=1e-5)


def test_ranks_that_see_different_checkpoints_do_not_start(tiny_config, monkeypatch):
    """The other one, on a disk of its own, has step 3, or another file of the same step."""
    state = build(tiny_config)
    monkeypatch.setattr(World, "gather_objects", lambda world, value: [value, [3, "", []]])
    with one_line(state.config.run_dir, "the processes see different checkpoints"):
        train.start_or_resume(state)
    assert not state.config.run_dir.exists()
    monkeypatch.setattr(
        World, "gather_objects", lambda world, value: [value, [0, "of another file", []]]
    )
    with one_line(state.config.run_dir, "the processes see different checkpoints"):
        train.start_or_resume(state)
    monkeypatch.undo()
    train.start_or_resume(state)


@pytest.mark.parametrize("option", ["--model.n-embd=64", "--train.val-every=5", ""])
def test_ranks_of_different_configs_do_not_start(option, tiny_config, tiny_dataset):
    """Where the data lies may differ between machines, and what is printed. A step of validation
    may not: the collectives would differ."""
    shutil.copytree(tiny_dataset, tiny_config.with_name("copy"))
    free = [f"--data.dir={tiny_config.with_name('copy')}", "--log.every=3"]
    ranks = fork_ranks(train.main, tiny_config, second=[option] if option else free)
    outputs = finish(ranks, status=2 if option else 0)
    assert all(("different configs or data" in stderr) == bool(option) for _, stderr in outputs)
    assert bool(find_checkpoints(load_config(tiny_config).run_dir)) != bool(option)


def test_an_evaluation_says_that_p_was_still_rising(tiny_config, capsys):
    flags = [*LSSAR, "--attention.reweight-p-warmup", "11"]
    folder = run(tiny_config, *flags)
    capsys.readouterr()
    load_model(folder)
    assert not capsys.readouterr().err
    load_model(find_checkpoints(folder)[1])  # after step 9
    assert "was trained up to p = 11, evaluated at p = 15" in capsys.readouterr().err


def test_random_numbers_go_on(tiny_config):
    """Nothing in the model draws any, but a subclass with dropout would."""
    state = build(tiny_config)
    torch.rand(5)
    checkpoint = state.to_checkpoint()
    expected = torch.rand(5)
    build(tiny_config).restore(tiny_config, checkpoint)
    assert torch.equal(torch.rand(5), expected)


def test_a_run_keeps_the_file_of_its_normaliser(tiny_config, own_file, monkeypatch):
    """It is evaluated from its copy, wherever it was trained from and has moved since."""
    (tiny_config.parent / "elsewhere").mkdir()
    monkeypatch.chdir(tiny_config.parent / "elsewhere")
    text = f'base = "../tiny.toml"\n[attention]\nnormaliser = "../{own_file.name}:Mine"\n'
    (tiny_config.parent / "elsewhere/own.toml").write_text(text)
    folder = run(Path("own.toml"))
    before = load_model(folder)
    source = own_file.read_bytes()
    copy = f"mine-{sha256(source).hexdigest()[:12]}.py"
    assert (folder / copy).read_bytes() == source
    assert before.config.attention.normaliser == f"{copy}:Mine"
    assert load_config(folder / "config.toml") == before.config
    own_file.write_text(own_file.read_text().replace("0.5", "0.7"))
    with pytest.raises(UserError, match="attention.normaliser was 'mine-.*, now 'mine-.*another"):
        run(Path("own.toml"))
    own_file.unlink()
    moved = folder.rename(folder.with_name("moved"))
    for known in (MODULES, SOURCES):  # as in another process
        monkeypatch.delitem(known, copy)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(load_model(moved).model(tokens), before.model(tokens))
    monkeypatch.delitem(MODULES, copy)
    (moved / copy).write_bytes(source.replace(b"0.5", b"0.7"))
    with pytest.raises(UserError, match="is not the file that it was"):
        load_model(moved)


def test_two_files_with_one_class_name_in_one_model(tiny_config, own_file):
    """Neither is the other, nor takes the place of a registered class of its name."""
    other = own_file.parent / "other/mine.py"
    other.parent.mkdir()
    text = own_file.read_text().replace("0.5", "0.25").replace('name="mine"', 'name="softmax"')
    other.write_text(text)
    entry = f"[{{at = [1], attention = {{normaliser = '{other}:Mine'}}}}]"
    options = ["--attention.normaliser", f"{own_file}:Mine", "--layers", entry]
    folder = run(tiny_config, *options)
    layers = load_model(folder).config.layer_configs
    assert [layer.attention.definition.model_dump()["beta"] for layer in layers] == [0.5, 0.25]
    assert len([*folder.glob("mine-*.py")]) == 2
    assert type(AttentionConfig().definition) is Softmax


@pytest.mark.parametrize("name", [*list_variants(), "softmax"])
def test_names_of_v0_1_0_load(name):
    """Its configs name stick-breaking and others, files now, as they name the classes of then."""
    stored = Config(name="x").model_dump() | {"attention": {"normaliser": name}}
    read = config_from_dict(stored, "a checkpoint")
    assert read.attention.definition.name == name
    assert config_from_dict(read.model_dump(), "a checkpoint") == read
