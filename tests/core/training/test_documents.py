"""data.document_mask: a packed window is computed as its documents would be, each alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, one_line, write_dataset
from test_model import make_gpt, random_tokens

import train
from config import load_config
from data.batches import val_batch
from data.dataset import TokenStream
from infra.distributed import World
from infra.files import read_jsonl
from training.state import TrainState

EOT = 60
SIZES = {"val": 400, "train": 2000}
CASES = {
    "softmax": ({}, {}),
    "lssar": ({"normaliser": "lssa", "reweight_p": 3}, {"n_kv_head": 1}),
    "ssmax": ({"normaliser": "ssmax"}, {"window": 4}),
    "norm_softmax": ({"normaliser": "norm_softmax"}, {}),
    "alibi": ({}, {"position": "alibi"}),
    "fox": ({"normaliser": "fox"}, {"position": "none"}),
}


@pytest.mark.parametrize(("attention", "model"), CASES.values(), ids=CASES)
def test_logits_and_gradients_are_those_of_the_documents_alone(attention, model):
    """Of five documents in two windows, the third cut by the window's end; the first of each has no start."""
    gpt = make_gpt(attention, seq_len=24, std=0.2, **model)
    x = random_tokens(2, 24)
    x[0, [7, 18]] = EOT
    x[1, 1] = EOT
    lengths = [7, 11, 6, 1, 23]
    y = random_tokens(2, 24, seed=2)
    packed = gpt(x, documents=lengths).flatten(0, 1)  # (B T, V)
    alone = [gpt(tokens[None])[0] for tokens in x.flatten().split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert (packed - gpt(x).flatten(0, 1)).abs().max() > 0.01
    loss = gpt(x, y, documents=lengths)
    gradients = torch.autograd.grad(loss, [*gpt.parameters()])
    expected = torch.nn.functional.cross_entropy(torch.cat(alone), y.flatten())
    for got, want in zip(gradients, torch.autograd.grad(expected, [*gpt.parameters()]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_training_and_validation_read_the_key(tiny_config: Path, tmp_path: Path, call: Any):
    """The losses are the means over the documents of the windows, each computed alone."""
    rng = np.random.default_rng(0)
    splits = {
        split: np.where(rng.random(n) < 0.1, 63, rng.integers(63, size=n)) for split, n in SIZES.items()
    }
    data = write_dataset(tmp_path / "data", splits, 10**6, VOCAB)
    options = ["--data.dir", str(data), "--train.max-steps", "1", "--optimizer.lr", "1e-12"]
    options += ["--optimizer.warmup-steps", "0"]
    config = load_config(tiny_config, options)
    model = TrainState(config, World(0, 1, torch.device("cpu"))).raw_model
    expected = {}
    for split, n_windows in (("train", 8), ("val", 20)):  # batch_tokens, val_tokens / seq_len
        x, y = (torch.from_numpy(each) for each in val_batch(TokenStream(data, split), 0, n_windows, 16))
        losses = []
        for tokens, targets in zip(x, y, strict=True):
            lengths = np.diff([0, *(i for i in range(1, 16) if tokens[i] == 63), 16]).tolist()
            for part, of_part in zip(tokens.split(lengths), targets.split(lengths), strict=True):
                losses += [model(part[None], of_part[None]).item()] * len(part)
        assert len(losses) == 16 * n_windows
        expected[split] = sum(losses) / len(losses)
    for value in ("true", "false"):
        call(train, tiny_config, *options, "--data.document-mask", value, "--name", value)
        step, validation = read_jsonl(tmp_path / "runs" / value / "metrics.jsonl")
        same = value == "true"
        assert (step["loss"] == pytest.approx(expected["train"], rel=1e-5)) == same
        assert (validation["val_loss"] == pytest.approx(expected["val"], rel=1e-5)) == same
    with one_line("holds another run (data.document_mask was False, now True)"):
        call(train, tiny_config, *options, "--data.document-mask", "true", "--name", "false")
    with one_line("train.compile = True", "data.document_mask"):
        load_config(tiny_config, ["--data.document-mask", "true", "--train.compile", "true"])
