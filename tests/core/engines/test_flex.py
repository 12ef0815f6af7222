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


@pytest.mark.parametrize(
    "shape", [(128, 128), (300, 300), (70, 200), (130, 256), (256, 384), (500, 1000), (1, 1)]
)
@pytest.mark.parametrize("window", [0, 1, 130])
def test_causal_mask(shape, window):
    got, first = flex.causal_mask(*shape, CPU, window)

    def visible(b, h, i, j):
        return (i + first >= j) & (i + first - j < (window or 1000))

    want = create_block_mask(visible, None, None, *shape, device="cpu")
    assert torch.equal(got.to_dense(), want.to_dense())
    assert got.full_kv_num_blocks is not None and torch.equal(
        got.full_kv_num_blocks, want.full_kv_num_blocks
    )
    for counts, blocks in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
    ):
        for row, n in enumerate(getattr(want, counts)[0, 0].tolist()):
            listed, expected = (getattr(mask, blocks)[0, 0, row, :n] for mask in (got, want))
            assert torch.equal(listed.sort().values, expected.sort().values)


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
        ({"normaliser": "fox"}, "sdpa"),
    ):
        normaliser = make_normaliser(AttentionConfig(**other), 4, 16, 300, "alibi")
        assert choose(normaliser, CUDA, torch.bfloat16, "auto") == chosen
        with pytest.raises(
            UserError, match=r"with alibi (re-weights its softmax|is not a softmax of scores)"
        ):
            choose(normaliser, CUDA, torch.bfloat16, "flex")


@pytest.mark.parametrize("options", [*slow(OPTIONS[0]), OPTIONS[1]], ids=["dot", "cosine"])
@pytest.mark.parametrize("fault", ["", "wrong", "nan", "raises"])
def test_self_check(options, fault, backward_on_cpu, monkeypatch):
    def faulty(q, *rest, **options):
        if fault == "raises":
            raise RuntimeError("out of shared memory\nand more lines")
        wrong = {"wrong": 1.1, "nan": math.nan}.get(fault, 1.0) if q.shape[2] < 200 else 1.0
        return flex_attention(q, *rest, **options | {"scale": wrong})

    monkeypatch.setattr(flex, "flex_attention", faulty)
    self_check._check.cache_clear()
    if fault:
        with pytest.warns(UserWarning, match="engine flex failed its self-check"):
            assert self_check.check("flex", flex, build(options), CPU, torch.float32).problem
    else:
        assert self_check.check("flex", flex, build(options), CPU, torch.float32).error < 1e-5
    self_check._check.cache_clear()
