"""Causal attention with any normaliser, on the engine that fits: the public API.

    normaliser = make_normaliser(AttentionConfig(normaliser="lssa", reweight_p=15), 12, 64, 1024)
    weights = normaliser.weights(q, k)         # the definition, dense (B, H, Tq, Tk)
    out = attend(q, k, v, normaliser)          # the same weights times v, in O(T) memory

The formulas are in normalisers.py and rivals.py, the engines in engines/:

    dense    the definition, (T, T) in memory
    rows     blocks of query rows, any normaliser, any device (rows.py)
    sdpa     softmax over rescaled queries, on F.scaled_dot_product_attention
    triton   fused CUDA kernels for phi(x) over its row sum or a fixed number (fused.py)
    flex     softmax of scores that depend on the distance, by FlexAttention on CUDA
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from engines import dense, sdpa
from engines import rows as row_blocks
from engines.self_check import check
from infra.cli import UserError
from normalisers.layer import FUSED_HEAD_DIM, NormaliserModule
from positions import SCORE_BIASES
from schema import AttentionConfig, Engine, ModelConfig


def make_normaliser(
    options: AttentionConfig, n_head: int, head_dim: int, train_len: int, position: str = "rope"
) -> NormaliserModule:
    """Build the normaliser named in `options`.

    Args:
        n_head, head_dim: of the attention layer that it serves.
        train_len: training length in tokens (L in the formulas that use it).
        position: `model.position`, which may bias the scores (ALiBi).
    """
    definition, p = options.definition, options.reweight_p
    return NormaliserModule(definition, p, n_head, head_dim, train_len, position)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: NormaliserModule,
    engine: Engine = "auto",
    cached: bool = False,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Causal attention: normaliser.weights(q, k) @ v. A definition's `output_norm` is left to the caller.

    Args:
        q: (B, H, Tq, D) after RoPE, the last Tq of the Tk positions.
        k, v: (B, n_kv_head, Tk, D); head h of q belongs to head h // (H / n_kv_head) of k and v.
        engine: see the top of this file. "auto" is resolved at each call; a model resolves it once
            (`resolve_engine`).
        cached: k comes from `normaliser.cache_keys`.
        spans: for a padded batch, the positions [start, stop) of each sequence's real keys (`mask_spans`); n
            counts only these. Sequences with the same span are computed together; padding gets zeros.
    Returns:
        (B, H, Tq, D) in v's type. Scores and weights are float32 (float64 for float64 inputs).
    Raises:
        UserError: for an engine that cannot run this normaliser here.
    """
    if spans is not None:
        out, first = v.new_zeros(*q.shape[:-1], v.shape[-1]), k.shape[-2] - q.shape[-2]
        for start, stop in set(spans):
            rows = [b for b, span in enumerate(spans) if span == (start, stop)]
            block, keys = slice(max(start - first, 0), max(stop - first, 0)), slice(start, stop)
            if block.start < block.stop:
                real = q[rows, :, block], k[rows, :, keys], v[rows, :, keys]
                out[rows, :, block] = attend(*real, normaliser, engine, cached)
        return out
    with torch.autocast(q.device.type, enabled=False):
        if engine not in ("dense", "rows"):
            engine = resolve_engine(normaliser, engine, q.device, v.dtype)
        if engine == "triton" and v.shape[-1] != k.shape[-1]:
            engine = "rows"  # the kernels' heads have one size
        match engine:
            case "dense":
                return dense.run(q, k, v, normaliser, cached)
            case "sdpa":
                return sdpa.run(q, k, v, normaliser, cached)
            case "triton":
                return compiled_engine(engine).run(q, k, v, normaliser, cached)
            case "flex" if q.shape[-2] > 1:  # one query: rows is as good, without a mask for each length
                return compiled_engine(engine).run(q, k, v, normaliser, cached)
        return row_blocks.run(q, k, v, normaliser, cached)


def mask_spans(mask: Tensor) -> list[tuple[int, int]] | None:
    """`attend`'s spans from a padding mask (B, Tk), nonzero at real keys; None: no padding.

    Raises:
        UserError: padding between real keys.
    """
    mask = mask.bool()
    counts, starts = mask.sum(-1).tolist(), mask.int().argmax(-1).tolist()
    stops = (mask.shape[-1] - mask.flip(-1).int().argmax(-1)).tolist()
    spans = [(start, start + n) for start, n in zip(starts, counts, strict=True)]
    if any(n and span[1] != stop for n, span, stop in zip(counts, spans, stops, strict=True)):
        raise UserError("attention_mask: has zeros between ones; expected padding on the left or right only")
    return None if min(counts) == mask.shape[-1] else spans


def resolve_engine(
    normaliser: NormaliserModule, engine: Engine, device: torch.device, dtype: torch.dtype
) -> Engine:
    """The engine that attend() uses for inputs on this device and of this type.

    "auto" is sdpa where the normaliser allows it; else, on CUDA, triton or flex if its self-check finds no
    problem (a warning names it); else rows.

    Raises:
        UserError: for an engine that cannot run this normaliser there.
    """
    name = normaliser.definition.name
    name += f" with {normaliser.position}" * (normaliser.position in SCORE_BIASES)
    problem = ""
    match engine:
        case "auto" if normaliser.has_sdpa:
            return "sdpa"
        case "auto":
            fits = normaliser.is_fusible and normaliser.head_dim <= FUSED_HEAD_DIM.get(dtype, 0)
            engine = "flex" if normaliser.has_flex else "triton" if fits else "rows"
            if device.type != "cuda" or engine == "rows" or dtype == torch.float64:
                return "rows"
            try:
                module = compiled_engine(engine)
            except ImportError as e:  # CUDA without Triton
                warnings.warn(f"no fused attention here, engine auto takes rows instead: {e}", stacklevel=2)
                return "rows"
            # The self-check cannot be traced: a compiled caller has resolved before, or trusts the kernels.
            if torch.compiler.is_compiling():
                return engine
            return "rows" if check(engine, module, normaliser, device, dtype).problem else engine
        case "sdpa" if not normaliser.has_sdpa:
            problem = f"{name} with these options is not a softmax over rescaled queries; expected auto"
        case "triton" if normaliser.has_sdpa:
            problem = f"{name} is a softmax here; expected auto or sdpa"
        case "triton" if not normaliser.is_fusible:
            problem = f"{name} with these options has no fused form; expected auto or rows"
        case "triton" if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            problem = f"needs a CUDA device, found {device.type}; expected auto or rows"
        case "triton" if normaliser.head_dim > FUSED_HEAD_DIM.get(dtype, 0):
            problem = (
                f"head size {normaliser.head_dim} in {dtype}; expected at most 256 in 16 bits, 128 in float32"
            )
        case "flex" if not normaliser.has_flex:
            problem = f"{name} is not a softmax of scores that depend on the distance; expected auto"
        case "flex" if device.type != "cuda":  # where FlexAttention has no backward pass
            problem = f"needs a CUDA device, found {device.type}; expected auto or rows"
    if problem:
        raise UserError(f"train.engine = {engine!r}: {problem}")
    if engine not in get_args(Engine):
        raise ValueError(f"engine = {engine!r}: expected one of {', '.join(get_args(Engine))}")
    return engine


def compiled_engine(engine: Engine) -> Any:
    """The module of triton or flex, imported where used: not every platform has Triton."""
    if engine == "flex":
        from engines import flex

        return flex

    from engines import triton

    return triton


def describe_engine(
    normaliser: NormaliserModule, engine: Engine, device: torch.device, dtype: torch.dtype
) -> str:
    """The engine's name; for compiled kernels with the error of their self-check."""
    if engine not in ("triton", "flex"):
        return engine
    error, problem = check(engine, compiled_engine(engine), normaliser, device, dtype)
    if problem:  # auto does not get here
        raise UserError(f"engine = {engine!r}: failed its self-check ({problem}); expected auto or rows")
    return f"{engine} (self-check: relative error {error:.1e})"


def describe_attention(options: AttentionConfig, model: ModelConfig | None = None) -> str:
    """The [attention] section in a few words, 'lssa (reweight_p = 15)', and of [model] ', alibi, gate'."""
    values = options.definition.model_dump(exclude_defaults=True)
    common = ("reweight_p", "reweight_p_warmup")
    values |= {key: value for key in common if (value := getattr(options, key))}
    listed = ", ".join(f"{key} = {value}" for key, value in values.items())
    text = options.normaliser + (f" ({listed})" if listed else "")
    if model is not None and model.position != "rope":
        text += ", no positions" if model.position == "none" else f", {model.position}"
    return text + ", gate" * (model is not None and model.attention_gate)
