"""Optimisers, their parameter groups, and the schedules of the learning rate and of the power p."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from model import GPT
from schema import AttentionConfig, OptimizerConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of a X + b (X X') X + c (X X')^2 X
NEWTON_SCHULZ_STEPS = 5


def orthogonalised(matrix: Tensor) -> Tensor:
    """About U V' of the (rows, columns) matrix U S V': its singular values go to 0.7 to 1.2.

    In bfloat16 on CUDA, as Muon's authors do. In float32 elsewhere: without instructions for
    bfloat16 that is over twenty times as fast, and rounding of 1e-6 in a gradient, as from another
    number of processes, stays 1e-6 instead of becoming 1 %.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    is_tall = len(x) > x.shape[1]
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


class Muon(Optimizer):
    """Muon (Jordan et al. 2024): Nesterov's momentum, made orthogonal, as the update of a matrix.

    Parts of a matrix are made orthogonal each by itself: as one matrix q, k and v get updates whose
    norms differ 13-fold in the first steps. The momentum is of the whole matrix, so a checkpoint is
    the same for all `rows`.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        rows: dict[Tensor, list[int]],
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        """rows: the number of rows of each part, of the matrices that have parts."""
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, options)
        self.rows = rows

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group)

    def _update(self, matrix: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(momentum, group["momentum"])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        sizes = self.rows.get(matrix, [len(matrix)])
        for part, step in zip(matrix.split(sizes), direction.split(sizes), strict=True):
            tall = max(1.0, len(part) / part.shape[1])
            part.add_(orthogonalised(step), alpha=-group["lr"] * math.sqrt(tall))


def muon_rows(model: GPT, split: str) -> dict[Tensor, list[int]]:
    """The rows of q, k and v in each qkv matrix ("qkv"), of each of their heads ("head"), or none."""
    rows = {}
    for block in model.blocks:
        attention = block.attention
        heads = [attention.n_head, attention.n_kv_head, attention.n_kv_head]
        if split == "qkv":
            rows[attention.qkv.weight] = [n * attention.head_dim for n in heads]
        elif split == "head":
            rows[attention.qkv.weight] = [attention.head_dim] * sum(heads)
    return rows


def make_optimizers(model: GPT, config: OptimizerConfig) -> list[Optimizer]:
    """The optimisers, with weight decay on matrices only and each group's peak learning rate as
    `peak_lr`.

    muon updates the matrices of the blocks that have at least head_dim rows and columns: not those
    that give a few numbers a head, as FoX's gate. adamw then has these, the embedding, the output
    layer and all vectors.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}  # tied ones once
    vectors = {name: p for name, p in model.named_parameters() if p.ndim < 2}
    hidden = [
        matrices.pop(name)
        for name, p in list(matrices.items())
        if config.name == "muon"
        and "blocks." in name
        and min(p.shape) >= model.config.model.head_dim
    ]
    groups = [
        {"params": [*matrices.values()], "weight_decay": config.weight_decay},
        {"params": [*vectors.values()], "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer]
    if config.name == "sgd":
        optimizers = [SGD(groups, lr=config.lr, momentum=config.momentum)]
    else:
        optimizers = [AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)]
    if hidden:
        muon = Muon(
            hidden,
            muon_rows(model, config.muon_split),
            lr=config.muon_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Learning rate over its peak at step 0, 1, ... max_steps - 1."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    match config.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return 1 - (1 - low) * progress
        case "wsd":
            decay_steps = config.decay_fraction * max_steps or 1  # a dry run of no steps
            return 1 - (1 - low) * max(0.0, (step - max_steps + decay_steps) / decay_steps)


def set_learning_rates(
    optimizers: list[Optimizer], config: OptimizerConfig, step: int, max_steps: int
) -> float:
    """Set every group's learning rate for a step; returns that of the main optimiser."""
    factor = lr_factor(config, step, max_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
    return factor * config.lr


def power_at(config: AttentionConfig, step: int) -> int | None:
    """The largest p of the re-weighting at a step: from 1 to reweight_p in equal spans of
    reweight_p_warmup steps, then None: each layer's own."""
    if step >= config.reweight_p_warmup:
        return None
    return 1 + (config.reweight_p - 1) * step // config.reweight_p_warmup
