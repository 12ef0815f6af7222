"""data.documents: a query sees its own document alone, in attention, model, training and decoding."""

import itertools

import pytest
import torch
from attention_cases import attend, draw, each_case, each_name, make
from conftest import make_dataset, one_line, slow
from launch import build, metrics, run

from attention import choose_engine, make_normaliser
from model import GPT, KVCache
from schema import AttentionConfig, Config
from training.checkpoint import load_model

SIZES = ([7, 1, 13, 2, 71, 3], [97], [96, 1])  # of the documents of three sequences


def first_keys(sizes):
    """`first` of `attend`: (B, T)."""
    rows = []
    for of_sequence in sizes:
        starts = torch.tensor([0, *itertools.accumulate(of_sequence)][:-1])
        rows.append(starts.repeat_interleave(torch.tensor(of_sequence)))
    return torch.stack(rows)


def one_by_one(q, k, v, layer):
    """`attend` of each document of `SIZES` alone, by definition."""
    outputs = []
    for b, sizes in enumerate(SIZES):
        parts = zip(*(t[b : b + 1].split(sizes, dim=2) for t in (q, k, v)), strict=True)
        outputs.append(torch.cat([attend(*part, layer, "dense") for part in parts], dim=2))
    return torch.cat(outputs)


def gradients(run, leaves, layer, do):
    parameters = list(layer.parameters())
    inputs = [*leaves, *parameters]
    out = run(*leaves, layer)
    grads = torch.autograd.grad(out, inputs, do, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def check_documents(cfg, place):
    """o, dq, dk, dv and the parameters' gradients, with grouped heads, and the last queries alone."""
    layer = make_normaliser(cfg, 4, 8, 97, *place)
    layer.load_state_dict(make(cfg, n_head=4, head_dim=8, train_len=97).state_dict())
    layer = layer.double()
    first = first_keys(SIZES)
    q, k, v, do = draw(97, 97, 8, batch=3, n_head=4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k[:, :2], v[:, :2])]
    expected = gradients(one_by_one, leaves, layer, do)
    for engine in ("dense", "rows", "auto"):
        found = gradients(
            lambda *args, engine=engine: attend(*args, engine, first=first), leaves, layer, do
        )
        for n_queries in (30, 1):
            with torch.no_grad():
                last = attend(q[:, :, -n_queries:], k[:, :2], v[:, :2], layer, engine, first=first)
            found.append(last)
            expected.append(expected[0][:, :, -n_queries:])
        for ours, alone in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, alone, atol=1e-10, rtol=1e-10)
        del expected[-2:]


@each_case
def test_each_document_is_computed_alone(cfg):
    check_documents(cfg, ("none", 0))


@each_name
@pytest.mark.parametrize("place", [("none", 5), ("alibi", 0), *slow(("alibi", 5))], ids=str)
def test_documents_with_windows_and_alibi(cfg, place):
    check_documents(cfg, place)


@each_name
def test_a_window_of_one_document_has_the_same_bits(cfg):
    layer = make(cfg, n_head=2, head_dim=8, train_len=97)
    q, k, v, do = draw(97, 97, 8, batch=2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    first = torch.zeros(2, 97, dtype=torch.int64)
    for engine in ("dense", "rows", "auto"):
        pairs = [
            gradients(lambda *args, e=engine, f=each: attend(*args, e, first=f), leaves, layer, do)
            for each in (None, first)
        ]
        for without, with_documents in zip(*pairs, strict=True):
            assert torch.equal(without, with_documents)


def test_heads_in_any_layout():
    layer = make(AttentionConfig(), n_head=2, head_dim=8, train_len=97)
    q, k, v, _ = draw(97, 97, 8, batch=3, n_head=2)
    strided = [t.mT.contiguous().mT for t in (q, k, v)]
    found = attend(*strided, layer, "sdpa", first=first_keys(SIZES))
    assert torch.equal(found, attend(q, k, v, layer, "sdpa", first=first_keys(SIZES)))


def test_sdpa_on_a_gpu_has_no_documents():
    layer = make(AttentionConfig(), n_head=2, head_dim=8, train_len=97)
    with one_line("train.engine = 'sdpa': has no documents on CUDA"):
        choose_engine(layer, "sdpa", torch.device("cuda"), torch.float32, documents=True)


# ---- the model ----

END = 5  # the token before each document
MODELS = [
    {},
    {"n_kv_head": 1, "key_shift": True},
    {"layers": [{"at": [0], "window": 3}], "key_shift": True},
]


def make_gpt(normaliser, parts, documents=True):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61, "position": "none"}
    layers = parts.get("layers", [])
    model = sizes | {key: value for key, value in parts.items() if key != "layers"}
    train = {"seq_len": 16, "batch_tokens": 16, "micro_batch": 1, "val_tokens": 16}
    config = Config(
        name="test",
        layers=layers,
        model=model,
        attention={"normaliser": normaliser},
        data={"documents": documents},
        train=train | {"dtype": "float32"},
    )
    gpt = GPT(config).double()
    for p in gpt.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)
    if gpt.end_of_text is not None:
        gpt.end_of_text.fill_(END)
    return gpt


def make_tokens(starts=((0, 9, 10), (4, 13), ())):
    """Of three sequences of 16; `starts` are their documents'."""
    tokens = 6 + torch.randint(50, (len(starts), 16), generator=torch.Generator().manual_seed(1))
    for row, places in zip(tokens, starts, strict=True):
        row[list(places)] = END
    return tokens


@pytest.mark.parametrize("parts", MODELS, ids=str)
@pytest.mark.parametrize("normaliser", ["softmax", "fox", "lssa", "ssmax_pn", "norm_softmax"])
@torch.no_grad()
def test_a_models_documents_are_computed_alone(normaliser, parts):
    """By a model without documents; also through a cache in pieces, and in a rolling window."""
    gpt = make_gpt(normaliser, parts)
    plain = make_gpt(normaliser, parts, documents=False)
    tokens = make_tokens()
    for model, other in ((gpt, plain), (gpt.with_window(5), plain.with_window(5))):
        logits = model(tokens)
        pieces = [each.tensor_split(places) for each, places in zip(
            tokens, ((9, 10), (4, 13), ()), strict=True)]  # fmt: skip
        for row, documents in zip(logits, pieces, strict=True):
            alone = torch.cat([other(document[None])[0] for document in documents])
            torch.testing.assert_close(row, alone, atol=1e-9, rtol=0)
        for sizes in ([1] * 16, [3, 7, 1, 5]):
            cache = KVCache(2, 16, model.windows)
            parts_of = [model(piece, cache=cache) for piece in tokens.split(sizes, dim=1)]
            torch.testing.assert_close(torch.cat(parts_of, dim=1), logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("parts", MODELS, ids=str)
@pytest.mark.parametrize("normaliser", ["softmax", "lssa", "stick_breaking", "entmax"])
def test_no_gradient_crosses(normaliser, parts):
    gpt = make_gpt(normaliser, parts)
    states = []
    gpt.embedding.register_forward_hook(lambda _, args, out: states.append(out))
    losses = gpt(make_tokens(((0, 9),))).square().sum(-1)
    (gradient,) = torch.autograd.grad(losses[:, 9:].sum(), states)
    assert not gradient[:, :9].any() and gradient[:, 9:].any(-1).all()


# ---- training ----


def test_training_knows_documents(tiny_config):
    """Another loss; the token before documents is in the checkpoint, from which a model has it."""
    runs = {
        value: run(tiny_config, "--name", value, "--data.documents", value)
        for value in ("true", "false")
    }
    losses = [metrics(folder, "loss") for folder in runs.values()]
    values = [metrics(folder, "val_loss") for folder in runs.values()]
    assert losses[0][1] != losses[1][1] and values[0][12] != values[1][12]
    model = load_model(runs["true"]).model
    assert model.end_of_text == 63
    tokens = torch.tensor([[1, 2, 63, 4]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, 2:], model(tokens[:, 2:]), atol=1e-5, rtol=0)
    assert load_model(runs["false"]).model.end_of_text is None


def test_data_without_documents(tiny_config, tmp_path):
    data = make_dataset(tmp_path / "none", vocab=62)
    options = ["--model.vocab-size", "62", "--data.dir", str(data), "--data.documents", "true"]
    assert build(tiny_config, *options).raw_model.end_of_text == 61
    info = (data / "dataset.json").read_text()
    (data / "dataset.json").write_text(info.replace('"vocab_size": 62', '"vocab_size": 63'))
    with one_line("data.documents = true", data, "no end-of-text token, 62", "expected false"):
        build(tiny_config, *options, "--model.vocab-size", "63")
