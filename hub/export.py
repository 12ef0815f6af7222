"""Export a trained softmax model to transformers: config, safetensors weights, tokenizer.

    python -m hub.export runs/softmax exported/softmax
    python -m hub.export runs/a_softmax_162m exported/llama --check     # reloads it and compares logits

    model = transformers.AutoModelForCausalLM.from_pretrained("exported/softmax")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported/softmax")

Needs `pip install -r requirements-hub.txt`. Two architectures of transformers compute exactly what our models
with softmax attention do:

    Llama      norm = rmsnorm, mlp = swiglu: the SSMax paper's model
    GPT-NeoX   norm = layernorm, mlp = gelu: this repo's base, without parallel residuals, RoPE on whole heads

Other norms, normalisers and losses have no counterpart: `training.checkpoint.load_model` loads those. The
padding of the vocabulary is dropped. In training every document began with <|endoftext|>: start prompts with
it. Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json into a new folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from attention import describe_attention
from config import Config
from data.tokenizer import get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main
from model import GPT, NORM_EPS
from normalisers import Softmax
from training.checkpoint import load_model

END = "<|endoftext|>"
CHECK_TEXT = "def naïve(x): return 'It\\'s 1234567'  # 日本語\n\n\tx  += 1"


def main() -> None:
    parser = ArgumentParser(__doc__, prog="python -m hub.export")
    parser.add_argument("run", help="run folder (its newest checkpoint) or one checkpoint file")
    parser.add_argument("out", help="new folder to write")
    parser.add_argument("--check", action="store_true", help="load it with transformers and compare logits")
    args = parser.parse_args()
    model, config, step, tokenizer_name = load_model(args.run)
    tokenizer, out = get_tokenizer(tokenizer_name), Path(args.out)
    architecture = choose_architecture(config)
    converted = convert_model(model, architecture, tokenizer.eot_token)
    fast_tokenizer = convert_tokenizer(tokenizer, config.train.seq_len)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UserError(f"{out}: exists; expected a new folder")
        converted.save_pretrained(out)
        fast_tokenizer.save_pretrained(out)
    except OSError as e:
        raise UserError(f"{out}: cannot be written: {e.strerror or e}") from None
    print(f"{args.run}, step {step} -> {out}: {type(converted).__name__}, {model.n_params():,} parameters")
    if args.check:
        print(f"largest difference between the logits: {check(out, model, tokenizer):.1e}")


def choose_architecture(config: Config) -> str:
    """ "llama" or "gpt_neox".

    Raises:
        UserError: transformers has no architecture that computes what this model does.
    """
    m, a = config.model, config.attention
    if a.definition != Softmax() or a.reweight_p:
        raise UserError(
            f"attention is {describe_attention(a)}: transformers has plain softmax attention only"
        )
    if config.train.loss != "softmax":
        raise UserError(f"train.loss = {config.train.loss}: transformers has softmax over the logits only")
    architectures = {("rmsnorm", "swiglu"): "llama", ("layernorm", "gelu"): "gpt_neox"}
    if (m.norm, m.mlp) not in architectures:
        raise UserError(
            f"model.norm = {m.norm}, model.mlp = {m.mlp}: expected rmsnorm and swiglu (Llama), or layernorm "
            "and gelu (GPT-NeoX)"
        )
    architecture = architectures[m.norm, m.mlp]
    if architecture == "gpt_neox" and m.kv_heads < m.n_head:
        raise UserError(f"model.n_kv_head = {m.n_kv_head}: GPT-NeoX has no grouped-query heads; expected 0")
    return architecture


def import_transformers() -> Any:
    """The optional dependency. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: pip install -r requirements-hub.txt") from None
    return transformers


def convert_model(model: GPT, architecture: str, eot_token: int) -> Any:
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
        options["num_key_value_heads"] = m.kv_heads
        options |= {"rms_norm_eps": NORM_EPS, "attention_bias": m.bias, "mlp_bias": m.bias}
        converted = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
        tensors = llama_tensors(model)
    else:
        act = {"tanh": "gelu_new", "exact": "gelu"}[m.gelu]
        options |= {"hidden_act": act, "layer_norm_eps": NORM_EPS, "use_parallel_residual": False}
        converted = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**options))
        tensors = neox_tensors(model)
    tensors["lm_head.weight"] = model.state_dict()["lm_head.weight"][: m.vocab_size]
    converted.load_state_dict(tensors)  # strict: every parameter exactly once
    return converted


def halves_from_neighbours(t: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k, (H D, ...), in the order of transformers' RoPE, whose pairs are (x_i, x_{i + D/2})."""
    return t.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def llama_tensors(model: GPT) -> dict[str, Tensor]:
    """The parameters under Llama's names, without the output layer."""
    m, ours = model.config.model, model.state_dict()
    tensors = {
        "model.embed_tokens.weight": ours["embedding.weight"][: m.vocab_size],
        "model.norm.weight": ours["final_norm.weight"],
    }
    for i in range(m.n_layer):
        here, there = f"blocks.{i}", f"model.layers.{i}"
        tensors[f"{there}.input_layernorm.weight"] = ours[f"{here}.attention_norm.weight"]
        tensors[f"{there}.post_attention_layernorm.weight"] = ours[f"{here}.mlp_norm.weight"]
        for kind in ("weight", "bias") if m.bias else ("weight",):
            sizes = [n * m.head_dim for n in (m.n_head, m.kv_heads, m.kv_heads)]
            parts = ours[f"{here}.attention.qkv.{kind}"].split(sizes)
            for name, part in zip("qkv", parts, strict=True):
                rotated = part if name == "v" else halves_from_neighbours(part, m.head_dim)
                tensors[f"{there}.self_attn.{name}_proj.{kind}"] = rotated
            tensors[f"{there}.self_attn.o_proj.{kind}"] = ours[f"{here}.attention.out.{kind}"]
            for name in ("gate", "up", "down"):
                tensors[f"{there}.mlp.{name}_proj.{kind}"] = ours[f"{here}.mlp.{name}.{kind}"]
    return tensors


def neox_tensors(model: GPT) -> dict[str, Tensor]:
    """The same under GPT-NeoX's names: its biases are zero where ours has none, its q, k, v by head."""
    m, ours = model.config.model, model.state_dict()
    tensors = {"gpt_neox.embed_in.weight": ours["embedding.weight"][: m.vocab_size]}

    def by_head(t: Tensor) -> Tensor:
        """(3 H D, ...) to (H 3 D, ...)."""
        q, k, v = t.chunk(3)
        parts = halves_from_neighbours(q, m.head_dim), halves_from_neighbours(k, m.head_dim), v
        return torch.stack([part.unflatten(0, (m.n_head, -1)) for part in parts], 1).flatten(0, 2)

    def copy(there: str, here: str) -> None:
        weight = ours[f"{here}.weight"]
        bias = ours.get(f"{here}.bias", torch.zeros(len(weight)))
        if here.endswith("qkv"):
            weight, bias = (by_head(t) for t in (weight, bias))
        tensors[f"{there}.weight"], tensors[f"{there}.bias"] = weight, bias

    copy("gpt_neox.final_layer_norm", "final_norm")
    for i in range(m.n_layer):
        for there, here in (
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
            ("attention.query_key_value", "attention.qkv"),
            ("attention.dense", "attention.out"),
            ("mlp.dense_h_to_4h", "mlp.up"),
            ("mlp.dense_4h_to_h", "mlp.down"),
        ):
            copy(f"gpt_neox.layers.{i}.{there}", f"blocks.{i}.{here}")
    return tensors


def convert_tokenizer(tokenizer: tiktoken.Encoding, max_length: int) -> Any:
    """The tiktoken encoding as a fast tokenizer of transformers."""
    transformers = import_transformers()
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(pattern=tokenizer._pat_str, extra_special_tokens=[END])
    converter.load_tiktoken_bpe = lambda _: tokenizer._mergeable_ranks  # type: ignore  # from memory, not a file
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), bos_token=END, eos_token=END, model_max_length=max_length
    )


@torch.no_grad()
def check(out: Path, model: GPT, tokenizer: tiktoken.Encoding) -> float:
    """The largest difference between the exported model's logits and ours, on random tokens.

    Raises:
        UserError: the exported tokenizer gives other tokens than ours.
    """
    transformers = import_transformers()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(out).encode(CHECK_TEXT)
    if tokens != tokenizer.encode_ordinary(CHECK_TEXT):
        raise UserError(f"{out}: transformers' tokenizer gives other tokens than ours")
    m, length = model.config.model, model.config.train.seq_len
    x = torch.randint(m.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return (theirs(x).logits - model(x)).abs().max().item()


if __name__ == "__main__":
    run_main(main)
