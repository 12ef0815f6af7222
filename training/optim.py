"""Optimisers, their parameter groups, and the schedules of the learning rate and of the power p."""

import math

from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from schema import AttentionConfig, OptimizerConfig


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """The optimisers, with weight decay on matrices only and each group's peak learning rate as
    `peak_lr`.

    muon updates the matrices of the blocks. adamw then has the embedding, the output layer and all
    vectors. With scalar_lr the normalisers' vectors (s, b, p_n, sinks, the b of `signals`, not its
    w) are a group.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}  # tied ones once
    vectors = {name: p for name, p in model.named_parameters() if p.ndim < 2}
    scalars = [
        vectors.pop(name) for name in list(vectors) if config.scalar_lr and ".normaliser." in name
    ]
    hidden = [
        matrices.pop(name) for name in list(matrices) if config.name == "muon" and "blocks." in name
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
        decay = config.weight_decay
        optimizers.append(
            Muon(hidden, lr=config.muon_lr, momentum=config.momentum, weight_decay=decay)
        )
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
