"""The attention normalisers, each defined once as a row-wise function, and the engines that run them.

    normaliser = make_normaliser(AttentionConfig(normaliser="lssa", reweight_p=15), 12, 64, 1024)
    weights = normaliser.weights(q, k)         # the definition, dense (B, H, Tq, Tk)
    out = attend(q, k, v, normaliser)          # the same weights times v, in O(T) memory

To add a normaliser, write one function of the scores and register it:

    @register("my_relu", sums_to_one=True)
    def my_relu(x: Tensor, rows: Rows) -> Tensor:
        \"\"\"relu(x) / sum relu(x). (Me, 2026, eq. 1)\"\"\"
        return l1_normalise(torch.relu(x))

`x` (..., R, K) are the scores of R query rows against K keys, -inf where a key is hidden from a row
(causal mask); the result must be 0 there. `rows` holds what else a formula may use: n, the number of
keys that each row sees; the training length; the config's options. Name it in a config file and it
trains, evaluates and is picked up by the tests.

Papers: LSSAR (Gao, Spratling, Letizia: "Softplus Attention with Re-weighting Boosts Length
Extrapolation in Large Language Models", arXiv 2501.13428), SSMax (Nakanishi: "Scalable-Softmax Is
Superior for Attention", arXiv 2501.19399), NormSoftmax (Jiang et al., COINS 2023).
"""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from config import AttentionConfig
from infra.cli import UserError

Engine = Literal["auto", "dense", "rows", "sdpa", "triton"]
PhiPair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]  # phi and its derivative

# ---------------------------------------------------------------------------------------------------
# What a row-wise function may use
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What the formulas know about a block of R query rows besides its scores."""

    n: Tensor  # (R, 1) float: number of keys each row sees
    n_keys: int  # L, all keys of this call (Tk); the last row sees them all
    train_len: int
    head_dim: int
    options: AttentionConfig
    learned: dict[str, Tensor] = field(default_factory=dict)  # name -> (H, 1, 1), or (train_len,)

    def visible(self, x: Tensor) -> Tensor:
        """(R, K) bool: which of the K keys of x (..., K) each row sees."""
        return torch.arange(x.shape[-1], device=x.device) < self.n

    def hide(self, x: Tensor) -> Tensor:
        """x with 0 at the hidden keys."""
        return torch.where(self.visible(x), x, 0.0)

    def softmax(self, x: Tensor) -> Tensor:
        """softmax over the visible keys, for x that is finite at the hidden ones.

        What divides x by a function of x needs it: the gradient of -inf / t is not a number.
        """
        return torch.where(self.visible(x), x, -math.inf).softmax(-1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and population variance of x over the visible keys, each (..., R, 1)."""
        mean = self.hide(x).sum(-1, keepdim=True) / self.n
        return mean, self.hide(x - mean).square().sum(-1, keepdim=True) / self.n


class L1Normalise(torch.autograd.Function):
    """s / sum |s| by row; a row without mass stays 0. One fused backward: (g - sign(s) sum(g a)) / Z."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, signed: bool) -> Tensor:
        z = (s.abs() if signed else s).sum(-1, keepdim=True)
        # Below the smallest normal number's neighbourhood 1/z overflows: such a row has no mass.
        inverse = torch.where(z > 1e8 * torch.finfo(s.dtype).tiny, 1 / z, 0.0)
        a = s * inverse
        ctx.save_for_backward(a, inverse)
        ctx.signed = signed
        return a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, inverse = ctx.saved_tensors
        mean = (grads[0] * a).sum(-1, keepdim=True)
        if ctx.signed:
            mean = mean * a.sign()
        return (grads[0] - mean) * inverse, None


class IntegerPower(torch.autograd.Function):
    """t^p for t >= 0 and an integer p >= 1 by repeated squaring: exact at 0, 4x faster than pow.

    The derivative p t^(p-1) at p = 1 is the indicator t > 0.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, p: int) -> Tensor:
        lower = _power_below(t, p)
        ctx.save_for_backward(lower)
        ctx.p = p
        return lower * t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (lower,) = ctx.saved_tensors
        return grads[0] * lower * ctx.p, None


def _power(t: Tensor, p: int) -> Tensor:
    """t^p, p >= 1, in two new tensors: allocating one for each product costs more than the product."""
    result, square = None, t
    while p:
        if p & 1:
            result = square.clone() if result is None else result.mul_(square)
        p >>= 1
        if p:
            square = t * t if square is t else square.mul_(square)
    assert result is not None
    return result


def _power_below(t: Tensor, p: int) -> Tensor:
    """t^(p-1) for t >= 0, such that t times it is t^p and p times it the derivative: at p = 1, t > 0."""
    return (t > 0).to(t.dtype) if p == 1 else _power(t, p - 1)


def l1_normalise(s: Tensor, signed: bool = False) -> Tensor:
    """s / sum |s| over the last axis; rows of zeros stay zeros."""
    return L1Normalise.apply(s, signed)


def reweight(a: Tensor, rows: Rows, p: int) -> Tensor:
    """The sharpening of LSSAR: l1-norm of ReLU(n A - O)^p, O = 0 in rows n <= 3, else 1.

    (LSSAR paper, eq. 5 and note 2.) `a` (..., R, K) >= 0 with rows that sum to one.

    Two rules keep it finite and exact for every p and length; neither changes the formula:
    - r = ReLU(n A - O) is divided by its row maximum before the power: l1 undoes any row factor, and
      (n A - 1)^p alone overflows float32 from p = 10 at 16K keys on.
    - Since sum(n A - 1) = 0, a row without positive entries is uniform and its signs are rounding
      noise. Where max(n A) - 1 <= 1e-5, O = 0 as in the first rows: the row stays uniform.
    """
    offset, scale = _offset_and_scale(rows.n * a.detach().amax(-1, keepdim=True), rows.n)
    t = torch.relu(a * (rows.n * scale) - offset * scale)
    return l1_normalise(IntegerPower.apply(t, p))


def _has_contrast(peak: Tensor, n: Tensor) -> Tensor:
    """Which rows, by their largest n A, are neither among the first three nor uniform up to rounding."""
    return (n > 3) & (peak - 1 > 1e-5)


def _offset_and_scale(peak: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """O and 1 / r_max of each row from its largest n A, each (..., R, 1)."""
    offset = _has_contrast(peak, n).to(peak.dtype)
    r_max = peak - offset
    return offset, torch.where(r_max > 0, 1 / r_max, 0.0)  # a row of zeros stays one


class SharpenedPhi(torch.autograd.Function):
    """reweight(l1_normalise(phi(x))) in one piece: the fast twin of those two, for phi > 0.

    With s = phi(x), Z = sum s, t = ReLU(c s - e) (c = n / (Z r_max), e = O / r_max) the weights are
    C = t^p / sum t^p. Dividing c and e by (sum t^p)^(1/p) makes that C = t^p, and those two numbers a row
    and D = sum C dC are all that backward needs: with h = t^(p-1) (dC - D) and m = O / n sum h,
    dx = p c phi'(x) (h - m). m is how s enters through Z. (attention_triton.py computes the same.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Tensor, p: int, phi: PhiPair) -> Tensor:
        weights, c, e = sharpened_phi(x, n, p, phi)
        ctx.save_for_backward(x, n, weights, c, e)
        ctx.p, ctx.phi = p, phi
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, n, weights, c, e = ctx.saved_tensors
        delta = (grads[0] * weights).sum(-1, keepdim=True)
        return sharpened_phi_vjp(x, n, ctx.p, ctx.phi, c, e, grads[0], delta)[1], None, None, None


def sharpened_phi(x: Tensor, n: Tensor, p: int, phi: PhiPair) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, and c and e of their rows (see `SharpenedPhi`)."""
    s = phi[0](x)
    z = s.sum(-1, keepdim=True)
    offset, scale = _offset_and_scale(n * s.amax(-1, keepdim=True) / z, n)
    c, e = n * scale / z, offset * scale
    t = s.mul_(c).sub_(e).relu_()
    weights = _power_below(t, p).mul_(t)
    w = weights.sum(-1, keepdim=True)
    root = w.pow(-1 / p)
    return weights.div_(w), c * root, e * root


def sharpened_phi_vjp(
    x: Tensor, n: Tensor, p: int, phi: PhiPair, c: Tensor, e: Tensor, d_weights: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights again, and dx, from what `sharpened_phi` returned and D = `delta` (..., R, 1)."""
    t = phi[0](x).mul_(c).sub_(e).relu_()
    lower = _power_below(t, p)
    weights = t.mul_(lower)
    h = (d_weights - delta).mul_(lower)
    mean = torch.where(e > 0, h.sum(-1, keepdim=True) / n, 0.0)
    return weights, h.sub_(mean).mul_(p * c).mul_(phi[1](x))


# ---------------------------------------------------------------------------------------------------
# The registry
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused:
    """A normaliser in the terms of attention_triton.py: phi(x + shift), over sum |phi| (l1) or `divisor`."""

    phi: str
    l1: bool = True
    shift: Tensor | None = None  # (R, 1)
    divisor: Tensor | float = 1.0  # (R, 1)
    bounded: bool = False  # |x| < 60 at every length: no row of phi can underflow


@dataclass(frozen=True)
class Spec:
    """A registered normaliser: weights = rows_fn(x), x = factor * <q, k>."""

    rows_fn: Callable[[Tensor, Rows], Tensor]
    factor: Callable[[Rows], Tensor | float]  # a number, (R, 1) or (H, R, 1)
    cosine: bool  # l2-normalise q and k first
    # Subtract the first key from all: softmax and sigma do not see a row-wise shift of the scores, but
    # their rounding does, most of all where keys are nearly equal.
    centre_keys: bool
    softmax: bool  # rows_fn is softmax(x): the sdpa engine can run it
    options: tuple[str, ...]  # the AttentionConfig fields it reads
    sums_to_one: Callable[[AttentionConfig], bool]  # rows >= 0 and sum to one: may be re-weighted
    learned: Callable[[AttentionConfig, int, int], dict[str, Tensor]]  # (options, n_head, train_len)
    # phi and its derivative, where rows_fn is l1_normalise(phi(x)) with phi > 0 that never underflows:
    # re-weighting then runs in one piece (`SharpenedPhi`).
    phi: PhiPair | None
    # For a softmax whose temperature depends on the scores: that temperature from q and k in O(T).
    softmax_factor: Callable[[Tensor, Tensor, Rows], Tensor] | None
    fused: Callable[[Rows], Fused] | None  # what the triton engine computes; None: it cannot


NORMALISERS: dict[str, Spec] = {}


def register(
    name: str,
    *,
    factor: Callable[[Rows], Tensor | float] = lambda rows: rows.head_dim**-0.5,
    cosine: bool = False,
    centre_keys: bool = False,
    softmax: bool = False,
    options: tuple[str, ...] = (),
    sums_to_one: bool | Callable[[AttentionConfig], bool] = False,
    learned: Callable[[AttentionConfig, int, int], dict[str, Tensor]] = lambda options, n_head, t: {},
    phi: PhiPair | None = None,
    softmax_factor: Callable[[Tensor, Tensor, Rows], Tensor] | None = None,
    fused: Callable[[Rows], Fused] | None = None,
) -> Callable[[Callable[[Tensor, Rows], Tensor]], Callable[[Tensor, Rows], Tensor]]:
    """Make a row-wise function available as `attention.normaliser = "<name>"`. Fields: see `Spec`."""

    def add(rows_fn: Callable[[Tensor, Rows], Tensor]) -> Callable[[Tensor, Rows], Tensor]:
        can_sum = sums_to_one if callable(sums_to_one) else lambda options: bool(sums_to_one)
        NORMALISERS[name] = Spec(
            rows_fn,
            factor,
            cosine,
            centre_keys,
            softmax,
            options,
            can_sum,
            learned,
            phi,
            softmax_factor,
            fused,
        )
        return rows_fn

    return add


# ---------------------------------------------------------------------------------------------------
# Softmax and its relatives
# ---------------------------------------------------------------------------------------------------


@register("softmax", softmax=True, sums_to_one=True, fused=lambda rows: Fused("exp"))
def softmax(x: Tensor, rows: Rows) -> Tensor:
    """softmax(x), x = q.k / sqrt(d)."""
    return x.softmax(-1)


@register("softmax_inverse")
def softmax_inverse(x: Tensor, rows: Rows) -> Tensor:
    """-softmax(x). (LSSAR paper, Table 1)"""
    return -x.softmax(-1)


@register("softmax_recentred")
def softmax_recentred(x: Tensor, rows: Rows) -> Tensor:
    """softmax(x) - 1/n, its row mean over the visible keys; rows n <= 3 untouched. (LSSAR, Table 1)"""
    a = x.softmax(-1)
    return torch.where(rows.visible(x) & (rows.n > 3), a - 1 / rows.n, a)


@register("softmax_recentred_l1")
def softmax_recentred_l1(x: Tensor, rows: Rows) -> Tensor:
    """(softmax(x) - 1/n) / sum |softmax(x) - 1/n|; rows n <= 3 untouched. (LSSAR, Table 1, note 1)

    A uniform row (n max A - 1 <= 1e-5) would be rounding noise blown up to norm one: untouched too.
    """
    a = x.softmax(-1)
    centred = rows.visible(x) & _has_contrast(rows.n * a.detach().amax(-1, keepdim=True), rows.n)
    return l1_normalise(torch.where(centred, a - 1 / rows.n, a), signed=True)


def _ssmax_factor(rows: Rows) -> Tensor | float:
    s = rows.learned.get("s", 1.0)
    b = rows.learned.get("b", 0.0)
    return (s * rows.n.log() + b) * rows.head_dim**-0.5  # (H, R, 1) or (R, 1)


def _ssmax_learned(options: AttentionConfig, n_head: int, train_len: int) -> dict[str, Tensor]:
    learned = {}
    if options.scale != "one":
        learned["s"] = torch.full((n_head,), options.scale_init or 1.0)
    if options.bias:
        learned["b"] = torch.zeros(n_head)
    return learned


@register(
    "ssmax",
    factor=_ssmax_factor,
    options=("scale", "scale_init", "bias"),
    softmax=True,
    sums_to_one=True,
    learned=_ssmax_learned,
    fused=lambda rows: Fused("exp"),
)
def ssmax(x: Tensor, rows: Rows) -> Tensor:
    """softmax((s ln n + b) q.k / sqrt(d)); s learned per layer and head, or 1. (SSMax, eq. 2, 4, 11)"""
    return x.softmax(-1)


def _ssmax_pn_factor(rows: Rows) -> Tensor:
    if rows.n_keys > rows.train_len:
        raise UserError(
            f"ssmax_pn: {rows.n_keys} keys, but its p_n was learned for at most "
            f"train.seq_len = {rows.train_len}"
        )
    p_n = rows.learned["p_n"][rows.n.long() - 1]  # (R, 1)
    return (rows.learned["s"] * p_n + rows.learned["b"]) * rows.head_dim**-0.5  # (H, R, 1)


def _ssmax_pn_learned(options: AttentionConfig, n_head: int, train_len: int) -> dict[str, Tensor]:
    s = torch.full((n_head,), options.scale_init or 1.0)
    return {"s": s, "b": torch.zeros(n_head), "p_n": torch.ones(train_len)}


@register(
    "ssmax_pn",
    factor=_ssmax_pn_factor,
    options=("scale_init",),
    softmax=True,
    sums_to_one=True,
    learned=_ssmax_pn_learned,
    fused=lambda rows: Fused("exp"),
)
def ssmax_pn(x: Tensor, rows: Rows) -> Tensor:
    """softmax((s p_n + b) q.k / sqrt(d)), p_n one learned vector for all layers. (SSMax, eq. 3)"""
    return x.softmax(-1)


def _norm_softmax_factor(mean: Tensor, var: Tensor, rows: Rows) -> Tensor:
    """1 / (tau min(sigma, gamma)) and its variants from the moments of a row, (..., R, 1).

    0, which makes the row uniform, where it would be 1 / 0: row 1, identical keys.
    """
    options = rows.options
    tau, gamma = options.tau or 1.0, norm_softmax_gamma(options, rows.head_dim)
    spread = var > torch.finfo(var.dtype).tiny
    sigma = torch.where(spread, var, 1.0).sqrt()
    if options.variant == "inverse":
        return 1 / (tau * torch.where(spread, sigma, 0.0).clamp_min(gamma))
    if options.variant == "affine":
        factor = rows.learned["w"] / (tau * sigma)
    else:
        factor = 1 / (tau * sigma.clamp_max(gamma))
    return torch.where(spread, factor, 0.0)


def norm_softmax_gamma(options: AttentionConfig, head_dim: int) -> float:
    """gamma as a number: given, inf, or gamma_factor * sqrt(d) (the default, sqrt(d))."""
    if isinstance(options.gamma, float):
        return options.gamma
    return math.inf if options.gamma == "inf" else (options.gamma_factor or 1.0) * math.sqrt(head_dim)


def _norm_softmax_learned(options: AttentionConfig, n_head: int, train_len: int) -> dict[str, Tensor]:
    return {"w": torch.ones(n_head)} if options.variant == "affine" else {}


@register(
    "norm_softmax",
    factor=lambda rows: 1.0,
    options=("gamma", "gamma_factor", "tau", "variant"),
    sums_to_one=True,
    learned=_norm_softmax_learned,
    centre_keys=True,
    softmax_factor=lambda q, k, rows: _norm_softmax_factor(*score_moments(q, k, rows), rows),
    fused=lambda rows: Fused("exp"),
)
def norm_softmax(x: Tensor, rows: Rows) -> Tensor:
    """softmax(x / (tau min(sigma(x), gamma))), x = q.k, sigma = population deviation of the visible x.

    (NormSoftmax, eq. 4-6; eq. 29 and Table 1 for the variants: affine f1 = w x / (tau sigma) with w
    learned per head, inverse f2 = x / (tau max(sigma, gamma)).)
    """
    x = rows.hide(x)
    return rows.softmax(x * _norm_softmax_factor(*rows.moments(x), rows))


def _logit_norm_factor(mean: Tensor, var: Tensor, rows: Rows) -> Tensor:
    """1 / (tau ||x||_2) from the moments of a row: ||x||^2 = n (var + mean^2), (..., R, 1)."""
    square = rows.n * (var + mean.square())
    nonzero = square > torch.finfo(var.dtype).tiny
    norm = torch.where(nonzero, square, 1.0).sqrt()
    return torch.where(nonzero, 1 / (norm * (rows.options.tau or rows.n**-0.5)), 0.0)


@register(
    "logit_norm",
    factor=lambda rows: 1.0,
    options=("tau",),
    sums_to_one=True,
    softmax_factor=lambda q, k, rows: _logit_norm_factor(*score_moments(q, k, rows), rows),
    fused=lambda rows: Fused("exp"),
)
def logit_norm(x: Tensor, rows: Rows) -> Tensor:
    """softmax(x / (tau ||x||_2)), x = q.k, tau = n^(-1/2) unless given. (NormSoftmax, eq. 8)"""
    x = rows.hide(x)
    return rows.softmax(x * _logit_norm_factor(*rows.moments(x), rows))


# ---------------------------------------------------------------------------------------------------
# Elementwise functions with or without l1
# ---------------------------------------------------------------------------------------------------


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x). Above the threshold torch returns x; its own, 20, is off by 2e-9."""
    return F.softplus(x, threshold=40.0)


# phi(-inf) = 0 for the first group; the second is evaluated at 0 for hidden keys, where it is 0.
POSITIVE_PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "softplus": softplus,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "relu6": F.relu6,
}
SIGNED_PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "mish": F.mish,
}


def _l1_of_positive(phi: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """phi(x) / sum phi(x) for phi = softplus or sigmoid, also where phi underflows.

    Both tend to e^x: in a row whose largest score is below -40 they equal it to the last digit, and
    e^(x - max) gives the same normalised row without leaving the number range.
    """
    peak = x.detach().amax(-1, keepdim=True)
    return l1_normalise(torch.where(peak < -40, torch.exp(x - peak), phi(x)))


def _phi_sums_to_one(options: AttentionConfig) -> bool:
    return (options.phi or "softplus") in POSITIVE_PHI and options.l1 is not False


@register(
    "phi",
    options=("phi", "l1"),
    sums_to_one=_phi_sums_to_one,
    fused=lambda rows: Fused(rows.options.phi or "softplus", rows.options.l1 is not False),
)
def phi(x: Tensor, rows: Rows) -> Tensor:
    """phi(x) over the visible keys; with l1 divided by sum |phi(x)|. (LSSAR, eq. 3, Tables 2 and 3)"""
    name, l1 = rows.options.phi or "softplus", rows.options.l1 is not False
    if name == "exp" and l1:
        return x.softmax(-1)  # the same, without overflow
    if name in ("softplus", "sigmoid") and l1:
        return _l1_of_positive(POSITIVE_PHI[name], x)
    if name in SIGNED_PHI:
        a = SIGNED_PHI[name](rows.hide(x))
        return l1_normalise(a, signed=True) if l1 else a
    a = POSITIVE_PHI[name](x)
    return l1_normalise(a) if l1 else a


@register(
    "lssa",
    cosine=True,
    factor=lambda rows: math.log(rows.head_dim) * rows.n.log(),
    sums_to_one=True,
    phi=(softplus, torch.sigmoid),
    fused=lambda rows: Fused("softplus", bounded=True),
)
def lssa(x: Tensor, rows: Rows) -> Tensor:
    """softplus(x) / sum softplus(x), x = ln d ln n cos(q, k). (LSSAR, eq. 4)"""
    return l1_normalise(softplus(x))


def _sigmoid_bias(rows: Rows) -> Tensor | float:
    match rows.options.bias or "log_n":
        case "log_train_len":
            return math.log(rows.train_len)
        case "log_len":
            return math.log(rows.n_keys)
        case _:
            return rows.n.log()


@register(
    "sigmoid",
    options=("bias", "l1"),
    sums_to_one=lambda options: bool(options.l1),
    fused=lambda rows: Fused("sigmoid", bool(rows.options.l1), shift=rows.n * 0 - _sigmoid_bias(rows)),
)
def sigmoid(x: Tensor, rows: Rows) -> Tensor:
    """sigmoid(x - ln L), L the training length, all keys, or n; with l1 divided by the row sum.

    (Ramapuram et al. 2024; LSSAR, Table 4.) With bias = "log_len" a row's weights depend on keys that
    it does not see, through their number.
    """
    z = x - _sigmoid_bias(rows)
    return _l1_of_positive(torch.sigmoid, z) if rows.options.l1 else torch.sigmoid(z)


def _wortsman_divisor(rows: Rows) -> Tensor | float:
    return rows.n if rows.options.divide_by == "n" else rows.train_len


@register(
    "relu_wortsman",
    options=("divide_by",),
    fused=lambda rows: Fused("relu", False, divisor=_wortsman_divisor(rows)),
)
def relu_wortsman(x: Tensor, rows: Rows) -> Tensor:
    """relu(x) / L, L the training length (or n). (Wortsman et al. 2023)"""
    return torch.relu(x) / _wortsman_divisor(rows)


@register("relu_li", sums_to_one=True, fused=lambda rows: Fused("relu"))
def relu_li(x: Tensor, rows: Rows) -> Tensor:
    """relu(x) / sum relu(x). (Li et al. 2022)"""
    return l1_normalise(torch.relu(x))


def _shen_divisor(rows: Rows) -> Tensor:
    gamma = rows.options.gamma if isinstance(rows.options.gamma, float) else 1.0
    return gamma * (rows.n / 2).sqrt()


@register(
    "relu_shen",
    options=("gamma",),
    fused=lambda rows: Fused("relu", False, divisor=_shen_divisor(rows)),
)
def relu_shen(x: Tensor, rows: Rows) -> Tensor:
    """relu(x) / (gamma sqrt(n / 2)). (Shen et al. 2023)"""
    return torch.relu(x) / _shen_divisor(rows)


# ---------------------------------------------------------------------------------------------------
# The normaliser as a module, and the choice of options
# ---------------------------------------------------------------------------------------------------


class Normaliser(nn.Module):
    """A registered normaliser with its options and learned parameters (`s`, `b`, `p_n`, `w`, if any)."""

    def __init__(self, options: AttentionConfig, n_head: int, head_dim: int, train_len: int):
        super().__init__()
        self.options, self.spec = options, NORMALISERS[options.normaliser]
        self.n_head, self.head_dim, self.train_len = n_head, head_dim, train_len
        self.learned_names = []
        self.key = (options, n_head, head_dim, train_len)  # all that it was made from
        for name, value in self.spec.learned(options, n_head, train_len).items():
            self.register_parameter(name, nn.Parameter(value))
            self.learned_names.append(name)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The dense weights, by definition.

        Args:
            q, k: (B, H, Tq, D) and (B, H, Tk, D) after RoPE; the queries are the last Tq positions.
        Returns:
            (B, H, Tq, Tk) in float32 (float64 for float64 inputs), 0 at keys after the query.
        """
        with torch.autocast(q.device.type, enabled=False):
            q, k, rows = self.prepare(q, k)
            x = q @ k.mT  # (B, H, Tq, Tk)
            return self.rows_fn(x.masked_fill(~rows.visible(x), -math.inf), rows)

    @property
    def sharpened(self) -> tuple[int, PhiPair] | None:
        """p and phi where formula and re-weighting run in one piece (`SharpenedPhi`)."""
        p, phi = self.options.reweight_p, self.spec.phi
        return None if p is None or phi is None else (p, phi)

    def rows_fn(self, x: Tensor, rows: Rows) -> Tensor:
        """Scores (..., R, K), -inf at hidden keys, to weights: the formula, then the re-weighting."""
        if self.sharpened is not None:
            return SharpenedPhi.apply(x, rows.n, *self.sharpened)
        p = self.options.reweight_p
        a = self.spec.rows_fn(x, rows)
        return a if p is None else reweight(a, rows, p)

    def block_weights(self, x: Tensor, rows: Rows) -> tuple[Tensor, tuple[Tensor, ...]]:
        """rows_fn's weights, compiled if the options say so, and what `block_vjp` wants kept of them."""
        compiled = self.options.compile_rows
        if self.sharpened is None:
            rows_fn = partial(_compiled(Normaliser.rows_fn, self.options.reweight_p), self)
            return (rows_fn if compiled else self.rows_fn)(x, rows), ()
        fn = _compiled(sharpened_phi, self.options.reweight_p) if compiled else sharpened_phi
        weights, c, e = fn(x, rows.n, *self.sharpened)
        return weights, (c, e)

    def block_vjp(
        self,
        x: Tensor,
        rows: Rows,
        kept: tuple[Tensor, ...],
        d_weights: Tensor,
        delta: Tensor,
        learned: list[Tensor],
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """The weights, and the gradients of sum(weights * d_weights) by x and by `learned`.

        delta (..., R, 1): the rows' sum of weights * d_weights.
        """
        if self.sharpened is not None:
            vjp: Any = sharpened_phi_vjp
            if self.options.compile_rows:
                vjp = _compiled(vjp, self.options.reweight_p)
            weights, dx = vjp(x, rows.n, *self.sharpened, *kept, d_weights, delta)
            return weights, dx, [None] * len(learned)
        with torch.enable_grad():
            weights, _ = self.block_weights(x.requires_grad_(), rows)
        dx, *d_learned = torch.autograd.grad(weights, [x, *learned], d_weights, allow_unused=True)
        return weights.detach(), dx, d_learned

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Rows]:
        """q and k in float32 (or float64), rescaled so that their products are the scores."""
        rows = self.rows(q, k)
        q, k = self.as_float(q, k)
        return q * self.spec.factor(rows), k, rows

    def as_float(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k in float32 (or float64), normalised or centred if the formula wants it."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(dtype), k.to(dtype)
        if self.spec.cosine:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.spec.centre_keys:
            k = k - k[..., :1, :]
        return q, k

    def rows(self, q: Tensor, k: Tensor) -> Rows:
        """The `Rows` of queries (..., Tq, D) that are the last of the keys' (..., Tk, D) positions."""
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        if n_queries > n_keys:
            raise ValueError(f"{n_queries} queries for {n_keys} keys: expected at most as many")
        n = torch.arange(n_keys - n_queries + 1, n_keys + 1, dtype=dtype, device=q.device)[:, None]
        return Rows(n, n_keys, self.train_len, self.head_dim, self.options, self.learned(dtype))

    def learned(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Learned parameters, those per head as (H, 1, 1) to broadcast against (B, H, R, K)."""
        values = {name: getattr(self, name).to(dtype) for name in self.learned_names}
        return {name: v if name == "p_n" else v[:, None, None] for name, v in values.items()}


def make_normaliser(options: AttentionConfig, n_head: int, head_dim: int, train_len: int) -> Normaliser:
    """Build the normaliser named in `options`.

    Args:
        n_head, head_dim: of the attention layer that it serves.
        train_len: training length in tokens (L in the formulas that use it).
    """
    return Normaliser(options, n_head, head_dim, train_len)


def supports_sdpa(options: AttentionConfig) -> bool:
    """Whether the sdpa engine can run this normaliser."""
    spec = NORMALISERS[options.normaliser]
    return (spec.softmax or spec.softmax_factor is not None) and options.reweight_p is None


def supports_triton(options: AttentionConfig) -> bool:
    """Whether the triton engine can run this normaliser."""
    return NORMALISERS[options.normaliser].fused is not None


def config_problems(options: AttentionConfig) -> list[str]:
    """What is wrong with an [attention] section, one 'key = value: expected ...' line each."""
    spec = NORMALISERS.get(options.normaliser)
    if spec is None:
        near = difflib.get_close_matches(options.normaliser, NORMALISERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(NORMALISERS)}"
        return [f"normaliser = {options.normaliser!r}: unknown; {hint}"]
    problems = []
    common = {"normaliser", "engine", "compile_rows", "reweight_p"}
    for key, value in options:
        if value is not None and key not in common and key not in spec.options:
            reads = f"it reads {', '.join(spec.options)}" if spec.options else "it has no options"
            problems.append(f"{key} = {value!r}: {options.normaliser} does not use it ({reads})")
    problems += _value_problems(options)
    if options.reweight_p is not None and not spec.sums_to_one(options):
        problems.append(
            f"reweight_p = {options.reweight_p}: re-weighting needs rows that are non-negative and sum to "
            f"one, which {options.normaliser} with these options does not give"
        )
    if options.engine == "sdpa" and not supports_sdpa(options):
        problems.append(
            f"engine = 'sdpa': {options.normaliser}{' with reweight_p' if options.reweight_p else ''} is "
            "not a softmax over rescaled queries; expected auto, rows or dense"
        )
    if options.engine == "triton" and not supports_triton(options):
        problems.append(
            f"engine = 'triton': {options.normaliser} is not phi(x) over its row sum or a fixed number; "
            "expected auto, rows or dense"
        )
    return problems


def _value_problems(options: AttentionConfig) -> list[str]:
    """Values that are legal for the key, but not for this normaliser or beside another key."""
    problems, name = [], options.normaliser
    if name == "sigmoid" and isinstance(options.bias, bool):
        problems.append(f"bias = {options.bias}: sigmoid expects log_train_len, log_len or log_n")
    if name == "ssmax" and isinstance(options.bias, str):
        problems.append(f"bias = {options.bias!r}: ssmax expects true or false")
    if isinstance(options.gamma, float) and options.gamma <= 0:
        problems.append(f"gamma = {options.gamma}: expected a number above 0")
    if name == "relu_shen" and isinstance(options.gamma, str):
        problems.append(f"gamma = {options.gamma!r}: relu_shen expects a number")
    if options.gamma_factor is not None and options.gamma not in (None, "sqrt_d"):
        problems.append(f"gamma_factor = {options.gamma_factor}: only goes with gamma = 'sqrt_d'")
    if options.variant == "affine" and (options.gamma, options.gamma_factor) != (None, None):
        problems.append("variant = 'affine': w x / sigma has no gamma; remove gamma and gamma_factor")
    if options.variant == "inverse" and options.gamma == "inf":
        problems.append("gamma = 'inf': with variant = 'inverse' every row would be uniform")
    if options.scale == "one" and options.scale_init is not None:
        problems.append(f"scale_init = {options.scale_init}: only goes with scale = 'learned'")
    return problems


def describe_attention(options: AttentionConfig) -> str:
    """The [attention] section in a few words: 'lssa (reweight_p = 15)'."""
    values = options.model_dump(exclude_none=True, exclude={"normaliser", "engine", "compile_rows"})
    listed = ", ".join(f"{key} = {value}" for key, value in values.items())
    return options.normaliser + (f" ({listed})" if listed else "")


# ---------------------------------------------------------------------------------------------------
# The engines
# ---------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, normaliser: Normaliser, engine: Engine = "auto") -> Tensor:
    """Causal attention: normaliser.weights(q, k) @ v.

    Args:
        q: (B, H, Tq, D) after RoPE, the last Tq of the Tk positions.
        k, v: (B, H, Tk, D).
        engine: "dense" holds (Tq, Tk); "rows" works in blocks of rows and recomputes them in backward;
            "sdpa" is torch's fused softmax attention; "triton" is our fused kernels (CUDA); "auto": see
            `choose_engine`, whose result to pass when this call is compiled.
    Returns:
        (B, H, Tq, D) in v's type. Scores and weights are float32 (float64 for float64 inputs).
    """
    with torch.autocast(q.device.type, enabled=False):
        match choose_engine(normaliser, engine, q.device, v.dtype):
            case "dense":
                weights = normaliser.weights(q, k)
                return (weights @ v.to(weights.dtype)).to(v.dtype)
            case "sdpa":
                return _attend_sdpa(q, k, v, normaliser)
            case "triton":
                return _attend_triton(q, k, v, normaliser)
            case _:
                return _attend_rows(q, k, v, normaliser)


CPU = torch.device("cpu")


def choose_engine(
    normaliser: Normaliser, engine: Engine, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Engine:
    """The engine that attend() will use for inputs on this device and of this type.

    "auto" is sdpa where the normaliser allows it; else, on CUDA, triton if `check_fused` finds no
    problem (a warning says which); else rows.

    Raises:
        UserError: for an engine that cannot run this normaliser there.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine = {engine!r}: expected one of {', '.join(get_args(Engine))}")
    options = normaliser.options
    if engine == "auto" and supports_sdpa(options):
        return "sdpa"
    if engine == "auto":
        fits = supports_triton(options) and normaliser.head_dim <= 128 and dtype != torch.float64
        if device.type != "cuda" or not fits:
            return "rows"
        # A compiled caller has asked before, or takes the kernels on trust: the check cannot be traced.
        traced = torch.compiler.is_compiling()
        return "triton" if traced or check_fused(*normaliser.key, device, dtype).problem is None else "rows"
    if engine == "sdpa" and not supports_sdpa(options):
        raise UserError(f"engine = 'sdpa': {options.normaliser} is not a softmax")
    if engine == "triton" and not supports_triton(options):
        raise UserError(f"engine = 'triton': {options.normaliser} is not one of its functions")
    if engine == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"engine = 'triton': needs a CUDA device, found {device.type}; expected auto or rows")
    return engine


# The largest relative error of o, dq, dk and dv at which the kernels are trusted. Only the rounding of
# weights and of their gradients to the inputs' type is in it; a miscompiled kernel is off by far more.
FUSED_TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 5e-4}


class FusedCheck(NamedTuple):
    error: float  # largest relative error
    problem: str | None  # one line where it is too large, or the kernels do not run at all


@cache
def check_fused(
    options: AttentionConfig,
    n_head: int,
    head_dim: int,
    train_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> FusedCheck:
    """Whether the fused kernels can be trusted with this normaliser here; warns, once, if not."""
    error = math.inf
    try:
        with torch.inference_mode(False):  # an evaluation may be the first to ask
            normaliser = make_normaliser(options, n_head, head_dim, train_len).to(device)
            error = fused_error(normaliser, device, dtype)
    except Exception as e:  # whatever a missing or unfit compiler raises: rows can do the work
        problem = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}"
    else:
        if error <= FUSED_TOLERANCE[dtype]:
            return FusedCheck(error, None)
        problem = f"relative error {error:.1e}, expected at most {FUSED_TOLERANCE[dtype]:.0e}"
    warnings.warn(
        f"fused attention failed its self-check, engine auto takes rows instead: {problem}", stacklevel=3
    )
    return FusedCheck(error, problem)


def describe_engine(normaliser: Normaliser, engine: Engine, device: torch.device, dtype: torch.dtype) -> str:
    """The engine's name; for the fused kernels also how far off their self-check found them."""
    if engine != "triton":
        return engine
    return f"triton (self-check: relative error {check_fused(*normaliser.key, device, dtype).error:.1e})"


def fused_error(normaliser: Normaliser, device: torch.device, dtype: torch.dtype, length: int = 200) -> float:
    """The triton engine's largest relative error (by norm) of o, dq, dk, dv against float64 weights.

    Both sides get the same q and k, rounded as the kernels want them, so that re-weighting does not
    magnify that rounding into the result.
    """
    g = torch.Generator().manual_seed(0)
    length = min(length, normaliser.train_len)  # ssmax_pn has no p_n beyond
    shape = (1, normaliser.n_head, length, normaliser.head_dim)
    q, k, v, do = (torch.randn(shape, generator=g).to(device, dtype) for _ in range(4))
    with torch.no_grad():
        q, k, factor, fused_rows = _fused_inputs(q, k, v, normaliser)
        rows = normaliser.rows(q.double(), k.double())
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = _run_fused(inputs[0], inputs[1], inputs[2], factor, fused_rows, normaliser)
        got = [out, *torch.autograd.grad(out, inputs, do)]
        inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
        x = inputs[0] @ inputs[1].mT * factor[..., None].double()
        x = x.masked_fill(~rows.visible(x), -math.inf)
        # Where the factor is softmax_factor, x is scaled already.
        a = normaliser.spec.rows_fn(x, rows) if normaliser.spec.softmax_factor is None else x.softmax(-1)
        p = normaliser.options.reweight_p
        out = (a if p is None else reweight(a, rows, p)) @ inputs[2]
        want = [out, *torch.autograd.grad(out, inputs, do.double())]
    errors = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(got, want, strict=True)]
    return max(float(error.detach()) for error in errors)


def _attend_triton(q: Tensor, k: Tensor, v: Tensor, normaliser: Normaliser) -> Tensor:
    q, k, factor, rows = _fused_inputs(q, k, v, normaliser)
    return _run_fused(q, k, v, factor, rows, normaliser)


def _fused_inputs(
    q: Tensor, k: Tensor, v: Tensor, normaliser: Normaliser
) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """q and k as the kernels want them, in v's type; their products' float32 factor (B, H, Tq); the rows."""
    spec, rows = normaliser.spec, normaliser.rows(q, k)
    factor = spec.factor(rows)
    if spec.cosine or spec.centre_keys or spec.softmax_factor is not None:
        q, k = normaliser.as_float(q, k)
        factor = factor if spec.softmax_factor is None else spec.softmax_factor(q, k, rows)
    factor = torch.as_tensor(factor, dtype=torch.float32, device=q.device)
    factor = factor if factor.dim() == 0 else factor.squeeze(-1)  # (R, 1), (H, R, 1) or (B, H, R, 1)
    return q.to(v.dtype), k.to(v.dtype), factor.expand(q.shape[:-1]), rows


def _run_fused(q: Tensor, k: Tensor, v: Tensor, factor: Tensor, rows: Rows, normaliser: Normaliser) -> Tensor:
    from engines.fused_kernels import phi_attention

    assert normaliser.spec.fused is not None
    fused = normaliser.spec.fused(rows)
    shift = None if fused.shift is None else fused.shift.squeeze(-1)
    p = normaliser.options.reweight_p
    out = phi_attention(q, k, v, factor, shift, phi=fused.phi, l1=fused.l1, p=p, bounded=fused.bounded)
    plain = isinstance(fused.divisor, float) and fused.divisor == 1.0
    return out if plain else (out / fused.divisor).to(out.dtype)


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, normaliser: Normaliser) -> Tensor:
    """Softmax over q times a per-row factor, by F.scaled_dot_product_attention."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    spec = normaliser.spec
    rows = normaliser.rows(q, k)
    scale = 1.0
    if spec.softmax_factor is None and isinstance(factor := spec.factor(rows), float):
        scale = factor
    else:
        q_float, k_float = normaliser.as_float(q, k)
        if spec.softmax_factor is not None:
            factor = spec.softmax_factor(q_float, k_float, rows)
        q, k = (q_float * factor).to(v.dtype), k_float.to(v.dtype)
    mask = None
    if 1 < n_queries < n_keys:  # is_causal would align the queries with the first keys
        mask = rows.visible(k.mT)
    # Not the bare comparison: under torch.compile it is symbolic, and is_causal must be a plain bool.
    causal = True if n_queries == n_keys and n_queries > 1 else False  # noqa: SIM210
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


@torch.compiler.disable  # its backward runs autograd, which a compiled model cannot trace
def _attend_rows(q: Tensor, k: Tensor, v: Tensor, normaliser: Normaliser) -> Tensor:
    dtype = v.dtype
    q, k, rows = normaliser.prepare(q, k)
    # What the formulas learn is passed once more, as arguments: only through these do gradients return.
    out = RowBlocks.apply(q, k, v.to(q.dtype), normaliser, rows, *rows.learned.values())
    return out.to(dtype)


class RowBlocks(torch.autograd.Function):
    """Attention in blocks of query rows, each against the keys it sees; O(block * T) memory.

    Nothing of size (T, T) is kept: backward computes the scores and weights of each block again, with
    autograd through the row-wise function alone.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, normaliser: Normaliser, rows: Rows, *learned: Tensor
    ) -> Tensor:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        ctx.kept = []  # by block
        for batch, block, keys in row_blocks(q, k):
            x, rows_here = _block_scores(q, k, rows, batch, block, keys)
            weights, kept = normaliser.block_weights(x, rows_here)
            out[batch, :, block] = weights @ v[batch, :, keys]
            ctx.kept.append(kept)
        ctx.save_for_backward(q, k, v, out, *learned)
        ctx.normaliser, ctx.rows = normaliser, rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q = ctx.saved_tensors[0]
        with torch.autocast(q.device.type, enabled=False):  # a caller may run backward inside autocast
            return RowBlocks._backward(ctx, grads[0])

    @staticmethod
    def _backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, out, *learned = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
        learned = [t.detach().requires_grad_(t.requires_grad) for t in learned]
        inputs = [t for t in learned if t.requires_grad]
        d_inputs = [torch.zeros_like(t) for t in inputs]
        rows = replace(ctx.rows, learned=dict(zip(ctx.rows.learned, learned, strict=True)))
        delta = (do * out).sum(-1, keepdim=True)  # (B, H, Tq, 1)
        for (batch, block, keys), kept in zip(row_blocks(q, k), ctx.kept, strict=True):
            x, rows_here = _block_scores(q, k, rows, batch, block, keys)
            d_out = do[batch, :, block]
            d_weights = d_out @ v[batch, :, keys].mT
            weights, dx, d_block = ctx.normaliser.block_vjp(
                x, rows_here, kept, d_weights, delta[batch, :, block], inputs
            )
            dq[batch, :, block] = dx @ k[batch, :, keys]
            _add_product(dk[batch, :, keys], dx.mT, q[batch, :, block])
            _add_product(dv[batch, :, keys], weights.mT, d_out)
            for total, part in zip(d_inputs, d_block, strict=True):
                if part is not None:
                    total += part
        by_input = iter(d_inputs)
        return dq, dk, dv, None, None, *(next(by_input) if t.requires_grad else None for t in learned)


def row_blocks(q: Tensor, k: Tensor) -> list[tuple[slice, slice, slice]]:
    """The (batch, query, key) slices that the rows engine visits: all keys up to the block's last row.

    Blocks are small enough for a CPU's cache (2 MB of scores) or a few hundred MB on a GPU.
    """
    n_batch, n_head, n_queries = q.shape[:3]
    n_keys = k.shape[-2]
    n_rows, budget = (64, 2**19) if q.device.type == "cpu" else (256, 2**26)
    blocks = []
    for start in range(0, n_queries, n_rows):
        stop = min(start + n_rows, n_queries)
        last_key = n_keys - n_queries + stop
        n_sequences = max(1, budget // (n_head * n_rows * last_key))
        for first in range(0, n_batch, n_sequences):
            blocks.append((slice(first, first + n_sequences), slice(start, stop), slice(last_key)))
    return blocks


def _block_scores(
    q: Tensor, k: Tensor, rows: Rows, batch: slice, block: slice, keys: slice
) -> tuple[Tensor, Rows]:
    """A block's scores with -inf at hidden keys, and its `Rows`."""
    x = q[batch, :, block] @ k[batch, :, keys].mT  # (b, H, R, K)
    n_rows = x.shape[-2]
    # Only the last R keys are hidden from any row of the block.
    future = torch.ones(n_rows, n_rows, dtype=torch.bool, device=x.device).triu(1)
    x[..., -n_rows:].masked_fill_(future, -math.inf)
    return x, replace(rows, n=rows.n[block])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in place, without a temporary of total's size; total is a slice of a (B, H, K, D)."""
    total.view(-1, *total.shape[2:]).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


@cache
def _compiled(function: Callable[..., Any], p: int | None) -> Callable[..., Any]:
    """The function compiled for lengths of any size and one power.

    torch.compile keeps what it compiled with a function's code, and silently gives up, for good, after eight
    variants. Each power unrolls to another variant: a copy of the code for each has room for all.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_p{p}")
    copied = FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    return torch.compile(copied, dynamic=True)


def score_moments(q: Tensor, k: Tensor, rows: Rows, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each row's visible scores q.k, in O(T) memory.

    var = q' Cov(k) q over the visible keys: prefix sums of the chunks' means and covariances, merged
    by Chan's formula, plus the row's own chunk directly. (E[x^2] - E[x]^2 would lose all digits when
    keys share a mean.)

    Args:
        q, k: (B, H, T, D) float32 or float64. With fewer queries than keys (decoding), the scores are
            computed directly.
    Returns:
        mean, var: each (B, H, T, 1).
    """
    if q.shape[-2] < k.shape[-2]:
        return rows.moments(q @ k.mT)
    length = q.shape[-2]
    n_chunks = math.ceil(length / chunk)
    pad = (0, 0, 0, n_chunks * chunk - length)
    q = F.pad(q, pad).unflatten(-2, (n_chunks, chunk))  # (B, H, C, c, D)
    k = F.pad(k, pad).unflatten(-2, (n_chunks, chunk))

    # Everything before the row's chunk: n_a keys with mean score mean_a and variance var_a.
    k_mean, k_scatter, n_a = _prefix_moments(k)
    mean_a = (q @ k_mean[..., None]).squeeze(-1)  # (B, H, C, c)
    var_a = ((q @ k_scatter) * q).sum(-1) / n_a.clamp_min(1)
    # The row's own chunk up to itself: n_b keys.
    x = q @ k.mT  # (B, H, C, c, c)
    own = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    n_b = torch.arange(1, chunk + 1, dtype=q.dtype, device=q.device)  # (c,)
    mean_b = torch.where(own, x, 0.0).sum(-1) / n_b
    var_b = torch.where(own, x - mean_b[..., None], 0.0).square().sum(-1) / n_b

    n = n_a + n_b
    delta = mean_b - mean_a
    mean = mean_a + delta * n_b / n
    var = (n_a * var_a + n_b * var_b + delta.square() * n_a * n_b / n) / n
    return mean.flatten(-2)[..., :length, None], var.flatten(-2)[..., :length, None]


def _prefix_moments(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all keys before each chunk: their mean (B, H, C, D), scatter (B, H, C, D, D), number (C, 1).

    Prefixes are shifted, never `cumsum - own`: that leaks the own chunk through its rounding.
    """
    n_chunks, chunk = k.shape[-3:-1]
    before = torch.arange(n_chunks, dtype=k.dtype, device=k.device)[:, None] * chunk  # (C, 1)
    sums = k.sum(-2)  # (B, H, C, D)
    mean = _exclusive_cumsum(sums, -2) / before.clamp_min(1)
    own_mean = sums / chunk
    centred = k - own_mean[..., None, :]
    shift = own_mean - mean
    weight = (before * chunk / (before + chunk))[..., None]  # (C, 1, 1)
    scatter = centred.mT @ centred + weight * shift[..., :, None] * shift[..., None, :]
    return mean, _exclusive_cumsum(scatter, -3), before


def _exclusive_cumsum(t: Tensor, dim: int) -> Tensor:
    zeros = torch.zeros_like(t.narrow(dim, 0, 1))
    return torch.cat([zeros, t.narrow(dim, 0, t.shape[dim] - 1).cumsum(dim)], dim)
