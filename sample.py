"""Continue prompts with a trained model, with a KV cache.

    python sample.py runs/demo_lssar --prompt "def "
    python sample.py runs/demo_softmax --prompt "class " "import " --samples 3 --top-p 0.9
    python sample.py runs/demo_lssar --prompt-file a.py --tokens 4000 --rope ntk --temperature 0

Prints each prompt and its continuation up to the end of the document, token by token. Several texts
appear each under a line that names it, the samples of a prompt once they are complete.

The samples of a prompt form a batch. Prompts do not, because padding would change n, the number of
keys that a query sees. Prompt i is sampled with seed + i, independent of the others. With --rope
ntk RoPE is scaled for the final length, prompt and all new tokens. The default is none.

--window W keeps the last W keys of each layer, a rolling KV window, so that memory is bounded. With
a W of at most the training length no distance is new, and RoPE needs no scaling.
"""

import infra.packages  # noqa: F401

import argparse
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import torch

from data.tokenizer import Tokenizer, encode
from generation import stream
from infra.cli import ArgumentParser, UserError, integer, run_main
from infra.distributed import choose_device
from infra.files import read_text
from model import GPT
from positions import RopeScaling
from training.checkpoint import load_model


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.usage = "%(prog)s RUN [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder (its newest checkpoint) or one checkpoint file")
    add("--prompt", nargs="+", metavar="TEXT", help="texts to continue (default: a line break)")
    add("--prompt-file", nargs="+", metavar="FILE", help="files to continue, each as one prompt")
    add(
        "--samples",
        type=integer(1, 4096),
        default=1,
        metavar="N",
        help="of each prompt (default: 1)",
    )
    add(
        "--tokens",
        type=integer(0, 2**20),
        default=500,
        metavar="N",
        help="new tokens (default: 500)",
    )
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    top_k_help = "sample from the k likeliest tokens, 0: from all (default: 50)"
    add("--top-k", type=integer(0, 2**20), default=50, help=top_k_help)
    add("--top-p", type=float, help="sample from the fewest tokens that have this probability")
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="of the first prompt (default: 0)")
    rope_help = "RoPE scaling: none, ntk, yarn, theta=500000 (default: none)"
    add("--rope", default="none", metavar="SCALING", help=rope_help)
    window_help = "keys of each layer that are kept, the last ones (default: all)"
    add("--window", type=integer(1, 2**20), metavar="W", help=window_help)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    args = parser.parse_args()
    if not 0 <= args.temperature <= 1e30:
        raise UserError(f"--temperature {args.temperature}: expected a number from 0 to 1e30")
    if args.top_p is not None and not 1e-30 <= args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}: expected a number from 1e-30 to 1")
    args.rope_scaling = RopeScaling(args.rope)
    return args


def main() -> None:
    args = parse_args()
    files = [read_text(Path(path)) for path in args.prompt_file or []]
    prompts = [*(args.prompt or []), *files] or ["\n"]
    trained = load_model(args.run, choose_device(args.device))
    model = trained.model if args.window is None else trained.model.with_window(args.window)
    tokenizer = trained.tokenizer
    for i, prompt in enumerate(prompts):
        tokens = encode(tokenizer, prompt).tolist()
        steps = sample_tokens(model, tokenizer, tokens, args.seed + i, args)
        if args.samples > 1:
            steps = list(steps)
        for j in range(args.samples):
            if len(prompts) * args.samples > 1:
                print(f"--- prompt {i + 1}, sample {j + 1}")
            print(prompt, end="", flush=True)
            # some tokenisers drop a text's first space
            print_text(tokenizer, tokens[-1:], (step[j] for step in steps))


def sample_tokens(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], seed: int, args: argparse.Namespace
) -> Iterable[list[int]]:
    """The next token of each sample of the prompt, until all samples have ended."""
    device = model.embedding.weight.device
    tokens = torch.tensor([tokenizer.eot_token, *prompt], device=device)
    running = torch.ones(args.samples, dtype=torch.bool, device=device)
    with model.autocast():
        for new in stream(
            model,
            tokens.repeat(args.samples, 1),
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k or None,
            top_p=args.top_p,
            generator=torch.Generator(device).manual_seed(seed),
            rope=args.rope_scaling,
            n_vocab=tokenizer.n_vocab,
        ):
            running &= new[:, 0] != tokenizer.eot_token
            if not running.any():
                return
            yield new[:, 0].tolist()


def print_text(tokenizer: Tokenizer, before: list[int], tokens: Iterable[int]) -> None:
    """Print the tokens up to the end of the document, as soon as they come, as text that follows
    the tokens `before`.
    """
    new: list[int] = []
    addition = ""
    for token in takewhile(lambda token: token != tokenizer.eot_token, tokens):
        new.append(token)
        addition = tokenizer.decode(before + new).removeprefix(tokenizer.decode(before))
        if not addition.endswith("\N{REPLACEMENT CHARACTER}"):  # of a character's first tokens
            print(addition, end="", flush=True)
            before, new, addition = new, [], ""
    print(addition)


if __name__ == "__main__":
    run_main(main)
