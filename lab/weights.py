"""A row's weights under every normaliser but ssmax_pn and fox, for the same query and keys.

    python -m lab.weights docs/weights.png

The query sees n keys, all N(0, 1) in d = 64 dimensions, so that x = q.k / sqrt(d) is about N(0, 1).
One key, 32 tokens back, has x = 6. Learned parameters have their initial values. ssmax_pn would be
softmax with them. fox reads a layer's input, which there is none of here. The training
length is 1024. A panel shows the absolute weights by rank for n = 64 and n = 4096. Its title has
that one key's weight at both.
"""

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import make_normaliser
from infra.cli import ArgumentParser, run_main
from infra.figures import Figure
from measure import check_figure, save_figure
from normalisers.own import list_normalisers
from schema import AttentionConfig, describe_attention

HEAD_DIM = 64
LENGTHS = (64, 4096)
N_COLUMNS = 6
NEEDLE_SCORE = 6.0
NEEDLE_DISTANCE = 32
COMBINATIONS: list[dict[str, Any]] = [
    {"normaliser": "softmax", "scores": "cosine", "scale": "sqrt_d"},
    {"normaliser": "softmax", "scores": "cosine", "scale": "ln_d", "length_scale": "ln_n"},
    {"normaliser": "softmax", "sink": "one"},
    {"normaliser": "softmax", "reweight_p": 3},
    {"normaliser": "lssa", "reweight_p": 3},
    {"normaliser": "lssa", "reweight_p": 15},
]


def row(options: AttentionConfig, n: int) -> Tensor:
    """The weights of a query that sees n keys, (n,)."""
    generator = torch.Generator().manual_seed(0)
    q, *keys = torch.randn(1 + max(LENGTHS), HEAD_DIM, generator=generator)
    k = torch.stack(keys[:n])
    needle = k[n - 1 - NEEDLE_DISTANCE]
    # in place; x = NEEDLE_SCORE
    needle += q * (NEEDLE_SCORE * HEAD_DIM**0.5 - needle @ q) / (q @ q)
    layer = make_normaliser(options, 1, HEAD_DIM, 1024)
    with torch.no_grad():
        return layer.weights(q[None, None, None], k[None, None])[0, 0, 0]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("out", type=Path, help="figure to write")
    out = parser.parse_args().out
    check_figure(out, "")
    choices = [
        AttentionConfig(normaliser=name)
        for name in sorted(list_normalisers())
        if name != "ssmax_pn"
    ]
    # from the layer's input
    choices = [options for options in choices if not options.definition.signals(1)]
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
            weights = row(options, n)
            of_needle.append(f"{weights[n - 1 - NEEDLE_DISTANCE]:.2g}")
            axis.plot(
                range(1, n + 1), weights.abs().sort(descending=True).values, label=f"n = {n:,}"
            )
        axis.set(xscale="log", yscale="log", ylim=(1e-5, 2))
        title = textwrap.fill(describe_attention(options), 34)
        axis.set_title(f"{title}\n{' -> '.join(of_needle)}", fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False
    )
    figure.supxlabel("rank of the key")
    figure.supylabel("absolute weight")
    save_figure(figure, out, dpi=80)


if __name__ == "__main__":
    run_main(main)
