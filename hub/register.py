"""Our normalisers inside models of transformers: an attention function for `attn_implementation`.

    from hub.register import learned_parameters, register
    from schema import AttentionConfig

    register("lssar", AttentionConfig(normaliser="lssa", reweight_p=15))
    model = AutoModelForCausalLM.from_pretrained("any Llama, Qwen3, GPT-NeoX", attn_implementation="lssar")

For causal models that call transformers' AttentionInterface: grouped-query heads, padding on the left or
right (n counts real keys), dynamic and static caches. The weights are the normaliser's definition on its
`engine`; positions, QK-norm and the scale of the scores stay the model's. Rejected: sliding windows, packed
sequences, soft-capped scores, the model's own sinks, dropout, layers that are not causal, and `ssmax_pn`,
whose p_n all layers share.

A normaliser with learned parameters (SSMax's s) becomes a submodule `normaliser` of each attention layer.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention import attend, make_normaliser
from hub.modeling import mask_spans
from hub.native import import_transformers
from infra.cli import UserError
from model import NORM_EPS
from schema import AttentionConfig

REJECTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


def register(name: str, options: AttentionConfig, train_len: int = 0) -> None:
    """Make `attn_implementation=name` run this normaliser.

    Args:
        train_len: L of the formulas that use it; 0: the model's max_position_embeddings.
    Raises:
        UserError: for `ssmax_pn`.
    """
    if options.normaliser == "ssmax_pn":
        raise UserError("ssmax_pn: one p_n for all layers; cannot be part of a model of transformers")
    transformers = import_transformers()
    function = partial(_attention, name, options, train_len)
    transformers.AttentionInterface.register(name, function)
    transformers.AttentionMaskInterface.register(name, partial(_make_mask, name))


def _make_mask(
    name: str,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    batch_size: int = 1,
    **_: Any,
) -> Tensor | None:
    """What `_attention` gets as its mask, made once for all layers: (B, 1, 1, 3) integers, each sequence's
    span of real keys, and the number of keys present (a static cache has more room). None: all keys."""
    from transformers.masking_utils import causal_mask_function

    if mask_function not in (None, causal_mask_function) or kv_offset:
        raise UserError(
            f"attn_implementation {name!r}: expected causal attention to all keys, in one sequence"
        )
    n_keys = int(q_offset) + q_length
    spans = None if attention_mask is None else mask_spans(attention_mask[:, :n_keys])
    if spans is None and kv_length == n_keys:
        return None
    return torch.tensor([(*span, n_keys) for span in spans or [(0, n_keys)] * batch_size])[:, None, None]


def _attention(
    name: str,
    options: AttentionConfig,
    train_len: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (B, H, Tq, D), key and value (B, H or fewer, Tk, D) to (B, Tq, H, D), and no weights."""
    found = [option for option in REJECTED if others.get(option) is not None]
    if found or dropout:
        raise UserError(f"attn_implementation {name!r}: cannot run with {', '.join(found) or 'dropout'}")
    if getattr(module, "is_causal", True) is False:
        raise UserError(f"attn_implementation {name!r}: {type(module).__name__} is not causal")
    spans = None
    if attention_mask is not None:
        if attention_mask.shape[-1] != 3 or attention_mask.is_floating_point():
            raise UserError(f"attn_implementation {name!r}: expected a padding mask, (batch, length)")
        values = attention_mask[:, 0, 0].tolist()
        spans, n_keys = [(start, stop) for start, stop, _ in values], values[0][2]
        key, value = key[:, :, :n_keys], value[:, :, :n_keys]
    n_head, head_dim = query.shape[1], query.shape[3]
    factor = 1.0 if scaling is None else scaling * math.sqrt(head_dim)
    if not math.isclose(factor, 1.0):
        query = query * factor  # so that x = scaling q.k, where the formulas have q.k / sqrt(d)
    config: Any = module.config
    length = train_len or config.max_position_embeddings
    normaliser: Any = getattr(module, "normaliser", None)
    if normaliser is None or normaliser.made_of != (options, length):
        normaliser = make_normaliser(options, n_head, head_dim, length).to(query.device)
        normaliser.made_of, module.normaliser = (options, length), normaliser
    out = attend(query, key, value, normaliser, "auto", spans=spans)
    if normaliser.definition.output_norm:
        out = F.rms_norm(out, (head_dim,), eps=NORM_EPS)
    return out.transpose(1, 2).contiguous(), None


def learned_parameters(model: Any, folder: str | Path | None = None) -> list[nn.Parameter]:
    """The normalisers' learned parameters, for an optimiser: all layers have them after a first forward pass.

    Args:
        folder: read their values from what `model.save_pretrained` wrote there; from_pretrained does not.
    Raises:
        UserError: the model does not call transformers' AttentionInterface, or `folder` lacks a value.
    """
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    if not any(hasattr(module, "normaliser") for module in model.modules()):
        raise UserError(f"{type(model).__name__}: no layer calls transformers' AttentionInterface")
    learned = {key: p for key, p in model.named_parameters() if ".normaliser." in key}
    if folder is not None:
        from safetensors.torch import load_file

        files = map(load_file, Path(folder).glob("*.safetensors"))
        saved = {key: t for tensors in files for key, t in tensors.items() if key in learned}
        if missing := learned.keys() - saved:
            raise UserError(f"{folder}: no value of {min(missing)} in its .safetensors")
        model.load_state_dict(saved, strict=False)
    return list(learned.values())
