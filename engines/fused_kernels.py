"""Fused attention with an elementwise phi in place of exp: forward and backward Triton kernels.

    o = phi_attention(q, k, v, factor, phi="softplus", l1=True, p=15)      # LSSAR

For scores x = factor * q.k + shift and s = phi(x) at the keys a row sees, the weights C of a row are

    l1 off:   C = s
    l1:       C = s / Z,        Z = sum |s|
    power p:  C = t^p / W,      W = sum t^p,   t = ReLU(c s - e),   c = n / (Z r_max),  e = O / r_max

which is l1(ReLU(n A - O)^p) of A = s / Z (LSSAR paper, eq. 5) with r = n A - O divided by its row maximum
r_max before the power. phi is increasing, so r_max is known from the largest s: forward takes one pass
over the keys for Z and max s, one for o. (`attention.reweight` says which rows have O = 0.)

Backward, from o and two numbers a row, c' = c W^(-1/p) and e' = e W^(-1/p), so that C = t'^p with
t' = ReLU(c' s - e'), and with D = do.o, dC = do.v:

    h_j = t'_j^(p-1) (dC_j - D),     m = (O / n) sum_j h_j,     dx_j = p c' phi'(x_j) (h_j - m)

(p = 1: t'^0 is the indicator t' > 0; without a power h_j = dC_j - D, m = 0, p c' = 1 / Z.) m comes from
the other way s enters, through Z; sum_j C_j (dC_j - D) = 0 leaves of it only this mean. It is not known
before the row's last key, so the dq kernel sums both parts, sum h phi' k and sum phi' k, and writes m for
the dk, dv kernel that runs after it. Storing U = sum t^(p-1) v / W in forward instead would cost as many
matmuls and O(T D) memory more, and m = do.U - D w would lose its digits where U is rounded to bfloat16.

Every sum runs in a fixed order inside one program: no atomics, the same bits each time. Memory beyond
inputs and outputs is 4 floats a row, and 4 more in backward.

The exponential functions work in base 2: y = x log2(e), and softplus is log2(1 + 2^y), whose unit l1
cancels. Its derivative costs one exponential: sigmoid(x) = 2^(y - log2(1 + 2^y)).

Written for NVIDIA GPUs from compute capability 8.0 on; TRITON_INTERPRET=1 runs it on the CPU (tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PHIS = ("exp", "softplus", "sigmoid", "relu", "relu2", "relu6", "gelu", "mish", "identity")
MAX_HEAD_DIM = 128
SIGNED = ("gelu", "mish", "identity")
N_STATS = 4  # floats that forward leaves for each row: c', e', total shift of the score, low

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# sum |s| below which a row has no mass, as in attention.L1Normalise
NO_MASS = tl.constexpr(1e8 * torch.finfo(torch.float32).tiny)
# A row with sum phi < 2^-58 has phi(x) = e^x to the last digit at each key, for softplus and sigmoid.
LOW = tl.constexpr(2.0**-58)


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its block sizes; never the sequence length."""

    phi: str
    l1: bool
    p: int  # 0: no re-weighting
    bounded: bool  # |x| is so small that a row of phi(x) cannot underflow (LSSA's cosine scores)
    biased: bool  # there is a shift
    fast: bool  # softplus to 9e-6: enough for 16-bit inputs
    precision: str  # of matrix products of float32 inputs
    d: int  # head_dim
    bd: int  # and the power of two that holds it

    @property
    def unit(self) -> float:
        """Scores come as x times this: these functions are computed in base 2."""
        return LOG2E.value if self.phi in ("exp", "softplus", "sigmoid") else 1.0

    @property
    def slope_unit(self) -> float:
        """What `_phi_and_slope`'s slope lacks of phi' by x, for s in the units of `_phi`."""
        return LOG2E.value if self.phi == "softplus" else 1.0

    @property
    def signed(self) -> bool:
        return self.phi in SIGNED

    @property
    def online(self) -> bool:
        """exp with l1 is softmax: the row maximum is subtracted first."""
        return self.l1 and self.phi == "exp"

    @property
    def safe(self) -> bool:
        """Rows that may be so low that phi underflows are treated as exp's: see `_sums`."""
        return self.l1 and not self.bounded and self.phi in ("softplus", "sigmoid")

    @property
    def shifted(self) -> bool:
        return self.biased or self.online or self.safe


# ---------------------------------------------------------------------------------------------------
# Tile mathematics, shared by all kernels
# ---------------------------------------------------------------------------------------------------


@triton.jit
def _log2_1p(u, F: tl.constexpr):
    """log2(1 + u) for 0 <= u <= 1 as u P(u), minimax in relative error: 9e-6 if F.fast, else 2e-7.

    The special-function unit has its hands full with exponentials; polynomials run beside it.
    """
    if F.fast:
        r = u * -0.0344359066 + 0.146032888
        r = r * u - 0.303036203
        r = r * u + 0.469174065
        r = r * u - 0.720426164
        r = r * u + 1.44268292
    else:
        r = u * 0.00754918208 - 0.0425670617
        r = r * u + 0.112856193
        r = r * u - 0.19711897
        r = r * u + 0.275641412
        r = r * u - 0.358408472
        r = r * u + 0.480692957
        r = r * u - 0.721340208
        r = r * u + 1.442695
    return r * u


@triton.jit
def _softplus2(y, F: tl.constexpr):
    """log2(1 + 2^y) = softplus(y ln 2) / ln 2."""
    return tl.maximum(y, 0.0) + _log2_1p(tl.exp2(tl.abs(y) * -1.0), F)


@triton.jit
def _tanh_softplus(x, u):
    """tanh(softplus(x)) = ((1 + e^x)^2 - 1) / ((1 + e^x)^2 + 1) from u = e^-|x|."""
    top = tl.where(x >= 0, 1.0 + 2.0 * u, u * (u + 2.0))
    return top / (top + tl.where(x >= 0, 2.0 * u * u, 2.0))


@triton.jit
def _phi(y, low, F: tl.constexpr):
    """phi(x) from y = x F.unit; softplus in units of ln 2. Where `low` (F.safe) 2^y instead: see `_sums`."""
    if F.phi == "exp":
        s = tl.exp2(y)
    elif F.phi == "softplus":
        s = _softplus2(y, F)
    elif F.phi == "sigmoid":
        s = 1.0 / (1.0 + tl.exp2(-y))
    elif F.phi == "relu":
        s = tl.maximum(y, 0.0)
    elif F.phi == "relu2":
        s = tl.maximum(y, 0.0) * tl.maximum(y, 0.0)
    elif F.phi == "relu6":
        s = tl.minimum(tl.maximum(y, 0.0), 6.0)
    elif F.phi == "gelu":
        s = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif F.phi == "mish":
        s = y * _tanh_softplus(y, tl.exp2(-tl.abs(y) * LOG2E))
    else:
        s = y
    if F.safe:
        s = tl.where(low > 0, tl.exp2(y), s)
    return s


@triton.jit
def _phi_and_slope(y, low, F: tl.constexpr):
    """phi as above and phi' by x, but softplus's by y (`Form.slope_unit` makes up for it)."""
    s = _phi(y, low, F)
    if F.phi == "exp":
        slope = s
    elif F.phi == "softplus":
        slope = tl.exp2(y - s)  # sigmoid(x), with full relative accuracy on both sides
        if F.safe:
            slope = tl.where(low > 0, s * LN2, slope)
    elif F.phi == "sigmoid":
        slope = s * (1.0 - s)
        if F.safe:
            slope = tl.where(low > 0, s, slope)
    elif F.phi == "relu":
        slope = tl.where(y > 0, 1.0, 0.0)
    elif F.phi == "relu2":
        slope = 2.0 * tl.maximum(y, 0.0)
    elif F.phi == "relu6":
        slope = tl.where((y > 0) & (y < 6.0), 1.0, 0.0)
    elif F.phi == "gelu":
        density = 0.3989422804014327 * tl.exp2(y * y * -0.7213475204444817)
        slope = 0.5 * (1.0 + tl.erf(y * 0.7071067811865476)) + y * density
    elif F.phi == "mish":
        u = tl.exp2(-tl.abs(y) * LOG2E)
        th = _tanh_softplus(y, u)
        slope = th + y * (1.0 - th * th) * tl.where(y >= 0, 1.0, u) / (1.0 + u)
    else:
        slope = tl.full(y.shape, 1.0, tl.float32)
    return s, slope


@triton.jit
def _power(t, N: tl.constexpr):
    """t^N for t >= 0 by repeated squaring; t^0 is the indicator t > 0."""
    if N == 0:
        result = tl.where(t > 0, 1.0, 0.0)
    else:
        result = t
        square = t
        for bit in tl.static_range(8):
            if (N >> bit) & 1:
                result = square if N & ((1 << bit) - 1) == 0 else result * square
            square = square * square
    return result


@triton.jit
def _weigh(s, c, e, F: tl.constexpr):
    """Weights before the last division: s, or t^p."""
    if F.p == 0:
        weight = s
    else:
        t = tl.maximum(s * c - e, 0.0)
        N: tl.constexpr = F.p - 1
        weight = _power(t, N) * t
    return weight


@triton.jit
def _weigh_and_grad(s, dC, c, e, delta, F: tl.constexpr):
    """The weights C, and h (see the top of this file), from c' and e'."""
    if F.p > 0:
        t = tl.maximum(s * c - e, 0.0)
        N: tl.constexpr = F.p - 1
        lower = _power(t, N)
        weight = lower * t
        h = lower * (dC - delta)
    else:
        weight = s * c
        h = dC
        if F.l1 and F.signed:
            h = dC - tl.where(s > 0, delta, tl.where(s < 0, -delta, 0.0))
        elif F.l1:
            h = dC - delta
    return weight, h


@triton.jit
def _row_constants(total, peak, low_total, low_peak, shift, n, F: tl.constexpr):
    """c, e, shift and low of rows from the two results of `_sums`.

    `attention.reweight` explains O, and why rows without contrast have none.
    """
    low = tl.zeros_like(total)
    if F.safe:
        low = tl.where(total < LOW, 1.0, 0.0)
    if F.online or F.safe:
        moved = (low > 0) | F.online
        shift = tl.where(moved, shift - low_peak, shift)
        total = tl.where(moved, low_total, total)
        peak = tl.where(moved, 1.0, peak)
    c = tl.full(total.shape, 1.0, tl.float32)
    e = tl.zeros_like(total)
    if F.p > 0:
        has_mass = total > NO_MASS
        mean = tl.where(has_mass, total, 1.0) / n
        top = peak / mean  # max n A
        offset = tl.where((n > 3) & (top - 1.0 > 1e-5), 1.0, 0.0)
        inverse = tl.where(has_mass, 1.0 / (top - offset), 0.0)
        c = inverse / mean
        e = offset * inverse
    return c, e, shift, low


@triton.jit
def _normalise(total, c, e, F: tl.constexpr):
    """What sum w v is multiplied by, and c', e' with which `_weigh` gives C itself."""
    if F.p > 0:
        has_mass = total > 0
        scale = tl.where(has_mass, 1.0 / total, 0.0)
        root = tl.where(has_mass, tl.exp2(tl.log2(total) * (-1.0 / F.p)), 0.0)
        c = c * root
        e = e * root
    else:
        if F.l1:
            scale = tl.where(total > NO_MASS, 1.0 / total, 0.0)
        else:
            scale = tl.full(total.shape, LN2 if F.phi == "softplus" else 1.0, tl.float32)
        c = scale
    return scale, c, e


@triton.jit
def _tile(base, index, n, stride, CUT: tl.constexpr, F: tl.constexpr):
    """Rows `index` (R,) of an (n, D) matrix as (R, BD), zeros outside; CUT: some rows may be >= n."""
    BD: tl.constexpr = F.bd
    d = tl.arange(0, BD)
    at = base + index[:, None] * stride + d[None, :]
    if CUT and F.d < F.bd:
        tile = tl.load(at, mask=(index[:, None] < n) & (d[None, :] < F.d), other=0.0)
    elif CUT:
        tile = tl.load(at, mask=index[:, None] < n, other=0.0)
    elif F.d < F.bd:
        tile = tl.load(at, mask=d[None, :] < F.d, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _store_tile(base, index, n, stride, values, F: tl.constexpr):
    BD: tl.constexpr = F.bd
    d = tl.arange(0, BD)
    at = base + index[:, None] * stride + d[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(index[:, None] < n) & (d[None, :] < F.d))


@triton.jit
def _program(n_parts, n_head):
    """Which part of which head this program works on: (part, batch * n_head + head, batch, head)."""
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    return tl.program_id(0) % n_parts, row, row // n_head, row % n_head


@triton.jit
def _matrix(pointer, strides, batch, head):
    """Where the (T, D) matrix of one batch element and head begins."""
    return pointer + batch * strides[0] + head * strides[1]


@triton.jit
def _product(a, b, F: tl.constexpr):
    """a (M, D) and b (N, D) to their scalar products (M, N), in float32."""
    return tl.dot(a, tl.trans(b), input_precision=F.precision)


@triton.jit
def _add_product(acc, tile, b, F: tl.constexpr):
    """acc + tile b, for a float32 tile (M, N) that is rounded to b's (N, D) type."""
    return tl.dot(tile.to(b.dtype), b, acc, input_precision=F.precision)


# ---------------------------------------------------------------------------------------------------
# Forward: one program for BM query rows of one head
# ---------------------------------------------------------------------------------------------------


@triton.jit
def _sums(
    total, peak, q, k_ptr, k_stride, position, factor, shift, start, stop, n_keys,
    ONLINE: tl.constexpr, DIAGONAL: tl.constexpr, F: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add keys start..stop to sum phi and max phi of the rows; ONLINE: to sum 2^(y - peak) and max y.

    ONLINE is for exp, and for rows of softplus or sigmoid so low that phi is e^x there, and underflows.
    """
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k = _tile(k_ptr, j, n_keys, k_stride, DIAGONAL, F)
        y = _product(q, k, F) * factor[:, None]
        if F.biased:
            y += shift[:, None]
        if ONLINE:
            if DIAGONAL:
                y = tl.where(position[:, None] >= j[None, :], y, -float("inf"))
            highest = tl.maximum(peak, tl.max(y, 1))
            total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(y - highest[:, None]), 1)
            peak = highest
        else:
            s = _phi(y, tl.zeros_like(y), F)
            if DIAGONAL:
                s = tl.where(position[:, None] >= j[None, :], s, 0.0)
            total += tl.sum(s, 1)
            peak = tl.maximum(peak, tl.max(s, 1))
    return total, peak


@triton.jit
def _accumulate(
    acc, total, q, k_ptr, v_ptr, k_stride, v_stride, position, factor, shift, low, c, e, start, stop, n_keys,
    DIAGONAL: tl.constexpr, F: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add keys start..stop to sum w v (M, BD) and sum |w| (M,)."""
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k = _tile(k_ptr, j, n_keys, k_stride, DIAGONAL, F)
        y = _product(q, k, F) * factor[:, None]
        if F.shifted:
            y += shift[:, None]
        s = _phi(y, low[:, None], F)
        if DIAGONAL:
            s = tl.where(position[:, None] >= j[None, :], s, 0.0)
        weight = _weigh(s, c[:, None], e[:, None], F)
        total += tl.sum(tl.abs(weight) if F.signed else weight, 1)
        v = _tile(v_ptr, j, n_keys, v_stride, DIAGONAL, F)
        acc = _add_product(acc, weight, v, F)
    return acc, total


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _forward(
    q_ptr, k_ptr, v_ptr, factor_ptr, shift_ptr, o_ptr, stats_ptr,
    q_strides, k_strides, v_strides, o_strides, n_head, n_queries, n_keys,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """o, and c', e', shift and low of each row."""
    n_blocks = tl.cdiv(n_queries, BM)
    part, row, batch, head = _program(n_blocks, n_head)
    block = n_blocks - 1 - part  # those with most keys first
    k_ptr = _matrix(k_ptr, k_strides, batch, head)
    v_ptr = _matrix(v_ptr, v_strides, batch, head)
    i = block * BM + tl.arange(0, BM)
    inside = i < n_queries
    position = n_keys - n_queries + i  # among the keys: the row sees those up to it
    q = _tile(_matrix(q_ptr, q_strides, batch, head), i, n_queries, q_strides[2], True, F)
    factor = tl.load(factor_ptr + row * n_queries + i, mask=inside, other=0.0) * F.unit
    shift = tl.zeros([BM], tl.float32)
    if F.biased:
        shift = tl.load(shift_ptr + i, mask=inside, other=0.0) * F.unit
    # Tiles of keys that all rows of the block see, then those on the diagonal.
    whole = (n_keys - n_queries + block * BM + 1) // BN * BN
    stop = tl.minimum(n_keys, n_keys - n_queries + (block + 1) * BM)

    total = tl.zeros([BM], tl.float32)
    peak = tl.zeros([BM], tl.float32)
    low_total = tl.zeros([BM], tl.float32)
    low_peak = tl.full([BM], -float("inf"), tl.float32)
    any_low = F.online
    if (F.p > 0 or F.safe) and not F.online:
        total, peak = _sums(total, peak, q, k_ptr, k_strides[2], position, factor, shift, 0, whole, n_keys,
                            False, False, F, BN)  # fmt: skip
        total, peak = _sums(total, peak, q, k_ptr, k_strides[2], position, factor, shift, whole, stop, n_keys,
                            False, True, F, BN)  # fmt: skip
    if F.safe:
        any_low = tl.min(tl.where(inside, total, 1.0), 0) < LOW
    if F.online or F.safe:  # noqa: SIM102 (decided when compiled; the next one when run)
        if any_low:
            low_total, low_peak = _sums(low_total, low_peak, q, k_ptr, k_strides[2], position, factor, shift,
                                        0, whole, n_keys, True, False, F, BN)  # fmt: skip
            low_total, low_peak = _sums(low_total, low_peak, q, k_ptr, k_strides[2], position, factor, shift,
                                        whole, stop, n_keys, True, True, F, BN)  # fmt: skip
    n = (position + 1).to(tl.float32)
    c, e, shift, low = _row_constants(total, peak, low_total, low_peak, shift, n, F)

    BD: tl.constexpr = F.bd
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc, total = _accumulate(acc, total, q, k_ptr, v_ptr, k_strides[2], v_strides[2], position, factor, shift,
                             low, c, e, 0, whole, n_keys, False, F, BN)  # fmt: skip
    acc, total = _accumulate(acc, total, q, k_ptr, v_ptr, k_strides[2], v_strides[2], position, factor, shift,
                             low, c, e, whole, stop, n_keys, True, F, BN)  # fmt: skip
    scale, c, e = _normalise(total, c, e, F)
    o_ptr = _matrix(o_ptr, o_strides, batch, head)
    _store_tile(o_ptr, i, n_queries, o_strides[2], acc * scale[:, None], F)
    n_rows = (tl.num_programs(0) // n_blocks).to(tl.int64) * n_queries
    stats_ptr += row * n_queries + i
    tl.store(stats_ptr, c, mask=inside)
    tl.store(stats_ptr + n_rows, e, mask=inside)
    tl.store(stats_ptr + 2 * n_rows, shift, mask=inside)
    tl.store(stats_ptr + 3 * n_rows, low, mask=inside)


# ---------------------------------------------------------------------------------------------------
# Backward: a program for BM query rows, then a program for BN keys
# ---------------------------------------------------------------------------------------------------


@triton.jit
def _add_dq(
    acc, acc_mean, h_sum, q, do, k_ptr, v_ptr, k_stride, v_stride, position, factor, shift, low, c, e, delta,
    start, stop, n_keys, DIAGONAL: tl.constexpr, F: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add keys start..stop to sum h phi' k and sum phi' k (M, BD each) and to sum h (M,)."""
    for j0 in tl.range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k = _tile(k_ptr, j, n_keys, k_stride, DIAGONAL, F)
        v = _tile(v_ptr, j, n_keys, v_stride, DIAGONAL, F)
        y = _product(q, k, F) * factor[:, None]
        if F.shifted:
            y += shift[:, None]
        s, slope = _phi_and_slope(y, low[:, None], F)
        if DIAGONAL:
            visible = position[:, None] >= j[None, :]
            s = tl.where(visible, s, 0.0)
            slope = tl.where(visible, slope, 0.0)
        _, h = _weigh_and_grad(s, _product(do, v, F), c[:, None], e[:, None], delta[:, None], F)
        acc = _add_product(acc, h * slope, k, F)
        if F.p > 0:
            h_sum += tl.sum(h, 1)
            acc_mean = _add_product(acc_mean, slope, k, F)
    return acc, acc_mean, h_sum


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, factor_ptr, stats_ptr, dq_ptr, row_grads_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, n_head, n_queries, n_keys,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq; and of each row d factor, D, and what `_add_dkv` multiplies h by and subtracts."""
    n_blocks = tl.cdiv(n_queries, BM)
    part, row, batch, head = _program(n_blocks, n_head)
    block = n_blocks - 1 - part
    k_ptr = _matrix(k_ptr, k_strides, batch, head)
    v_ptr = _matrix(v_ptr, v_strides, batch, head)
    i = block * BM + tl.arange(0, BM)
    inside = i < n_queries
    position = n_keys - n_queries + i
    q = _tile(_matrix(q_ptr, q_strides, batch, head), i, n_queries, q_strides[2], True, F)
    do = _tile(_matrix(do_ptr, do_strides, batch, head), i, n_queries, do_strides[2], True, F)
    delta = tl.zeros([BM], tl.float32)
    if F.l1:
        o = _tile(_matrix(o_ptr, o_strides, batch, head), i, n_queries, o_strides[2], True, F)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_factor = tl.load(factor_ptr + row * n_queries + i, mask=inside, other=0.0)
    n_rows = (tl.num_programs(0) // n_blocks).to(tl.int64) * n_queries
    stats_ptr += row * n_queries + i
    c = tl.load(stats_ptr, mask=inside, other=0.0)
    e = tl.load(stats_ptr + n_rows, mask=inside, other=0.0)
    shift = tl.load(stats_ptr + 2 * n_rows, mask=inside, other=0.0)
    low = tl.load(stats_ptr + 3 * n_rows, mask=inside, other=0.0)
    whole = (n_keys - n_queries + block * BM + 1) // BN * BN
    stop = tl.minimum(n_keys, n_keys - n_queries + (block + 1) * BM)

    BD: tl.constexpr = F.bd
    acc = tl.zeros([BM, BD], tl.float32)
    acc_mean = tl.zeros([BM, BD], tl.float32)
    h_sum = tl.zeros([BM], tl.float32)
    acc, acc_mean, h_sum = _add_dq(
        acc, acc_mean, h_sum, q, do, k_ptr, v_ptr, k_strides[2], v_strides[2], position, row_factor * F.unit,
        shift, low, c, e, delta, 0, whole, n_keys, False, F, BN,
    )  # fmt: skip
    acc, acc_mean, h_sum = _add_dq(
        acc, acc_mean, h_sum, q, do, k_ptr, v_ptr, k_strides[2], v_strides[2], position, row_factor * F.unit,
        shift, low, c, e, delta, whole, stop, n_keys, True, F, BN,
    )  # fmt: skip
    mean = tl.zeros([BM], tl.float32)
    gain = c * F.slope_unit
    if F.p > 0:
        mean = tl.where(e > 0, h_sum / (position + 1).to(tl.float32), 0.0)
        acc -= mean[:, None] * acc_mean
        gain *= F.p
    acc *= gain[:, None]  # sum_j dx_j k_j
    gain *= row_factor  # with which d (q k)_j = factor dx_j = (gain h_j - gain m) phi'_j
    d_factor = tl.sum(acc * q.to(tl.float32), 1)
    dq_ptr = _matrix(dq_ptr, dq_strides, batch, head)
    _store_tile(dq_ptr, i, n_queries, dq_strides[2], acc * row_factor[:, None], F)
    row_grads_ptr += row * n_queries + i
    tl.store(row_grads_ptr, d_factor, mask=inside)
    tl.store(row_grads_ptr + n_rows, delta, mask=inside)
    tl.store(row_grads_ptr + 2 * n_rows, gain, mask=inside)
    tl.store(row_grads_ptr + 3 * n_rows, gain * mean, mask=inside)


@triton.jit
def _add_dkv(
    dk, dv, k, v, q_ptr, do_ptr, q_stride, do_stride, factor_ptr, stats_ptr, row_grads_ptr, j, n_rows,
    start, stop, n_queries, n_keys, DIAGONAL: tl.constexpr, F: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Add query rows start..stop to dk and dv (N, BD each). Tiles are (keys, queries)."""
    for i0 in tl.range(start, stop, BM):
        i = i0 + tl.arange(0, BM)
        inside = i < n_queries  # rows beyond have q = do = c = 0 and add nothing
        q = _tile(q_ptr, i, n_queries, q_stride, True, F)
        do = _tile(do_ptr, i, n_queries, do_stride, True, F)
        factor = tl.load(factor_ptr + i, mask=inside, other=0.0) * F.unit
        c = tl.load(stats_ptr + i, mask=inside, other=0.0)
        e = tl.zeros_like(c)
        low = tl.zeros_like(c)
        delta = tl.zeros_like(c)
        y = _product(k, q, F) * factor[None, :]
        if F.shifted:
            y += tl.load(stats_ptr + 2 * n_rows + i, mask=inside, other=0.0)[None, :]
        if F.safe:
            low = tl.load(stats_ptr + 3 * n_rows + i, mask=inside, other=0.0)
        s, slope = _phi_and_slope(y, low[None, :], F)
        if DIAGONAL:
            visible = (n_keys - n_queries + i)[None, :] >= j[:, None]
            s = tl.where(visible, s, 0.0)
            slope = tl.where(visible, slope, 0.0)
        if F.p > 0:
            e = tl.load(stats_ptr + n_rows + i, mask=inside, other=0.0)
        if F.l1:
            delta = tl.load(row_grads_ptr + n_rows + i, mask=inside, other=0.0)
        weight, h = _weigh_and_grad(s, _product(v, do, F), c[None, :], e[None, :], delta[None, :], F)
        dv = _add_product(dv, weight, do, F)
        dx = h * tl.load(row_grads_ptr + 2 * n_rows + i, mask=inside, other=0.0)[None, :]
        if F.p > 0:
            dx -= tl.load(row_grads_ptr + 3 * n_rows + i, mask=inside, other=0.0)[None, :]
        dk = _add_product(dk, dx * slope, q, F)
    return dk, dv


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, factor_ptr, stats_ptr, row_grads_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, n_head, n_queries, n_keys,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv, after `_backward_q` has written what it needs of the rows."""
    n_blocks = tl.cdiv(n_keys, BN)
    block, row, batch, head = _program(n_blocks, n_head)
    j = block * BN + tl.arange(0, BN)
    k = _tile(_matrix(k_ptr, k_strides, batch, head), j, n_keys, k_strides[2], True, F)
    v = _tile(_matrix(v_ptr, v_strides, batch, head), j, n_keys, v_strides[2], True, F)
    q_ptr = _matrix(q_ptr, q_strides, batch, head)
    do_ptr = _matrix(do_ptr, do_strides, batch, head)
    n_rows = (tl.num_programs(0) // n_blocks).to(tl.int64) * n_queries
    factor_ptr += row * n_queries
    stats_ptr += row * n_queries
    row_grads_ptr += row * n_queries
    # Rows on the diagonal, which do not see all of these keys, then rows that see them all.
    first = block * BN - (n_keys - n_queries)  # the row at the block's first key
    start = tl.maximum(first, 0) // BM * BM
    whole = tl.minimum(tl.cdiv(tl.maximum(first + BN - 1, 0), BM), tl.cdiv(n_queries, BM)) * BM
    BD: tl.constexpr = F.bd
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    dk, dv = _add_dkv(dk, dv, k, v, q_ptr, do_ptr, q_strides[2], do_strides[2], factor_ptr, stats_ptr,
                      row_grads_ptr, j, n_rows, start, whole, n_queries, n_keys, True, F, BM)  # fmt: skip
    dk, dv = _add_dkv(dk, dv, k, v, q_ptr, do_ptr, q_strides[2], do_strides[2], factor_ptr, stats_ptr,
                      row_grads_ptr, j, n_rows, whole, n_queries, n_queries, n_keys, False, F,
                      BM)  # fmt: skip
    _store_tile(_matrix(dk_ptr, dk_strides, batch, head), j, n_keys, dk_strides[2], dk, F)
    _store_tile(_matrix(dv_ptr, dv_strides, batch, head), j, n_keys, dv_strides[2], dv, F)


# ---------------------------------------------------------------------------------------------------
# Decoding: one query row a head; its keys are split over programs
# ---------------------------------------------------------------------------------------------------


@triton.jit
def _one_query(q_ptr, F: tl.constexpr):
    """The only query of a head, (BD,) in float32."""
    BD: tl.constexpr = F.bd
    d = tl.arange(0, BD)
    return tl.load(q_ptr + d, mask=d < F.d, other=0.0).to(tl.float32)


@triton.jit
def _row_scores(q, k_ptr, k_stride, j, stop, factor, shift, F: tl.constexpr):
    """y (BN,) of one query q (BD,) in float32; -inf from key `stop` on."""
    k = _tile(k_ptr, j, stop, k_stride, True, F)
    y = tl.sum(k.to(tl.float32) * q[None, :], 1) * factor + shift
    return tl.where(j < stop, y, -float("inf"))


@triton.jit(do_not_specialize=["n_keys", "n_splits", "per_split"])
def _decode_sums(
    q_ptr, k_ptr, factor_ptr, shift_ptr, sums_ptr, q_strides, k_strides, n_head, n_keys, n_splits, per_split,
    F: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Both results of `_sums` for one split of the keys."""
    split, row, batch, head = _program(n_splits, n_head)
    k_ptr = _matrix(k_ptr, k_strides, batch, head)
    q = _one_query(_matrix(q_ptr, q_strides, batch, head), F)
    factor = tl.load(factor_ptr + row) * F.unit
    shift = tl.load(shift_ptr) * F.unit if F.biased else 0.0
    total = 0.0
    peak = 0.0
    low_total = 0.0
    low_peak = -1e38
    stop = tl.minimum(n_keys, (split + 1) * per_split)
    for j0 in tl.range(split * per_split, stop, BN):
        j = j0 + tl.arange(0, BN)
        y = _row_scores(q, k_ptr, k_strides[2], j, stop, factor, shift, F)
        highest = tl.maximum(low_peak, tl.max(y, 0))
        low_total = low_total * tl.exp2(low_peak - highest) + tl.sum(tl.exp2(y - highest), 0)
        low_peak = highest
        s = tl.where(j < stop, _phi(y, tl.zeros_like(y), F), 0.0)
        total += tl.sum(s, 0)
        peak = tl.maximum(peak, tl.max(s, 0))
    at = sums_ptr + (row * 4) * n_splits + split
    tl.store(at, total)
    tl.store(at + n_splits, peak)
    tl.store(at + 2 * n_splits, low_total)
    tl.store(at + 3 * n_splits, low_peak)


@triton.jit(do_not_specialize=["n_keys", "n_splits", "per_split"])
def _decode(
    q_ptr, k_ptr, v_ptr, factor_ptr, shift_ptr, sums_ptr, parts_ptr, totals_ptr,
    q_strides, k_strides, v_strides, n_head, n_keys, n_splits, per_split,
    F: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """sum w v (D,) and sum |w| over one split of the keys; SPLITS: the power of two above n_splits."""
    split, row, batch, head = _program(n_splits, n_head)
    k_ptr = _matrix(k_ptr, k_strides, batch, head)
    v_ptr = _matrix(v_ptr, v_strides, batch, head)
    q = _one_query(_matrix(q_ptr, q_strides, batch, head), F)
    factor = tl.load(factor_ptr + row) * F.unit
    shift = tl.zeros([1], tl.float32)
    if F.biased:
        shift += tl.load(shift_ptr) * F.unit
    c = tl.full([1], 1.0, tl.float32)
    e = tl.zeros([1], tl.float32)
    low = tl.zeros([1], tl.float32)
    if F.p > 0 or F.safe or F.online:
        others = tl.arange(0, SPLITS)
        at = sums_ptr + (row * 4) * n_splits + others
        exists = others < n_splits
        total = tl.sum(tl.load(at, mask=exists, other=0.0), 0)
        peak = tl.max(tl.load(at + n_splits, mask=exists, other=0.0), 0)
        low_totals = tl.load(at + 2 * n_splits, mask=exists, other=0.0)
        low_peaks = tl.load(at + 3 * n_splits, mask=exists, other=-1e38)
        low_peak = tl.max(low_peaks, 0)
        low_total = tl.sum(low_totals * tl.exp2(low_peaks - low_peak), 0)
        n = tl.full([1], 1.0, tl.float32) * n_keys
        c, e, shift, low = _row_constants(c * total, c * peak, c * low_total, c * low_peak, shift, n, F)
    BD: tl.constexpr = F.bd
    acc = tl.zeros([BD], tl.float32)
    sum_w = 0.0
    stop = tl.minimum(n_keys, (split + 1) * per_split)
    for j0 in tl.range(split * per_split, stop, BN):
        j = j0 + tl.arange(0, BN)
        y = _row_scores(q, k_ptr, k_strides[2], j, stop, factor, shift, F)
        s = tl.where(j < stop, _phi(y, low, F), 0.0)
        weight = _weigh(s, c, e, F)
        sum_w += tl.sum(tl.abs(weight), 0)
        v = _tile(v_ptr, j, stop, v_strides[2], True, F)
        acc += tl.sum(weight[:, None] * v.to(tl.float32), 0)
    d = tl.arange(0, BD)
    at = row * n_splits + split
    tl.store(parts_ptr + at * F.d + d, acc, mask=d < F.d)
    tl.store(totals_ptr + at, sum_w)
