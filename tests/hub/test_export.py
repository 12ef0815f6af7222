"""hub/export.py against transformers: the same logits, the same tokens; errors in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_eval_length import save_run
from test_model import make_gpt

from data.tokenizer import get_tokenizer
from hub import export
from infra.cli import UserError

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "mlp_hidden": 48}
OPTIONS = [
    pytest.param({**family, "bias": bias, "tie_embeddings": tie}, id=f"{name} bias={bias} tie={tie}")
    for name, family in (("llama", LLAMA), ("neox", {}))
    for bias in (True, False)
    for tie in (True, False)
]


def make_run(folder: Path, **options: Any) -> Path:
    """A run whose norms and biases, too, are away from their initial values."""
    attention = options.pop("attention", {})
    gpt = make_gpt(attention, seq_len=32, std=0.2, vocab_size=257, rope_theta=5000.0, **options)
    with torch.no_grad():
        for p in gpt.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape))
    save_run(folder / "run", gpt.config, gpt, step=1, tokenizer="bytes")
    return folder / "run"


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["export", *map(str, args)])
    export.main()


@pytest.mark.parametrize("options", OPTIONS)
def test_transformers_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: Any
):
    """Loading is strict, so equal logits also mean that each weight is written, and written once."""
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    call(monkeypatch, make_run(tmp_path, **options), out, "--check")
    assert float(capsys.readouterr().out.split("between the logits: ")[1]) <= 1e-4
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files <= {path.name for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 257 and config["tie_word_embeddings"] == options["tie_embeddings"]
    assert config["rope_parameters"]["rope_theta"] == 5000.0


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_exported_tokenizer_gives_the_same_tokens(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    try:
        ours = get_tokenizer(name)
    except UserError:
        pytest.skip("GPT-2's vocabulary is not at hand")
    export.convert_tokenizer(ours, 1_000_000).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.n_vocab
    source = Path(__file__).parents[2].joinpath("config.py").read_text() + export.CHECK_TEXT
    odd = bytes(range(256)).decode("latin-1") + "  \r\n\t ß 日本語 🙂 ½ " + "a" * 300
    for text in (source, odd):
        assert theirs.encode(text) == ours.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.bos_token_id == theirs.eos_token_id == ours.eot_token


def test_one_line_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    run = make_run(tmp_path)
    with pytest.raises(UserError, match="^[a-z]+ is not installed: pip install -r requirements-hub.txt$"):
        call(monkeypatch, run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": {"normaliser": "ssmax"}}, "attention.normaliser = ssmax"),
        ({"attention": {"reweight_p": 3}}, "softmax with reweight_p = 3"),
        ({"norm": "rmsnorm"}, "model.norm = rmsnorm, model.mlp = gelu: expected rmsnorm and swiglu"),
    ],
)
def test_models_without_a_counterpart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
):
    run = make_run(tmp_path, **options)
    with pytest.raises(UserError, match=message):
        call(monkeypatch, run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_a_new_folder_is_written(tmp_path: Path):
    export.make_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "file").touch()
    with pytest.raises(UserError, match="exists; expected a new folder"):
        export.make_folder(tmp_path / "a")
