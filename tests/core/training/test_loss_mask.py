"""Training on what a dataset's mask counts, alone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_dataset
from launch import build, finish, fork_ranks, metrics, run

import train
from config import load_config, to_toml
from data.batches import read_windows, train_batch
from data.dataset import IGNORED, TokenStream, finish_dataset, write_split
from evaluation import open_text
from infra.cli import UserError
from infra.distributed import World
from train import forward_backward, start_or_resume
from training.loader import BatchLoader


def add_masks(source, folder, uncounted, **info):
    """A copy of the dataset with masks that are 0 in these places of each split."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "dataset.json").read_text()) | info
    del values["format_version"]
    for split, places in uncounted.items():
        mask = np.ones(values["splits"][split]["tokens"], np.uint16)
        for place in places:
            mask[place] = 0
        write_split(folder, values, f"{split}mask", [mask], 0)
    finish_dataset(folder, values)
    return folder


@pytest.fixture
def config_path(tiny_config, tiny_dataset, tmp_path):
    """The tiny config, on data of which two runs of tokens in five count, of other lengths in each
    window.
    """
    rng = np.random.default_rng(0)
    starts = range(0, 5500, 10)
    train = [slice(start, start + int(rng.integers(2, 10))) for start in starts]
    data = add_masks(
        tiny_dataset, tmp_path / "masked", {"train": train, "val": train[:100]}, sequence_length=16
    )
    config = load_config(tiny_config, ["--data.dir", str(data), "--data.order", "shuffled"])
    tiny_config.write_text(to_toml(config))
    return tiny_config


def test_batches_name_what_does_not_count(config_path):
    """Targets are those of the same stream without its mask, or IGNORED."""
    folder = load_config(config_path).data.dir
    stream = TokenStream(folder, "train")
    plain = TokenStream(folder, "train")
    assert stream.mask is not None
    mask = stream.mask.read(0, stream.n_tokens)
    plain.mask = None
    x, y = train_batch(stream, 3, 8, 16, "sequential", seed=1)
    _, y_plain = train_batch(plain, 3, 8, 16, "sequential", seed=1)
    counted = mask[3 * 128 + 1 : 4 * 128 + 1].reshape(8, 16) == 1
    assert counted.any() and not counted.all()
    np.testing.assert_array_equal(y, np.where(counted, y_plain, IGNORED))


def test_steps_and_micro_batches_without_a_target(tiny_config, tiny_dataset, tmp_path):
    """No token counts in a micro-batch, in a whole step, in the first validation batch."""
    uncounted = {"train": [slice(0, 70), slice(200, 600)], "val": [slice(0, 70)]}
    data = add_masks(tiny_dataset, tmp_path / "masked", uncounted)
    folder = run(tiny_config, "--data.dir", str(data))
    losses = [*metrics(folder, "loss").values(), *metrics(folder, "val_loss").values()]
    assert np.isfinite(losses).all() and 0.0 in losses[:12]


def test_a_mask_of_another_length_is_rejected(tmp_path):
    write_dataset(tmp_path, {"train": [1] * 10, "trainmask": [1] * 9}, 10)
    with pytest.raises(UserError, match="trainmask has 9 tokens: expected 10, as train"):
        TokenStream(tmp_path, "train")
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(
        UserError, match="dataset.json: no such file; expected the one that was made with"
    ):
        TokenStream(tmp_path, "train")


def answer_loss(state, x, y, smoothing=0.0):
    """The mean over all targets that count, from full logits."""
    log_p = state.raw_model(x)[y != IGNORED].log_softmax(-1)
    likelihood = log_p.gather(1, y[y != IGNORED][:, None])
    return -((1 - smoothing) * likelihood.mean() + smoothing * log_p.mean())


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.0), ("mean", 0.1), ("sum", 0.1)])
def test_loss_is_the_mean_over_targets(reduction, smoothing, config_path):
    """Of the whole step, also when its micro-batches have different numbers of targets. So are the
    gradients, or with reduction = sum those of the sum, of which the loss stays the mean."""
    for micro in ("8", "2", "1"):
        state = build(config_path, "--train.micro-batch", micro, "--train.reduction", reduction,
                      "--train.label-smoothing", str(smoothing))  # fmt: skip
        x, y = map(
            torch.from_numpy, train_batch(state.batches.stream, 0, 8, 16, "shuffled", seed=1337)
        )
        expected = answer_loss(state, x, y, smoothing)
        loss = forward_backward(state, state.batches.read(0))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        (wanted,) = torch.autograd.grad(expected, state.raw_model.embedding.weight)
        n = int((y != IGNORED).sum()) if reduction == "sum" else 1
        gradient = state.raw_model.embedding.weight.grad
        assert gradient is not None
        torch.testing.assert_close(gradient / n, wanted, atol=1e-6, rtol=1e-4)


def test_training_lowers_it_and_validates_on_it(config_path):
    run_dir = run(config_path, "--train.label-smoothing", "0.01")  # of which validation is free
    loss = metrics(run_dir, "loss")
    assert loss[12] < 0.95 * loss[1]
    state = build(run_dir / "config.toml")
    start_or_resume(state)
    x, y = map(torch.from_numpy, read_windows(state.val_stream, 0, 20, 16))
    with torch.no_grad():
        expected = answer_loss(state, x, y).item()
    assert metrics(run_dir, "val_loss")[12] == pytest.approx(expected, rel=1e-5)


def test_ranks_weigh_by_their_targets(config_path, monkeypatch):
    """The mean over two ranks is that over all targets."""
    config = load_config(config_path, ["--train.micro-batch", "2"])
    stream = TokenStream(config.data.dir, "train")
    loaders = [BatchLoader(stream, config, World(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    batches = [loader.read(0) for loader in loaders]
    counts = torch.tensor([[int((y != IGNORED).sum()) for _, y in batch] for batch in batches])
    monkeypatch.setattr(World, "gather", lambda world, values: counts.sum(1, keepdim=True))
    for loader, batch, own in zip(loaders, batches, counts, strict=True):
        weights, n_targets = loader.loss_weights(batch)
        assert n_targets == counts.sum()
        assert weights == pytest.approx((2 * own / n_targets).tolist())


def test_another_mask_is_another_run(config_path):
    folder = run(config_path, "--train.max-steps", "2")
    path = Path(load_config(folder / "config.toml").data.dir) / "dataset.json"
    info = json.loads(path.read_text())
    info["splits"]["trainmask"]["sha256"] = "f00"
    path.write_text(json.dumps(info))
    with pytest.raises(UserError, match="data: trainmask was 'sha256 .*', now 'sha256 f00'"):
        run(config_path, "--train.max-steps", "2")


@pytest.mark.slow
def test_processes_change_nothing(config_path):
    common = ("--train.max-steps", "4", "--train.reduction", "sum")
    alone = run(config_path, "--name", "one", *common)
    options = ("--name", "two", "--train.micro-batch", "2", "--train.device", "cpu")
    finish(fork_ranks(train.main, config_path, *options, *common))
    for key in ("loss", "grad_norm"):
        assert metrics(alone.with_name("two"), key) == pytest.approx(metrics(alone, key), rel=1e-4)


def test_refusals(config_path):
    with pytest.raises(UserError, match="train.seq_len = 32: .* has sequences of 16 tokens"):
        build(config_path, "--train.seq-len", "32")
    with pytest.raises(UserError, match="made for fine-tuning, no running text"):
        open_text(load_config(config_path), None)
