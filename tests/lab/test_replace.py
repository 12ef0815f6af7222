"""lab/replace.py on a model that hub/export.py wrote: its losses are eval_length's, before and
after.
"""

import math
import re

import pytest
import torch
from conftest import make_byte_run

from hub import export
from infra.cli import UserError
from lab import replace
from positions import RopeScaling
from training.checkpoint import load_model

pytest.importorskip("transformers")
TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n" * 30


def losses_by_state(printed):
    """The lines of the table, which continues below, with their losses."""
    losses = {}
    for line in printed.splitlines():
        if "±" in line and "[" not in line and "nats" not in line:
            numbers = [float(x) for x in re.findall(r"(\d+\.\d+) ±", line)]
            losses.setdefault(line.split()[0], []).extend(numbers)
    return losses


def test_replacement(tiny_config, call, capsys):
    run = make_byte_run(tiny_config)
    out = tiny_config.with_name("out")
    text = tiny_config.with_name("text.txt")
    text.write_text(TEXT)
    call(export, run, out)
    common = [out, "--val-text", text, "--train-text", text, "--tokens", 512, "--batch", 4]
    stream = torch.tensor(list(TEXT[:513].encode()))
    model = load_model(run).model
    for scaling in (
        RopeScaling("yarn"),
        RopeScaling("theta=90000"),
        RopeScaling("none"),
    ):
        rope = ["--rope", scaling.name]
        call(replace, *common, *rope, "--normaliser", "softmax", "--steps", 0, "--lengths", 64)
        (loss,) = losses_by_state(capsys.readouterr().out)["softmax"]
        ours = model.token_losses(
            stream[:-1].view(-1, 64), stream[1:].view(-1, 64), rope=scaling
        ).mean()
        assert loss == pytest.approx(ours.item(), abs=1e-4)

    ssmax = ["--normaliser", "ssmax", "--scale-init", "auto"]
    call(replace, *common, *ssmax, "--steps", 8, "--lr", 0.01)
    printed = capsys.readouterr().out
    losses = losses_by_state(printed)
    for length, loss in zip((16, 32, 64, 128), losses["softmax"], strict=True):
        x, y = stream[:-1].view(-1, length), stream[1:].view(-1, length)
        ours = model.token_losses(x, y, rope=RopeScaling("ntk")).mean().item()
        assert loss == pytest.approx(ours, abs=1e-4)
    assert losses["replaced"][0] != losses["softmax"][0]
    assert losses["fine-tuned"][0] < losses["replaced"][0] - 0.5
    s = 16 / sum(math.log(n) for n in range(1, 17))
    assert f"scale_init = {s}"[:18] in printed and "learned parameters" in printed

    call(replace, *common, "--normaliser", "softmax", "--steps", 0)  # replaced by itself
    losses = losses_by_state(capsys.readouterr().out)
    assert losses["replaced"] == pytest.approx(losses["softmax"], abs=1e-4)
    absent = ["absent", *common[1:]]  # options are checked before the model is read
    with pytest.raises(UserError, match="attention.scale_ini = 1: unknown"):
        call(replace, *absent, "--normaliser", "ssmax", "--scale-ini", 1)
    with pytest.raises(UserError, match="nothing.txt: cannot be read"):
        call(replace, *absent, "--normaliser", "softmax", "--train-text", "nothing.txt")
    with pytest.raises(UserError, match="--tokens 512: expected at least 1024"):
        call(replace, *common, "--normaliser", "softmax", "--lengths", 1024)
    with pytest.raises(UserError, match="a text of 1410 tokens: expected more than 4096"):
        call(replace, *common, "--normaliser", "softmax", "--lengths", 4096, "--tokens", 4096)
