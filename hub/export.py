"""Export a trained model to transformers: config, safetensors weights, tokenizer, model card, code.

    python -m hub.export runs/lssar exported/lssar
    python -m hub.export runs/lssar exported/lssar --rope ntk --check      # compares tokens and logits
    python -m hub.export runs/softmax exported/softmax                     # GPT-NeoX or Llama, where exact
    hf upload user/lssar exported/lssar                                    # to the Hugging Face hub

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("exported/lssar", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("exported/lssar", trust_remote_code=True)

Needs `pip install -r requirements-hub.txt`. Who loads the folder needs torch, transformers and
pydantic. A softmax model with layernorm and gelu, or with rmsnorm and swiglu, is written as
GPT-NeoX or Llama and needs no trust_remote_code. With --rope or --code it is written as all others:
with this repo's own definitions, copied from hub/modeling.py and what it imports. Their RoPE
scaling is a key of config.json and an argument of
from_pretrained: rope = "ntk", "yarn", "theta=500000".

The vocabulary's padding is dropped in the native forms. In training every document began with the
end-of-text token (tokenizer.bos_token, <|endoftext|> with gpt2 and bytes). Start prompts with it.
"""

import argparse
import ast
import json
from copy import copy
from pathlib import Path
from typing import Any

import torch

from config import to_toml
from data.tokenizer import FileTokenizer, Tokenizer
from hub.native import choose_architecture, import_transformers, largest_difference, native_model
from infra.cli import ArgumentParser, UserError, run_main
from model import GPT
from normalisers.own import MODULES, files_of
from positions import RopeScaling
from schema import describe_layers
from training.checkpoint import Trained, load_model

CHECK_TEXT = "def naïve(x): return 'It\\'s 1234567'  # 日本語\n\n\tx  += 1"
TOLERANCE = 1e-3  # of logits in float32, which a correct export leaves below 1e-4
ROOT = Path(__file__).parents[1]


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("run", help="run folder (its newest checkpoint) or one checkpoint file")
    add("out", type=Path, help="new folder to write")
    add("--code", action="store_true", help="this repo's code, also for a softmax model")
    rope_help = "scaling in config.json: none, ntk, yarn, theta=500000 (default: none)"
    add("--rope", default="none", metavar="SCALING", help=rope_help)
    add(
        "--check",
        action="store_true",
        help="load it with transformers: logits within 1e-3",
    )
    args = parser.parse_args()
    if args.out.is_dir() and any(args.out.iterdir()):
        raise UserError(f"{args.out}: exists; expected a new folder")
    return args


def main() -> None:
    args = parse_args()
    rope = RopeScaling(args.rope)
    trained = load_model(args.run)
    tokenizer = trained.tokenizer
    is_scaled = rope.name != "none"
    architecture = None if args.code or is_scaled else choose_architecture(trained.config)
    if architecture is None:
        converted = own_model(trained.model, rope, tokenizer.eot_token)
    else:
        converted = native_model(trained.model, architecture, tokenizer.eot_token)
    unused = list(range(tokenizer.n_vocab, trained.config.model.vocab_size))
    # as sample.py, which draws none of them
    converted.generation_config.suppress_tokens = unused or None
    ends_at_T = "ssmax_pn" in trained.config.normalisers
    fast_tokenizer = convert_tokenizer(
        tokenizer, trained.config.train.seq_len if ends_at_T else None
    )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if architecture is None:
            copy_code(args.out, trained.config.normalisers)
        converted.save_pretrained(args.out)
        fast_tokenizer.save_pretrained(args.out)
        card = model_card(args.out.name, trained, architecture is None)
        (args.out / "README.md").write_text(card, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{args.out}: cannot be written: {e.strerror or e}") from None
    kind = type(converted).__name__
    print(
        f"{args.run}, step {trained.step} -> {args.out}: {kind}, {trained.model.n_params():,} parameters"
    )
    if args.check:
        difference = check(args.out, trained.model, tokenizer, rope)
        print(f"largest difference between the logits: {difference:.1e}")
        if not difference <= TOLERANCE:  # NaN is none
            raise UserError(
                f"{args.out}: logits differ by {difference:.1e}: expected at most {TOLERANCE:.0e}"
            )


def own_model(model: GPT, rope: RopeScaling, eot_token: int) -> Any:
    """The model as a `NormaliserGPTForCausalLM`, in float32."""
    import_transformers()
    from hub.modeling import NormaliserGPTConfig, NormaliserGPTForCausalLM

    m = model.config.model
    config = NormaliserGPTConfig(
        gpt=model.config.model_dump(exclude={"data": {"dir", "order", "skip_steps"}, "log": True}),
        rope=rope.name,
        vocab_size=m.vocab_size,
        hidden_size=m.n_embd,
        num_hidden_layers=m.n_layer,
        num_attention_heads=m.n_head,
        max_position_embeddings=model.config.train.seq_len,
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
def copy_code(out: Path, normalisers: list[str]) -> None:
    """Write hub/modeling.py and each module of ours that it imports, as hub_modeling.py,
    engines_rows.py ...

    The files are flat because transformers loads no packages from a model's folder. A normaliser's
    own file becomes own_0.py, own_1.py, ... It may import this repo's modules and installed
    packages.

    Raises UserError: an own file imports one beside it, or this repo's modules in a form that has
    no flat one (`flatten`). Nothing is written then.
    """
    sources: dict[str, str] = {}
    registered = ""
    waiting = ["hub.modeling"]
    for i, (file, source) in enumerate(files_of(normalisers).items()):
        sources[f"own_{i}"], imported = flatten(Path(str(MODULES[file].__file__)), source)
        waiting += imported
        registered += REGISTER.format(module=f"own_{i}", file=file)
    while waiting:
        module = waiting.pop()
        if flat(module) not in sources:
            path = module_path(module)
            sources[flat(module)], imported = flatten(path, path.read_bytes())
            waiting += imported
    sources["hub_modeling"] += registered
    for name, text in sources.items():
        (out / f"{name}.py").write_text(text, encoding="utf-8")


# transformers copies the files named in `from .x import` alone
REGISTER = """
from .normalisers_own import MODULES
from .{module} import __name__ as {module}
from . import {module}
MODULES["{file}"] = {module}
"""


def module_path(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def flat(module: str) -> str:
    return module.replace(".", "_")


def flatten(file: Path, content: bytes) -> tuple[str, list[str]]:
    """A module's text with its imports of our modules relative and flat, and the names of these
    modules.

    Raises UserError: it imports one of ours beside another statement or by a dotted name, or its
    neighbour.
    """
    source = content.decode("utf-8-sig")
    lines = source.split("\n")  # as ast counts them
    imported = []
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        modules, statements = rewrite_import(node)
        if not statements:
            package = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in [package] if package else [alias.name for alias in node.names]:
                beside = file.parent / name.partition(".")[0]
                if (
                    beside.with_name(f"{beside.name}.py").is_file()
                    or (beside / "__init__.py").is_file()
                ):
                    where = f"{file}, line {node.lineno}: import of {name}"
                    raise UserError(
                        f"{where}: cannot be exported: expected no file of yours beside this one"
                    )
            continue
        last_line = (node.end_lineno or node.lineno) - 1
        before = lines[node.lineno - 1][: node.col_offset].strip()
        after = lines[last_line][node.end_col_offset :].partition("#")[0].strip()
        is_dotted = isinstance(node, ast.Import) and any(
            alias.name in modules and "." in alias.name and not alias.asname for alias in node.names
        )
        if is_dotted or before or after:
            text = "\n".join(lines[node.lineno - 1 : last_line + 1]).strip()
            expected = "expected `import a.b as c` or `from a.b import c`, in a line of its own"
            raise UserError(f"{file}, line {node.lineno}: {text}: cannot be exported: {expected}")
        indent = lines[node.lineno - 1][: node.col_offset]
        lines[node.lineno - 1 : last_line + 1] = [indent + line for line in statements]
        imported += modules
    return "\n".join(lines), imported


def rewrite_import(node: ast.Import | ast.ImportFrom) -> tuple[list[str], list[str]]:
    """Our modules that the statement imports, and the lines that replace it; none: it stays."""
    package = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    if module_path(package).is_file():
        names = ast.unparse(node).partition(" import ")[2]
        return [package], [f"from .{flat(package)} import {names}"]
    modules = []
    lines = []
    has_kernels = False
    for alias in node.names:
        single = copy(node)
        single.names = [alias]
        module = f"{package}.{alias.name}".lstrip(".")
        name = alias.asname or alias.name
        if module_path(module).is_file():
            modules.append(module)
            # transformers copies the files named in `from .x import` alone: the first line is for
            # its eyes.
            lines.append(f"from .{flat(module)} import __name__ as {name}")
            lines.append(f"from . import {flat(module)} as {name}")
        elif module.partition(".")[0] == "triton":
            # It demands every package that is imported outside a try. Those of kernels are
            # optional.
            lines += ["try:", f"    {ast.unparse(single)}", "finally:", "    pass"]
            has_kernels = True
        else:
            lines.append(ast.unparse(single))
    return modules, lines if modules or has_kernels else []


# ---------------------------------------------------------------- card
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

Attention: {attention}. Trained for {step:,} steps of {batch_tokens:,} tokens of `{data}` (tokeniser:
{tokenizer}) in windows of {train_len}.

```python
model = transformers.AutoModelForCausalLM.from_pretrained("{folder}"{option})
tokenizer = transformers.AutoTokenizer.from_pretrained("{folder}"{option})
```

The training run, as `python train.py config.toml`:

```toml
{toml}```
"""


def model_card(folder: str, trained: Trained, is_code: bool) -> str:
    """README.md: what the model is, how to load it, its config."""
    config = trained.config
    return CARD.format(
        name=config.name,
        attention=describe_layers(config),
        step=trained.step,
        batch_tokens=config.train.batch_tokens,
        data=config.data.dir,
        tokenizer=trained.tokenizer_name,
        train_len=config.train.seq_len,
        folder=folder,
        option=", trust_remote_code=True" if is_code else "",
        toml=to_toml(config),
    )


# ---------------------------------------------------------------- tokenizer and check
def convert_tokenizer(tokenizer: Tokenizer, max_length: int | None) -> Any:
    """Our tokenizer as a fast one of transformers, which truncates to max_length if told to."""
    transformers = import_transformers()
    from tokenizers import Tokenizer as FastTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    end = tokenizer.decode([tokenizer.eot_token])
    if isinstance(tokenizer, FileTokenizer):
        content = json.loads(tokenizer.content)
        content["post_processor"] = None  # training saw no tokens around a text
        splitter = content.get("pre_tokenizer") or {}
        first = (splitter.get("pretokenizers") or [splitter])[0]
        # a text begins behind an end token as it does alone
        if first.get("prepend_scheme") == "first":
            first["prepend_scheme"] = "always"
        converted = FastTokenizer.from_str(json.dumps(content))
    else:
        ranks = tokenizer._mergeable_ranks
        converter = TikTokenConverter(pattern=tokenizer._pat_str, extra_special_tokens=[end])
        converter.load_tiktoken_bpe = lambda _: ranks  # type: ignore  # from memory, not a file
        converted = converter.converted()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=converted, model_max_length=max_length, padding_side="left", **special
    )


def check(out: Path, model: GPT, tokenizer: Tokenizer, rope: RopeScaling) -> float:
    """The largest difference between the exported model's logits and ours, on random tokens.

    Raises:
        UserError: the exported tokenizer gives other tokens than ours.
    """
    transformers = import_transformers()
    options = {"dtype": torch.float32, "trust_remote_code": True}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, **options)
    fast_tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    ours = tokenizer.encode_ordinary(CHECK_TEXT)
    end = fast_tokenizer.bos_token
    pairs = {CHECK_TEXT: ours, end + CHECK_TEXT: [tokenizer.eot_token, *ours]}
    if any(fast_tokenizer.encode(text) != tokens for text, tokens in pairs.items()):
        raise UserError(f"{out}: transformers' tokenizer gives other tokens than ours")
    length = model.config.train.seq_len
    if rope.name != "none" and "ssmax_pn" not in model.config.normalisers:  # whose p_n ends at T
        length *= 2  # where scaling acts
    return largest_difference(model, theirs, length, rope)


if __name__ == "__main__":
    run_main(main)
