"""Decoding, one query a head without a graph: Triton kernels that read of V only the rows with weight.

    1. scores    each split of the keys: y = q.k + shift to memory, and sums for the row's constants
    2. values    each split: weights from the scores, and sum w v over the rows of V whose weight is not 0
    3. combine   each head: the splits' sums, in order, to o

A row of V is whole cache lines (128 bytes at head_dim 64 in 16 bits), and re-weighting gives most keys a
weight of exactly 0. So a key and head cost 2 D bytes (K), 8 (its score, written and read) and 2 D times the
share of live rows; softmax's cost 4 D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.triton_kernels import (
    LN2,
    NEVER,
    Form,
    _add_sums,
    _matrix,
    _phi,
    _program,
    _row_constants,
    _tile,
    _tile_pointers,
    _weigh,
)

DECODE_KEYS = 64  # keys of a tile
MAX_SPLITS = 64


def launch(q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, o: Tensor, form: Form) -> None:
    """Fill o (B, H, 1, D) from q, k and v, (B, n_kv_head, n, D), all with D contiguous."""
    B, H, _, D = q.shape
    _, n_kv_head, n_keys, _ = k.shape
    n_rows = B * H
    n_processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 4
    n_tiles = triton.cdiv(n_keys, DECODE_KEYS)
    n_splits = min(n_tiles, MAX_SPLITS, triton.cdiv(4 * n_processors, n_rows))  # enough to fill the GPU
    per_split = triton.cdiv(n_tiles, n_splits) * DECODE_KEYS
    scores = q.new_empty(n_rows, n_keys, dtype=torch.float32)
    sums = scores.new_empty(n_rows, 3, n_splits)
    parts = scores.new_empty(n_rows, n_splits, D)
    totals = scores.new_empty(n_rows, n_splits)
    shift = scores if shift is None else shift
    split = (H, H // n_kv_head, n_keys, n_splits, per_split)
    with torch.cuda.device_of(q):
        _decode_scores[(n_rows * n_splits,)](
            q, k, shift, scores, sums, q.stride()[:2], k.stride()[:3], *split, form, DECODE_KEYS
        )
        _decode_values[(n_rows * n_splits,)](
            v, scores, sums, parts, totals, v.stride()[:3], *split, form, DECODE_KEYS,
            MAX_SPLITS,
        )  # fmt: skip
        _decode_combine[(n_rows,)](parts, totals, o, o.stride()[:2], H, n_splits, form, MAX_SPLITS)


@triton.jit(do_not_specialize=["n_keys", "n_splits", "per_split"])
def _decode_scores(
    q_ptr, k_ptr, shift_ptr, scores_ptr, sums_ptr, q_strides, k_strides,
    n_head, group, n_keys, n_splits, per_split, form: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One split's scores, and its sums for `_row_constants`."""
    split, row, batch, head = _program(n_splits, n_head)
    d = tl.arange(0, form.bd)
    q = tl.load(q_ptr + batch * q_strides[0] + head * q_strides[1] + d, mask=d < form.d, other=0.0)
    shift = tl.load(shift_ptr) if form.has_shift else 0.0
    total = tl.zeros([BN], tl.float32)
    lost = tl.zeros([BN], tl.float32)
    peak = tl.full([BN], NEVER, tl.float32)
    low_total = 0.0
    low_lost = 0.0
    low_peak = NEVER
    stop = tl.minimum(n_keys, (split + 1) * per_split)
    keys = _matrix(k_ptr, k_strides, stop, batch, head // group)
    for j0 in tl.range(split * per_split, stop, BN):
        j = j0 + tl.arange(0, BN)
        y = tl.sum(_tile(keys, j0, BN, True, form).to(tl.float32) * q.to(tl.float32)[None, :], 1) + shift
        tl.store(scores_ptr + row * n_keys + j, y, mask=j < stop)
        s, _ = _phi(y, tl.zeros_like(y), True, form)
        s = tl.where(j < stop, s, 0.0)
        y = tl.where(j < stop, y, -float("inf"))
        s -= lost  # Kahan's sum, as in forward
        new = total + s
        lost = (new - total) - s
        total = new
        if form.safe:
            low_total, low_lost, low_peak = _add_sums(low_total, low_lost, low_peak, y, "low", form)
        peak = tl.maximum(peak, y)
    at = sums_ptr + row * 3 * n_splits + split
    tl.store(at, tl.sum(total, 0))
    tl.store(at + n_splits, low_total)
    tl.store(at + 2 * n_splits, tl.max(peak, 0))


@triton.jit(do_not_specialize=["n_keys", "n_splits", "per_split"])
def _decode_values(
    v_ptr, scores_ptr, sums_ptr, parts_ptr, totals_ptr, v_strides,
    n_head, group, n_keys, n_splits, per_split, form: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """sum w v (D,) and sum |w| of one split; w is relative to the row's largest where there is a power."""
    split, row, batch, head = _program(n_splits, n_head)
    others = tl.arange(0, SPLITS)
    sums = sums_ptr + row * 3 * n_splits + others
    is_split = others < n_splits
    one = tl.full([1], 1.0, tl.float32)
    all_s = one * tl.sum(tl.load(sums, mask=is_split, other=0.0), 0)
    low_totals = tl.load(sums + n_splits, mask=is_split, other=0.0)
    peaks = tl.load(sums + 2 * n_splits, mask=is_split, other=NEVER)
    peak = tl.max(peaks, 0)
    low_total = one * tl.sum(low_totals * tl.exp2(peaks - peak), 0)
    last = tl.full([1], 0, tl.int32) + n_keys - 1
    c, e, shift, low = _row_constants(all_s, low_total, one * peak, one * 0.0, last, n_keys, form)
    BD: tl.constexpr = form.bd
    acc = tl.zeros([BN, BD], tl.float32)  # summed over the keys once, at the end
    total = tl.zeros([BN], tl.float32)
    stop = tl.minimum(n_keys, (split + 1) * per_split)
    values = _matrix(v_ptr, v_strides, stop, batch, head // group)
    for j0 in tl.range(split * per_split, stop, BN):
        j = j0 + tl.arange(0, BN)
        y = tl.load(scores_ptr + row * n_keys + j, mask=j < stop, other=0.0) + shift
        s, _ = _phi(y, low, True, form)
        weight, _ = _weigh(s, c, e, form)
        weight = tl.where(j < stop, weight, 0.0)
        total += tl.abs(weight)
        live = ~(weight == 0.0)  # NaN is live: it must reach o
        weight = tl.where(live, weight, 0.0)
        at, exists = _tile_pointers(values, j0, BN, True, form)
        v = tl.load(at, mask=exists & live[:, None], other=0.0)
        acc += weight[:, None] * v.to(tl.float32)
    d = tl.arange(0, form.bd)
    at = row * n_splits + split
    tl.store(parts_ptr + at * form.d + d, tl.sum(acc, 0), mask=d < form.d)
    tl.store(totals_ptr + at, tl.sum(total, 0))


@triton.jit(do_not_specialize=["n_splits"])
def _decode_combine(
    parts_ptr, totals_ptr, o_ptr, o_strides, n_head, n_splits, form: tl.constexpr, SPLITS: tl.constexpr
):
    """o of one head from its splits."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, form.bd)
    at = row * n_splits + split
    exists = (split[:, None] < n_splits) & (d[None, :] < form.d)
    parts = tl.load(parts_ptr + at[:, None] * form.d + d[None, :], mask=exists, other=0.0)
    total = tl.sum(tl.load(totals_ptr + at, mask=split < n_splits, other=0.0), 0)
    scale = LN2 if form.phi == "softplus" else 1.0
    if form.l1:
        scale = tl.where(total <= 0, 0.0, 1.0 / total)
    o = o_ptr + (row // n_head) * o_strides[0] + (row % n_head) * o_strides[1] + d
    tl.store(o, (tl.sum(parts, 0) * scale).to(o_ptr.dtype.element_ty), mask=d < form.d)
