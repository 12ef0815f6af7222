"""The compiled engines on a GPU, against the definition in float64: `pytest -m gpu`."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import FOX_SHAPES, GATE_TOLERANCE, fox_errors

from attention import attend, make_normaliser
from engines.self_check import TOLERANCE, engine_error
from schema import AttentionConfig

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")
from engines import flex
from engines import triton as triton_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
LSSAR = {"normaliser": "lssa", "reweight_p": 15}
FUSED = [
    LSSAR,
    {"normaliser": "lssa"},
    {"normaliser": "lssa", "reweight_p": 100},
    {"normaliser": "softmax", "reweight_p": 3},
    {"normaliser": "sigmoid"},
    {"normaliser": "phi", "phi": "relu", "l1": False},
]


def error_of(engine, options, head_dim, dtype, length=200, window=0, documents=False):
    """Of o, dq, dk and dv, the largest error."""
    layer = make_normaliser(AttentionConfig(**options), 2, head_dim, 1024, window=window).to(CUDA)
    return engine_error(engine, layer, CUDA, dtype, length, documents)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("options", FUSED, ids=str)
def test_triton(options, dtype):
    assert error_of(triton_engine, options, 64, dtype, 1000) <= TOLERANCE[dtype]


@pytest.mark.parametrize("p", [1, 7, 14])
def test_a_rising_power_is_that_of_its_own_kernel(p):
    q, k, v, do = torch.randn(4, 1, 2, 1000, 64, device=CUDA, dtype=torch.bfloat16)
    inputs = [t.requires_grad_() for t in (10 * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)]
    options = {"phi": "softplus", "l1": True, "bounded": True, "p": p}
    own, rising = (triton_engine.phi_attention(*inputs, rises_to=top, **options) for top in (0, 15))
    assert torch.equal(own, rising)
    for got, want in zip(*(torch.autograd.grad(o, inputs, do) for o in (rising, own)), strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_triton_head_sizes(head_dim):
    assert error_of(triton_engine, LSSAR, head_dim, torch.bfloat16) <= TOLERANCE[torch.bfloat16]


SPANS = [
    (triton_engine, LSSAR),
    (triton_engine, {"normaliser": "sigmoid", "l1": True}),
    *((flex, {"normaliser": name}) for name in ("softmax", "lssa", "fox")),
]


@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("case", SPANS, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_documents_and_windows(dtype, case, window):
    error = error_of(*case, 64, dtype, 1000, window, documents=True)
    assert error <= TOLERANCE[dtype]


def test_running_sums_compile():
    """In a model's layout and at its length, where torch 2.11 failed on sums over the tokens."""
    fox = AttentionConfig(normaliser="fox")
    layer = make_normaliser(fox, 4, 16, 1024, "none", width=64).to(CUDA)
    x = torch.randn(4, 1024, 64, device=CUDA, requires_grad=True)

    def loss(x):
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return attend(q, q, q, layer, signals=layer.read(x)).square().sum()

    (got,) = torch.autograd.grad(torch.compile(loss)(x), x)
    (want,) = torch.autograd.grad(loss(x), x)
    assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_flex(dtype):
    assert error_of(flex, {"normaliser": "scale_invariant"}, 64, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", FOX_SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_gates_on_sdpa(dtype, shape, compiled):
    fn = torch.compile(attend) if compiled else attend
    *errors, of_gates = fox_errors(fn, dtype, shape, CUDA)
    assert max(errors) <= TOLERANCE[dtype], errors
    assert of_gates <= max(GATE_TOLERANCE[dtype][1], TOLERANCE[torch.float32])


def gradients(q, k, v, do):
    """o, dq, dk and dv of LSSAR."""
    layer = make_normaliser(AttentionConfig(**LSSAR), q.shape[1], 64, q.shape[2]).to(CUDA)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    o = attend(*inputs, layer, "triton")
    return o, *torch.autograd.grad(o, inputs, do)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_backward():
    assert error_of(triton_engine, LSSAR, 64, torch.bfloat16, 1000) <= TOLERANCE[torch.bfloat16]
    inputs = torch.randn(4, 4, 12, 4096, 64, device=CUDA, dtype=torch.bfloat16)
    assert all(map(torch.equal, gradients(*inputs), gradients(*inputs)))


def test_atomic_additions_reach_the_last_row():
    inputs = torch.randn(4, 1, 2, 131072, 64, device=CUDA, dtype=torch.bfloat16)
    got = gradients(*inputs)[1]
    torch.use_deterministic_algorithms(True)
    want = gradients(*inputs)[1]
    torch.use_deterministic_algorithms(False)
    assert (got - want).norm() < 0.01 * want.norm()


@pytest.mark.usefixtures("deterministic")
def test_rows_that_span_more_than_2_31_elements():
    """The last head of a fused projection, (B, T, 3, H, D), against a copy of it."""
    wide = torch.randn(1, 131072, 3, 128, 64, device=CUDA, dtype=torch.bfloat16)
    views = [
        *wide[:, :, :, -1:].permute(2, 0, 3, 1, 4),
        torch.randn_like(wide[:, :, 0, -1:].transpose(1, 2)),
    ]
    assert all(map(torch.equal, gradients(*views), gradients(*(t.contiguous() for t in views))))
