"""Threshold rectified attention (arXiv 2601.12145)."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from normalisers.base import Normaliser, RowContext


class Threshold(Normaliser, name="threshold"):
    """relu(cos(q, k) - beta sqrt(2 ln(n / kappa) / d))^power, beta learned per head. (arXiv
    2601.12145)

    Threshold rectified attention; each head's output is RMS-normalised. Checked against the
    authors' kernel (snap-research/TDA), which has this n, kappa = 1 and one beta for all heads, and
    against a summary of the paper, whose ln((i + 1) / kappa) is n + 1 if its rows i count from 1.
    The paper's last form, the difference of two such attentions (TDA), is not here.
    """

    scores: Literal["cosine"] = "cosine"
    output_norm: bool = True
    power: int = Field(2, ge=1, le=16, description="Power of what exceeds the threshold.")
    kappa: float = Field(
        1.0, gt=0, description="Expected number of random keys above the threshold."
    )

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"beta": torch.ones(n_head)}

    def factor(self, context: RowContext) -> float:
        return 1.0

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        level = (2 * (context.n / self.kappa).log().clamp_min(0) / context.head_dim).sqrt()
        return torch.relu(x - context.learned["beta"] * level) ** self.power
