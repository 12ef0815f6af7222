"""What a compiled engine must pass before a run relies on it: agreement with float64 weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engines.base import NormaliserModule, share_heads
from infra.distributed import holds_everywhere
from normalisers import Normaliser

# The largest relative error of o, dq, dk and dv at which an engine is trusted. Only the rounding of
# weights and of their gradients to the inputs' type is in it; a miscompiled kernel is off by far more.
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 5e-4}

Measure = Callable[[NormaliserModule, torch.device, torch.dtype], float]


class SelfCheck(NamedTuple):
    error: float  # largest relative error
    problem: str  # one line where it is too large, or the kernels do not run at all; else empty


def check(
    name: str, measure: Measure, normaliser: NormaliserModule, device: torch.device, dtype: torch.dtype
) -> SelfCheck:
    """Whether the engine can be trusted with this normaliser on every rank; warns, once, if not.

    A collective: all processes that joined must call it, and get the same verdict.
    """
    n = normaliser
    shape = (n.n_head, n.head_dim, n.train_len, n.alibi)
    return _check(name, measure, n.definition, n.reweight_p, shape, device, dtype)


@cache
def _check(
    name: str, measure: Measure, definition: Normaliser, reweight_p: int, shape: tuple[int, int, int, bool],
    device: torch.device, dtype: torch.dtype,
) -> SelfCheck:  # fmt: skip
    error, problem = math.inf, ""
    try:
        with torch.inference_mode(False):  # an evaluation may be the first caller
            error = measure(NormaliserModule(definition, reweight_p, *shape).to(device), device, dtype)
    except Exception as e:  # whatever a missing or unfit compiler raises: the rows engine replaces it
        problem = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no message'}"
    else:
        if not error <= TOLERANCE[dtype]:
            problem = f"relative error {error:.1e}, expected at most {TOLERANCE[dtype]:.0e}"
    if holds_everywhere(not problem, device):
        return SelfCheck(error, "")
    problem = problem or "failed on another rank"
    warnings.warn(f"{name} failed its self-check, engine auto takes rows instead: {problem}", stacklevel=4)
    return SelfCheck(error, problem)


def compare(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    weights: Callable[[Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    do: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """o, dq, dk, dv of q, k, v by attend(q, k, v), and in float64 by weights(q k') v."""
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in inputs)
        out = attend(q, k, v)
        got = [out, *torch.autograd.grad(out, (q, k, v), do)]
        q, k, v = (t.detach().double().requires_grad_() for t in inputs)
        out = weights(q @ share_heads(k, q).mT) @ share_heads(v, q)
        return got, [out, *torch.autograd.grad(out, (q, k, v), do.double())]


def relative_errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """||got - want|| / ||want|| of each pair of tensors."""
    errors = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(got, want, strict=True)]
    return [float(error.detach()) for error in errors]
