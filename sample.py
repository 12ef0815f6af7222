"""Continue prompts with a trained model, with a KV cache.

    python sample.py runs/demo_lssar --prompt "def "
    python sample.py runs/demo_softmax --prompt "class " "import " --samples 3 --tokens 100 --top-p 0.9
    python sample.py runs/demo_lssar --prompt-file start.py --tokens 4000 --rope ntk --greedy

Prints each prompt and its continuation up to the end of the document. A single one appears token by token,
several after each prompt, each under a line that names it. The number of tokens per second goes to stderr.

The samples of a prompt form a batch. Prompts do not, because padding would change n, the number of keys that
a query sees. Prompt i is sampled with seed + i, independent of the others. With --rope ntk RoPE is scaled for
the final length, prompt and all new tokens. The default is none, unlike that of the evaluations.
"""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import tiktoken
import torch

from data.tokenizer import get_tokenizer
from generation import stream
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import choose_device
from model import GPT
from positions import RopeKind, RopeScaling
from training.checkpoint import load_model


def main() -> None:
    args = parse_args()
    prompts = read_prompts(args)
    trained = load_model(args.run, choose_device(args.device))
    tokenizer = get_tokenizer(trained.tokenizer)
    began = time.perf_counter()
    if len(prompts) * args.samples == 1:
        n_tokens = print_stream(trained.model, tokenizer, prompts[0], args)
    else:
        n_tokens = print_all(trained.model, tokenizer, prompts, args)
    seconds = time.perf_counter() - began
    print(f"{n_tokens} tokens in {seconds:.2f} s: {n_tokens / seconds:.1f} tokens/s", file=sys.stderr)


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or [])
    for path in args.prompt_file or []:
        try:
            prompts.append(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"--prompt-file {path}: cannot be read as UTF-8 text: {e}") from None
    return prompts or ["\n"]


def sample_tokens(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: str, seed: int, args: argparse.Namespace
) -> Iterator[list[int]]:
    """The next token of each sample of the prompt, until all samples have ended."""
    device = model.embedding.weight.device
    tokens = torch.tensor([tokenizer.eot_token, *tokenizer.encode_ordinary(prompt)], device=device)
    running = torch.ones(args.samples, dtype=torch.bool, device=device)
    with model.autocast():
        for new in stream(
            model,
            tokens.repeat(args.samples, 1),
            args.tokens,
            temperature=0.0 if args.greedy else args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            generator=torch.Generator(device).manual_seed(seed),
            rope=args.rope_scaling,
            use_cache=not args.no_cache,
            n_tokens=tokenizer.n_vocab,
        ):
            running &= new[:, 0] != tokenizer.eot_token
            if not running.any():
                return
            yield new[:, 0].tolist()


def print_stream(model: GPT, tokenizer: tiktoken.Encoding, prompt: str, args: argparse.Namespace) -> int:
    """Print the only sample, token by token; returns the number of tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be several tokens
    n_tokens = 0
    print(prompt, end="", flush=True)
    for (token,) in sample_tokens(model, tokenizer, prompt, args.seed, args):
        print(decoder.decode(tokenizer.decode_single_token_bytes(token)), end="", flush=True)
        n_tokens += 1
    print(decoder.decode(b"", final=True))
    return n_tokens


def print_all(model: GPT, tokenizer: tiktoken.Encoding, prompts: list[str], args: argparse.Namespace) -> int:
    """Print every sample of every prompt; returns the number of tokens."""
    n_tokens = 0
    for i, prompt in enumerate(prompts):
        steps = list(sample_tokens(model, tokenizer, prompt, args.seed + i, args))
        n_tokens += len(steps) * args.samples
        for j in range(args.samples):
            tokens = [step[j] for step in steps]
            end = tokens.index(tokenizer.eot_token) if tokenizer.eot_token in tokens else len(tokens)
            print(f"--- prompt {i + 1}, sample {j + 1}\n{prompt}{tokenizer.decode(tokens[:end])}")
    return n_tokens


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("run", help="run folder (its newest checkpoint) or one checkpoint file")
    add("--prompt", nargs="+", metavar="TEXT", help="texts to continue (default: a line break)")
    add("--prompt-file", nargs="+", metavar="FILE", help="files to continue, each as one prompt")
    add("--samples", type=positive_int, default=1, metavar="N", help="of each prompt (default: 1)")
    add("--tokens", type=int, default=500, metavar="N", help="new tokens (default: 500)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--greedy", action="store_true", help="the same as --temperature 0")
    add("--top-k", type=int, default=50, help="sample from the k likeliest tokens (default: 50)")
    add("--top-p", type=float, help="sample from the fewest tokens that have this probability")
    add("--seed", type=int, default=0, help="of the first prompt (default: 0)")
    add("--rope", choices=get_args(RopeKind), default="none", help="RoPE scaling (default: none)")
    add("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    add("--no-cache", action="store_true", help="recompute all positions for each token: slow")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    args = parser.parse_args()
    args.rope_scaling = RopeScaling(args.rope, args.rope_theta)
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: expected 0 or more, below 2^63")
    return args


if __name__ == "__main__":
    run_main(main)
