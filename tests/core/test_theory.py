"""What the papers prove about their formulas, checked on the normalisers themselves."""

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
