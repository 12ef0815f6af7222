"""RoPE and its scalings beyond the training length; biases on the scores in its place.

    cos, sin = rope_tables(head_dim, n_positions, theta, RopeScaling("ntk"), train_len)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

The tables are computed anew by each forward pass from the training base: none outlives a length,
and none is in a checkpoint.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from infra.cli import UserError

YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies change for sequences longer than the training length (see
    `rope_tables`).

    Args:
        name: none, ntk, yarn, or theta=500000, the base that replaces the training base.
        length: the sequence length T to scale for; None: the positions present, cache + tokens.
            When one sequence is fed in several pieces, name its final length, or the pieces
            disagree.
    Raises:
        UserError: another name.
    """

    name: str = "none"
    length: int | None = None

    def __post_init__(self) -> None:
        is_known = self.name in ("none", "ntk", "yarn")
        with suppress(ValueError):
            is_known |= 0 < self.theta < math.inf
        if not is_known:
            raise UserError(f"RoPE scaling {self.name}: expected none, ntk, yarn or theta=500000")

    @property
    def theta(self) -> float:
        """The base that its name gives; 0: none."""
        is_base = self.name.startswith("theta=")
        return float(self.name.removeprefix("theta=")) if is_base else 0.0


UNSCALED = RopeScaling()


def operator_library(module: str) -> str:
    """Where torch keeps a module's operators, by its name: an exported model brings copies of both."""
    return re.sub(r"[^0-9a-zA-Z_]", "_", module)


def alibi(t: Tensor, head: Tensor, n_head: int) -> Tensor:
    """-m_h t, m_h = 2^(-8 h / H), h = 1 ... H, is added to scores at distance t (ALiBi, Press et
    al. 2022).

    head counts from 0 and broadcasts against t.
    """
    return -torch.exp2(-8 * (head + 1) / n_head) * t


BIASES = {"alibi": alibi}  # on the scores, by model.position


def rope_tables(
    head_dim: int,
    n_positions: int,
    theta: float,
    scaling: RopeScaling,
    train_len: int,
    positions: Tensor | None = None,
    rotating: int | None = None,
    amplified: bool = True,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles m·w_i, for positions m and frequencies w_i = theta^(-2i/d), i <
    d/2.

    RoPE is Su et al. 2021 (arXiv 2104.09864), eq. 14-15. With T the length to scale for and
    s = T / train_len, the scalings are (ntk, yarn: only if s > 1, else none)

        none    w_i
        ntk     base theta·s^(d/(d-2))     "NTK-aware", bloc97 2023; YaRN paper, Definition 1
        theta=B base B                     Xiong et al. 2023 (arXiv 2309.16039); SSMax uses 500000
        yarn    (1-g)·w_i/s + g·w_i        Peng et al. 2023 (arXiv 2309.00071), Definitions 2 and 3

    where yarn's g rises linearly from 0 to 1 as the turns over the training length,
    r_i = train_len·w_i / 2π, go from 1 to 32; it also multiplies cos and sin by 0.1·ln s + 1. (The
    authors' code ramps over the index i between rounded ends instead; this is the formula in the
    paper.)

    Args:
        positions: the m of the tables, (T,), on whose device they are; None: 0 to n_positions - 1.
        rotating: how many channels turn, from the first on: twice the highest frequencies that are
            kept, the others are 0 (p-RoPE, Barbero et al. 2024, arXiv 2410.06205). None: all. 0: no
            positions.
        amplified: False leaves yarn's 0.1·ln s + 1 out, as cosine scores, of unit vectors, do not
        see it.
    Returns:
        cos, sin: (T, head_dim / 2) float32, computed in float64: at position 131072 a
        float32 angle is off by up to 5e-3.
    Raises:
        UserError: ntk with head_dim = 2, whose exponent is infinite.
    """
    if positions is None:
        positions = torch.arange(n_positions)
    length = n_positions if scaling.length is None else scaling.length
    freqs, amplitude = rope_frequencies(
        head_dim, theta, scaling, length, train_len, positions.device
    )
    if rotating is not None:
        freqs[rotating // 2 :].zero_()
    return _cos_and_sin(freqs, amplitude if rotating != 0 and amplified else 1.0, positions)


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling,
    length: int,
    train_len: int,
    device: torch.device,
) -> tuple[Tensor, float]:
    """w_i of `rope_tables`, (D/2,) float64, scaled for `length`, and the factor of cos and sin."""
    s = max(length / train_len, 1.0)
    theta = scaling.theta or theta
    if scaling.name == "ntk" and s > 1:
        if head_dim <= 2:
            raise UserError(
                f"RoPE scaling ntk: s^(d/(d-2)) needs a head size d above 2, got {head_dim}"
            )
        theta = theta * s ** (head_dim / (head_dim - 2))

    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    freqs = theta**-exponents  # (D/2,)
    amplitude = 1.0
    if scaling.name == "yarn" and s > 1:
        turns = train_len * freqs / (2 * math.pi)
        g = ((turns - YARN_BETA_SLOW) / (YARN_BETA_FAST - YARN_BETA_SLOW)).clamp(0, 1)
        freqs = (1 - g) * freqs / s + g * freqs
        amplitude = 0.1 * math.log(s) + 1
    return freqs, amplitude


# An operator of its own, so that torch.compile keeps the tables: it would compute cos and sin anew,
# in float64, for each element of q and k in each layer.
@torch.library.custom_op(f"{operator_library(__name__)}::cos_and_sin", mutates_args=())
def _cos_and_sin(freqs: Tensor, amplitude: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] * freqs  # (T, D/2) float64
    return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


@_cos_and_sin.register_fake
def _(freqs: Tensor, amplitude: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    table = freqs.new_empty(positions.shape[0], len(freqs), dtype=torch.float32)
    return table, table.clone()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_2i, x_2i+1) of x (B, H, T, D) by its position's angle; cos, sin: (T, D/2)
    float32.

    Returns x's shape and dtype, computed in float32.
    """
    if x.device.type != "cpu":
        return rotate_pairs(x, cos, sin)
    pairs = x.float().unflatten(-1, (-1, 2)).contiguous()  # (B, H, T, D/2, 2)
    turned = torch.view_as_complex(pairs) * torch.complex(cos, sin)  # one pass over memory
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` in real numbers: torch.compile does not compile complex ones."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, D/2)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
