"""The rows engine: blocks of query rows, each against all its visible keys, in O(block * T) memory.

Any normaliser, any device. Nothing of size (T, T) is kept: backward computes the scores and weights
of each block again, with autograd through the row formula alone. LSSAR, re-weighted softplus of
bounded scores, has a closed form instead (`softplus_power`), which takes less time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from normalisers.base import HIDDEN, RowContext, offset_and_scale, share_heads
from normalisers.family import Phi, softplus
from normalisers.layer import NormaliserLayer


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there: it always can."""
    return ""


@torch.compiler.disable  # its backward runs autograd, which a compiled model cannot trace
def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` by blocks of rows; (B, H, Tq, D) in v's type."""
    dtype = v.dtype
    k, v, context = layer.cut(k, v, context)
    q, k = layer.prepare(q, k, context)
    v = share_heads(v, q).to(q.dtype)
    # all keys are visible; a power works in place
    if q.shape[-2] == 1 and not torch.is_grad_enabled() and context.first is None:
        weights, _ = block_weights(layer, layer.scores(q, k, context), context)  # (B, H, 1, n)
        return (weights @ v).to(dtype)
    q = q.contiguous()  # once, instead of in each block's product
    k = k.contiguous()
    # Passed explicitly: autograd tracks only the arguments of apply().
    return RowBlocks.apply(q, k, v, context.decay, layer, context, *context.learned.values()).to(
        dtype
    )


class RowBlocks(torch.autograd.Function):
    """Attention by blocks of query rows; saves its inputs, o and, of LSSAR, two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,  # the context's
        layer: NormaliserLayer,
        context: RowContext,
        *learned: Tensor,
    ) -> Tensor:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        ctx.saved = []  # by block
        for batch, block, keys in query_blocks(q, k, layer, context):
            x, here, *_ = block_scores(q, k, layer, context, batch, block, keys)
            weights, saved = block_weights(layer, x, here)
            out[batch, :, block] = weights @ v[batch, :, keys]
            ctx.saved.append(saved)
        ctx.save_for_backward(q, k, v, out, decay, *learned)
        ctx.layer = layer
        ctx.context = replace(context, decay=None)  # freed with what is saved
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # torch's own `once_differentiable` misses `torch.autograd.grad` of chosen inputs.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False: this attention has no second derivative"
            )
        # a caller may run backward inside it
        with torch.autocast(grads[0].device.type, enabled=False):
            return RowBlocks._backward(ctx, grads[0])

    @staticmethod
    def _backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, out, decay, *learned = ctx.saved_tensors
        dq = torch.empty_like(q)
        learned = [t.detach().requires_grad_() for t in learned]
        dk, dv, *d_learned = (
            torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (k, v, *learned)
        )
        d_decay = None if decay is None else torch.zeros_like(decay)
        by_name = dict(zip(ctx.context.learned, learned, strict=True))
        context = replace(ctx.context, learned=by_name, decay=decay)
        delta = (do * out).sum(-1, keepdim=True)  # (B, H, Tq, 1)
        queries = slice(k.shape[2] - q.shape[2], None)  # their places among the keys
        for (batch, block, keys), saved in zip(
            query_blocks(q, k, ctx.layer, context), ctx.saved, strict=True
        ):
            x, here, block_q, block_k = block_scores(q, k, ctx.layer, context, batch, block, keys)
            d_out = do[batch, :, block]
            d_weights = d_out @ v[batch, :, keys].mT
            if saved:
                c, e = saved
                rows = here.n, int(context.p), c, e
                weights, dx = softplus_power_vjp(x, *rows, d_weights, delta[batch, :, block])
            else:
                with torch.enable_grad():
                    weights = ctx.layer.row_weights(x.requires_grad_(), here)
                dx, *parts = torch.autograd.grad(
                    weights, [x, *learned], d_weights, allow_unused=True
                )
                for total, part in zip(d_learned, parts, strict=True):
                    if part is not None:
                        total += part
            dq[batch, :, block] = dx @ block_k
            _add_product(dk[batch, :, keys], dx.mT, block_q)
            _add_product(dv[batch, :, keys], weights.detach().mT, d_out)
            if d_decay is not None:  # P_i - P_j is added to x_ij
                d_decay[batch, :, keys] -= dx.sum(-2, dtype=decay.dtype)[..., None]
                d_decay[batch, :, queries][:, :, block] += dx.sum(-1, dtype=decay.dtype)[..., None]
        return dq, dk, dv, d_decay, None, None, *d_learned


def query_blocks(
    q: Tensor, k: Tensor, layer: NormaliserLayer, context: RowContext
) -> Iterator[tuple[slice, slice, slice]]:
    """The (batch, query, key) slices that the engine visits: the keys that any of the block's rows
    sees.

    Blocks are small enough for a CPU's cache (2 MB of scores) or a few hundred MB on a GPU.
    """
    n_batch, n_head, n_queries = q.shape[:3]
    n_keys = k.shape[-2]
    n_rows, budget = (64, 2**19) if q.device.type == "cpu" else (256, 2**26)
    for start in range(0, n_queries, n_rows):
        stop = min(start + n_rows, n_queries)
        last_key = n_keys - n_queries + stop
        first_key = max(0, n_keys - n_queries + start + 1 - layer.window) if layer.window else 0
        n_sequences = max(1, budget // (n_head * n_rows * (last_key - first_key)))
        for sequence in range(0, n_batch, n_sequences):
            batch = slice(sequence, sequence + n_sequences)
            begin = first_key
            if context.first is not None:
                begin = max(begin, int(context.first[batch, :, start:stop].min()))
            yield batch, slice(start, stop), slice(begin, last_key)


def block_scores(
    q: Tensor,
    k: Tensor,
    layer: NormaliserLayer,
    context: RowContext,
    batch: slice,
    block: slice,
    keys: slice,
) -> tuple[Tensor, RowContext, Tensor, Tensor]:
    """A block's scores, HIDDEN at hidden keys, its `RowContext`, q and k."""
    context = context.block(batch, block, keys)
    q, k = q[batch, :, block], k[batch, :, keys]
    x = context.add_decay(q @ k.mT)  # (b, H, R, K)
    # only the last R keys are hidden from any row of the block
    if not layer.window and context.first is None:
        n_rows = x.shape[-2]
        future = torch.ones(n_rows, n_rows, dtype=torch.bool, device=x.device).triu(1)
        x[..., -n_rows:].masked_fill_(future, HIDDEN)
    else:
        x.masked_fill_(~context.visible(x), HIDDEN)
    return x, context, q, k


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in place, without a temporary of total's size; total is a slice of a (B, H, K,
    D).
    """
    total.view(-1, *total.shape[2:]).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))


def block_weights(
    layer: NormaliserLayer, x: Tensor, context: RowContext
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weights (..., R, K), and of LSSAR, softplus of bounded scores, what its closed form
    needs.
    """
    if context.p is not None and is_bounded_softplus(layer):
        weights, c, e = softplus_power(x, context.n, int(context.p))
        return weights, (c, e)
    return layer.row_weights(x, context), ()


def is_bounded_softplus(layer: NormaliserLayer) -> bool:
    if layer.definition.form != "phi" or layer.by_distance or layer.decays:
        return False
    formula = cast(Phi, layer.definition)
    return formula.phi == "softplus" and formula.bounded


def softplus_power(x: Tensor, n: Tensor, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """reweight(l1_normalise(softplus(x))), and two numbers a row, c and e (..., R, 1), for its
    backward.

    With s = softplus(x), Z = sum s, t = ReLU(c s - e), c = n / (Z r_max), e = O / r_max, the
    weights are t^p / W, W = sum t^p. The returned c and e are divided by W^(1/p), so that the
    weights are t^p of them.
    """
    s = softplus(x)
    z = s.sum(-1, keepdim=True)
    offset, scale = offset_and_scale(n * s.amax(-1, keepdim=True) / z, n)
    c = n * scale / z
    e = offset * scale
    t = s.mul_(c).sub_(e).relu_()
    weights = power_below(t, p).mul_(t)
    w = weights.sum(-1, keepdim=True)
    root = w.pow(-1 / p)
    return weights.div_(w), c * root, e * root


def softplus_power_vjp(
    x: Tensor, n: Tensor, p: int, c: Tensor, e: Tensor, d_weights: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights again, and dx.

    With h = t^(p-1) (dC - D), D = `delta`, and m = O / n sum h, through which s enters by Z,
    dx = p c sigmoid(x) (h - m). (engines/triton_kernels.py computes the same.)
    """
    t = softplus(x).mul_(c).sub_(e).relu_()
    lower = power_below(t, p)
    weights = t.mul_(lower)
    h = (d_weights - delta).mul_(lower)
    mean = torch.where(e > 0, h.sum(-1, keepdim=True) / n, 0.0)
    return weights, h.sub_(mean).mul_(p * c).mul_(torch.sigmoid(x))


def power_below(t: Tensor, p: int) -> Tensor:
    """t^(p-1) for t >= 0; at p = 1 the indicator t > 0, so that p times it is the derivative of
    t^p.
    """
    if p == 1:
        return (t > 0).to(t.dtype)
    power = t.clone()
    # in place: allocating a tensor per product costs more than the product
    for digit in f"{p - 1:b}"[1:]:
        power.mul_(power)
        if digit == "1":
            power.mul_(t)
    return power
