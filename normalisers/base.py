"""The attention normalisers: one small class each, with its equation and its options.

Most normalisers are one family, whose parts are keys of their own and whose names are presets
(`Phi`):

    A = l1( phi( g(n) * score + shift(n) ) ),   n = number of keys the query sees

Any normaliser with non-negative rows that sum to one can be re-weighted (`reweight_p`, see
`reweight`): LSSAR is `lssa` with `reweight_p`. The engines (engines/) compute the same weights
without the (T, T) matrix.

Papers: LSSAR (Gao and Spratling: "Softplus Attention with Re-weighting Boosts Length Extrapolation
in Large Language Models", arXiv 2501.13428), SSMax (Nakanishi: "Scalable-Softmax Is Superior for
Attention", arXiv 2501.19399), NormSoftmax (Jiang et al.: "NormSoftmax: Normalizing the Input of
Softmax", COINS 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from positions import operator_library

OWN_MODULE = "own_"  # begins the names of modules whose classes have no name without their file
UNIFORM_TOLERANCE = 1e-5  # of n max(A) - 1, below which a row counts as uniform
# the score of a hidden key: e^x is 0, and unlike -inf it times 0 is no NaN in a gradient
HIDDEN = -1e30


@dataclass(frozen=True)
class RowContext:
    """What the formulas know about a block of R query rows besides its scores."""

    # (R, 1) float: number of keys each row sees, with a window W at most W; (B, 1, R, 1) with `first`
    n: Tensor
    # (R, 1) float: index of each row's query among the keys: the last key that it sees
    place: Tensor
    # Tk: all keys of this call, of a row's document (B, 1, R, 1). A formula that reads it is not
    # `cacheable`
    n_keys: int | Tensor
    n_max: int  # the largest n that this call may have, as a number on the host
    train_len: int  # L
    head_dim: int  # d
    p: Tensor | None = None  # power of the re-weighting, 0-dim on the CPU; None: none
    learned: dict[str, Tensor] = field(default_factory=dict)  # name -> (H, 1, 1), p_n: (train_len,)
    # of the rows, for `factor`: (B, H, R, S) each
    signals: dict[str, Tensor] = field(default_factory=dict)
    decay: Tensor | None = None  # (B, H, K, 1) float64, see `Normaliser.key_decay`
    # (B, 1, R, 1) int64: index among the keys of the first one of each row's document; None: 0
    first: Tensor | None = None

    @property
    def first_seen(self) -> Tensor:
        """Index among the keys of the first one that each row sees, of n's shape."""
        return self.place - self.n + 1

    def block(self, batch: slice, rows: slice, keys: slice) -> RowContext:
        """Of these sequences and rows, whose keys are a slice of all; without signals."""
        start = keys.start or 0
        part: dict[str, Any] = {"place": self.place[rows] - start, "signals": {}, "n": self.n[rows]}
        if self.decay is not None:
            part["decay"] = self.decay[batch, :, keys]
        if self.first is not None:
            part["n"] = self.n[batch, :, rows]
            part["first"] = self.first[batch, :, rows] - start
        if isinstance(self.n_keys, Tensor):
            part["n_keys"] = self.n_keys[batch, :, rows]
        return replace(self, **part)

    def add_decay(self, x: Tensor) -> Tensor:
        """The scores x (B, H, R, K) with `Normaliser.key_decay`, its differences taken in its own
        type.
        """
        if self.decay is None:
            return x
        row_decay = self.decay[:, :, self.place.squeeze(-1).long()]  # (B, H, R, 1)
        return x + (row_decay - self.decay.mT).to(x.dtype)

    def visible(self, x: Tensor) -> Tensor:
        """(R, K) bool, (B, 1, R, K) with `first`: the keys of x (..., K) that each row sees."""
        keys = torch.arange(x.shape[-1], device=x.device)
        return (keys <= self.place) & (keys > self.place - self.n)

    def distance(self, x: Tensor) -> Tensor:
        """(R, K): how far back each key of x (..., K) is from its row's query; 0 at the keys after
        it.
        """
        return (self.place - torch.arange(x.shape[-1], device=x.device)).clamp_min(0)

    def zero_hidden(self, x: Tensor) -> Tensor:
        """x with 0 at the hidden keys."""
        return torch.where(self.visible(x), x, 0.0)

    def softmax(self, x: Tensor) -> Tensor:
        """softmax over the visible keys, whatever x is at the hidden ones."""
        return torch.where(self.visible(x), x, -math.inf).softmax(-1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and population variance of x over the visible keys, each (..., R, 1)."""
        mean = self.zero_hidden(x).sum(-1, keepdim=True) / self.n
        return mean, self.zero_hidden(x - mean).square().sum(-1, keepdim=True) / self.n


def exp(x: Tensor) -> Tensor:
    """e^x to 6e-8 |x| in float32. On CPUs torch.exp takes sixty times as long where it underflows."""
    return torch.exp2(x * math.log2(math.e))


# An operator of its own: torch 2.11 fails to compile this sum over many tokens for a GPU.
@torch.library.custom_op(f"{operator_library(__name__)}::running_sum", mutates_args=())
def running_sum(x: Tensor) -> Tensor:
    """The sum of x (..., T, S) over each token and those before it."""
    return x.mT.cumsum(-1).mT.contiguous()  # along the last axis, where a GPU sums in parallel


running_sum.register_fake(lambda x: x.new_empty(x.shape))
running_sum.register_autograd(lambda ctx, gradient: running_sum(gradient.flip(-2)).flip(-2))


def l1_normalise(s: Tensor) -> Tensor:
    """s / sum |s| over the last axis; rows of zeros stay zeros."""
    z = s.abs().sum(-1, keepdim=True)
    # 1 / z overflows just above the smallest normal number: such a row has no mass.
    return s / torch.where(z > 1e8 * torch.finfo(s.dtype).tiny, z, math.inf)


def share_heads(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, n_kv_head, T, D) as q's H heads see them, (B, H, T, D): copied if
    n_kv_head < H.

    Head h of q belongs to head h // (H / n_kv_head) of t (grouped-query attention, Ainslie et al.
    2023).
    """
    group, rest = divmod(q.shape[1], t.shape[1])
    if rest:
        raise ValueError(
            f"{q.shape[1]} heads of queries for {t.shape[1]} of keys: expected a multiple"
        )
    return t if group == 1 else t.repeat_interleave(group, dim=1)


def reweight(a: Tensor, n: Tensor, p: Tensor | int) -> Tensor:
    """The sharpening of LSSAR: l1-norm of ReLU(n A - O)^p, O = 0 in rows n <= 3, else 1.

    (LSSAR paper, eq. 5 and note 2.) `a` (..., R, K) >= 0 with rows that sum to one; n (R, 1).

    Two rules keep it finite for every p and length. The second changes rows that are uniform to
    1e-5:
    - r = ReLU(n A - O) is divided by its row maximum before the power: l1 cancels any row factor,
      and (n A - 1)^p alone overflows float32 from p = 10 at 16K keys on.
    - Since sum(n A - 1) = 0, a row without positive entries is uniform and its signs are rounding
      noise. Where max(n A) - 1 <= 1e-5, O = 0 as in the first rows: the row stays uniform.
    """
    offset, scale = offset_and_scale(n * a.detach().amax(-1, keepdim=True), n)
    # a number's power has other last bits
    power = p if torch.compiler.is_compiling() else int(p)
    return l1_normalise(torch.relu(a * (n * scale) - offset * scale).pow(power))


def has_contrast(peak: Tensor, n: Tensor) -> Tensor:
    """Rows with O = 1: n > 3 and max(n A) - 1 > 1e-5, where peak = max(n A)."""
    return (n > 3) & (peak - 1 > UNIFORM_TOLERANCE)


def offset_and_scale(peak: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """O and 1 / max(r) of each row from its max(n A), each (..., R, 1)."""
    offset = has_contrast(peak, n).to(peak.dtype)
    r_max = peak - offset
    return offset, torch.where(r_max > 0, 1 / r_max, 0.0)  # a row of zeros stays zero


Scores = Literal["dot", "cosine"]
Form = Literal["softmax", "phi", "any"]
# of which an engine has to know whether a formula has one of its own
METHODS = {"weights", "factor", "offset", "shift", "at_distance", "key_decay"}

NORMALISERS: dict[str, type[Normaliser]] = {}


class Normaliser(BaseModel):
    """A formula from scores to weights with its options. A subclass with `name=` is registered
    under it.

    Subclasses state phi, l1, factor, shift, divisor or inverse_temperature, from which every engine
    derives its form, or override `weights`, which the dense and rows engines run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    name: ClassVar[str]
    # Subtract the first key from all keys: softmax and sigma are invariant to a shift of a row's
    # scores, their rounding is not, most of all where keys are nearly equal.
    centre_keys: ClassVar[bool] = False
    # those of METHODS that a formula does not share with its family, which states none
    own_methods: ClassVar[frozenset[str]] = frozenset()
    # the temperature of the softmax depends on the row's scores: `fused_factor` knows it
    adaptive: ClassVar[bool] = False
    # rows whose gradients cancel, so that kernels of 16 bits leave them to the definition
    exact_rows: ClassVar[int] = 0

    scores: Scores = Field(
        "dot", description="dot: q.k. cosine: q and k l2-normalised per head first."
    )
    output_norm: bool = Field(False, description="RMSNorm, without weights, of each head's output.")

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "own_methods" not in vars(cls):
            classes = [c for c in cls.__mro__ if c is cls or not issubclass(c, Normaliser)]
            defined = METHODS.intersection(*[set().union(*map(vars, classes))])
            cls.own_methods = cls.own_methods | defined
        if name is None:
            return
        cls.name = name
        if cls.__module__.rpartition(".")[2].startswith(OWN_MODULE):
            return
        # The same class may be defined again, as in a notebook.
        known = NORMALISERS.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{cls.__name__}: there is a normaliser {name!r}: expected another name"
            )
        NORMALISERS[name] = cls

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        """Initial values of the learned parameters, (n_head,) each (or (train_len,) for p_n)."""
        return {}

    def factor(self, context: RowContext) -> Tensor | float:
        """g(n), what multiplies the score: a number, (R, 1) or (H, R, 1)."""
        return context.head_dim**-0.5

    def fused_factor(self, q: Tensor, k: Tensor, context: RowContext) -> Tensor | float:
        """What multiplies q (B, H, R, D) for a kernel that knows no formula: by default `factor`.

        k: (B, n_kv_head, K, D), normalised as q is and, with `centre_keys`, centred, in its own
        type. q has 32 bits or more.
        """
        return self.factor(context)

    def signals(self, head_dim: int) -> dict[str, list[float]]:
        """By name, the initial b of numbers w.h + b per head, h the layer's input, w and b learned.

        `factor` finds those of the rows in `context.signals`, `key_decay` gets all keys', each
        (B, H, T, how many).
        """
        return {}

    def key_decay(self, signals: dict[str, Tensor]) -> Tensor | None:
        """P (B, H, Tk, 1) float64. P_i - P_j is added to the score of query i and key j."""
        return None

    def at_distance(self, x: Tensor, t: Tensor) -> Tensor:
        """The scores x of keys at distance t = i - j from query i, t expanding to x's shape."""
        return x

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        """Scores (..., R, K), HIDDEN at hidden keys, to weights, whose values there are replaced by
        0.
        """
        raise NotImplementedError(f"{self.name}: expected a base class of family.py, or `weights`")

    @property
    def cacheable(self) -> bool:
        """Whether a row's weights stay the same when keys are added that it does not see."""
        return True

    @property
    def sums_to_one(self) -> bool:
        """Rows are non-negative and sum to one, so that re-weighting is defined."""
        return False

    @property
    def prepared(self) -> Normaliser:
        """The formula of scores that have the temperature, if it is `adaptive`."""
        return self

    @property
    def form(self) -> Form:
        """What engines compute: softmax, of the scores times `fused_factor`; phi, of them plus
        `shift`, over the row sum with l1, else over `divisor`; any: `weights` says it.
        """
        return "any"

    def extra_flops(self, head_dim: int) -> int:
        """Of a head and token, forward and backward, beyond q.k and the weights times v."""
        return 0
