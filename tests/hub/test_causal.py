"""Any causal model of transformers: its losses are those of a plain loop over slices in float64."""

import copy

import pytest
import torch
from conftest import FAMILIES, make_byte_run
from torch.nn import functional as F

from evaluation import GPTScorer
from hub import export
from infra.cli import UserError
from positions import RopeScaling
from training.checkpoint import load_model

transformers = pytest.importorskip("transformers")
from hub import causal  # noqa: E402

T = 16
VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": T,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=12),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, sliding_window=6),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GROUPED,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
}


def make_model(name):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.initializer_range = 0.3
    return transformers.AutoModelForCausalLM.from_config(config).double()


def slice_losses(model, tokens, n_targets, window=0):
    """Each target by a forward pass of its own, in float64; a window by a 4D mask of its own."""
    own = copy.deepcopy(model).eval()
    own.set_attn_implementation("eager")
    losses = []
    for i in range(tokens.shape[1] - n_targets, tokens.shape[1]):
        x = tokens[:, :i]
        options = {}
        if window:
            distance = torch.arange(i)[:, None] - torch.arange(i)
            masks = {}
            sliding = getattr(model.config, "sliding_window", None) or i
            for kind, width in (
                ("full_attention", window),
                ("sliding_attention", min(window, sliding)),
            ):
                seen = (distance >= 0) & (distance < width)
                mask = torch.zeros(1, 1, i, i).double()
                masks[kind] = mask.masked_fill(~seen, -torch.inf)
            has_types = model.config.model_type in ("gemma2", "gemma3_text")
            is_sliding = model.config.model_type == "mistral"
            kind = "sliding_attention" if is_sliding else "full_attention"
            options["attention_mask"] = masks if has_types else masks[kind]
        logits = own(x, use_cache=False, **options).logits[:, -1]
        losses.append(F.cross_entropy(logits, tokens[:, i], reduction="none"))
    return torch.stack(losses, 1)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_losses_are_those_of_a_plain_loop(name, monkeypatch):
    """In chunks of 7 queries and fewer, so that they end inside windows and before targets."""
    monkeypatch.setattr(causal, "LOGITS_AT_ONCE", 14)
    monkeypatch.setattr(causal, "SCORES_AT_ONCE", 14 * T)
    model = make_model(name)
    scorer = causal.CausalScorer(copy.deepcopy(model), T)
    for length in (T, 2 * T, 4 * T):
        tokens = torch.randint(VOCAB, (2, length + 1))
        for window in (0, 5, T):
            expected = slice_losses(model, tokens, 9, window)
            got = scorer.losses(tokens, 9, window)
            assert got.shape == (2, 9)
            difference = (got - expected).abs().max()
            print(name, length, window, difference.item())
            assert difference <= 1e-5, (length, window)  # of norms and softmax in float32


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("scaling", ["ntk", "theta=500000", "yarn"])
@torch.no_grad()
def test_scalings_are_those_of_the_config(name, scaling):
    model = make_model(name)
    scorer = causal.CausalScorer(copy.deepcopy(model), T)
    tokens = torch.randint(VOCAB, (1, 4 * T + 1))
    got = scorer.losses(tokens, 5, scaling=RopeScaling(scaling))
    config = copy.deepcopy(model.config)
    section = config.rope_parameters
    section = section["full_attention"] if name == "gemma3" else section
    size = 4 if name == "gpt_neox" else 8
    if scaling == "yarn":
        section |= {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": T,
            "truncate": False,
        }
    else:
        section["rope_theta"] = (
            5e5 if scaling != "ntk" else section["rope_theta"] * 4 ** (size / (size - 2))
        )
    scaled = type(model)(config).double()
    scaled.load_state_dict(model.state_dict())
    assert (got - slice_losses(scaled, tokens, 5)).abs().max() <= 1e-5
    again = scorer.losses(tokens, 5)  # unscaled anew
    assert (again - slice_losses(model, tokens, 5)).abs().max() <= 1e-6


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_export_has_the_losses_of_its_run(family, tiny_config, call):
    """In float32, unscaled and by NTK, with a window; the embedding's padding is no part of it."""
    run = make_byte_run(tiny_config, *family)
    out = tiny_config.with_name("out")
    call(export, run, out)
    model = load_model(run).model
    ours = GPTScorer(model.eval())
    theirs = causal.CausalScorer(
        causal.load(transformers.AutoModelForCausalLM, str(out)), model.config.train.seq_len
    )
    length = 4 * model.config.train.seq_len
    tokens = torch.randint(257, (1, length + 1))
    for options in ({}, {"window": length // 4}, {"scaling": RopeScaling("ntk")}):
        a, b = (scorer.losses(tokens, 9, **options) for scorer in (ours, theirs))
        assert (a - b).abs().max() <= 1e-5, options


def test_learned_positions_end():
    scorer = causal.CausalScorer(make_model("gpt2"), 64)
    tokens = torch.zeros(1, 66, dtype=int)
    assert scorer.losses(tokens[:, :65], 3).shape == (1, 3)
    with pytest.raises(UserError, match="65 positions: the model has learned 64"):
        scorer.losses(tokens, 3)


def test_models_that_do_not_fit_are_one_line(tmp_path):
    bert = transformers.BertConfig(**SIZES)
    with pytest.raises(UserError, match="BertLMHeadModel: a position sees later tokens"):
        causal.CausalScorer(transformers.BertLMHeadModel(bert), T)
    mistral = make_model("mistral")
    scorer = causal.CausalScorer(mistral, T)
    with pytest.raises(UserError, match="ntk: no layer with full attention"):
        scorer.losses(torch.zeros(1, 40, dtype=int), 3, scaling=RopeScaling("ntk"))
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model_type = t5: expected a causal model"):
        causal.open_run(str(tmp_path), 0)
