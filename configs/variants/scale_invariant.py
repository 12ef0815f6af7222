"""Scale-invariant attention (arXiv 2505.17083)."""

import torch
from pydantic import Field
from torch import Tensor

from normalisers.family import Softmax


class ScaleInvariant(Softmax, name="scale_invariant"):
    """softmax(a_t x + m_t), a_t = sqrt(2 ln(t / tau + 1) + 1), m_t = -2 ln(t / tau + 1), t = i - j.

    Scale-invariant attention (arXiv 2505.17083). There a_t^2 = 2 (ln(t / tau + 1) - ln alpha + beta
    / alpha), m_t = beta / alpha - a_t^2, with alpha = beta = sqrt(e) by a_0 = 1, m_0 = 0. Checked
    against a summary of the paper and another implementation, not against its text.
    """

    tau: float = Field(10.0, gt=0, description="Distance, in tokens, from which keys lose weight.")

    def at_distance(self, x: Tensor, t: Tensor) -> Tensor:
        log = torch.log1p(t / self.tau)
        return (2 * log + 1).sqrt() * x - 2 * log
