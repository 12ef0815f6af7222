"""A run that v0.1.0 left: it loads and continues with that version's losses."""

import gzip
from pathlib import Path

import pytest
import torch
from conftest import one_line, write_dataset
from launch import metrics, run

from config import load_config
from training.checkpoint import load_checkpoint, load_model, read_config

# Made by `python train.py` of the tag v0.1.0, torch 2.13, on these tokens; killed after its step 4.
FILES = Path(__file__).parent / "v0.1.0"
TOKENS = [i * i // 5 % 63 for i in range(2000)]
LOSSES = {5: 3.995386838912964, 6: 3.9714136123657227, 7: 3.9519588947296143, 8: 3.9579391479492188}
VALIDATION = 3.9441356658935547  # after step 8


@pytest.fixture
def old_run(tmp_path):
    write_dataset(tmp_path / "data", {"val": TOKENS[:200], "train": TOKENS}, 10**6, 64)
    folder = tmp_path / "runs/v0_1_0"
    (folder / "checkpoints").mkdir(parents=True)
    packed = (FILES / "step_000004.pt.gz").read_bytes()
    (folder / "checkpoints/step_000004.pt").write_bytes(gzip.decompress(packed))
    (folder / "config.toml").write_text((FILES / "config.toml").read_text())
    return folder


def resume(folder):
    places = ["--data.dir", str(folder.parents[1] / "data"), "--log.dir", str(folder.parent)]
    return run(folder / "config.toml", *places)


def test_it_resumes_with_the_same_losses(old_run, capsys):
    assert load_config(old_run / "config.toml").optimizer.muon_split == "none"  # a key that is new
    assert resume(old_run) == old_run
    assert "step_000004.pt: 4 of 8 steps done" in capsys.readouterr().out
    assert metrics(old_run, "loss") == pytest.approx(LOSSES, rel=1e-5)
    assert metrics(old_run, "val_loss")[8] == pytest.approx(VALIDATION, rel=1e-5)


def test_an_unknown_key_is_named_and_one_that_is_new_since_has_its_default(old_run):
    path = old_run / "checkpoints/step_000004.pt"
    content = load_checkpoint(path)
    del content["config"]["optimizer"]["schedule"]
    torch.save(content, path)
    assert load_model(path).config == read_config(path)[0]
    resume(old_run)
    assert metrics(old_run, "loss") == pytest.approx(LOSSES, rel=1e-5)
    content["config"]["model"]["width"] = content["config"]["model"].pop("n_embd")
    torch.save(content, path)
    for read in (read_config, load_model):
        with one_line(path, "model.width = 8: unknown key"):
            read(path)


def test_a_key_that_is_gone_is_dropped_with_its_default_only(old_run):
    path = old_run / "checkpoints/step_000004.pt"
    content = load_checkpoint(path)
    content["config"]["data"]["document_mask"] = False
    content["config"]["attention"]["gamma_factor"] = 1.0
    torch.save(content, path)
    text = (old_run / "config.toml").read_text()
    (old_run / "config.toml").write_text(
        text.replace("[data]\n", "[data]\ndocument_mask = false\n")
    )
    assert load_config(old_run / "config.toml").data == load_model(path).config.data
    resume(old_run)
    assert metrics(old_run, "loss") == pytest.approx(LOSSES, rel=1e-5)
    with one_line("data.document_mask = True: unknown key"):
        load_config(old_run / "config.toml", ["--data.document-mask", "true"])
