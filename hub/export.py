"""Write a trained softmax model in the form that `transformers` loads: safetensors, config, tokeniser.

    python export.py runs/softmax exported/softmax
    python export.py runs/a_softmax_162m exported/llama --check      # compares logits; needs transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("exported/softmax")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported/softmax")

Two architectures there compute exactly what ours do with softmax attention:

    Llama      norm = rmsnorm, mlp = swiglu: the SSMax paper's model
    GPT-NeoX   norm = layernorm, mlp = gelu: this repo's base, without parallel residuals, RoPE on whole heads

Other combinations of norm and mlp, the other normalisers and train.loss = norm_softmax or logit_norm have no
counterpart: `checkpoint.load_model` loads those. The vocabulary's padding is cut off. Documents began with
<|endoftext|> in training: begin with it there, too. Writes into a new folder config.json, model.safetensors,
tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from config import Config
from data.tokenizer import get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import write_atomically
from model import GPT, NORM_EPS
from training.checkpoint import load_model

END = "<|endoftext|>"


def main() -> None:
    args = parse_args()
    model, config, step, tokenizer_name = load_model(args.run)
    tokenizer = get_tokenizer(tokenizer_name)
    architecture = choose_architecture(config)
    out = Path(args.out)
    make_folder(out)
    if architecture == "llama":
        values, tensors = llama_config(config), llama_tensors(model)
    else:
        values, tensors = neox_config(config), neox_tensors(model)
    common = {
        "vocab_size": config.model.vocab_size,
        "hidden_size": config.model.n_embd,
        "intermediate_size": config.model.mlp_hidden or 4 * config.model.n_embd,
        "num_hidden_layers": config.model.n_layer,
        "num_attention_heads": config.model.n_head,
        "max_position_embeddings": config.train.seq_len,
        "tie_word_embeddings": config.model.tie_embeddings,
        "bos_token_id": tokenizer.eot_token,
        "eos_token_id": tokenizer.eot_token,
        "torch_dtype": "float32",
    }
    write_json(out / "config.json", common | values)
    write_safetensors(out / "model.safetensors", tensors)
    write_json(out / "tokenizer.json", tokenizer_json(tokenizer))
    write_json(out / "tokenizer_config.json", tokenizer_config(config))
    print(f"{args.run}, step {step} -> {out}: {values['architectures'][0]}, {model.n_params():,} parameters")
    if args.check:
        print(f"largest difference between the logits: {check(out, model, tokenizer):.1e}")


def choose_architecture(config: Config) -> str:
    """ "llama" or "gpt_neox".

    Raises:
        UserError: transformers has no architecture that computes what this model does.
    """
    m, a = config.model, config.attention
    if a.normaliser != "softmax" or a.reweight_p is not None:
        name = a.normaliser + ("" if a.reweight_p is None else f" with reweight_p = {a.reweight_p}")
        raise UserError(f"attention.normaliser = {name}: transformers has softmax attention only")
    if config.train.loss != "softmax":
        raise UserError(f"train.loss = {config.train.loss}: transformers has softmax over the logits only")
    match m.norm, m.mlp:
        case "rmsnorm", "swiglu":
            return "llama"
        case "layernorm", "gelu":
            return "gpt_neox"
    raise UserError(
        f"model.norm = {m.norm}, model.mlp = {m.mlp}: expected rmsnorm and swiglu (Llama), or layernorm and "
        "gelu (GPT-NeoX)"
    )


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        if not out.is_dir() or any(out.iterdir()):
            raise UserError(f"{out}: exists; expected a new folder") from None
    except OSError as e:
        raise UserError(f"{out}: cannot be made: {e.strerror}") from None


# ---------------------------------------------------------------- the two architectures


def llama_config(config: Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_key_value_heads": config.model.n_head,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": config.model.rope_theta,
        "attention_bias": config.model.bias,
        "mlp_bias": config.model.bias,
    }


def llama_tensors(model: GPT) -> dict[str, Tensor]:
    m, ours = model.config.model, model.state_dict()
    tensors = {
        "model.embed_tokens.weight": ours["embedding.weight"][: m.vocab_size],
        "model.norm.weight": ours["final_norm.weight"],
    }
    if not m.tie_embeddings:
        tensors["lm_head.weight"] = ours["lm_head.weight"][: m.vocab_size]
    for i in range(m.n_layer):
        here, there = f"blocks.{i}", f"model.layers.{i}"
        tensors[f"{there}.input_layernorm.weight"] = ours[f"{here}.attention_norm.weight"]
        tensors[f"{there}.post_attention_layernorm.weight"] = ours[f"{here}.mlp_norm.weight"]
        for kind in ("weight", "bias") if m.bias else ("weight",):
            parts = ours[f"{here}.attention.qkv.{kind}"].chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                tensors[f"{there}.self_attn.{name}_proj.{kind}"] = part
            tensors[f"{there}.self_attn.o_proj.{kind}"] = ours[f"{here}.attention.out.{kind}"]
            for name in ("gate", "up", "down"):
                tensors[f"{there}.mlp.{name}_proj.{kind}"] = ours[f"{here}.mlp.{name}.{kind}"]
    return tensors


def neox_config(config: Config) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu_new",
        "layer_norm_eps": NORM_EPS,
        "rotary_emb_base": config.model.rope_theta,
        "rotary_pct": 1.0,
        "use_parallel_residual": False,
        "attention_bias": True,
    }


def neox_tensors(model: GPT) -> dict[str, Tensor]:
    """GPT-NeoX always has biases: zeros where ours has none. Its q, k, v stand together head by head."""
    m, ours = model.config.model, model.state_dict()
    tensors = {"gpt_neox.embed_in.weight": ours["embedding.weight"][: m.vocab_size]}
    if not m.tie_embeddings:
        tensors["embed_out.weight"] = ours["lm_head.weight"][: m.vocab_size]

    def copy(there: str, here: str) -> None:
        weight = ours[f"{here}.weight"]
        bias = ours.get(f"{here}.bias", torch.zeros(len(weight)))
        if here.endswith("qkv"):  # (3 H D, ...) to (H 3 D, ...)
            weight, bias = (
                t.view(3, m.n_head, m.head_dim, -1).transpose(0, 1).reshape(t.shape) for t in (weight, bias)
            )
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


# ---------------------------------------------------------------- files


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode())


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """float32 tensors in the safetensors format: the header's size, a JSON header, the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, tensor in tensors.items():
        data = tensor.float().contiguous().numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    write_atomically(path, len(text).to_bytes(8, "little"), text, *parts)


def tokenizer_json(tokenizer: tiktoken.Encoding) -> dict[str, Any]:
    """A byte-level BPE as the `tokenizers` library reads it."""
    ranks = {tokenizer.decode_single_token_bytes(i): i for i in range(tokenizer.n_vocab - 1)}
    merges = [split_last(token, ranks) for token in ranks if len(token) > 1]
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": tokenizer.eot_token, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "vocab": {spell(token): i for token, i in ranks.items()} | {END: tokenizer.eot_token},
            "merges": [f"{spell(a)} {spell(b)}" for a, b in merges],
        },
    }


def split_last(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that the merge making this one joins: BPE with the merges before it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte: itself, or one from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokenizer_config(config: Config) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.train.seq_len,
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }


# ---------------------------------------------------------------- proof


@torch.no_grad()
def check(out: Path, model: GPT, tokenizer: tiktoken.Encoding) -> float:
    """The largest difference between the exported model's logits and ours, on random tokens.

    Raises:
        UserError: transformers is not installed, or its tokeniser gives other tokens.
    """
    try:
        import transformers
    except ImportError:
        raise UserError("--check: transformers is not installed") from None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    text = "def naïve(x): return 'It\\'s 1234567'  # 日本語\n\n\tx  += 1"
    tokens = transformers.AutoTokenizer.from_pretrained(out).encode(text)
    if tokens != tokenizer.encode_ordinary(text):
        raise UserError(f"{out}: transformers' tokeniser gives other tokens than ours")
    m, length = model.config.model, model.config.train.seq_len
    x = torch.randint(m.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return (theirs(x).logits - model(x)).abs().max().item()


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("run", help="run folder (its newest checkpoint) or one checkpoint file")
    parser.add_argument("out", help="new folder to write")
    parser.add_argument("--check", action="store_true", help="load it with transformers and compare logits")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
