"""Optimisers, their parameter groups, and the schedules of the learning rate and of the power p."""

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from model import GPT
from schema import AttentionConfig, OptimizerConfig


class MuonOfParts(Muon):
    """Muon (Jordan et al. 2024) that makes parts of a matrix orthogonal, each by itself.

    As one matrix q, k and v get updates whose norms differ 13-fold in the first steps. The momentum
    is of the whole matrix, so a checkpoint is the same for all `rows`.
    """

    def __init__(
        self, matrices: Sequence[Tensor], rows: dict[Tensor, list[int]], **options: Any
    ) -> None:
        """rows: the number of rows of each part, of the matrices that have parts."""
        super().__init__(matrices, **options)
        self.rows = rows

    def _init_group(
        self,
        group: MutableMapping[Any, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        """Fills the lists with the matrices, their gradients and momenta, split in parts."""
        has_complex = super()._init_group(group, params_with_grad, grads, muon_momentum_bufs)
        sizes = [self.rows.get(matrix, [len(matrix)]) for matrix in params_with_grad]
        for tensors in (params_with_grad, grads, muon_momentum_bufs):
            whole = zip(tensors, sizes, strict=True)
            tensors[:] = [part for tensor, size in whole for part in tensor.split(size)]
        return has_complex


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
    layer and all vectors. With scalar_lr the normalisers' vectors (s, b, p_n, sinks, the b of
    `signals`, not its w) are a group.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}  # tied ones once
    vectors = {name: p for name, p in model.named_parameters() if p.ndim < 2}
    scalars = [
        vectors.pop(name) for name in list(vectors) if config.scalar_lr and ".normaliser." in name
    ]
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
    if scalars:
        groups.append({"params": scalars, "weight_decay": 0.0, "lr": config.scalar_lr})
    optimizers: list[Optimizer]
    if config.name == "sgd":
        optimizers = [SGD(groups, lr=config.lr, momentum=config.momentum)]
    else:
        optimizers = [AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)]
    if hidden:
        muon = MuonOfParts(
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
