"""The sdpa engine: a softmax over rescaled queries, by F.scaled_dot_product_attention.

    softmax(factor * q.k) v = sdpa(factor * q, k, v),   factor: a number, by row, or by row and head

The factor of NormSoftmax and LogitNorm depends on the scores. `AdaptiveSoftmax.fused_factor`
computes it in linear time. In 16 bits NormSoftmax's first rows follow the definition, see
`Normaliser.exact_rows`. A window W is computed in blocks of W queries, each with its 2 W keys. A bias P_i -
P_j, of FoX or ALiBi, is eight channels more of q and k, see `append_decay`. Documents are computed
one by one on CPUs, those of an adaptive softmax by the rows engine.
"""

from contextlib import nullcontext
from typing import Any

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
DECAY_QUERIES = 1024  # whose P are counted from one number: within them P falls little


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
    if context.first is not None and (definition.adaptive or q.is_cuda):
        from engines import rows  # which loads torch's compiler

        return rows.run(q, k, v, layer, context)
    k, v, context = layer.cut(k, v, context)
    n_queries = q.shape[-2]
    n_keys = k.shape[-2]
    scale = definition.factor(context)
    first_rows = None
    if definition.exact_rows and v.dtype.itemsize == 2 and n_queries == n_keys:
        few = slice(0, definition.exact_rows)
        first = context.block(slice(None), few, few)
        first_rows = dense.run(q[:, :, few], k[:, :, few], v[:, :, few], layer, first)
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
        k = share_heads(k, q)
        v = share_heads(v, q)
    if n_queries == n_keys and 0 < layer.window < n_keys:
        return run_windows(q, k, v, context, layer.window, scale, decay)
    if decay is not None:
        return run_decay(q, k, v, context, scale, decay)
    out = attend_causally(q, k, v, context, scale)
    if first_rows is None:
        return out
    return torch.cat((first_rows, out[:, :, definition.exact_rows :]), dim=2)


def attend_causally(
    q: Tensor, k: Tensor, v: Tensor, context: RowContext, scale: float = 1.0
) -> Tensor:
    """softmax(scale q.k) v for queries that are the last of the keys; (B, H, Tq, size of v)."""
    if context.first is not None:
        from engines.documents import attend_documents

        size = v.shape[-1]
        return attend_documents(q, k, widen(v, q), context, scale)[..., :size]
    n_queries = q.shape[-2]
    n_keys = k.shape[-2]
    mask = None
    if 1 < n_queries < n_keys:  # is_causal would align the queries with the first keys
        mask = context.visible(k.mT)
    # Not the bare comparison: under torch.compile it is symbolic, and is_causal must be a plain
    # bool.
    causal = True if n_queries == n_keys and n_queries > 1 else False  # noqa: SIM210
    with sdpa_kernel(DECODERS) if q.is_cuda and n_queries < n_keys else nullcontext():
        return call_sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def call_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The kernel, whose queries, keys and values have one size: v may have less channels."""
    size = v.shape[-1]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, widen(v, q), enable_gqa=grouped, **options)
    return out[..., :size]


def widen(v: Tensor, q: Tensor) -> Tensor:
    """v with channels of zeros up to q's size."""
    n_more = q.shape[-1] - v.shape[-1]
    return F.pad(v, (0, n_more)) if n_more else v


def run_decay(
    q: Tensor, k: Tensor, v: Tensor, context: RowContext, scale: float, decay: Tensor
) -> Tensor:
    """`attend_causally` for scores q.k + P_i - P_j, P = `decay`, in blocks of queries.

    In one block float32 would lose the digits of P_i - P_j to P itself, which grows with the length.
    """
    dtype = v.dtype
    n_before = k.shape[-2] - q.shape[-2]
    wide = torch.promote_types(dtype, torch.float32)  # in which gradients of the blocks are added
    k = k.to(wide)
    v = v.to(wide)
    blocks = []
    for start in range(0, q.shape[-2], DECAY_QUERIES):
        rows = slice(start, min(start + DECAY_QUERIES, q.shape[-2]))
        keys = slice(0, n_before + rows.stop)
        block_context = context.block(slice(None), rows, keys)
        parts = append_decay(q[:, :, rows], k[:, :, keys].to(dtype), decay[:, :, keys])
        blocks.append(attend_causally(*parts, v[:, :, keys].to(dtype), block_context, scale))
    return torch.cat(blocks, dim=2)


def append_decay(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (..., T, D + 8) whose products are q.k + P_i - P_j, P = `decay` (..., Tk, 1) float64.

    P counts from that of the first query, so that near keys have small numbers. Far ones, whose
    digits are lost, have a weight only where P hardly falls.

    The gradient of a gate is that of P summed over all later tokens, with the rounding of dq and
    dk. It is averaged over four channels, each rounded after another factor. P's gradient sums to
    zero over T. So its mean, which is rounding, is taken out.
    """
    units = decay.new_tensor(UNITS)
    centred = decay - decay.mean(-2, keepdim=True)
    gradient = (centred - centred.detach()) / (len(UNITS) * units)  # zeros
    n_before = k.shape[-2] - q.shape[-2]
    queries = slice(n_before, None)
    near = decay.detach() - decay.detach()[..., n_before : n_before + 1, :]
    decay_parts = split(near, q.dtype) + gradient.to(q.dtype)  # (..., Tk, 4)
    unit_parts = units.to(q.dtype).expand_as(decay_parts)
    q = torch.cat((q, decay_parts[..., queries, :], unit_parts[..., queries, :]), dim=-1)
    return q, torch.cat((k, unit_parts, -decay_parts), dim=-1)


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


def run_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: RowContext,
    window: int,
    scale: float,
    decay: Tensor | None,
) -> Tensor:
    """softmax(scale q.k) v over the last `window` keys of each query, as many queries as keys.

    A block of `window` queries sees its own keys and those of the block before it, whatever the
    length. With `decay` P_i - P_j is added to the scores.
    """
    length = q.shape[-2]
    n = -(-length // window)  # blocks

    def in_blocks(t: Tensor) -> Tensor:  # (B, H, blocks, W, D)
        return F.pad(t, (0, 0, 0, n * window - length)).unflatten(-2, (n, window))

    def with_block_before(t: Tensor) -> Tensor:  # (B, H, blocks - 1, 2 W, D)
        return torch.cat((t[:, :, :-1], t[:, :, 1:]), dim=-2)

    q, k, v = in_blocks(q), in_blocks(k), in_blocks(v)
    first_q, first_k, first_v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    q, k, v = q[:, :, 1:], with_block_before(k), with_block_before(v)
    if decay is not None:
        # what is padded has the last token's
        decay = in_blocks(decay - decay[:, :, -1:].detach())
        first_q, first_k = append_decay(first_q, first_k, decay[:, :, 0])
        q, k = append_decay(q, k, with_block_before(decay))
    places = torch.arange(window, device=q.device)[:, None]
    keys = torch.arange(2 * window, device=q.device)
    first_seen = places + 1
    options: dict[str, Any] = {"is_causal": True}
    if context.first is not None:
        sees = F.pad(context.n, (0, 0, 0, n * window - length), value=1.0)
        sees = sees.unflatten(-2, (n, window)).transpose(1, 2)  # (B, blocks, 1, W, 1)
        causal = (keys[:window] <= places) & (keys[:window] > places - sees[:, 0])
        options = {"attn_mask": causal}
        first_seen = places + window + 1 - sees[:, 1:].flatten(0, 1)
    first = call_sdpa(first_q, first_k, first_v, scale=scale, **options)
    visible = (keys >= first_seen) & (keys <= places + window)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    rest = call_sdpa(q, k, v, attn_mask=visible, scale=scale)
    rest = rest.unflatten(0, (len(first), n - 1)).transpose(1, 2)  # (B, H, blocks - 1, W, D)
    return torch.cat((first[:, :, None], rest), dim=2).flatten(2, 3)[:, :, :length]
