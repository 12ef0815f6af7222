"""export.py: the files against the model, and against transformers where that is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_eval_length import save_run
from test_model import make_gpt

from data.tokenizer import get_tokenizer
from hub import export
from infra.cli import UserError
from model import GPT

torch.set_num_threads(1)
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "mlp_hidden": 48}
OPTIONS = [
    pytest.param({**family, "bias": bias, "tie_embeddings": tie}, id=f"{name} bias={bias} tie={tie}")
    for name, family in (("llama", LLAMA), ("neox", {}))
    for bias in (True, False)
    for tie in (True, False)
]


def make_run(folder: Path, **options: Any) -> tuple[Path, GPT]:
    """A run whose norms and biases, too, are away from their initial values."""
    attention = options.pop("attention", {})
    gpt = make_gpt(attention, seq_len=32, std=0.2, vocab_size=257, rope_theta=5000.0, **options)
    with torch.no_grad():
        for p in gpt.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape))
    save_run(folder / "run", gpt.config, gpt, step=1, tokenizer="bytes")
    return folder / "run", gpt


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, args)])
    export.main()


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """By the format's description: u64 size, JSON header, then data at the offsets given."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert start % 8 == 0
    header = json.loads(content[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors, end = {}, 0
    for name, entry in header.items():
        assert entry["dtype"] == "F32" and entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        data = np.frombuffer(content[start:][slice(*entry["data_offsets"])], "<f4")
        tensors[name] = torch.from_numpy(data.reshape(entry["shape"]).copy())
    assert start + end == len(content)
    return tensors


@pytest.mark.parametrize("options", OPTIONS)
def test_every_weight_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    run, gpt = make_run(tmp_path, **options)
    call(monkeypatch, run, tmp_path / "out")
    tensors = read_safetensors(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 257 and config["tie_word_embeddings"] == options["tie_embeddings"]
    written = torch.cat([t.ravel() for t in tensors.values()]).sort().values
    kept = [p[:257] if p.shape[0] == gpt.padded_vocab else p for p in gpt.parameters()]
    ours = torch.cat([p.detach().ravel() for p in kept]).sort().values
    if not options["bias"] and config["model_type"] == "gpt_neox":
        written = written[written != 0]  # its biases
    assert torch.equal(written, ours)


@pytest.mark.parametrize("options", OPTIONS)
def test_transformers_gives_the_same_logits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
) -> None:
    pytest.importorskip("transformers")
    run, _ = make_run(tmp_path, **options)
    call(monkeypatch, run, tmp_path / "out", "--check")
    out = capsys.readouterr().out
    assert float(out.split("between the logits: ")[1]) <= 1e-4


def test_the_merge_that_made_a_token() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5, b"abab": 6}
    assert export.split_last(b"ab", ranks) == (b"a", b"b")
    assert export.split_last(b"abc", ranks) == (b"ab", b"c")  # ab was there before bc
    assert export.split_last(b"abab", ranks) == (b"ab", b"ab")


def test_tokenizer_file() -> None:
    tokenizer = get_tokenizer("bytes")
    model = export.tokenizer_json(tokenizer)["model"]
    letters = export.byte_letters()
    assert len(set(letters.values())) == 256 and all(len(letter) == 1 for letter in letters.values())
    assert letters[ord("A")] == "A" and letters[ord(" ")] == "Ġ" and letters[ord("\n")] == "Ċ"
    assert model["vocab"] == {letters[i]: i for i in range(256)} | {"<|endoftext|>": 256}
    assert model["merges"] == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": {"normaliser": "ssmax"}}, "attention.normaliser = ssmax"),
        ({"attention": {"reweight_p": 3}}, "softmax with reweight_p = 3"),
        ({"norm": "rmsnorm"}, "model.norm = rmsnorm, model.mlp = gelu: expected rmsnorm and swiglu"),
    ],
)
def test_what_does_not_match_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    run, _ = make_run(tmp_path, **options)
    with pytest.raises(UserError, match=message):
        call(monkeypatch, run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(tmp_path)
    with pytest.raises(UserError, match="exists; expected a new folder"):
        call(monkeypatch, run, run)
