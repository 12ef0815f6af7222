"""Any causal model of transformers: its losses are those of a plain loop over slices in float64."""

import copy
import math
import sys

import pytest
import tokenizers
import torch
from conftest import FAMILIES, TINY, make_byte_run, one_line, write_dataset
from pytest import approx
from torch.nn import functional as F

import eval_length
import measure
from evaluation import GPTScorer
from hub import export
from infra.cli import UserError
from positions import RopeScaling
from training.checkpoint import load_model

transformers = pytest.importorskip("transformers")
from hub import causal, files  # noqa: E402

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
MIXED = GROUPED | {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=12),
    "gemma2": lambda: transformers.Gemma2Config(**MIXED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**MIXED),
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


def slice_losses(model, tokens, n_targets, window=0, sinks=0):
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
            for kind, own_width in (("full_attention", i), ("sliding_attention", sliding)):
                seen = (distance < window) | (torch.arange(i) < sinks)
                seen &= (distance >= 0) & (distance < own_width)
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
        for window, sinks in ((0, 0), (5, 0), (T, 0), (5, 2)):
            expected = slice_losses(model, tokens, 5, window, sinks)
            got = scorer.losses(tokens, 5, window, sinks)
            assert got.shape == (2, 5)
            difference = (got - expected).abs().max()
            assert difference <= 1e-5, (length, window, sinks)  # of norms and softmax in float32


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


@torch.no_grad()
def test_layers_with_windows_stay_unscaled():
    """Gemma 2 has one RoPE for all layers: each layer's table is replaced by hand."""
    model = make_model("gemma2")
    tokens = torch.randint(VOCAB, (1, 4 * T + 1))
    got = causal.CausalScorer(copy.deepcopy(model), T).losses(tokens, 5, scaling=RopeScaling("ntk"))
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] *= 4 ** (8 / 6)
    scaled = type(model.model.rotary_emb)(config)
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def forward_scaled(*args, position_embeddings, **options):
        tables = scaled(position_embeddings[0], torch.arange(position_embeddings[0].shape[1])[None])
        return forward(*args, position_embeddings=tables, **options)

    unscaled = slice_losses(model, tokens, 5)
    layer.forward = forward_scaled
    model.set_attn_implementation("eager")
    losses = [
        F.cross_entropy(model(tokens[:, :i], use_cache=False).logits[:, -1], tokens[:, i])
        for i in range(4 * T - 4, 4 * T + 1)
    ]
    assert (got - torch.stack(losses)).abs().max() <= 1e-5
    assert (got - unscaled).abs().max() > 1e-3


@torch.no_grad()
def test_the_token_before_every_text_stands_in_each_context():
    model = make_model("llama")
    tokens = torch.randint(VOCAB, (2, T + 1))
    got = causal.CausalScorer(copy.deepcopy(model), T, first=7).losses(tokens, 5)
    assert tokens[:, 0].ne(7).all()
    with_first = tokens.clone()
    with_first[:, 0] = 7
    assert (got - slice_losses(model, with_first, 5)).abs().max() <= 1e-5


EXPORTS = {
    "llama grouped": FAMILIES["llama grouped"],
    "neox exact": FAMILIES["neox exact"],
    "lssar": ["--attention.normaliser", "lssa", "--attention.reweight-p", "15"],
    "hybrid": ["--model.window", "6", "--model.position", "none", "--attention.normaliser", "fox"],
}


@pytest.mark.parametrize("family", EXPORTS.values(), ids=EXPORTS)
def test_an_export_has_the_rows_of_its_run(
    family, tiny_config, tmp_path, call, no_drawing, monkeypatch
):
    """At each length, window and scaling, from the command line, on a dataset and on files; the
    embedding's padding is no part of it.
    """
    monkeypatch.setattr(measure, "to_csv", lambda table: table.to_csv(index=False).encode())
    run = make_byte_run(tiny_config, *family)
    out = tiny_config.with_name("out")
    call(export, run, out)
    letters = torch.randint(97, 110, (1400,), generator=torch.Generator().manual_seed(0))
    text = bytes(letters.tolist()).decode()
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "short.txt").write_text("short")
    data = write_dataset(
        tmp_path / "bytes", {"test": [256, *text.encode()], "train": [256, 1]}, 3000
    )
    options = ["--device", "cpu", "--rope", "none", "ntk", "theta=500000", "--window", 8, 16]
    options += ["--recomputed", "--bits", "--tokens", 512]
    for text_options in (["--data", data], ["--files", tmp_path / "*.txt"]):
        call(eval_length, out, run, *options, *text_options)
        ours, theirs = (measure.read_rows(folder) for folder in (run, out))
        keys = ["text", "measure", "length", "window", "scaling", "block", "document"]
        both = ours.merge(theirs, on=keys)
        assert len(both) == len(ours) == len(theirs) > 30
        assert both["value_x"].notna().all()
        bits, nats = (both[both["measure"] == name] for name in ("bits_per_byte", "same_targets"))
        assert nats["value_x"].to_numpy() == approx(nats["value_y"].to_numpy(), rel=1e-6, abs=0)
        # a byte is a token
        assert bits["value_y"].to_numpy() * math.log(2) == approx(nats["value_x"].to_numpy(), 1e-6)


def test_padded_rows_of_an_export_have_the_same_losses(tiny_config, call):
    """Those of a batch that is padded on either side, from its logits."""
    run = make_byte_run(tiny_config, *EXPORTS["lssar"])
    out = tiny_config.with_name("out")
    call(export, run, out)
    scorer = GPTScorer(load_model(run).model)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    tokens = torch.randint(256, (2, 41))
    for padding in ((9, 0), (0, 9)):
        x = F.pad(tokens, padding, value=256)
        mask = F.pad(torch.ones_like(tokens), padding)
        with torch.no_grad():
            logits = model(x, attention_mask=mask).logits[:, padding[0] : padding[0] + 40]
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        assert (losses.view(2, -1) - scorer.losses(tokens, 40)).abs().max() <= 1e-5


# ---------------------------------------------------------------- from the command line
def save_model(folder, name, texts, n_vocab=VOCAB + 300, starts=False, **options):
    """A folder with a model and a tokeniser of its own, which may put a token before every text."""
    torch.manual_seed(0)
    fast = tokenizers.ByteLevelBPETokenizer()
    fast.train_from_iterator(texts, n_vocab, show_progress=False, special_tokens=["<s>", "</s>"])
    inner = tokenizers.Tokenizer.from_str(fast.to_str())
    if starts:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    config = CONFIGS[name]()
    config.vocab_size = 512
    for key, value in options.items():
        setattr(config, key, value)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_models_of_several_tokenisers_stand_in_one_table(tmp_path, call, capsys, no_drawing):
    """A run of ours, a model with a token before every text, one with learned positions, and one with
    a vocabulary above 65,536, on files, in bits a byte.
    """
    texts = [(f"The {i}th café opens at {i}:30. " * 40) + str(i) for i in range(6)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    models = [
        save_model(tmp_path / "m" / "a", "llama", texts, starts=True, vocab_size=70_000),
        save_model(tmp_path / "m" / "b", "gpt2", texts, 300),
    ]
    config = tmp_path / "tiny.toml"
    config.write_text(TINY.format(vocab=257, data="none", runs=tmp_path / "m"))
    run = make_byte_run(config)
    options = ["--device", "cpu", "--files", tmp_path / "texts", "--lengths", 16, 32, 64]
    options += ["--key-tokens", 0.01, "--sinks", 2, "--train-len", 16]
    call(eval_length, *models, run, *options)
    out = capsys.readouterr().out
    assert "Loss in nats of the last 16 tokens of 6 blocks (6 documents)" in out
    assert "Loss in bits a byte of the last 16 tokens of 6 blocks" in out
    assert out.count("Minus a, window 16, ") == 1  # of nats no difference is shown
    assert "window 16 + 2 sinks" in out and "our engines have none" in out
    rows = measure.read_rows(models[0])
    rows = rows[(rows["measure"] == "bits_per_byte") & (rows["scaling"] == "none")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(models[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(models[0])
    for block, text in enumerate(texts):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        n_bytes = len(text[encoding["offset_mapping"][-16][0] :].encode())
        x = torch.tensor([[0, *encoding["input_ids"][-64:]]])  # <s> in the place of the first
        losses = slice_losses(model.double(), x, 16)
        expected = losses.sum().item() / math.log(2) / n_bytes
        got = measure.select(rows, window=0, length=64, block=block)["value"].item()
        assert got == approx(expected, rel=1e-4)
    absolute = measure.read_rows(models[1])
    assert {*absolute["window"]} == {"0", "16 recomputed"} and {*absolute["scaling"]} == {"none"}
    call(eval_length, *models, run, *options, "--draw")
    assert capsys.readouterr().out.strip().split("Loss in")[1:] == out.strip().split("Loss in")[1:]


def test_key_tokens_are_those_that_a_longer_context_changes(tmp_path, call, capsys, no_drawing):
    """From the per-target losses: shares, what they add, and that noise leaves nothing."""
    text = "".join(f"word{i * i % 97} " for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    model = save_model(tmp_path / "m", "llama", [text])
    call(
        eval_length, model, "--device", "cpu", "--files", tmp_path / "a.txt", "--rope", "none",
        "--lengths", 16, 64, "--key-tokens", 0.002, "--tokens", 64,
    )  # fmt: skip
    assert "below that in the window by more than 0.002 nats" in capsys.readouterr().out
    scorer = causal.CausalScorer(transformers.AutoModelForCausalLM.from_pretrained(model), T)
    rows = measure.read_rows(model).set_index("measure")["value"]
    blocks = files.open_files([causal.open_run(str(model), 0)], [str(tmp_path / "a.txt")], 64, 64)
    tokens = torch.from_numpy(blocks[0].stream.read(blocks[0].starts[0], 65))[None]
    gain = (scorer.losses(tokens, 16, T) - scorer.losses(tokens, 16))[0]
    falls = gain[gain > 0.002]
    rises = gain[gain < -0.002]
    assert len(falls) and len(rises)
    assert rows["falls>0.002"] == approx(len(falls) / 16)
    assert rows["falls_by>0.002"] == approx(falls.sum().item() / 16, rel=1e-3)
    assert rows["rises>0.002"] == approx(len(rises) / 16)
    assert rows["rises_by>0.002"] == approx(rises.sum().item() / 16, rel=1e-3)
    noise = torch.randn(10**6, dtype=torch.float64)
    falls_by, rises_by = (eval_length.key_measure(f"{k}_by>1", noise) for k in ("falls", "rises"))
    assert falls_by > 0.2 and abs(falls_by + rises_by) < 0.003


def test_what_cannot_be_evaluated_is_one_line(tmp_path, call, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("The text. " * 99)
    model = save_model(tmp_path / "m", "llama", [text.read_text()])
    with one_line("expected --files PATTERN, or --data DIR, prepared with its tokenizer.json"):
        call(eval_length, model)
    with one_line("a.txt: no document of 1024 tokens in each tokeniser"):
        other = save_model(tmp_path / "other", "gpt2", ["other"], 270)
        call(eval_length, model, other, "--files", text)
    small = save_model(tmp_path / "small", "llama", [text.read_text()], vocab_size=40)
    with one_line("small: its tokenizer gives token", "expected tokens below 40"):
        call(eval_length, small, "--files", text)
    with one_line("--key-tokens: compares with a window"):
        call(eval_length, model, "--files", text, "--key-tokens", "--window", 0)
    with one_line("nobody/nothing: cannot be loaded"):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        call(eval_length, "nobody/nothing", "--files", text)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with one_line(
        "transformers is not installed: pip install -r requirements-hub.txt, or '.[hub]'"
    ):
        call(eval_length, model, "--files", text)


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
    assert not causal.rope_section(mistral.config)
    with pytest.raises(UserError, match="ntk: no layer with full attention"):
        scorer.losses(torch.zeros(1, 40, dtype=int), 3, scaling=RopeScaling("ntk"))
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model_type = t5: expected a causal model"):
        causal.open_run(str(tmp_path), 0)
