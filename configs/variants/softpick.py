"""Softpick (arXiv 2504.20966)."""

import torch
from torch import Tensor

from normalisers.base import RowContext, l1_normalise
from normalisers.family import Scaled


class Softpick(Scaled, name="softpick"):
    """relu(e^x - 1) / sum |e^x - 1|: a row may sum to less than one, or be zero. (arXiv 2504.20966)

    Checked against the authors' code (zaydzuhri/softpick-attention), whose sum has 1e-8 e^(max x)
    added.
    """

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        x = context.zero_hidden(x)
        peak = x.detach().amax(-1, keepdim=True).clamp_min(0)
        # e^-peak (e^x - 1), without loss of digits near x = 0 nor overflow
        small = torch.expm1(x.clamp_max(40)) * torch.exp(-peak)
        s = torch.where(peak < 40, small, torch.exp(x - peak))
        return torch.relu(l1_normalise(context.zero_hidden(s)))
