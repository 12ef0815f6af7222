"""The attention normalisers: one small class each, with its equation and its options.

    class ReluShen(Phi, name="relu_shen"):  # in rivals.py
        \"\"\"relu(x) / (gamma sqrt(n / 2)). (Shen et al. 2023)\"\"\"

        phi: PhiName = "relu"
        l1: Literal[False] = False
        gamma: float = Field(1.0, gt=0, description="Scale of the divisor.")

        def divisor(self, context):
            return self.gamma * (context.n / 2).sqrt()

`normaliser = "relu_shen"` and `gamma = 2.0` in a config's [attention] then train, evaluate and export it, and
the parametrised tests cover it.

Most normalisers are one family, whose parts are keys of their own and whose names are presets (`Phi`):

    A = l1( phi( g(n) * score + shift(n) ) ),   n = number of keys the query sees

Any normaliser with non-negative rows that sum to one can be re-weighted (`reweight_p`, see `reweight`): LSSAR
is `lssa` with `reweight_p`. The engines (engines/) compute the same weights without the (T, T) matrix.

Papers: LSSAR (Gao and Spratling: "Softplus Attention with Re-weighting Boosts Length Extrapolation in
Large Language Models", arXiv 2501.13428), SSMax (Nakanishi: "Scalable-Softmax Is Superior for Attention",
arXiv 2501.19399), NormSoftmax (Jiang et al.: "NormSoftmax: Normalizing the Input of Softmax", COINS 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable

from infra.cli import UserError

UNIFORM_TOLERANCE = 1e-5  # of n max(A) - 1, below which a row counts as uniform

# ---------------------------------------------------------------- what a formula may use


@dataclass(frozen=True)
class RowContext:
    """What the formulas know about a block of R query rows besides its scores."""

    n: Tensor  # (R, 1) float: number of keys each row sees
    n_keys: int  # Tk: all keys of this call
    train_len: int  # L
    head_dim: int  # d
    learned: dict[str, Tensor] = field(default_factory=dict)  # name -> (H, 1, 1), p_n: (train_len,)

    def visible(self, x: Tensor) -> Tensor:
        """(R, K) bool: the keys of x (..., K) that each row sees."""
        return torch.arange(x.shape[-1], device=x.device) < self.n

    def distance(self, x: Tensor) -> Tensor:
        """(R, K): how far back each key of x (..., K) is from its row's query; 0 at the hidden keys."""
        return (self.n - 1 - torch.arange(x.shape[-1], device=x.device)).clamp_min(0)

    def zero_hidden(self, x: Tensor) -> Tensor:
        """x with 0 at the hidden keys."""
        return torch.where(self.visible(x), x, 0.0)

    def softmax(self, x: Tensor) -> Tensor:
        """softmax over the visible keys, for x that is finite at the hidden ones.

        For x that was divided by a function of x: the gradient of -inf / t is NaN.
        """
        return torch.where(self.visible(x), x, -math.inf).softmax(-1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and population variance of x over the visible keys, each (..., R, 1)."""
        mean = self.zero_hidden(x).sum(-1, keepdim=True) / self.n
        return mean, self.zero_hidden(x - mean).square().sum(-1, keepdim=True) / self.n


def l1_normalise(s: Tensor) -> Tensor:
    """s / sum |s| over the last axis; rows of zeros stay zeros."""
    return L1Normalise.apply(s)


class L1Normalise(torch.autograd.Function):
    """Its backward, (g - sign(s) sum(g a)) / Z, is exactly 0 where one key has the whole row."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        z = s.abs().sum(-1, keepdim=True)
        # 1 / z overflows just above the smallest normal number: such a row has no mass.
        inverse = torch.where(z > 1e8 * torch.finfo(s.dtype).tiny, 1 / z, 0.0)
        a = s * inverse
        ctx.save_for_backward(a, inverse)
        return a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        a, inverse = ctx.saved_tensors
        return (grads[0] - a.sign() * (grads[0] * a).sum(-1, keepdim=True)) * inverse


# ---------------------------------------------------------------- re-weighting (LSSAR)


def reweight(a: Tensor, n: Tensor, p: int) -> Tensor:
    """The sharpening of LSSAR: l1-norm of ReLU(n A - O)^p, O = 0 in rows n <= 3, else 1.

    (LSSAR paper, eq. 5 and note 2.) `a` (..., R, K) >= 0 with rows that sum to one; n (R, 1).

    Two rules keep it finite and exact for every p and length; neither changes the formula:
    - r = ReLU(n A - O) is divided by its row maximum before the power: l1 cancels any row factor, and
      (n A - 1)^p alone overflows float32 from p = 10 at 16K keys on.
    - Since sum(n A - 1) = 0, a row without positive entries is uniform and its signs are rounding
      noise. Where max(n A) - 1 <= 1e-5, O = 0 as in the first rows: the row stays uniform.
    """
    offset, scale = offset_and_scale(n * a.detach().amax(-1, keepdim=True), n)
    return l1_normalise(torch.relu(a * (n * scale) - offset * scale).pow(p))


def reweight_naive(a: Tensor, n: Tensor, p: int) -> Tensor:
    """`reweight` as eq. 5 is written: inf / inf where a power overflows, 0 / 0 where all of a row underflow.

    For the comparison in results/gradients only.
    """
    powers = torch.relu(n * a - (n > 3).to(a.dtype)).pow(p)
    return powers / powers.sum(-1, keepdim=True)


def has_contrast(peak: Tensor, n: Tensor) -> Tensor:
    """Rows with O = 1: n > 3 and max(n A) - 1 > 1e-5, where peak = max(n A)."""
    return (n > 3) & (peak - 1 > UNIFORM_TOLERANCE)


def offset_and_scale(peak: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """O and 1 / max(r) of each row from its max(n A), each (..., R, 1)."""
    offset = has_contrast(peak, n).to(peak.dtype)
    r_max = peak - offset
    return offset, torch.where(r_max > 0, 1 / r_max, 0.0)  # a row of zeros stays zero


# ---------------------------------------------------------------- the elementwise functions

PhiName = Literal["exp", "identity", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish"]


class PhiFunction(NamedTuple):
    """phi, and whether it takes negative values (else phi(-inf) = 0; a signed phi has phi(0) = 0)."""

    fn: Callable[[Tensor], Tensor]
    signed: bool = False


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x). Above the threshold torch returns x; at its default, 20, that is off by 2e-9."""
    return F.softplus(x, threshold=40.0)


PHI: dict[str, PhiFunction] = {
    "exp": PhiFunction(torch.exp),
    "softplus": PhiFunction(softplus),
    "sigmoid": PhiFunction(torch.sigmoid),
    "relu": PhiFunction(torch.relu),
    "relu2": PhiFunction(lambda x: torch.relu(x).square()),
    "relu6": PhiFunction(F.relu6),
    "identity": PhiFunction(lambda x: x, signed=True),
    "gelu": PhiFunction(F.gelu, signed=True),
    "mish": PhiFunction(F.mish, signed=True),
}

# ---------------------------------------------------------------- the base class

Scores = Literal["dot", "cosine"]
Scale = Literal["rsqrt_d", "sqrt_d", "ln_d", "one", "learned"] | PositiveFloat
LengthScale = Literal["none", "ln_n", "sqrt_2ln_n", "log_train_len_n", "llama4"]
Bias = bool | Literal["log_train_len", "log_len", "log_n"]

NORMALISERS: dict[str, type[Normaliser]] = {}


class Normaliser(BaseModel):
    """A formula from scores to weights with its options. A subclass with `name=` is registered under it.

    Subclasses state phi, l1, factor, shift, divisor or inverse_temperature, from which every engine derives
    its form, or override `weights`, which only the dense and rows engines can run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    name: ClassVar[str]
    # Subtract the first key from all keys: softmax and sigma are invariant to a shift of a row's scores,
    # their rounding is not, most of all where keys are nearly equal.
    centre_keys: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False  # a softmax whose temperature depends on the scores

    scores: Scores = Field("dot", description="dot: q.k. cosine: q and k l2-normalised per head first.")
    output_norm: bool = Field(False, description="RMSNorm, without weights, of each head's output.")

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            # The same class may be defined again, as in a notebook.
            if name in NORMALISERS and NORMALISERS[name].__qualname__ != cls.__qualname__:
                raise ValueError(f"{cls.__name__}: there is a normaliser {name!r}: expected another name")
            cls.name = name
            NORMALISERS[name] = cls

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        """Initial values of the learned parameters, (n_head,) each (or (train_len,) for p_n)."""
        return {}

    def factor(self, context: RowContext) -> Tensor | float:
        """g(n), what multiplies the score: a number, (R, 1) or (H, R, 1)."""
        return context.head_dim**-0.5

    def inverse_temperature(self, mean: Tensor, var: Tensor, context: RowContext) -> Tensor:
        """For `adaptive`: the factor from the moments of a row's scores, (..., R, 1)."""
        raise NotImplementedError

    def at_distance(self, x: Tensor, t: Tensor) -> Tensor:
        """The scores x of keys at distance t = n - 1 - j from the query, t expanding to x's shape."""
        return x

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        """Scores (..., R, K), -inf at hidden keys, to weights, 0 there."""
        raise NotImplementedError

    @property
    def sums_to_one(self) -> bool:
        """Rows are non-negative and sum to one, so that re-weighting is defined."""
        return False

    @property
    def by_distance(self) -> bool:
        """The weights depend on the keys' distances: the sdpa and triton engines cannot run it."""
        return type(self).at_distance is not Normaliser.at_distance

    @property
    def has_engine_form(self) -> bool:
        """The weights are those that the sdpa and triton engines derive: a subclass may override them."""
        return type(self).weights in (Phi.weights, AdaptiveSoftmax.weights) and not self.by_distance

    @property
    def is_softmax(self) -> bool:
        """softmax of at_distance(factor * score): the flex engine can run it."""
        return False

    @property
    def is_rescaled_softmax(self) -> bool:
        """softmax over queries rescaled by a row factor: the sdpa engine can run it."""
        return self.adaptive and self.has_engine_form

    @property
    def is_fusible(self) -> bool:
        """phi(x) over its row sum or a fixed number: the triton engine can run it."""
        return self.adaptive and self.has_engine_form


# ---------------------------------------------------------------- the family


class Scaled(Normaliser):
    """Formulas of g(n) score, g(n) = (s length_scale(n) + offset), with x = q.k / sqrt(d) or x = cos(q, k):

    scale           g(n) score is
    rsqrt_d         d^(-1/2) length_scale(n) times q.k or cos
    sqrt_d, ln_d    sqrt(d), ln d (LSSAR eq. 4), likewise; sqrt_d on cosine is QK-norm's softmax
    a number        that number, likewise
    one, learned    (s length_scale(n) + offset) x with s = 1 or learned per head (SSMax, eq. 2, 4)

    length_scale    none: 1; ln_n (SSMax, LSSAR); sqrt_2ln_n: sqrt(2 ln n);
                    log_train_len_n: max(1, ln n / ln L), L = training length;
                    llama4: 1 + 0.1 ln(floor(n / 8192) + 1)
    """

    scale: Scale = Field(
        "rsqrt_d", description="Factor of the scores; learned: s per layer and head, from scale_init."
    )
    scale_init: float = Field(1.0, gt=0, description="Initial value of a learned scale.")
    length_scale: LengthScale = Field("none", description="Factor that depends on n, the visible keys.")

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.scale != "learned" and self.scale_init != 1.0:
            raise ValueError(f"scale_init = {self.scale_init}: only read with scale = 'learned'")
        return self

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"s": torch.full((n_head,), self.scale_init)} if self.scale == "learned" else {}

    def factor(self, context: RowContext) -> Tensor | float:
        d, unit = context.head_dim, 1.0
        if self.scale in ("one", "learned"):
            s: Tensor | float = context.learned.get("s", 1.0)
            unit = d**-0.5 if self.scores == "dot" else 1.0
        else:
            named = {"rsqrt_d": d**-0.5, "sqrt_d": d**0.5, "ln_d": math.log(d)}
            s = self.scale if isinstance(self.scale, float) else named[self.scale]
        match self.length_scale:
            case "none":
                g = s
            case "ln_n":
                g = s * context.n.log()
            case "sqrt_2ln_n":
                g = s * (2 * context.n.log()).sqrt()
            case "log_train_len_n":
                g = s * (context.n.log() / math.log(context.train_len)).clamp_min(1)
            case "llama4":
                g = s * (1 + 0.1 * ((context.n / 8192).floor() + 1).log())
        return (g + self.offset(context)) * unit

    def offset(self, context: RowContext) -> Tensor | float:
        """What is added to s length_scale(n): a number or (H, 1, 1)."""
        return 0.0


class Phi(Scaled, name="phi"):
    """A = phi(g(n) score + shift(n)) over the visible keys; with l1 divided by sum |A|.

    (LSSAR, eq. 3, Tables 2 and 3.)
    """

    phi: PhiName = Field("softplus", description="The elementwise function.")
    l1: bool = Field(True, description="Divide rows by their l1 norm.")
    bias: Bias = Field(
        False,
        description="true: a learned b is added to s length_scale(n) (SSMax). log_train_len, log_len, log_n: "
        "ln of the training length, of all keys or of n is subtracted from the scores.",
    )
    sink: Literal["none", "one", "learned"] = Field(
        "none", description="Added to the row sum: 1 (softmax1) or e^b, b learned per head."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bias is True and not (self.scale in ("one", "learned") and self.length_scale != "none"):
            raise ValueError(
                "bias = true: the learned b of SSMax needs a length_scale and scale = 'learned' or 'one'; "
                "expected false, log_train_len, log_len or log_n"
            )
        if isinstance(self.bias, str) and self.phi == "exp" and self.l1 and self.sink == "none":
            raise ValueError(f"bias = {self.bias!r}: cancels in a softmax; expected true or false")
        if self.sink != "none" and not self.l1:
            raise ValueError(f"sink = {self.sink!r}: is part of the row sum; expected l1 = true")
        return self

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        values = super().learned(n_head, train_len)
        if self.bias is True:
            values["b"] = torch.zeros(n_head)
        if self.sink == "learned":
            values["sink"] = torch.zeros(n_head)
        return values

    def offset(self, context: RowContext) -> Tensor | float:
        return context.learned["b"] if self.bias is True else 0.0

    def shift(self, context: RowContext) -> Tensor | float:
        """What `bias` = log_train_len, log_len or log_n adds to the scaled score: a number or (R, 1)."""
        match self.bias:
            case "log_train_len":
                return -math.log(context.train_len)
            case "log_len":
                return -math.log(context.n_keys)
            case "log_n":
                return -context.n.log()
        return 0.0

    def divisor(self, context: RowContext) -> Tensor | float:
        """What the weights are divided by where l1 is off: a number or (R, 1)."""
        return 1.0

    @property
    def bounded(self) -> bool:
        """|score| < 70 at every length and head size in use: no phi of a score underflows in float32."""
        as_here = type(self).shift is Phi.shift and type(self).factor is Scaled.factor
        return self.scores == "cosine" and self.scale == "ln_d" and not self.bias and as_here

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        shift = self.shift(context)
        x = x if isinstance(shift, float) and shift == 0.0 else x + shift
        fn, signed = PHI[self.phi]
        if self.phi == "exp" and self.l1:
            return self._softmax(x, context)
        if signed:
            x = context.zero_hidden(x)
        if self.sink != "none":
            s = fn(x)
            return s / (s.abs().sum(-1, keepdim=True) + self._sink(x, context).exp())
        if self.l1:
            underflows = self.phi in ("softplus", "sigmoid") and not self.bounded
            return l1_of_positive(fn, x) if underflows else l1_normalise(fn(x))
        a, divisor = fn(x), self.divisor(context)
        return a if isinstance(divisor, float) and divisor == 1.0 else a / divisor

    def _softmax(self, x: Tensor, context: RowContext) -> Tensor:
        if self.sink == "none":
            return x.softmax(-1)
        sink = self._sink(x, context).expand(*x.shape[:-1], 1)
        return torch.cat((x, sink), dim=-1).softmax(-1)[..., :-1]

    def _sink(self, x: Tensor, context: RowContext) -> Tensor:
        """The logarithm of what is added to the row sum."""
        return context.learned["sink"] if self.sink == "learned" else x.new_zeros(())

    @property
    def sums_to_one(self) -> bool:
        return self.l1 and not PHI[self.phi].signed and self.sink == "none"

    @property
    def is_softmax(self) -> bool:
        return self.phi == "exp" and self.sums_to_one and type(self).weights is Phi.weights

    @property
    def is_rescaled_softmax(self) -> bool:
        return self.is_softmax and self.is_fusible

    @property
    def is_fusible(self) -> bool:
        return self.has_engine_form and self.sink == "none"


def l1_of_positive(phi: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """phi(x) / sum phi(x) for phi = softplus or sigmoid, also where phi underflows.

    Both tend to e^x: where the largest score of a row is below -40 they equal it to the last digit, and
    e^(x - max) gives the same normalised row inside the range of float32.
    """
    peak = x.detach().amax(-1, keepdim=True)
    return l1_normalise(torch.where(peak < -40, torch.exp(x - peak), phi(x)))


# ---------------------------------------------------------------- presets of the family


class Softmax(Phi, name="softmax"):
    """softmax(x), x = q.k / sqrt(d)."""

    phi: PhiName = "exp"


class SSMax(Softmax, name="ssmax"):
    """softmax((s ln n + b) x); s learned per layer and head, or 1; b learned or 0. (SSMax, eq. 2, 4)"""

    scale: Scale = "learned"
    length_scale: LengthScale = "ln_n"


class LSSA(Phi, name="lssa"):
    """softplus(x) / sum softplus(x), x = ln d ln n cos(q, k). (LSSAR, eq. 4)"""

    scores: Scores = "cosine"
    scale: Scale = "ln_d"
    length_scale: LengthScale = "ln_n"


class SSMaxPn(Softmax, name="ssmax_pn"):
    """softmax((s p_n + b) x), p_n one learned vector for all layers and heads. (SSMax, eq. 3)

    Lengths beyond the training length are rejected: there is no p_n.
    """

    scale: Literal["learned"] = "learned"
    length_scale: Literal["none"] = "none"
    bias: Literal[False] = False

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        p_n = {"b": torch.zeros(n_head), "p_n": torch.ones(train_len)}
        return super().learned(n_head, train_len) | p_n

    def factor(self, context: RowContext) -> Tensor | float:
        if context.n_keys > context.train_len:
            raise UserError(
                f"ssmax_pn: {context.n_keys} keys, but its p_n was learned for at most "
                f"train.seq_len = {context.train_len}"
            )
        p_n = context.learned["p_n"][context.n.long() - 1]  # (R, 1)
        g = context.learned["s"] * p_n + context.learned["b"]  # (H, R, 1)
        return g * context.head_dim**-0.5 if self.scores == "dot" else g


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


# ---------------------------------------------------------------- softmax, shifted or negated


class SoftmaxInverse(Normaliser, name="softmax_inverse"):
    """-softmax(x). (LSSAR, Table 1)"""

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        return -x.softmax(-1)


class SoftmaxRecentred(Normaliser, name="softmax_recentred"):
    """softmax(x) - 1/n, its mean over the visible keys; rows n <= 3 unchanged. (LSSAR, Table 1)"""

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        a = x.softmax(-1)
        return torch.where(context.visible(x) & (context.n > 3), a - 1 / context.n, a)


class SoftmaxRecentredL1(Normaliser, name="softmax_recentred_l1"):
    """(softmax(x) - 1/n) / sum |softmax(x) - 1/n|; rows n <= 3 unchanged. (LSSAR, Table 1, note 1)

    A uniform row (max(n A) - 1 <= 1e-5) would be rounding noise scaled to norm one: unchanged, too.
    """

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        a, n = x.softmax(-1), context.n
        centred = context.visible(x) & has_contrast(n * a.detach().amax(-1, keepdim=True), n)
        return l1_normalise(torch.where(centred, a - 1 / n, a))
