"""Export a trained model to transformers: config, safetensors weights, tokenizer, model card, code.

    python -m hub.export runs/lssar exported/lssar
    python -m hub.export runs/lssar exported/lssar --rope ntk --check      # compares tokens and logits
    python -m hub.export runs/softmax exported/softmax                     # GPT-NeoX or Llama, where exact
    python -m hub.export runs/lssar exported/lssar --push user/lssar       # and upload the folder

    model = transformers.AutoModelForCausalLM.from_pretrained("exported/lssar", trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported/lssar", trust_remote_code=True)

Needs `pip install -r requirements-hub.txt`; who loads the folder needs torch, transformers and pydantic. A
softmax model with layernorm and gelu, or rmsnorm and swiglu, is written as GPT-NeoX or Llama, and needs no
trust_remote_code (--code: as all others). Any other is written with this repo's own definitions, copied with
their imports made relative (hub/modeling.py and what it imports). Its RoPE scaling is a key of config.json,
and an argument of from_pretrained: rope = "ntk", "theta" (with rope_base), "linear", "yarn".

The vocabulary's padding is dropped in the native forms. In training every document began with <|endoftext|>:
start prompts with it.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any, get_args

import tiktoken
import torch

from config import to_toml
from data.tokenizer import get_tokenizer
from evals.output import format_rope
from hub.native import choose_architecture, import_transformers, largest_difference, native_model
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import read_json
from model import GPT
from positions import RopeKind, RopeScaling
from schema import Config, describe_attention
from training.checkpoint import load_model

END = "<|endoftext|>"
CHECK_TEXT = "def naïve(x): return 'It\\'s 1234567'  # 日本語\n\n\tx  += 1"
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("run", help="run folder (its newest checkpoint) or one checkpoint file")
    parser.add_argument("out", type=Path, help="new folder to write")
    parser.add_argument("--code", action="store_true", help="this repo's code, also for a softmax model")
    parser.add_argument("--rope", choices=get_args(RopeKind), default="none", help="scaling in config.json")
    parser.add_argument("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    parser.add_argument("--check", action="store_true", help="load it with transformers, compare with ours")
    parser.add_argument("--license", default="mit", help="licence of the weights, on the card (default: mit)")
    parser.add_argument("--push", metavar="USER/NAME", help="upload the folder to the Hugging Face hub")
    args = parser.parse_args()
    rope = RopeScaling(args.rope, args.rope_theta)
    model, config, step, tokenizer_name = load_model(args.run)
    tokenizer, architecture = get_tokenizer(tokenizer_name), choose_architecture(config)
    if args.code or rope.kind != "none":
        architecture = None
    converted = make_converted(model, architecture, rope, tokenizer.eot_token)
    fast_tokenizer = convert_tokenizer(tokenizer, config.train.seq_len)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if any(args.out.iterdir()):
            raise UserError(f"{args.out}: exists; expected a new folder")
        converted.save_pretrained(args.out)
        fast_tokenizer.save_pretrained(args.out)
        if architecture is None:
            copy_code(args.out)
        is_code = architecture is None
        card = model_card(args.out, Path(args.run), config, step, tokenizer_name, is_code, args.license)
        (args.out / "README.md").write_text(card, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{args.out}: cannot be written: {e.strerror or e}") from None
    name = type(converted).__name__
    print(f"{args.run}, step {step} -> {args.out}: {name}, {model.n_params():,} parameters")
    if args.check:
        print(f"largest difference between the logits: {check(args.out, model, tokenizer, rope):.1e}")
    if args.push:
        print(f"uploaded to {push(args.out, args.push)}")


def make_converted(model: GPT, architecture: str | None, rope: RopeScaling, eot_token: int) -> Any:
    """The model as a class of transformers, in float32: native, or `NormaliserGPTForCausalLM`."""
    import_transformers()
    if architecture is not None:
        return native_model(model, architecture, eot_token)
    from hub.modeling import NormaliserGPTConfig, NormaliserGPTForCausalLM

    c, m = model.config, model.config.model
    parts = c.model_dump(exclude={"data", "log"})
    config = NormaliserGPTConfig(
        gpt=parts,
        rope=rope.kind,
        rope_base=rope.theta,
        vocab_size=m.vocab_size,
        hidden_size=m.n_embd,
        num_hidden_layers=m.n_layer,
        num_attention_heads=m.n_head,
        max_position_embeddings=c.train.seq_len,
        tie_word_embeddings=m.tie_embeddings,
        bos_token_id=eot_token,
        eos_token_id=eot_token,
        pad_token_id=eot_token,
        use_cache=model.cacheable,
    )
    config.auto_map = {
        "AutoConfig": "hub_modeling.NormaliserGPTConfig",
        "AutoModelForCausalLM": "hub_modeling.NormaliserGPTForCausalLM",
    }
    converted = NormaliserGPTForCausalLM(config)
    converted.gpt.load_state_dict(model.state_dict())
    return converted


# ---------------------------------------------------------------- code
def copy_code(out: Path, start: str = "hub.modeling") -> None:
    """Write hub/modeling.py and each module of ours that it imports, as flat files: engines_base.py, ..."""
    waiting, texts = [start], dict[str, str]()
    while waiting:
        module = waiting.pop()
        text = module_path(module).read_text(encoding="utf-8")
        found = our_imports(text)
        waiting += found - texts.keys() - {module}
        texts[module] = make_relative(text, found)
    others = "".join(f"    from .{flat(m)} import __name__ as _\n" for m in sorted(texts.keys() - {start}))
    # transformers copies the files that it finds named in `from .x import`, which `from . import x` is not.
    texts[start] += f"\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n{others}"
    for module, text in texts.items():
        (out / f"{flat(module)}.py").write_text(text, encoding="utf-8")


def module_path(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def flat(module: str) -> str:
    return module.replace(".", "_")


def our_imports(text: str) -> set[str]:
    """The modules of this repo that a module imports, at any level."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name for name in names if module_path(name).is_file()}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if module_path(alias.name).is_file()}
    return found


def make_relative(text: str, modules: set[str]) -> str:
    """The text with the imports of these modules relative, for a folder of flat files."""
    for module in modules:
        text = re.sub(rf"^(\s*)import {module}\b", rf"\1from . import {module}", text, flags=re.M)
        text = re.sub(
            rf"^(\s*)from {re.escape(module)} import ", rf"\1from .{flat(module)} import ", text, flags=re.M
        )
    for package in {module.partition(".")[0] for module in modules if "." in module}:

        def flat_names(match: re.Match[str], package: str = package) -> str:
            names = match[2].split(", ")
            return f"{match[1]}from . import " + ", ".join(f"{package}_{name} as {name}" for name in names)

        text = re.sub(rf"^(\s*)from {package} import (\w+(?:, \w+)*)", flat_names, text, flags=re.M)
    # transformers demands every package that is imported outside a try: the kernels' is optional.
    return re.sub(r"^((?:import|from) triton.*)$", r"try:\n    \1\nfinally:\n    pass", text, flags=re.M)


# ---------------------------------------------------------------- card
CARD = """\
---
license: {license}
library_name: transformers
pipeline_tag: text-generation
---

# {name}

Attention: {attention}. Trained for {step:,} steps of {batch_tokens:,} tokens of `{data}` (tokeniser:
{tokenizer}) in windows of {train_len}.

```python
model = transformers.AutoModelForCausalLM.from_pretrained("{folder}"{options})
tokenizer = transformers.AutoTokenizer.from_pretrained("{folder}"{options})
```

```sh
lm_eval --model hf --model_args pretrained={folder}{flags} --tasks hellaswag
```
{code}{losses}
The training run, as `python train.py config.toml`:

```toml
{toml}```
"""
CARD_CODE = """
Beyond {train_len} tokens add `rope="ntk"` to from_pretrained's arguments, or another scaling. The code is
that of the training repository; it needs torch, transformers and pydantic.
"""
CARD_LOSSES = """
Validation loss in nats, ± standard error: {tokens:,} tokens of `{data}`, RoPE scaling {rope}, step {step:,}.

| length | loss | ± |
|---:|---:|---:|
{rows}
"""


def model_card(
    out: Path, run: Path, config: Config, step: int, tokenizer: str, is_code: bool, license: str
) -> str:
    """README.md: what the model is, how to run it, its losses by length if they were measured, its config."""
    losses, results = "", (run if run.is_dir() else run.parent.parent) / "eval_length.json"
    if results.exists():
        result = read_json(results)
        rows = [
            f"| {e['length']} | {e['reason']} | - |"
            if e["reason"]
            else f"| {e['length']} | {e['loss']:.4f} | {e['stderr'] or math.nan:.4f} |"
            for e in result["lengths"]
        ]
        losses = CARD_LOSSES.format(
            tokens=result["data"]["tokens"],
            data=result["data"]["dir"],
            rope=format_rope(result),
            step=result["step"],
            rows="\n".join(rows),
        )
    return CARD.format(
        license=license,
        name=config.name,
        attention=describe_attention(config.attention, config.model),
        step=step,
        batch_tokens=config.train.batch_tokens,
        data=config.data.dir,
        tokenizer=tokenizer,
        train_len=config.train.seq_len,
        folder=out.name,
        options=", trust_remote_code=True" if is_code else "",
        flags=",trust_remote_code=True" if is_code else "",
        code=CARD_CODE.format(train_len=config.train.seq_len) if is_code else "",
        losses=losses,
        toml=to_toml(config),
    )


# ---------------------------------------------------------------- tokenizer, check, upload
def convert_tokenizer(tokenizer: tiktoken.Encoding, max_length: int) -> Any:
    """The tiktoken encoding as a fast tokenizer of transformers."""
    transformers = import_transformers()
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(pattern=tokenizer._pat_str, extra_special_tokens=[END])
    converter.load_tiktoken_bpe = lambda _: tokenizer._mergeable_ranks  # type: ignore  # from memory, not a file
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), model_max_length=max_length, padding_side="left", **special
    )


def check(out: Path, model: GPT, tokenizer: tiktoken.Encoding, rope: RopeScaling) -> float:
    """The largest difference between the exported model's logits and ours, on random tokens.

    Raises:
        UserError: the exported tokenizer gives other tokens than ours.
    """
    transformers = import_transformers()
    options = {"dtype": torch.float32, "trust_remote_code": True}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, **options)
    tokens = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True).encode(CHECK_TEXT)
    if tokens != tokenizer.encode_ordinary(CHECK_TEXT):
        raise UserError(f"{out}: transformers' tokenizer gives other tokens than ours")
    length = model.config.train.seq_len
    if rope.kind != "none" and model.config.attention.normaliser != "ssmax_pn":  # whose p_n ends at T
        length *= 2  # where scaling acts
    return largest_difference(model, theirs, length, rope)


def push(folder: Path, name: str) -> str:
    """Upload the folder as a model repository of the Hugging Face hub; its address.

    Raises:
        UserError: no network, no token, a bad name, or the hub refuses.
    """
    import httpx
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = str(api.create_repo(name, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
        return address
    except (OSError, ValueError, httpx.HTTPError) as e:
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise UserError(f"--push {name}: {folder} is written but not uploaded: {reason}") from None


if __name__ == "__main__":
    run_main(main)
