"""The training loss: the cross-entropy of the output layer's logits, a chunk of rows at a time.

The logits of all rows never exist: at GPT-2's size those of 32 x 1,024 tokens are 6.6 GB in
float32. Each chunk's gradients of the hidden states and of the output layer are computed with its
loss, which so needs no second product for the logits (as in Liger Kernel, Hsu et al. 2024, arXiv
2410.10989).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from schema import Config, TrainConfig

# Rows of a chunk. A CPU's caches hold 256. On CUDA each chunk adds a gradient of the whole output
# layer to the sum in memory, which must stay small beside its products.
CHUNK_ROWS = {"cpu": 256, "cuda": 8192}


def scale_logits(z: Tensor, config: TrainConfig) -> Tensor:
    """The logits z, (..., V), divided as `train.loss` says before the softmax of the cross-entropy.

        softmax       z
        norm_softmax  z / (tau min(sigma, gamma)), sigma = population standard deviation over the vocabulary
        logit_norm    z / (tau ||z||_2), tau = V^(-1/2) if auto

    (NormSoftmax, eq. 4-6 and 8, with the vocabulary in the place of the keys.)
    """
    if config.loss == "softmax":
        return z
    if config.loss == "norm_softmax":
        gamma = config.loss_gamma if isinstance(config.loss_gamma, float) else math.inf
        square = z.var(-1, correction=0, keepdim=True).clamp_max(gamma**2)
        tau = 1.0
    else:
        square = z.square().sum(-1, keepdim=True)
        tau = z.shape[-1] ** -0.5
    # equal logits (logit_norm: zeros) become 0, with gradient 0
    spread = square > torch.finfo(z.dtype).tiny
    root = torch.where(spread, torch.where(spread, square, 1.0).sqrt(), math.inf)
    return z / (root * (config.loss_tau if config.loss_tau != "auto" else tau))


def chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    config: Config,
    unscaled: bool,
    smoothing: float,
) -> Tensor:
    """The sum of the losses of hidden states (N, C) and targets (N,), -100 left out: a float32
    scalar. Of the output weights (V, C) the padding's rows are cut off.
    """
    logits = F.linear(hidden, weight)[:, : config.model.vocab_size].float()  # (N, vocab_size)
    if not unscaled:
        logits = scale_logits(logits, config.train)
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")


class ChunkedLoss(torch.autograd.Function):
    """The sum of `loss(rows, weight, their targets)` over chunks of rows, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, C)
        weight: Tensor,  # (V, C)
        targets: Tensor,  # (N,)
        loss: Callable[[Tensor, Tensor, Tensor], Tensor],
        needs_grad: bool,
    ) -> Tensor:
        device = hidden.device.type
        n_chunks = math.ceil(len(hidden) / CHUNK_ROWS[device])
        # once, where autocast would do it for each chunk
        in_autocast = torch.is_autocast_enabled(device)
        leaf = weight.detach().to(torch.get_autocast_dtype(device) if in_autocast else weight.dtype)
        leaf.requires_grad_(needs_grad)
        hidden_grads = []
        weight_grad = torch.zeros_like(weight) if needs_grad else None
        total = torch.zeros((), device=hidden.device)
        for rows, their_targets in zip(
            hidden.chunk(n_chunks), targets.chunk(n_chunks), strict=True
        ):
            rows = rows.detach().requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                chunk_total = loss(rows, leaf, their_targets)
            total += chunk_total.detach()
            if weight_grad is not None:
                rows_grad, leaf_grad = torch.autograd.grad(chunk_total, (rows, leaf))
                hidden_grads.append(rows_grad)
                weight_grad += leaf_grad
        if weight_grad is not None:
            ctx.save_for_backward(torch.cat(hidden_grads), weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None, None, None
