"""Sampling from a model, with a KV cache.

for new in stream(model, prompt, 100, temperature=0.8, top_k=50):    # (B, 1) at a time
    ...
tokens = generate(model, prompt, 100, temperature=0.8, top_k=50)     # (B, T + 100)
"""

import gc
import math
from collections.abc import Callable, Iterator
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
    graph: bool = False,
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
        graph: compute the logits after each new token as a CUDA graph (see `record_step`).
    Yields:
        (B, 1) int64, n_new times.
    Raises:
        UserError: an empty prompt, n_new < 0, temperature < 0, top_k < 1, top_p outside (0, 1]; NaN
            logits; graph without CUDA or a KV cache, or with a normaliser that asks the host.
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
    cache = KVCache(model.config.model.n_layer, length + n_new - 1) if model.cacheable else None
    if graph and (cache is None or not tokens.is_cuda):
        raise UserError(
            f"CUDA graph on {tokens.device}: expected CUDA, and a normaliser with a KV cache"
        )
    step = None
    for i in range(n_new):
        if step is not None:
            logits = step(tokens, torch.full_like(tokens[0], length + i - 1))  # (B, V)
        else:
            logits = model.logits(model.hidden(tokens, rope, cache)[:, -1])
            if graph and cache is not None and i + 1 < n_new:
                step = record_step(model, rope, cache, tokens[:, -1:])
        new = sample(logits[:, : n_vocab or None], temperature, top_k, top_p, generator)
        yield new
        tokens = torch.cat((tokens, new), dim=1) if cache is None else new


@torch.no_grad()
def record_step(
    model: GPT, rope: RopeScaling, cache: KVCache, token: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of one more token (B, 1) and its place (1,), int64, to the logits (B, V), as a
    CUDA graph.

    It saves the time of Python and of the launches, and reads all of the cache's room for each
    token. It returns the same tensor each time. The model and the cache, which has the tokens
    before, must outlive it. `token` is an example of one. Raises UserError: the step cannot be
    recorded.
    """
    # of a graph before this one, which its own class keeps alive: freeing it ends a recording
    gc.collect()
    device = token.device.type
    place = torch.full_like(token[0], cache.length)

    def step(token: Tensor, place: Tensor) -> Tensor:
        cache.place = place
        logits = model.logits(model.hidden(token, rope, cache)[:, -1])
        cache.place = None
        return logits

    # What autocast keeps of the weights would be freed with the caller's block, before the graph
    # is.
    with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
        try:
            return torch.cuda.make_graphed_callables(step, (token.clone(), place))  # type: ignore[return-value]
        except RuntimeError as e:
            problem = str(e).partition("\n")[0]
            raise UserError(
                f"this model's step cannot be recorded as a CUDA graph: {problem}"
            ) from e


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
