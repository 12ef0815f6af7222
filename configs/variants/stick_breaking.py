"""Stick-breaking attention (arXiv 2410.17980)."""

import torch.nn.functional as F
from torch import Tensor

from normalisers.base import HIDDEN, RowContext, exp
from normalisers.family import Scaled


class StickBreaking(Scaled, name="stick_breaking"):
    """sigmoid(x_j) prod_{j < k < i} (1 - sigmoid(x_k)) at keys j < i: a query does not see its own.

    Stick-breaking attention (arXiv 2410.17980), there without positions (`model.position =
    "none"`). Rows sum to at most one, the first to zero. Checked against the authors' code
    (shawntan/stickbreaking-attention), which can also add the rest of the stick times the query's
    own value to the output; that is not here.
    """

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        x = x.clamp_max(40)  # where 1 - sigmoid(x) is 4e-18, and x + log_rest keeps its digits
        x = x.masked_fill(context.distance(x) == 0, HIDDEN)
        log_rest = F.logsigmoid(-x).flip(-1).cumsum(-1).flip(-1)  # of the stick, key j's part taken
        return exp(x + log_rest)  # sigmoid(x) = e^x (1 - sigmoid(x))
