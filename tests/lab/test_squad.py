"""data/squad.py, and training on what counts alone."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import build, metrics, run, run_script

from config import load_config, to_toml
from data.batches import train_batch, val_batch
from data.dataset import IGNORED, TokenStream, finish_dataset, write_split
from data.tokenizer import get_tokenizer
from data.verify import verify
from evals.common import open_validation
from infra.cli import UserError
from infra.distributed import World
from lab import recall_data, squad
from train import forward_backward, start_or_resume
from training.loader import BatchLoader
from training.state import TrainState

BYTES = get_tokenizer("bytes")


def article(title: str, n: int) -> dict[str, Any]:
    """A paragraph with n questions that have answers, one that has none, and an answer without a question."""
    qas = [
        {"question": f"What is {title} {i}?", "answers": [{"text": f"{title}{'!' * i}"}, {"text": "no"}]}
        for i in range(n)
    ]
    qas += [{"question": "Why?", "answers": []}, {"question": "  ", "answers": [{"text": "because"}]}]
    paragraph = {"context": f"All about {title}.", "qas": qas}
    return {"title": title, "paragraphs": [paragraph]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [article(f"t{i}", 3) for i in range(20)]}), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(monkeypatch, "--train", source, "--out", tmp_path / "squad")
    return tmp_path / "squad"


def prepare(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    ask = ["squad.py", "--tokenizer", "bytes", "--seq-len", "64", *map(str, args)]
    monkeypatch.setattr(sys, "argv", ask)
    squad.main()


def test_sequences_and_masks(folder: Path) -> None:
    """Every tenth article is held out; what counts is the first answer and the end-of-text."""
    for split, titles in (("val", [0, 10]), ("train", [i for i in range(20) if i not in (0, 10)])):
        stream = TokenStream(folder, split)
        assert stream.n_tokens == 64 * 3 * len(titles) and stream.mask is not None
        rows = stream.read(0, stream.n_tokens).reshape(-1, 64)
        masks = stream.mask.read(0, stream.n_tokens).reshape(-1, 64)
        for k, (row, mask) in enumerate(zip(rows.tolist(), masks, strict=True)):
            title, i = f"t{titles[k // 3]}", k % 3
            answer = f" {title}{'!' * i}"
            prompt = f"All about {title}.\n\nQuestion: What is {title} {i}?\nAnswer:"
            end = 1 + len(prompt) + len(answer)
            assert row[0] == row[end] == BYTES.eot_token and not any(row[end + 1 :])
            assert BYTES.decode(row[1:end]) == prompt + answer
            assert mask.nonzero()[0].tolist() == list(range(1 + len(prompt), end + 1))
    verify(folder)


def test_batches_name_what_does_not_count(folder: Path) -> None:
    """Targets are those of the same stream without its mask, or -100."""
    stream = TokenStream(folder, "train")
    assert stream.mask is not None
    plain = TokenStream(folder, "train")
    plain.mask = None
    for order in ("sequential", "shuffled"):
        x, y = train_batch(stream, 5, 16, 64, order, seed=1)
        x_plain, y_plain = train_batch(plain, 5, 16, 64, order, seed=1)
        np.testing.assert_array_equal(x, x_plain)
        counted = y != IGNORED
        np.testing.assert_array_equal(y[counted], y_plain[counted])
        for row, targets in zip(counted, y, strict=True):  # " t7!" and the end, one run without a gap
            (places,) = row.nonzero()
            assert len(places) == places[-1] - places[0] + 1 and targets[places[-1]] == BYTES.eot_token
            assert BYTES.decode(targets[places[:-1]].tolist()).startswith(" t")
    x, y = val_batch(stream, 0, 2, 64)
    assert ((y != IGNORED).sum(1) == [len(" t1") + 1, len(" t1!") + 1]).all()


def test_too_long_ones_are_counted(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    articles = [article("a", 2), article("b" * 30, 2), article("c", 2)]
    (tmp_path / "val.json").write_text(json.dumps({"data": articles}))
    prepare(monkeypatch, "--train", source, "--val", tmp_path / "val.json", "--out", tmp_path / "out")
    assert "val    4 questions in sequences of 64 tokens, 2 were longer" in capsys.readouterr().out
    assert TokenStream(tmp_path / "out", "train").n_tokens == 60 * 64


def test_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(name: str, n: int) -> list[dict[str, Any]]:
        texts: list[list[str]] = [[], *[["a", "b"]] * n]
        common = {"title": "t", "question": "q?"}
        return [common | {"context": f"{name} {i}", "answers": {"text": t}} for i, t in enumerate(texts)]

    found = {"train": rows("train", 5), "validation": rows("validation", 2)}
    monkeypatch.setattr("datasets.load_dataset", lambda name: found if "squad_v2" in name else {})
    prepare(monkeypatch, "--out", tmp_path / "out")
    train, val = TokenStream(tmp_path / "out", "train"), TokenStream(tmp_path / "out", "val")
    assert (train.n_tokens, val.n_tokens) == (5 * 64, 2 * 64)
    assert BYTES.decode(val.read(1, 12).tolist()) == "validation 1"

    def unreachable(name: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(UserError, match="no route to host.*--train train-v2.0.json"):
        prepare(monkeypatch, "--out", tmp_path / "other")


@pytest.mark.parametrize(
    "text, args, message",
    [
        ("{", [], "not of SQuAD's schema.*JSONDecodeError"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', [], "not of SQuAD's schema.*'answers'"),
        (
            '{"data": [{"paragraphs": [{"context": 5, "qas": [{"question": "", "answers": [{"text": ""}]}'
            "]}]}]}",
            [],
            "not of SQuAD's schema.*expected texts",
        ),
        ('{"data": []}', [], "val: no question fits --seq-len 64"),
        ('{"data": []}', ["--val", "none.json"], "none.json: cannot be read"),
        ("{}", ["--seq-len", "3"], "--seq-len 3: expected at least 8"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, args: list[str], message: str
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=message):
        prepare(monkeypatch, "--train", tmp_path / "bad.json", "--out", tmp_path / "out", *args)
    with pytest.raises(UserError):  # an unfinished dataset cannot be trained on
        TokenStream(tmp_path / "out", "train")


def test_a_finished_dataset_survives_mistakes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    with pytest.raises(UserError, match="none.json: cannot be read"):
        prepare(monkeypatch, "--train", tmp_path / "none.json", "--out", folder)
    with pytest.raises(UserError, match="holds squad_.*, another dataset's: choose another --out"):
        call(recall_data, "--sequences", "8", "--out", folder)
    assert TokenStream(folder, "train").mask is not None


def test_a_smaller_dataset_replaces_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    """Of fewer shards: none of the larger one's stay, which dataset.json would not list."""
    monkeypatch.setattr(recall_data, "write_split", partial(write_split, shard_size=64_000))
    for n in (2048, 64):
        call(recall_data, "--sequences", n, "--out", tmp_path)
        assert TokenStream(tmp_path, "train").n_tokens == 64 * n
    verify(tmp_path)


def test_steps_and_micro_batches_without_a_target(
    tiny_config: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    """No token counts in a micro-batch, in a whole step, in the first validation batch."""
    data = shutil.copytree(tiny_dataset, tmp_path / "masked")
    info = json.loads((data / "dataset.json").read_text())
    for split, zeros in (("train", (slice(0, 70), slice(200, 600))), ("val", (slice(0, 70),))):
        mask = np.ones(info["splits"][split]["tokens"], np.uint16)
        for each in zeros:
            mask[each] = 0
        write_split(data, info, f"{split}mask", [mask], 0)
    finish_dataset(data, {key: value for key, value in info.items() if key != "format_version"})
    folder = run(tiny_config, "--data.dir", str(data))
    losses = [*metrics(folder, "loss").values(), *metrics(folder, "val_loss").values()]
    assert np.isfinite(losses).all() and 0.0 in losses[:12]


def test_a_mask_of_another_length_is_rejected(tmp_path: Path) -> None:
    info: dict[str, Any] = {"dataset": "toy", "tokenizer": "bytes", "vocab_size": 257, "source": "a test"}
    info |= {"splits": {}, "shards": []}
    for split, n_tokens in (("train", 10), ("trainmask", 9)):
        write_split(tmp_path, info, split, [np.ones(n_tokens, np.uint16)], 0)
    finish_dataset(tmp_path, info)
    with pytest.raises(UserError, match="trainmask has 9 tokens: expected 10, as train"):
        TokenStream(tmp_path, "train")


# ---- training ----


@pytest.fixture
def config_path(tiny_config: Path, folder: Path) -> Path:
    """The tiny config, to train on the questions."""
    keys = {"data.dir": folder, "data.order": "shuffled", "model.vocab-size": 257, "train.max-steps": 30}
    keys |= {"train.seq-len": 64, "train.batch-tokens": 512, "train.micro-batch": 8, "train.val-every": 30}
    overrides = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    tiny_config.write_text(to_toml(load_config(tiny_config, overrides)))
    return tiny_config


def answer_loss(state: TrainState, x: torch.Tensor, y: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """The mean over all targets that count, from full logits."""
    log_p = state.raw_model(x)[y != IGNORED].log_softmax(-1)
    likelihood = log_p.gather(1, y[y != IGNORED][:, None])
    return -((1 - smoothing) * likelihood.mean() + smoothing * log_p.mean())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_is_the_mean_over_answers(reduction: str, smoothing: float, config_path: Path) -> None:
    """Of the whole step, also when its micro-batches have different numbers of targets; so are the gradients,
    or with reduction = sum those of the sum, of which the loss stays the mean."""
    for micro in ("8", "2", "1"):
        state = build(config_path, "--train.micro-batch", micro, "--train.reduction", reduction,
                      "--train.label-smoothing", str(smoothing))  # fmt: skip
        x, y = map(torch.from_numpy, train_batch(state.batches.stream, 0, 8, 64, "shuffled", seed=1337))
        expected = answer_loss(state, x, y, smoothing)
        loss = forward_backward(state, state.batches.read(0))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        (wanted,) = torch.autograd.grad(expected, state.raw_model.embedding.weight)
        n = int((y != IGNORED).sum()) if reduction == "sum" else 1
        gradient = state.raw_model.embedding.weight.grad
        assert gradient is not None
        torch.testing.assert_close(gradient / n, wanted, atol=1e-6, rtol=1e-4)


def test_training_lowers_it_and_validates_on_it(config_path: Path) -> None:
    run_dir = run(config_path, "--train.label-smoothing", "0.01")  # of which validation is free
    loss = metrics(run_dir, "loss")
    assert loss[30] < 0.5 * loss[1]
    state = build(run_dir / "config.toml")
    start_or_resume(state)
    x, y = map(torch.from_numpy, val_batch(state.val_stream, 0, 5, 64))
    with torch.no_grad():
        expected = answer_loss(state, x, y).item()
    assert metrics(run_dir, "val_loss")[30] == pytest.approx(expected, rel=1e-5)


def test_ranks_weigh_by_their_targets(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over two ranks is that over all targets."""
    config = load_config(config_path, ["--train.micro-batch", "2"])
    stream = TokenStream(config.data.dir, "train")
    loaders = [BatchLoader(stream, config, World(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    batches = [loader.read(0) for loader in loaders]
    counts = torch.tensor([[int((y != IGNORED).sum()) for _, y in batch] for batch in batches])
    monkeypatch.setattr(World, "gather", lambda world, values: counts.sum(1, keepdim=True).double())
    for loader, batch, own in zip(loaders, batches, counts, strict=True):
        weights, n_targets = loader.loss_weights(batch)
        assert n_targets == counts.sum() and weights == pytest.approx((2 * own / n_targets).tolist())


@pytest.mark.slow
def test_processes_change_nothing(config_path: Path) -> None:
    alone = run(config_path, "--name", "one", "--train.max-steps", "4", "--train.reduction", "sum")
    options = ("--name", "two", "--train.max-steps", "4", "--train.micro-batch", "2", "--train.device", "cpu")
    done = run_script(config_path, *options, "--train.reduction", "sum", processes=2)
    assert done.returncode == 0, done.stderr
    for key in ("loss", "grad_norm"):
        assert metrics(alone.with_name("two"), key) == pytest.approx(metrics(alone, key), rel=1e-4)


def test_refusals(config_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="train.seq_len = 32: .* has sequences of 64 tokens"):
        build(config_path, "--train.seq-len", "32")
    with pytest.raises(UserError, match="made for fine-tuning, no running text"):
        open_validation(load_config(config_path), None)
    assert load_config("configs/ssmax_paper/sft.toml").train.max_steps == 10 * (86_820 // 128)
