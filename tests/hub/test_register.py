"""hub/register.py in tiny models of transformers: Llama and Qwen3 with grouped-query heads,
GPT-NeoX.
"""

import pytest
import torch
from safetensors.torch import load_file

from hub.register import learned_parameters, register
from infra.cli import UserError
from schema import AttentionConfig

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **GROUPED),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES),
}
# it does not say that it calls the interface
BIOGPT = {"biogpt": lambda: transformers.BioGptConfig(**SIZES)}
MASK = torch.ones(3, 20, dtype=torch.long)
MASK[1, :5] = MASK[2, :9] = 0


def make_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model, torch.randint(1, 97, (3, 20))  # 0 is padding


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES | BIOGPT)
def test_softmax_is_transformers_own(family):
    model, x = make_model((FAMILIES | BIOGPT)[family]())
    for layer in model.modules():
        if hasattr(layer, "scaling"):
            layer.scaling *= 1.5  # not d^(-1/2)
    register("ours", AttentionConfig())
    for mask in (torch.ones_like(MASK), MASK, MASK.flip(1)):
        model.set_attn_implementation("sdpa")
        theirs = model(x, attention_mask=mask).logits
        model.set_attn_implementation("ours")
        ours = model(x, attention_mask=mask).logits
        assert (theirs - ours)[mask.bool()].abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{"normaliser": "lssa", "reweight_p": 15}, {"normaliser": "ssmax"}], ids=str
)
def test_n_counts_real_keys(options, family):
    """Padded or alone, with a dynamic, a static or no cache: the same logits, the same greedy
    tokens.
    """
    model, x = make_model(FAMILIES[family]())
    register("ours", AttentionConfig(**options))
    model.set_attn_implementation("ours")
    alone = model(x[2:, 9:]).logits
    assert (model(x, attention_mask=MASK).logits[2:, 9:] - alone).abs().max() <= 1e-4
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(x[2:, 9:], use_cache=False, **greedy)[0]
    for more in ({}, {"cache_implementation": "static"}):
        assert torch.equal(
            model.generate(x, attention_mask=MASK, **greedy, **more)[2, 9:], expected
        )
        assert torch.equal(model.generate(x[2:, 9:], **greedy, **more)[0], expected)


def test_learned_parameters_are_trained_and_saved(tmp_path):
    model, x = make_model(FAMILIES["llama"]())
    register("ours", AttentionConfig(normaliser="ssmax", scale_init=0.3))
    model.set_attn_implementation("ours")
    with torch.inference_mode():  # a first pass, as in an evaluation before training
        model(x)
    learned = learned_parameters(model)
    assert [p.tolist() for p in learned] == [[pytest.approx(0.3)] * 4] * 2
    with torch.enable_grad():
        model(x, labels=x).loss.backward()
    assert all(p.grad.abs().min() > 0 for p in learned)
    for p in learned:
        p.add_(0.1)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ours")
    learned_parameters(loaded)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_other_options_replace_a_normaliser():
    model, x = make_model(FAMILIES["llama"]())
    logits = []
    for p in (3, 15):
        register("ours", AttentionConfig(normaliser="lssa", reweight_p=p))
        model.set_attn_implementation("ours")
        logits.append(model(x).logits)
    assert not torch.equal(*logits)


def test_what_cannot_run_is_rejected():
    with pytest.raises(UserError, match="ssmax_pn: one p_n for all layers"):
        register("ours", AttentionConfig(normaliser="ssmax_pn"))
    with pytest.raises(UserError, match="sigmoid: reads the number of all keys"):
        register("ours", AttentionConfig(normaliser="sigmoid", bias="log_len"))
    register("ours", AttentionConfig())
    other, _ = make_model(
        transformers.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2)
    )
    other.set_attn_implementation("ours")
    with pytest.raises(UserError, match="MambaForCausalLM: no layer calls"):
        learned_parameters(other)
    model, x = make_model(FAMILIES["llama"]())
    model.set_attn_implementation("ours")
    holes = MASK.clone()
    holes[0, 4] = 0
    with pytest.raises(UserError, match="zeros between ones"):
        model(x, attention_mask=holes)
    with pytest.raises(UserError, match="expected a padding mask"):
        model(x, attention_mask=torch.zeros(3, 1, 20, 20))
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(UserError, match="in one sequence"):
        model(x[:1, :6], position_ids=packed, use_cache=False)
    with pytest.raises(UserError, match="cannot run with dropout"):
        dropping, x = make_model(
            transformers.LlamaConfig(**SIZES, **GROUPED, attention_dropout=0.1)
        )
        dropping.set_attn_implementation("ours")
        dropping.train()(x)
    with pytest.raises(UserError, match="cannot run with softcap"):  # of Gemma 2
        qkv = torch.zeros(3, 1, 4, 5, 16)
        transformers.AttentionInterface()["ours"](
            model.model.layers[0].self_attn, *qkv, None, softcap=50.0
        )
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    bloom = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ours")
    with pytest.raises(
        UserError, match="BloomForCausalLM does not call transformers' AttentionInterface"
    ):
        bloom(x)  # its own attention, without a mask, would see later keys
    sliding, x = make_model(transformers.MistralConfig(**SIZES, **GROUPED, sliding_window=4))
    sliding.set_attn_implementation("ours")
    with pytest.raises(UserError, match="expected causal attention to all keys"):
        sliding(x)
