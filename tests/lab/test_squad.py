"""lab/squad.py: one sequence a question, of which the answer counts; how datasets with masks are
written.
"""

import json
from functools import partial

import pytest
from conftest import check_dataset, one_line

from config import load_config
from data.dataset import TokenStream, write_split
from data.tokenizer import get_tokenizer
from infra.cli import UserError
from lab import recall_data, squad

BYTES = get_tokenizer("bytes")


def article(title, n):
    """n questions that have answers, one that has none, and an answer without a question."""
    qas = [(f"What is {title} {i}?", [f"{title}{'!' * i}", "no"]) for i in range(n)]
    qas += [("Why?", []), ("  ", ["because"])]
    common = {"context": f"All about {title}."}
    return [common | {"question": question, "answers": {"text": texts}} for question, texts in qas]


@pytest.fixture
def prepare(call):
    return partial(call, squad, "--tokenizer", "bytes", "--seq-len", "64")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder as `datasets` reads it."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    splits = {"train": [article(f"t{i}", 3) for i in range(20)]}
    splits["validation"] = [article("a", 2), article("b" * 30, 2), article("c", 2)]
    (tmp_path / "source").mkdir()
    for split, articles in splits.items():
        lines = [json.dumps(row) + "\n" for rows in articles for row in rows]
        (tmp_path / f"source/{split}.jsonl").write_text("".join(lines))
    return tmp_path / "source"


@pytest.fixture
def folder(tmp_path, source, prepare):
    prepare("--source", source, "--out", tmp_path / "squad")
    return tmp_path / "squad"


def test_sequences_and_masks(folder):
    """What counts is the first answer and the end-of-text. Questions that are too long are left
    out.
    """
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
    check_dataset(folder)
    assert load_config("configs/papers/ssmax_sft.toml").train.max_steps == 10 * (86_820 // 128)


def test_the_answer_alone(source, tmp_path, prepare, folder):
    """As in the paper: the masks lack the end-of-text, and nothing else changes."""
    prepare("--source", source, "--out", tmp_path / "alone", "--answer-only")
    for split in ("val", "train"):
        both, alone = (TokenStream(path, split) for path in (folder, tmp_path / "alone"))
        tokens = both.read(0, both.n_tokens)
        assert (alone.read(0, alone.n_tokens) == tokens).all()
        assert both.mask is not None and alone.mask is not None
        masks = [
            stream.mask.read(0, both.n_tokens).astype(bool)
            for stream in (both, alone)
            if stream.mask
        ]
        assert (masks[1] == masks[0] & (tokens != BYTES.eot_token)).all() and masks[1].any()
    assert json.loads((tmp_path / "alone/dataset.json").read_text())["answer_only"]


@pytest.mark.parametrize("place", [0, 37, 80, 193])
def test_shorten_keeps_the_answer_at_its_share_of_the_context(place):
    context = "." * place + "answer" + "," * (193 - place)
    row = {
        "context": context,
        "question": "Why?",
        "answers": {"text": ["answer"], "answer_start": [place]},
    }
    assert squad.fit_sequence(row, BYTES, 128, shorten=False) is None
    sequence = squad.fit_sequence(row, BYTES, 128, shorten=True)
    assert sequence is not None
    shorter, _ = BYTES.decode(sequence.tokens[1:].tolist()).split(
        "\n\nQuestion: Why?\nAnswer: answer"
    )
    assert (
        shorter in context
        and "answer" in shorter
        and 128 - 2 * 10 < sum(sequence.tokens > 0) <= 128
    )
    assert shorter.index("answer") / (len(shorter) - 6) == pytest.approx(place / 193, abs=0.01)


def test_mistakes_leave_a_finished_dataset(
    folder,
    source,
    tmp_path,
    prepare,
    call,
):
    new = tmp_path / "new"
    with pytest.raises(UserError, match="none: cannot be read: .*; --source may also be a folder"):
        prepare("--source", tmp_path / "none", "--out", new)
    with pytest.raises(UserError, match="val: no question fits --seq-len 9"):
        prepare("--source", source, "--seq-len", 9, "--out", new)
    with pytest.raises(
        UserError, match="--seq-len: '1000.*': expected an integer, at least 2, at most"
    ):
        prepare("--source", source, "--seq-len", 10**20, "--out", new)
    (source / "validation.jsonl").rename(tmp_path / "validation.jsonl")
    with pytest.raises(UserError, match="found .*'train'.*: expected context in validation"):
        prepare("--source", source, "--out", new)
    assert not new.exists()
    with pytest.raises(UserError, match="holds a finished dataset of other settings"):
        prepare("--source", source, "--seq-len", 9, "--out", folder)
    with pytest.raises(UserError, match="holds squad_.*, another dataset's: choose another --out"):
        call(recall_data, "--sequences", "8", "--out", folder)
    assert TokenStream(folder, "train").mask is not None


def test_a_smaller_dataset_replaces_a_larger_one(tmp_path, monkeypatch, call):
    """Of fewer shards: none of the larger one's stay, which dataset.json would not list."""
    monkeypatch.setattr(squad, "write_split", partial(write_split, shard_size=64_000))
    for n in (2048, 64):
        call(recall_data, "--sequences", n, "--out", tmp_path)
        with one_line(tmp_path, "holds a finished dataset"):
            call(recall_data, "--sequences", 128, "--out", tmp_path)
        call(recall_data, "--sequences", n, "--out", tmp_path)  # made before
        assert TokenStream(tmp_path, "train").n_tokens == 64 * n
        check_dataset(tmp_path)
        (tmp_path / "dataset.json").unlink()
