"""The formulas that LSSAR compares with (its Tables 1 and 4), as small as those of family.py.

x = q.k / sqrt(d) unless `scores`, `scale` or `length_scale` say otherwise; n = number of keys the
query sees. Formulas of other papers are files in configs/variants.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from normalisers.base import Normaliser, RowContext, has_contrast, l1_normalise
from normalisers.family import Bias, Phi, PhiName


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
