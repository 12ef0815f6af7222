"""The dense engine: the definition, with the whole (Tq, Tk) matrix in memory. For tests and
diagnostics."""

import torch
from torch import Tensor

from normalisers.base import RowContext, share_heads
from normalisers.layer import NormaliserLayer


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there: it always can."""
    return ""


def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` by definition; (B, H, Tq, D) in v's type."""
    weights = layer.dense_weights(q, k, context)
    return (weights @ share_heads(v, q).to(weights.dtype)).to(v.dtype)
