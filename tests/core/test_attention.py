"""The engines: equal to each other and to float64, on every shape, type and extreme, with their
gradients.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    CASES,
    CASES_BY_NAME,
    FOX_SHAPES,
    GATE_TOLERANCE,
    assert_close,
    attend,
    case_id,
    choose,
    draw,
    each_case,
    each_name,
    engines,
    exactly,
    formula,
    fox_errors,
    has_sdpa,
    make,
    run,
    weights_of,
)
from conftest import slow
from reference import reference_weights

import attention
from attention import make_normaliser
from engines import sdpa, triton
from infra.cli import UserError
from normalisers.adaptive import NormSoftmax
from normalisers.base import l1_normalise
from normalisers.family import LSSA, Softmax
from normalisers.layer import NormaliserLayer
from schema import AttentionConfig

# 1. The fast engines are the dense one, and all are the float64 one.


@each_case
def test_float64_gradients_are_the_reference(cfg):
    for shape in [(21, 21), (5, 18)]:
        inputs = draw(*shape, 8, dtype=torch.float64)
        normaliser = make(cfg, 2, 8, train_len=40).double()
        want = run(formula(cfg, 40), normaliser, *inputs)
        for engine in engines(cfg):
            got = run(engine, normaliser, *inputs)
            assert_close(got, want, inputs, 1e-11, f"{engine}, T = {shape}")


LENGTHS = [(1, 1), (3, 3), (37, 37), (129, 129), (1, 33), (7, 33), (101, 300)]


@pytest.mark.parametrize("shapes", [LENGTHS[::2], *slow(LENGTHS[1::2])], ids=["quick", "rest"])
@each_case
def test_engines_agree_float32(cfg, shapes):
    for shape in shapes:
        inputs = draw(*shape, 32)
        normaliser = make(cfg, 2, 32, train_len=300)
        dense, exact = run("dense", normaliser, *inputs), exactly(normaliser, *inputs)
        assert_close(dense, exact, inputs, 1e-5, f"dense against float64, T = {shape}")
        for engine in engines(cfg)[1:]:
            got = run(engine, normaliser, *inputs)
            assert_close(got, dense, inputs, 1e-5, f"{engine} against dense, T = {shape}")
            assert_close(got, exact, inputs, 1e-5, f"{engine} against float64, T = {shape}")


BIG = [
    {"normaliser": "lssa", "reweight_p": 15},
    {"normaliser": "ssmax"},
    {"normaliser": "norm_softmax"},
]


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


@pytest.mark.parametrize("options", [*BIG, {"normaliser": "softmax"}], ids=case_id)
@pytest.mark.parametrize("n_queries", [1, 70])
def test_grouped_query_heads(options, n_queries):
    """Query heads 0 to 2 share the first head of k and v, 3 to 5 the second."""
    cfg = AttentionConfig(**options)
    q, _, _, do = draw(n_queries, 70, 16, batch=2, n_head=6)
    _, k, v, _ = draw(n_queries, 70, 16, batch=2)
    normaliser = make(cfg, 6, 16, train_len=300)
    repeated = [torch.stack([t] * 3, dim=2).flatten(1, 2) for t in (k, v)]
    want = exactly(normaliser, q, *repeated, do)
    for name in ("dk", "dv"):
        want[name] = want[name].unflatten(1, (2, 3)).sum(2)
    for engine in engines(cfg):
        assert_close(run(engine, normaliser, q, k, v, do), want, (q, k, v), 1e-5, engine)


@each_name
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
    want = normaliser.weights(*inputs[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(normaliser.weights(*inputs[:2]), want)
        backward_inside = run("rows", normaliser, *inputs)
    assert_close(backward_inside, run("rows", normaliser, *inputs), inputs, 1e-6, "rows")


def test_what_sdpa_supports_and_auto_takes():
    by_sdpa = {"softmax", "ssmax", "ssmax_pn", "norm_softmax", "logit_norm"}
    for (cfg,) in (case.values for case in CASES):
        plain = not cfg.reweight_p and getattr(cfg, "sink", "none") == "none"
        is_softmax = cfg.normaliser in by_sdpa or (getattr(cfg, "phi", "") == "exp" and cfg.l1)
        assert has_sdpa(cfg) == (is_softmax and plain and cfg.normaliser != "scale_invariant"), cfg
        engine = choose(make(cfg, 2, 16, 40), torch.device("cpu"), torch.float32)
        assert engine == ("sdpa" if has_sdpa(cfg) else "rows")


@pytest.mark.parametrize(
    ("base", "p"),
    [(Softmax, 0), (LSSA, 15), (NormSoftmax, 0)],
    ids=["softmax", "lssar", "norm_softmax"],
)
def test_a_preset_with_weights_of_its_own_keeps_them_on_every_engine(base, p):
    class Squared(base):
        def weights(self, x, context):
            return l1_normalise(super().weights(x, context).square())

    normaliser = NormaliserLayer(Squared(), p, 2, 32, 300)
    inputs = draw(37, 37, 32)
    assert (
        triton.problem(normaliser, torch.device("cuda"), torch.float32)
        == f"{normaliser.label} has no fused form"
    )
    assert_close(
        run("auto", normaliser, *inputs), run("dense", normaliser, *inputs), inputs, 1e-5, "auto"
    )


@pytest.mark.parametrize("gamma", [1.0, "sqrt_d"])
def test_an_adaptive_softmax_with_a_factor_of_its_own(gamma):
    class Halved(NormSoftmax):
        def factor(self, context):
            return 0.5

    normaliser, inputs = NormaliserLayer(Halved(gamma=gamma), 0, 2, 32, 300), draw(37, 37, 32)
    assert_close(
        run("sdpa", normaliser, *inputs), run("dense", normaliser, *inputs), inputs, 1e-5, "sdpa"
    )


def test_norm_softmax_in_bfloat16():
    """Its centred keys are not rounded; where few keys have nearly one score, two large gradients
    cancel, and 16 bits of one of them left 10 % of noise.
    """
    normaliser = make(AttentionConfig(normaliser="norm_softmax"), 2, 32, 300)
    for key, of, factor in [(0, 0, 30), (1, 0, 1.01)]:  # an attention sink; nearly equal keys
        half = [t.bfloat16() for t in draw(129, 129, 32)]
        half[1][:, :, key] = half[1][:, :, of] * factor
        got = run("sdpa", normaliser, *half)
        want = run("rows", normaliser, *(t.float() for t in half))
        for name in want if key else ["o"]:
            error = (got[name].float() - want[name]).norm() / want[name].norm()
            assert error <= (1e-2 if key else 5e-3), name


def test_bfloat16_keys_reach_sdpa_as_given():
    """Not through float32: their gradient is bitwise that of attention with the rescaled q and k
    itself.
    """
    q, k, v, do = draw(129, 129, 32, dtype=torch.bfloat16)
    normaliser = make(AttentionConfig(normaliser="logit_norm"), 2, 32, 300)
    k.requires_grad_()
    scaled_q, _ = normaliser.prepare(q, k, normaliser.context(q, k), dtype=torch.bfloat16)
    o = F.scaled_dot_product_attention(scaled_q, k, v, is_causal=True, scale=1.0)
    (want,) = torch.autograd.grad(o, k, do)
    (got,) = torch.autograd.grad(attend(q, k, v, normaliser, "sdpa"), k, do)
    assert torch.equal(got, want)


@each_name
def test_queries_and_keys_of_another_type_than_the_values(cfg):
    q, k, v, _ = draw(37, 37, 16)
    normaliser = make(cfg, 2, 16, 40)
    for engine in engines(cfg):
        got = attend(q, k, v.bfloat16(), normaliser, engine)
        want = attend(q, k, v.bfloat16().float(), normaliser, "dense")
        assert got.dtype == torch.bfloat16 and (got - want).norm() <= 0.02 * want.norm(), engine


# 2. Gradients against finite differences.


@pytest.mark.parametrize("cfg", [*CASES_BY_NAME, AttentionConfig(normaliser="lssa", reweight_p=50)])
def test_gradcheck(cfg):
    for len_q, len_k in [(5, 5), (2, 6)]:
        q, k, v, _ = draw(len_q, len_k, 4, n_head=1, dtype=torch.float64)
        normaliser = make(cfg, 1, 4, train_len=8).double()
        inputs = [q, k, v, *normaliser.parameters()]
        for t in inputs:
            t.requires_grad_()
        for engine in engines(cfg):
            assert torch.autograd.gradcheck(
                lambda q, k, v, *params, engine=engine, norm=normaliser: attend(
                    q, k, v, norm, engine
                ),
                inputs,
                fast_mode=True,
            )


# 3. Causality: later keys change nothing.


@each_name
def test_the_future_changes_nothing(cfg):
    q, k, v, _ = draw(75, 75, 16)
    normaliser = make(cfg, 2, 16, train_len=80)
    for t in (1, 2, 40, 74):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, t:] = (
                7 * torch.randn(x[:, :, t:].shape, generator=torch.Generator().manual_seed(t)) + 3
            )
        for engine in engines(cfg):
            before, after = (
                attend(*x, normaliser, engine=engine)[:, :, :t] for x in ((q, k, v), later)
            )
            if engine == "sdpa":
                assert (before - after).abs().max() <= 1e-6, f"{engine}, t = {t}"
            else:
                assert torch.equal(before, after), f"{engine}, t = {t}"


@pytest.mark.parametrize("shape", [*slow(FOX_SHAPES[0]), FOX_SHAPES[1]])
@pytest.mark.parametrize("dtype", GATE_TOLERANCE, ids=str)
def test_gates_on_sdpa(dtype, shape):
    """FoX by eight channels: o, dq, dk, dv, and of the gates the gradient, which sums dk over later
    keys.
    """
    *errors, of_gates = fox_errors(attention.attend, dtype, shape)
    tolerance, tolerance_of_gates = GATE_TOLERANCE[dtype]
    assert max(errors) <= tolerance and of_gates <= tolerance_of_gates, (errors, of_gates)


def test_gates_on_sdpa_in_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(sdpa, "DECAY_QUERIES", 128)
    for shape in FOX_SHAPES:
        assert max(fox_errors(attention.attend, torch.float64, shape)) <= 1e-12
        assert max(fox_errors(attention.attend, torch.bfloat16, shape)[:4]) <= 6e-3


@pytest.mark.parametrize(("n_queries", "window"), [(100, 0), (131072, 64)])
@pytest.mark.parametrize("normaliser", ["fox", "softmax"])
def test_digits_of_a_decay_do_not_depend_on_the_length(normaliser, n_queries, window):
    """FoX's and ALiBi's of 131,072 keys, where P is below -60,000 and -500."""
    length = 131072
    position = "none" if normaliser == "fox" else "alibi"
    options = AttentionConfig(normaliser=normaliser)
    layer = make_normaliser(options, 1, 8, 64, position, window, width=8)
    q, k, v, _ = draw(n_queries, length, 8, n_head=1, dtype=torch.float32)
    got, want = (attend(q, k, v, layer, engine) for engine in ("sdpa", "rows"))
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("compiled", [False, *slow(True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_channels_of_a_decay_are_exact(dtype, compiled):
    """P_i - P_j at P of -20,000 to 2^-24 of it, also by a compiler that leaves roundings out."""
    decay = -2 * torch.rand(
        1, 2, 20000, 1, generator=torch.Generator().manual_seed(0)
    ).double().cumsum(-2)
    zeros = torch.zeros(1, 2, 20000, 8, dtype=dtype)
    add_decay = torch.compile(sdpa.append_decay, fullgraph=True) if compiled else sdpa.append_decay
    q, k = (t.double() for t in add_decay(zeros[:, :, -3:], zeros, decay))
    error = q @ k.mT - (decay[:, :, -3:] - decay.mT)
    assert q.shape[-1] == 16 and error.abs().max() <= 2**-24 * decay.abs().max()


ALIBI = [*BIG, {"normaliser": "softmax"}, {"normaliser": "stick_breaking"}]
WINDOWED = [
    *ALIBI,
    {"normaliser": "ssmax", "reweight_p": 3, "scores": "cosine"},
    *({"normaliser": name} for name in ("scale_invariant", "elastic_softmax", "threshold", "fox")),
    {"normaliser": "softmax", "sink": "learned"},
]
PLACES = [
    *((options, 5, "rope") for options in WINDOWED),
    *((options, 0, "alibi") for options in ALIBI),
    *slow(*((options, window, "rope") for options in WINDOWED for window in (1, 64))),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_windows_and_alibi(place):
    """A window's n counts the keys seen, ALiBi subtracts 2^(-8 h / H) times the distance; all
    engines, grouped heads, and decoding.
    """
    options, window, position = place
    cfg = AttentionConfig(**{"output_norm": False, **options})
    normaliser = make(cfg, 4, 8, train_len=40).double()
    normaliser.window = window
    normaliser.position = position
    engine = "sdpa" if has_sdpa(cfg) and options["normaliser"] != "norm_softmax" else "rows"
    assert choose(normaliser, torch.device("cpu"), torch.float64) == engine
    for len_q, len_k in [(73, 73), (9, 33), (3, 3)]:
        q, _, _, do = draw(len_q, len_k, 8, n_head=4, dtype=torch.float64)
        _, k, v, _ = draw(len_q, len_k, 8, dtype=torch.float64)
        parameters = dict(normaliser.named_parameters())
        repeated = k.repeat_interleave(2, 1)
        want = reference_weights(cfg, q, repeated, 40, parameters, window, position)
        assert (weights_of(normaliser, q, k) - want).abs().max() <= 1e-12
        dense = run("dense", normaliser, q, k, v, do)
        last_q, keys = normaliser.norm_heads(q[:, :, -1:]), normaliser.norm_heads(k)
        for name in {"rows", "dense", engine}:
            got = run(name, normaliser, q, k, v, do)
            assert_close(got, dense, (q, k, v, do), 1e-11, f"{name} {len_q}")
            with torch.no_grad():
                last = attend(last_q, keys, v, normaliser, name, normed=True)
            assert (last - dense["o"][:, :, -1:]).abs().max() <= 1e-12


# 4. Extreme rows.

STRESSED = {
    "lssa": {"normaliser": "lssa"},
    "softmax": {"normaliser": "softmax"},
    "softplus_l1": {"normaliser": "phi", "phi": "softplus"},
    "sigmoid_l1": {"normaliser": "sigmoid", "l1": True},
}


def extreme(kind, len_q, len_k):
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
@pytest.mark.parametrize("p", [100, *slow(15)])
@pytest.mark.parametrize("name", STRESSED)
def test_reweighting_under_stress(name, p, kind):
    options = AttentionConfig(**STRESSED[name], reweight_p=p)
    normaliser = make_normaliser(options, 1, 16, train_len=1024)
    for len_q, len_k in [(64, 16384), (512, 512)]:
        inputs = extreme(kind, len_q, len_k)
        got = run("rows", normaliser, *inputs)
        assert all(g.isfinite().all() for g in got.values())
        assert (got["o"][0, 0, :, 0] - 1).abs().max() <= 1e-5
        if kind == "huge":
            continue
        _, _, v, do = (t[0, 0].double() for t in inputs)
        visible = torch.ones(len_q, len_k, dtype=torch.float64).tril(len_k - len_q)
        want = visible / visible.sum(-1, keepdim=True)
        if kind == "sharp":
            after = torch.arange(len_k - len_q, len_k) >= len_k // 3
            want[after] = 0
            want[after, len_k // 3] = 1
        assert (got["o"][0, 0] - want @ v).abs().max() <= 1e-5
        assert (got["dv"][0, 0] - want.mT @ do).norm() <= 1e-5 * (want.mT @ do).norm()
    if kind == "equal":
        assert_close(got, exactly(normaliser, *inputs), inputs, 1e-4, "equal keys")


@each_name
@pytest.mark.parametrize("kind", ["equal", "zeros", "huge"])
def test_extremes_are_finite(cfg, kind):
    if kind == "huge" and getattr(cfg, "phi", "") == "exp" and cfg.l1 is False:
        pytest.skip("exp(1e4) is infinite: the formula, not the code")
    for engine in engines(cfg):
        got = run(engine, make(cfg, 1, 16, train_len=80), *extreme(kind, 70, 70))
        bad = [name for name, g in got.items() if not g.isfinite().all()]
        assert not bad, f"{engine}: {bad} not finite"


# 5. NormSoftmax's sigma in linear time.


ZERO_COSINES = [
    {"normaliser": "lssa"},
    {"normaliser": "lssa", "reweight_p": 15},
    {"normaliser": "softmax", "scores": "cosine", "scale": "sqrt_d"},
    {"normaliser": "norm_softmax", "scores": "cosine"},
    {"normaliser": "threshold", "output_norm": False},
]


@pytest.mark.parametrize("options", ZERO_COSINES, ids=case_id)
def test_zero_vectors_under_cosine_scores_have_bounded_gradients(options):
    """A projection that begins at zero; the bound is that of vectors of norm 1e-3."""
    cfg = AttentionConfig(**options)
    normaliser = make(cfg, 2, 16, train_len=40)
    q, k, v, do = draw(40, 40, 16)
    ordinary = run("dense", normaliser, q, k, v, do)
    for zero in ("q", "k"):
        got = [
            run(e, normaliser, q * (zero != "q"), k * (zero != "k"), v, do) for e in engines(cfg)
        ]
        largest = ordinary[f"d{zero}"].abs().max()
        for each in got:
            assert all(g.isfinite().all() for g in each.values())
            assert each[f"d{zero}"].abs().max() < 1e5 * largest
        assert_close(got[-1], got[0], (q, k, v), 1e-5, f"zero {zero}")
    torch.testing.assert_close(normaliser.norm_heads(k), F.normalize(k, dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize("ratio, tolerance", [(0.0, 1e-6), (10.0, 5.6e-6), (100.0, 5.6e-5)])
@pytest.mark.parametrize(
    "options", [{}, {"gamma": "inf"}, {"variant": "affine"}, {"variant": "inverse"}], ids=str
)
def test_sigma_survives_a_shared_mean(options, ratio, tolerance):
    """Keys around a common vector of `ratio` in each coordinate; causal in every bit."""
    normaliser = make(AttentionConfig(normaliser="norm_softmax", **options), 2, 64, train_len=257)
    q, k, v, do = draw(257, 257, 64)
    k = k + ratio
    exact = exactly(normaliser, q, k, v, do)["o"]
    for engine in ("dense", "rows", "sdpa"):
        o = attend(q, k, v, normaliser, engine)
        assert (o - exact).norm() <= tolerance * exact.norm(), engine
    for t in (1, 2, 63, 64, 65, 256):
        later = k.clone()
        later[:, :, t:] *= -5
        assert torch.equal(attend(q, later, v, normaliser, "sdpa")[:, :, :t], o[:, :, :t]), t


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("variant", ["standard", "affine", "inverse"])
def test_identical_keys_are_a_uniform_row(variant, scale):
    """sigma is 0 there, although the products q k of equal keys may round differently."""
    options = AttentionConfig(normaliser="norm_softmax", variant=variant)
    normaliser = make(options, 2, 64, 300)
    for t, seed in [(2, 0), (2, 1), (5, 0), (5, 1), (65, 0), (300, 0)]:
        q, k, v, do = draw(t, t, 64, seed=seed)
        k = (scale * k[:, :, :1]).expand_as(k).contiguous()
        mean = v.cumsum(2) / torch.arange(1.0, t + 1)[:, None]
        for engine in ("dense", "rows", "sdpa"):
            got = run(engine, normaliser, q, k, v, do)
            assert all(g.isfinite().all() for g in got.values()), engine
            assert (got["o"] - mean).abs().max() <= 1e-5, f"{engine}, T = {t}"


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


# 6. A KV cache changes nothing.


@each_name
@torch.no_grad()
def test_decoding_row_by_row(cfg):
    if getattr(cfg, "bias", None) == "log_len":
        pytest.skip("L is the current length: the formula itself changes while decoding")
    q, k, v, _ = draw(24, 24, 16, dtype=torch.float64)
    normaliser = make(cfg, 2, 16, train_len=24)
    for dtype, tolerance in [(torch.float64, 1e-12), (torch.float32, 1e-5)]:
        norm = copy.deepcopy(normaliser).to(dtype)
        x, y, z = q.to(dtype), k.to(dtype), v.to(dtype)
        for engine in engines(cfg):
            full = attend(x, y, z, norm, engine=engine)
            x1, y1 = norm.norm_heads(x), norm.norm_heads(y)
            rows = [
                attend(
                    x1[:, :, t : t + 1],
                    y1[:, :, : t + 1],
                    z[:, :, : t + 1],
                    norm,
                    engine,
                    normed=True,
                )
                for t in range(24)
            ]
            error = (torch.cat(rows, 2) - full).abs().max() / full.abs().max()
            assert error <= tolerance, f"{engine}, {dtype}: {error:.2e}"


@pytest.mark.parametrize("engine", ["dense", "rows"])
@pytest.mark.parametrize("reweight_p", [0, 15])
def test_normed_keys_are_not_normed_again(engine, reweight_p):
    normaliser = make(AttentionConfig(normaliser="lssa", reweight_p=reweight_p), 2, 16, 300)
    q, k, v, _ = draw(1, 40, 16)
    q, k = normaliser.norm_heads(q), 1.5 * normaliser.norm_heads(k)
    want = attend(q, k / 1.5, v, normaliser, engine)
    torch.testing.assert_close(attend(q, k, v, normaliser, engine), want, rtol=0, atol=1e-5)
    longer = attend(q, k, v, normaliser, engine, normed=True)
    assert (longer - want).abs().max() > 3e-4


@pytest.mark.parametrize("engine", ["dense", "rows"])
def test_output_norm_is_applied_by_attend(engine):
    q, k, v, _ = draw(9, 9, 16)
    plain, normed = (
        attend(q, k, v, make(AttentionConfig(normaliser="lssa", output_norm=on), 2, 16, 9), engine)
        for on in (False, True)
    )
    assert torch.equal(normed, F.rms_norm(plain, (16,), eps=1e-5))


def test_biases_by_key_keep_their_digits_in_float32():
    """Sums of 16K terms, of which float32 would leave 1e-3, and their gradients."""
    inputs = draw(128, 16384, 16)
    normaliser = make(AttentionConfig(normaliser="fox"), 2, 16, 1024)
    assert_close(
        run("rows", normaliser, *inputs), exactly(normaliser, *inputs), inputs, 1e-5, "rows"
    )


# 7. What is rejected.


def test_what_attend_cannot_do():
    same, fewer_keys, decoding = draw(9, 9, 16)[:3], draw(5, 3, 16)[:3], draw(1, 9, 16)[:3]
    heads = r"q of shape .*: expected \(B, 2, Tq, 16\)"
    cases = [
        ("fox", same, "auto", UserError, "fox reads the layer's input: expected signals"),
        ("lssa", same, "sdpa", UserError, "lssa with these options is not a softmax"),
        ("softmax", same, "fast", ValueError, "engine = 'fast'"),
        ("softmax", torch.zeros(3, 1, 2, 5, 32), "auto", ValueError, heads),
        ("softmax", torch.zeros(3, 1, 4, 5, 16), "auto", ValueError, heads),
    ]
    for engine in ("dense", "rows", "sdpa"):
        cases.append(("softmax", fewer_keys, engine, ValueError, "5 queries for 3 keys"))
        for inputs in (same, decoding):
            cases.append(("ssmax_pn", inputs, engine, UserError, "ssmax_pn: 9 keys"))
    for name, inputs, engine, error, message in cases:
        layer = make_normaliser(AttentionConfig(normaliser=name), 2, 16, train_len=8)
        with pytest.raises(error, match=message):
            attention.attend(*inputs, layer, engine)
    alibi = make_normaliser(AttentionConfig(normaliser="stick_breaking"), 2, 16, 8, "alibi")
    with pytest.raises(UserError, match="stick_breaking with alibi is not a softmax"):
        attention.attend(*same, alibi, "sdpa")


def test_second_derivatives():
    """dense has them; of rows `torch.autograd.grad` would return wrong ones."""
    inputs = [t.double().requires_grad_() for t in draw(5, 5, 4)[:3]]
    for options in ({"normaliser": "lssa", "reweight_p": 3}, {"normaliser": "ssmax"}):
        layer = make(AttentionConfig(**options), 2, 4, train_len=5).double()
        dense = partial(attention.attend, layer=layer, engine="dense")
        assert torch.autograd.gradgradcheck(dense, inputs)
        out = attention.attend(*inputs, layer, "rows")
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("engine", ["dense", "rows"])
@pytest.mark.parametrize(("phi", "scale"), [("relu", 1e-21), ("relu2", 1e-11)])
def test_rows_without_mass_are_zero(engine, phi, scale):
    options = AttentionConfig(normaliser="phi", phi=phi, reweight_p=3)
    q, k, v, do = draw(8, 8, 8)
    got = run(engine, make(options, 2, 8, train_len=8), scale * q, scale * k, v, do)
    assert not any(t.any() for t in got.values())


def test_no_queries_and_no_sequences():
    query_scale = AttentionConfig(length_scale="query")
    layer = make_normaliser(query_scale, 2, 8, train_len=8, width=16)
    k = torch.randn(1, 2, 5, 8)
    o = attention.attend(k[:, :, :0], k, k, layer, "rows", signals=torch.zeros(1, 2, 5, 2))
    assert o.shape == (1, 2, 0, 8)
    window = make_normaliser(AttentionConfig(), 2, 8, train_len=8, window=2)
    assert attention.attend(k[:0], k[:0], k[:0], window, "sdpa").shape == (0, 2, 5, 8)
