"""RoPE beyond the training length without training: far keys stand nearer than they are.

    python -m lab.remap runs/softmax --near 64                    # beyond 64 all keys are at 64 (ReRoPE)
    python -m lab.remap runs/softmax --near 64 --group 32         # beyond 64 by groups (Self-Extend)
    python -m lab.remap runs/softmax --near 64 --data data/python_tests_4k --blocks 256 --out
    runs/remapped

A key at distance r < W = `--near` keeps its distance. Beyond, the distance that RoPE sees is

    W                               ReRoPE (Su 2023, kexue.fm/archives/9708)
    i // G - j // G + W - W // G    Self-Extend, of query i and key j (Jin et al. 2024, arXiv 2401.01325)

so that no distance is new to the model if (N - 1) // G + W - W // G is below its training length, N
the longest context. Both need scores twice, and here dense ones: it is a control for small models.
The targets and the cut are those of eval_length.py. Prints the table of lab.gains, which explains
it. --out writes its rows.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from attention import OUTPUT_NORM_EPS
from data.batches import read_windows
from eval_length import LOGITS_AT_ONCE, cut_losses
from evals.common import Blocks, open_validation
from evals.rows import FACTORS
from infra.cli import ArgumentParser, UserError, integer, positive_int, run_main
from lab.gains import output_folder, publish
from model import GPT, Attention, KVCache
from normalisers.base import HIDDEN, share_heads
from training.checkpoint import load_model


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder or checkpoint file")
    parser.add_argument(
        "--near", type=positive_int, required=True, metavar="W", help="distances kept"
    )
    group_help = "places that share one beyond W (default: 0, all distances are W)"
    parser.add_argument("--group", type=integer(0, 2**20), default=0, metavar="G", help=group_help)
    parser.add_argument(
        "--data", metavar="DIR", help="dataset folder (default: that of the run's config)"
    )
    parser.add_argument(
        "--blocks", type=positive_int, default=32, metavar="N", help="(default: 32)"
    )
    parser.add_argument("--out", type=output_folder, metavar="FOLDER", help="write rows.csv there")
    return parser.parse_args()


def far_places(length: int, near: int, group: int) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand for the keys at distance `near` and beyond, (length,) each."""
    place = torch.arange(length)
    if not group:
        return torch.full_like(place, near).clamp_max(length - 1), torch.zeros_like(place)
    return (place // group + near - near // group).clamp_max(length - 1), place // group


def remapped_forward(
    attention: Attention, near: int, group: int, x: Tensor, cos: Tensor, sin: Tensor,
    cache: KVCache | None = None, p: int | None = None,
) -> Tensor:  # fmt: skip
    """`Attention.forward`, (B, T, C) to the same, with far keys nearer."""
    assert cache is None
    layer = attention.normaliser
    of_queries, of_keys = far_places(x.shape[1], near, group)
    q, k, v, signals = attention.project(x, cos, sin, normed=True)
    far_q, *_ = attention.project(x, cos[of_queries], sin[of_queries], normed=True)
    _, far_k, *_ = attention.project(x, cos[of_keys], sin[of_keys], normed=True)
    with torch.autocast(x.device.type, enabled=False):
        context = layer.context(q, k, True, p, signals)
        near_scores = layer.scores(*layer.prepare(q, k, context), context)  # (B, H, T, T)
        far_scores = layer.scores(*layer.prepare(far_q, far_k, context), context)
        scores = torch.where(context.distance(near_scores) < near, near_scores, far_scores)
        weights = layer.row_weights(scores.masked_fill(~context.visible(scores), HIDDEN), context)
        y = (weights @ share_heads(v, q).to(weights.dtype)).to(v.dtype)  # (B, H, T, D)
    if layer.definition.output_norm:
        y = F.rms_norm(y, y.shape[-1:], eps=OUTPUT_NORM_EPS)
    y = y.transpose(1, 2).flatten(2)  # (B, T, C)
    return attention.out(y if attention.gate is None else y * torch.sigmoid(attention.gate(x)))


def remap(model: GPT, near: int, group: int) -> None:
    """Have all layers with RoPE see far keys nearer.

    Raises UserError: there is no such layer, or its formula shifts a row's scores by one of its
    keys'.
    """
    with_rope = [block.attention for block in model.blocks if block.attention.has_rope]
    if not with_rope:
        raise UserError(
            "no layer has RoPE: expected a run with model.position = rope in one at least"
        )
    for attention in with_rope:
        formula = attention.normaliser.definition
        if formula.centre_keys:  # near and far scores would be shifted differently
            raise UserError(f"{formula.name}: expected a normaliser that does not centre the keys")
        attention.forward = partial(remapped_forward, attention, near, group)  # type: ignore[method-assign]


@torch.no_grad()
def target_losses(model: GPT, blocks: Blocks, block: int, length: int) -> Tensor:
    """The losses of a block's last window of `length` tokens, (length,)."""
    windows = read_windows(blocks.stream, block, 1, blocks.longest)
    x, y = (torch.from_numpy(each[:, -length:]) for each in windows)  # (1, length)
    with model.autocast():
        return model.token_losses(x, y, chunk=LOGITS_AT_ONCE)[0]


def main() -> None:
    args = parse_args()
    trained = load_model(args.run)
    config = trained.config
    train_len = config.train.seq_len
    stream = open_validation(config, args.data, trained.tokenizer_name)
    blocks = Blocks(stream, [factor * train_len for factor in FACTORS], args.blocks)
    most = (stream.n_tokens - 1) // blocks.longest
    if args.blocks > most:
        raise UserError(f"--blocks {args.blocks}: expected at most {most}, {stream.folder}'s")
    rope = f"self_extend = {args.near}/{args.group}" if args.group else f"rerope = {args.near}"
    run = (f"{config.name}_remapped", config.seed, config.optimizer.lr, trained.step, "remap", rope)
    items = range(args.blocks)
    cut = [
        cut_losses(trained.model, blocks, i, train_len)[0, -train_len:].mean().item() for i in items
    ]
    remap(trained.model, args.near, args.group)
    losses: dict[int, list[float]] = {length: [] for length in blocks.lengths}
    for i in tqdm(items, unit="block", disable=None):
        for length, of_blocks in losses.items():
            of_blocks.append(
                target_losses(trained.model, blocks, i, length)[-train_len:].mean().item()
            )
    publish(run, blocks, cut, losses, args.out)


if __name__ == "__main__":
    run_main(main)
