"""The flex engine: attention whose weights are a softmax of changed scores, by FlexAttention, on CUDA.

    softmax(f(factor * q.k, place)) v

`factor` is multiplied into q, as the sdpa engine does. f, FlexAttention's score_mod, is the layer's
own `at_distance` (scale_invariant, ALiBi), P_i - P_j of a `key_decay`, and for a positive phi with
l1 its logarithm: the softmax of log phi(x) is phi(x) / sum phi(x). (So does attention-gym.)

Documents and windows are the mask: a row sees the keys from its first to its own, and blocks of keys
that no row of a block sees are skipped. `auto` takes the engine only after a comparison with the
definition on the GPU (`self_check`), and a softmax goes to sdpa where there are no documents.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from normalisers.base import RowContext
from normalisers.family import PHI, SIGNED, Phi, softplus
from normalisers.layer import NormaliserLayer, first_keys

BLOCK = 128  # of queries and of keys
# Beyond its limit of 8 graphs torch runs FlexAttention unfused, silently; with fullgraph it raises.
# One graph serves all lengths and layers, but not those with and without gradients, nor a batch of
# 1.
GRAPHS = 64
compiled_attention = torch.compile(flex_attention, dynamic=True, fullgraph=True)
# Numbers of the formula are constants of its graph: kernels cannot take them as arguments. One
# patch for all calls: torch keeps a little of each.
PATCH = torch._dynamo.config.patch(recompile_limit=GRAPHS, specialize_float=True)
# Below it softplus(x) and sigmoid(x) are e^x to the last digit.
LOW = -40.0

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there; "" if it can."""
    definition = layer.definition
    has_log = definition.form == "phi" and cast(Phi, definition).l1
    is_softmax = definition.form == "softmax" and not definition.adaptive
    if has_log and cast(Phi, definition).phi in SIGNED:
        return f"{layer.label} has weights below zero, which are no softmax"
    if not (is_softmax or has_log):
        return f"{layer.label} is not a softmax of scores or of a phi with l1"
    if layer.reweight_p:
        return f"{layer.label} re-weights its rows"
    if device.type != "cuda":  # where FlexAttention has no backward pass
        return f"needs a CUDA device, found {device.type}"
    if dtype == torch.float64:
        return "does not compute in float64"
    return ""


def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` by FlexAttention; (B, H, Tq, D) in v's type."""
    q, k = layer.prepare(q, k, context, v.dtype)
    return run_prepared(q, k, v, layer, context)


@torch.compiler.disable  # a compiled model then runs the graphs that the self-check has tested
def run_prepared(
    q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext
) -> Tensor:
    """`run` for q and k whose products are the scores before `at_distance`."""
    n_keys = k.shape[-2]
    if context.first is None:
        mask, offset = causal_mask(q.shape[-2], n_keys, v.device, layer.window)
    else:
        first = context.first_seen.clamp_min(0)  # (B, 1, Tq, 1)
        mask, offset = block_mask(first[:, 0, :, 0].int(), n_keys)
    attention = compiled_attention if q.is_cuda else flex_attention
    grouped = q.shape[1] != k.shape[1]
    # torch's kernel for few queries does not compile for a varying number of them
    options: Any = {"BACKEND": "TRITON"}
    mod = score_mod(layer, context, offset, q)
    with PATCH:
        return attention(q, k, v, mod, mask, scale=1.0, enable_gqa=grouped, kernel_options=options)


def score_mod(layer: NormaliserLayer, context: RowContext, offset: Tensor, q: Tensor) -> Mod | None:
    """What changes the scores of queries q, the first of which is key `offset`; None: nothing."""
    decay = None
    if context.decay is not None:
        # counted from the document's first key, so that float32 has the digits of P_i - P_j
        start = first_keys(context.decay.detach(), context)
        centred = context.decay - start
        decay = centred.squeeze(-1).to(torch.promote_types(q.dtype, torch.float32))  # (B, H, Tk)
    shift = None
    log_phi = None
    if layer.definition.form == "phi":
        formula = cast(Phi, layer.definition)
        shift = formula.shift(context)
        log_phi = LOG_PHI[formula.phi]
    if shift is not None:
        rows = (context.n * 0 + shift).squeeze(-1)  # (B, 1, Tq) or (Tq,)
        shift = rows.reshape(-1, q.shape[-2]).expand(len(q), -1)
    if decay is None and log_phi is None and not layer.by_distance:
        return None

    def mod(x: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if decay is not None:
            x = x + (decay[batch, head, i + offset] - decay[batch, head, j])
        if layer.by_distance:
            x = layer.at_distance(x, (i + offset - j).clamp_min(0).to(x.dtype), head)
        if shift is not None:
            x = x + shift[batch, i]
        return x if log_phi is None else log_phi(x)

    return mod


def log_softplus(x: Tensor) -> Tensor:
    return torch.where(x < LOW, x, softplus(x.clamp_min(LOW)).log())


def log_positive(phi: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Of a phi that is 0 up to x = 0: -inf there, without a NaN in its gradient."""

    def log_phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, phi(torch.where(x > 0, x, 1.0)).log(), -torch.inf)

    return log_phi


LOG_PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": log_softplus,
    "sigmoid": lambda x: -softplus(-x),
    **{name: log_positive(PHI[name]) for name in ("relu", "relu2", "relu6")},
}


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # an evaluation may be the first caller, and training the next
def causal_mask(
    n_queries: int, n_keys: int, device: torch.device, window: int
) -> tuple[BlockMask, Tensor]:
    """`block_mask` of rows that see all keys before them, or the last `window`."""
    place = torch.arange(n_keys - n_queries, n_keys, device=device, dtype=torch.int32)
    first = (place - (window or n_keys) + 1).clamp_min(0)
    return block_mask(first[None], n_keys)


def block_mask(first: Tensor, n_keys: int) -> tuple[BlockMask, Tensor]:
    """The blocks of keys that each block of rows sees, and which key is the first row's own.

    first: (B or 1, Tq), the first key that each row sees, which never falls from row to row.
    `create_block_mask` would hold a (Tq, Tk) tensor.
    """
    n_queries = first.shape[-1]
    # A tensor: of the numbers that change, a graph for dynamic shapes takes no others.
    offset = torch.full((), n_keys - n_queries, device=first.device, dtype=torch.int32)
    query = torch.arange(0, n_queries, BLOCK, device=first.device)  # the first of each block
    key = torch.arange(0, n_keys, BLOCK, device=first.device)
    lowest = first[:, query, None]  # (B, blocks of queries, 1)
    highest = first[:, (query + BLOCK - 1).clamp_max(n_queries - 1), None]
    query = query[:, None]
    start = offset + query
    seen = (key < (start + BLOCK).clamp_max(n_keys)) & (key + BLOCK > lowest)
    # By every row of a whole block: such blocks of keys need no mask_mod.
    full = (key + BLOCK <= start + 1) & (key >= highest) & (query + BLOCK <= n_queries)
    firsts = first[0] if len(first) == 1 else first

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row_first = firsts[i] if firsts.ndim == 1 else firsts[batch, i]
        return (i + offset >= j) & (row_first <= j)

    mask = BlockMask.from_kv_blocks(
        *list_blocks(seen & ~full),
        *list_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(n_queries, n_keys),
    )
    return mask, offset


def list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row's true blocks (B, rows, blocks) their number and, first in a list of all, which
    they are; both with an axis of heads.
    """
    which = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1)[:, None].int(), which[:, None].int()
