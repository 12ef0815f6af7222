"""hub/export.py against transformers: the same logits, the same tokens; errors in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import save_run

from config import load_config
from data.tokenizer import get_tokenizer
from hub import export
from infra.cli import UserError
from model import GPT

FAMILIES = {
    "llama": ["--model.norm", "rmsnorm", "--model.mlp", "swiglu", "--model.mlp-hidden", "48"],
    "llama grouped": ["--model.norm", "rmsnorm", "--model.mlp", "swiglu", "--model.n-kv-head", "1"],
    "neox": ["--model.gelu", "tanh"],
    "neox exact": ["--model.gelu", "exact"],
}


def make_run(tiny_config: Path, *overrides: str) -> Path:
    """A run with random weights, norms and biases too."""
    config = load_config(
        tiny_config, ["--model.vocab-size", "257", "--model.rope-theta", "5000.0", *overrides]
    )
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return save_run(config.run_dir, config, model)


@pytest.mark.parametrize("tie", ["true", "false"])
@pytest.mark.parametrize("bias", ["true", "false"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_transformers_gives_the_same_logits(family, bias, tie, tiny_config, call, capsys):
    """Loading is strict, so equal logits also mean that each weight is written, and written once."""
    pytest.importorskip("transformers")
    out = tiny_config.with_name("out")
    run = make_run(tiny_config, *family, "--model.bias", bias, "--model.tie-embeddings", tie)
    call(export, run, out, "--check")
    assert float(capsys.readouterr().out.split("between the logits: ")[1]) <= 1e-4
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files <= {path.name for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 257 and config["tie_word_embeddings"] == (tie == "true")
    assert config["rope_parameters"]["rope_theta"] == 5000.0


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_exported_tokenizer_gives_the_same_tokens(name, tmp_path):
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


def test_one_line_without_transformers(tiny_config, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    run, out = make_run(tiny_config), tiny_config.with_name("out")
    with pytest.raises(UserError, match="^transformers is not installed: pip install -r requirements-hub"):
        call(export, run, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--attention.normaliser ssmax", "attention is ssmax.*: transformers has plain softmax"),
        ("--attention.reweight-p 3", "reweight_p = 3"),
        ("--attention.scores cosine", "scores = cosine"),
        ("--model.norm rmsnorm", "model.norm = rmsnorm, model.mlp = gelu: expected rmsnorm and swiglu"),
        ("--train.loss logit_norm", "train.loss = logit_norm"),
        ("--model.n-kv-head 1", "GPT-NeoX has no grouped-query heads"),
    ],
)
def test_models_without_a_counterpart(overrides, message, tiny_config):
    with pytest.raises(UserError, match=message):
        export.choose_architecture(load_config(tiny_config, overrides.split()))


def test_only_a_new_folder_is_written(tiny_config, call):
    pytest.importorskip("transformers")
    run = make_run(tiny_config)
    with pytest.raises(UserError, match="exists; expected a new folder"):
        call(export, run, run)
