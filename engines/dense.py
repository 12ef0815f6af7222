"""The dense engine: the definition, with the whole (Tq, Tk) matrix in memory. For tests and diagnostics."""

from __future__ import annotations

from torch import Tensor

from normalisers.layer import NormaliserModule, share_heads


def run(q: Tensor, k: Tensor, v: Tensor, normaliser: NormaliserModule, cached: bool = False) -> Tensor:
    """`attention.attend` by definition; (B, H, Tq, D) in v's type."""
    weights = normaliser.weights(q, k, cached)
    return (weights @ share_heads(v, q).to(weights.dtype)).to(v.dtype)
