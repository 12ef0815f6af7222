"""A tokenizer.json of the tokenizers library: from its training to the sampled text."""

import json
import os

import pytest
from conftest import one_line, train_bpe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import eval_length
import sample
import train
from data import prepare
from data.dataset import TokenStream
from data.tokenizer import encode, get_tokenizer
from training.checkpoint import load_model

TEXTS = [
    f"def naïve_{i}(x): return '日本語' * {i}  # <|endoftext|> in a text\n" * 9 for i in range(30)
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def bpe_file(tmp_path):
    path = tmp_path / "bpe.json"
    path.write_text(train_bpe(TEXTS, 300))
    return path


@pytest.fixture
def dataset(tmp_path, corpus, bpe_file, call):
    out = tmp_path / "data"
    call(prepare, "--files", corpus, "--tokenizer", bpe_file, "--out", out, "--shard-size", 1500)
    return out


def test_a_dataset_explains_itself(dataset, bpe_file, tmp_path):
    """By its own copy; a text that names the special token does not end a document."""
    content = bpe_file.read_text()
    assert (dataset / "tokenizer.json").read_text() == content
    bpe_file.unlink()
    stream = TokenStream(dataset, "val")
    assert (stream.vocab_size, stream.eot) == (300, 0)
    tokens = (
        stream.read(0, stream.n_tokens).tolist()
        + TokenStream(dataset, "train").read(0, 10**5).tolist()
    )
    tokenizer = get_tokenizer(stream.info["tokenizer"], stream.tokenizer_file)
    text = tokenizer.decode(tokens)
    assert text.startswith("".join(f"<|endoftext|>{text}" for text in TEXTS))
    assert encode(tokenizer, TEXTS[3]).tolist() == tokenizer.encode_ordinary(TEXTS[3])
    (dataset / "tokenizer.json").write_text(content + " ")
    with one_line(dataset / "tokenizer.json", "the tokens are of tokenizer-"):
        stream.tokenizer_file  # noqa: B018


def test_a_run_needs_no_other_file(dataset, bpe_file, tiny_config, tmp_path, call, capsys):
    """It is sampled without the data, and refused where tokens are another tokeniser's."""
    small = ["--model.vocab-size", 300, "--train.max-steps", 3]
    call(train, tiny_config, *small, "--data.dir", dataset)
    run = tmp_path / "runs" / "tiny"
    other = tmp_path / "other.json"
    other.write_text(bpe_file.read_text() + "\n")
    files = ["--files", tmp_path / "texts.jsonl", "--shard-size", 1500]
    call(prepare, *files, "--tokenizer", other, "--out", tmp_path / "other")
    with one_line(tmp_path / "other", "expected tokenizer-", "the model's tokenizer"):
        call(eval_length, run, "--data", tmp_path / "other", "--lengths", 16, "--tokens", 64)
    with one_line("init_from", "trained on tokens of tokenizer-"):
        call(
            train,
            tiny_config,
            *small,
            "--name",
            "b",
            "--init-from",
            run,
            "--data.dir",
            tmp_path / "other",
        )
    for path in dataset.iterdir():
        path.unlink()
    capsys.readouterr()
    call(sample, run, "--prompt", "def é", "--tokens", 30)
    assert capsys.readouterr().out.startswith("def é")
    assert load_model(run).tokenizer.name == get_tokenizer(str(bpe_file)).name


def test_text_is_printed_as_soon_as_it_is_complete(bpe_file, capsys):
    """Characters of several tokens, half of one at the end, and spaces that a tokeniser puts before
    words.
    """
    words = Tokenizer(models.BPE({"</s>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4}, [("▁", "a")]))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["</s>"])
    tokens = get_tokenizer(str(bpe_file))
    half = tokens.encode_ordinary("é日")[:-1]
    with_spaces = get_tokenizer("", words.to_str())
    assert with_spaces.eot_token == 0
    for tokenizer, prompt, new, expected in (
        (tokens, "é", tokens.encode_ordinary(TEXTS[0]), f"é{TEXTS[0]}\n"),
        (tokens, "", half, "é\ufffd\n"),
        (get_tokenizer("bytes"), "é", [*"日a".encode(), 0x97, *b"b"], "é日a\ufffdb\n"),
        (with_spaces, "a b", [4, 1, 3, 0, 2], "a b a b\n"),
    ):
        sample.print_text(tokenizer, tokenizer.encode_ordinary(prompt)[-1:], new)
        assert prompt + capsys.readouterr().out == expected


def test_what_cannot_be_used(tmp_path, bpe_file):
    content = json.loads(bpe_file.read_text())
    no_end = content | {"added_tokens": []}
    no_end["model"] = content["model"] | {"vocab": {**content["model"]["vocab"]}}
    del no_end["model"]["vocab"]["<|endoftext|>"]
    plain_end = content | {"added_tokens": [content["added_tokens"][0] | {"special": False}]}
    large = content | {
        "model": content["model"] | {"vocab": {**content["model"]["vocab"], "large": 65536}}
    }
    for changed, part in (
        ([], "expected a tokenizer.json of the tokenizers library"),
        (no_end, "no end-of-text token: expected a special token <|endoftext|> or"),
        (plain_end, "the text <|endoftext|> is its end-of-text token"),
        (large, "65,537 tokens: expected at most 65,536"),
        (content | {"model": content["model"] | {"dropout": 0.1}}, "model.dropout 0.1: expected 0"),
    ):
        bpe_file.write_text(json.dumps(changed))
        with one_line(bpe_file, part):
            get_tokenizer(str(bpe_file))
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="?"))
    words.add_special_tokens(["</s>"])
    words.pre_tokenizer = pre_tokenizers.Punctuation()
    with one_line("tokenizer-", "WordLevel error: Missing"):
        get_tokenizer("", words.to_str()).encode_ordinary("b")
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("gpt3", "nothing.json", str(tmp_path / "pipe.json")):
        with one_line(f"tokenizer {name!r}", "or a tokenizer.json"):
            get_tokenizer(name)
