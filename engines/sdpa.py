"""The sdpa engine: a softmax over rescaled queries, by F.scaled_dot_product_attention.

    softmax(factor * q.k) v = sdpa(factor * q, k, v),   factor: a number, by row, or by row and head

The factor of NormSoftmax and LogitNorm depends on the scores. `AdaptiveSoftmax.fused_factor`
computes it in linear time. In 16 bits NormSoftmax's first rows follow the definition, see
`Normaliser.exact_rows`. A window W is computed in blocks of W queries, each with its 2 W keys. A bias P_i -
P_j, of FoX or ALiBi, is eight channels more of q and k, see `append_decay`.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines import dense
from normalisers.base import RowContext, share_heads
from normalisers.layer import NormaliserLayer
from positions import alibi, operator_library

# torch 2.11 prefers cuDNN on Hopper and Blackwell, which builds a plan for each new number of keys:
# tens of milliseconds a token when decoding. These do not.
DECODERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# The factors of the channels of `append_decay`. P / 64 fits into float16 down to P = -4 million.
UNITS = (64.0, 80.0, 96.0, 112.0)


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there; "" if it can."""
    if layer.definition.form != "softmax":
        return f"{layer.label} is not a softmax over rescaled queries"
    if layer.reweight_p:
        return f"{layer.label} re-weights its softmax"
    by_place = layer.by_distance or layer.decays
    if layer.definition.adaptive and (layer.window or by_place):
        return f"{layer.label} has moments of all its scores, which a window or a bias changes"
    is_alibi = layer.position == "alibi" and "at_distance" not in layer.definition.own_methods
    if layer.by_distance and not is_alibi:
        return f"{layer.label} has scores that depend on where the keys are"
    return ""


def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` for a softmax; (B, H, Tq, D) in v's type."""
    definition = layer.definition
    head_dim = v.shape[-1]
    k, v, context = layer.cut(q, k, v, context)
    n_queries = q.shape[-2]
    n_keys = k.shape[-2]
    scale = definition.factor(context)
    first_rows = None
    if definition.exact_rows and v.dtype.itemsize == 2 and n_queries == n_keys:
        rows = slice(0, definition.exact_rows)
        first = context.block(slice(None), rows, rows)
        first_rows = dense.run(q[:, :, rows], k[:, :, rows], v[:, :, rows], layer, first)
    decay = context.decay
    if layer.position == "alibi":  # -m_h (i - j)
        heads = torch.arange(layer.n_head, device=q.device)[None, :, None, None]
        places = torch.arange(n_keys, dtype=torch.float64, device=q.device)[:, None]
        bias = alibi(places, heads, layer.n_head).expand(len(q), -1, -1, -1)  # (B, H, Tk, 1)
        decay = bias if decay is None else decay + bias
    is_plain = definition.scores == "dot" and not definition.adaptive and decay is None
    if not (is_plain and isinstance(scale, float)):
        q, k = layer.prepare(q, k, context, v.dtype)
        scale = 1.0
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    if decay is not None:
        q, k = append_decay(q, share_heads(k, q), decay)
        v = share_heads(v, q)
    if q.shape[-1] > head_dim:  # flash attention has one head size
        v = F.pad(v, (0, q.shape[-1] - head_dim))
    grouped = q.shape[1] != k.shape[1]
    if n_queries == n_keys and 0 < layer.window < n_keys:
        return run_blocks(q, k, v, layer.window, scale)[..., :head_dim]
    mask = None
    if 1 < n_queries < n_keys:  # is_causal would align the queries with the first keys
        mask = context.visible(k.mT)
    # Not the bare comparison: under torch.compile it is symbolic, and is_causal must be a plain
    # bool.
    causal = True if n_queries == n_keys and n_queries > 1 else False  # noqa: SIM210
    with sdpa_kernel(DECODERS) if q.is_cuda and n_queries < n_keys else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    out = out[..., :head_dim]
    return (
        out
        if first_rows is None
        else torch.cat((first_rows, out[:, :, definition.exact_rows :]), dim=2)
    )


def append_decay(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (B, H, T, D + 8) whose products are q.k + P_i - P_j, P = `decay` (B, H, Tk, 1)
    float64.

    The gradient of a gate is that of P summed over all later tokens, with the rounding of dq and
    dk. It is averaged over four channels, each rounded after another factor. P's gradient sums to
    zero over T. So its mean, which is rounding, is taken out.
    """
    units = decay.new_tensor(UNITS)
    centred = decay - decay.mean(-2, keepdim=True)
    gradient = (centred - centred.detach()) / (len(UNITS) * units)  # zeros
    of_keys = split(decay.detach(), q.dtype) + gradient.to(q.dtype)  # (B, H, Tk, 4)
    of_all = units.to(q.dtype).expand_as(of_keys)
    queries = slice(k.shape[-2] - q.shape[-2], None)
    q = torch.cat((q, of_keys[:, :, queries], of_all[:, :, queries]), dim=-1)
    return q, torch.cat((k, of_all, -of_keys), dim=-1)


# An operator of its own: compiled, the rounding to 16 bits and back would be left out.
@torch.library.custom_op(f"{operator_library(__name__)}::split", mutates_args=())
def split(decay: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., 4) whose products with UNITS sum to decay (..., 1): 32 bits in bfloat16."""
    rest = decay
    parts = []
    for unit in UNITS:
        part = (rest / unit).to(dtype)
        parts.append(part)
        rest = rest - unit * part.to(rest.dtype)
    return torch.cat(parts, dim=-1)


@split.register_fake
def _(decay: Tensor, dtype: torch.dtype) -> Tensor:
    return decay.new_empty(*decay.shape[:-1], len(UNITS), dtype=dtype)


def run_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """softmax(scale q.k) v over the last `window` keys of each query, as many queries as keys.

    A block of `window` queries sees its own keys and those of the block before it, whatever the
    length.
    """
    length = q.shape[-2]
    n = -(-length // window)  # blocks
    q, k, v = (
        F.pad(t, (0, 0, 0, n * window - length)).unflatten(-2, (n, window)) for t in (q, k, v)
    )
    grouped = q.shape[1] != k.shape[1]  # (B, H, blocks, W, D)
    first = F.scaled_dot_product_attention(
        q[:, :, 0], k[:, :, 0], v[:, :, 0], is_causal=True, scale=scale, enable_gqa=grouped
    )
    # (B, H, blocks - 1, 2 W, D)
    k, v = (torch.cat((t[:, :, :-1], t[:, :, 1:]), dim=-2) for t in (k, v))
    rows = torch.arange(window, device=q.device)[:, None]
    keys = torch.arange(2 * window, device=q.device)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q[:, :, 1:], k, v))
    visible = (keys > rows) & (keys <= rows + window)
    rest = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped
    )
    rest = rest.unflatten(0, (len(first), n - 1)).transpose(1, 2)  # (B, H, blocks - 1, W, D)
    return torch.cat((first[:, :, None], rest), dim=2).flatten(2, 3)[:, :, :length]
