"""The sdpa engine: a softmax over rescaled queries, by F.scaled_dot_product_attention.

    softmax(factor * q.k) v = sdpa(factor * q, k, v),   factor: a number, by row, or by row and head

For NormSoftmax and LogitNorm the factor depends on the scores; `score_moments` gives it in linear time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normalisers.base import RowContext
from normalisers.layer import NormaliserModule, share_heads

CHUNK = 64  # keys whose moments are merged at once


def run(q: Tensor, k: Tensor, v: Tensor, normaliser: NormaliserModule, cached: bool = False) -> Tensor:
    """`attention.attend` for normalisers with `is_rescaled_softmax` and no re-weighting."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    definition, context = normaliser.definition, normaliser.context(q, k)
    scale = definition.factor(context)
    if definition.scores == "cosine" or definition.adaptive or not isinstance(scale, float):
        scale, (q, k, _) = 1.0, rescale(q, k, v, normaliser, cached)
    q, k = q.to(v.dtype), k.to(v.dtype)
    mask = None
    if 1 < n_queries < n_keys:  # is_causal would align the queries with the first keys
        mask = context.visible(k.mT)
    # Not the bare comparison: under torch.compile it is symbolic, and is_causal must be a plain bool.
    causal = True if n_queries == n_keys and n_queries > 1 else False  # noqa: SIM210
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def rescale(
    q: Tensor, k: Tensor, v: Tensor, normaliser: NormaliserModule, cached: bool = False, unit: float = 1.0
) -> tuple[Tensor, Tensor, RowContext]:
    """q and k in v's type, whose products are `unit` times the scores, and their `RowContext`."""
    definition, context, given = normaliser.definition, normaliser.context(q, k), k
    q, k = normaliser.as_float(q, k, cached)
    factor: Any = definition.factor(context)
    if definition.adaptive:
        q = q * factor
        moments = score_moments(q, share_heads(k.to(q.dtype), q), context)
        factor = definition.inverse_temperature(*moments, context)
        if definition.scores == "dot" and v.element_size() == 2:
            k = given  # centred keys would be rounded once more; a softmax does not see the shift
    return (q * (factor * unit)).to(v.dtype), k.to(v.dtype), context


def score_moments(q: Tensor, k: Tensor, context: RowContext) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each row's visible scores q.k, in O(T) memory.

    var = q' Cov(k) q over the visible keys: prefix sums of the chunks' means and covariances, merged
    by Chan's formula, plus the row's own chunk directly. (E[x^2] - E[x]^2 would lose all digits when
    keys share a mean.) Relative error about eps r^2, where keys vary r times as much in a direction that the
    queries ignore as in those that matter.

    Args:
        q, k: (B, H, T, D) float32 or float64. With fewer queries than keys (decoding) or at most CHUNK keys,
            the scores are computed directly.
    Returns:
        mean, var: each (B, H, T, 1).
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
    mean_a = (q @ k_mean[..., None]).squeeze(-1)  # (B, H, C, c)
    var_a = ((q @ k_scatter) * q).sum(-1) / n_a.clamp_min(1)
    # The row's own chunk up to itself: n_b keys.
    x = q @ k.mT  # (B, H, C, c, c)
    own = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    n_b = torch.arange(1, CHUNK + 1, dtype=q.dtype, device=q.device)  # (c,)
    mean_b = torch.where(own, x, 0.0).sum(-1) / n_b
    var_b = torch.where(own, x - mean_b[..., None], 0.0).square().sum(-1) / n_b

    n = n_a + n_b
    delta = mean_b - mean_a
    mean = mean_a + delta * n_b / n
    var = (n_a * var_a + n_b * var_b + delta.square() * n_a * n_b / n) / n
    return mean.flatten(-2)[..., :length, None], var.flatten(-2)[..., :length, None]


def _prefix_moments(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all keys before each chunk: their mean (B, H, C, D), scatter (B, H, C, D, D), count (C, 1).

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
