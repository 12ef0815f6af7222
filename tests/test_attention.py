"""Proofs for attention.py, against formulas written independently of it (reference.py).

    python -m pytest tests/test_attention.py -n 2

CASES holds every normaliser with each of its options; a normaliser that is registered but not listed
is added with its default options, so that most of what follows covers it at once (the comparison with
reference.py needs a formula there).
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from reference import FORMULAS, PHI, UNIFORM, reference_weights
from torch import Tensor

from attention import (
    NORMALISERS,
    Normaliser,
    attend,
    config_problems,
    l1_normalise,
    make_normaliser,
    reweight,
    softplus,
    supports_sdpa,
)
from config import AttentionConfig
from infra.cli import UserError

torch.set_num_threads(1)

PHIS = ("exp", "identity", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish")
BIASES = ("log_train_len", "log_len", "log_n")

PLAIN: list[dict[str, Any]] = [
    *({"normaliser": name} for name in ("softmax", "softmax_inverse", "softmax_recentred")),
    *({"normaliser": name} for name in ("softmax_recentred_l1", "phi", "lssa", "sigmoid", "relu_wortsman")),
    *({"normaliser": name} for name in ("relu_li", "relu_shen", "ssmax", "ssmax_pn", "norm_softmax")),
    {"normaliser": "logit_norm"},
    *({"normaliser": "phi", "phi": phi, "l1": l1} for phi in PHIS for l1 in (True, False)),
    *({"normaliser": "sigmoid", "bias": bias, "l1": l1} for bias in BIASES for l1 in (True, False)),
    *({"normaliser": "relu_wortsman", "divide_by": by} for by in ("train_len", "n")),
    {"normaliser": "relu_shen", "gamma": 2.5},
    {"normaliser": "ssmax", "scale_init": 0.43},
    {"normaliser": "ssmax", "scale": "one"},
    {"normaliser": "ssmax", "scale": "learned", "bias": True},
    {"normaliser": "ssmax", "scale": "one", "bias": True},
    {"normaliser": "ssmax_pn", "scale_init": 0.7},
    {"normaliser": "norm_softmax", "variant": "standard", "gamma": 2.0},
    {"normaliser": "norm_softmax", "gamma": "sqrt_d", "gamma_factor": 0.5},
    {"normaliser": "norm_softmax", "gamma_factor": 2.0, "tau": 0.5},
    {"normaliser": "norm_softmax", "gamma": "inf"},
    {"normaliser": "norm_softmax", "variant": "affine"},
    {"normaliser": "norm_softmax", "variant": "affine", "tau": 2.0},
    {"normaliser": "norm_softmax", "variant": "inverse"},
    {"normaliser": "norm_softmax", "variant": "inverse", "gamma": 3.0, "tau": 0.8},
    {"normaliser": "norm_softmax", "variant": "inverse", "gamma_factor": 2.0},
    {"normaliser": "logit_norm", "tau": 0.25},
]
REWEIGHTED: list[dict[str, Any]] = [
    {**options, "reweight_p": p}
    for p in (1, 3, 15)
    for options in (
        {"normaliser": "softmax"},
        {"normaliser": "lssa"},
        {"normaliser": "phi", "phi": "exp"},
        {"normaliser": "phi", "phi": "relu2"},
        {"normaliser": "phi", "phi": "softplus"},
        {"normaliser": "sigmoid", "l1": True},
        {"normaliser": "sigmoid", "bias": "log_len", "l1": True},
        {"normaliser": "relu_li"},
        {"normaliser": "ssmax", "bias": True},
        {"normaliser": "ssmax_pn"},
        {"normaliser": "norm_softmax"},
        {"normaliser": "norm_softmax", "variant": "affine"},
        {"normaliser": "logit_norm"},
    )
]
LISTED = {options["normaliser"] for options in PLAIN}
OPTIONS = [*PLAIN, *({"normaliser": name} for name in NORMALISERS if name not in LISTED), *REWEIGHTED]


def case_id(options: dict[str, Any]) -> str:
    rest = [f"{key}={value}" for key, value in options.items() if key != "normaliser"]
    return " ".join([options["normaliser"], *rest]).replace(" ", "-")


CASES = [pytest.param(AttentionConfig(**options), id=case_id(options)) for options in OPTIONS]
each_case = pytest.mark.parametrize("cfg", CASES)


def engines(cfg: AttentionConfig) -> list[str]:
    return ["dense", "rows", "sdpa"] if supports_sdpa(cfg) else ["dense", "rows"]


def is_normalised(cfg: AttentionConfig) -> bool:
    """Whether rows have a scale of their own: sum |A| = 1, or a softmax with something subtracted."""
    names = ("lssa", "relu_li", "ssmax", "ssmax_pn", "norm_softmax", "logit_norm")
    l1 = cfg.l1 is True or (cfg.normaliser == "phi" and cfg.l1 is None)
    return cfg.normaliser in names or cfg.normaliser.startswith("softmax") or l1


def make(cfg: AttentionConfig, n_head: int, head_dim: int, train_len: int, seed: int = 0) -> Normaliser:
    """A normaliser whose learned parameters are away from their initial values, different in every head."""
    normaliser = make_normaliser(cfg, n_head=n_head, head_dim=head_dim, train_len=train_len)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(normaliser.named_parameters()):
            low = -0.3 if name == "b" else 0.5
            p.copy_(low + torch.rand(p.shape, generator=g))
    return normaliser


def draw(
    len_q: int, len_k: int, head_dim: int, batch: int = 1, n_head: int = 2, seed: int = 0, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of o, all N(0, 1)."""
    g = torch.Generator().manual_seed(1000 * len_q + len_k + seed)
    shapes = [(batch, n_head, t, head_dim) for t in (len_q, len_k, len_k, len_q)]
    q, k, v, do = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, do


def run(engine: Any, normaliser: Normaliser, q, k, v, do, *, autocast: bool = False) -> dict[str, Tensor]:
    """o and every gradient of (o * do).sum(), with an engine or with weights given as a function."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    params = dict(normaliser.named_parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        o = engine(q, k, params) @ v if callable(engine) else attend(q, k, v, normaliser, engine=engine)
    inputs = {"dq": q, "dk": k, "dv": v, **{f"d{name}": p for name, p in params.items()}}
    grads = torch.autograd.grad(o, list(inputs.values()), do, allow_unused=True, materialize_grads=True)
    return {"o": o.detach(), **dict(zip(inputs, grads, strict=True))}


def exactly(normaliser: Normaliser, *inputs: Tensor) -> dict[str, Tensor]:
    """`run` in float64 on the same numbers; equal to the reference by the first tests of section 2."""
    return run("dense", copy.deepcopy(normaliser).double(), *(t.double() for t in inputs))


def assert_close(got, want, inputs: tuple[Tensor, ...], tolerance: float, label: str) -> None:
    """Norm of the error over norm of the exact value, for o and each gradient.

    Some gradients are sums that cancel, so that their own norm is no measure of their rounding:
    - dq or dk may vanish, exactly (equal keys) or nearly (at most 3 rows, where one key may take each
      row whole): held against the largest gradient;
    - a learned parameter's is a sum over all rows, of the terms q dq: held against 10 % of sum |q dq|
      where that is larger.
    """
    assert got.keys() == want.keys()
    exact = {name: t.double() for name, t in want.items()}
    largest = max(t.norm() for name, t in exact.items() if name != "o")
    few = inputs[0].shape[2] <= 3
    terms = (inputs[0].double() * exact["dq"]).abs().sum()
    bad = {}
    for name, t in exact.items():
        scale = t.norm()
        if name in ("dq", "dk") and (few or scale <= 1e-9 * largest):
            scale = largest
        if name not in ("o", "dq", "dk", "dv"):
            scale = torch.maximum(scale, largest if few else 0.1 * terms)
        error = float((got[name].double() - t).norm() / scale.clamp(min=1e-30))
        if not error <= tolerance:
            bad[name] = f"{error:.2e}"
    assert not bad, f"{label}: relative errors {bad} above {tolerance}"


# 1. The dense weights are the formulas.


def test_every_registered_normaliser_is_a_case():
    assert {cfg.values[0].normaliser for cfg in CASES} == set(NORMALISERS)
    assert set(NORMALISERS) >= set(FORMULAS)
    assert set(PHIS) == set(PHI)


SHAPES = [(t, t) for t in (1, 2, 3, 4, 5, 33, 129)] + [(1, 33), (7, 33)]


def formula(cfg: AttentionConfig, train_len: int) -> Callable[..., Tensor]:
    if cfg.normaliser not in FORMULAS:
        pytest.skip(f"tests/reference.py has no formula for {cfg.normaliser}")
    return lambda q, k, params: reference_weights(cfg, q, k, train_len, params)


def row_errors(cfg: AttentionConfig, q: Tensor, k: Tensor, normaliser: Normaliser) -> Tensor:
    """Each row's largest error; relative to the row's largest weight where rows are not normalised."""
    got = normaliser.weights(q, k)
    want = formula(cfg, 160)(q, k, dict(normaliser.named_parameters()))
    assert got.dtype == q.dtype and got.shape == want.shape
    future = torch.ones(got.shape[2:], dtype=torch.bool).triu(got.shape[3] - got.shape[2] + 1)
    assert (got[..., future] == 0).all()
    return row_distance(cfg, got, want)


def row_distance(cfg: AttentionConfig, got: Tensor, want: Tensor) -> Tensor:
    distance = (got.double() - want).abs().amax(-1)
    return distance if is_normalised(cfg) else distance / want.abs().amax(-1).clamp(min=1e-30)


def rounding_response(cfg: AttentionConfig, q: Tensor, k: Tensor, normaliser: Normaliser) -> Tensor:
    """How far exact weights move, by row, when every number in q and k moves by half a float32 ulp.

    No float32 code can be expected below a few times this: it cannot tell those inputs apart.
    """
    g = torch.Generator().manual_seed(0)
    exact = copy.deepcopy(normaliser).double()

    def moved(t: Tensor) -> Tensor:
        return t.double() * (1 + 2.0**-24 * (2 * torch.randint(0, 2, t.shape, generator=g) - 1))

    want = exact.weights(q.double(), k.double())
    return torch.stack([row_distance(cfg, exact.weights(moved(q), moved(k)), want) for _ in range(8)]).amax(0)


def is_ill_conditioned(cfg: AttentionConfig) -> bool:
    """Where 1e-6 is beyond float32, because the formula magnifies the rounding of its scores.

    reweight_p: by p n A / (n A - 1). ssmax, norm_softmax with a small gamma: by the low temperature.
    Rows that are not normalised, and signed phi: relatively, where all scores of a short row are near
    a zero of phi.
    """
    return (
        (cfg.reweight_p or 1) > 1
        or cfg.normaliser == "ssmax"
        or cfg.gamma == 2.0
        or not is_normalised(cfg)
        or cfg.phi in ("identity", "gelu", "mish")
    )


@pytest.mark.parametrize("head_dim", [16, 64])
@each_case
def test_weights_are_the_formula_float32(cfg, head_dim):
    for shape in SHAPES:
        q, k, _, _ = draw(*shape, head_dim)
        normaliser = make(cfg, 2, head_dim, train_len=160)
        error = row_errors(cfg, q, k, normaliser)
        tolerance = torch.tensor(1e-6, dtype=torch.float64)
        if error.max() > tolerance and is_ill_conditioned(cfg):
            tolerance = tolerance + 16 * rounding_response(cfg, q, k, normaliser)
        assert (error <= tolerance).all(), f"T = {shape}: {error.max():.2e}"


@pytest.mark.parametrize("head_dim", [16, 64])
@each_case
def test_weights_are_the_formula_float64(cfg, head_dim):
    for shape in [*((t, t) for t in (1, 2, 3, 4, 5, 33)), (7, 129)]:
        q, k, _, _ = draw(*shape, head_dim, dtype=torch.float64)
        error = row_errors(cfg, q, k, make(cfg, 2, head_dim, train_len=160).double())
        assert error.max() <= 1e-12, f"T = {shape}: {error.max():.2e}"


@each_case
def test_weights_are_the_formula_at_large_scores(cfg):
    q, k, _, _ = draw(33, 33, 16, dtype=torch.float64)
    error = row_errors(cfg, 8 * q, k, make(cfg, 2, 16, train_len=160).double())
    assert error.max() <= 1e-12, f"{error.max():.2e}"


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize(
    "options",
    [
        {"normaliser": "norm_softmax", "gamma": "inf"},
        {"normaliser": "norm_softmax", "variant": "affine"},
        {"normaliser": "logit_norm"},
        {"normaliser": "lssa"},
    ],
    ids=case_id,
)
def test_normalised_scores_have_no_scale(options, scale):
    """These formulas do not change when all queries are multiplied by a number."""
    cfg = AttentionConfig(**options)
    q, k, _, _ = draw(33, 33, 64)
    error = row_errors(cfg, scale * q, k, make(cfg, 2, 64, train_len=160))
    assert error.max() <= 1e-6, f"{error.max():.2e}"


@each_case
def test_learned_parameters(cfg):
    normaliser = make_normaliser(cfg, n_head=3, head_dim=16, train_len=20)
    got = {name: (tuple(p.shape), p.unique().tolist()) for name, p in normaliser.named_parameters()}
    s = pytest.approx([1.0 if cfg.scale_init is None else cfg.scale_init])
    want: dict[str, Any] = {}
    if cfg.normaliser == "ssmax":
        want |= {"s": ((3,), s)} if cfg.scale != "one" else {}
        want |= {"b": ((3,), [0.0])} if cfg.bias else {}
    if cfg.normaliser == "ssmax_pn":
        want = {"s": ((3,), s), "b": ((3,), [0.0]), "p_n": ((20,), [1.0])}
    if cfg.variant == "affine":
        want = {"w": ((3,), [1.0])}
    if cfg.normaliser in FORMULAS:
        assert got == want


# 2. The fast engines are the dense one, and all are the float64 one.


@each_case
def test_float64_gradients_are_the_reference(cfg):
    for shape in [(21, 21), (5, 18)]:
        inputs = draw(*shape, 8, dtype=torch.float64)
        normaliser = make(cfg, 2, 8, train_len=40).double()
        want = run(formula(cfg, 40), normaliser, *inputs)
        for engine in engines(cfg):
            got = run(engine, normaliser, *inputs)
            assert_close(got, want, inputs, 1e-11, f"{engine}, T = {shape}")


LENGTHS = [(1, 1), (3, 3), (37, 37), (129, 129), (300, 300), (1, 33), (7, 33), (101, 300)]


@each_case
def test_engines_agree_float32(cfg):
    for shape in LENGTHS:
        inputs = draw(*shape, 32)
        normaliser = make(cfg, 2, 32, train_len=300)
        dense, exact = run("dense", normaliser, *inputs), exactly(normaliser, *inputs)
        assert_close(dense, exact, inputs, 1e-5, f"dense against float64, T = {shape}")
        for engine in engines(cfg)[1:]:
            got = run(engine, normaliser, *inputs)
            assert_close(got, dense, inputs, 1e-5, f"{engine} against dense, T = {shape}")
            assert_close(got, exact, inputs, 1e-5, f"{engine} against float64, T = {shape}")


BIG = [{"normaliser": "lssa", "reweight_p": 15}, {"normaliser": "ssmax"}, {"normaliser": "norm_softmax"}]


@pytest.mark.parametrize("options", BIG, ids=case_id)
def test_engines_agree_on_a_batch_in_the_models_layout(options):
    """Long enough for several blocks of rows and of sequences; heads are strided, as in a model."""
    cfg = AttentionConfig(**options)
    inputs = draw(1003, 1003, 16, batch=5)
    inputs = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)
    normaliser = make(cfg, 2, 16, train_len=1024)
    dense = run("dense", normaliser, *inputs)
    for engine in engines(cfg)[1:]:
        assert_close(run(engine, normaliser, *inputs), dense, inputs, 1e-5, engine)


@each_case
def test_engines_in_bfloat16(cfg):
    for shape in [(37, 37), (7, 33), (129, 129)]:
        inputs = draw(*shape, 32, dtype=torch.bfloat16)
        normaliser = make(cfg, 2, 32, train_len=300)
        exact = exactly(normaliser, *inputs)
        for engine in engines(cfg):
            got = run(engine, normaliser, *inputs)
            assert all(got[name].dtype == torch.bfloat16 for name in ("o", "dq", "dk", "dv"))
            assert all(g.isfinite().all() for g in got.values())
            assert_close(got, exact, inputs, 2e-2, f"{engine}, T = {shape}")


@pytest.mark.parametrize("options", BIG, ids=case_id)
def test_autocast_leaves_scores_in_float32(options):
    cfg = AttentionConfig(**options)
    inputs = draw(70, 70, 32)
    normaliser = make(cfg, 2, 32, train_len=300)
    for engine in engines(cfg):
        want = run(engine, normaliser, *inputs)
        got = run(engine, normaliser, *inputs, autocast=True)
        assert_close(got, want, inputs, 1e-5, engine)


def test_backward_inside_autocast_is_in_float32():
    q, k, v, do = draw(70, 70, 32)
    normaliser = make(AttentionConfig(normaliser="lssa", reweight_p=15), 2, 32, train_len=300)
    for t in (q, k, v):
        t.requires_grad_()
    want = torch.autograd.grad(attend(q, k, v, normaliser, "rows"), [q, k, v], do)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(attend(q, k, v, normaliser, "rows"), [q, k, v], do)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("options", BIG, ids=case_id)
def test_autocast_leaves_weights_in_float32(options):
    q, k, _, _ = draw(70, 70, 32)
    normaliser = make(AttentionConfig(**options), 2, 32, train_len=300)
    want = normaliser.weights(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = normaliser.weights(q, k)
    assert got.dtype == torch.float32 and (got - want).abs().max() <= 1e-6


@each_case
def test_auto_is_a_fast_engine(cfg):
    inputs = draw(37, 37, 32)
    normaliser = make(cfg, 2, 32, train_len=300)
    fast = run("sdpa" if supports_sdpa(cfg) else "rows", normaliser, *inputs)
    assert_close(run("auto", normaliser, *inputs), fast, inputs, 1e-6, "auto")


def test_what_sdpa_supports():
    by_sdpa = {"softmax", "ssmax", "ssmax_pn", "norm_softmax", "logit_norm"}
    for (cfg,) in (case.values for case in CASES):
        if cfg.normaliser in FORMULAS and cfg.phi != "exp":  # softmax under another name: either is right
            assert supports_sdpa(cfg) == (cfg.normaliser in by_sdpa and cfg.reweight_p is None), cfg


# 3. Gradients against finite differences.

GRADCHECK = [
    pytest.param(AttentionConfig(**options, reweight_p=p), id=case_id({**options, "p": p}))
    for p in (1, 3, 15, 50)
    for options in ({"normaliser": "lssa"}, {"normaliser": "softmax"}, {"normaliser": "sigmoid", "l1": True})
]


@pytest.mark.parametrize("cfg", [*GRADCHECK, *CASES])
def test_gradcheck(cfg):
    for len_q, len_k in [(7, 7), (2, 6)]:
        q, k, v, _ = draw(len_q, len_k, 4, n_head=1, dtype=torch.float64)
        normaliser = make(cfg, 1, 4, train_len=8).double()
        inputs = [q, k, v, *normaliser.parameters()]
        for t in inputs:
            t.requires_grad_()
        for engine in engines(cfg):
            assert torch.autograd.gradcheck(
                lambda q, k, v, *params, engine=engine, norm=normaliser: attend(q, k, v, norm, engine=engine),
                inputs,
                fast_mode=cfg.reweight_p is None,
            )


def scores_to_qk(x: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (1, 1, T, T) whose scores q k / sqrt d are the given x (T, T)."""
    d = x.shape[-1]
    return x[None, None], math.sqrt(d) * torch.eye(d, dtype=x.dtype)[None, None]


@pytest.mark.parametrize("p", [1, 3, 15, 100])
def test_reweighting_gradient_closed_form(p):
    """DESIGN, fact 4, for phi = softplus; in particular r^(p-1) at p = 1 is the indicator of r > 0."""
    torch.manual_seed(p)
    t = 9
    x, v, do = (torch.randn(t, t, dtype=torch.float64) for _ in range(3))
    cfg = AttentionConfig(normaliser="phi", phi="softplus", reweight_p=p)
    normaliser = make_normaliser(cfg, n_head=1, head_dim=t, train_len=t)
    q, k = scores_to_qk(x)
    want = torch.zeros(t, t, dtype=torch.float64)
    for i in range(t):
        n = i + 1
        s = F.softplus(x[i, :n])
        a, big_o = s / s.sum(), 0 if n <= 3 else 1
        r = torch.relu(n * a - big_o)
        weight = (r / r.max()) ** p / ((r / r.max()) ** p).sum()  # C
        slope = torch.where(r > 0, weight / r, 0.0) if p > 1 else (r > 0).double() / r.sum()  # r^(p-1) / W
        dc = v[:n] @ do[i]
        da = p * n * slope * (dc - (weight * dc).sum())
        ds = (da - (da * a).sum()) / s.sum()
        want[i, :n] = ds * torch.sigmoid(x[i, :n])
    for engine in ("dense", "rows"):
        got = run(engine, normaliser, q, k, v[None, None], do[None, None])["dq"][0, 0]
        error = (got - want).abs().max() / want.abs().max()
        assert error <= 1e-11, f"{engine}: {error:.2e}"


# 4. Nothing looks ahead.


@each_case
def test_the_future_changes_nothing(cfg):
    q, k, v, _ = draw(75, 75, 16)
    normaliser = make(cfg, 2, 16, train_len=80)
    for t in (1, 2, 40, 74):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, t:] = 7 * torch.randn(x[:, :, t:].shape, generator=torch.Generator().manual_seed(t)) + 3
        for engine in engines(cfg):
            before, after = (attend(*x, normaliser, engine=engine)[:, :, :t] for x in ((q, k, v), later))
            if engine == "sdpa":
                assert (before - after).abs().max() <= 1e-6, f"{engine}, t = {t}"
            else:
                assert torch.equal(before, after), f"{engine}, t = {t}"


# 5. Extreme rows.

STRESSED = {
    "lssa": {"normaliser": "lssa"},
    "softmax": {"normaliser": "softmax"},
    "softplus_l1": {"normaliser": "phi", "phi": "softplus"},
    "sigmoid_l1": {"normaliser": "sigmoid", "l1": True},
}


def extreme(kind: str, len_q: int, len_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, do = draw(len_q, len_k, 16, n_head=1)
    v[..., 0] = 1  # so that o[..., 0] is the sum of the row
    if kind == "sharp":
        q, k = torch.full_like(q, 1.5), torch.full_like(k, -1.5)
        k[:, :, len_k // 3] = 1.5
    if kind == "equal":
        k = k[:, :, :1].expand_as(k).contiguous()
    if kind == "zeros":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    if kind == "huge":
        q, k = 100 * q, 100 * k
    return q, k, v, do


@pytest.mark.parametrize("kind", ["sharp", "equal", "zeros", "huge"])
@pytest.mark.parametrize("p", [15, 100])
@pytest.mark.parametrize("name", STRESSED)
def test_reweighting_under_stress(name, p, kind):
    normaliser = make_normaliser(AttentionConfig(**STRESSED[name], reweight_p=p), 1, 16, train_len=1024)
    for len_q, len_k in [(128, 16384), (2048, 2048)]:
        q, k, v, do = extreme(kind, len_q, len_k)
        got = run("rows", normaliser, q, k, v, do)
        assert all(g.isfinite().all() for g in got.values()), {n: g.isfinite().all() for n, g in got.items()}

        assert (got["o"][0, 0, :, 0] - 1).abs().max() <= 1e-5

        if kind in ("equal", "zeros"):
            visible = torch.ones(len_q, len_k, dtype=torch.float64).tril(len_k - len_q)
            uniform = visible / visible.sum(-1, keepdim=True)
            assert (got["o"][0, 0] - uniform @ v[0, 0].double()).abs().max() <= 1e-5
            dv = uniform.mT @ do[0, 0].double()
            assert (got["dv"][0, 0] - dv).norm() / dv.norm() <= 1e-5
        if kind == "sharp":
            after = torch.arange(len_k - len_q, len_k) >= len_k // 3
            sharp = (got["o"][0, 0] - v[0, 0, len_k // 3])[after].abs().max()
            assert sharp <= 1e-5, f"{sharp:.2e}"


@pytest.mark.parametrize("p", [15, 100])
@pytest.mark.parametrize("name", STRESSED)
def test_uniform_rows_have_bounded_gradients(name, p):
    normaliser = make_normaliser(AttentionConfig(**STRESSED[name], reweight_p=p), 1, 16, train_len=1024)
    inputs = extreme("equal", 512, 512)
    got = run("rows", normaliser, *inputs)
    assert_close(got, exactly(normaliser, *inputs), inputs, 1e-4, "equal keys")


@each_case
@pytest.mark.parametrize("kind", ["equal", "zeros", "huge"])
def test_extremes_are_finite(cfg, kind):
    if kind == "huge" and cfg.phi == "exp" and cfg.l1 is False:
        pytest.skip("exp(1e4) is infinite: the formula, not the code")
    for engine in engines(cfg):
        got = run(engine, make(cfg, 1, 16, train_len=80), *extreme(kind, 70, 70))
        bad = [name for name, g in got.items() if not g.isfinite().all()]
        assert not bad, f"{engine}: {bad} not finite"


def test_exp_l1_is_softmax_at_any_scale():
    q, k, _, _ = extreme("huge", 70, 70)
    exp, softmax = (
        make_normaliser(AttentionConfig(**options), 1, 16, 80).weights(q, k)
        for options in ({"normaliser": "phi", "phi": "exp"}, {"normaliser": "softmax"})
    )
    assert (exp - softmax).abs().max() <= 1e-6


# 6. The rules of the re-weighting.


def reweighted_softmax(x: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Softmax weights of the scores x (T, T) before and after re-weighting."""
    q, k = scores_to_qk(x)
    configs = (AttentionConfig(reweight_p=p), AttentionConfig())
    after, before = (make_normaliser(cfg, 1, x.shape[-1], 64).weights(q, k)[0, 0] for cfg in configs)
    return before, after


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_reweighting_is_the_naive_formula(p):
    torch.manual_seed(p)
    a, got = reweighted_softmax(torch.randn(40, 40, dtype=torch.float64), p)
    n = torch.arange(1.0, 41, dtype=torch.float64)[:, None]
    b = torch.relu(a * n - (n > 3).double()) ** p
    assert (got - b / b.sum(-1, keepdim=True)).abs().max() <= 1e-13


@pytest.mark.parametrize("p", [1, 3, 15])
def test_first_three_rows_subtract_nothing(p):
    torch.manual_seed(p)
    a, got = reweighted_softmax(torch.randn(6, 6, dtype=torch.float64), p)
    for i in range(3):
        assert (got[i] - a[i] ** p / (a[i] ** p).sum()).abs().max() <= 1e-15
    assert (got[:3][a[:3] > 0] > 0).all()
    assert ((got[3:] > 0) == (a[3:] * torch.tensor([[4.0], [5], [6]]) > 1)).all()


@pytest.mark.parametrize("p", [1, 15])
def test_uniform_rule_has_its_threshold(p):
    """A row just under it keeps all its keys; just over it, the one key above the mean takes all."""
    for excess, uniform in [(0.0, True), (0.99 * UNIFORM, True), (1.01 * UNIFORM, False)]:
        t = 8
        x = torch.zeros(t, t, dtype=torch.float64)
        a = (1 + excess) / t  # softmax weight of key 0 in the last row; the others share the rest
        x[-1, 0] = math.log(a / ((1 - a) / (t - 1)))
        _, got = reweighted_softmax(x, p)
        want = torch.full((t,), 1 / t) if uniform else torch.eye(t)[0]
        assert (got[-1] - want).abs().max() <= 2 * p * UNIFORM / t, excess


# 7. NormSoftmax's sigma in linear time.


def shared_mean(ratio: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys N(0, 1) around a common vector of `ratio` in each coordinate."""
    q, k, v, do = draw(257, 257, 64)
    return q, k + ratio, v, do


@pytest.mark.parametrize("ratio, tolerance", [(0.0, 1e-6), (10.0, 5.6e-6), (100.0, 5.6e-5)])
@pytest.mark.parametrize("options", [{}, {"gamma": "inf"}, {"variant": "affine"}, {"variant": "inverse"}])
def test_sigma_survives_a_shared_mean(options, ratio, tolerance):
    normaliser = make(AttentionConfig(normaliser="norm_softmax", **options), 2, 64, train_len=257)
    inputs = shared_mean(ratio)
    exact = exactly(normaliser, *inputs)
    for engine in ("sdpa", "rows", "dense"):
        error = (run(engine, normaliser, *inputs)["o"] - exact["o"]).norm() / exact["o"].norm()
        assert error <= tolerance, f"{engine}: {error:.2e}"


@pytest.mark.parametrize("ratio", [0.0, 100.0])
def test_sigma_is_bitwise_causal(ratio):
    normaliser = make(AttentionConfig(normaliser="norm_softmax"), 2, 64, train_len=257)
    q, k, v, _ = shared_mean(ratio)
    before = attend(q, k, v, normaliser, engine="sdpa")
    for t in (1, 2, 63, 64, 65, 128, 200, 256):
        later = k.clone()
        later[:, :, t:] *= -5
        assert torch.equal(attend(q, later, v, normaliser, engine="sdpa")[:, :, :t], before[:, :, :t]), t


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("head_dim", [16, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_keys_are_a_uniform_row(dtype, head_dim, scale):
    """sigma is 0 there, although the products q k of equal keys may round differently."""
    for variant in ("standard", "affine", "inverse"):
        cfg = AttentionConfig(normaliser="norm_softmax", variant=variant)
        normaliser = make(cfg, 2, head_dim, 300).to(dtype)
        for t in (2, 5, 65, 100, 300):
            for seed in range(3):
                q, k, v, do = draw(t, t, head_dim, seed=seed, dtype=dtype)
                k = (scale * k[:, :, :1]).expand_as(k).contiguous()
                mean = v.cumsum(2) / torch.arange(1.0, t + 1)[:, None]
                for engine in ("dense", "rows", "sdpa"):
                    got = run(engine, normaliser, q, k, v, do)
                    assert all(g.isfinite().all() for g in got.values()), engine
                    error = (got["o"] - mean).abs().max()
                    assert error <= 1e-5, f"{engine}, {variant}, T = {t}: {error:.2e}"


@pytest.mark.parametrize("p", [1, 15, 100])
@pytest.mark.parametrize("keys", ["random", "one sharp", "equal"])
def test_reweighting_is_finite_and_exact_at_131072_keys(p, keys):
    """Past 131072 keys and p = 100 the formula as written overflows even float64's range."""
    q, k, v, do = draw(3, 131072, 16, n_head=1)
    if keys == "one sharp":
        k[:, :, 77] = 8 * q[:, :, 0]
    if keys == "equal":
        k = k[:, :, :1].expand_as(k).contiguous()
    cfg = AttentionConfig(normaliser="lssa", reweight_p=p)
    normaliser = make(cfg, 1, 16, 1024)
    got = run("rows", normaliser, q, k, v, do)
    assert all(g.isfinite().all() for g in got.values())
    weights, exact = normaliser.weights(q, k), normaliser.weights(q.double(), k.double())
    assert (weights.sum(-1) - 1).abs().max() <= 1e-5
    assert (weights - exact).abs().sum(-1).max() <= 1e-3  # l1 distance of whole rows


@pytest.mark.parametrize("p", [1, 2, 3, 15, 100])
def test_fused_reweighting_is_its_slow_twin(p):
    """SharpenedPhi against reweight(l1_normalise(softplus(x))), which autograd differentiates."""
    for t in (1, 3, 4, 70):
        q, k, v, do = draw(t, t, 16)
        normaliser = make(AttentionConfig(normaliser="lssa", reweight_p=p), 2, 16, 300)

        def slow(q, k, v):
            q, k, rows = normaliser.prepare(q, k)  # noqa: B023
            x = (q @ k.mT).masked_fill(~rows.visible(q @ k.mT), -math.inf)
            return reweight(l1_normalise(softplus(x)), rows, p) @ v

        q, k, v = (t.double().requires_grad_() for t in (q, k, v))
        want = torch.autograd.grad((slow(q, k, v) * do).sum(), [q, k, v])
        for engine in ("dense", "rows"):
            got = torch.autograd.grad((attend(q, k, v, normaliser, engine) * do).sum(), [q, k, v])
            for a, b in zip(got, want, strict=True):
                assert (a - b).norm() <= 1e-12 + 1e-10 * b.norm(), engine


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs a C++ compiler")
def test_compiled_rows_equal_eager_ones():
    for options in ({"normaliser": "lssa", "reweight_p": 15}, {"normaliser": "relu_li", "reweight_p": 3}):
        for t in (70, 129):  # the second length must not need a specialised graph to be right
            inputs = draw(t, t, 32)
            eager = make(AttentionConfig(**options), 2, 32, 300)
            compiled = make(AttentionConfig(**options, compile_rows=True), 2, 32, 300)
            want, got = (run("rows", normaliser, *inputs) for normaliser in (eager, compiled))
            assert_close(got, want, inputs, 1e-5, f"compiled {options}, T = {t}")


# 8. A KV cache changes nothing.


@each_case
def test_decoding_row_by_row(cfg):
    if cfg.bias == "log_len":
        pytest.skip("L is the current length: the formula itself changes while decoding")
    q, k, v, _ = draw(24, 24, 16, dtype=torch.float64)
    normaliser = make(cfg, 2, 16, train_len=24)
    for dtype, tolerance in [(torch.float64, 1e-12), (torch.float32, 1e-5)]:
        norm = copy.deepcopy(normaliser).to(dtype)
        x, y, z = q.to(dtype), k.to(dtype), v.to(dtype)
        for engine in [*engines(cfg), "auto"]:
            full = attend(x, y, z, norm, engine=engine)
            rows = [
                attend(x[:, :, t : t + 1], y[:, :, : t + 1], z[:, :, : t + 1], norm, engine=engine)
                for t in range(24)
            ]
            error = (torch.cat(rows, 2) - full).abs().max() / full.abs().max()
            assert error <= tolerance, f"{engine}, {dtype}: {error:.2e}"


# 9. What is refused.

READ_BY: dict[str, dict[str, Any]] = {  # option -> normalisers that read it, with a value they accept
    "phi": {"phi": "relu"},
    "l1": {"phi": True, "sigmoid": True},
    "bias": {"sigmoid": "log_n", "ssmax": True},
    "scale": {"ssmax": "learned"},
    "scale_init": {"ssmax": 0.5, "ssmax_pn": 0.5},
    "divide_by": {"relu_wortsman": "n"},
    "gamma": {"norm_softmax": 2.0, "relu_shen": 2.0},
    "gamma_factor": {"norm_softmax": 2.0},
    "tau": {"norm_softmax": 0.5, "logit_norm": 0.5},
    "variant": {"norm_softmax": "standard"},
}


def problems(**options: Any) -> str:
    """What config_problems says, after checking that AttentionConfig refuses with the same words."""
    found = config_problems(AttentionConfig.model_construct(**options))
    if found:
        with pytest.raises(ValidationError) as e:
            AttentionConfig(**options)
        assert all(problem in str(e.value) for problem in found)
    else:
        AttentionConfig(**options)
    return "\n".join(found)


@pytest.mark.parametrize("option", READ_BY)
@pytest.mark.parametrize("name", FORMULAS)
def test_an_option_that_is_not_read_is_refused(name, option):
    readers = READ_BY[option]
    value = readers.get(name, next(iter(readers.values())))
    found = problems(normaliser=name, **{option: value})
    assert option in found if name not in readers else not found


@pytest.mark.parametrize(
    "options, named",
    [
        ({"normaliser": "sigmoid", "bias": True}, "bias"),
        ({"normaliser": "ssmax", "bias": "log_n"}, "bias"),
        ({"normaliser": "relu_shen", "gamma": "sqrt_d"}, "gamma"),
        ({"normaliser": "relu_shen", "gamma": "inf"}, "gamma"),
        ({"normaliser": "relu_shen", "gamma": 0.0}, "gamma"),
        ({"normaliser": "norm_softmax", "gamma": -1.0}, "gamma"),
        ({"normaliser": "norm_softmax", "gamma": 2.0, "gamma_factor": 2.0}, "gamma_factor"),
        ({"normaliser": "norm_softmax", "variant": "affine", "gamma": 2.0}, "gamma"),
        ({"normaliser": "ssmax", "scale": "one", "scale_init": 0.5}, "scale_init"),
    ],
)
def test_an_option_without_meaning_is_refused(options, named):
    assert named in problems(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"normaliser": "softmax_inverse"},
        {"normaliser": "softmax_recentred"},
        {"normaliser": "softmax_recentred_l1"},
        *({"normaliser": "phi", "phi": phi} for phi in ("identity", "gelu", "mish")),
        {"normaliser": "phi", "phi": "softplus", "l1": False},
        {"normaliser": "sigmoid"},
        {"normaliser": "sigmoid", "l1": False},
        {"normaliser": "relu_wortsman"},
        {"normaliser": "relu_shen"},
    ],
    ids=case_id,
)
def test_reweighting_needs_rows_that_sum_to_one(options):
    assert "reweight_p" in problems(**options, reweight_p=3)


def test_an_unknown_normaliser_gets_a_near_match():
    found = problems(normaliser="norm_sofmax")
    assert "norm_sofmax" in found and "norm_softmax" in found


def test_every_problem_is_reported():
    found = config_problems(AttentionConfig.model_construct(normaliser="softmax", phi="relu", tau=2.0))
    assert len(found) == 2


@pytest.mark.parametrize(
    "options", [{"normaliser": "lssa"}, {"normaliser": "softmax", "reweight_p": 3}], ids=case_id
)
def test_sdpa_needs_a_softmax(options):
    assert "sdpa" in problems(**options, engine="sdpa")
    normaliser = make_normaliser(AttentionConfig(**options), 2, 16, train_len=8)
    with pytest.raises(UserError, match="sdpa"):
        attend(*draw(4, 4, 16)[:3], normaliser, engine="sdpa")


def test_an_unknown_engine_is_refused():
    normaliser = make_normaliser(AttentionConfig(), 2, 16, train_len=8)
    with pytest.raises(ValueError, match="fast"):
        attend(*draw(4, 4, 16)[:3], normaliser, engine="fast")


@pytest.mark.parametrize("name", ["softmax", "norm_softmax", "lssa"])
def test_more_queries_than_keys_are_refused(name):
    cfg = AttentionConfig(normaliser=name)
    normaliser = make_normaliser(cfg, 2, 16, train_len=8)
    for engine in engines(cfg):
        with pytest.raises(ValueError, match="5 queries"):
            attend(*draw(5, 3, 16)[:3], normaliser, engine=engine)


@pytest.mark.parametrize("engine", ["dense", "rows", "sdpa", "auto"])
@pytest.mark.parametrize("len_q", [1, 9])
def test_ssmax_pn_ends_at_the_training_length(engine, len_q):
    normaliser = make_normaliser(AttentionConfig(normaliser="ssmax_pn"), 2, 16, train_len=8)
    q, k, v, _ = draw(len_q, 9, 16)
    with pytest.raises(UserError, match="ssmax_pn"):
        attend(q, k, v, normaliser, engine=engine)
    with pytest.raises(UserError, match="ssmax_pn"):
        normaliser.weights(q, k)
    attend(q[:, :, :1], k[:, :, :8], v[:, :, :8], normaliser, engine=engine)
