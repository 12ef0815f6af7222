"""1.5-entmax (Peters et al. 2019), and with a factor that grows with n (arXiv 2506.16640)."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from normalisers.base import RowContext
from normalisers.family import Scaled


class Entmax(Scaled, name="entmax"):
    """[x / 2 - theta]_+^2 with theta such that the row sums to one: 1.5-entmax. (Peters et al.
    2019)

    theta is the root of ||[x / 2 - theta]_+|| = 1, convex and decreasing in theta: Newton's method
    from max(x) / 2 - 1 climbs to it without passing it, in 4 to 7 steps for 128 to 131,072 normal
    scores. First derivatives are right, second ones are not.
    """

    sums_to_one: ClassVar[bool] = True

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        z = (x - x.detach().amax(-1, keepdim=True)) / 2
        theta = torch.full_like(z[..., :1], -1.0)
        with torch.no_grad():
            for _ in range(50):
                step = newton_step(z, theta)
                # by row: its bits depend on no other
                unfinished = step > 2 * torch.finfo(x.dtype).eps
                theta = torch.where(unfinished, theta + step, theta)
                if not unfinished.any():
                    break
        theta = theta + newton_step(z, theta)  # at the root a step's gradient is that of the root
        return torch.relu(z - theta).square()


def newton_step(z: Tensor, theta: Tensor) -> Tensor:
    """From theta towards the root of ||[z - theta]_+|| = 1, (..., R, 1)."""
    u = torch.relu(z - theta)
    norm = u.norm(dim=-1, keepdim=True)
    return (norm - 1) * norm / u.sum(-1, keepdim=True)


class ASEntmax(Entmax, name="asentmax"):
    """1.5-entmax of (delta + beta (ln n)^gamma) x, beta and gamma learned per head. (arXiv
    2506.16640)

    Checked against the authors' code (deep-spin/asentmax). Its main variant computes them from the
    layer's input, which is `entmax` with length_scale = "query". This is its other one, "learn",
    whose beta starts at random in 0.1 ... 1 and gamma in 0 +- 0.1 (here 0.1 and 1); both have ln(n
    + 1).
    """

    scale: Literal["rsqrt_d"] = "rsqrt_d"
    length_scale: Literal["none"] = "none"
    delta: float = Field(1.0, ge=0, description="Factor that does not depend on n.")

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"beta": torch.full((n_head,), 0.1), "gamma": torch.ones(n_head)}

    def factor(self, context: RowContext) -> Tensor | float:
        log_n = context.n.clamp_min(2).log()  # a row of one key has weight 1 at any factor
        g = self.delta + context.learned["beta"] * log_n ** context.learned["gamma"]
        return g * context.head_dim**-0.5 if self.scores == "dot" else g
