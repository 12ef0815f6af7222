"""The stick_breaking engine: stick-breaking attention by its authors' Triton kernels, where installed.

    pip install git+https://github.com/shawntan/stickbreaking-attention

The package has no releases. Its commit 3147a38 was run in Triton's interpreter, with torch for its assembly.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from normalisers.base import RowContext, share_heads
from normalisers.layer import NormaliserLayer
from normalisers.others import StickBreaking


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there; "" if it can."""
    if not isinstance(layer.definition, StickBreaking):
        return f"{layer.label} is not stick-breaking"
    if layer.reweight_p or layer.by_place or layer.window:
        return f"{layer.label} re-weights, has a window, or its scores depend on the distance"
    if layer.position == "pope":
        return f"{layer.label} has pope's heads, which are wider in q and k than in v"
    if device.type != "cuda":
        return f"needs a CUDA device, found {device.type}"
    if torch.are_deterministic_algorithms_enabled():
        return "adds up the gradients of keys and values in any order"
    if dtype != torch.bfloat16:  # its gradients of keys and values
        return f"computes in bfloat16, not in {dtype}"
    if not find_spec("stickbreaking_attention"):
        return "needs stickbreaking-attention from github.com/shawntan, which is not installed"
    return ""


def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` for stick-breaking; (B, H, Tq, D) in v's type."""
    q, k = layer.prepare(q, k, context, v.dtype)
    return run_prepared(q, k, v, context, layer)


@torch.compiler.disable
def run_prepared(q: Tensor, k: Tensor, v: Tensor, context: RowContext, layer: NormaliserLayer) -> Tensor:
    """`run` for q and k whose products are the scores."""
    from stickbreaking_attention import sb_attn

    n_queries = q.shape[-2]
    q = F.pad(q, (0, 0, context.n_keys - n_queries, 0))  # to as many as keys
    k = share_heads(k, q)
    v = share_heads(v, q)
    out, _ = sb_attn(q.contiguous(), k.contiguous(), v.contiguous(), inv_temp=1.0)
    return out[..., -n_queries:, :]
