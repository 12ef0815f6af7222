"""What the attention weights of a trained model look like, layer by layer and head by head.

    values = model_statistics(model, tokens, n_rows=128)        # (B, n_layer, n_head, len(STATISTICS))
    mass = attention_mass(model, token, rope, cache, where)     # (B, n_layer, n_head)

Of a row with weights A over its n visible keys, p = |A| / sum |A| (A itself, for a softmax). Everything is
computed from the normaliser's own definition, in blocks of rows: O(block * T) memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attention import Normaliser, Rows, l1_normalise, row_blocks
from model import GPT, UNSCALED, KVCache, RopeScaling

TINY = 2.0**-16
STATISTICS = {
    "score_std": "standard deviation of the scores, as the formula gets them, over the visible keys",
    "entropy": "entropy of p in nats",
    "relative_entropy": "entropy over ln n: 1 is a uniform row, 0 a row on one key",
    "effective_keys": "exp(entropy): so many keys, weighted alike, have the same entropy",
    "largest": "largest p",
    "first_token": "p of the first token, the attention sink",
    "tiny": "share of the visible keys with p < 2^-16",
}


@torch.no_grad()
def model_statistics(
    model: GPT, tokens: Tensor, rope: RopeScaling = UNSCALED, n_rows: int | None = None
) -> Tensor:
    """STATISTICS, as means over rows.

    Args:
        tokens: (B, T) int64.
        n_rows: so many of the last rows; None: all.
    Returns:
        (B, n_layer, n_head, len(STATISTICS)) float32.
    """
    cos, sin = model.rope(tokens.shape[1], rope)
    x = model.embedding(tokens)  # (B, T, C)
    layers = []
    for block in model.blocks:
        q, k, _ = block.attention.project(block.attention_norm(x), cos, sin)  # type: ignore[union-attr, operator]
        layers.append(layer_statistics(block.attention.normaliser, q[:, :, -(n_rows or 0) :], k))  # type: ignore[union-attr, arg-type]
        x = block(x, cos, sin)
    return torch.stack(layers, dim=1)


def layer_statistics(normaliser: Normaliser, q: Tensor, k: Tensor) -> Tensor:
    """(B, H, Tq, D) and (B, H, Tk, D) after RoPE, the last Tq positions, to (B, H, len(STATISTICS))."""
    with torch.autocast(q.device.type, enabled=False):
        q, k, rows = normaliser.prepare(q, k)
        total = q.new_zeros(*q.shape[:2], len(STATISTICS))
        for batch, block, keys in row_blocks(q, k):
            x = q[batch, :, block] @ k[batch, :, keys].mT  # (b, H, R, K)
            here = replace(rows, n=rows.n[block])
            weights = normaliser.rows_fn(x.masked_fill(~here.visible(x), -torch.inf), here)
            total[batch] += row_statistics(x, weights, here).sum(-2)
        return total / q.shape[-2]


def row_statistics(x: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Finite scores and weights (..., R, K) to STATISTICS, (..., R, len(STATISTICS)).

    A row without any weight has entropy 0 and 0 effective keys.
    """
    p = l1_normalise(weights.abs())
    entropy = -torch.xlogy(p, p).sum(-1)
    n = rows.n[:, 0]
    values = {
        "score_std": rows.moments(x)[1].sqrt().squeeze(-1),
        "entropy": entropy,
        "relative_entropy": entropy / n.clamp_min(2).log(),  # 0 for a row of one key
        "effective_keys": torch.where((p > 0).any(-1), entropy.exp(), 0.0),
        "largest": p.amax(-1),
        "first_token": p[..., 0],
        "tiny": (rows.visible(p) & (p < TINY)).sum(-1) / n,
    }
    return torch.stack([values[name] for name in STATISTICS], dim=-1)


@torch.no_grad()
def attention_mass(model: GPT, token: Tensor, rope: RopeScaling, cache: KVCache, where: Tensor) -> Tensor:
    """How much of p the next token's row gives to some keys, in each layer and head.

    Args:
        token: (B, 1) int64, what follows the cache's content; the cache is left as if it had not come.
        where: (B, n) bool, of the n = cache.length + 1 keys.
    Returns:
        (B, n_layer, n_head) float32.
    """
    cos, sin = model.rope(cache.length + 1, rope, cache.length)
    x = model.embedding(token)  # (B, 1, C)
    layers = []
    for i, block in enumerate(model.blocks):
        q, k, v = block.attention.project(block.attention_norm(x), cos, sin)  # type: ignore[union-attr, operator]
        keys, _ = cache.append(i, k, v)
        weights = block.attention.normaliser.weights(q, keys)[:, :, 0]  # type: ignore[union-attr, operator]
        p = l1_normalise(weights.abs())  # (B, H, n)
        layers.append((p * where[:, None]).sum(-1))
        x = block(x, cos, sin, cache)
    return torch.stack(layers, dim=1)
