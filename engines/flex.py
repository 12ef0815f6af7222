"""The flex engine: a softmax of scores that depend on the distance, by FlexAttention, on CUDA.

    softmax(at_distance(factor * q.k, t)) v,   t: distance of the key

`factor` is multiplied into q, as the sdpa engine does. score_mod is the normaliser's own
`at_distance`, as of scale_invariant. `auto` takes it only after a comparison with the definition on
the GPU (`self_check`). Under `auto` a softmax with ALiBi alone goes to sdpa. A `key_decay` does not
run here.
"""

from functools import lru_cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from normalisers.base import RowContext
from normalisers.layer import NormaliserLayer

BLOCK = 128  # of queries and of keys: blocks after the queries are skipped
# Beyond its limit of 8 graphs torch runs FlexAttention unfused, silently; with fullgraph it raises.
# One graph serves all lengths and layers, but not those with and without gradients, nor a batch of
# 1.
GRAPHS = 64
compiled_attention = torch.compile(flex_attention, dynamic=True, fullgraph=True)
# Numbers of the formula are constants of its graph: kernels cannot take them as arguments. One
# patch for all calls: torch keeps a little of each.
PATCH = torch._dynamo.config.patch(recompile_limit=GRAPHS, specialize_float=True)


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there; "" if it can."""
    definition = layer.definition
    is_softmax = definition.form == "softmax" and not definition.adaptive
    if not (is_softmax and layer.by_distance) or layer.decays:
        return f"{layer.label} is not a softmax of scores that depend on the distance alone"
    if layer.reweight_p:
        return f"{layer.label} re-weights its softmax"
    if device.type != "cuda":  # where FlexAttention has no backward pass
        return f"needs a CUDA device, found {device.type}"
    if dtype == torch.float64:
        return "does not compute in float64"
    return ""


def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` for a softmax by distance; (B, H, Tq, D) in v's type."""
    q, k = layer.prepare(q, k, context, v.dtype)
    return run_prepared(q, k, v, layer, context)


@torch.compiler.disable  # a compiled model then runs the graphs that the self-check has tested
def run_prepared(
    q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext
) -> Tensor:
    """`run` for q and k whose products are the scores before `at_distance`."""
    mask, first = causal_mask(q.shape[-2], context.n_keys, v.device, layer.window)

    def score_mod(x: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return layer.at_distance(x, (i + first - j).clamp_min(0).to(x.dtype), head)

    attention = compiled_attention if q.is_cuda else flex_attention
    grouped = q.shape[1] != k.shape[1]
    # torch's kernel for few queries does not compile for a varying number of them
    options: Any = {"BACKEND": "TRITON"}
    with PATCH:
        return attention(
            q, k, v, score_mod, mask, scale=1.0, enable_gqa=grouped, kernel_options=options
        )


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # an evaluation may be the first caller, and training the next
def causal_mask(
    n_queries: int, n_keys: int, device: torch.device, window: int
) -> tuple[BlockMask, Tensor]:
    """The blocks of keys that each block of queries sees, and the first query's position.

    `create_block_mask` would hold a (Tq, Tk) tensor.
    """
    # A tensor: of the numbers that change, a graph for dynamic shapes takes no others.
    first = torch.full((), n_keys - n_queries, device=device, dtype=torch.int32)
    reach = torch.full((), window or n_keys, device=device, dtype=torch.int32)
    query = torch.arange(0, n_queries, BLOCK, device=device)[:, None]  # the first of each block
    key = torch.arange(0, n_keys, BLOCK, device=device)
    start = first + query  # among the keys
    seen = (key < (start + BLOCK).clamp_max(n_keys)) & (key + BLOCK > start - reach + 1)
    # By every row of a whole block: such blocks of keys need no mask_mod.
    full = (
        (key + BLOCK <= start + 1) & (key >= start + BLOCK - reach) & (query + BLOCK <= n_queries)
    )
    mask = BlockMask.from_kv_blocks(
        *list_blocks(seen & ~full),
        *list_blocks(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, i, j: (i + first >= j) & (i + first - j < reach),
        seq_lengths=(n_queries, n_keys),
    )
    return mask, first


def list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row's true blocks (rows, blocks) their number and, first in a list of all, which they
    are.
    """
    which = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1)[None, None].int(), which[None, None].int()
