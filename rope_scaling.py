"""Which scaling RoPE has beyond the training length. positions.py has the formulas, which need torch."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from infra.cli import UserError

RopeKind = Literal["none", "ntk", "theta", "linear", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies change for sequences longer than the training length (see `rope_tables`).

    Args:
        kind: none, ntk, theta, linear or yarn.
        theta: the base that replaces the training base; for kind theta, and only there.
        length: the sequence length T to scale for; None: the positions present, cache + tokens. When
            one sequence is fed in several pieces, name its final length, or the pieces disagree.
    Raises:
        UserError: unknown kind, missing or superfluous theta.
    """

    kind: RopeKind = "none"
    theta: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise UserError(f"RoPE scaling {self.kind!r}: expected one of {', '.join(get_args(RopeKind))}")
        if self.kind == "theta" and not (self.theta is not None and 0 < self.theta < math.inf):
            raise UserError(f"RoPE scaling theta: base {self.theta}: expected a number above 0, --rope-theta")
        if self.kind != "theta" and self.theta is not None:
            raise UserError(f"RoPE base {self.theta}: only read by RoPE scaling theta, not by {self.kind}")


UNSCALED = RopeScaling()
