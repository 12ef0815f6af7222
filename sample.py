"""Continue a prompt with a trained model.

    python sample.py runs/demo_lssar --prompt "def "
    python sample.py runs/demo_softmax --tokens 2000 --temperature 0.7 --top-k 40 --rope ntk

Prints the prompt and its continuation.
"""

from __future__ import annotations

import argparse
from typing import get_args

import torch

from checkpoint import load_model
from config import ArgumentParser, run_main
from data.tokenizer import get_tokenizer
from model import RopeKind, RopeScaling


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("run", help="run folder (its newest checkpoint) or one checkpoint file")
    parser.add_argument("--prompt", default="\n", help="text to continue (default: a line break)")
    parser.add_argument("--tokens", type=int, default=500, help="new tokens (default: 500)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k likeliest (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument(
        "--rope", choices=get_args(RopeKind), default="none", help="RoPE scaling past the training length"
    )
    parser.add_argument("--rope-theta", type=float, help="new base, for --rope theta")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, _, _, tokenizer_name = load_model(args.run, device)
    tokenizer = get_tokenizer(tokenizer_name)
    prompt = [tokenizer.eot_token, *tokenizer.encode_ordinary(args.prompt)]
    tokens = model.generate(
        torch.tensor([prompt], device=device),
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        generator=torch.Generator(device).manual_seed(args.seed),
        rope=RopeScaling(args.rope, args.rope_theta),
    )
    text = tokens[0, 1:].tolist()
    # A document ends at the first end-of-text after the prompt.
    end = text.index(tokenizer.eot_token) if tokenizer.eot_token in text else len(text)
    print(tokenizer.decode(text[:end]))


if __name__ == "__main__":
    run_main(main)
