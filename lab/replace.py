r"""Replace softmax in a pretrained model of transformers: loss by length before and after a short
fine-tuning.

    python -m lab.replace MODEL --train-text a.txt --val-text b.txt --normaliser ssmax \
        --scale-init auto
    python -m lab.replace MODEL --train-text a.txt --val-text b.txt --normaliser softmax      # the control
    python -m lab.replace MODEL --val-text b.txt --steps 0 --normaliser lssa --reweight-p 15

(SSMax paper, (e).) MODEL is a folder or a name on the Hugging Face hub: any causal model that
`hub.register` can change. Options of the normaliser are options here. `--scale-init auto` is
SSMax's 1 / mean of ln n over n = 1 ... the training length, with which the scores keep their size
on average.

Every length scores the same tokens, the first of the validation text. They are cut into blocks of
the longest length and each block into windows; ± is the standard error over blocks. The fine-tuning
is AdamW on all parameters in float32, without dropout, the learning rate falling linearly to zero,
on windows of the training length in a seeded order.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import trange

from config import config_from_dict, parse_overrides
from hub.causal import load
from hub.native import import_transformers
from hub.register import learned_parameters, register
from infra.cli import ArgumentParser, UserError, integer, positive_float, positive_int, run_main
from infra.files import read_text
from measure import format_table
from positions import RopeScaling, rope_frequencies
from schema import AttentionConfig, describe_attention

Losses = dict[int, tuple[float, float]]  # by length: mean and its standard error


def parse_args() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command's options, and those of the normaliser."""
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("model", help="folder or name on the Hugging Face hub")
    add(
        "--normaliser",
        required=True,
        help="a name of ours; its options are options here: --reweight-p 15",
    )
    add("--val-text", type=Path, required=True, metavar="FILE", help="the text to evaluate on")
    add(
        "--train-text",
        type=Path,
        metavar="FILE",
        help="the text to fine-tune on (with --steps above 0)",
    )
    add(
        "--lengths",
        nargs="+",
        type=positive_int,
        metavar="T",
        help="(default: 1, 2, 4, 8 training lengths)",
    )
    add(
        "--tokens",
        type=positive_int,
        default=131072,
        help="tokens to evaluate on (default: %(default)s)",
    )
    rope_help = "RoPE scaling: none, ntk, yarn, theta=500000 (default: ntk)"
    add("--rope", default="ntk", metavar="SCALING", help=rope_help)
    add(
        "--steps", type=integer(0, 10**6), default=100, help="of fine-tuning (default: %(default)s)"
    )
    add("--lr", type=positive_float, default=1e-4, help="peak learning rate (default: %(default)s)")
    add("--batch", type=positive_int, default=32, help="windows in a step (default: %(default)s)")
    args, rest = parser.parse_known_args()
    options = parse_overrides(rest)
    if "reweight_p_warmup" in options:
        raise UserError("--reweight-p-warmup: p is not raised here; expected --reweight-p alone")
    if args.steps and args.train_text is None:
        raise UserError(f"--steps {args.steps}: needs --train-text; or give --steps 0")
    return args, options


def main() -> None:
    args, options = parse_args()
    # a mistake ends here, before the model loads
    make_attention(args.normaliser, options, train_len=2)
    scaling = RopeScaling(args.rope)
    val_text = read_text(args.val_text)
    train_text = read_text(args.train_text) if args.steps else ""
    transformers = import_transformers()
    model = load(transformers.AutoModelForCausalLM, args.model, dtype=torch.float32)
    tokenizer = load(transformers.AutoTokenizer, args.model)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    train_len = model.config.max_position_embeddings
    attention = make_attention(args.normaliser, options, train_len)
    lengths = sorted(set(args.lengths or [factor * train_len for factor in (1, 2, 4, 8)]))
    blocks = read_blocks(tokenizer, val_text, args.tokens, lengths)
    if args.steps:
        windows = read_blocks(tokenizer, train_text, math.inf, [train_len])
    register("replacement", attention, train_len)

    losses = {"softmax": measure(model, blocks, lengths, scaling)}
    model.set_attn_implementation("replacement")
    learned = learned_parameters(model)
    losses["replaced"] = measure(model, blocks, lengths, scaling)
    if args.steps:
        fine_tune(model, windows, scaling, args)
        losses["fine-tuned"] = measure(model, blocks, lengths, scaling)
    name = describe_attention(attention)
    print(
        f"{args.model}: loss in nats, ± standard error; {args.steps} steps; RoPE scaling {args.rope}\n"
    )
    table = [["state", "attention", *map(str, lengths)]]
    for state, by_length in losses.items():
        attention_name = "softmax" if state == "softmax" else name
        table.append(
            [
                state,
                attention_name,
                *(f"{mean:.4f} ±{error:.4f}" for mean, error in by_length.values()),
            ]
        )
    print(format_table(table, n_names=2))
    if learned:
        print("\nlearned parameters of each layer:", *(p.tolist() for p in learned), sep="\n")


def make_attention(normaliser: str, options: dict[str, Any], train_len: int) -> AttentionConfig:
    """The checked [attention] section; scale_init = auto is 1 / mean ln n over n = 1 ... train_len."""
    section = {"normaliser": normaliser, **options}
    if section.get("scale_init") == "auto":
        # sum of ln n = ln train_len!
        section["scale_init"] = train_len / math.lgamma(train_len + 1)
    return config_from_dict({"name": "replace", "attention": section}, "command line").attention


# ---------------------------------------------------------------- text
def read_blocks(tokenizer: Any, text: str, limit: float, lengths: list[int]) -> Tensor:
    """The text's first tokens in blocks of the longest length and one more: (n, longest + 1) int64.

    Raises:
        UserError: text or limit are too short, or a length does not divide the longest.
    """
    longest = lengths[-1]
    if any(longest % length for length in lengths):
        raise UserError(
            f"--lengths {lengths}: expected divisors of the longest, so that all score the same"
        )
    if limit < longest:
        raise UserError(f"--tokens {limit}: expected at least {longest}, the longest length")
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    n = int(min(len(tokens) - 1, limit)) // longest
    if not n:
        raise UserError(
            f"a text of {len(tokens)} tokens: expected more than {longest}, the longest length"
        )
    return tokens[: n * longest + 1].unfold(0, longest + 1, longest)


# ---------------------------------------------------------------- losses
@torch.no_grad()
def measure(model: Any, blocks: Tensor, lengths: list[int], scaling: RopeScaling) -> Losses:
    """Mean loss in windows of each length, in nats, and its standard error over blocks."""
    losses = {}
    for length in lengths:
        scale_rope(model, length, scaling)
        means = []
        for block in blocks:
            x = block[:-1].view(-1, length)
            y = block[1:].view(-1, length)
            means.append(next_token_loss(model, x, y))
        losses[length] = mean_and_stderr(torch.stack(means).double().cpu())
    return losses


def mean_and_stderr(values: torch.Tensor) -> tuple[float, float]:
    """Mean of (n,) and its standard error, NaN for a single value."""
    n = len(values)
    return values.mean().item(), values.std().item() / math.sqrt(n) if n > 1 else math.nan


def next_token_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the targets y (B, T), the tokens after each of x."""
    logits = model(x.to(model.device), use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), y.flatten().to(model.device))


def scale_rope(model: Any, length: int, scaling: RopeScaling) -> None:
    """RoPE's frequencies for sequences of this length, from the model's own base.

    Raises:
        UserError: the model scales them by itself, or has learned positions.
    """
    train_len = model.config.max_position_embeddings
    modules = [module for module in model.modules() if hasattr(module, "inv_freq")]
    if not modules and (length > train_len or scaling.name != "none"):
        raise UserError(
            f"the model has no RoPE: expected --rope none, --lengths of at most {train_len}"
        )
    for module in modules:
        rope = module.config.rope_parameters
        if rope.get("rope_type") != "default":
            raise UserError(
                f"rope_type = {rope.get('rope_type')}: expected default, to scale it here"
            )
        d = 2 * len(module.inv_freq)
        device = module.inv_freq.device
        freqs, amplitude = rope_frequencies(
            d, rope["rope_theta"], scaling, length, train_len, device
        )
        module.inv_freq = freqs.float()
        module.attention_scaling = amplitude


def fine_tune(model: Any, windows: Tensor, scaling: RopeScaling, args: argparse.Namespace) -> None:
    """AdamW on all parameters, in float32, at the training length."""
    scale_rope(model, windows.shape[1] - 1, scaling)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    for step in trange(args.steps, desc="fine-tuning", leave=False, disable=None):
        chosen = order[torch.arange(step * args.batch, (step + 1) * args.batch) % len(order)]
        tokens = windows[chosen]
        next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - step / args.steps)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run_main(main)
