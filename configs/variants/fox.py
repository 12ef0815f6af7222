"""Forgetting attention (arXiv 2503.02130)."""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from normalisers.base import running_sum
from normalisers.family import Softmax


class FoX(Softmax, name="fox"):
    """softmax(x_ij + sum_{j < t <= i} ln sigmoid(w.h_t + b)), h the layer's input, w and b learned
    per head.

    Forgetting attention (arXiv 2503.02130), there without positions (`model.position = "none"`). w
    starts at N(0, 0.02^2), b at 0, as in the authors' code (zhixuan-lin/forgetting-transformer),
    against which the formula was checked. Their "Pro" block's norms, gate and shifts are not here.
    """

    forget_init: float = Field(
        0.0, description="Of b. A key t tokens back weighs sigmoid(b)^t at first."
    )

    def signals(self, head_dim: int) -> dict[str, list[float]]:
        return {"forget": [self.forget_init]} | super().signals(head_dim)

    def key_decay(self, signals: dict[str, Tensor]) -> Tensor:
        return running_sum(F.logsigmoid(signals["forget"]).double())
