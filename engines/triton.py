"""The triton engine: fused CUDA kernels for phi-attention, with or without l1 and re-weighting.

    o = phi_attention(q, k, v, phi="softplus", l1=True, p=15)              # LSSAR on prepared q and k

The kernels and their mathematics are in triton_kernels.py. This file chooses block sizes and
launches them as custom operators, so that autograd and torch.compile see one operation.
"""

from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from engines import triton_kernels as kernels
from engines.triton_kernels import INTERPRETED, LOG2E, MAX_POWER, N_ROW, PAD, Form
from normalisers.base import Normaliser, RowContext
from normalisers.family import Phi
from normalisers.layer import NormaliserLayer
from positions import operator_library

LIBRARY = operator_library(__name__)
PHIS = ("exp", "softplus", "sigmoid", "relu")
# what shared memory holds
MAX_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}


def problem(layer: NormaliserLayer, device: torch.device, dtype: torch.dtype) -> str:
    """Why this engine cannot run the layer there; "" if it can."""
    definition = layer.definition
    if layer.by_distance or layer.decays or definition.form == "any":
        return f"{layer.label} has no fused form"
    if definition.adaptive and layer.window:
        return f"{layer.label} has moments of all its scores, which a window changes"
    if definition.form == "softmax" and not layer.reweight_p:
        return f"{layer.label} is a softmax, which sdpa runs"
    phi = cast(Phi, definition.prepared).phi
    if phi not in PHIS:
        return f"phi = {phi}: its kernels know {', '.join(PHIS)}"
    if device.type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, found {device.type}"
    if layer.head_dim > MAX_HEAD_DIM.get(dtype, 0):
        return f"head size {layer.head_dim} in {dtype}: runs up to 256 in 16 bits, 128 in float32"
    return ""


def run(q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext) -> Tensor:
    """`attention.attend` by the fused kernels; (B, H, Tq, D) in v's type."""
    if context.first is not None and layer.definition.adaptive:  # moments are of all keys
        from engines import rows

        return rows.run(q, k, v, layer, context)
    q, k = layer.prepare(q, k, context, v.dtype, score_unit(layer.definition))
    return run_prepared(q, k, v, layer, context)


def score_unit(definition: Normaliser) -> float:
    """What the kernels take the scores times: log2(e) where phi's exponentials are computed in base
    2.
    """
    return 1.0 if cast(Phi, definition.prepared).phi == "relu" else LOG2E.value


def run_prepared(
    q: Tensor, k: Tensor, v: Tensor, layer: NormaliserLayer, context: RowContext
) -> Tensor:
    """`run` for q and k whose products are `score_unit` times the scores."""
    formula = cast(Phi, layer.definition.prepared)
    shift = formula.shift(context)
    if shift is not None:
        shift = (context.n * 0 + shift).squeeze(-1) * score_unit(formula)  # (Tq,), (B, 1, Tq)
        shift = shift[:, 0] if shift.ndim > 1 else shift
    p = 0 if context.p is None else context.p
    out = phi_attention(
        q, k, v, shift, row_firsts(context), phi=formula.phi, l1=formula.l1, p=p,
        rises_to=layer.reweight_p, bounded=formula.bounded,
    )  # fmt: skip
    divisor = formula.divisor(context)
    return out if isinstance(divisor, float) and divisor == 1.0 else (out / divisor).to(out.dtype)


def row_firsts(context: RowContext) -> Tensor | None:
    """The first key that each row sees, of its document or window, (B or 1, Tq); None: the first of
    all.
    """
    if context.first is None and context.n_max == context.n_keys:
        return None
    return context.first_seen.reshape(-1, len(context.place)).int()


class Launch(NamedTuple):
    """Block sizes, and the compiler's options by Triton's names."""

    BM: int  # query rows of a tile
    BN: int  # keys of a tile; at most 64 in forward (`_add_sums`)
    num_warps: int
    num_stages: int  # depth of the software pipeline that loads tiles ahead
    maxnreg: int = 255  # registers, per thread


# By compute capability (major) and kernel, for head sizes up to 64, 128 and 256. Nothing is tuned at
# run time, so no rank and no restart can pick other blocks, and with them other roundings. Those of
# compute capability 9 were timed on an H100 at head_dim 64 and 128 (benchmarks/RESULTS.md), the
# others chosen by what benchmarks/kernels.py prints.
LAUNCHES: dict[int, dict[str, tuple[Launch, Launch, Launch]]] = {
    8: {
        "forward": (Launch(128, 64, 8, 2), Launch(128, 64, 8, 2), Launch(64, 32, 8, 2)),
        "forward_u": (Launch(128, 64, 8, 2), Launch(128, 32, 8, 2), Launch(64, 32, 8, 2)),
        "backward": (Launch(32, 128, 8, 2), Launch(32, 128, 8, 2), Launch(32, 32, 8, 1)),
    },
    9: {
        "forward": (Launch(128, 64, 8, 3, 128), Launch(64, 64, 4, 3), Launch(64, 32, 8, 2)),
        "forward_u": (Launch(64, 64, 4, 4, 168), Launch(64, 64, 4, 3), Launch(64, 32, 8, 2)),
        "backward": (Launch(32, 64, 4, 3, 168), Launch(32, 128, 8, 3), Launch(32, 32, 8, 1)),
    },
    10: {
        "forward": (Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 32, 8, 2)),
        "forward_u": (Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 32, 8, 2)),
        "backward": (Launch(32, 128, 8, 2), Launch(32, 128, 8, 2), Launch(32, 64, 8, 1)),
    },
}
# Each product is three of tf32 parts. At 64 backward has forward's tiles: p multiplies how they
# round apart.
LAUNCHES_32: dict[str, tuple[Launch, Launch]] = {
    "forward": (Launch(64, 32, 4, 2), Launch(64, 32, 4, 2)),
    "forward_u": (Launch(64, 32, 4, 2), Launch(32, 32, 4, 2)),
    "backward": (Launch(64, 32, 4, 1), Launch(32, 32, 4, 1)),
}


def launch_of(kernel: str, form: Form, major: int) -> Launch:
    """The table's entry for a GPU of compute capability `major`.x (newer ones: the newest known)."""
    table = LAUNCHES[min(major, max(LAUNCHES))] if form.fast else LAUNCHES_32
    launch = table[kernel.removesuffix("_rows")][max(64, form.bd).bit_length() - 7]
    return launch._replace(BM=launch.BN, BN=launch.BM) if kernel == "backward_rows" else launch


def _launch(
    name: str, form: Form, p: int, matrices: tuple[Tensor, ...], *args: Tensor | None
) -> None:
    """One program for each query head and block of rows or keys; `matrices`: q, k, others with
    strides.
    """
    B, H, n_queries, _ = matrices[0].shape
    _, n_kv_head, n_keys, _ = matrices[1].shape
    device = matrices[0].device
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    launch = launch_of(name, form, major)
    n_blocks = triton.cdiv(*((n_keys, launch.BN) if name == "backward" else (n_queries, launch.BM)))
    if n_blocks * B * H == 0:
        return
    strides = [t.stride()[:3] for t in matrices]
    assert max(stride[2] for stride in strides) <= 2**24, strides  # offsets in a tile are 32-bit
    with torch.cuda.device_of(matrices[0]):
        kernel = getattr(kernels, f"_{name.removesuffix('_u')}")[n_blocks * B * H,]
        kernel(
            *args,
            *strides,
            max(p, 1),
            H,
            H // n_kv_head,
            n_queries,
            n_keys,
            form,
            **launch._asdict(),
        )


def phi_attention(
    q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None = None, first: Tensor | None = None, *,
    phi: str, l1: bool, p: int | Tensor = 0, rises_to: int = 0, bounded: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention with weights from phi(x), q.k + shift = `score_unit` x; see
    triton_kernels.py.

    Args:
        q: (B, H, Tq, D), the last Tq of the Tk positions; any strides, best with D contiguous.
        k, v: (B, n_kv_head, Tk, D), n_kv_head divides H; all float32, float16 or bfloat16; D <=
        MAX_HEAD_DIM.
        shift: (Tq,) or, with `first`, (B, Tq), added to q.k, a constant.
        first: (B or 1, Tq), the first key that each row sees, which never falls from row to row.
        phi, l1: one of PHIS; divide rows by sum phi.
        p: power of the re-weighting, up to 256 with l1; 0: none (with exp and l1 use
        sdpa). A 0-dim tensor on the CPU, whose value a compiled graph reads when it runs, or a
        number.
        rises_to: above p, kernels of any p below it take the place of p's own. o is the same, bit
        for bit.
        bounded: |x| < 70, so that no row of phi = softplus or sigmoid underflows: saves a check.
    Returns:
        (B, H, Tq, D) in the inputs' type. Scores and sums are float32; weights are rounded to the
        inputs' type where they meet v. float16 overflows where weights without l1 exceed 65504, and
        loses gradients of scores below 6e-8.
    """
    highest = max(rises_to, p) if isinstance(p, int) else rises_to
    # the last is softmax: sdpa
    assert phi in PHIS and (phi, l1, highest) != ("exp", True, 0), (phi, l1, highest)
    assert not highest or (highest <= MAX_POWER and l1), (phi, l1, p)
    assert isinstance(p, Tensor) or p >= 0, p
    assert q.dtype == k.dtype == v.dtype and q.shape[-1] <= MAX_HEAD_DIM.get(q.dtype, 0), q.dtype
    assert k.shape == v.shape and q.shape[::3] == k.shape[::3] and q.shape[2] <= k.shape[2], k.shape
    assert q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    of_rows = q.shape[2:3] if first is None else (len(q), q.shape[2])
    if first is not None:
        first = first.to(torch.int32).expand(of_rows).contiguous()
    if shift is not None:
        assert shift.shape in (of_rows, of_rows[-1:]), shift.shape
        assert not shift.requires_grad  # not learned
        shift = shift.to(torch.float32).expand(of_rows).contiguous()
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    power = torch.tensor(p, device="cpu") if isinstance(p, int) else p
    with_u = trains and highest > 0
    return _forward_op(q, k, v, power, shift, first, phi, l1, rises_to, bounded, with_u)[0]


def _form(
    phi: str, l1: bool, p: int, rises_to: int, bounded: bool, has_shift: bool, q: Tensor,
    first: Tensor | None,
) -> Form:  # fmt: skip
    rising = 0 < p < rises_to
    highest = rises_to if rising else p
    fast = q.dtype != torch.float32
    return Form(phi, l1, highest, rising, bounded, has_shift, fast, q.shape[-1], first is not None)


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    """With stride 1 along D, as the kernels assume."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _new_output(q: Tensor) -> Tensor:
    """(B, H, T, D) laid out as (B, T, H, D), as the model's next step wants it."""
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )


@torch.library.custom_op(f"{LIBRARY}::phi_attention", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, shift: Tensor | None, first: Tensor | None,
    phi: str, l1: bool, rises_to: int, bounded: bool, with_u: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the rows' statistics (B, H, Tq, 4), and for a backward pass through a power u, of o's
    shape.
    """
    p = int(power)
    o, stats, u = _fake_forward(q, k, v, with_u)
    q, k, v = _rows_contiguous(q, k, v)
    form = _form(phi, l1, p, rises_to, bounded, shift is not None, q, first)
    name = "forward_u" if with_u else "forward"
    _launch(name, form, p, (q, k, v, o), q, k, v, shift, first, o, stats, u if with_u else None)
    return o, stats, u


@_forward_op.register_fake
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = q.new_empty(*q.shape[:3], N_ROW.value, dtype=torch.float32)
    return _new_output(q), stats, _new_output(q if rest[-1] else q[:0])


@torch.library.custom_op(f"{LIBRARY}::phi_attention_backward", mutates_args=())
def _backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, first: Tensor | None, o: Tensor,
    stats: Tensor, u: Tensor, phi: str, l1: bool, rises_to: int, bounded: bool, has_shift: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; their bits are the same each time where torch is asked for deterministic
    algorithms.
    """
    p = int(power)
    assert not p or u.shape == o.shape, "forward was not told of a backward pass"
    dq, dk, dv = _fake_backward(do, q, k, v)
    do, q, k, v = _rows_contiguous(do, q, k, v)
    form = _form(phi, l1, p, rises_to, bounded, has_shift, q, first)
    ends = None  # for each key, the first row that no longer sees it
    if first is not None:
        keys = torch.arange(k.shape[2], dtype=first.dtype, device=first.device)
        keys = keys.expand(len(first), -1).contiguous()
        ends = torch.searchsorted(first, keys, right=True, out_int32=True)
    rows = torch.empty_like(stats)
    in_order = torch.are_deterministic_algorithms_enabled()
    n_padded = triton.cdiv(q.shape[2], PAD.value) * PAD.value
    dq_sum = None if in_order else stats.new_zeros(*q.shape[:2], n_padded, form.bd)
    matrices = (q, k, v, o, do, dq)
    _launch(
        "backward_rows", form, p, matrices, *matrices[:5], u, stats, first,
        dq if in_order else None, rows,
    )  # fmt: skip
    # Grouped heads: gradients by query head, summed at the end (a loop over heads in the kernel
    # spills).
    grouped = k.shape[1] < q.shape[1]
    by_head = (*q.shape[:2], *k.shape[2:])
    dks, dvs = (stats.new_empty(by_head) if grouped else t for t in (dk, dv))
    _launch(
        "backward", form, p, (q, k, v, do, dks, dvs), q, k, v, do, stats, rows, first, ends,
        dks, dvs, dq_sum,
    )  # fmt: skip
    if dq_sum is not None:
        torch.mul(dq_sum[:, :, : q.shape[2], : q.shape[3]], form.gain * max(p, 1), out=dq)
    if grouped:
        dk.copy_(dks.unflatten(1, (k.shape[1], -1)).sum(2))
        dv.copy_(dvs.unflatten(1, (k.shape[1], -1)).sum(2))
    return dq, dk, dv


@_backward_op.register_fake
def _fake_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    # Not empty_like: the kernels write along D with stride 1, whatever the strides of the inputs.
    return _new_output(q), _new_output(k), _new_output(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, power, shift, first, *ctx.form, _ = inputs
    ctx.has_shift = shift is not None
    ctx.set_materialize_grads(False)  # of stats and u
    ctx.save_for_backward(q, k, v, power, first, *output)


def _autograd(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward_op(grads[0], *ctx.saved_tensors, *ctx.form, ctx.has_shift)
    return *gradients, *[None] * 8


_forward_op.register_autograd(_autograd, setup_context=_setup_context)
