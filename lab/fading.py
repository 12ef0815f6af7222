"""Attention fading: SSMax's Figures 1 and 3, the weight of one key among ever more.

    python -m lab.fading results/figures/fading.png

Figure 1: scores of -2 but for the last, which is +3. Its weight against n, under softmax and under
SSMax with s = 0.43. Figure 3: n - 1 scores spread evenly over 0 to 1, and one more, z_max. Its
weight against z_max. The values of n and s in Figure 3 are ours, the paper's are in its plot alone.
The weights are those of the normalisers themselves, for one query.
"""

from pathlib import Path

import torch
from torch import Tensor

from attention import make_normaliser
from infra.cli import ArgumentParser, run_main
from infra.figures import Figure
from measure import check_figure, save_figure
from schema import AttentionConfig

HEAD_DIM = 2
FIGURE_1_LENGTHS = [2**i for i in range(1, 17)]
FIGURE_1_S = 0.43  # caption of Figure 1
FIGURE_3_LENGTHS = (16, 256, 4096)
FIGURE_3_S = (0.43, 1.0)
FIGURE_3_Z = torch.linspace(0, 16, 65)
STYLES = (":", "--", "-")
FIGURE_COLOURS = ("C0", "C8", "C1")


def last_weight(scores: Tensor, s: float | None) -> float:
    """The weight of the last of the scores (n,), under SSMax with this s (eq. 2); None: under
    softmax.
    """
    options = AttentionConfig(normaliser="softmax")
    if s is not None:
        options = AttentionConfig(normaliser="ssmax", scale_init=s)  # type: ignore[call-arg]
    layer = make_normaliser(options, 1, HEAD_DIM, 1024)
    # (B, H, Tq, D): q.k / sqrt(d) is the score
    q = torch.tensor([HEAD_DIM**0.5, 0.0])[None, None, None]
    k = torch.stack((scores, torch.zeros_like(scores)), -1)[None, None]  # (B, H, n, D)
    with torch.no_grad():
        return layer.weights(q, k)[0, 0, 0, -1].item()


def figure_1_scores(n: int) -> Tensor:
    return torch.tensor([-2.0] * (n - 1) + [3.0])


def figure_3_scores(n: int, z_max: float) -> Tensor:
    return torch.cat((torch.linspace(0, 1, n - 1), torch.tensor([z_max])))


def draw() -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = {"softmax": None, f"SSMax, s = {FIGURE_1_S}": FIGURE_1_S}
    for (label, s), colour in zip(names.items(), FIGURE_COLOURS, strict=False):
        weights = [last_weight(figure_1_scores(n), s) for n in FIGURE_1_LENGTHS]
        left.plot(FIGURE_1_LENGTHS, weights, "o-", color=colour, label=label)
    left.set(
        xscale="log",
        xlabel="n",
        ylabel="weight of the last key",
        title="Figure 1: scores −2 and one +3",
    )
    for s, colour in zip((None, *FIGURE_3_S), FIGURE_COLOURS, strict=True):
        for n, style in zip(FIGURE_3_LENGTHS, STYLES, strict=True):
            weights = [last_weight(figure_3_scores(n, z), s) for z in FIGURE_3_Z.tolist()]
            label = f"{'softmax' if s is None else f'SSMax, s = {s}'}, n = {n:,}"
            right.plot(FIGURE_3_Z, weights, style, color=colour, label=label)
    right.set(xlabel="z_max", title="Figure 3: scores from 0 to 1, and z_max")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(fontsize=8)
    return figure


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("out", type=Path, help="figure to write")
    out = parser.parse_args().out
    check_figure(out, "")
    save_figure(draw(), out, dpi=100)


if __name__ == "__main__":
    run_main(main)
