"""Llama and GPT-NeoX: the two architectures of transformers that compute what our softmax models
do.

    Llama      norm = rmsnorm, mlp = swiglu: the SSMax paper's model
    GPT-NeoX   norm = layernorm, mlp = gelu: this repo's base, without parallel residuals, RoPE on whole heads

`pair_parameters` is the map of their parameters.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infra.cli import UserError
from model import GPT
from normalisers.family import Softmax
from positions import UNSCALED, RopeScaling
from schema import Config

ARCHITECTURES = {("rmsnorm", "swiglu"): "llama", ("layernorm", "gelu"): "gpt_neox"}
MODULES = {  # our names, Llama's and GPT-NeoX's; {} is the layer
    "embedding": ("model.embed_tokens", "gpt_neox.embed_in"),
    "lm_head": ("lm_head", "lm_head"),
    "final_norm": ("model.norm", "gpt_neox.final_layer_norm"),
    "blocks.{}.attention_norm": (
        "model.layers.{}.input_layernorm",
        "gpt_neox.layers.{}.input_layernorm",
    ),
    "blocks.{}.mlp_norm": (
        "model.layers.{}.post_attention_layernorm",
        "gpt_neox.layers.{}.post_attention_layernorm",
    ),
    "blocks.{}.attention.out": (
        "model.layers.{}.self_attn.o_proj",
        "gpt_neox.layers.{}.attention.dense",
    ),
    "blocks.{}.mlp.gate": ("model.layers.{}.mlp.gate_proj", ""),
    "blocks.{}.mlp.up": ("model.layers.{}.mlp.up_proj", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
    "blocks.{}.mlp.down": ("model.layers.{}.mlp.down_proj", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
}


def import_transformers() -> Any:
    """The optional dependency. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError as e:
        fix = "pip install -r requirements-hub.txt, or '.[hub]'"
        raise UserError(f"{e.name} is not installed: {fix}") from None
    return transformers


def choose_architecture(config: Config) -> str | None:
    """ "llama" or "gpt_neox"; None: neither computes what this model does."""
    m = config.model
    a = config.attention
    is_softmax = a.definition == Softmax() and not a.reweight_p and config.train.loss == "softmax"
    has_own_parts = m.window or m.attention_gate or m.exclusive or m.key_shift or config.layers
    has_own_parts = has_own_parts or config.data.documents
    if not is_softmax or m.position != "rope" or has_own_parts:
        return None
    architecture = ARCHITECTURES.get((m.norm, m.mlp))
    is_grouped = m.kv_heads < m.n_head
    return None if is_grouped and architecture == "gpt_neox" else architecture


def native_config(config: Config, architecture: str) -> Any:
    """The LlamaConfig or GPTNeoXConfig of a model that computes the same."""
    transformers = import_transformers()
    m = config.model
    options: dict[str, Any] = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.n_embd,
        "intermediate_size": m.mlp_hidden or 4 * m.n_embd,
        "num_hidden_layers": m.n_layer,
        "num_attention_heads": m.n_head,
        "max_position_embeddings": config.train.seq_len,
        "tie_word_embeddings": m.tie_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": m.rope_theta,
            "partial_rotary_factor": 1.0,
        },
    }
    if architecture == "llama":
        options |= {"num_key_value_heads": m.kv_heads}
        options |= {"rms_norm_eps": m.norm_eps, "attention_bias": m.bias, "mlp_bias": m.bias}
        return transformers.LlamaConfig(**options)
    act = {"tanh": "gelu_new", "exact": "gelu"}[m.gelu]
    options |= {"hidden_act": act, "layer_norm_eps": m.norm_eps, "use_parallel_residual": False}
    return transformers.GPTNeoXConfig(**options)


def native_model(model: GPT, architecture: str, eot_token: int) -> Any:
    """A LlamaForCausalLM or GPTNeoXForCausalLM with the weights of `model`, in float32."""
    config = native_config(model.config, architecture)
    config.bos_token_id = config.eos_token_id = eot_token
    native = import_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in native.state_dict().values():
        parameter.zero_()  # what stays so: GPT-NeoX's biases where ours has none
    for _, theirs, ours in pair_parameters(model, native):
        if theirs is not None:
            theirs.copy_(ours)
    return native


def pair_parameters(model: GPT, native: Any) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Each parameter's name in `native`, its values there and ours: views of one shape, to copy
    either way.

    None: it has no such parameter (a bias). transformers' RoPE rotates pairs (x_i, x_{i + D/2}),
    ours
    neighbours: the rows of q and k have another order. Llama keeps q, k and v apart. GPT-NeoX has
    those of each head in turn.
    """
    m = model.config.model
    theirs = native.state_dict()
    is_neox = native.config.model_type == "gpt_neox"
    half = m.head_dim // 2
    for name, ours in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        layer = module.split(".")[1] if module.startswith("blocks.") else ""
        if module.endswith(".qkv"):
            columns = ours.shape[1:]  # of a weight
            sizes = [n * m.head_dim for n in (m.n_head, m.kv_heads, m.kv_heads)]
            for i, part in enumerate(ours.split(sizes)):
                halves = part.view(-1, 2, half, *columns)
                if i < 2:
                    halves = part.view(-1, half, 2, *columns).transpose(1, 2)
                if is_neox:
                    there = f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}"
                    yield there, theirs[there].view(m.n_head, 3, 2, half, *columns)[:, i], halves
                else:
                    there = f"model.layers.{layer}.self_attn.{'qkv'[i]}_proj.{kind}"
                    their_part = theirs.get(there)
                    yield (
                        there,
                        None if their_part is None else their_part.view(halves.shape),
                        halves,
                    )
        else:
            there = MODULES[module.replace(f".{layer}.", ".{}.", 1)][is_neox].format(layer)
            if module in ("embedding", "lm_head"):
                ours = ours[: m.vocab_size]  # without rows of padding
            yield f"{there}.{kind}", theirs.get(f"{there}.{kind}"), ours


@torch.no_grad()
def largest_difference(model: GPT, theirs: Any, length: int, rope: RopeScaling = UNSCALED) -> float:
    """Between the logits of our model and of transformers', on two rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(model.config.model.vocab_size, (2, length), generator=generator)
    return (theirs.eval()(x).logits - model(x, rope=rope)).abs().max().item()
