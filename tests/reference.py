"""Attention weights the slow way: one row at a time, in float64, each formula as its paper prints
it.

    reference_weights(cfg, q, k, train_len, params)  ->  (B, H, Tq, Tk) float64

It shares no code with normalisers/. Every function below sees one query `q` (D,), the keys that
this query may see `k` (n, D), and nothing else, so causality, the meaning of n and the rows of a KV
cache need no mask. All of it is made of differentiable torch operations: gradients can be compared
too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNIFORM = 1e-5  # a row whose largest n A - 1 is at most this is uniform up to rounding


@dataclass
class Row:
    """One query, its n visible keys, and what else a formula may name."""

    q: Tensor  # (D,)
    k: Tensor  # (n, D)
    length: int  # Tk, the number of keys that exist at all
    train_len: int
    # learned parameters of this row's head: scalars, and p_n (train_len,)
    params: dict[str, Tensor]
    slope: float = 0.0

    def signal(self, i):
        """(n,): what the formula reads from the layer's input at each key, in tests channel i of
        the keys.
        """
        return self.k[:, i]

    @property
    def n(self):
        return self.k.shape[0]

    @property
    def alibi(self):
        """-m_h t of each key, t its distance: Press et al. 2022."""
        return -self.slope * torch.arange(self.n - 1, -1, -1)

    @property
    def raw(self):  # summed in the same order for every key: equal keys, equal scores
        return (self.k * self.q).sum(-1)

    @property
    def x(self):
        return self.raw / math.sqrt(self.q.shape[0])


def reference_weights(
    cfg,
    q,
    k,
    train_len,
    params=None,
    window=0,
    position="rope",
):
    """Dense weights of a causal attention whose queries are the last Tq of Tk positions.

    Args:
        cfg: an AttentionConfig, or anything with its attributes.
        q: (B, H, Tq, D). k: (B, H, Tk, D). Any dtype; converted to float64.
        train_len: the training length.
        params: the normaliser's learned parameters by name: `s`, `b`, `sink`, `w` (H,), `p_n`
        (train_len,).
        window: the last keys that a query sees; 0: all. position: alibi adds its bias.
    Returns:
        (B, H, Tq, Tk) float64, zeros above the diagonal.
    Raises:
        NotImplementedError: for a normaliser without a formula here.
    """
    if cfg.normaliser not in FORMULAS:
        raise NotImplementedError(f"tests/reference.py has no formula for {cfg.normaliser}")
    q, k = q.double(), k.double()
    params = {name: p.double() for name, p in (params or {}).items()}
    (batch, n_head, len_q, _), len_k = q.shape, k.shape[2]
    rows = []
    for b in range(batch):
        for h in range(n_head):
            of_head = {name: p if name == "p_n" else p[h] for name, p in params.items()}
            slope = 2 ** (-8 * (h + 1) / n_head) if position == "alibi" else 0.0
            for r in range(len_q):
                n = len_k - len_q + r + 1
                first = max(0, n - window) if window else 0
                row = Row(q[b, h, r], k[b, h, first:n], len_k, train_len, of_head, slope)
                a = FORMULAS[cfg.normaliser](row, cfg)
                if cfg.reweight_p:
                    a = reweight(a, cfg.reweight_p)
                rows.append(torch.cat([a.new_zeros(first), a, a.new_zeros(len_k - n)]))
    return torch.stack(rows).view(batch, n_head, len_q, len_k)


def reweight(a, p):
    """ReLU(A n - O)^p, then l1 (LSSAR eq. 5). O = 0 in rows n <= 3 (note 2) and in uniform rows,
    else 1.
    """
    n = a.shape[0]
    r = torch.relu(n * a - (0 if n <= 3 else 1))
    if r.max() <= UNIFORM:
        r = n * a
    if r.max() == 0:
        return torch.zeros_like(a)
    return l1((r / r.max().detach()) ** p)  # the l1 cancels the divisor, so that no power overflows


def l1(a):
    """A / sum |A|; a row of zeros stays one."""
    total = a.abs().sum()
    return torch.zeros_like(a) if total == 0 else a / total


def exp_l1(z):
    """The softmax of one row."""
    e = torch.exp(z - z.max().detach())
    return e / e.sum()


def _softmax_inverse(row, cfg):
    """-softmax(x): LSSAR Table 1."""
    return -exp_l1(row.x)


def _softmax_recentred(row, cfg):
    """softmax(x) - its mean over the visible keys, except in rows n <= 3: LSSAR Table 1, note 1."""
    a = exp_l1(row.x)
    return a if row.n <= 3 else a - a.sum() / row.n


def _softmax_recentred_l1(row, cfg):
    """The same, divided by sum |A|: LSSAR Table 1."""
    return l1(_softmax_recentred(row, cfg))


def log_1p_exp(x):
    return torch.logaddexp(x, torch.zeros_like(x))


def logistic(x):
    return torch.exp(-log_1p_exp(-x))


PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "identity": lambda x: x,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: (x * (x > 0)) ** 2,
    "relu6": lambda x: x * (x > 0) * (x < 6) + 6.0 * (x >= 6),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "sigmoid": logistic,
    "softplus": log_1p_exp,
    "mish": lambda x: x * torch.tanh(log_1p_exp(x)),
}


def _score(row, cfg):
    """q k, or q^ k^ with q^ and k^ of length 1, times the scale, the length scale and s and b."""
    d, n = row.q.shape[0], row.n
    if cfg.scores == "cosine":
        product = (row.k / row.k.norm(dim=-1, keepdim=True) * (row.q / row.q.norm())).sum(-1)
        natural = product
    else:
        product, natural = row.raw, row.x
    g: Any = {
        "none": 1.0,
        "ln_n": math.log(n),
        "sqrt_2ln_n": math.sqrt(2 * math.log(n)),
        "log_train_len_n": max(1.0, math.log(n) / math.log(row.train_len)),
        "llama4": 1 + 0.1 * math.log(n // 8192 + 1),
        "info_scale": math.sqrt((1 - n ** (-2 / d)) / (1 - row.train_len ** (-2 / d))),
        "query": 1.0,
    }[cfg.length_scale]
    if cfg.length_scale == "query":
        g = 1 + log_1p_exp(row.signal(0)[-1]) * math.log(max(2, n)) ** (
            2 * torch.tanh(row.signal(1)[-1])
        )
    b = row.params["b"] if getattr(cfg, "bias", False) is True else 0.0
    if cfg.scale == "learned":
        return (row.params["s"] * g + b) * natural
    if cfg.scale == "one":
        return (g + b) * natural
    scale = {"rsqrt_d": 1 / math.sqrt(d), "sqrt_d": math.sqrt(d), "ln_d": math.log(d)}.get(
        cfg.scale, cfg.scale
    )
    return scale * g * product


def _family(row, cfg):
    """phi(score - bias) over its sum, a sink included: Vaswani 2017 eq. 1 (softmax), LSSAR eq. 3
    (phi) and 4 (lssa), SSMax eq. 2 and 4, Ramapuram 2024 eq. 3 (sigmoid, bias -ln L), Li 2022 (relu
    over its sum)."""
    x = _score(row, cfg) + row.alibi
    if isinstance(cfg.bias, str):
        x = x - math.log(
            {"log_train_len": row.train_len, "log_len": row.length, "log_n": row.n}[cfg.bias]
        )
    if cfg.sink != "none":
        sink = row.params["sink"] if cfg.sink == "learned" else torch.zeros((), dtype=x.dtype)
        a = PHI[cfg.phi](x)
        return a / (a.abs().sum() + torch.exp(sink))
    if cfg.phi == "exp" and cfg.l1:
        return exp_l1(x)
    a = PHI[cfg.phi](x)
    return l1(a) if cfg.l1 else a


def _relu_wortsman(row, cfg):
    """relu(x) / L: Wortsman 2023."""
    return PHI["relu"](row.x) / (row.n if cfg.divide_by == "n" else row.train_len)


def _relu_shen(row, cfg):
    """relu(x) / (gamma sqrt(n / 2)): Shen 2023."""
    return PHI["relu"](row.x) / (cfg.gamma * math.sqrt(row.n / 2))


def _ssmax_pn(row, cfg):
    """softmax((s p_n + b) x): SSMax eq. 3; p_n is learned for every n up to the training length."""
    s, b, p_n = row.params["s"], row.params["b"], row.params["p_n"][row.n - 1]
    return exp_l1((s * p_n + b) * row.x)


def _norm_softmax(row, cfg):
    """softmax(x / (tau min(sigma, gamma))), x = q k unscaled: NormSoftmax eq. 4-6, tau eq. 29.

    Table 1's f1 (no number) is w x / (tau sigma), f2 is x / (tau max(sigma, gamma)). sigma is the
    population standard deviation of x over the visible keys; where it is 0, the row is uniform.
    """
    n = row.n
    x = row.raw
    if cfg.scores == "cosine":
        x = x / (row.q.norm() * row.k.norm(dim=-1))
    x = x + row.alibi
    if bool((x == x[0]).all()):
        return torch.full_like(x, 1 / n) + 0 * x  # + 0 x: the zero gradient
    tau = cfg.tau
    sigma = (((x - x.sum() / n) ** 2).sum() / n) ** 0.5
    if cfg.variant == "affine":
        return exp_l1(row.params["w"] * x / (tau * sigma))
    if cfg.gamma == "sqrt_d":
        gamma = math.sqrt(row.q.shape[0])
    else:
        gamma = math.inf if cfg.gamma == "inf" else cfg.gamma
    keep_sigma = sigma > gamma if cfg.variant == "inverse" else sigma < gamma
    return exp_l1(x / (tau * (sigma if keep_sigma else gamma)))


def _logit_norm(row, cfg):
    """softmax(x / (tau |x|_2)), x = q k unscaled, |x| over the visible keys: NormSoftmax eq. 8."""
    tau = row.n**-0.5 if cfg.tau == "rsqrt_n" else cfg.tau
    return exp_l1(row.raw / (tau * (row.raw**2).sum() ** 0.5))


def _scale_invariant(row, cfg):
    """softmax(a_t x + m_t), t = n - 1 - j: arXiv 2505.17083."""
    log = torch.tensor(
        [math.log((row.n - 1 - j) / cfg.tau + 1) for j in range(row.n)], dtype=torch.float64
    )
    return exp_l1((2 * log + 1) ** 0.5 * _score(row, cfg) - 2 * log)


def _fox(row, cfg):
    """softmax(x_j + sum of ln f_t over the keys t after j), f = sigmoid of the signal: arXiv
    2503.02130.
    """
    log_f = -log_1p_exp(-row.signal(0))
    return exp_l1(_score(row, cfg) + torch.stack([log_f[j + 1 :].sum() for j in range(row.n)]))


def _entmax(row, cfg):
    """1.5-entmax by sorting: the support is the largest k whose threshold lies below its smallest
    score.

    (Peters et al. 2019, algorithm 2.)
    """
    if cfg.normaliser == "asentmax":
        log_n = math.log(max(2, row.n))
        z = (cfg.delta + row.params["beta"] * log_n ** row.params["gamma"]) * row.x / 2
    else:
        z = _score(row, cfg) / 2
    z = z - z.max().detach()
    ordered = z.sort(descending=True).values
    for k in range(row.n, 0, -1):
        mean = ordered[:k].mean()
        rest = (1 - ((ordered[:k] - mean) ** 2).sum()) / k
        if rest >= 0 and mean - rest**0.5 < ordered[k - 1]:
            return torch.relu(z - (mean - rest**0.5)) ** 2
    raise AssertionError("no support")


def _threshold(row, cfg):
    """relu(cos - beta sqrt(2 ln(n / kappa) / d))^power: arXiv 2601.12145."""
    cosine = (row.k / row.k.norm(dim=-1, keepdim=True) * (row.q / row.q.norm())).sum(-1)
    level = math.sqrt(2 * max(0.0, math.log(row.n / cfg.kappa)) / row.q.shape[0])
    return PHI["relu"](cosine - row.params["beta"] * level) ** cfg.power


def _stick_breaking(row, cfg):
    """sigmoid(x_j) times the product of 1 - sigmoid(x_k) over j < k < i: arXiv 2410.17980."""
    x, weights, rest = (
        _score(row, cfg) + row.alibi,
        [row.x[0] * 0],
        torch.ones((), dtype=torch.float64),
    )
    for j in range(row.n - 2, -1, -1):
        weights.insert(0, logistic(x[j]) * rest)
        rest = rest * logistic(-x[j])
    return torch.stack(weights)


def _softpick(row, cfg):
    """relu(e^x - 1) / sum |e^x - 1|: arXiv 2504.20966."""
    e = torch.expm1(_score(row, cfg))
    return PHI["relu"](l1(e))


def _elastic_softmax(row, cfg):
    """relu(softmax(x) + tau / n)."""
    return PHI["relu"](exp_l1(_score(row, cfg)) + row.params["tau"] / row.n)


def _adaptive_temperature(row, cfg):
    """softmax(beta x), beta a polynomial of the entropy of softmax(x): arXiv 2410.01104."""
    x = _score(row, cfg)
    p = exp_l1(x)
    h = -(p * p.log()).sum()
    beta = sum(c * h**i for i, c in enumerate((-1.791, 4.917, -2.3, 0.481, -0.037)))
    return exp_l1(beta.clamp_min(1) * x)


def _decay(row, cfg):
    """softmax(x + t ln sigmoid(b)), t = n - 1 - j."""
    b = row.params["b"] if cfg.learns else torch.tensor(cfg.forget_init, dtype=torch.float64)
    t = torch.arange(row.n - 1, -1, -1)
    return exp_l1(_score(row, cfg) - t * log_1p_exp(-b))


FAMILY = ("softmax", "phi", "lssa", "sigmoid", "relu_li", "ssmax")
FORMULAS: dict[str, Callable[[Row, Any], Tensor]] = {
    **{name: _family for name in FAMILY},
    "softmax_inverse": _softmax_inverse,
    "softmax_recentred": _softmax_recentred,
    "softmax_recentred_l1": _softmax_recentred_l1,
    "relu_wortsman": _relu_wortsman,
    "relu_shen": _relu_shen,
    "ssmax_pn": _ssmax_pn,
    "norm_softmax": _norm_softmax,
    "logit_norm": _logit_norm,
    "scale_invariant": _scale_invariant,
    "fox": _fox,
    "decay": _decay,
    "entmax": _entmax,
    "asentmax": _entmax,
    "threshold": _threshold,
    "stick_breaking": _stick_breaking,
    "softpick": _softpick,
    "elastic_softmax": _elastic_softmax,
    "adaptive_temperature": _adaptive_temperature,
}
