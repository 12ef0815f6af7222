"""The flex engine without a GPU: the score_mod and mask of CUDA in FlexAttention's eager and C++
forms.

FlexAttention rejects gradients on a CPU, where its compiled form has no backward pass; its eager
form, which the tests allow, differentiates the same score_mod.
"""

import math

import pytest
import torch
from attention_cases import assert_close, choose, draw, make, run
from conftest import slow
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention import attend, choose_engine, make_normaliser
from engines import flex, self_check
from infra.cli import UserError
from schema import AttentionConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CPU_ENGINES = ("sdpa", "rows")
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
OPTIONS = [
    {"normaliser": "scale_invariant"},
    {
        "normaliser": "scale_invariant",
        "scores": "cosine",
        "scale": "learned",
        "tau": 2.0,
        "alibi": True,
    },
    {"normaliser": "ssmax", "bias": True, "alibi": True},
]
# A softmax, of scores with a decay as well, and every phi of which it takes the logarithm.
OF_DOCUMENTS = [
    {"normaliser": "lssa"},
    {"normaliser": "fox"},
    {"normaliser": "sigmoid", "l1": True, "alibi": True},  # with a shift that depends on n
    {"normaliser": "phi", "phi": "relu2", "scores": "cosine", "alibi": True},
    {"normaliser": "softmax"},
    {"normaliser": "phi"},
    {"normaliser": "relu_li"},
    {"normaliser": "phi", "phi": "relu6"},
    *OPTIONS,
]
DOCUMENTS = torch.tensor([[0, 3, 131, 290], [0, 0, 17, 145]])  # where those of two sequences begin


def first_keys(n_keys):
    places = torch.arange(n_keys).expand(2, -1).contiguous()
    return DOCUMENTS.gather(1, torch.searchsorted(DOCUMENTS, places, right=True) - 1)


def build(options, n_head=4):
    options = dict(options)
    alibi = options.pop("alibi", False)
    normaliser = make(AttentionConfig(**options), n_head, 16, 300)
    normaliser.position = "alibi" if alibi else "rope"
    return normaliser


@pytest.fixture
def backward_on_cpu(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (OPTIONS[0], (77, 77)),
        (OPTIONS[1], (130, 299)),
        pytest.param(OPTIONS[2], (130, 299), marks=pytest.mark.slow),
    ],
)
def test_agrees_with_the_definition(options, shape, backward_on_cpu, monkeypatch):
    """o and every gradient, grouped heads, odd lengths, as many queries as keys and fewer."""
    normaliser = build(options)
    normaliser.window = 140 * (shape[0] == 130)
    q, k, v, do = draw(*shape, 16, batch=2, n_head=4)
    inputs = (q, k[:, :2], v[:, :2], do)
    want = run("dense", normaliser.double(), *(t.double() for t in inputs))
    monkeypatch.setattr(flex, "problem", lambda *layer: "")
    got = run("flex", normaliser, *(t.double() for t in inputs))
    assert_close(got, want, inputs, 1e-12, "float64")
    got = run("flex", normaliser.float(), *inputs)
    assert_close(got, want, inputs, 2e-5, "float32")


@pytest.mark.parametrize("options", [*OF_DOCUMENTS[:3], *slow(*OF_DOCUMENTS[3:])], ids=str)
@pytest.mark.parametrize("place", [(299, 140), *slow((299, 0), (130, 0), (130, 140))])
def test_documents(options, place, backward_on_cpu, monkeypatch):
    """By definition in float64, o and every gradient, with and without documents."""
    n_queries, window = place
    layer = build(options)
    layer.window = window
    monkeypatch.setattr(flex, "problem", lambda *layer: "")
    q, k, v, do = draw(n_queries, 299, 16, batch=2, n_head=4, dtype=torch.float64)
    inputs = (q, k[:, :2], v[:, :2], do)
    layer = layer.double()
    for first in (first_keys(299), None):
        want = run("dense", layer, *inputs, first=first)
        assert_close(run("flex", layer, *inputs, first=first), want, inputs, 1e-12, "float64")
    q, k, v, do = (t.float() for t in inputs)
    got = run("flex", layer.float(), q, k, v, do, first=first)
    assert_close(got, want, inputs, 2e-5, "float32")


def test_low_scores(backward_on_cpu):
    """log phi where phi itself is below float32."""
    x = torch.tensor([-200.0, -60.0, -39.0, 0.0, 50.0], requires_grad=True)
    for phi, log_phi in flex.LOG_PHI.items():
        (gradient,) = torch.autograd.grad(log_phi(x).clamp_min(-1e9).sum(), x)
        assert gradient.isfinite().all()
        if phi in ("softplus", "sigmoid"):
            torch.testing.assert_close(log_phi(x)[:3], x[:3])


@pytest.mark.parametrize(
    "shape", [(128, 128), (300, 300), (70, 200), (130, 256), (256, 384), (500, 1000), (1, 1)]
)
@pytest.mark.parametrize("window", [0, 1, 130])
@pytest.mark.parametrize("documents", [False, True])
def test_block_mask(shape, window, documents):
    n_queries, n_keys = shape
    got, offset = flex.causal_mask(*shape, CPU, window)
    first = torch.zeros(2, n_keys, dtype=torch.int64)
    if documents:
        first = first_keys(n_keys)
        places = torch.arange(n_keys)
        seen = torch.maximum(first, places + 1 - (window or 1000))[:, -n_queries:]
        got, offset = flex.block_mask(seen, n_keys)

    def visible(b, h, i, j):
        place = i + offset
        return (place >= j) & (place - j < (window or 1000)) & (first[b, place] <= j)

    want = create_block_mask(visible, 2 if documents else None, None, *shape, device="cpu")
    assert torch.equal(got.to_dense(), want.to_dense())
    assert got.full_kv_num_blocks is not None and torch.equal(
        got.full_kv_num_blocks, want.full_kv_num_blocks
    )
    for counts, blocks in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
    ):
        rows = [getattr(mask, blocks).flatten(0, 2) for mask in (got, want)]
        for n, *listed in zip(getattr(want, counts).flatten(), *rows, strict=True):
            ours, expected = (row[:n].sort().values for row in listed)
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", ["eager", *slow("inductor")])
def test_lengths_and_layers_share_graphs(backend, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "flex_attention", compiled)
    layers = [build(OPTIONS[0]) for _ in range(3)]
    with torch.no_grad():
        for length in (300, 513, 640):
            q, k, v, _ = draw(length, length, 16, batch=2, n_head=4)
            for layer in layers:
                got, want = (
                    flex.run(q, k, v, layer, layer.context(q, k)),
                    attend(q, k, v, layer, "dense"),
                )
                assert (got - want).norm() <= 1e-6 * want.norm()
        assert counter.frame_count == 1
        # In a compiled model as well, where the engine is a graph break.
        model = torch.compile(
            lambda q: flex.run(q, k, v, layers[0], layers[0].context(q, k)) * 2, backend="eager"
        )
        assert (model(q) - 2 * want).norm() <= 1e-6 * want.norm()
    assert counter.frame_count <= 2


def test_choice(monkeypatch):
    """auto takes it on CUDA after its self-check; what it cannot run is an error."""
    for problem, chosen in (("no", "rows"), ("", "flex")):
        monkeypatch.setattr(
            self_check, "check", lambda *key, p=problem: self_check.SelfCheck(1e-3, p)
        )
        for options in OPTIONS[:2]:
            assert choose(build(options), CUDA, torch.bfloat16, "auto") == chosen
    assert choose(build(OPTIONS[2]), CUDA, torch.bfloat16, "auto") == "sdpa"
    for name, chosen in (("softmax", "flex"), ("fox", "flex"), ("lssa", "triton")):
        layer = make_normaliser(AttentionConfig(normaliser=name), 4, 16, 300)
        assert choose_engine(layer, "auto", CUDA, torch.bfloat16, documents=True).name == chosen
        assert choose_engine(layer, "auto", CPU, torch.float32, documents=True).name in CPU_ENGINES
    alibi = build(OPTIONS[1])
    assert (
        choose_engine(alibi, "flex", CUDA, torch.bfloat16).note
        == "flex (self-check: relative error 1.0e-03)"
    )
    assert choose(alibi, CPU, torch.float32, "auto") == "rows"
    assert choose(alibi, CUDA, torch.float64, "auto") == "rows"
    with pytest.raises(
        UserError, match="engine = 'flex': needs a CUDA device, found cpu; expected auto"
    ):
        choose(alibi, CPU, torch.float32, "flex")
    for other, chosen in (
        ({"normaliser": "scale_invariant", "reweight_p": 3}, "rows"),
        ({"normaliser": "softmax", "sink": "one"}, "rows"),
        ({"normaliser": "phi", "phi": "gelu"}, "rows"),
    ):
        normaliser = make_normaliser(AttentionConfig(**other), 4, 16, 300, "alibi")
        assert choose(normaliser, CUDA, torch.bfloat16, "auto") == chosen
        with pytest.raises(
            UserError,
            match=r"with alibi (re-weights its|is not a softmax of scores|has weights below)",
        ):
            choose(normaliser, CUDA, torch.bfloat16, "flex")


@pytest.mark.parametrize("options", [*slow(OPTIONS[0], *OF_DOCUMENTS[:3]), OPTIONS[1]], ids=str)
@pytest.mark.parametrize("fault", ["", "wrong", "nan", "raises"])
def test_self_check(options, fault, backward_on_cpu, monkeypatch):
    def faulty(q, *rest, **options):
        if fault == "raises":
            raise RuntimeError("out of shared memory\nand more lines")
        wrong = {"wrong": 1.1, "nan": math.nan}.get(fault, 1.0) if q.shape[2] < 200 else 1.0
        return flex_attention(q, *rest, **options | {"scale": wrong})

    monkeypatch.setattr(flex, "flex_attention", faulty)
    self_check._check.cache_clear()
    arguments = ("flex", flex, build(options), CPU, torch.float32)
    for documents in (True, False):
        if fault:
            with pytest.warns(UserWarning, match="engine flex failed its self-check"):
                assert self_check.check(*arguments, documents).problem
        else:
            assert self_check.check(*arguments, documents).error < 1e-5
    self_check._check.cache_clear()
