"""Fused attention with an elementwise phi in place of exp: forward and backward Triton kernels.

    o = phi_attention(q, k, v, factor, phi="softplus", l1=True, p=15)      # LSSAR (engines/fused.py)

For scores x = factor * q.k + shift and s = phi(x) at the keys a row sees, the weights C of a row are

    l1 off:   C = s
    l1:       C = s / Z,        Z = sum |s|
    power p:  C = t^p / W,      W = sum t^p,   t = ReLU(c s - e),   c = n / (Z r_max),  e = O / r_max

which is l1(ReLU(n A - O)^p) of A = s / Z (LSSAR paper, eq. 5) with r = n A - O divided by its row maximum
r_max before the power. phi is increasing, so r_max is known from the largest s: forward takes one pass
over the keys for Z and max s, one for o. (`normalisers.reweight` defines the rows with O = 0.)

Backward, from o and two numbers a row, c' = c W^(-1/p) and e' = e W^(-1/p), so that C = t'^p with
t' = ReLU(c' s - e'), and with D = do.o, dC = do.v:

    h_j = t'_j^(p-1) (dC_j - D),     m = (O / n) sum_j h_j,     dx_j = p c' phi'(x_j) (h_j - m)

(p = 1: t'^0 is the indicator t' > 0; without a power h_j = dC_j - D, m = 0, p c' = 1 / Z.) m comes from
the other way s enters, through Z; sum_j C_j (dC_j - D) = 0 leaves of it only this mean. It is not known
before the row's last key, so the dq kernel sums both parts, sum h phi' k and sum phi' k, and writes m for
the dk, dv kernel that runs after it. (benchmarks/README.md: why nothing more is stored in forward.)

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

from normalisers import UNIFORM_TOLERANCE

PHIS = ("exp", "softplus", "sigmoid", "relu", "relu2", "relu6", "gelu", "mish", "identity")
MAX_HEAD_DIM = 128
MAX_POWER = 256  # `_power` reads 8 bits
SIGNED = ("gelu", "mish", "identity")
N_STATS = 4  # floats per row from forward: c', e', total shift of the score, low
N_ROW_GRADS = 4  # floats per row from `_backward_q`: d factor, D, gain, gain m

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# sum |s| below which a row has no mass, as in normalisers.L1Normalise
NO_MASS = tl.constexpr(1e8 * torch.finfo(torch.float32).tiny)
# A row with sum phi < 2^-58 has phi(x) = e^x to the last digit at each key, for softplus and sigmoid.
LOW = tl.constexpr(2.0**-58)
CONTRAST = tl.constexpr(UNIFORM_TOLERANCE)


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
    wide: bool  # some matrix of a head spans more than 2^31 elements: offsets take 64 bits

    @property
    def bd(self) -> int:
        """The power of two that holds head_dim."""
        return max(16, triton.next_power_of_2(self.d))

    @property
    def unit(self) -> float:
        """Scores come as x times this: these functions are computed in base 2."""
        return LOG2E.value if self.phi in ("exp", "softplus", "sigmoid") else 1.0

    @property
    def slope_unit(self) -> float:
        """Scale from the kernel's base-2 derivative to dphi/dx."""
        return LOG2E.value if self.phi == "softplus" else 1.0

    @property
    def signed(self) -> bool:
        return self.phi in SIGNED

    @property
    def safe(self) -> bool:
        """Rows may leave float32's range: the low ones, for exp all, are computed as 2^(y - max y)."""
        return self.l1 and (self.phi == "exp" or (not self.bounded and self.phi in ("softplus", "sigmoid")))

    @property
    def two_pass(self) -> bool:
        """o needs sums of the whole row first."""
        return self.p > 0 or self.safe

    @property
    def shifted(self) -> bool:
        return self.biased or self.safe

    @property
    def log2_1p(self) -> tuple[float, ...]:
        """P of log2(1 + u) = u P(u) on [0, 1], highest power first, minimax: off by 2e-7, if fast 9e-6.

        The special-function unit is busy with exponentials; polynomials run beside it.
        """
        if self.fast:
            return (-0.0344359066, 0.146032888, -0.303036203, 0.469174065, -0.720426164, 1.44268292)
        return (0.00754918208, -0.0425670617, 0.112856193, -0.19711897, 0.275641412, -0.358408472,
                0.480692957, -0.721340208, 1.442695)  # fmt: skip


# ---------------------------------------------------------------- tile mathematics, shared by all kernels


@triton.jit
def _softplus2(y, form: tl.constexpr):
    """log2(1 + 2^y) = softplus(y ln 2) / ln 2."""
    u = tl.exp2(tl.abs(y) * -1.0)
    r = u * form.log2_1p[0] + form.log2_1p[1]
    for i in tl.static_range(2, len(form.log2_1p)):
        r = r * u + form.log2_1p[i]
    return tl.maximum(y, 0.0) + r * u


@triton.jit
def _relu(x):
    """max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _phi(y, low, form: tl.constexpr):
    """phi(x) from y = x form.unit, and phi'(x) (softplus: in units of ln 2, and by y).

    2^y for rows that are `low` (form.safe). Where a kernel drops the slope, so does the compiler.
    """
    if form.phi == "exp":
        s = tl.exp2(y)
        slope = s
    elif form.phi == "softplus":
        s = _softplus2(y, form)
        slope = tl.exp2(y - s)  # sigmoid(x), with full relative accuracy on both sides
    elif form.phi == "sigmoid":
        s = 1.0 / (1.0 + tl.exp2(-y))
        slope = s * (1.0 - s)
    elif form.phi == "relu":
        s = _relu(y)
        slope = tl.where(y > 0, 1.0, 0.0)
    elif form.phi == "relu2":
        s = _relu(y) * _relu(y)
        slope = 2.0 * _relu(y)
    elif form.phi == "relu6":
        s = tl.minimum(_relu(y), 6.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where((y > 0) & (y < 6.0), 1.0, 0.0)
    elif form.phi == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(y * 0.7071067811865476))
        s = y * cdf
        slope = cdf + y * (0.3989422804014327 * tl.exp2(y * y * -0.7213475204444817))
    elif form.phi == "mish":
        # tanh(softplus(x)) = ((1 + e^x)^2 - 1) / ((1 + e^x)^2 + 1), from u = e^-|x|
        u = tl.exp2(-tl.abs(y) * LOG2E)
        top = tl.where(y >= 0, 1.0 + 2.0 * u, u * (u + 2.0))
        tanh = top / (top + tl.where(y >= 0, 2.0 * u * u, 2.0))
        s = y * tanh
        slope = tanh + y * (1.0 - tanh * tanh) * tl.where(y >= 0, 1.0, u) / (1.0 + u)
    else:
        s = y
        slope = tl.full(y.shape, 1.0, tl.float32)
    if form.safe and form.phi != "exp":
        s = tl.where(low > 0, tl.exp2(y), s)
        slope = tl.where(low > 0, s * (LN2 if form.phi == "softplus" else 1.0), slope)
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
def _weigh(s, c, e, form: tl.constexpr):
    """Weights before the last division: s, or t^p."""
    weight = s
    if form.p > 0:
        t = _relu(s * c - e)
        weight = _power(t, form.p - 1) * t
    return weight


@triton.jit
def _weigh_and_grad(s, dC, c, e, delta, form: tl.constexpr):
    """The weights C, and h (see the top of this file), from c' and e'."""
    if form.p > 0:
        t = _relu(s * c - e)
        lower = _power(t, form.p - 1)
        weight = lower * t
        h = lower * (dC - delta)
    else:
        weight = s * c
        h = dC
        if form.l1 and form.signed:
            h = dC - tl.where(s > 0, delta, tl.where(s < 0, -delta, 0.0))
        elif form.l1:
            h = dC - delta
    return weight, h


@triton.jit
def _scores(a, b, factor, shift, form: tl.constexpr):
    """y = factor a.b + shift in float32, of tiles (M, D) and (N, D), or of one query (D,) and keys (N, D)."""
    if len(a.shape) == 1:
        y = tl.sum(b.to(tl.float32) * a[None, :], 1) * factor
    else:
        y = tl.dot(a, tl.trans(b), input_precision=form.precision) * factor
    if form.shifted:
        y += shift
    return y


@triton.jit
def _phi_of_scores(
    a, b, position, j, factor, shift, low, DIAGONAL: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """phi(x) and phi'(x) of a tile; DIAGONAL: 0 at keys j after the row's position."""
    s, slope = _phi(_scores(a, b, factor, shift, form), low, form)
    if DIAGONAL:
        s = tl.where(position >= j, s, 0.0)
        slope = tl.where(position >= j, slope, 0.0)
    return s, slope


@triton.jit
def _add_sums(total, lost, peak, s):
    """Add a tile to sum phi and max phi over its last axis.

    Kahan's sum: over 64K equal keys a plain one is off by more than the 1e-5 by which rows count as uniform.
    """
    axis: tl.constexpr = len(s.shape) - 1
    part = tl.sum(s, axis) - lost
    new = total + part
    return new, (new - total) - part, tl.maximum(peak, tl.max(s, axis))


@triton.jit
def _add_low_sums(total, peak, y, visible):
    """Add a tile to sum 2^(y - peak) and peak = max y over its last axis."""
    axis: tl.constexpr = len(y.shape) - 1
    y = tl.where(visible, y, -float("inf"))
    highest = tl.maximum(peak, tl.max(y, axis))
    total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(y - tl.expand_dims(highest, axis)), axis)
    return total, highest


@triton.jit
def _row_constants(total, peak, low_total, low_peak, shift, n, form: tl.constexpr):
    """c, e, shift and low of rows from their sums, of phi and of 2^(y - low_peak).

    `normalisers.reweight` explains O, and why rows without contrast have none.
    """
    low = tl.zeros_like(total)
    if form.safe:
        low = tl.where((total < LOW) | (form.phi == "exp"), 1.0, 0.0)
        shift = tl.where(low > 0, shift - low_peak, shift)
        total = tl.where(low > 0, low_total, total)
        peak = tl.where(low > 0, 1.0, peak)
    c = tl.full(total.shape, 1.0, tl.float32)
    e = tl.zeros_like(total)
    if form.p > 0:
        has_mass = ~(total <= NO_MASS)  # NaN has: it must reach o
        mean = tl.where(has_mass, total, 1.0) / n
        top = peak / mean  # max n A
        offset = tl.where((n > 3) & (top - 1.0 > CONTRAST), 1.0, 0.0)
        inverse = tl.where(has_mass, 1.0 / (top - offset), 0.0)
        c = inverse / mean
        e = offset * inverse
    return c, e, shift, low


@triton.jit
def _normalise(total, c, e, form: tl.constexpr):
    """The factor of sum w v, and c', e' with which `_weigh` gives C itself."""
    if form.p > 0:
        has_mass = ~(total <= 0)
        scale = tl.where(has_mass, 1.0 / total, 0.0)
        root = tl.where(has_mass, tl.exp2(tl.log2(total) * (-1.0 / form.p)), 0.0)
        c = c * root
        e = e * root
    else:
        if form.l1:
            scale = tl.where(total <= NO_MASS, 0.0, 1.0 / total)
        else:
            scale = tl.full(total.shape, LN2 if form.phi == "softplus" else 1.0, tl.float32)
        c = scale
    return scale, c, e


# ---------------------------------------------------------------- memory


@triton.jit
def _program(n_parts, n_head):
    """Which part of which head this program works on: (part, batch * n_head + head, batch, head)."""
    row = (tl.program_id(0) // n_parts).to(tl.int64)
    return tl.program_id(0) % n_parts, row, row // n_head, row % n_head


@triton.jit
def _matrix(pointer, strides, n, batch, head):
    """The (n, D) matrix of one batch element and head: where it begins, its row stride, n."""
    return pointer + batch * strides[0] + head * strides[1], strides[2], n


@triton.jit
def _tile_pointers(matrix, start, SIZE: tl.constexpr, CUT: tl.constexpr, form: tl.constexpr):
    """Pointers to rows start..start + SIZE of a matrix, and which exist; CUT: some may be beyond its end."""
    base, stride, n = matrix
    d = tl.arange(0, form.bd)[None, :]
    row = start + tl.arange(0, SIZE)[:, None]
    mask = tl.full([1, 1], True, tl.int1)
    if CUT:
        mask = mask & (row < n)
    if form.d < form.bd:
        mask = mask & (d < form.d)
    if form.wide:
        row = row.to(tl.int64)
    return base + row * stride + d, mask


@triton.jit
def _tile(matrix, start, SIZE: tl.constexpr, CUT: tl.constexpr, form: tl.constexpr):
    """Rows start..start + SIZE of a matrix as (SIZE, BD), zeros outside."""
    at, mask = _tile_pointers(matrix, start, SIZE, CUT, form)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _store_tile(matrix, start, values, form: tl.constexpr):
    at, mask = _tile_pointers(matrix, start, values.shape[0], True, form)
    tl.store(at, values.to(matrix[0].dtype.element_ty), mask=mask)


@triton.jit
def _store_rows(pointer, n_rows, inside, a, b, c, d):
    """Four floats a row, in planes of n_rows."""
    tl.store(pointer, a, mask=inside)
    tl.store(pointer + n_rows, b, mask=inside)
    tl.store(pointer + 2 * n_rows, c, mask=inside)
    tl.store(pointer + 3 * n_rows, d, mask=inside)


@triton.jit
def _query_block(n_head, n_queries, n_keys, BM: tl.constexpr, BN: tl.constexpr):
    """The rows of this program and the keys they see, blocks with most keys first.

    Returns batch, head, the first row, its index among the n_rows of all heads, n_rows, and where the tiles
    end that all rows see (`whole`), and those on the diagonal (`stop`).
    """
    n_blocks = tl.cdiv(n_queries, BM)
    part, row, batch, head = _program(n_blocks, n_head)
    start = (n_blocks - 1 - part) * BM
    n_rows = (tl.num_programs(0) // n_blocks).to(tl.int64) * n_queries
    whole = (n_keys - n_queries + start + 1) // BN * BN
    stop = tl.minimum(n_keys, n_keys - n_queries + start + BM)
    return batch, head, start, row * n_queries, n_rows, whole, stop


@triton.jit
def _add_product(acc, tile, b, form: tl.constexpr):
    """acc + tile b, for a float32 tile (M, N) that is rounded to b's (N, D) type."""
    return tl.dot(tile.to(b.dtype), b, acc, input_precision=form.precision)


# ---------------------------------------------------------------- forward: BM query rows of one head


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _forward(
    q_ptr, k_ptr, v_ptr, factor_ptr, shift_ptr, o_ptr, stats_ptr,
    q_strides, k_strides, v_strides, o_strides, n_head, group, n_queries, n_keys,
    form: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """o, and c', e', shift and low of each row."""
    batch, head, start, first_row, n_rows, whole, stop = _query_block(n_head, n_queries, n_keys, BM, BN)
    keys = _matrix(k_ptr, k_strides, n_keys, batch, head // group)
    values = _matrix(v_ptr, v_strides, n_keys, batch, head // group)
    i = start + tl.arange(0, BM)
    inside = i < n_queries
    position = n_keys - n_queries + i  # among the keys: the row sees those up to it
    q = _tile(_matrix(q_ptr, q_strides, n_queries, batch, head), start, BM, True, form)
    factor = tl.load(factor_ptr + first_row + i, mask=inside, other=0.0) * form.unit
    shift = tl.zeros([BM], tl.float32)
    if form.biased:
        shift = tl.load(shift_ptr + i, mask=inside, other=0.0) * form.unit
    total = tl.zeros([BM], tl.float32)
    lost = tl.zeros([BM], tl.float32)
    peak = tl.zeros([BM], tl.float32)
    low = tl.zeros([BM], tl.float32)
    if form.two_pass and form.phi != "exp":
        for DIAGONAL in tl.static_range(2):
            for j0 in tl.range(whole if DIAGONAL else 0, stop if DIAGONAL else whole, BN):
                j = j0 + tl.arange(0, BN)
                k = _tile(keys, j0, BN, DIAGONAL, form)
                s, _ = _phi_of_scores(q, k, position[:, None], j[None, :], factor[:, None], shift[:, None],
                                      low[:, None], DIAGONAL, form)  # fmt: skip
                total, lost, peak = _add_sums(total, lost, peak, s)
    low_total = tl.zeros([BM], tl.float32)
    low_peak = tl.full([BM], -1e38, tl.float32)
    if form.safe:  # noqa: SIM102 (decided when compiled; the next one when run)
        if tl.min(tl.where(inside, total, 1.0), 0) < LOW:
            for j0 in tl.range(0, stop, BN):
                j = j0 + tl.arange(0, BN)
                y = _scores(q, _tile(keys, j0, BN, True, form), factor[:, None], shift[:, None], form)
                low_total, low_peak = _add_low_sums(low_total, low_peak, y, position[:, None] >= j[None, :])
    n = (position + 1).to(tl.float32)
    c, e, shift, low = _row_constants(total, peak, low_total, low_peak, shift, n, form)

    BD: tl.constexpr = form.bd
    acc = tl.zeros([BM, BD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    for DIAGONAL in tl.static_range(2):
        for j0 in tl.range(whole if DIAGONAL else 0, stop if DIAGONAL else whole, BN):
            j = j0 + tl.arange(0, BN)
            k = _tile(keys, j0, BN, DIAGONAL, form)
            s, _ = _phi_of_scores(q, k, position[:, None], j[None, :], factor[:, None], shift[:, None],
                                  low[:, None], DIAGONAL, form)  # fmt: skip
            weight = _weigh(s, c[:, None], e[:, None], form)
            total += tl.sum(tl.abs(weight) if form.signed else weight, 1)
            acc = _add_product(acc, weight, _tile(values, j0, BN, DIAGONAL, form), form)
    scale, c, e = _normalise(total, c, e, form)
    _store_tile(_matrix(o_ptr, o_strides, n_queries, batch, head), start, acc * scale[:, None], form)
    _store_rows(stats_ptr + first_row + i, n_rows, inside, c, e, shift, low)


# ---------------------------------------------------------------- backward: BM query rows, then BN keys


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, factor_ptr, stats_ptr, dq_ptr, row_grads_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, n_head, group, n_queries, n_keys,
    form: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq; and of each row d factor, D, and what `_backward_kv` multiplies h by and subtracts."""
    batch, head, start, first_row, n_rows, whole, stop = _query_block(n_head, n_queries, n_keys, BM, BN)
    keys = _matrix(k_ptr, k_strides, n_keys, batch, head // group)
    values = _matrix(v_ptr, v_strides, n_keys, batch, head // group)
    i = start + tl.arange(0, BM)
    inside = i < n_queries
    position = n_keys - n_queries + i
    q = _tile(_matrix(q_ptr, q_strides, n_queries, batch, head), start, BM, True, form)
    do = _tile(_matrix(do_ptr, do_strides, n_queries, batch, head), start, BM, True, form)
    delta = tl.zeros([BM], tl.float32)
    if form.l1:
        o = _tile(_matrix(o_ptr, o_strides, n_queries, batch, head), start, BM, True, form)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_factor = tl.load(factor_ptr + first_row + i, mask=inside, other=0.0)
    factor = row_factor * form.unit
    stats_ptr += first_row + i
    c = tl.load(stats_ptr, mask=inside, other=0.0)
    e = tl.load(stats_ptr + n_rows, mask=inside, other=0.0)
    shift = tl.load(stats_ptr + 2 * n_rows, mask=inside, other=0.0)
    low = tl.load(stats_ptr + 3 * n_rows, mask=inside, other=0.0)
    BD: tl.constexpr = form.bd
    acc = tl.zeros([BM, BD], tl.float32)  # sum h phi' k
    acc_mean = tl.zeros([BM, BD], tl.float32)  # sum phi' k
    h_sum = tl.zeros([BM], tl.float32)
    for DIAGONAL in tl.static_range(2):
        for j0 in tl.range(whole if DIAGONAL else 0, stop if DIAGONAL else whole, BN):
            j = j0 + tl.arange(0, BN)
            k = _tile(keys, j0, BN, DIAGONAL, form)
            v = _tile(values, j0, BN, DIAGONAL, form)
            s, slope = _phi_of_scores(q, k, position[:, None], j[None, :], factor[:, None], shift[:, None],
                                      low[:, None], DIAGONAL, form)  # fmt: skip
            dC = tl.dot(do, tl.trans(v), input_precision=form.precision)
            _, h = _weigh_and_grad(s, dC, c[:, None], e[:, None], delta[:, None], form)
            acc = _add_product(acc, h * slope, k, form)
            if form.p > 0:
                h_sum += tl.sum(h, 1)
                acc_mean = _add_product(acc_mean, slope, k, form)
    mean = tl.zeros([BM], tl.float32)
    gain = c * form.slope_unit
    if form.p > 0:
        mean = tl.where(e > 0, h_sum / (position + 1).to(tl.float32), 0.0)
        acc -= mean[:, None] * acc_mean
        gain *= form.p
    acc *= gain[:, None]  # sum_j dx_j k_j
    gain *= row_factor  # with which d (q k)_j = factor dx_j = (gain h_j - gain m) phi'_j
    d_factor = tl.sum(acc * q.to(tl.float32), 1)
    dq = _matrix(dq_ptr, dq_strides, n_queries, batch, head)
    _store_tile(dq, start, acc * row_factor[:, None], form)
    _store_rows(row_grads_ptr + first_row + i, n_rows, inside, d_factor, delta, gain, gain * mean)


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, factor_ptr, stats_ptr, row_grads_ptr, dk_ptr, dv_ptr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, n_head, group, n_queries, n_keys,
    form: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv, after `_backward_q` has written its row gradients. Tiles are (keys, queries)."""
    n_blocks = tl.cdiv(n_keys, BN)
    block, row, batch, kv_head = _program(n_blocks, n_head // group)
    j = block * BN + tl.arange(0, BN)
    k = _tile(_matrix(k_ptr, k_strides, n_keys, batch, kv_head), block * BN, BN, True, form)
    v = _tile(_matrix(v_ptr, v_strides, n_keys, batch, kv_head), block * BN, BN, True, form)
    n_rows = (tl.num_programs(0) // n_blocks).to(tl.int64) * group * n_queries
    # Rows on the diagonal, which do not see all of these keys, then rows that see them all.
    first = block * BN - (n_keys - n_queries)  # the row at the block's first key
    start = tl.maximum(first, 0) // BM * BM
    whole = tl.minimum(tl.cdiv(tl.maximum(first + BN - 1, 0), BM), tl.cdiv(n_queries, BM)) * BM
    BD: tl.constexpr = form.bd
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    for member in tl.range(group):  # the query heads of this head of keys; 1 is a constant, and no loop
        head = kv_head * group + member
        first_row = (batch * n_head + head) * n_queries
        queries = _matrix(q_ptr, q_strides, n_queries, batch, head)
        grads = _matrix(do_ptr, do_strides, n_queries, batch, head)
        for WHOLE in tl.static_range(2):
            for i0 in tl.range(whole if WHOLE else start, n_queries if WHOLE else whole, BM):
                i = i0 + tl.arange(0, BM)
                inside = i < n_queries  # rows beyond have q = do = c = 0 and add nothing
                q = _tile(queries, i0, BM, True, form)
                do = _tile(grads, i0, BM, True, form)
                factor = tl.load(factor_ptr + first_row + i, mask=inside, other=0.0) * form.unit
                c = tl.load(stats_ptr + first_row + i, mask=inside, other=0.0)
                e = tl.zeros_like(c)
                shift = tl.zeros_like(c)
                low = tl.zeros_like(c)
                delta = tl.zeros_like(c)
                if form.shifted:
                    shift = tl.load(stats_ptr + 2 * n_rows + first_row + i, mask=inside, other=0.0)
                if form.safe:
                    low = tl.load(stats_ptr + 3 * n_rows + first_row + i, mask=inside, other=0.0)
                position = n_keys - n_queries + i
                s, slope = _phi_of_scores(k, q, position[None, :], j[:, None], factor[None, :],
                                          shift[None, :], low[None, :], WHOLE == 0, form)  # fmt: skip
                if form.p > 0:
                    e = tl.load(stats_ptr + n_rows + first_row + i, mask=inside, other=0.0)
                if form.l1:
                    delta = tl.load(row_grads_ptr + n_rows + first_row + i, mask=inside, other=0.0)
                dC = tl.dot(v, tl.trans(do), input_precision=form.precision)
                weight, h = _weigh_and_grad(s, dC, c[None, :], e[None, :], delta[None, :], form)
                dv = _add_product(dv, weight, do, form)
                dx = h * tl.load(row_grads_ptr + 2 * n_rows + first_row + i, mask=inside, other=0.0)[None, :]
                if form.p > 0:
                    dx -= tl.load(row_grads_ptr + 3 * n_rows + first_row + i, mask=inside, other=0.0)[None, :]
                dk = _add_product(dk, dx * slope, q, form)
    _store_tile(_matrix(dk_ptr, dk_strides, n_keys, batch, kv_head), block * BN, dk, form)
    _store_tile(_matrix(dv_ptr, dv_strides, n_keys, batch, kv_head), block * BN, dv, form)
