"""The fused kernels, by Triton's interpreter on the CPU (conftest.py), against float64 dense
weights.

benchmarks/kernels.py compiles every kernel for real GPUs. benchmarks/gpu.py measures on one.
"""

import itertools
import math
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo
from attention_cases import CASES, assert_close, case_id, choose, draw, exactly, make, run
from conftest import slow
from launch import finish, fork_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from attention import attend, choose_engine, make_normaliser
from infra.cli import UserError
from infra.distributed import join_world
from normalisers.base import reweight
from normalisers.family import Phi
from normalisers.layer import NormaliserLayer
from schema import AttentionConfig

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from triton.compiler import ASTSource
from triton.runtime import interpreter

from engines import self_check
from engines import triton as triton_engine
from engines import triton_kernels as kernels
from engines.self_check import engine_error
from engines.triton import phi_attention
from engines.triton_kernels import INTERPRETED, Form

pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED, reason="triton was imported before TRITON_INTERPRET was set"
    ),
    # numpy's, where the kernels divide by zero and select the other branch
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def quick_interpreter(request, monkeypatch):
    """Without the interpreter's slowest ways. It multiplies a row's elements one by one, and at
    each call of our functions it searches triton.language for what the kernel's call has replaced
    already. The quick form also leaves out its search for overflows of integers, a quarter of the
    time.
    """
    reduce = interpreter.ReduceOps.apply_impl

    def apply_impl(self, values):
        if self.combine_fn is not kernels._times:
            return reduce(self, values)
        return self.to_tensor(np.prod(values[0].handle.data, axis=self.axis), values[0].dtype)

    patch = interpreter._patch_lang

    def patch_lang(function):
        is_ours = function.__globals__ is vars(kernels)
        return None if is_ours and function.__name__ not in KERNELS else patch(function)

    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", apply_impl)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)
    if request.config.option.markexpr == "not slow":
        search = "binary_op_sanitize_overflow_impl"
        monkeypatch.setattr(interpreter.TritonSemantic, search, lambda *operation: None)


KERNELS = ("_forward", "_backward_rows", "_backward")
REPO = Path(__file__).resolve().parents[3]
LSSAR = AttentionConfig(normaliser="lssa", reweight_p=15)

PHI_CASES = [
    AttentionConfig(normaliser="phi", phi=phi, l1=l1, reweight_p=p)
    for phi in triton_engine.PHIS
    for l1 in (True, False)
    for p in ((0, 1, 3, 15, 50) if l1 else (0,))
    if p or not l1 or phi != "exp"  # softmax: sdpa's
]
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
OTHERS = [
    cfg
    for cfg in (case.values[0] for case in CASES)
    if cfg.normaliser != "phi"
    and not triton_engine.problem(make(cfg, 2, 16, 40), CPU, torch.float32)
]


def ids(cfg):
    options = {"normaliser": cfg.normaliser} | cfg.definition.model_dump(exclude_defaults=True)
    return case_id(options | {"p": cfg.reweight_p})


def quick_first(cases, quick):
    """Parameters of a test; those that are not quick run with ./test.sh --all."""
    marks = [() if quick(i, cfg) else pytest.mark.slow for i, cfg in enumerate(cases)]
    return [
        pytest.param(cfg, id=ids(cfg), marks=mark) for cfg, mark in zip(cases, marks, strict=True)
    ]


def is_representative(_, cfg):
    return cfg.reweight_p in ((0, 1, 15) if cfg.phi == "softplus" else (15,))


def agree(cfg, shape, head_dim, n_head=1):
    """o and all gradients within 2e-5 of float64, or 4e-7 p: p multiplies the rounding.

    Twice that where up to 3 keys and p = 50 leave one key with its whole row: the gradient
    vanishes, and what remains is D = do.o and dC = do.v, equal but rounded apart, times p.
    """
    inputs = draw(*shape, head_dim, n_head=n_head)
    normaliser = make(cfg, n_head, head_dim, train_len=300)
    want = exactly(normaliser, *inputs)
    tolerance = max(2e-5, 4e-7 * cfg.reweight_p)
    if shape[0] <= 3 and cfg.reweight_p == 50:
        tolerance *= 2
    assert_close(run("triton", normaliser, *inputs), want, inputs, tolerance, f"T = {shape}")


@pytest.fixture
def deterministic(request):
    """Whether torch is asked for it; True if a test does not say."""
    torch.use_deterministic_algorithms(getattr(request, "param", True))
    yield
    torch.use_deterministic_algorithms(False)


# 1. The kernels are the formulas.


@pytest.mark.parametrize("cfg", quick_first(PHI_CASES, is_representative))
def test_every_phi_and_power(cfg):
    for shape in [(1, 1), (70, 90)]:  # up to two blocks of rows, three of keys
        agree(cfg, shape, 16)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", PHI_CASES, ids=ids)
def test_other_lengths(cfg):
    for shape in [(3, 3), (128, 128), (257, 257)]:
        agree(cfg, shape, 16)


@pytest.mark.parametrize("cfg", quick_first(OTHERS, lambda i, _: i % 24 == 0))
def test_every_other_normaliser(cfg):
    for shape in [(37, 37), (7, 33)]:
        agree(cfg, shape, 32, n_head=2)


@pytest.mark.parametrize("normaliser", ["norm_softmax", "logit_norm"])
def test_moments_of_documents_and_windows(normaliser):
    """They are of the visible keys, which the kernels' preparation does not know."""
    cfg = AttentionConfig(normaliser=normaliser, reweight_p=3)
    layer = make(cfg, 2, 16, 150)
    inputs = draw(150, 150, 16, n_head=2)[:3]
    first = torch.arange(150)[None] // 70 * 70
    expected = attend(*inputs, layer, "dense", first=first)
    found = attend(*inputs, layer, "triton", first=first)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    layer.window = 30
    assert "which a window changes" in triton_engine.problem(layer, CUDA, torch.float32)


@pytest.mark.parametrize("head_dim", [20, 64, *slow(16, 80, 128)])
def test_head_sizes(head_dim):
    agree(LSSAR, (100, 100), head_dim)


@pytest.mark.parametrize("p", [7, 100, *slow(1, 2, 64, 99)])
def test_any_power(p):
    agree(AttentionConfig(normaliser="lssa", reweight_p=p), (70, 70), 32)


OTHER_POWERS = [
    (p, top) for top in (15, 64, 256) for p in (1, 2, 7, 12, top - 1) if (p, top) != (7, 15)
]


@pytest.mark.parametrize("powers", [(7, 15), *slow(*OTHER_POWERS)])
@pytest.mark.parametrize("phi", ["softplus", *slow("relu", "exp", "sigmoid")])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32)])
def test_a_rising_power_has_the_bits_of_its_own_kernel(dtype, phi, powers):
    p, rises_to = powers
    q, k, v, do = draw(70, 90, 16, dtype=dtype)
    by_kernel = []
    for top in (0, rises_to):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        o = phi_attention(*inputs, phi=phi, l1=True, p=p, rises_to=top, bounded=phi == "softplus")
        by_kernel.append([o, *torch.autograd.grad(o, inputs, do)])
    assert all(map(torch.equal, *by_kernel))


@pytest.mark.parametrize("n_head", [4, *slow(2)])
@pytest.mark.parametrize("n_queries", [40, 1])
def test_batches_and_heads(n_queries, n_head):
    """Of k and v two heads, so that four heads of q share them."""
    normaliser = make(LSSAR, n_head, 16, train_len=300)
    q, k, v, do = draw(n_queries, 45, 16, batch=2, n_head=n_head)
    inputs = q, k[:, :2], v[:, :2], do
    assert_close(
        run("triton", normaliser, *inputs), exactly(normaliser, *inputs), inputs, 2e-5, "grouped"
    )
    with torch.no_grad():
        o, want = (attend(*inputs[:3], normaliser, engine) for engine in ("triton", "dense"))
    assert (o - want).norm() <= 2e-5 * want.norm()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("deterministic", [False, True], indirect=True, ids=["atomic", "in order"])
def test_keys_and_values_with_a_mean(deterministic):
    """dq is a small difference of large terms there: D and u must be of the same, rounded o."""
    q, k, v, do = draw(128, 128, 64, n_head=1)
    inputs = [t.half() for t in (q, k + 10 * k.mean(-2, keepdim=True).sign(), v + 10, do)]
    _, dq, dk, _ = self_check._errors(triton_engine, make(LSSAR, 1, 64, 300), *inputs)
    assert dq < 0.04 and dk < 0.04


IN_ORDER = [
    LSSAR,
    AttentionConfig(normaliser="lssa"),
    AttentionConfig(normaliser="sigmoid", l1=True),
    AttentionConfig(normaliser="phi", phi="exp", l1=True, reweight_p=3),
]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("cfg", quick_first(IN_ORDER, lambda i, _: i < 1))
def test_deterministic_backward(cfg, monkeypatch):
    monkeypatch.setattr("triton.language.atomic_add", None)
    agree(cfg, (70, 90), 20, n_head=2)


LSSA = AttentionConfig(normaliser="lssa")
SIGMOID = AttentionConfig(normaliser="sigmoid", l1=True)
HALF = [(LSSA, 2, 64, 100), (SIGMOID, 2, 64, 100), (LSSAR, 1, 256, 40)]


@pytest.mark.parametrize("case", [(LSSAR, 1, 64, 100), *slow(*HALF)])
def test_float16(case):
    """Off by float16's rounding of weights and of their gradients, not by more."""
    cfg, n_head, head_dim, length = case
    normaliser = make(cfg, n_head, head_dim, 300)
    assert engine_error(triton_engine, normaliser, CPU, torch.float16, length) < 2e-3


DOCUMENTS = [[7, 57, 1, 65, 20], [150], [64, 64, 22]]  # of three sequences
SPANS = [(True, 0), (True, 30), (False, 30)]  # documents or none, and the window
LOG_N = AttentionConfig(normaliser="sigmoid", l1=True)  # with a shift that depends on n


@pytest.fixture
def first():
    """`first` of `attend` for DOCUMENTS."""
    rows = []
    for sizes in DOCUMENTS:
        starts = torch.tensor([0, *itertools.accumulate(sizes)][:-1])
        rows.append(starts.repeat_interleave(torch.tensor(sizes)))
    return torch.stack(rows)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "case",
    [
        (LSSAR, SPANS[1], False),
        *slow(*itertools.product([LSSAR, LOG_N], SPANS, [False, True])),
        *slow(*((cfg, SPANS[1], False) for cfg in PHI_CASES[::3])),
    ],
)
def test_documents_and_windows(case, first):
    """Grouped heads, as many queries as keys and fewer."""
    cfg, (documents, window), is_deterministic = case
    torch.use_deterministic_algorithms(is_deterministic)
    layer = make(cfg, 2, 16, 300)
    layer.window = window
    given = first if documents else None
    q, k, v, do = draw(150, 150, 16, batch=3)
    tolerance = max(2e-5, 4e-7 * cfg.reweight_p)
    for n_queries in (150, 70):
        inputs = q[:, :, -n_queries:], k[:, :1], v[:, :1], do[:, :, -n_queries:]
        want = exactly(layer, *inputs, first=given)
        got = run("triton", layer, *inputs, first=given)
        assert_close(got, want, inputs, tolerance, f"{n_queries} queries")


@pytest.mark.parametrize("case", [(LSSAR, 2e-3), *slow((LOG_N, 2e-3))])
def test_documents_in_float16(case):
    cfg, tolerance = case
    layer = make(cfg, 1, 64, 300)
    error = engine_error(triton_engine, layer, CPU, torch.float16, 100, documents=True)
    assert error < tolerance


@pytest.mark.usefixtures("deterministic")
def test_one_document_has_the_bits_of_none():
    layer = make(LSSAR, 2, 16, 300)
    inputs = draw(150, 150, 16)
    plain = run("triton", layer, *inputs)
    context = layer.context(*inputs[:2], first=torch.zeros(1, 150, dtype=torch.int64))
    q, k, v = (layer.norm_heads(t).requires_grad_() for t in inputs[:3])
    v = inputs[2].clone().requires_grad_()
    o = triton_engine.run(q, k, v, layer, context)
    assert torch.equal(o, plain["o"])
    assert torch.equal(torch.autograd.grad(o, v, inputs[3])[0], plain["dv"])


def test_products_fall_with_shorter_documents(monkeypatch):
    """Those of tiles, forward and backward, of 8 documents and of one."""
    products = []
    dot = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda *args: products.append(1) or dot(*args),
    )
    layer = make(LSSA, 1, 16, 512)
    q, k, v, do = draw(512, 512, 16, n_head=1)
    counts = []
    for size in (512, 64):
        first = torch.arange(512)[None] // size * size
        products.clear()
        run("triton", layer, q, k, v, do, first=first)
        counts.append(len(products))
    assert counts[1] < 0.3 * counts[0]


# 2. Rows that break naive code.


def scored(scores):
    """q, k, v of 16 dimensions in which query i's score with key j is scores[j], before any factor."""
    g = torch.Generator().manual_seed(0)
    n = len(scores)
    q, k = torch.zeros(1, 1, n, 16), torch.zeros(1, 1, n, 16)
    q[..., 0], k[..., 0] = 1.0, scores
    return q, k, torch.randn(1, 1, n, 16, generator=g)


EXTREMES = {
    "one key holds the row": torch.tensor([50.0] + [0.0] * 69),
    "equal keys": torch.ones(70),
    "far below zero": -90 - torch.arange(70.0) % 7,
    "below what float32 can hold": -200 - torch.arange(70.0) % 5,
    "some rows far below": torch.cat([torch.full((40,), -95.0), torch.zeros(30)]),
    "nothing above zero": -torch.ones(70),
}


@pytest.mark.parametrize("scores", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("p", [15, *slow(0, 1, 100)])
@pytest.mark.parametrize("phi", ["softplus", *slow("relu", "exp", "sigmoid")])
def test_extreme_rows_are_finite_and_right(phi, p, scores):
    if phi == "exp" and p == 0:
        pytest.skip("softmax: sdpa's")
    cfg = AttentionConfig(normaliser="phi", phi=phi, l1=True, reweight_p=p)
    normaliser = make_normaliser(cfg, 1, 16, 300)
    q, k, v = scored(scores * 4)  # x = q k / sqrt(16)
    do = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    got, want = run("triton", normaliser, q, k, v, do), exactly(normaliser, q, k, v, do)
    # What must vanish in exact numbers is left as rounding, of dC - D, times p and the keys.
    noise = 1e-6 * (p or 1) * max(1, k.abs().max())
    for name, t in want.items():
        assert got[name].isfinite().all(), name
        assert (got[name] - t).abs().max() <= 2e-5 * t.abs().max() + noise, name


@pytest.mark.slow
def test_long_row_of_equal_keys_is_uniform():
    """No offset in its statistics: a plain float32 sum of its equal tiles is off by more than 1e-5."""
    q, k = torch.ones(1, 1, 1, 16), torch.full((1, 1, 24576, 16), 1.319 / 16)
    options = (None, "relu", True, 0, False, False)
    power = torch.tensor(15)
    o, stats, _ = triton_engine._forward_op(q, k, torch.ones_like(k), power, None, *options)
    assert stats[..., 1] == 0
    torch.testing.assert_close(o, torch.ones_like(o), rtol=1e-4, atol=0)


@pytest.mark.parametrize("p", [15, 0])
@pytest.mark.parametrize("phi", ["softplus", "exp", *slow("sigmoid", "relu")])
@pytest.mark.parametrize("n_queries", [40, 1])
def test_nan_reaches_the_rows_that_see_it(phi, p, n_queries):
    if phi == "exp" and p == 0:
        pytest.skip("softmax: sdpa's")
    q, k, v, _ = draw(n_queries, 40, 16)
    k[0, 0, 30] = math.nan
    o = phi_attention(q, k, v, phi=phi, l1=True, p=p)
    seen = torch.arange(40 - n_queries, 40) >= 30
    assert torch.equal(o[0, 0].isnan().all(-1), seen)
    assert torch.equal(o[0, 0].isnan().any(-1), seen) and o[0, 1].isfinite().all()


BOUNDED = {
    "far below zero": -0.99 + 0.02 * torch.rand(100, generator=torch.Generator().manual_seed(0)),
    "nearly uniform": 0.3 + 1e-3 * torch.rand(100, generator=torch.Generator().manual_seed(0)),
    "one key holds the row": torch.full((100,), -0.95).index_fill(0, torch.tensor(70), 0.9),
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "deterministic", [False, *slow(True)], indirect=True, ids=["atomic", "in order"]
)
@pytest.mark.parametrize("cosines", BOUNDED.values(), ids=BOUNDED)
def test_rows_that_the_logarithm_would_lose(cosines):
    """16-bit LSSAR, whose softplus is log2(1 + 2^y): without the exact loops o is off by 0.3, or
    NaN.
    """
    normaliser, n = make(LSSAR, 1, 16, 300), len(cosines)
    q = torch.tensor([1.0] + [0.0] * 15).expand(1, 1, n, 16)
    k = torch.zeros(1, 1, n, 16)
    k[..., 0], k[..., 1] = cosines, (1 - cosines**2).sqrt()
    _, _, v, do = draw(n, n, 16, n_head=1)
    inputs = [t.half() for t in (q, k, v, do)]
    o, _, dk, dv = self_check._errors(triton_engine, normaliser, *inputs)
    assert max(o, dv) < 1e-3 and (dk < 1e-3 or cosines is BOUNDED["nearly uniform"])


def test_rows_that_two_softpluses_would_spoil():
    """p times the difference of logarithm and polynomial over a small contrast: 2 % of dv with
    both.
    """
    n, p = 96, 100
    y = 0.064 * (2 * torch.rand(n, generator=torch.Generator().manual_seed(0)) - 1).index_fill(
        0, torch.tensor(0), 1
    )
    q, k = torch.zeros(1, 1, 32, 16).half(), torch.zeros(1, 1, n, 16).half()
    q[..., 0], k[..., 0] = 1, y
    _, _, v, do = (t.half() for t in draw(32, n, 16, n_head=1))
    v.requires_grad_()
    o = phi_attention(q, k, v, phi="softplus", l1=True, p=p, bounded=True)
    (dv,) = torch.autograd.grad(o, v, do)
    sizes = torch.arange(n - 31, n + 1).double()[:, None]
    s = (1 + k[0, 0, :, 0].double().exp2()).log2().where(torch.arange(n) < sizes, 0)
    contrast = s.amax(-1) - s.sum(-1) / sizes[:, 0]
    assert contrast.min() > 2.0**-5 and contrast.max() < 1.2 * 2.0**-5
    want = reweight(s / s.sum(-1, keepdim=True), sizes, p).mT @ do[0, 0].double()
    assert (dv[0, 0] - want).norm() < 2e-3 * want.norm()


# 3. In a model: strides, compilation, checkpointing, decoding.


def test_any_strides():
    """q, k, v as the model has them, views of one projection, and an expanded gradient."""
    qkv = torch.randn(2, 40, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    views = [t.detach().requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4)]
    copies = [t.detach().contiguous().requires_grad_() for t in views]
    assert not views[0].is_contiguous()
    grads = []
    for inputs in (views, copies):
        o = phi_attention(*inputs, phi="softplus", l1=True, p=3)
        grads.append([o, *torch.autograd.grad(o.sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert grads[0][0].transpose(1, 2).is_contiguous()  # as the output projection wants it


@pytest.mark.parametrize("n_queries", [140, 1])
def test_offsets_beyond_31_bits(n_queries):
    """k and v as views whose rows are 2^24 elements apart (4.7 GB of addresses, of which 140 pages
    exist).
    """
    q, k, v, do = (t.half() for t in draw(n_queries, 140, 16, n_head=1))
    apart = torch.empty(139 * 2**24 + 32, dtype=torch.half)
    views = [apart[i * 16 :].as_strided(k.shape, (0, 0, 2**24, 1)) for i in range(2)]
    results = []
    for keys, values in ((k, v), (views[0].copy_(k), views[1].copy_(v))):
        inputs = [t.detach().requires_grad_(n_queries > 1) for t in (q, keys, values)]
        o = phi_attention(*inputs, phi="softplus", l1=True, p=15)
        results.append([o, *(torch.autograd.grad(o, inputs, do) if n_queries > 1 else ())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_compiles_without_a_graph_break_for_all_lengths():
    normaliser = make(AttentionConfig(normaliser="ssmax", bias=True, reweight_p=3), 2, 16, 300)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def fn(q, k, v):
        return attend(q, k, v, normaliser, "triton") * 2

    compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=True)
    for t in (40, 70):
        q, k, v, do = draw(t, t, 16)
        inputs = [x.requires_grad_() for x in (q, k, v)] + [normaliser.s, normaliser.b]
        got = torch.autograd.grad(compiled(q, k, v), inputs, do)
        want = torch.autograd.grad(fn(q, k, v), inputs, do)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1


def test_operators_keep_torchs_rules():
    """Schemas, fake tensors, autograd registration: torch's own checks of custom operators."""
    q, k, v, _ = draw(20, 24, 16)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    args = (*inputs, torch.tensor(3), None, None, "softplus", True, 15, False, True)
    torch.library.opcheck(triton_engine._forward_op, args)


@pytest.mark.parametrize("engine", ["triton", "rows"])
def test_activation_checkpointing_changes_nothing(engine):
    normaliser = make(LSSAR, 2, 16, 300)
    q, k, v, do = draw(40, 40, 16)
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def fn(q, k, v):
        return attend(q, k, v, normaliser, engine)

    plain = torch.autograd.grad(fn(*inputs), inputs, do)
    again = torch.autograd.grad(checkpoint(fn, *inputs, use_reentrant=False), inputs, do)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_decoding_is_for_rows(monkeypatch):
    """One query, without a graph or with one; a cache's keys."""
    monkeypatch.setattr(triton_engine, "_launch", None)
    for cfg in (LSSAR, AttentionConfig(normaliser="sigmoid", l1=True)):
        layer = make(cfg, 4, 16, 300)
        inputs = draw(1, 70, 16, n_head=4)
        assert_close(
            run("triton", layer, *inputs), exactly(layer, *inputs), inputs, 2e-5, "one query"
        )
        q, k, v, _ = inputs
        with torch.no_grad():
            got = attend(layer.norm_heads(q), layer.norm_heads(k), v, layer, "triton", normed=True)
            want = attend(q, k, v, layer, "dense")
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_empty_batch():
    q, k, v, _ = draw(5, 5, 16)
    out = attend(q[:0], k[:0], v[:0], make(LSSAR, 2, 16, 300), "triton")
    assert out.shape == (0, 2, 5, 16)


# 4. The choice of engine.


def lssar():
    return make_normaliser(LSSAR, 2, 16, 300)


CHOICES = [
    (LSSAR, 16, CUDA, torch.bfloat16, "triton"),
    (LSSAR, 16, CPU, torch.float32, "rows"),
    (LSSAR, 16, CUDA, torch.float64, "rows"),
    (LSSAR, 256, CUDA, torch.float32, "rows"),
    (AttentionConfig(normaliser="softmax_inverse"), 16, CUDA, torch.bfloat16, "rows"),
    (AttentionConfig(normaliser="phi", phi="gelu"), 16, CUDA, torch.bfloat16, "rows"),
    (AttentionConfig(), 16, CUDA, torch.float32, "sdpa"),
]
REFUSED = [
    (LSSAR, 16, CPU, torch.float32, "needs a CUDA device, found cpu"),
    (AttentionConfig(normaliser="softmax_inverse"), 16, CUDA, torch.float32, "softmax_inverse"),
    (AttentionConfig(), 16, CUDA, torch.float32, "softmax with these options is a softmax, which"),
    (AttentionConfig(normaliser="phi", phi="mish"), 16, CUDA, torch.float32, "phi = mish: its"),
    (LSSAR, 144, CUDA, torch.float32, "head size 144 in torch.float32"),
    (LSSAR, 264, CUDA, torch.bfloat16, "head size 264 in torch.bfloat16"),
    (LSSAR, 16, CUDA, torch.float64, "head size 16 in torch.float64"),
]


def test_choice(monkeypatch):
    """auto takes the kernels on CUDA after their self-check; what they cannot run is an error."""

    def verdict(problem):
        monkeypatch.setattr(self_check, "check", lambda *key: self_check.SelfCheck(0.001, problem))

    verdict("")
    for cfg, size, device, dtype, name in CHOICES:
        assert choose(make_normaliser(cfg, 2, size, 300), device, dtype) == name
    note = choose_engine(lssar(), "triton", CUDA, torch.bfloat16).note
    assert note == "triton (self-check: relative error 1.0e-03)"
    verdict("no")
    assert choose(lssar(), CUDA, torch.bfloat16) == "rows"
    with pytest.raises(UserError, match="engine = 'triton': no; expected auto"):
        choose_engine(lssar(), "triton", CUDA, torch.bfloat16)
    monkeypatch.setattr(triton_engine, "INTERPRETED", False)
    for cfg, size, device, dtype, problem in REFUSED:
        with pytest.raises(UserError, match=f"engine = 'triton': {problem}"):
            choose(make_normaliser(cfg, 2, size, 300), device, dtype, "triton")


def test_a_learned_shift_is_not_for_the_kernels():
    """They would take head 0's for all heads, and give it no gradient: the self-check finds out."""

    class Learned(Phi):
        def learned(self, n_head, train_len):
            return {"b": torch.zeros(n_head)}

        def shift(self, context):
            return context.learned["b"]

    normaliser = NormaliserLayer(Learned(), 0, 2, 16, 300)
    with pytest.raises(AssertionError):
        engine_error(triton_engine, normaliser, CPU, torch.float32)


def test_auto_on_cuda_without_triton(monkeypatch):
    monkeypatch.delattr("engines.triton")
    monkeypatch.setitem(sys.modules, "engines.triton", None)
    with pytest.warns(UserWarning, match="engine triton cannot be imported"):
        assert choose(lssar(), CUDA, torch.bfloat16, "auto") == "rows"


def check(cfg):
    self_check._check.cache_clear()
    return self_check.check(
        "triton", triton_engine, make_normaliser(cfg, 2, 16, 300), CPU, torch.float32
    )


def check_passes(cfg):
    with warnings.catch_warnings(), torch.inference_mode():  # as in an evaluation
        warnings.filterwarnings("error", message="triton")
        result = check(cfg)
    assert not result.problem and result.error < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [LSSAR, *OTHERS[::6]], ids=ids)
def test_self_check_passes(cfg):
    check_passes(cfg)


@pytest.mark.parametrize(
    "fault", ["", "wrong", "raises", *slow("evaluation", "strides", "long row")]
)
def test_self_check_finds_faults(monkeypatch, fault):
    right = triton_engine.phi_attention

    def phi_attention(*args, **kwargs):
        if fault == "raises":
            raise RuntimeError("PTX was compiled with an unsupported toolchain\nand more lines")
        long_row = args[1].shape[2] > 300
        found = {"": 0, "long row": long_row, "evaluation": not torch.is_grad_enabled()}.get(
            fault, 1
        )
        return right(*args, **{**kwargs, "p": kwargs["p"] + found})

    if fault == "strides":
        monkeypatch.setattr(triton_engine, "_new_output", torch.empty_like)
    else:
        monkeypatch.setattr(triton_engine, "phi_attention", phi_attention)
    monkeypatch.setattr(self_check, "engine_error", partial(engine_error, length=70))
    if not fault:
        return check_passes(LSSAR)
    with pytest.warns(UserWarning, match="engine triton failed its self-check ") as caught:
        result = check(LSSAR)
    self_check._check.cache_clear()
    assert result.problem and "\n" not in str(caught[0].message)
    assert ("toolchain" in result.problem) if fault == "raises" else not result.error <= 0.001


def test_ranks_agree_on_the_self_check(monkeypatch):
    """Rank 1 fails it, and rank 0 must not go on alone with the kernels."""
    monkeypatch.setattr(
        self_check, "engine_error", lambda *key, **options: float(os.environ["RANK"])
    )

    def main():
        with warnings.catch_warnings(action="ignore"), join_world("cpu"):
            print(check(LSSAR).problem)

    problems = [stdout.strip() for stdout, _ in finish(fork_ranks(main))]
    assert problems == [
        f"failed its self-check ({why})"
        for why in ("on another rank", "relative error 1.0e+00, expected at most 5e-04")
    ]


# 5. Compiled ahead of time.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "n_kernels"),
    [
        (["bfloat16"], 5),
        (["float32"], 5),
        (["bfloat16", "--rising"], 5),
        (["bfloat16", "--documents"], 5),
        (["bfloat16", "--all-forms"], 32),
    ],
)
def test_kernels_compile(options, n_kernels):
    """cubins for sm_90 at head_dim 64: in a process of its own, where nothing is interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels",
        "--arch",
        "90",
        "--head-dim",
        "64",
        "--dtype",
    ]
    result = subprocess.run(
        [*command, *options], cwd=REPO, env=env, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("| sm_90  |") == n_kernels


def test_a_kept_kernel_is_of_this_code(monkeypatch):
    """Triton's cache sees a changed property of Form, which it does not hash itself."""
    form = Form("softplus", True, 15, False, True, False, True, 64)
    function = SimpleNamespace(__name__="f", cache_key="", arg_names=["form"])
    source = ASTSource(function, {"form": "constexpr"}, {"form": form})
    before = source.hash()
    assert source.hash() == before
    monkeypatch.setattr(kernels, "SOURCE", "changed")
    assert source.hash() != before


ONE_KERNEL = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Device:  # an H100, as far as the compiler asks
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Device())
from engines import triton as at

form = at.Form("softplus", True, 15, True, True, False, True, 64)
launch = at.launch_of("forward_u", form, 9)
for T, p in ((64, 1), (100, 2), (257, 7), (1, 8), (4096, 14)):
    q, k, v = torch.empty(2, T, 3, 4, 64, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4)
    stats, o = torch.empty(2, 4, T, 4), at._new_output(q)
    args = (q, k, v, None, None, o, stats, o, *(t.stride()[:3] for t in (q, k, v, o)), p, 4, 1, T, T, form)
    at.kernels._forward.warmup(*args, grid=(1,), **launch._asdict())
print(len(at.kernels._forward.device_caches[0][0]), "compiled")
"""


@pytest.mark.slow
def test_no_length_and_no_rising_power_compiles_anew():
    """Through Triton's own just-in-time path, up to the launch."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ONE_KERNEL]
    result = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    assert result.stdout == "1 compiled\n", result.stdout + result.stderr
