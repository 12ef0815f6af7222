"""lab/squad.py: one sequence a question, of which the answer counts; how datasets with masks are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from config import load_config
from data.dataset import TokenStream, write_split
from data.tokenizer import get_tokenizer
from data.verify import verify
from infra.cli import UserError
from lab import recall_data, squad

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
def prepare(call: Callable[..., None]) -> Callable[..., None]:
    return partial(call, squad, "--tokenizer", "bytes", "--seq-len", "64")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [article(f"t{i}", 3) for i in range(20)]}), encoding="utf-8")
    articles = [article("a", 2), article("b" * 30, 2), article("c", 2)]
    (tmp_path / "val.json").write_text(json.dumps({"data": articles}))
    return path


@pytest.fixture
def folder(tmp_path: Path, source: Path, prepare: Callable[..., None]) -> Path:
    prepare("--train", source, "--val", tmp_path / "val.json", "--out", tmp_path / "squad")
    return tmp_path / "squad"


def test_sequences_and_masks(folder: Path) -> None:
    """What counts is the first answer and the end-of-text. Questions that are too long are left out."""
    for split, titles, n in (("val", ["a", "c"], 2), ("train", [f"t{i}" for i in range(20)], 3)):
        stream = TokenStream(folder, split)
        assert stream.n_tokens == 64 * n * len(titles) and stream.mask is not None
        sequences = stream.read(0, stream.n_tokens).reshape(-1, 64).tolist()
        masks = stream.mask.read(0, stream.n_tokens).reshape(-1, 64)
        for k, (tokens, mask) in enumerate(zip(sequences, masks, strict=True)):
            title = titles[k // n]
            answer = f" {title}{'!' * (k % n)}"
            prompt = f"All about {title}.\n\nQuestion: What is {title} {k % n}?\nAnswer:"
            end = 1 + len(prompt) + len(answer)
            assert tokens[0] == tokens[end] == BYTES.eot_token and not any(tokens[end + 1 :])
            assert BYTES.decode(tokens[1:end]) == prompt + answer
            assert mask.nonzero()[0].tolist() == list(range(1 + len(prompt), end + 1))
    verify(folder)
    assert load_config("configs/ssmax_paper/sft.toml").train.max_steps == 10 * (86_820 // 128)


def test_from_the_hub(tmp_path: Path, prepare: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def questions(name: str, n: int) -> list[dict[str, Any]]:
        answers: list[list[str]] = [[], *[["a", "b"]] * n]
        common = {"title": "t", "question": "q?"}
        return [common | {"context": f"{name} {i}", "answers": {"text": t}} for i, t in enumerate(answers)]

    dataset = {"train": questions("train", 5), "validation": questions("validation", 2)}
    monkeypatch.setattr("datasets.load_dataset", lambda name: dataset if "squad_v2" in name else {})
    prepare("--out", tmp_path / "out")
    train = TokenStream(tmp_path / "out", "train")
    val = TokenStream(tmp_path / "out", "val")
    assert (train.n_tokens, val.n_tokens) == (5 * 64, 2 * 64)
    assert BYTES.decode(val.read(1, 12).tolist()) == "validation 1"

    def unreachable(name: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(UserError, match="no route to host.*--train train-v2.0.json"):
        prepare("--out", tmp_path / "other")


@pytest.mark.parametrize(
    "text, args, message",
    [
        ("{", [], "bad.json: not valid JSON"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', [], "not of SQuAD's schema.*'answers'"),
        ('{"data": []}', [], "val: no question fits --seq-len 64"),
        ('{"data": []}', ["--val", "none.json"], "none.json: cannot be read"),
    ],
)
def test_bad_input(
    tmp_path: Path, prepare: Callable[..., None], text: str, args: list[str], message: str
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match=message):
        bad = tmp_path / "bad.json"
        prepare("--train", bad, "--val", bad, "--out", tmp_path / "out", *args)
    with pytest.raises(UserError):  # an unfinished dataset cannot be trained on
        TokenStream(tmp_path / "out", "train")


def test_a_finished_dataset_survives_mistakes(
    folder: Path, tmp_path: Path, prepare: Callable[..., None], call: Callable[..., None]
) -> None:
    with pytest.raises(UserError, match="none.json: cannot be read"):
        prepare("--train", tmp_path / "none.json", "--val", tmp_path / "val.json", "--out", folder)
    with pytest.raises(UserError, match="holds squad_.*, another dataset's: choose another --out"):
        call(recall_data, "--sequences", "8", "--out", folder)
    assert TokenStream(folder, "train").mask is not None


def test_a_smaller_dataset_replaces_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]
) -> None:
    """Of fewer shards: none of the larger one's stay, which dataset.json would not list."""
    monkeypatch.setattr(squad, "write_split", partial(write_split, shard_size=64_000))
    for n in (2048, 64):
        call(recall_data, "--sequences", n, "--out", tmp_path)
        assert TokenStream(tmp_path, "train").n_tokens == 64 * n
    verify(tmp_path)
