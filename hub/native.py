"""Llama and GPT-NeoX: the two architectures of transformers that compute what our softmax models do.

Llama      norm = rmsnorm, mlp = swiglu: the SSMax paper's model
GPT-NeoX   norm = layernorm, mlp = gelu: this repo's base, without parallel residuals, RoPE on whole heads
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infra.cli import UserError
from model import GPT, NORM_EPS
from normalisers.family import Softmax
from schema import Config

ARCHITECTURES = {("rmsnorm", "swiglu"): "llama", ("layernorm", "gelu"): "gpt_neox"}
MODULES = {  # our names, Llama's and GPT-NeoX's; {} is the layer
    "embedding": ("model.embed_tokens", "gpt_neox.embed_in"),
    "lm_head": ("lm_head", "lm_head"),
    "final_norm": ("model.norm", "gpt_neox.final_layer_norm"),
    "blocks.{}.attention_norm": ("model.layers.{}.input_layernorm", "gpt_neox.layers.{}.input_layernorm"),
    "blocks.{}.mlp_norm": (
        "model.layers.{}.post_attention_layernorm",
        "gpt_neox.layers.{}.post_attention_layernorm",
    ),
    "blocks.{}.attention.out": ("model.layers.{}.self_attn.o_proj", "gpt_neox.layers.{}.attention.dense"),
    "blocks.{}.mlp.gate": ("model.layers.{}.mlp.gate_proj", ""),
    "blocks.{}.mlp.up": ("model.layers.{}.mlp.up_proj", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
    "blocks.{}.mlp.down": ("model.layers.{}.mlp.down_proj", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
}


def import_transformers() -> Any:
    """The optional dependency. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: pip install -r requirements-hub.txt") from None
    return transformers


def choose_architecture(config: Config) -> str | None:
    """ "llama" or "gpt_neox"; None: neither computes what this model does."""
    m = config.model
    a = config.attention
    is_softmax = a.definition == Softmax() and not a.reweight_p and config.train.loss == "softmax"
    if not is_softmax or m.position != "rope" or m.attention_gate:
        return None
    architecture = ARCHITECTURES.get((m.norm, m.mlp))
    is_grouped = m.kv_heads < m.n_head
    return None if is_grouped and architecture == "gpt_neox" else architecture


def native_model(model: GPT, architecture: str, eot_token: int) -> Any:
    """A LlamaForCausalLM or GPTNeoXForCausalLM with the weights of `model`, in float32."""
    transformers = import_transformers()
    m = model.config.model
    options: dict[str, Any] = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.n_embd,
        "intermediate_size": m.mlp_hidden or 4 * m.n_embd,
        "num_hidden_layers": m.n_layer,
        "num_attention_heads": m.n_head,
        "max_position_embeddings": model.config.train.seq_len,
        "tie_word_embeddings": m.tie_embeddings,
        "bos_token_id": eot_token,
        "eos_token_id": eot_token,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta, "partial_rotary_factor": 1.0},
    }
    if architecture == "llama":
        options |= {"num_key_value_heads": m.kv_heads}
        options |= {"rms_norm_eps": NORM_EPS, "attention_bias": m.bias, "mlp_bias": m.bias}
        native = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    else:
        act = {"tanh": "gelu_new", "exact": "gelu"}[m.gelu]
        options |= {"hidden_act": act, "layer_norm_eps": NORM_EPS, "use_parallel_residual": False}
        native = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**options))
    # What ours does not have are biases of GPT-NeoX.
    values = {name: torch.zeros_like(theirs) for name, theirs in native.state_dict().items()}
    native.load_state_dict(values | dict(native_parameters(model, architecture)))
    return native


def native_parameters(model: GPT, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The parameters under transformers' names.

    transformers' RoPE rotates pairs (x_i, x_{i + D/2}), ours neighbours: the rows of q and k have another
    order. Llama keeps q, k and v apart. GPT-NeoX has those of each head in turn.
    """
    m = model.config.model
    is_neox = architecture == "gpt_neox"
    for name, ours in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        layer = module.split(".")[1] if module.startswith("blocks.") else ""
        if not module.endswith(".qkv"):
            there = MODULES[module.replace(f".{layer}.", ".{}.", 1)][is_neox].format(layer)
            is_padded = module in ("embedding", "lm_head")
            yield f"{there}.{kind}", ours[: m.vocab_size] if is_padded else ours
            continue
        columns = ours.shape[1:]  # of a weight
        q, k, v = ours.split([n * m.head_dim for n in (m.n_head, m.kv_heads, m.kv_heads)])
        q, k = (part.view(-1, m.head_dim // 2, 2, *columns).transpose(1, 2) for part in (q, k))
        if is_neox:
            heads = torch.stack([part.reshape(m.n_head, -1, *columns) for part in (q, k, v)], dim=1)
            yield f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}", heads.flatten(0, 2)
        else:
            for letter, part in zip("qkv", (q, k, v), strict=True):
                yield f"model.layers.{layer}.self_attn.{letter}_proj.{kind}", part.reshape(-1, *columns)
