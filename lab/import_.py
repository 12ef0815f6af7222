"""Take a Llama or GPT-NeoX of transformers (unscaled RoPE on whole heads, GPT-2's tokens or bytes)
as a run.

    python -m lab.import_ USER/MODEL runs/imported          # from the Hugging Face hub, or a folder
    python train.py configs/ssmax.toml --train.max-steps 0 --init-from runs/imported

For `init_from` and the evaluations. What our model does not compute (parallel residuals, partial or
scaled RoPE, other vocabularies) is rejected by its name in config.json, except dropout. The logits
of both are compared. Needs `pip install -r requirements-hub.txt`.
"""

import argparse
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from config import config_from_dict, to_toml
from data.tokenizer import TOKENIZERS, get_tokenizer
from hub.export import CHECK_TEXT
from hub.native import (
    ARCHITECTURES,
    import_transformers,
    largest_difference,
    native_config,
    pair_parameters,
)
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import write_atomically
from model import GPT
from schema import Config
from training.checkpoint import save_checkpoint

COMPARED = ["rope_type", "partial_rotary_factor", "head_dim", "hidden_act", "use_parallel_residual"]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("model", help="folder or name on the Hugging Face hub")
    parser.add_argument("run", type=Path, help="new run folder")
    args = parser.parse_args()
    if args.run.exists():
        raise UserError(f"{args.run}: exists; expected a new folder")
    return args


def main() -> None:
    args = parse_args()
    native, tokenizer = load_native(args.model)
    config = convert_config(native.config, args.model, args.run)
    name = detect_tokenizer(tokenizer, args.model)
    model = convert_model(native, config)
    state = {
        "step": 0,
        "config": config.model_dump(),
        "model": model.state_dict(),
        "optimizers": [],
    }
    state |= {"rng": [], "data": {"tokenizer": name, "train": "", "val": ""}}
    save_checkpoint(args.run, state, keep_last=1)
    write_atomically(args.run / "config.toml", to_toml(config).encode())
    print(f"{args.model} -> {args.run}: {model.n_params():,} parameters, tokeniser {name}")
    length = min(512, config.train.seq_len)
    print(f"largest difference between the logits: {largest_difference(model, native, length):.1e}")


def load_native(source: str) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer. Raises UserError: absent, unreadable, not reachable."""
    transformers = import_transformers()
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        return load(source, dtype=torch.float32, trust_remote_code=False), tokenizer
    except (OSError, ValueError) as e:
        raise UserError(f"{source}: cannot be loaded: {shorten(str(e), 300)}") from None


def convert_config(theirs: Any, source: str, run: Path) -> Config:
    """The run's config. Raises UserError: all that our model does not compute, by its name in
    config.json.
    """
    if theirs.model_type not in ARCHITECTURES.values():
        fits = " or ".join(ARCHITECTURES.values())
        raise UserError(f"{source}: model_type = {theirs.model_type}: expected {fits}")
    norm, mlp = next(key for key, name in ARCHITECTURES.items() if name == theirs.model_type)
    length = theirs.max_position_embeddings
    kv_heads = getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
    model = {
        "n_layer": theirs.num_hidden_layers,
        "n_head": theirs.num_attention_heads,
        "n_kv_head": kv_heads if kv_heads < theirs.num_attention_heads else 0,
        "n_embd": theirs.hidden_size,
        "vocab_size": theirs.vocab_size,
        "norm": norm,
        "norm_eps": getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps,
        "mlp": mlp,
        "gelu": "exact" if theirs.hidden_act == "gelu" else "tanh",
        "mlp_hidden": theirs.intermediate_size,
        "bias": theirs.model_type != "llama" or theirs.attention_bias or theirs.mlp_bias,
        "tie_embeddings": theirs.tie_word_embeddings,
        "rope_theta": float(theirs.rope_parameters["rope_theta"]),
    }
    train = {"seq_len": length, "batch_tokens": length, "micro_batch": 1, "val_tokens": length}
    train["dtype"] = "float32"  # of its evaluations, as of the check
    sections = {"name": run.name, "model": model, "train": train, "log": {"dir": str(run.parent)}}
    config = config_from_dict(sections, source)
    theirs_listed = list_keys(theirs)
    computed = list_keys(native_config(config, theirs.model_type))
    differences = [
        f"{source}: {key} = {theirs_listed[key]}: our model does not compute that; expected {computed[key]}"
        for key in COMPARED
        if key in computed and theirs_listed[key] != computed[key]
    ]
    if differences:
        raise UserError("\n".join(differences))
    return config


def list_keys(theirs: Any) -> dict[str, Any]:
    """The keys of config.json and those of its RoPE, with one name for each activation."""
    keys = theirs.to_dict()
    if keys["hidden_act"] in ("gelu_fast", "gelu_pytorch_tanh"):
        keys["hidden_act"] = "gelu_new"
    return keys | {"partial_rotary_factor": 1.0, **keys["rope_parameters"]}


def convert_model(native: Any, config: Config) -> GPT:
    """Our model with the values of theirs; a bias that they do not have is zero."""
    model = GPT(config).eval()
    for _, theirs, ours in pair_parameters(model, native):
        ours.copy_(torch.zeros_like(ours) if theirs is None else theirs)
    return model


def detect_tokenizer(tokenizer: Any, source: str) -> str:
    """The name of our tokeniser that gives the same tokens. Raises UserError: none does."""
    tokens = tokenizer.encode(CHECK_TEXT, add_special_tokens=False)
    for name in TOKENIZERS:
        try:
            if get_tokenizer(name).encode_ordinary(CHECK_TEXT) == tokens:
                return name
        except UserError:  # gpt2's files are not at hand
            continue
    raise UserError(
        f"{source}: its tokenizer is none of ours; expected that of {', '.join(TOKENIZERS)}"
    )


if __name__ == "__main__":
    run_main(main)
