"""Elastic softmax (arXiv 2601.00919)."""

import torch
from torch import Tensor

from normalisers.base import RowContext
from normalisers.family import Scaled


class ElasticSoftmax(Scaled, name="elastic_softmax"):
    """relu(softmax(x) + tau / n), tau learned per head from -1; not normalised again.

    LSSAR's eq. 5 at p = 1 without its second l1, and with a learned offset. From Lazy Attention
    (arXiv 2601.00919), whose learned biases by distance are not here. Checked against its first
    author's code (Fzkuji/flash-lazy-attention), which names the paper for the -1, not against the
    text.
    """

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return super().learned(n_head, train_len) | {"tau": torch.full((n_head,), -1.0)}

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        return torch.relu(x.softmax(-1) + context.learned["tau"] / context.n)
