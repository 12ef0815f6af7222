"""lab/recall_data.py and lab/recall.py: right answers, right scores, and a model that learns to
give them.
"""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import check_dataset, make_byte_run
from launch import CPU, run
from torch.nn.functional import one_hot

from data.batches import train_batch
from data.dataset import IGNORED, TokenStream
from infra.cli import UserError
from lab import recall, recall_data
from lab.recall_data import TASKS, VOCAB, make_sequence
from measure import read_rows, select
from positions import UNSCALED


def solve(text):
    """The answers of a sequence's text, without its end-of-text, by position."""
    n = len(text)
    answers = {}
    if text[0] == "F":
        for i in range(1, n, 2):
            if text[i] == "w":
                stored = text[i + 1]
            elif text[i] == "r":
                answers[i + 1] = stored
        return answers
    shown, _, asked = text[1:].partition("=")
    if text[0] == "M":
        value = dict(re.findall("([A-Z])([a-z])", shown))
        assert len(value) == 8
        return {n - len(asked) + i: value[asked[i - 1]] for i in range(1, 16, 2)}
    (items,) = re.findall("<(.*)>", shown)
    assert len(set(items)) == 8
    answer = {"C": items, "R": items[::-1], "S": "".join(sorted(items))}[text[0]]
    return {n - 8 + i: letter for i, letter in enumerate(answer)}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [40, 64, 4096])
def test_answers(task, length):
    """The mask marks the right answers and nothing else; all is fixed by the arguments; depths
    vary.
    """
    depths = []
    for i in range(30):
        tokens, mask = make_sequence(task, length, str(i))
        assert tokens.shape == mask.shape == (length,) and tokens[0] == VOCAB - 1
        text = bytes(tokens[1:].tolist()).decode("ascii")
        assert {int(j): text[j] for j in mask[1:].nonzero()[0]} == solve(text)
        depths.append(max(text.find(mark) for mark in ("w1", "w0", "<")))
        for again, same in ((str(i), True), (f"{i}x", False)):
            assert np.array_equal(tokens, make_sequence(task, length, again)[0]) == same
    if task in ("copy", "reverse", "sort") and length == 4096:
        assert min(depths) < 800 and max(depths) > 3200


def test_dataset(tmp_path, call):
    """Windows are sequences in either order, and targets are answers only."""
    call(recall_data, "--out", tmp_path, "--sequences", 50, "--seq-len", 40)
    check_dataset(tmp_path)
    stream = TokenStream(tmp_path, "train")
    for order in ("sequential", "shuffled"):
        x, y = train_batch(stream, 1, 50, 40, order, seed=1)
        assert sorted(chr(row[1]) for row in x) == sorted("MCRSF" * 10)
        for row, targets in zip(x, y, strict=True):
            text = bytes(row[1:].tolist()).decode("ascii")
            assert {i: chr(t) for i, t in enumerate(targets.tolist()) if t != IGNORED} == solve(
                text
            )


class Oracle:
    """A model that predicts these tokens, wherever it is asked."""

    def __init__(self, tokens):
        self.tokens, self.embedding = tokens, torch.nn.Embedding(1, 1)

    def hidden(self, x, rope):
        return one_hot(self.tokens[:, 1 : x.shape[1] + 1], VOCAB)

    def logits(self, hidden):
        return hidden


def test_scores_of_known_mistakes():
    rows = [make_sequence("copy", 64, str(i)) for i in range(4)]
    tokens, mask = (torch.tensor(np.array(part, np.int64)) for part in zip(*rows, strict=True))
    predicted = tokens.clone()
    predicted[1, -8] += 1
    predicted[2, -1] += 1
    predicted[2, -3] += 1
    predicted[3, -9] += 1  # the "=", no answer
    right = recall.answers_right(Oracle(predicted), tokens, mask.bool(), UNSCALED)  # type: ignore[arg-type]
    wrong = [(row, place) for row, place in (~right).nonzero().tolist()]
    assert right.shape == (4, 8) and wrong == [(1, 0), (2, 5), (2, 7)]


@pytest.mark.slow
def test_a_model_learns(tmp_path, call, tiny_config, capsys):
    """Seconds of training solve a task at its own length; a length that the model rejects says so."""
    call(
        recall_data,
        "--out",
        tmp_path / "data",
        "--tasks",
        "sort",
        "--sequences",
        6400,
        "--seq-len",
        40,
    )
    overrides = [
        *("--data.dir", tmp_path / "data"),
        *("--model.vocab-size", VOCAB, "--model.n-embd", 64, "--model.n-layer", 1),
        *("--train.seq-len", 40, "--train.batch-tokens", 1280, "--train.micro-batch", 32),
        *("--train.max-steps", 150, "--train.val-every", 1000, "--train.checkpoint-every", 1000),
        *(
            "--optimizer.lr",
            1e-2,
            "--optimizer.warmup-steps",
            10,
            "--attention.normaliser",
            "ssmax_pn",
        ),
    ]
    run_dir = run(tiny_config, *map(str, overrides))
    call(recall, run_dir, "--lengths", 40, 80, "--samples", 50)
    rows = read_rows(run_dir)
    for measure in ("sort", recall.MEAN):
        short, long = select(rows, measure=measure).sort_values("length").value
        assert short > 0.95 and np.isnan(long)
    out = capsys.readouterr().out
    assert "no result" in out and "p_n" in out
    assert (run_dir / "recall.png").exists()


def test_what_it_rejects(tmp_path, call, tiny_config):
    untrained = make_byte_run(tiny_config)
    with pytest.raises(UserError, match="expected a dataset of lab.recall_data"):
        call(recall, untrained)
    call(recall_data, "--out", tmp_path / "data", "--sequences", 5)
    with pytest.raises(UserError, match="65 tokens: expected an even number of at least 40"):
        call(recall, untrained, "--data", tmp_path / "data", "--lengths", 65)


def test_no_sequence_of_the_test_is_one_of_the_dataset(monkeypatch):
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        recall, "answers_right", lambda _, tokens, *more: seen.append(tokens) or tokens[:, :1]
    )
    model = SimpleNamespace(autocast=nullcontext)
    recall.score(CPU, "", model, "copy", 64, 20, UNSCALED)  # type: ignore[arg-type]
    tested = torch.cat(seen).tolist()
    seeds = [f"0 {split} {i}" for split in ("train", "val") for i in range(20)]
    assert len(tested) == 20
    assert not any(make_sequence("copy", 64, seed).tokens.tolist() in tested for seed in seeds)
