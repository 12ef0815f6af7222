"""lab/replace.py on a model that hub/export.py wrote: its losses are eval_length's, before and after."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import make_byte_run

from hub import export
from hub.register import learned_parameters
from infra.cli import UserError
from lab import replace
from lab.import_ import load_native
from positions import RopeScaling
from training.checkpoint import load_model

pytest.importorskip("transformers")
TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n" * 30


def test_replacement(tiny_config, call, capsys):
    run = make_byte_run(tiny_config)
    out = tiny_config.with_name("out")
    text = tiny_config.with_name("text.txt")
    file = tiny_config.with_name("result.json")
    text.write_text(TEXT)
    call(export, run, out)
    common = [out, "--val-text", text, "--train-text", text, "--tokens", 512, "--batch", 4, "--out", file]

    saved = tiny_config.with_name("saved")
    ssmax = ["--normaliser", "ssmax", "--scale-init", "auto"]
    call(replace, *common, *ssmax, "--steps", 8, "--lr", 0.01, "--save", saved)
    result = json.loads(file.read_text())
    losses = result["losses"]
    stream = torch.tensor(list(TEXT[:513].encode()))
    model = load_model(run).model
    for length in (16, 32, 64, 128):
        x, y = stream[:-1].view(-1, length), stream[1:].view(-1, length)
        ours = model.token_losses(x, y, rope=RopeScaling("ntk")).mean().item()
        assert losses["softmax"][str(length)][0] == pytest.approx(ours, abs=1e-4)
    assert losses["replaced"]["16"][0] != losses["softmax"]["16"][0]
    assert losses["fine-tuned"]["16"][0] < losses["replaced"]["16"][0] - 0.5
    s = 16 / sum(math.log(n) for n in range(1, 17))
    assert f"scale_init = {s}"[:18] in result["normaliser"]
    assert "fine-tuned" in capsys.readouterr().out
    loaded, _ = load_native(str(saved), attn_implementation="replacement")
    assert [p.tolist() for p in learned_parameters(loaded, saved)] == result["learned"]
    x, y = stream[:-1].view(-1, 16), stream[1:].view(-1, 16)
    with torch.no_grad():
        assert replace.next_token_loss(loaded, x, y).item() == pytest.approx(losses["fine-tuned"]["16"][0])

    call(replace, *common, "--normaliser", "softmax", "--steps", 0)  # replaced by itself
    losses = json.loads(file.read_text())["losses"]
    assert losses["replaced"]["128"] == pytest.approx(losses["softmax"]["128"], abs=1e-5)
    absent = ["absent", *common[1:]]  # options and files are checked before the model is read
    with pytest.raises(UserError, match="attention.scale_ini = 1: unknown"):
        call(replace, *absent, "--normaliser", "ssmax", "--scale-ini", 1)
    with pytest.raises(UserError, match="no.txt: cannot be read"):
        call(replace, *absent, "--normaliser", "ssmax", "--val-text", "no.txt")
    with pytest.raises(UserError, match="a text of 1410 tokens: expected more than 4096"):
        call(replace, *common, "--normaliser", "softmax", "--lengths", 4096)
