"""lab.bpe: the same text gives the same tokeniser, which get_tokenizer reads."""

import json

from conftest import one_line

from data.tokenizer import get_tokenizer, train_bpe
from lab import bpe

TEXTS = [f"def naïve_{i}(x): return '日本語' * {i}\n" * 9 for i in range(30)]


def test_files_become_a_tokeniser(tmp_path, call):
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = tmp_path / "bpe.json"
    call(bpe, "--files", corpus, "--vocab", 300, "--out", out)
    assert out.read_text() == train_bpe(TEXTS, 300)
    tokenizer = get_tokenizer(str(out))
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (300, 0)
    assert tokenizer.decode(tokenizer.encode_ordinary(TEXTS[7])) == TEXTS[7]


def test_a_lost_place_is_named_before_the_training(tmp_path, call):
    with one_line("--out", "expected a folder that exists"):
        call(bpe, "--vocab", 300, "--out", tmp_path / "no" / "bpe.json")


def test_another_file_is_spared(tmp_path, call):
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be")
    with one_line("another file has this name"):
        call(bpe, "--files", text, "--vocab", 260, "--out", text)
    assert text.read_text() == "to be or not to be"
    for _ in range(2):  # the same file again is none
        call(bpe, "--files", text, "--vocab", 260, "--out", tmp_path / "bpe.json")
