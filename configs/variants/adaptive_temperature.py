"""Softmax with an adaptive temperature (arXiv 2410.01104)."""

from torch import Tensor

from normalisers.base import RowContext
from normalisers.family import Scaled


class AdaptiveTemperature(Scaled, name="adaptive_temperature"):
    """softmax(beta(H) x), beta(H) = max(1, -0.037 H^4 + 0.481 H^3 - 2.3 H^2 + 4.917 H - 1.791).

    H is the entropy of softmax(x) in nats. beta is 1 where H <= 0.5. (Velickovic et al. 2024,
    section 5.) The authors apply it to trained models, without training. Above H = 5.9 beta is 1
    again.
    """

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        p = context.softmax(x)
        h = -(p * p.clamp_min(1e-30).log()).sum(-1, keepdim=True)
        beta = ((-0.037 * h + 0.481) * h - 2.3) * h * h + 4.917 * h - 1.791
        return context.softmax(beta.clamp_min(1.0) * x)
