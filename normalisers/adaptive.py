"""Softmax with a temperature that depends on the row's scores: NormSoftmax, LogitNorm."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from normalisers.base import Normaliser, RowContext

# ---------------------------------------------------------------- softmax with a score-dependent temperature


class AdaptiveSoftmax(Normaliser):
    """softmax(x * inverse_temperature), x = q.k unscaled, from the mean and variance of a row's scores."""

    adaptive: ClassVar[bool] = True

    def factor(self, context: RowContext) -> float:
        return 1.0

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        x = context.zero_hidden(x)
        return context.softmax(x * self.inverse_temperature(*context.moments(x), context))

    @property
    def sums_to_one(self) -> bool:
        return True


class NormSoftmax(AdaptiveSoftmax, name="norm_softmax"):
    """softmax(x / (tau min(sigma, gamma))), sigma = population standard deviation of the row's x.

    (NormSoftmax, eq. 4-6; tau: eq. 29.) Variants (Table 1, unnumbered): affine, f1 = w x / (tau sigma) with w
    learned per head; inverse, f2 = x / (tau max(sigma, gamma)).
    """

    centre_keys: ClassVar[bool] = True

    gamma: PositiveFloat | Literal["sqrt_d", "inf"] = Field(
        "sqrt_d", description="Upper bound of sigma (lower bound with variant = inverse)."
    )
    gamma_factor: float = Field(1.0, gt=0, description="Multiplies gamma = sqrt_d.")
    tau: float = Field(1.0, gt=0, description="Temperature.")
    variant: Literal["standard", "affine", "inverse"] = Field(
        "standard", description="standard: min(sigma, gamma); affine: f1; inverse: f2."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gamma_factor != 1.0 and self.gamma != "sqrt_d":
            raise ValueError(f"gamma_factor = {self.gamma_factor}: only goes with gamma = 'sqrt_d'")
        if self.variant == "affine" and (self.gamma, self.gamma_factor) != ("sqrt_d", 1.0):
            raise ValueError("variant = 'affine': w x / sigma has no gamma; remove gamma and gamma_factor")
        if self.variant == "inverse" and self.gamma == "inf":
            raise ValueError("gamma = 'inf': with variant = 'inverse' every row would be uniform")
        return self

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"w": torch.ones(n_head)} if self.variant == "affine" else {}

    def inverse_temperature(self, mean: Tensor, var: Tensor, context: RowContext) -> Tensor:
        # 0, which makes the row uniform, where it would be 1 / 0: row 1, identical keys.
        spread = var > torch.finfo(var.dtype).tiny
        sigma = torch.where(spread, var, 1.0).sqrt()
        gamma = self.gamma_number(context.head_dim)
        if self.variant == "inverse":
            return 1 / (self.tau * torch.where(spread, sigma, 0.0).clamp_min(gamma))
        if self.variant == "affine":
            return torch.where(spread, context.learned["w"] / (self.tau * sigma), 0.0)
        return torch.where(spread, 1 / (self.tau * sigma.clamp_max(gamma)), 0.0)

    def gamma_number(self, head_dim: int) -> float:
        """gamma: as given, inf, or gamma_factor * sqrt(d)."""
        if isinstance(self.gamma, float):
            return self.gamma
        return math.inf if self.gamma == "inf" else self.gamma_factor * math.sqrt(head_dim)


class LogitNorm(AdaptiveSoftmax, name="logit_norm"):
    """softmax(x / (tau ||x||_2)), x = q.k unscaled. (NormSoftmax, eq. 8)"""

    tau: PositiveFloat | Literal["rsqrt_n"] = Field("rsqrt_n", description="Temperature; rsqrt_n: n^(-1/2).")

    def inverse_temperature(self, mean: Tensor, var: Tensor, context: RowContext) -> Tensor:
        square = context.n * (var + mean.square())  # ||x||^2
        nonzero = square > torch.finfo(var.dtype).tiny
        norm = torch.where(nonzero, square, 1.0).sqrt()
        tau = self.tau if isinstance(self.tau, float) else context.n**-0.5
        return torch.where(nonzero, 1 / (norm * tau), 0.0)
