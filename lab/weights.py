"""A row's weights under every normaliser, for the same query and keys.

    python -m lab.weights docs/weights.png

The query sees n keys, all N(0, 1) in d = 64 dimensions, so that x = q.k / sqrt(d) is about N(0, 1); one key,
32 tokens back, has x = 6. Learned parameters have their initial values, the training length is 1024. A panel
shows the absolute weights by rank for n = 64 and n = 4096; its title, that one key's weight at both.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attention import make_normaliser
from evals.common import FIGURE_SUFFIXES
from evals.output import save_figure
from infra.cli import ArgumentParser, UserError, run_main
from normalisers.base import NORMALISERS
from schema import AttentionConfig, describe_attention

HEAD_DIM = 64
TRAIN_LEN = 1024
LENGTHS = (64, 4096)
N_COLUMNS = 6
NEEDLE_SCORE = 6.0
NEEDLE_DISTANCE = 32
SAME_AS_SOFTMAX = ("ssmax_pn",)  # before training
COMBINATIONS: list[dict[str, Any]] = [
    {"normaliser": "softmax", "scores": "cosine", "scale": "sqrt_d"},
    {"normaliser": "softmax", "scores": "cosine", "scale": "ln_d", "length_scale": "ln_n"},
    {"normaliser": "softmax", "sink": "one"},
    {"normaliser": "softmax", "reweight_p": 3},
    {"normaliser": "lssa", "reweight_p": 3},
    {"normaliser": "lssa", "reweight_p": 15},
]


def row(options: AttentionConfig, n: int) -> tuple[Tensor, float]:
    """The weights of a query that sees n keys, (n,), and the one of the key with the largest score."""
    generator = torch.Generator().manual_seed(0)
    q, *keys = torch.randn(1 + max(LENGTHS), HEAD_DIM, generator=generator)
    k = torch.stack(keys[:n])
    needle = n - 1 - NEEDLE_DISTANCE
    k[needle] += q * (NEEDLE_SCORE * HEAD_DIM**0.5 - k[needle] @ q) / (q @ q)  # x = NEEDLE_SCORE
    normaliser = make_normaliser(options, 1, HEAD_DIM, TRAIN_LEN)
    with torch.no_grad():
        weights = normaliser.weights(q[None, None, None], k[None, None])[0, 0, 0]
    return weights, float(weights[needle])


def draw(out: Path) -> None:
    choices = [
        AttentionConfig(normaliser=name) for name in sorted(NORMALISERS) if name not in SAME_AS_SOFTMAX
    ]
    choices += [AttentionConfig(**options) for options in COMBINATIONS]
    figure = Figure(figsize=(15, 13), layout="constrained")
    axes = figure.subplots(-(-len(choices) // N_COLUMNS), N_COLUMNS, sharex=True, sharey=True).flat
    for axis in axes[len(choices) :]:
        axis.remove()
    for axis in axes[len(choices) - N_COLUMNS : len(choices)]:  # the lowest of each column
        axis.tick_params(labelbottom=True)
    for axis, options in zip(axes, choices, strict=False):
        of_needle = []
        for n in LENGTHS:
            weights, needle = row(options, n)
            ranked = weights.abs().sort(descending=True).values
            axis.plot(range(1, n + 1), ranked, label=f"n = {n:,}")
            of_needle.append(f"{needle:.2g}")
        axis.set(xscale="log", yscale="log", ylim=(1e-5, 2))
        title = textwrap.fill(describe_attention(options), 34)
        axis.set_title(f"{title}\n{' -> '.join(of_needle)}", fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    figure.supxlabel("rank of the key")
    figure.supylabel("absolute weight")
    save_figure(figure, out, dpi=80)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("out", type=Path, help="figure to write")
    out = parser.parse_args().out
    if out.suffix not in FIGURE_SUFFIXES:
        raise UserError(f"{out}: expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    draw(out)


if __name__ == "__main__":
    run_main(main)
