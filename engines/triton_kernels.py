"""Fused attention with an elementwise phi in place of exp: forward and backward Triton kernels.

    o = phi_attention(q, k, v, phi="softplus", l1=True, p=15)      # LSSAR (engines/triton.py)

For scores x = q.k + shift and s = phi(x) at the n keys a row sees, the weights C of a row are

    l1 off:   C = s
    l1:       C = s / Z,        Z = sum s
    power p:  C = t^p / W,      W = sum t^p,   t = ReLU(c s - e),   c = n / (Z r_max),  e = O / r_max

which is l1(ReLU(n A - O)^p) of A = s / Z (LSSAR paper, eq. 5) with r = n A - O divided by its row
maximum r_max before the power. phi is increasing, so r_max is known from the largest x: forward
takes one pass over the keys for Z and max x, one for o. (`normalisers.base.reweight` defines the
rows with O = 0.)

Backward, with c' = c W^(-1/p) and e' = e W^(-1/p), so that C = t'^p with t' = ReLU(c' s - e'), with
D = do.o and dC = do.v:

    h_j = t'_j^(p-1) (dC_j - D),     m = (O / n) sum_j h_j,     dx_j = p c' phi'(x_j) (h_j - m)

(p = 1: t'^0 is the indicator t' > 0; without a power h_j = dC_j - D, m = 0, p c' = 1 / Z.) m comes
from the other way s enters, through Z. Forward writes a vector u with m = do.u for each row,

    u = (O / n) sum_j t'_j^(p-1) (v_j - o)

The program of a block of keys sums dk and dv and adds its part of dq to float32, atomically, as
FlashAttention-2 does: dq's last bits differ from run to run. A deterministic backward sums dq in
the kernel of rows, in a fixed order. Memory beyond inputs and outputs: u and 4 floats a row from
forward, 4 more in backward and dq in float32, padded (with grouped heads also dk and dv of each
query head).

q arrives multiplied by its factor and, where phi has an exponential, by log2(e): y = q.k is the
score in base 2, and softplus is log2(1 + 2^y), whose unit l1 cancels. Its derivative is sigmoid(x)
= 2^(y - log2(1 + 2^y)). For 16-bit inputs of bounded scores (LSSAR's) forward takes the GPU's
logarithm, one instruction, off by 2^-22. Backward has the polynomial, as the logarithm was no
faster there. Where a row's weights are sensitive to either's error or to their difference
(`_row_constants`), its block uses the polynomial in both.

A row sees the keys from its `first` (0 where there is none, as without documents and windows) to its
own. Firsts never fall from one row to the next, so that a block of rows begins at the first of its
first row, and a block of keys ends at the last row that sees its last key. Tiles that all rows see
whole need no mask.

For NVIDIA GPUs from compute capability 8.0 on; TRITON_INTERPRET=1 runs them on the CPU (tests).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from normalisers.base import UNIFORM_TOLERANCE

MAX_POWER = 256  # `_weigh` reads 8 bits
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1
N_ROW = tl.constexpr(4)  # floats per row, side by side, from forward and from `_backward_rows`
# dq's float32 buffer has a multiple of rows, as tiles (at most 128) run over the end
PAD = tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# P of log2(1 + u) = u P(u) on [0, 1], highest power first, minimax: off by 2e-7; FAST by 9e-6
LOG2_1P = (0.00754918208, -0.0425670617, 0.112856193, -0.19711897, 0.275641412, -0.358408472, 0.480692957,
           -0.721340208, 1.442695)  # fmt: skip
LOG2_1P_FAST = (-0.0344359066, 0.146032888, -0.303036203, 0.469174065, -0.720426164, 1.44268292)
NO_MASS = tl.constexpr(1e8 * torch.finfo(torch.float32).tiny)  # as in normalisers.base
# A row with sum phi < 2^-58 has phi(x) = e^x to the last digit at each key, for softplus and
# sigmoid.
LOW = tl.constexpr(2.0**-58)
CONTRAST = tl.constexpr(UNIFORM_TOLERANCE)
NEVER = tl.constexpr(-1e38)  # below every score
# Forward's loops over tiles: before the diagonal and on it, or where a row is flagged one of
# smaller tiles.
BEFORE, ON, REDO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, besides its block sizes; never the sequence length."""

    phi: str
    l1: bool
    p: int  # 0: no re-weighting
    rising: bool  # for all powers below p; a call's is the kernel's argument `power`
    bounded: bool  # |x| is so small that a row of phi(x) cannot underflow (LSSA's cosine scores)
    has_shift: bool  # there is a shift
    fast: bool  # softplus to 9e-6: enough for 16-bit inputs
    d: int  # head_dim
    has_first: bool = False  # rows have a first key: of their document, or of their window

    # Under which Triton keeps a compiled kernel: of these properties it would see nothing.
    cache_key = property(lambda form: f"{form} {SOURCE}")
    precision = property(lambda form: "ieee" if INTERPRETED else "tf32x3")  # of products of float32
    bd = property(lambda form: max(16, triton.next_power_of_2(form.d)))  # columns of a tile
    # dC/dy over p c' t'^(p-1) times the kernel's derivative of phi
    gain = property(lambda form: LN2.value if form.phi in ("exp", "sigmoid") else 1.0)
    # Rows may leave float32's range: the low ones, for exp all, are computed as 2^(y - max y).
    safe = property(
        lambda form: form.l1 and form.phi != "relu" and not (form.bounded and form.phi != "exp")
    )
    two_pass = property(lambda form: form.p > 0 or form.safe)  # o needs sums of the whole row first
    shifted = property(lambda form: form.has_shift or form.safe)
    # forward takes softplus by the GPU's logarithm, and by a polynomial only in blocks with flagged
    # rows
    log = property(
        lambda form: form.phi == "softplus" and form.bounded and form.fast and form.p > 0
    )
    # how forward sums a row (`_add_sums`), and how it does again if a row is flagged
    sums = property(lambda form: "low" if form.phi == "exp" else "log" if form.log else "exact")
    sums_again = property(lambda form: "low" if form.safe else "exact")
    log2_1p = property(lambda form: LOG2_1P_FAST if form.fast else LOG2_1P)


# ---------------------------------------------------------------- tile mathematics, shared by all
# kernels


@triton.jit
def _log2(x):
    """log2 to 2^-22, in one instruction (tl.log2 calls a library function of 20)."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    return result


@triton.jit
def _relu(x):
    """max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _phi(y, low, EXACT: tl.constexpr, form: tl.constexpr):
    """phi(x) from the score y, and its derivative, by y (exp, sigmoid: by x); softplus as log2(1 +
    2^y).

    2^y for rows that are `low` (form.safe). Where a kernel drops the slope, so does the compiler.
    """
    if form.phi == "exp":
        s = tl.exp2(y)
        slope = s
    elif form.phi == "softplus":
        if form.log and not EXACT:
            s = _log2(1.0 + tl.exp2(y))
        else:
            u = tl.exp2(-tl.abs(y))
            poly = u * form.log2_1p[0] + form.log2_1p[1]
            for i in tl.static_range(2, len(form.log2_1p)):
                poly = poly * u + form.log2_1p[i]
            s = tl.maximum(y, 0.0) + poly * u
        slope = tl.exp2(y - s)  # sigmoid(x), with full relative accuracy on both sides
    elif form.phi == "sigmoid":
        s = 1.0 / (1.0 + tl.exp2(-y))
        slope = s * (1.0 - s)
    else:
        s = _relu(y)
        slope = tl.where(y > 0, 1.0, 0.0)
    if form.safe and form.phi != "exp":
        s = tl.where(low > 0, tl.exp2(y), s)
        slope = tl.where(low > 0, s * (LN2 if form.phi == "softplus" else 1.0), slope)
    return s, slope


@triton.jit
def _weigh(s, c, e, power, form: tl.constexpr):
    """Weights before the last division: s, or t^p; and t^(p-1) by squaring, t^0 the indicator t >
    0.
    """
    weight = s
    lower = s
    if form.p > 0:
        t = _relu(s * c - e)
        square = t
        lower = tl.where(t > 0, 1.0, 0.0)
        for bit in tl.static_range(8):
            if form.rising:
                if (form.p - 1) >> bit:
                    lower = tl.where((((power - 1) >> bit) & 1) == 1, lower * square, lower)
            elif ((form.p - 1) >> bit) & 1:
                lower = square if (form.p - 1) & ((1 << bit) - 1) == 0 else lower * square
            square = square * square
        weight = lower * t
    return weight, lower


@triton.jit
def _weigh_and_grad(s, slope, dC, c, e, delta, c_mean, power, form: tl.constexpr):
    """The weights C and dx / (p gain), see the top of this file, from c', e', D and c' m."""
    weight, lower = _weigh(s, c, e, power, form)
    h = dC
    if form.l1:
        h = dC - delta
    if form.p > 0:
        h = lower * h
    else:
        weight = s * c
    return weight, (h * c - c_mean) * slope


@triton.jit
def _scores(a, b, shift, form: tl.constexpr):
    """y = a.b + shift in float32, of tiles (M, D) and (N, D)."""
    y = tl.dot(a, tl.trans(b), input_precision=form.precision)
    if form.shifted:
        y += shift
    return y


@triton.jit
def _visible(position, first, j, form: tl.constexpr):
    """Whether a row at `position` among the keys sees key j."""
    visible = position >= j
    if form.has_first:
        visible = visible & (first <= j)
    return visible


@triton.jit
def _phi_of_scores(
    a, b, position, first, j, shift, low, EDGE: tl.constexpr, EXACT: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """phi(x) and its derivative of a tile; EDGE: 0 at keys j that the row does not see."""
    s, slope = _phi(_scores(a, b, shift, form), low, EXACT, form)
    if EDGE:
        visible = _visible(position, first, j, form)
        s = tl.where(visible, s, 0.0)
        slope = tl.where(visible, slope, 0.0)
    return s, slope


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _add_sums(total, lost, peak, y, HOW: tl.constexpr, form: tl.constexpr):
    """Add a tile of scores, -inf where hidden, to a sum and to max y over its last axis.

    HOW: "exact" sums phi; "log" softplus as max(y, 0) + log2(1 + 2^-|y|), one logarithm of a
    product for all keys (at most 64) of a tile; "low" sums 2^(y - peak). Kahan's sum: over 64K
    equal keys a plain one is off by more than the 1e-5 by which rows count as uniform.
    """
    axis: tl.constexpr = len(y.shape) - 1
    highest = tl.maximum(peak, tl.max(y, axis))
    if HOW == "low":
        total *= tl.exp2(peak - highest)
        lost *= tl.exp2(peak - highest)
        part = tl.sum(tl.exp2(y - tl.expand_dims(highest, axis)), axis)
    elif HOW == "log":
        part = tl.sum(_relu(y), axis) + _log2(tl.reduce(1.0 + tl.exp2(-tl.abs(y)), axis, _times))
    else:
        s, _ = _phi(y, tl.zeros_like(y), True, form)
        part = tl.sum(s, axis)
    part -= lost
    new = total + part
    return new, (new - total) - part, highest


@triton.jit
def _row_constants(
    total, low_total, peak, shift, position, first, n_keys, power, form: tl.constexpr
):  # fmt: skip
    """c, e, shift, and a flag for rows that are low (form.safe) or need exact softplus (form.log).

    From the sums of phi and of 2^(y - peak), and peak = max y. `normalisers.base.reweight` explains
    O, and why rows without contrast have none.
    """
    flag = tl.zeros_like(total)
    if form.safe:
        flag = tl.where(((total < LOW) & (position < n_keys)) | (form.phi == "exp"), 1.0, 0.0)
        shift = tl.where(flag > 0, shift - peak, shift)
        total = tl.where(flag > 0, low_total, total)
        peak = tl.where(flag > 0, 0.0, peak)
    c = tl.full(total.shape, 1.0, tl.float32)
    e = tl.zeros_like(total)
    if form.p > 0:
        n = (position - first + 1).to(tl.float32)
        largest, _ = _phi(peak, flag, True, form)
        has_mass = ~(total <= NO_MASS)  # NaN has: it must reach o
        mean = tl.where(has_mass, total, 1.0) / n
        top = largest / mean  # max n A
        offset = tl.where((n > 3) & (top - 1.0 > CONTRAST), 1.0, 0.0)
        inverse = tl.where(has_mass, 1.0 / (top - offset), 0.0)
        c = inverse / mean
        e = offset * inverse
        # the weights are off by the power times the errors of s and mean over this contrast
        if form.log:
            contrast = tl.where(n > 3, largest - mean, largest)
            close = tl.maximum(2.0**-5, power * 2.0**-9)
            flag = tl.where((contrast < close) & (position < n_keys), 1.0, 0.0)
    return c, e, shift, flag


# ---------------------------------------------------------------- memory and loops


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
    """Pointers to rows start..start + SIZE of a matrix, and which exist; CUT: some may be beyond
    its end.
    """
    base, stride, n = matrix
    d = tl.arange(0, form.bd)[None, :]
    row = tl.arange(0, SIZE)[:, None]
    mask = tl.full([1, 1], True, tl.int1)
    if CUT:
        mask = mask & (start + row < n)
    if form.d < form.bd:
        mask = mask & (d < form.d)
    return base + tl.cast(start, tl.int64) * stride + (row * stride + d), mask


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
def _load_rows(pointer, i, n, SIZE: tl.constexpr):
    """The N_ROW floats of rows i (SIZE,), zeros from n on, in one copy from global memory."""
    at = pointer + i[:, None] * N_ROW + tl.arange(0, N_ROW)[None, :]
    rows = tl.load(at, mask=(i < n)[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(rows, [SIZE, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _store_rows(pointer, i, n, a, b, c, d):
    rows = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], N_ROW])
    at = pointer + i[:, None] * N_ROW + tl.arange(0, N_ROW)[None, :]
    tl.store(at, rows, mask=(i < n)[:, None])


@triton.jit
def _query_block(
    first_ptr, n_head, n_queries, n_keys, BM: tl.constexpr, BN: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """Batch, head, first row and rows (BM,) of this program, the index of the head's first row
    among all, and where tiles of keys begin and end (`_edge_tile`). Blocks with most keys come
    first."""
    n_blocks = tl.cdiv(n_queries, BM)
    part, row, batch, head = _program(n_blocks, n_head)
    start = (n_blocks - 1 - part) * BM
    i = start + tl.arange(0, BM)
    inner = 0
    outer = (n_keys - n_queries + start + 1) // BN * BN
    edges = outer
    stop = tl.minimum(n_keys, n_keys - n_queries + start + BM)
    if form.has_first:
        first_ptr += batch * n_queries
        lowest = tl.load(first_ptr + start) // BN * BN
        inner = tl.cdiv(tl.load(first_ptr + tl.minimum(start + BM, n_queries) - 1), BN) * BN
        outer = tl.maximum(inner, outer)
        edges = outer - (inner - lowest)
    return batch, head, start, i, row * n_queries, (inner, outer, edges, stop)


@triton.jit
def _edge_tile(at, inner, outer, form: tl.constexpr):
    """Where the tile of a loop over the edges begins: those before `inner`, then those from `outer`
    on. Between them all rows see all keys. `at` runs on from the first of them to `outer`."""
    if form.has_first:
        at = tl.where(at < outer, at - outer + inner, at)
    return at


@triton.jit
def _firsts(first_ptr, batch, i, n_queries, form: tl.constexpr):
    """The first key of rows i (BM,); 0 for rows beyond the end, as for all without `first`."""
    first = tl.zeros_like(i)
    if form.has_first:
        first = tl.load(first_ptr + batch * n_queries + i, mask=i < n_queries, other=0)
    return first


# ---------------------------------------------------------------- forward: BM query rows of one
# head


@triton.jit
def _row_sums(
    q, keys, position, first, shift, bounds, HOW: tl.constexpr, STAGES: tl.constexpr,
    BN: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """`_add_sums` over all keys that each row sees."""
    total = tl.zeros_like(shift)
    lost = tl.zeros_like(shift)
    peak = tl.full(shift.shape, NEVER, tl.float32)
    inner, outer, edges, stop = bounds
    for EDGE in tl.static_range(2):
        for at in tl.range(
            edges if EDGE else inner, stop if EDGE else outer, BN, num_stages=STAGES
        ):
            j0 = _edge_tile(at, inner, outer, form) if EDGE else at
            y = _scores(q, _tile(keys, j0, BN, EDGE, form), shift[:, None], form)
            if EDGE:
                j = j0 + tl.arange(0, BN)
                visible = _visible(position[:, None], first[:, None], j[None, :], form)
                y = tl.where(visible, y, -float("inf"))
            total, lost, peak = _add_sums(total, lost, peak, y, HOW, form)
    return total, peak


@triton.jit(do_not_specialize=["power", "n_queries", "n_keys"])
def _forward(
    q_ptr, k_ptr, v_ptr, shift_ptr, first_ptr, o_ptr, stats_ptr, u_ptr,
    q_strides, k_strides, v_strides, o_strides,
    power, n_head, group, n_queries, n_keys, form: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """o, c', e', shift and flag of each row, and for a backward pass u, laid out as o."""
    batch, head, start, i, first_row, bounds = _query_block(
        first_ptr, n_head, n_queries, n_keys, BM, BN, form
    )
    keys = _matrix(k_ptr, k_strides, n_keys, batch, head // group)
    values = _matrix(v_ptr, v_strides, n_keys, batch, head // group)
    position = n_keys - n_queries + i  # among the keys: the row sees those up to it
    first = _firsts(first_ptr, batch, i, n_queries, form)
    inner, outer, edges, stop = bounds
    lowest = edges - outer + inner
    q = _tile(_matrix(q_ptr, q_strides, n_queries, batch, head), start, BM, True, form)
    shift = tl.zeros([BM], tl.float32)
    if form.has_shift:
        if form.has_first:
            shift_ptr += batch * n_queries
        shift = tl.load(shift_ptr + i, mask=i < n_queries, other=0.0)
    c = tl.full([BM], 1.0, tl.float32)
    e = tl.zeros([BM], tl.float32)
    flag = tl.zeros([BM], tl.float32)
    if form.two_pass:
        given = shift
        HOW: tl.constexpr = form.sums
        AGAIN: tl.constexpr = form.sums_again
        total, peak = _row_sums(q, keys, position, first, given, bounds, HOW, None, BN, form)
        c, e, shift, flag = _row_constants(
            total, total, peak, given, position, first, n_keys, power, form
        )
        if HOW != AGAIN:  # noqa: SIM102 (decided when compiled; the next one when run)
            if tl.max(flag, 0) > 0:
                again, peak = _row_sums(
                    q,
                    keys,
                    position,
                    first,
                    given,
                    (inner, inner, lowest, stop),
                    AGAIN,
                    1,
                    BN,
                    form,
                )
                total = again if form.log else total
                c, e, shift, flag = _row_constants(
                    total, again, peak, given, position, first, n_keys, power, form
                )
    BD: tl.constexpr = form.bd
    acc = tl.zeros([BM, BD], tl.float32)  # sum t^p v
    total = tl.zeros([BM], tl.float32)
    acc_lower = tl.zeros([BM, BD], tl.float32)  # sum t^(p-1) v
    total_lower = tl.zeros([BM], tl.float32)
    for LOOP in tl.static_range(3 if form.log else 2):
        begin = inner
        if LOOP == ON:
            begin = edges
        elif LOOP == REDO:
            begin = lowest
        end = outer if LOOP == BEFORE else stop
        if form.log:  # REDO is for blocks with a flagged row, the others are for those without
            end = tl.where((tl.max(flag, 0) > 0) == (LOOP == REDO), end, begin)
        for at in tl.range(begin, end, BN >> LOOP // 2, num_stages=1 if LOOP == REDO else None):
            j0 = _edge_tile(at, inner, outer, form) if LOOP == ON else at
            k = _tile(keys, j0, BN >> LOOP // 2, LOOP != BEFORE, form)
            j = j0 + tl.arange(0, BN >> LOOP // 2)
            position = n_keys - n_queries + start + tl.arange(0, BM)  # anew: kept, it spills
            s, _ = _phi_of_scores(q, k, position[:, None], first[:, None], j[None, :], shift[:, None],
                                  flag[:, None], LOOP != BEFORE, LOOP == REDO, form)  # fmt: skip
            weight, lower = _weigh(s, c[:, None], e[:, None], power, form)
            total += tl.sum(weight, 1)
            v = _tile(values, j0, BN >> LOOP // 2, LOOP != BEFORE, form)
            acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=form.precision)
            if u_ptr is not None:
                total_lower += tl.sum(lower, 1)
                acc_lower = tl.dot(lower.to(v.dtype), v, acc_lower, input_precision=form.precision)
    if form.p > 0:  # c', e'
        scale = tl.where(total <= 0, 0.0, 1.0 / total)
        root = tl.where(total <= 0, 0.0, tl.exp2(tl.log2(total) * (-1.0 / power)))
        if u_ptr is not None:
            n = (n_keys - n_queries + i - first + 1).to(tl.float32)
            share = tl.where((total > 0) & (e > 0), scale / root / n, 0.0)
            o = (acc * scale[:, None]).to(o_ptr.dtype.element_ty).to(tl.float32)  # rounded, as in D
            u = (acc_lower - total_lower[:, None] * o) * share[:, None]
            _store_tile(_matrix(u_ptr, o_strides, n_queries, batch, head), start, u, form)
        c *= root
        e *= root
    else:
        scale = tl.full([BM], LN2 if form.phi == "softplus" else 1.0, tl.float32)
        if form.l1:
            scale = tl.where(total <= NO_MASS, 0.0, 1.0 / total)
        c = scale
    _store_tile(
        _matrix(o_ptr, o_strides, n_queries, batch, head), start, acc * scale[:, None], form
    )
    _store_rows(stats_ptr + first_row * N_ROW, i, n_queries, c, e, shift, flag)


# ---------------------------------------------------------------- backward: BM query rows, then BN
# keys


@triton.jit(do_not_specialize=["power", "n_queries", "n_keys"])
def _backward_rows(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, u_ptr, stats_ptr, first_ptr, dq_ptr, rows_ptr,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides,
    power, n_head, group, n_queries, n_keys, form: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """c', e', D and c' m of each row; dq, where it is given: the same bits each time."""
    batch, head, start, i, first_row, bounds = _query_block(
        first_ptr, n_head, n_queries, n_keys, BM, BN, form
    )
    do = _tile(_matrix(do_ptr, do_strides, n_queries, batch, head), start, BM, True, form)
    delta = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM], tl.float32)
    if form.l1:
        o = _tile(_matrix(o_ptr, o_strides, n_queries, batch, head), start, BM, True, form)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if form.p > 0:
        u = _tile(_matrix(u_ptr, o_strides, n_queries, batch, head), start, BM, True, form)
        mean = tl.sum(u.to(tl.float32) * do.to(tl.float32), 1)
    c, e, shift, low = _load_rows(stats_ptr + first_row * N_ROW, i, n_queries, BM)
    c_mean = c * mean
    _store_rows(rows_ptr + first_row * N_ROW, i, n_queries, c, e, delta, c_mean)
    if dq_ptr is not None:
        keys = _matrix(k_ptr, k_strides, n_keys, batch, head // group)
        values = _matrix(v_ptr, v_strides, n_keys, batch, head // group)
        position = n_keys - n_queries + i  # among the keys: the row sees those up to it
        q = _tile(_matrix(q_ptr, q_strides, n_queries, batch, head), start, BM, True, form)
        BD: tl.constexpr = form.bd
        dq = tl.zeros([BM, BD], tl.float32)
        first = _firsts(first_ptr, batch, i, n_queries, form)
        inner, outer, edges, stop = bounds
        for EDGE in tl.static_range(2):
            for at in tl.range(edges if EDGE else inner, stop if EDGE else outer, BN):
                j0 = _edge_tile(at, inner, outer, form) if EDGE else at
                k = _tile(keys, j0, BN, EDGE, form)
                v = _tile(values, j0, BN, EDGE, form)
                j = j0 + tl.arange(0, BN)
                s, slope = _phi_of_scores(q, k, position[:, None], first[:, None], j[None, :],
                                          shift[:, None], low[:, None], EDGE, True, form)  # fmt: skip
                dC = tl.dot(do, tl.trans(v), input_precision=form.precision)
                _, dx = _weigh_and_grad(s, slope, dC, c[:, None], e[:, None], delta[:, None],
                                        c_mean[:, None], power, form)  # fmt: skip
                dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=form.precision)
        dq *= form.gain * power
        _store_tile(_matrix(dq_ptr, dq_strides, n_queries, batch, head), start, dq, form)


@triton.jit(do_not_specialize=["power", "n_queries", "n_keys"])
def _backward(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, rows_ptr, first_ptr, ends_ptr, dk_ptr, dv_ptr, dq_sum_ptr,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    power, n_head, group, n_queries, n_keys, form: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv of one query head; dq / (p gain) added to dq_sum, if given. Tiles are (keys,
    queries).
    """
    BD: tl.constexpr = form.bd
    n_blocks = tl.cdiv(n_keys, BN)
    block, row, batch, head = _program(n_blocks, n_head)
    j = block * BN + tl.arange(0, BN)
    k = _tile(_matrix(k_ptr, k_strides, n_keys, batch, head // group), block * BN, BN, True, form)
    v = _tile(_matrix(v_ptr, v_strides, n_keys, batch, head // group), block * BN, BN, True, form)
    queries = _matrix(q_ptr, q_strides, n_queries, batch, head)
    grads = _matrix(do_ptr, do_strides, n_queries, batch, head)
    stats = stats_ptr + row * n_queries * N_ROW
    rows = rows_ptr + row * n_queries * N_ROW
    tl.static_assert(PAD % BM == 0)
    if dq_sum_ptr is not None:
        dq_sum_ptr += row * (tl.cdiv(n_queries, PAD) * PAD) * BD
    # Rows at the edges, which do not see all of these keys, then rows that see them all.
    own = block * BN - (n_keys - n_queries)  # the row at the block's first key
    start = tl.maximum(own, 0) // BM * BM
    inner = tl.minimum(tl.cdiv(tl.maximum(own + BN - 1, 0), BM), tl.cdiv(n_queries, BM)) * BM
    outer = n_queries
    end = inner
    if form.has_first:
        ends_ptr += batch * n_keys
        of_all = tl.load(ends_ptr + block * BN)
        end = tl.load(ends_ptr + tl.minimum(block * BN + BN, n_keys) - 1)
        outer = tl.where(of_all < n_queries, of_all // BM, tl.cdiv(n_queries, BM)) * BM
        outer = tl.maximum(inner, outer)
        end -= outer - inner
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    for WHOLE in tl.static_range(2):
        for at in tl.range(inner if WHOLE else start, outer if WHOLE else end, BM):
            i0 = at
            if form.has_first and not WHOLE:  # the rows before all those, then the rows after them
                i0 = tl.where(at < inner, at, at - inner + outer)
            i = i0 + tl.arange(0, BM)  # rows beyond have q = do = c = 0 and add nothing
            q = _tile(queries, i0, BM, True, form)
            do = _tile(grads, i0, BM, True, form)
            c, e, delta, c_mean = _load_rows(rows, i, n_queries, BM)
            _c, _e, shift, low = _load_rows(stats, i, n_queries, BM)  # read by form.shifted
            first = _firsts(first_ptr, batch, i, n_queries, form)
            s, slope = _phi_of_scores(k, q, (n_keys - n_queries + i)[None, :], first[None, :], j[:, None],
                                      shift[None, :], low[None, :], not WHOLE, True, form)  # fmt: skip
            dC = tl.dot(v, tl.trans(do), input_precision=form.precision)
            weight, dx = _weigh_and_grad(s, slope, dC, c[None, :], e[None, :], delta[None, :],
                                         c_mean[None, :], power, form)  # fmt: skip
            dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=form.precision)
            dx = dx.to(q.dtype)
            if dq_sum_ptr is not None:
                dq = tl.dot(tl.trans(dx), k, input_precision=form.precision)
                at = tl.arange(0, BM)[:, None] * BD + tl.arange(0, BD)[None, :]
                tl.atomic_add(dq_sum_ptr + i0 * BD + at, dq, sem="relaxed")
            dk = tl.dot(dx, q, dk, input_precision=form.precision)
    dk *= form.gain * power
    _store_tile(_matrix(dk_ptr, dk_strides, n_keys, batch, head), block * BN, dk, form)
    _store_tile(_matrix(dv_ptr, dv_strides, n_keys, batch, head), block * BN, dv, form)
