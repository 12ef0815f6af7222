"""The normalisers are their papers' formulas: against reference.py, written independently of them."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES,
    PHIS,
    assert_close,
    case_id,
    draw,
    each_case,
    formula,
    is_normalised,
    make,
    run,
    weights_of,
)
from conftest import slow
from pydantic import Field
from reference import FORMULAS, PHI, UNIFORM
from torch import Tensor

from attention import make_normaliser
from normalisers.base import RowContext, reweight
from normalisers.family import LSSA, Scaled
from normalisers.layer import NormaliserLayer
from normalisers.own import NORMALISERS, list_normalisers, list_variants
from schema import AttentionConfig

# 1. The dense weights are the formulas.


def test_every_registered_normaliser_is_a_case():
    ours = {name for name, cls in NORMALISERS.items() if cls.__module__.startswith("normalisers.")}
    # not those of a user's files
    assert {cfg.values[0].normaliser for cfg in CASES} >= ours | {*list_variants()}
    assert {*list_normalisers()} >= {*FORMULAS}
    assert set(PHIS) == set(PHI)


SHAPES = {16: [*((t, t) for t in (1, 2, 3, 4, 5, 33)), (7, 129)], 64: [(5, 5), (1, 33), (7, 33)]}


def formula_weights(cfg, q, k, normaliser):
    return formula(cfg, 160)(q, k, dict(normaliser.named_parameters())).detach()


def row_errors(
    cfg,
    q,
    k,
    normaliser,
    want=None,
):
    """Each row's largest error; relative to the row's largest weight where rows are not normalised."""
    got = weights_of(normaliser, q, k)
    want = formula_weights(cfg, q, k, normaliser) if want is None else want
    assert got.dtype == q.dtype and got.shape == want.shape
    future = torch.ones(got.shape[2:], dtype=torch.bool).triu(got.shape[3] - got.shape[2] + 1)
    assert (got[..., future] == 0).all()
    return row_distance(cfg, got, want)


def row_distance(cfg, got, want):
    distance = (got.double() - want).abs().amax(-1)
    return distance if is_normalised(cfg) else distance / want.abs().amax(-1).clamp(min=1e-30)


def rounding_response(cfg, q, k, normaliser):
    """How far exact weights move, by row, when every number in q and k moves by half a float32 ulp.

    No float32 code can be expected below a few times this: it cannot tell those inputs apart.
    """
    g = torch.Generator().manual_seed(0)
    exact = copy.deepcopy(normaliser).double()

    def moved(t):
        return t.double() * (1 + 2.0**-24 * (2 * torch.randint(0, 2, t.shape, generator=g) - 1))

    want = weights_of(exact, q.double(), k.double())
    return torch.stack(
        [row_distance(cfg, weights_of(exact, moved(q), moved(k)), want) for _ in range(8)]
    ).amax(0)


def is_ill_conditioned(cfg):
    """Where 1e-6 is beyond float32, because the formula magnifies the rounding of its scores.

    reweight_p: by p n A / (n A - 1). ssmax, query scales, norm_softmax with a small gamma: by the
    low temperature. Rows that are not normalised, and signed phi: relatively, where all scores of a
    short row are near a zero of phi.
    """
    return (
        cfg.reweight_p > 1
        or getattr(cfg, "length_scale", "") in ("ln_n", "query")
        or cfg.normaliser == "asentmax"
        or getattr(cfg, "gamma", None) == 2.0
        or not is_normalised(cfg)
        or getattr(cfg, "phi", "") in ("identity", "gelu", "mish")
    )


@pytest.mark.parametrize("head_dim", [16, *slow(64)])
@each_case
def test_weights_are_the_formula(cfg, head_dim):
    """In float64, and in float32 on the same numbers."""
    normaliser = make(cfg, 2, head_dim, train_len=160)
    exact = copy.deepcopy(normaliser).double()
    for shape in SHAPES[head_dim]:
        q, k, _, _ = draw(*shape, head_dim)
        want = formula_weights(cfg, q, k, normaliser)
        error = row_errors(cfg, q.double(), k.double(), exact, want)
        assert error.max() <= 1e-12, f"float64, T = {shape}: {error.max():.2e}"
        error = row_errors(cfg, q, k, normaliser, want)
        tolerance = torch.tensor(1e-6, dtype=torch.float64)
        if error.max() > tolerance and is_ill_conditioned(cfg):
            tolerance = tolerance + 16 * rounding_response(cfg, q, k, normaliser)
        assert (error <= tolerance).all(), f"float32, T = {shape}: {error.max():.2e}"


@each_case
def test_weights_are_the_formula_at_large_scores(cfg):
    q, k, _, _ = draw(33, 33, 16, dtype=torch.float64)
    error = row_errors(cfg, 8 * q, k, make(cfg, 2, 16, train_len=160).double())
    assert error.max() <= 1e-12, f"{error.max():.2e}"


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"normaliser": "stick_breaking"}, [0.5, 1e4, -1.0, -0.3, -2.0, 0.0]),
        # 1 + erf has no digits left
        ({"normaliser": "phi", "phi": "gelu"}, [-5.3, -5.5, -6.0, -5.8]),
    ],
)
def test_float32_keeps_its_digits(options, row):
    layer = make(AttentionConfig(**options, scale=1.0), 1, 1, train_len=8)
    k = torch.tensor(row)[None, None, :, None]
    q = torch.ones(1, 1, 1, 1)
    assert torch.allclose(
        layer.weights(q, k).double(), layer.weights(q.double(), k.double()), 1e-5, 1e-6
    )


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
    if options["normaliser"] == "lssa" and scale < 1e-3:
        pytest.skip("norms below 1e-3 count as 1e-3 (normalisers.layer.COSINE_EPS)")
    cfg = AttentionConfig(**options)
    q, k, _, _ = draw(33, 33, 64)
    error = row_errors(cfg, scale * q, k, make(cfg, 2, 64, train_len=160))
    assert error.max() <= 1e-6, f"{error.max():.2e}"


@each_case
def test_learned_parameters(cfg):
    normaliser = make_normaliser(cfg, n_head=3, head_dim=16, train_len=20)
    got = {name: (tuple(p.shape), p.unique().tolist()) for name, p in normaliser.named_parameters()}
    want: dict[str, Any] = {}
    if getattr(cfg, "scale", "") == "learned":
        want |= {"s": ((3,), pytest.approx([cfg.scale_init]))}
    if getattr(cfg, "bias", False) is True:
        want |= {"b": ((3,), [0.0])}
    if getattr(cfg, "sink", "") == "learned":
        want |= {"sink": ((3,), [0.0])}
    if cfg.normaliser == "ssmax_pn":
        want |= {"b": ((3,), [0.0]), "p_n": ((20,), [1.0])}
    if getattr(cfg, "variant", "") == "affine":
        want = {"w": ((3,), [1.0])}
    if cfg.normaliser == "asentmax":
        want = {"beta": ((3,), pytest.approx([0.1])), "gamma": ((3,), [1.0])}
    if getattr(cfg, "learns", False):
        want |= {"b": ((3,), [4.0])}
    if cfg.normaliser == "threshold":
        want = {"beta": ((3,), [1.0])}
    if cfg.normaliser == "elastic_softmax":
        want = {"tau": ((3,), [-1.0])}
    if cfg.normaliser in FORMULAS:
        assert got == want


def test_llama4_scale():
    """Steps at multiples of 8192 keys, more than the cases have."""
    n = torch.tensor([[8191.0], [8192.0], [3 * 8192.0]])
    definition = AttentionConfig(length_scale="llama4", scale=2.0).definition
    factor = definition.factor(RowContext(n, n - 1, 30000, 30000, 8, 4))
    assert factor.flatten().tolist() == pytest.approx(
        [2.0, 2 + 0.2 * math.log(2), 2 + 0.2 * math.log(4)]
    )


def test_shift_of_a_subclass():
    """`shift` counts without `bias`, and unbounds LSSA's scores, as an own factor or offset does."""

    class Shifted(LSSA):
        def shift(self, context):
            return -context.n.sqrt()

    q, k, *_ = draw(20, 20, 16, dtype=torch.float64)
    normaliser = NormaliserLayer(Shifted(), 0, 2, 16, 20)
    context = normaliser.context(q, k)
    q_scaled, k_float = normaliser.prepare(
        normaliser.norm_heads(q), normaliser.norm_heads(k), context
    )
    s = torch.nn.functional.softplus(q_scaled @ k_float.mT - context.n.sqrt()) * context.visible(
        k.mT
    )
    torch.testing.assert_close(normaliser.weights(q, k), s / s.sum(-1, keepdim=True))

    class Sharper(LSSA):
        def factor(self, context):
            return super().factor(context) * context.n.log()

    class Negative(LSSA):
        def offset(self, context):
            return -1000.0

    assert LSSA().bounded and not any(cls().bounded for cls in (Shifted, Sharper, Negative))
    assert LSSA(scale=69.0, length_scale="none").bounded and not LSSA(scale=3.0).bounded
    assert not LSSA(scale=70.0, length_scale="none").bounded


# 2. The rules of the re-weighting.


def test_power_stays_in_the_range_of_float32():
    """Rows for which (n A - 1)^p overflows, p >= 13 at 1,024 keys, or underflows in every key."""
    one = torch.zeros(1, 1024)
    one[0, 0] = 1.0
    even = torch.full((1, 1024), 1 / 1024)
    even[0, 0] = 1.1 / 1024
    for a in (one, even):
        assert (reweight(a, torch.tensor([[1024.0]]), 50) - one).abs().max() <= 1e-6


@pytest.mark.parametrize("p", [1, 15])
def test_uniform_rule_has_its_threshold(p):
    """A row just under it keeps all its keys; just over it, the one key above the mean takes all."""
    for excess, uniform in [(0.0, True), (0.99 * UNIFORM, True), (1.01 * UNIFORM, False)]:
        t = 8
        x = torch.zeros(t, t, dtype=torch.float64)
        a = (1 + excess) / t  # softmax weight of key 0 in the last row; the others share the rest
        x[-1, 0] = math.log(a / ((1 - a) / (t - 1)))
        normaliser = make_normaliser(AttentionConfig(reweight_p=p), 1, t, 64)
        got = normaliser.weights(
            x[None, None], math.sqrt(t) * torch.eye(t, dtype=x.dtype)[None, None]
        )[0, 0]
        want = torch.full((t,), 1 / t) if uniform else torch.eye(t)[0]
        assert (got[-1] - want).abs().max() <= 2 * p * UNIFORM / t, excess


# 3. Names.


def test_a_name_is_given_once():
    with pytest.raises(
        ValueError, match="Other: there is a normaliser 'lssa': expected another name"
    ):

        class Other(LSSA, name="lssa"):
            pass


def test_names_are_presets():
    """A preset and its parts spelled out are the same weights."""
    ssmax = AttentionConfig(normaliser="ssmax", scale="one")
    parts = AttentionConfig(normaliser="phi", phi="exp", scale="one", length_scale="ln_n")
    q, k, _, _ = draw(9, 9, 16)
    a, b = (make_normaliser(cfg, 2, 16, 64).weights(q, k) for cfg in (ssmax, parts))
    assert torch.equal(a, b)
    lssa = AttentionConfig(normaliser="lssa")
    parts = AttentionConfig(
        normaliser="softmax", phi="softplus", scores="cosine", scale="ln_d", length_scale="ln_n"
    )
    a, b = (make_normaliser(cfg, 2, 16, 64).weights(q, k) for cfg in (lssa, parts))
    assert torch.equal(a, b)


def test_overrides_of_weights_need_not_know_of_hidden_keys():
    """The documentation's examples, and one that makes the hidden scores the largest."""
    page = Path(__file__).parents[2] / "docs/normalisers.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    known = {
        "Field": Field,
        "RowContext": RowContext,
        "Scaled": Scaled,
        "Tensor": Tensor,
        "torch": torch,
    }
    exec("\n".join(examples), known, names)

    class Negated(Scaled):
        def weights(self, x, context):
            return (-x).softmax(-1)

    inputs = draw(70, 70, 16)
    future = torch.ones(70, 70, dtype=torch.bool).triu(1)
    for definition in (names["TopMass"](), names["Tempered"](), Negated()):
        layer = NormaliserLayer(definition, 0, 2, 16, 70)
        dense, rows = (run(engine, layer, *inputs) for engine in ("dense", "rows"))
        assert all(t.isfinite().all() for t in rows.values()), definition
        assert (layer.weights(*inputs[:2])[..., future] == 0).all()
        if not isinstance(definition, Negated):
            assert_close(rows, dense, inputs, 1e-5, str(definition))


def test_cosine_scores_divide_by_a_norm_of_a_thousandth_or_more():
    lengths = torch.tensor([0.0, 5e-4, 1e-3, 2e-3, 7.0])
    direction = torch.tensor([0.6, -0.8])
    norms = torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0])
    layer = make_normaliser(AttentionConfig(normaliser="lssa"), 1, 2, 8)
    torch.testing.assert_close(
        layer.norm_heads(lengths[:, None] * direction), norms[:, None] * direction
    )
