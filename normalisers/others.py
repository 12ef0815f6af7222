"""Normalisers of other papers, to compare with: the same small classes as in family.py.

x = q.k / sqrt(d) unless `scores`, `scale` or `length_scale` say otherwise; n = number of keys the
query sees. The docstrings of formulas that newer papers give say what they were checked against.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from normalisers.base import (
    HIDDEN,
    Normaliser,
    RowContext,
    exp,
    has_contrast,
    l1_normalise,
)
from normalisers.family import Bias, Phi, PhiName, Scaled, Softmax
from positions import operator_library


class Sigmoid(Phi, name="sigmoid"):
    """sigmoid(x - ln L), L the training length or all keys (Ramapuram et al. 2024), or - ln n.

    ln n, the default, and l1 are LSSAR's (Section 3.3, Table 4). With bias = "log_len" a row's
    weights depend on keys that it does not see, through their number.
    """

    phi: PhiName = "sigmoid"
    l1: bool = False
    bias: Bias = "log_n"


class ReluLi(Phi, name="relu_li"):
    """relu(x) / sum relu(x). (Li et al. 2022)"""

    phi: PhiName = "relu"


class ReluWortsman(Phi, name="relu_wortsman"):
    """relu(x) / L, L the training length (or n). (Wortsman et al. 2023)"""

    phi: PhiName = "relu"
    l1: Literal[False] = False
    divide_by: Literal["train_len", "n"] = Field(
        "train_len", description="The divisor: training length or visible keys."
    )

    def divisor(self, context: RowContext) -> Tensor | float:
        return context.n if self.divide_by == "n" else float(context.train_len)


class ReluShen(Phi, name="relu_shen"):
    """relu(x) / (gamma sqrt(n / 2)). (Shen et al. 2023)"""

    phi: PhiName = "relu"
    l1: Literal[False] = False
    gamma: float = Field(1.0, gt=0, description="Scale of the divisor.")

    def divisor(self, context: RowContext) -> Tensor | float:
        return self.gamma * (context.n / 2).sqrt()


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


class Threshold(Normaliser, name="threshold"):
    """relu(cos(q, k) - beta sqrt(2 ln(n / kappa) / d))^power, beta learned per head. (arXiv
    2601.12145)

    Threshold rectified attention; each head's output is RMS-normalised. Checked against the
    authors' kernel (snap-research/TDA), which has this n, kappa = 1 and one beta for all heads, and
    against a summary of the paper, whose ln((i + 1) / kappa) is n + 1 if its rows i count from 1.
    The paper's last form, the difference of two such attentions (TDA), is not here.
    """

    scores: Literal["cosine"] = "cosine"
    output_norm: bool = True
    power: int = Field(2, ge=1, le=16, description="Power of what exceeds the threshold.")
    kappa: float = Field(
        1.0, gt=0, description="Expected number of random keys above the threshold."
    )

    def learned(self, n_head: int, train_len: int) -> dict[str, Tensor]:
        return {"beta": torch.ones(n_head)}

    def factor(self, context: RowContext) -> float:
        return 1.0

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        level = (2 * (context.n / self.kappa).log().clamp_min(0) / context.head_dim).sqrt()
        return torch.relu(x - context.learned["beta"] * level) ** self.power


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


class Softpick(Scaled, name="softpick"):
    """relu(e^x - 1) / sum |e^x - 1|: a row may sum to less than one, or be zero. (arXiv 2504.20966)

    Checked against the authors' code (zaydzuhri/softpick-attention), whose sum has 1e-8 e^(max x)
    added.
    """

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        x = context.zero_hidden(x)
        peak = x.detach().amax(-1, keepdim=True).clamp_min(0)
        # e^-peak (e^x - 1), without loss of digits near x = 0 nor overflow
        small = torch.expm1(x.clamp_max(40)) * torch.exp(-peak)
        s = torch.where(peak < 40, small, torch.exp(x - peak))
        return torch.relu(l1_normalise(context.zero_hidden(s)))


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


# An operator of its own: torch 2.11 fails to compile this sum over many tokens for a GPU.
@torch.library.custom_op(f"{operator_library(__name__)}::running_sum", mutates_args=())
def running_sum(x: Tensor) -> Tensor:
    """The sum of x (..., T, S) over each token and those before it."""
    return x.mT.cumsum(-1).mT.contiguous()  # along the last axis, where a GPU sums in parallel


running_sum.register_fake(lambda x: x.new_empty(x.shape))
running_sum.register_autograd(lambda ctx, gradient: running_sum(gradient.flip(-2)).flip(-2))


class FoX(Softmax, name="fox"):
    """softmax(x_ij + sum_{j < t <= i} ln sigmoid(w.h_t + b)), h the layer's input, w and b learned
    per head.

    Forgetting attention (arXiv 2503.02130), there without positions (`model.position = "none"`). w
    starts at N(0, 0.02^2), b at 0, as in the authors' code (zhixuan-lin/forgetting-transformer),
    against which the formula was checked. Their "Pro" block's norms, gate and shifts are not here.
    """

    forget_init: float = Field(
        0.0, description="Of b. A key t tokens back weighs sigmoid(b)^t at first."
    )

    def signals(self, head_dim: int) -> dict[str, list[float]]:
        return {"forget": [self.forget_init]} | super().signals(head_dim)

    def key_decay(self, signals: dict[str, Tensor]) -> Tensor:
        return running_sum(F.logsigmoid(signals["forget"]).double())


class SoftmaxInverse(Normaliser, name="softmax_inverse"):
    """-softmax(x). (LSSAR, Table 1)"""

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        return -x.softmax(-1)


class SoftmaxRecentred(Normaliser, name="softmax_recentred"):
    """softmax(x) - 1/n, its mean over the visible keys; rows n <= 3 unchanged. (LSSAR, Table 1)"""

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        a = x.softmax(-1)
        return torch.where(context.n > 3, a - 1 / context.n, a)


class SoftmaxRecentredL1(Normaliser, name="softmax_recentred_l1"):
    """(softmax(x) - 1/n) / sum |softmax(x) - 1/n|; rows n <= 3 unchanged. (LSSAR, Table 1, note 1)

    A uniform row (max(n A) - 1 <= 1e-5) would be rounding noise scaled to norm one: unchanged, too.
    """

    def weights(self, x: Tensor, context: RowContext) -> Tensor:
        a = x.softmax(-1)
        n = context.n
        centred = context.visible(x) & has_contrast(n * a.detach().amax(-1, keepdim=True), n)
        return l1_normalise(torch.where(centred, a - 1 / n, a))
