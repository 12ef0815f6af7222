"""lab/import_.py: what hub/export.py wrote comes back; what does not fit is rejected by name."""

import pytest
import torch
from conftest import FAMILIES, make_byte_run

from config import load_config
from hub import export
from infra.cli import UserError
from lab import import_
from model import GPT
from training.checkpoint import load_model
from training.state import init_from_run

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("bias", ["true", "false"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_exported_models_come_back(family, bias, tiny_config, call, capsys):
    options = [*family, "--model.bias", bias]
    run = make_byte_run(tiny_config, *options)
    out = tiny_config.with_name("out")
    back = tiny_config.with_name("back")
    call(export, run, out)
    call(import_, out, back)
    printed = capsys.readouterr().out
    assert "tokeniser bytes" in printed and float(printed.rsplit(" ", 1)[1]) <= 1e-4
    x = torch.randint(257, (2, 16))
    assert (load_model(back).model(x) - load_model(run).model(x)).abs().max() <= 1e-4
    if bias == "true":  # GPT-NeoX has biases in any case
        overrides = ["--model.vocab-size", "257", *options, "--attention.normaliser", "ssmax"]
        fresh = GPT(load_config(tiny_config, overrides))
        summary = "\n".join(init_from_run(fresh, back, "bytes"))
        assert "normaliser.s" in summary
    with pytest.raises(UserError, match="exists; expected a new folder"):
        call(import_, out, back)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 8}, "head_dim = 8: our model does not compute that; expected 16"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = linear",
        ),
        (
            {"vocab_size": 100_000},
            "model.vocab_size = 100000: expected less than or equal to 65536",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, message, tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(UserError, match=message):
        import_.convert_config(config, "there", tmp_path / "run")


def test_any_epsilon_is_taken(tiny_config, call, capsys):
    """Llama's own is 1e-6. A large one changes the logits, so that both have to use it."""
    run = make_byte_run(tiny_config, *FAMILIES["llama"], "--model.norm-eps", "0.1")
    out = tiny_config.with_name("out")
    call(export, run, out)
    assert transformers.AutoConfig.from_pretrained(out).rms_norm_eps == 0.1
    call(import_, out, tiny_config.with_name("back"))
    assert float(capsys.readouterr().out.rsplit(" ", 1)[1]) <= 1e-4
    assert load_model(tiny_config.with_name("back")).config.model.norm_eps == 0.1


def test_all_misfits_are_listed(tmp_path):
    pythia = transformers.GPTNeoXConfig()
    with pytest.raises(
        UserError, match="partial_rotary_factor = 0.25: .*\n.*use_parallel_residual = True"
    ):
        import_.convert_config(pythia, "there", tmp_path / "run")
    with pytest.raises(UserError, match="model_type = qwen3: expected llama or gpt_neox"):
        import_.convert_config(transformers.Qwen3Config(), "there", tmp_path / "run")
    with pytest.raises(UserError, match="model_type = mamba: expected llama or gpt_neox"):
        import_.convert_config(transformers.MambaConfig(), "there", tmp_path / "run")


def test_nothing_there_is_one_line(call, tmp_path):
    with pytest.raises(UserError, match="nowhere: cannot be loaded"):
        call(import_, tmp_path / "nowhere", tmp_path / "run")
