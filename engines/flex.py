"""The flex engine: a softmax of scores that depend on the distance, by FlexAttention, on CUDA.

    softmax(at_distance(factor * q.k, t)) v,   t: distance of the key (ALiBi, scale_invariant)

`factor` is multiplied into q, as the sdpa engine does; score_mod is the normaliser's own `at_distance`.
Not yet run on a GPU: tests compare the eager form, with its gradients, and the C++ form with the definition;
`auto` takes it only after the same comparison on the GPU (`self_check`).
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engines.base import NormaliserModule
from engines.self_check import compare, relative_errors
from normalisers import RowContext

BLOCK = 128  # of queries and of keys: blocks after the queries are skipped
# Beyond its limit of 8 graphs torch runs FlexAttention unfused, silently; with fullgraph it raises. One graph
# serves all lengths and layers, but not those with and without gradients, nor a batch of 1.
GRAPHS = 64
compiled_attention = torch.compile(flex_attention, dynamic=True, fullgraph=True)


def run(q: Tensor, k: Tensor, v: Tensor, normaliser: NormaliserModule, cached: bool = False) -> Tensor:
    """`attention.attend` for normalisers with `has_flex`; (B, H, Tq, D) in v's type."""
    return run_prepared(*flex_inputs(q, k, v, normaliser, cached), v, normaliser)


def flex_inputs(
    q: Tensor, k: Tensor, v: Tensor, normaliser: NormaliserModule, cached: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k in v's type, whose products are the scores before `at_distance`."""
    factor = normaliser.definition.factor(normaliser.context(q, k))
    q, k = normaliser.as_float(q, k, cached)
    return (q * factor).to(v.dtype), k.to(v.dtype)


@torch.compiler.disable  # a compiled model then runs the graphs that the self-check has tested
def run_prepared(q: Tensor, k: Tensor, v: Tensor, normaliser: NormaliserModule) -> Tensor:
    mask, first = causal_mask(q.shape[-2], k.shape[-2], v.device)

    def score_mod(x: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return normaliser.at_distance(x, (i + first - j).clamp_min(0).to(x.dtype), head)

    attention, grouped = compiled_attention if q.is_cuda else flex_attention, q.shape[1] != k.shape[1]
    # Numbers of the formula are constants of its graph: kernels cannot take them as arguments.
    with torch._dynamo.config.patch(recompile_limit=GRAPHS, specialize_float=True):
        return attention(q, k, v, score_mod, mask, scale=1.0, enable_gqa=grouped)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # an evaluation may be the first caller, and training the next
def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> tuple[BlockMask, Tensor]:
    """The blocks of keys that each block of queries sees, and the first query's position.

    `create_block_mask` would hold a (Tq, Tk) tensor.
    """
    # A tensor: of the numbers that change, a graph for dynamic shapes takes no others.
    first = torch.full((), n_keys - n_queries, device=device, dtype=torch.int32)
    stop = (first + torch.arange(BLOCK, n_queries + BLOCK, BLOCK, device=device)).clamp_max(n_keys)
    seen = ((stop + BLOCK - 1) // BLOCK).int()
    n_blocks = (n_keys + BLOCK - 1) // BLOCK
    blocks = torch.arange(n_blocks, device=device, dtype=torch.int32).repeat(len(seen), 1)
    mask = BlockMask.from_kv_blocks(
        seen[None, None],
        blocks[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda batch, head, i, j: i + first >= j,
        seq_lengths=(n_queries, n_keys),
    )
    return mask, first


def engine_error(normaliser: NormaliserModule, device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative error of o, dq, dk, dv: all queries, and the last with one head of keys."""
    g, errors, n_head = torch.Generator().manual_seed(0), [], normaliser.n_head
    n_keys = min(200, normaliser.train_len)  # ssmax_pn has no p_n beyond
    for n_queries, n_kv_head in ((n_keys, n_head), (n_keys // 2 + 1, 1)):
        shapes = (n_head, n_queries), (n_head, n_queries), (n_kv_head, n_keys), (n_kv_head, n_keys)
        q, do, k, v = (torch.randn(1, *s, normaliser.head_dim, generator=g).to(device, dtype) for s in shapes)
        with torch.no_grad():
            q, k = flex_inputs(q, k, v, normaliser)

        def weights(x: Tensor, context: RowContext) -> Tensor:
            return normaliser.row_weights(x.masked_fill(~context.visible(x), -math.inf), context)

        exact = partial(weights, context=normaliser.context(q.double(), k.double()))
        attend = partial(run_prepared, normaliser=normaliser)
        errors += relative_errors(*compare(attend, exact, (q, k, v), do))
    return torch.tensor(errors).max().item()  # NaN if one is
