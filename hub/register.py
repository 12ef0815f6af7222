"""Our normalisers inside models of transformers: an attention function for `attn_implementation`.

    from hub.register import learned_parameters, register
    from schema import AttentionConfig

    register("lssar", AttentionConfig(normaliser="lssa", reweight_p=15))
    model = AutoModelForCausalLM.from_pretrained("any Llama", attn_implementation="lssar")

For causal models that call transformers' AttentionInterface, with grouped-query heads, padding on
the left or right (n counts real keys), dynamic and static caches. Positions, QK-norm and the scale
of dot products stay the model's. Cosine scores have their formula's scale. Rejected are sliding
windows, packed sequences, soft-capped scores, the model's own sinks, dropout, layers that are not
causal, `ssmax_pn`, whose p_n all layers share, and formulas that read the layer's input or the
number of all keys.

A normaliser with learned parameters (SSMax's s) becomes a submodule `normaliser` of each attention
layer.
"""

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention import make_normaliser
from hub.native import import_transformers
from hub.padding import attend_spans, mask_spans
from infra.cli import UserError
from schema import AttentionConfig

REJECTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


def register(name: str, options: AttentionConfig, train_len: int = 0) -> None:
    """Make `attn_implementation=name` run this normaliser.

    Args:
        train_len: L of the formulas that use it; 0: the model's max_position_embeddings.
    Raises:
        UserError: for `ssmax_pn`, and a normaliser that reads the layer's input or the number of
        all keys.
    """
    problem = "one p_n for all layers" if options.normaliser == "ssmax_pn" else ""
    if options.definition.signals(1):
        problem = "reads the layer's input"
    if not options.definition.cacheable:
        problem = "reads the number of all keys, which grows with the cache"
    if problem:
        raise UserError(
            f"{options.normaliser}: {problem}; cannot be part of a model of transformers"
        )
    transformers = import_transformers()
    replacement = Replacement(name, options, train_len)
    transformers.AttentionInterface.register(name, replacement.attention)
    transformers.AttentionMaskInterface.register(name, replacement.mask)


class Replacement(NamedTuple):
    """What transformers calls in the place of its attention and its masks."""

    name: str
    options: AttentionConfig
    train_len: int

    def mask(
        self,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        attention_mask: Tensor | None = None,
        batch_size: int = 1,
        config: Any = None,
        **_: Any,
    ) -> Tensor | None:
        """What `attention` gets as its mask, made once for all layers. None: all keys.

        (B, 1, 1, 3) integers: each sequence's span of real keys, and the number of keys present. A
        static cache has more room.
        """
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.masking_utils import causal_mask_function

        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        module = sys.modules[model_class.__module__] if model_class else None
        calls = getattr(
            model_class, "_supports_attention_backend", True
        )  # False where a model forgets to say it
        if not calls and not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
            # Its own attention would get no mask and see later keys.
            self.reject(f"{model_class.__name__} does not call transformers' AttentionInterface")
        if mask_function not in (None, causal_mask_function) or kv_offset:
            expected = "expected causal attention to all keys, in one sequence"
            self.reject(
                f"{expected} (torch.compile hides that it is: give an attention_mask of ones)"
            )
        n_keys = int(q_offset) + q_length
        spans = None if attention_mask is None else mask_spans(attention_mask[:, :n_keys])
        if spans is None and kv_length == n_keys:
            return None
        return torch.tensor([(*span, n_keys) for span in spans or [(0, n_keys)] * batch_size])[
            :, None, None
        ]

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query (B, H, Tq, D), key and value (B, H or fewer, Tk, D) to (B, Tq, H, D), and no
        weights.
        """
        unsupported = [option for option in REJECTED if others.get(option) is not None]
        if unsupported or dropout:
            self.reject(f"cannot run with {', '.join(unsupported) or 'dropout'}")
        if getattr(module, "is_causal", True) is False:
            self.reject(f"{type(module).__name__} is not causal")
        spans = None
        if attention_mask is not None:
            if attention_mask.shape[-1] != 3 or attention_mask.is_floating_point():
                self.reject("expected a padding mask, (batch, length)")
            starts, stops, n_keys = attention_mask[:, 0, 0].T.tolist()
            spans = list(zip(starts, stops, strict=True))
            key = key[:, :, : n_keys[0]]
            value = value[:, :, : n_keys[0]]
        factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[3])
        if not math.isclose(factor, 1.0):
            query = query * factor  # so that x = scaling q.k, where the formulas have q.k / sqrt(d)
        out = attend_spans(spans, query, key, value, self.layer_of(module, query))
        return out.transpose(1, 2).contiguous(), None

    def layer_of(self, module: Any, query: Tensor) -> Any:
        """The module's submodule `normaliser`, made at its first use and anew for other options."""
        made_of = (self.options, self.train_len or module.config.max_position_embeddings)
        layer: Any = getattr(module, "normaliser", None)
        if layer is None or layer.made_of != made_of:
            with torch.inference_mode(False):  # its parameters may be trained later
                layer = make_normaliser(self.options, query.shape[1], query.shape[3], made_of[1])
                layer.made_of = made_of
                module.normaliser = layer.to(query.device)
        return layer

    def reject(self, problem: str) -> None:
        raise UserError(f"attn_implementation {self.name!r}: {problem}")


def learned_parameters(model: Any) -> list[nn.Parameter]:
    """The normalisers' learned parameters, for an optimiser: all layers have them after a first
    forward pass.

    `from_pretrained` does not read them. After this call `model.load_state_dict` does.

    Raises:
        UserError: the model does not call transformers' AttentionInterface.
    """
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    if not any(hasattr(module, "normaliser") for module in model.modules()):
        raise UserError(f"{type(model).__name__}: no layer calls transformers' AttentionInterface")
    return [p for key, p in model.named_parameters() if ".normaliser." in key]
