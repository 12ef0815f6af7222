"""What a compiled engine must pass before a run relies on it: agreement with float64 weights."""

import math
import warnings
from copy import copy
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from normalisers.base import HIDDEN, Normaliser, share_heads
from normalisers.layer import NormaliserLayer

# The largest relative error of o, dq, dk and dv at which an engine is trusted. Only the rounding of
# weights and of their gradients to the inputs' type is in it; a miscompiled kernel is off by far
# more. Powers above 100 have p / 100 of it: the power multiplies the relative error of what it
# raises.
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 5e-4}

# Keys of the longest row on a GPU. In float16 the gradients of longer ones are below its normal
# numbers.
LONG_ROW = {torch.bfloat16: 65536, torch.float16: 16384, torch.float32: 65536}

# Where the documents of a check begin.
DOCUMENTS = (0, 1, 37, 64, 90)


class SelfCheck(NamedTuple):
    error: float  # largest relative error
    problem: str  # one line where it is too large, or the kernels do not run at all; else empty


def check(
    name: str,
    engine: ModuleType,
    layer: NormaliserLayer,
    device: torch.device,
    dtype: torch.dtype,
    documents: bool = False,
) -> SelfCheck:
    """Whether the engine can be trusted with this normaliser, and with sequences of several
    documents, on every rank; warns, once, if not.

    A collective: all processes that joined must call it, and get the same verdict.
    """
    shape = (layer.n_head, layer.head_dim, layer.train_len, layer.position, layer.window)
    formula = layer.definition, layer.reweight_p
    return _check(name, engine, *formula, shape, device, dtype, documents)


@cache
def _check(
    name: str, engine: ModuleType, definition: Normaliser, reweight_p: int,
    shape: tuple[int, int, int, str, int], device: torch.device, dtype: torch.dtype,
    documents: bool,
) -> SelfCheck:  # fmt: skip
    tolerance = TOLERANCE[dtype] * max(1.0, reweight_p / 100)
    error = math.inf
    problem = ""
    try:
        with torch.inference_mode(False):  # an evaluation may be the first caller
            layer = NormaliserLayer(definition, reweight_p, *shape).to(device)
            error = engine_error(engine, layer, device, dtype, documents=documents)
    # whatever a missing or unfit compiler raises: the rows engine replaces it
    except Exception as e:
        problem = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}"
    else:
        if not error <= tolerance:
            problem = f"relative error {error:.1e}, expected at most {tolerance:.0e}"
    passed = torch.tensor(float(not problem), device=device)
    if dist.is_initialized():
        dist.all_reduce(passed, dist.ReduceOp.MIN)
    if passed:
        return SelfCheck(error, "")
    problem = f"failed its self-check ({problem or 'on another rank'})"
    warnings.warn(f"engine {name} {problem}: not used", stacklevel=4)
    return SelfCheck(error, problem)


def engine_error(
    engine: ModuleType,
    layer: NormaliserLayer,
    device: torch.device,
    dtype: torch.dtype,
    length: int = 200,
    documents: bool = False,
) -> float:
    """The engine's largest relative error (by norm) against float64, of o, dq, dk and dv.

    On random inputs: all queries, with the D axis not innermost, then the later half of them with
    one head of keys. Unless the weights depend on the distance or the temperature on the scores,
    also (but for dq, which cancels) on one long row of equal keys, where the rounding of its sum
    could pass for contrast.
    """
    g = torch.Generator().manual_seed(0)
    n_head = layer.n_head
    d = layer.head_dim
    length = min(length, layer.train_len)  # ssmax_pn has no p_n beyond
    q, k, v, do = (
        torch.randn(1, n_head, d, length, generator=g).to(device, dtype).mT for _ in range(4)
    )
    signals = q.float()[..., : layer.n_signals] if layer.signals else None
    first = None
    if documents:
        starts = torch.tensor(DOCUMENTS, device=device)
        which = torch.searchsorted(starts, torch.arange(length, device=device), right=True)
        first = starts[which - 1][None]
    errors = _errors(engine, layer, q, k, v, do, signals, first)
    half = length // 2 + 1
    errors += _errors(
        engine, layer, q[..., -half:, :], k[:, :1], v[:, :1], do[..., -half:, :], signals, first
    )
    # Undefined at equal scores:
    varies = layer.by_distance or layer.signals or layer.definition.adaptive
    if not varies:
        if not hasattr(layer, "p_n"):
            length = LONG_ROW[dtype] if device.type == "cuda" else 320
        v = torch.randn(1, 1, length, d, generator=g).to(device, dtype)
        do = torch.randn(1, n_head, 1, d, generator=g).to(device, dtype)
        ones = torch.full_like(v, d**-0.25)
        first = torch.zeros(1, length, dtype=torch.int64, device=device) if documents else None
        q = ones[..., -1:, :].expand_as(do)
        o, _, *others = _errors(engine, layer, q, ones, v, do, first=first)
        errors += [o, *others]
    return torch.tensor(errors).max().item()  # NaN if one is


def _errors(
    engine: ModuleType,
    layer: NormaliserLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    signals: Tensor | None = None,
    first: Tensor | None = None,
) -> list[float]:
    """Of o (the larger of training's and an evaluation's), dq, dk, dv, and of a `key_decay`.

    Both sides get the same q and k, rounded as the kernels take them, so that re-weighting does not
    amplify that rounding.
    """
    # triton's kernels
    unit = engine.score_unit(layer.definition) if hasattr(engine, "score_unit") else 1.0
    with torch.no_grad():
        q = layer.norm_heads(q)
        k = layer.norm_heads(k)
        context = layer.context(q, k, signals, first)
        q, k = layer.prepare(q, k, context, v.dtype, unit)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    inputs64 = [t.detach().double().requires_grad_() for t in (q, k, v)]
    trained = context
    context64 = layer.context(inputs64[0], inputs64[1], signals, first)
    if context.decay is not None:  # its gradient trains the gates
        inputs.append(context.decay.clone().requires_grad_())
        inputs64.append(context.decay.clone().requires_grad_())
        trained = replace(context, decay=inputs[3])
        context64 = replace(context64, decay=inputs64[3])
    with torch.no_grad():  # an evaluation may have another kernel, or another graph
        evaluated = engine.run_prepared(q, k, v, layer, context)
    with torch.enable_grad():
        out = engine.run_prepared(*inputs[:3], layer, trained)
        got = [out, *torch.autograd.grad(out, inputs, do)]
        q, k, v = (share_heads(t, q) for t in inputs64[:3])
        x = context64.add_decay(q @ k.mT / unit)
        x = x.masked_fill(~context64.visible(x), HIDDEN)
        reference = copy(layer)
        reference.definition = layer.definition.prepared
        out = reference.row_weights(x, context64) @ v
        want = [out, *torch.autograd.grad(out, inputs64, do.double())]
    pairs = zip([*got, evaluated], [*want, want[0]], strict=True)
    errors = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in pairs]
    errors[0] = torch.maximum(errors[0], errors.pop())
    return [float(error.detach()) for error in errors]
