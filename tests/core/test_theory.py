"""What the papers prove about their formulas, checked on the normalisers themselves."""

import math

import pytest
import torch

from attention import make_normaliser
from normalisers.base import RowContext
from schema import AttentionConfig


def weights(x, **options):
    """Weights of rows of scores x (R, K), unscaled q.k with d = 1, each row seeing all its keys."""
    normaliser = make_normaliser(
        AttentionConfig(**options), n_head=1, head_dim=1, train_len=x.shape[-1]
    )
    n = torch.full((len(x), 1), x.shape[-1], dtype=x.dtype)
    learned = normaliser(x.dtype)
    length = x.shape[-1]
    p = normaliser.p if normaliser.reweight_p else None
    context = RowContext(n, n - 1, length, length, length, 1, p, learned)
    return normaliser.row_weights(x * normaliser.definition.factor(context), context).view(x.shape)


def draw_scores(n, scale=1.0):
    """Rows with a mean, and the gradient of a loss by their weights, (20, n) float64 each."""
    g = torch.Generator().manual_seed(n)
    x, dz = (torch.randn(20, n, generator=g, dtype=torch.float64) for _ in range(2))
    return (scale * x + 3).requires_grad_(), dz


def sigma(x):
    return x.std(-1, correction=0, keepdim=True)


INF = {"normaliser": "norm_softmax", "gamma": "inf"}


@pytest.mark.parametrize("n", [2, 5, 300])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_lemma_1_gradients_of_norm_softmax_are_centred_and_rescaled(n, scale):
    """NormSoftmax, Lemma 1 (eq. 7), by way of eq. 10, 11 and 24."""
    x, dz = draw_scores(n, scale)
    z = weights(x, **INF)
    (dx,) = torch.autograd.grad(z, x, dz)
    x, z = x.detach(), z.detach()
    s, y = sigma(x), x / sigma(x)
    dy = z * (dz - (z * dz).sum(-1, keepdim=True))  # eq. 10
    # y'dy, so that (y y' - mu(y) 1 y') dy = (y - mu(y)) along
    along = (y * dy).sum(-1, keepdim=True)
    torch.testing.assert_close(dx, (dy - (y - y.mean(-1, keepdim=True)) * along / n) / s)  # eq. 11
    norms = [t.norm(dim=-1, keepdim=True) for t in (dx, dy)]
    tiny = 1e-13 * norms[1]
    # eq. 24
    torch.testing.assert_close(norms[0] ** 2, norms[1] ** 2 / s**2 - along**2 / (n * s**2))
    assert (dx.mean(-1, keepdim=True).abs() * s <= tiny).all()
    assert (dy.mean(-1, keepdim=True).abs() <= tiny).all()
    assert (norms[0] <= norms[1] / s + tiny / s).all()
    assert (sigma(dx) <= sigma(dy) / s + tiny / s).all()


@pytest.mark.parametrize("k", [1e-3, 0.5, 7.0, 1e4])
def test_lemma_2_scores_times_k_have_gradients_over_k(k):
    """NormSoftmax, Lemma 2: the weights do not change. k > 0, which the lemma does not say."""
    x, dz = draw_scores(50)
    z1, z2 = weights(x, **INF), weights(k * x.detach().requires_grad_(), **INF)
    torch.testing.assert_close(z1, z2)
    x2 = (k * x.detach()).requires_grad_()
    (d1,), (d2,) = (torch.autograd.grad(weights(t, **INF), t, dz) for t in (x, x2))
    torch.testing.assert_close(d2, d1 / k)
    assert (weights(-k * x.detach(), **INF) - z1).abs().max() > 0.01


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_norm_softmax_scores_have_a_least_standard_deviation(scale, tau):
    """At least 1 / tau (below eq. 29); with gamma = inf it is LogitNorm of centred scores (eq. 9)."""
    x = draw_scores(64, scale)[0].detach()
    # up to a shift of the row
    scores = weights(x, normaliser="norm_softmax", gamma=2.0, tau=tau).log()
    assert (sigma(scores) >= (1 - 1e-9) / tau).all()
    torch.testing.assert_close(sigma(scores), sigma(x) / sigma(x).clamp_max(2.0) / tau)
    centred = weights(x - x.mean(-1, keepdim=True), normaliser="logit_norm")
    torch.testing.assert_close(centred, weights(x, **INF))


def least(n, gap, base):
    """1 / ((n - 1) base^-gap + 1): the largest weight if all other scores are `gap` below the
    largest.
    """
    return 1 / ((n - 1) * base**-gap + 1)


@pytest.mark.parametrize("s", [0.4375, 1.0, 2.0])
def test_bounds_of_the_largest_weight(s):
    """SSMax, eq. 6, 8 and 9, of eq. 5 and 7: all other scores put at the least, or at the second
    largest.
    """
    ssmax = {"normaliser": "ssmax", "scale": "learned", "scale_init": s}
    for n in (2, 10, 1000, 30000):
        x = draw_scores(n)[0].detach()
        top = x.sort(-1, descending=True).values
        wide, close = (top[:, 0] - top[:, -1]).tolist(), (top[:, 0] - top[:, 1]).tolist()
        soft, scaled = (weights(x, **options).amax(-1).tolist() for options in ({}, ssmax))
        for i in range(len(x)):
            assert soft[i] <= least(n, wide[i], math.e) * (1 + 1e-9)  # eq. 6
            assert scaled[i] <= least(n, s * wide[i], n) * (1 + 1e-9)  # eq. 8
            assert scaled[i] >= least(n, s * close[i], n) * (1 - 1e-9)  # eq. 9


def test_limits_of_the_largest_weight():
    """SSMax, below eq. 9: towards 1 if the gap to the second is above 1/s, to 0 if all are within
    1/s.
    """
    s, tops = 0.5, {}
    for n in (10, 1000, 100000):
        for gap in (3.0, 1.0):  # 1/s = 2
            x = torch.zeros(1, n, dtype=torch.float64)
            x[0, 0] = gap
            tops[n, gap] = weights(x, normaliser="ssmax", scale_init=s).amax().item()
            tops[n, "softmax", gap] = weights(x).amax().item()
    assert tops[10, 3.0] < tops[1000, 3.0] < tops[100000, 3.0] and tops[100000, 3.0] > 0.99
    assert tops[10, 1.0] > tops[1000, 1.0] > tops[100000, 1.0] and tops[100000, 1.0] < 0.01
    assert tops[100000, "softmax", 3.0] < 1e-3  # softmax fades whatever the gap


@pytest.mark.parametrize("normaliser", ["softmax", "lssa"])
def test_large_powers_leave_the_largest_weight_alone(normaliser):
    """LSSAR, eq. 6 and 7: the distance of the largest re-weighted value to every other tends to 1
    with p.
    """
    x = draw_scores(100)[0].detach()
    options = {"normaliser": normaliser} | ({"scores": "dot"} if normaliser == "lssa" else {})
    if normaliser == "lssa":
        options["scale"] = "one"  # ln d = 0 at the d = 1 of these scores
    r = (100 * weights(x, **options) - 1).clamp_min(0).sort(-1, descending=True).values
    distances = []
    for p in (1, 3, 15, 50, 100, 256):
        top = weights(x, **options, reweight_p=p).sort(-1, descending=True).values
        powers = (r / r[:, :1]) ** p
        torch.testing.assert_close(top, powers / powers.sum(-1, keepdim=True))  # eq. 6
        distances.append(top[:, 0] - top[:, 1])
        assert (1 - distances[-1] <= 100 * (r[:, 1] / r[:, 0]) ** p + 1e-12).all()  # eq. 7
    assert (torch.stack(distances).diff(dim=0) >= -1e-12).all() and distances[-1].median() > 0.99
    x[:, :2] = x.amax(-1, keepdim=True) + 1  # eq. 7 needs one largest value: two share the row
    top = weights(x, **options, reweight_p=256)
    torch.testing.assert_close(top[:, :2], torch.full_like(top[:, :2], 0.5))
