"""The l1 norm of rows as a function with a backward of its own."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class L1Normalise(torch.autograd.Function):
    """Its backward, (g - sign(s) sum(g a)) / Z, is exactly 0 where one key has the whole row."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        z = s.abs().sum(-1, keepdim=True)
        # 1 / z overflows just above the smallest normal number: such a row has no mass.
        inverse = torch.where(z > 1e8 * torch.finfo(s.dtype).tiny, 1 / z, 0.0)
        a = s * inverse
        ctx.save_for_backward(a, inverse)
        return a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        a, inverse = ctx.saved_tensors
        return (grads[0] - a.sign() * (grads[0] * a).sum(-1, keepdim=True)) * inverse
