"""Sampling from a model, with a KV cache.

for new in stream(model, prompt, 100, temperature=0.8, top_k=50):    # (B, 1) at a time
    ...
tokens = generate(model, prompt, 100, temperature=0.8, top_k=50)     # (B, T + 100)
tokens = generate(model.with_window(1024), prompt, 100)              # keeps the last 1024 keys
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from infra.cli import UserError
from model import GPT, KVCache
from positions import UNSCALED, RopeScaling


@torch.no_grad()
def stream(
    model: GPT,
    tokens: Tensor,
    n_new: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: Generator | None = None,
    rope: RopeScaling = UNSCALED,
    n_vocab: int = 0,
) -> Iterator[Tensor]:
    """Sample n_new tokens after each row of `tokens`, one at a time; temperature 0 takes the
    likeliest.

    Args:
        tokens: (B, T) int64, T >= 1. Rows are of one length: in a padded one, n would count the
        padding.
        top_k: sample from the k likeliest tokens only.
        top_p: sample from the fewest tokens that together have this probability (Holtzman et al.
        2020).
        generator: source of randomness, on the model's device.
        rope: scaled for the final length T + n_new unless it names a length.
        n_vocab: draw ids below this only (the tokeniser's, where the model has more); 0: all.
    Yields:
        (B, 1) int64, n_new times.
    Raises:
        UserError: an empty prompt, n_new < 0, temperature < 0, top_k < 1, top_p outside (0, 1]; NaN
            logits.
    """
    length = tokens.shape[1]
    if length < 1 or n_new < 0:
        raise UserError(
            f"prompt of {length} tokens, {n_new} new ones: expected at least 1, at least 0"
        )
    if not 0 <= temperature <= 1e30 or (top_k is not None and top_k < 1):
        raise UserError(f"temperature {temperature}, top_k {top_k}: expected 0 to 1e30, at least 1")
    if top_p is not None and not 1e-30 <= top_p <= 1:  # in float32 it would round to 0
        raise UserError(f"top_p {top_p}: expected at least 1e-30 and at most 1")
    rope = replace(rope, length=rope.length or length + n_new)
    cache = None
    if model.cacheable:
        cache = KVCache(model.config.model.n_layer, length + n_new - 1, model.windows)
    for _ in range(n_new):
        logits = model.logits(model.hidden(tokens, rope, cache)[:, -1])  # (B, V)
        new = sample(logits[:, : n_vocab or None], temperature, top_k, top_p, generator)
        yield new
        tokens = torch.cat((tokens, new), dim=1) if cache is None else new


def generate(model: GPT, tokens: Tensor, n_new: int, **options: Any) -> Tensor:
    """`stream`'s arguments; all of it at once, (B, T + n_new) int64."""
    return torch.cat([tokens, *stream(model, tokens, n_new, **options)], dim=1)


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: Generator | None,
) -> Tensor:
    """One token for each row of logits (B, V): (B, 1) int64."""
    peak = logits.amax(dim=-1, keepdim=True)
    if not peak.isfinite().all():
        raise UserError("the model computed NaN or infinity: no token to draw")
    if temperature < torch.finfo(torch.float32).tiny:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        # in 16 bits others may equal the last one
        likeliest = logits.topk(min(top_k, logits.shape[-1]))
        logits = torch.full_like(logits, -math.inf).scatter(-1, likeliest.indices, likeliest.values)
    # The largest logit is subtracted first, so that a tiny temperature cannot overflow.
    probs = ((logits - peak) / temperature).softmax(dim=-1)
    if top_p is not None:
        ranked, order = probs.sort(dim=-1, descending=True)
        # likelier ones have it all; never the first
        outside = ranked.cumsum(dim=-1) - ranked >= top_p
        probs = probs.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return torch.multinomial(probs, num_samples=1, generator=generator)
