"""The family l1(phi(g(n) score + shift(n))) and its named presets: softmax, SSMax, LSSA."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, model_validator
from torch import Tensor

from infra.cli import UserError
from normalisers.base import Form, Normaliser, RowContext, Scores, exp, l1_normalise

PhiName = Literal[
    "exp", "identity", "relu", "relu2", "relu6", "gelu", "sigmoid", "softplus", "mish"
]


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x). Above the threshold torch returns x; at its default, 20, that is off by 2e-9."""
    return F.softplus(x, threshold=40.0)


PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": exp,
    "softplus": softplus,
    "sigmoid": lambda x: torch.sigmoid(x),
    "relu": lambda x: torch.relu(x),
    "relu2": lambda x: torch.relu(x).square(),
    "relu6": lambda x: F.relu6(x),
    "gelu": lambda x: 0.5 * x * torch.erfc(x * -math.sqrt(0.5)),  # F.gelu loses its digits below -4
    "mish": lambda x: F.mish(x),
    "identity": lambda x: x,
}
# take negative values, and 0 at 0; of the others phi(HIDDEN) = 0
SIGNED = ("gelu", "mish", "identity")

Scale = Literal["rsqrt_d", "sqrt_d", "ln_d", "one", "learned"] | PositiveFloat
LengthScale = Literal[
    "none", "ln_n", "sqrt_2ln_n", "log_train_len_n", "llama4", "info_scale", "query"
]
Bias = bool | Literal["log_train_len", "log_len", "log_n"]


class Scaled(Normaliser):
    """Formulas of g(n) score, g(n) = (s length_scale(n) + offset), with x = q.k / sqrt(d) or x =
    cos(q, k):

    scale           g(n) score is
    rsqrt_d         d^(-1/2) length_scale(n) times q.k or cos
    sqrt_d, ln_d    sqrt(d), ln d (LSSAR eq. 4), likewise; sqrt_d on cosine is QK-norm's softmax
    a number        that number, likewise
    one, learned    (s length_scale(n) + offset) x with s = 1 or learned per head (SSMax, eq. 2, 4)

    length_scale    none: 1; ln_n (SSMax, LSSAR); sqrt_2ln_n: sqrt(2 ln n);
                    log_train_len_n: max(1, ln n / ln L), L = training length;
                    llama4: 1 + 0.1 ln(floor(n / 8192) + 1);
                    info_scale: sqrt((1 - n^(-2/d)) / (1 - L^(-2/d))) (InfoScale, arXiv 2501.08570,
                    there with the length of the text for n; checked against the authors' code);
                    query: 1 + beta (ln n)^gamma, beta = softplus(w.h + b), gamma = 2 tanh(u.h + c),
                    h the query's layer input (adaptive-scalable entmax, arXiv 2506.16640, of any
                    weights)
    """

    own_methods: ClassVar[frozenset[str]] = frozenset()

    scale: Scale = Field(
        "rsqrt_d",
        description="Factor of the scores, in a config also ln_d_ln_L; learned: s per head, from scale_init.",
    )
    scale_init: float = Field(
        1.0, gt=0, description="Of a learned scale, in a config also sqrt_d_over_ln_L."
    )
    length_scale: LengthScale = Field(
        "none", description="Factor that depends on n, the visible keys."
    )

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.scale != "learned" and self.scale_init != 1.0:
            raise ValueError(f"scale_init = {self.scale_init}: only read with scale = 'learned'")
        return self

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"s": torch.full((n_head,), self.scale_init)} if self.scale == "learned" else {}

    def signals(self, head_dim: int) -> dict[str, list[float]]:
        return {"beta": [0.0], "gamma": [0.0]} if self.length_scale == "query" else {}

    def factor(self, context: RowContext) -> Tensor | float:
        d = context.head_dim
        unit = 1.0
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
            case "info_scale":
                most = math.expm1(-2 / d * math.log(context.train_len))
                g = s * (torch.expm1(-2 / d * context.n.log()) / most).sqrt()
            case "query":
                gamma = 2 * context.signals["gamma"].tanh()
                # a row of one key has the same weight at any factor
                log_n = context.n.clamp_min(2).log()
                g = s * (1 + softplus(context.signals["beta"]) * log_n**gamma)
        return (g + self.offset(context)) * unit

    def offset(self, context: RowContext) -> Tensor | float:
        """What is added to s length_scale(n): a number or (H, 1, 1)."""
        return 0.0


class Phi(Scaled, name="phi"):
    """A = phi(g(n) score + shift(n)) over the visible keys; with l1 divided by sum |A|.

    (LSSAR, eq. 3, Tables 2 and 3.)
    """

    own_methods: ClassVar[frozenset[str]] = frozenset()

    phi: PhiName = Field("softplus", description="The elementwise function.")
    l1: bool = Field(
        True, description="Divide rows by their l1 norm; exp without it overflows above 88."
    )
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
        if self.bias is True and not (
            self.scale in ("one", "learned") and self.length_scale != "none"
        ):
            needs = "the learned b of SSMax needs a length_scale and scale = 'learned' or 'one'"
            raise ValueError(
                f"bias = true: {needs}; expected false, log_train_len, log_len or log_n"
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

    def shift(self, context: RowContext) -> Tensor | float | None:
        """What `bias` = log_train_len, log_len or log_n adds to the scaled score: a number or (R,
        1).
        """
        match self.bias:
            case "log_train_len":
                return -math.log(context.train_len)
            case "log_len":
                n_keys = context.n_keys
                return -n_keys.log() if isinstance(n_keys, Tensor) else -math.log(n_keys)
            case "log_n":
                return -context.n.log()
        return None

    def divisor(self, context: RowContext) -> Tensor | float:
        """What the weights are divided by where l1 is off: a number or (R, 1)."""
        return 1.0

    @property
    def bounded(self) -> bool:
        """|score| < 70 at every length, for d <= 256: no phi of a score underflows in float32."""
        as_here = not self.own_methods & {"factor", "offset", "shift"}
        by_length = self.scale == "ln_d" and self.length_scale != "query"
        constant = isinstance(self.scale, float) and self.scale < 70 and self.length_scale == "none"
        return self.scores == "cosine" and (by_length or constant) and not self.bias and as_here

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        shift = self.shift(context)
        x = x if shift is None else x + shift
        # the logarithm of what is added to the row sum
        sink = context.learned.get("sink", x.new_zeros(()))
        if self.phi == "exp" and self.l1:
            if self.sink == "none":
                return x.softmax(-1)
            return torch.cat((x, sink.expand(*x.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]
        if self.phi in SIGNED:
            x = context.zero_hidden(x)
        s = PHI[self.phi](x)
        if self.sink != "none":
            return s / (s.abs().sum(-1, keepdim=True) + sink.exp())
        if not self.l1:
            return s / self.divisor(context)
        if self.phi in ("softplus", "sigmoid") and not self.bounded:
            # Both tend to e^x: where the largest score of a row is below -40 they equal it to the
            # last digit, and e^(x - max) gives the same normalised row inside the range of float32.
            peak = x.detach().amax(-1, keepdim=True)
            s = torch.where(peak < -40, exp(x - peak), s)
        return l1_normalise(s)

    @property
    def cacheable(self) -> bool:
        return self.bias != "log_len"

    @property
    def sums_to_one(self) -> bool:
        return self.l1 and self.phi not in SIGNED and self.sink == "none"

    @property
    def form(self) -> Form:
        if "weights" in self.own_methods or self.sink != "none":
            return "any"
        return "softmax" if self.phi == "exp" and self.l1 else "phi"


class Softmax(Phi, name="softmax"):
    """softmax(x), x = q.k / sqrt(d)."""

    phi: PhiName = "exp"


class SSMax(Softmax, name="ssmax"):
    """softmax((s ln n + b) x); s learned per layer and head, or 1; b learned or 0. (SSMax, eq. 2,
    4)
    """

    scale: Scale = "learned"
    length_scale: LengthScale = "ln_n"


class LSSA(Phi, name="lssa"):
    """softplus(x) / sum softplus(x), x = ln d ln n cos(q, k). (LSSAR, eq. 4)"""

    scores: Scores = "cosine"
    scale: Scale = "ln_d"
    length_scale: LengthScale = "ln_n"


class SSMaxPn(Softmax, name="ssmax_pn"):
    """softmax((s p_n + b) x), p_n one learned vector for all layers and heads. (SSMax, eq. 3)

    Rows of more keys than the training length are rejected: there is no p_n.
    """

    scale: Literal["learned"] = "learned"
    length_scale: Literal["none"] = "none"
    bias: Literal[False] = False  # for Softmax's `factor`. Here b is always learned

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        p_n = {"b": torch.zeros(n_head), "p_n": torch.ones(train_len)}
        return super().learned(n_head, train_len) | p_n

    def factor(self, context: RowContext) -> Tensor | float:
        if context.n_max > context.train_len and context.n.max() > context.train_len:
            most = f"at most train.seq_len = {context.train_len}"
            raise UserError(
                f"ssmax_pn: {int(context.n.max())} keys, but its p_n was learned for {most}"
            )
        p_n = context.learned["p_n"][context.n.long() - 1]  # (R, 1)
        g = context.learned["s"] * p_n + context.learned["b"]  # (H, R, 1)
        return g * context.head_dim**-0.5 if self.scores == "dot" else g
