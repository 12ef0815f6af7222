"""The sdpa engine: a softmax over rescaled queries, by F.scaled_dot_product_attention.

    softmax(factor * q.k) v = sdpa(factor * q, k, v),   factor: a number, by row, or by row and head

The factor of NormSoftmax and LogitNorm depends on the scores. `AdaptiveSoftmax.fused_factor` computes it in
linear time.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normalisers.adaptive import AdaptiveSoftmax
from normalisers.layer import NormaliserLayer

# torch 2.11 prefers cuDNN on Hopper and Blackwell, which builds a plan for each new number of keys: tens of
# milliseconds a token when decoding. These do not.
DECODERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there; "" if it can."""
    if not layer.definition.is_softmax:
        return f"{layer.label} is not a softmax over rescaled queries"
    if layer.reweight_p:
        return f"{layer.label} re-weights its softmax"
    if layer.by_distance:
        return f"{layer.label} has scores that depend on the distance"
    return ""


def run(
    q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, cached: bool = False, p: int | None = None
) -> Tensor:
    """`attention.attend` for a softmax; (B, H, Tq, D) in v's type."""
    n_queries = q.shape[-2]
    n_keys = k.shape[-2]
    definition = layer.definition
    context = layer.context(q, k, p)
    scale = definition.factor(context)
    is_plain = definition.scores == "dot" and not isinstance(definition, AdaptiveSoftmax)
    if not (is_plain and isinstance(scale, float)):
        q, k = layer.prepare(q, k, context, cached, v.dtype)
        scale = 1.0
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    mask = None
    if 1 < n_queries < n_keys:  # is_causal would align the queries with the first keys
        mask = context.visible(k.mT)
    # Not the bare comparison: under torch.compile it is symbolic, and is_causal must be a plain bool.
    causal = True if n_queries == n_keys and n_queries > 1 else False  # noqa: SIM210
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(DECODERS) if q.is_cuda and n_queries < n_keys else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
