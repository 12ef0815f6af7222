"""Forgetting that does not read the input: what remains of FoX in results/context when w is 0."""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, full

from normalisers.base import RowContext
from normalisers.family import Scaled


class Decay(Scaled, name="decay"):
    """softmax(x + t ln sigmoid(b)), t the distance of the key, b per head, learned or fixed."""

    forget_init: float = Field(
        4.0, description="Of b. A key t tokens back weighs sigmoid(b)^t at first."
    )
    learns: bool = Field(True, description="Train b.")

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        b = full((n_head,), self.forget_init)
        return super().learned(n_head, train_len) | ({"b": b} if self.learns else {})

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        b = context.learned["b"] if self.learns else x.new_tensor(self.forget_init)
        return (x + context.distance(x) * F.logsigmoid(b)).softmax(-1)
