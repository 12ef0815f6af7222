"""Softmax with a temperature that depends on the row's scores: NormSoftmax, LogitNorm."""

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from normalisers.base import Form, Normaliser, RowContext, share_heads
from normalisers.family import Softmax

CHUNK = 64  # keys whose moments are merged at once


class AdaptiveSoftmax(Normaliser):
    """softmax(x * inverse_temperature), x = q.k unscaled, from the mean and variance of a row's
    scores.
    """

    sums_to_one: ClassVar[bool] = True
    own_methods: ClassVar[frozenset[str]] = frozenset()
    adaptive: ClassVar[bool] = True

    def inverse_temperature(self, mean: Tensor, var: Tensor, context: RowContext) -> Tensor:
        """The factor of a row's scores from their moments, (..., R, 1)."""
        raise NotImplementedError

    def factor(self, context: RowContext) -> float:
        return 1.0

    def fused_factor(self, q: Tensor, k: Tensor, context: RowContext) -> Tensor:
        factor = self.factor(context)
        moments = score_moments(q * factor, share_heads(k.to(q.dtype), q), context)
        return factor * self.inverse_temperature(*moments, context)

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        x = context.zero_hidden(x)
        return context.softmax(x * self.inverse_temperature(*context.moments(x), context))

    @property
    def prepared(self) -> Normaliser:
        return Softmax()

    @property
    def form(self) -> Form:
        return "any" if "weights" in self.own_methods else "softmax"

    def extra_flops(self, head_dim: int) -> int:
        return 3 * 2 * 2 * head_dim**2  # q Cov(k) q, and Cov(k) itself


class NormSoftmax(AdaptiveSoftmax, name="norm_softmax"):
    """softmax(x / (tau min(sigma, gamma))), sigma = population standard deviation of the row's x.

    (NormSoftmax, eq. 4-6; tau: eq. 29.) Variants (Table 1, unnumbered): affine, f1 = w x / (tau
    sigma) with w learned per head; inverse, f2 = x / (tau max(sigma, gamma)).
    """

    centre_keys: ClassVar[bool] = True
    # x / sigma of a few keys hardly depends on the size of x: with two keys it is -1 and 1. The
    # gradients through x and through sigma cancel, and 16 bits of the first are too few where sigma
    # is small.
    exact_rows: ClassVar[int] = 16

    gamma: PositiveFloat | Literal["sqrt_d", "inf"] = Field(
        "sqrt_d", description="Upper bound of sigma (lower bound with variant = inverse)."
    )
    tau: float = Field(1.0, gt=0, description="Temperature.")
    variant: Literal["standard", "affine", "inverse"] = Field(
        "standard", description="standard: min(sigma, gamma); affine: f1; inverse: f2."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.variant == "affine" and self.gamma != "sqrt_d":
            raise ValueError("variant = 'affine': w x / sigma has no gamma; remove gamma")
        if self.variant == "inverse" and self.gamma == "inf":
            raise ValueError("gamma = 'inf': with variant = 'inverse' every row would be uniform")
        return self

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"w": torch.ones(n_head)} if self.variant == "affine" else {}

    def inverse_temperature(self, mean: Tensor, var: Tensor, context: RowContext) -> Tensor:
        # 0, which makes the row uniform, where it would be 1 / 0: row 1, identical keys.
        spread = var > torch.finfo(var.dtype).tiny
        sigma = torch.where(spread, var, 1.0).sqrt()
        named = {"inf": math.inf, "sqrt_d": math.sqrt(context.head_dim)}
        gamma = self.gamma if isinstance(self.gamma, float) else named[self.gamma]
        if self.variant == "inverse":
            return 1 / (self.tau * torch.where(spread, sigma, 0.0).clamp_min(gamma))
        if self.variant == "affine":
            return torch.where(spread, context.learned["w"] / (self.tau * sigma), 0.0)
        return torch.where(spread, 1 / (self.tau * sigma.clamp_max(gamma)), 0.0)


class LogitNorm(AdaptiveSoftmax, name="logit_norm"):
    """softmax(x / (tau ||x||_2)), x = q.k unscaled. (NormSoftmax, eq. 8)"""

    tau: PositiveFloat | Literal["rsqrt_n"] = Field(
        "rsqrt_n", description="Temperature; rsqrt_n: n^(-1/2)."
    )

    def inverse_temperature(self, mean: Tensor, var: Tensor, context: RowContext) -> Tensor:
        square = context.n * (var + mean.square())  # ||x||^2
        nonzero = square > torch.finfo(var.dtype).tiny
        norm = torch.where(nonzero, square, 1.0).sqrt()
        tau = self.tau if isinstance(self.tau, float) else context.n**-0.5
        return torch.where(nonzero, 1 / (norm * tau), 0.0)


def score_moments(q: Tensor, k: Tensor, context: RowContext) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each row's visible scores q.k, in O(T) memory.

    var = q' Cov(k) q over the visible keys: prefix sums of the chunks' means and covariances,
    merged by Chan's formula, plus the row's own chunk directly. (E[x^2] - E[x]^2 would lose all
    digits when keys share a mean.) Relative error about eps r^2, where keys vary r times as much in
    a direction that the queries ignore as in those that matter.

    q, k: (B, H, T, D) in at least float32, to (B, H, T, 1) each. Directly with fewer queries than
    keys (decoding) or at most CHUNK keys.
    """
    if q.shape[-2] < k.shape[-2] or k.shape[-2] <= CHUNK:
        return context.moments(q @ k.mT)
    length = q.shape[-2]
    n_chunks = math.ceil(length / CHUNK)
    pad = (0, 0, 0, n_chunks * CHUNK - length)
    q = F.pad(q, pad).unflatten(-2, (n_chunks, CHUNK))  # (B, H, C, c, D)
    k = F.pad(k, pad).unflatten(-2, (n_chunks, CHUNK))

    # All keys before the row's chunk: n_a keys with mean score mean_a and variance var_a.
    k_mean, k_scatter, n_a = _prefix_moments(k)
    mean_a = q @ k_mean[..., None]  # (B, H, C, c, 1)
    var_a = ((q @ k_scatter) * q).sum(-1, keepdim=True) / n_a.clamp_min(1)
    # The row's own chunk up to itself: n_b keys.
    # the first chunk's, and so each chunk's
    own = context.block(slice(None), slice(CHUNK), slice(CHUNK))
    mean_b, var_b = own.moments(q @ k.mT)
    n_b = own.n  # (c, 1)

    n = n_a + n_b
    delta = mean_b - mean_a
    mean = mean_a + delta * n_b / n
    var = (n_a * var_a + n_b * var_b + delta.square() * n_a * n_b / n) / n
    return mean.flatten(2, 3)[:, :, :length], var.flatten(2, 3)[:, :, :length]


def _prefix_moments(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all keys before each chunk: their mean (B, H, C, D), scatter (B, H, C, D, D), count (C, 1,
    1).

    Prefixes are shifted, never `cumsum - own`: that leaks the own chunk through its rounding.
    """
    n_chunks, chunk = k.shape[-3:-1]
    before = torch.arange(n_chunks, dtype=k.dtype, device=k.device)[:, None] * chunk  # (C, 1)
    sums = k.sum(-2)  # (B, H, C, D)
    mean = _exclusive_cumsum(sums) / before.clamp_min(1)
    own_mean = sums / chunk
    centred = k - own_mean[..., None, :]
    shift = own_mean - mean
    weight = (before * chunk / (before + chunk))[..., None]  # (C, 1, 1)
    scatter = centred.mT @ centred + weight * shift[..., :, None] * shift[..., None, :]
    return mean, _exclusive_cumsum(scatter), before[..., None]


def _exclusive_cumsum(t: Tensor) -> Tensor:
    """Over the chunks, axis 2."""
    return torch.cat([torch.zeros_like(t[:, :, :1]), t[:, :, :-1].cumsum(2)], 2)
