"""Llama and GPT-NeoX: the two architectures of transformers that compute what our softmax models do.

    Llama      norm = rmsnorm, mlp = swiglu: the SSMax paper's model
    GPT-NeoX   norm = layernorm, mlp = gelu: this repo's base, without parallel residuals, RoPE on whole heads

One map of parameters, `pair_parameters`, serves export and import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infra.cli import UserError
from model import GPT, NORM_EPS
from normalisers.family import Softmax
from positions import UNSCALED, RopeScaling
from schema import Config

ARCHITECTURES = {("rmsnorm", "swiglu"): "llama", ("layernorm", "gelu"): "gpt_neox"}
# Their names of our modules; {} is the layer.
LLAMA_NAMES = {
    "model.embed_tokens": "embedding",
    "lm_head": "lm_head",
    "model.norm": "final_norm",
    "model.layers.{}.input_layernorm": "blocks.{}.attention_norm",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.mlp_norm",
    "model.layers.{}.self_attn.o_proj": "blocks.{}.attention.out",
    "model.layers.{}.mlp.gate_proj": "blocks.{}.mlp.gate",
    "model.layers.{}.mlp.up_proj": "blocks.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.down",
}
NEOX_NAMES = {
    "gpt_neox.embed_in": "embedding",
    "lm_head": "lm_head",
    "gpt_neox.final_layer_norm": "final_norm",
    "gpt_neox.layers.{}.input_layernorm": "blocks.{}.attention_norm",
    "gpt_neox.layers.{}.post_attention_layernorm": "blocks.{}.mlp_norm",
    "gpt_neox.layers.{}.attention.dense": "blocks.{}.attention.out",
    "gpt_neox.layers.{}.mlp.dense_h_to_4h": "blocks.{}.mlp.up",
    "gpt_neox.layers.{}.mlp.dense_4h_to_h": "blocks.{}.mlp.down",
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
    for parameter in native.state_dict().values():
        parameter.zero_()  # what stays so: GPT-NeoX's biases where ours has none
    for _, theirs, ours in pair_parameters(model, native):
        if theirs is not None:
            theirs.copy_(ours)
    return native


def pair_parameters(model: GPT, native: Any) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Each parameter's name in `native`, its values there and ours: views of one shape, to copy either way.

    None: it has no such parameter (a bias).
    """
    m = model.config.model
    ours = model.state_dict()
    theirs = native.state_dict()
    names = LLAMA_NAMES if native.config.model_type == "llama" else NEOX_NAMES
    layers = range(m.n_layer)
    modules = {there.format(i): here.format(i) for i in layers for there, here in names.items()}
    for there, here in modules.items():
        for kind in ("weight", "bias"):
            parameter = ours.get(f"{here}.{kind}")
            if parameter is not None:
                is_padded = here in ("embedding", "lm_head")
                name = f"{there}.{kind}"
                yield name, theirs.get(name), parameter[: m.vocab_size] if is_padded else parameter
    for i in layers:
        for kind in ("weight", "bias"):
            qkv = ours.get(f"blocks.{i}.attention.qkv.{kind}")
            if qkv is not None:
                yield from pair_qkv(model.config, theirs, i, kind, qkv)


def pair_qkv(
    config: Config, theirs: dict[str, Tensor], layer: int, kind: str, qkv: Tensor
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """`pair_parameters` of a layer's queries, keys and values.

    transformers' RoPE rotates pairs (x_i, x_{i + D/2}), ours neighbours: the rows of q and k have another
    order. Llama keeps q, k and v apart. GPT-NeoX has those of each head in turn.
    """
    m = config.model
    half = m.head_dim // 2
    columns = qkv.shape[1:]  # of a weight
    neox_name = f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}"
    sizes = [n * m.head_dim for n in (m.n_head, m.kv_heads, m.kv_heads)]
    for i, part in enumerate(qkv.split(sizes)):
        if i < 2:
            part_in_halves = part.view(-1, half, 2, *columns).transpose(1, 2)
        else:
            part_in_halves = part.view(-1, 2, half, *columns)
        if neox_name in theirs:
            name = neox_name
            there: Tensor | None = theirs[name].view(m.n_head, 3, 2, half, *columns)[:, i]
        else:
            name = f"model.layers.{layer}.self_attn.{'qkv'[i]}_proj.{kind}"
            there = theirs[name].view(-1, 2, half, *columns) if name in theirs else None
        yield name, there, part_in_halves


@torch.no_grad()
def largest_difference(model: GPT, theirs: Any, length: int, rope: RopeScaling = UNSCALED) -> float:
    """Between the logits of our model and of transformers', on two rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(model.config.model.vocab_size, (2, length), generator=generator)
    return (theirs.eval()(x).logits - model(x, rope=rope)).abs().max().item()
