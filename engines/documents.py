"""A causal softmax within each document of a window, by torch's kernel for CPUs.

The sdpa engine's: a document is a call on views of q, k and v, so none is copied, and it has the
bits that it has alone. A call costs about 0.1 ms.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normalisers.base import RowContext

# what F.scaled_dot_product_attention calls
forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.compiler.disable  # where documents begin would be constants of a graph
def attend_documents(q: Tensor, k: Tensor, v: Tensor, context: RowContext, scale: float) -> Tensor:
    """`attend_causally` of each document alone, on a CPU, where a call costs less than a mask."""
    # the kernel reads heads whose numbers are next to each other
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    return Documents.apply(q, k, v, context, scale)


class Documents(torch.autograd.Function):
    """One call of torch's CPU kernel a document, on views: no document is copied."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: RowContext, scale: float
    ) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        out = out.transpose(1, 2)  # laid out as (B, T, H, D), as the model's next step wants it
        ctx.documents = []
        for batch, block, keys in spans(context, k.shape[-2]):
            parts = q[batch, :, block], k[batch, :, keys], v[batch, :, keys]
            masked = mask_options(parts[1], context, batch, block, keys)
            out[batch, :, block], log_sums = forward_kernel(*parts, scale=scale, **masked)
            ctx.documents.append((batch, block, keys, log_sums))
        ctx.save_for_backward(q, k, v, out)
        ctx.context = replace(context, decay=None)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        for batch, block, keys, log_sums in ctx.documents:
            parts = q[batch, :, block], k[batch, :, keys], v[batch, :, keys], out[batch, :, block]
            masked = mask_options(parts[1], ctx.context, batch, block, keys)  # anew: not kept
            d_out = grads[0][batch, :, block]
            found = backward_kernel(d_out, *parts, log_sums, scale=ctx.scale, **masked)
            dq[batch, :, block], dk[batch, :, keys], dv[batch, :, keys] = found
            del found  # before the next document's
        return dq, dk, dv, None, None


def mask_options(
    k: Tensor, context: RowContext, batch: slice, block: slice, keys: slice
) -> dict[str, Any]:
    """Of the kernel, for these rows and their keys k. A mask where rows and keys are not alike."""
    options: dict[str, Any] = {"dropout_p": 0.0, "is_causal": True}
    if block.stop - block.start == k.shape[-2] <= context.n_max:
        return options
    visible = context.block(batch, block, keys).visible(k.mT)
    mask = torch.zeros_like(visible, dtype=k.dtype).masked_fill_(~visible, -math.inf)
    return options | {"is_causal": False, "attn_mask": mask}


def spans(context: RowContext, n_keys: int) -> Iterator[tuple[slice, slice, slice]]:
    """The (batch, query, key) slices of each document that has queries."""
    assert context.first is not None
    first = context.first[:, 0, :, 0]  # (B, Tq)
    n_queries = first.shape[1]
    for sequence, places in enumerate(first):
        _, counts = places.unique_consecutive(return_counts=True)
        start = 0
        for count in counts.tolist():
            stop = start + count
            begin = max(0, int(places[start]))
            keys = slice(begin, n_keys - n_queries + stop)
            yield slice(sequence, sequence + 1), slice(start, stop), keys
            start = stop
