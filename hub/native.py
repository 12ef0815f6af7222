"""Llama and GPT-NeoX: the two architectures of transformers that compute what our softmax models do.

    Llama      norm = rmsnorm, mlp = swiglu: the SSMax paper's model
    GPT-NeoX   norm = layernorm, mlp = gelu: this repo's base, without parallel residuals, RoPE on whole heads

One map of parameters, `pair_parameters`, serves export and import.
"""

from __future__ import annotations

import itertools
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


def import_transformers() -> Any:
    """The optional dependency. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: pip install -r requirements-hub.txt") from None
    return transformers


def choose_architecture(config: Config) -> str | None:
    """ "llama" or "gpt_neox"; None: neither computes what this model does."""
    m, a = config.model, config.attention
    is_softmax = a.definition == Softmax() and not a.reweight_p and config.train.loss == "softmax"
    if not is_softmax or m.position != "rope" or m.attention_gate:
        return None
    architecture = ARCHITECTURES.get((m.norm, m.mlp))
    grouped = m.kv_heads < m.n_head
    return None if grouped and architecture == "gpt_neox" else architecture


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
    for values in native.state_dict().values():
        values.zero_()  # what stays so: GPT-NeoX's biases where ours has none
    for _, there, here in pair_parameters(model, native):
        if there is not None:
            there.copy_(here)
    return native


def pair_parameters(model: GPT, native: Any) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Each parameter's name in `native`, its values there and ours: views of one shape, to copy either way.

    None: it has no such parameter (a bias). transformers' RoPE rotates pairs (x_i, x_{i + D/2}),
    ours neighbours: the rows of q and k have another order.
    """
    m, ours, theirs = model.config.model, model.state_dict(), native.state_dict()
    is_llama = native.config.model_type == "llama"
    prefix, embedding, norm, parts = (
        ("model", "embed_tokens", "norm", LLAMA_PARTS)
        if is_llama
        else ("gpt_neox", "embed_in", "final_layer_norm", NEOX_PARTS)
    )
    names = {f"{prefix}.{embedding}": "embedding", "lm_head": "lm_head", f"{prefix}.{norm}": "final_norm"}
    for i in range(m.n_layer):
        names |= {f"{prefix}.layers.{i}.{there}": f"blocks.{i}.{here}" for there, here in parts.items()}
    for there, here in names.items():
        for kind in ("weight", "bias"):
            values, name = ours.get(f"{here}.{kind}"), f"{there}.{kind}"
            if values is not None:
                padded = here in ("embedding", "lm_head")
                yield name, theirs.get(name), values[: m.vocab_size] if padded else values
    for i, kind in itertools.product(range(m.n_layer), ("weight", "bias")):
        values, there = ours.get(f"blocks.{i}.attention.qkv.{kind}"), f"{prefix}.layers.{i}"
        if values is None:
            continue
        sizes = [n * m.head_dim for n in (m.n_head, m.kv_heads, m.kv_heads)]
        for j, part in enumerate(values.split(sizes)):
            shape = -1, 2, m.head_dim // 2, *values.shape[1:]  # halves of each head
            here = part.view(shape)
            if j < 2:
                here = part.view(-1, m.head_dim // 2, 2, *values.shape[1:]).transpose(1, 2)
            if is_llama:
                name = f"{there}.self_attn.{'qkv'[j]}_proj.{kind}"
                found = theirs[name].view(shape) if name in theirs else None
            else:  # q, k and v of each head in turn
                name = f"{there}.attention.query_key_value.{kind}"
                found = theirs[name].view(m.n_head, 3, *shape[1:])[:, j] if name in theirs else None
            yield name, found, here


@torch.no_grad()
def largest_difference(model: GPT, theirs: Any, length: int, rope: RopeScaling = UNSCALED) -> float:
    """Between the logits of our model and of transformers', on two rows of random tokens."""
    shape, generator = (2, length), torch.Generator().manual_seed(0)
    x = torch.randint(model.config.model.vocab_size, shape, generator=generator)
    return (theirs.eval()(x).logits - model(x, rope=rope)).abs().max().item()


LLAMA_PARTS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
NEOX_PARTS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "attention.dense": "attention.out",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
