"""Every normaliser with each of its options, and how tests call and compare them.

A normaliser that is registered but not listed is added with its default options, so that most tests
cover it at once (the comparison with reference.py needs a formula there).
"""

import copy
import json
from itertools import product
from typing import get_args

import pytest
import torch
from reference import FORMULAS, reference_weights

import attention
from attention import choose_engine, make_normaliser
from engines import sdpa
from normalisers.adaptive import AdaptiveSoftmax
from normalisers.base import share_heads
from normalisers.family import Bias, LengthScale, PhiName
from normalisers.own import list_normalisers
from schema import AttentionConfig

PHIS = get_args(PhiName)


def either(literal):
    return "|".join(value for value in get_args(literal) if isinstance(value, str))


# A line: a normaliser and what differs from its defaults, a|b: each of them. Without a line of its
# own a name, of normalisers/, configs/variants or --normaliser, is a case with its defaults.
LINES = f"""
phi
phi phi={either(PhiName)} l1=true|false
sigmoid
sigmoid bias={either(get_args(Bias)[1])} l1=true|false
relu_wortsman divide_by=train_len|n
relu_shen gamma=1.0|2.5
ssmax
ssmax scale_init=0.43
ssmax scale=learned|one bias=true|false
ssmax scores=cosine scale_init=2.0
ssmax_pn scale_init=1.0|0.7
norm_softmax
norm_softmax gamma=inf|2.0
norm_softmax gamma=8.0 tau=0.5
norm_softmax variant=affine tau=1.0|2.0
norm_softmax variant=inverse
norm_softmax variant=inverse gamma=3.0 tau=0.8
norm_softmax scores=cosine
logit_norm
logit_norm tau=0.25
scale_invariant
scale_invariant tau=2.0 scores=cosine scale=sqrt_d
decay
decay learns=false forget_init=1.0
threshold output_norm=false
threshold power=1 kappa=3.0 output_norm=false
stick_breaking
stick_breaking scale=learned length_scale=ln_n|query
entmax
entmax length_scale=query
softmax
softmax scores=cosine scale=sqrt_d
softmax scores=cosine scale=learned scale_init=4.0
softmax scores=cosine scale=ln_d length_scale=ln_n
softmax scale=0.3
softmax scale=one length_scale=ln_n bias=true
softmax length_scale={either(LengthScale)}
softmax sink=one|learned
lssa
lssa sink=learned
lssa bias=log_n reweight_p=3
lssa scores=dot scale=rsqrt_d length_scale=none
lssa scale=learned scale_init=3.0
lssa scale=6.0 length_scale=none reweight_p=15
lssa phi=sigmoid length_scale=log_train_len_n
phi phi=relu2 scores=cosine bias=log_n
softmax reweight_p=3|1|15
lssa reweight_p=3|1|15
phi phi=exp|relu2|softplus reweight_p=3|1|15
sigmoid l1=true reweight_p=3|1|15
sigmoid bias=log_len l1=true reweight_p=3|1|15
relu_li
relu_li reweight_p=3|1|15
ssmax bias=true reweight_p=3|1|15
ssmax_pn reweight_p=3|1|15
norm_softmax reweight_p=3|1|15
norm_softmax variant=affine reweight_p=3|1|15
logit_norm reweight_p=3|1|15
softmax scores=cosine scale=ln_d length_scale=ln_n reweight_p=3|1|15
lssa scale=learned reweight_p=3|1|15
scale_invariant reweight_p=3|1|15
entmax reweight_p=3|1|15
"""


def value_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def list_options():
    """The options of each case."""
    names = {line.split()[0] for line in LINES.split("\n") if line}
    lines = [*(name for name in list_normalisers() if name not in names), *LINES.split("\n")]
    for line in filter(None, lines):
        name, *parts = line.split()
        pairs = dict(part.split("=") for part in parts)
        for values in product(*(text.split("|") for text in pairs.values())):
            yield {"normaliser": name} | dict(zip(pairs, map(value_of, values), strict=True))


OPTIONS = list(list_options())


def case_id(options):
    rest = [f"{key}={value}" for key, value in options.items() if key != "normaliser"]
    return " ".join([options["normaliser"], *rest]).replace(" ", "-")


def list_cases(by_option):
    """Quick: LSSAR and a normaliser's first, or those with an option, or a name of one, not seen
    before.
    """
    seen = set()
    cases = []
    for options in OPTIONS:
        name = options["normaliser"]
        parts = {(name,)}
        if by_option:
            parts = {
                (name, key, value if isinstance(value, str) else None)
                for key, value in options.items()
            }
        is_lssar = options.keys() == {"normaliser", "reweight_p"} and name == "lssa"
        marks = () if is_lssar or not parts <= seen else pytest.mark.slow
        seen |= parts
        cases.append(pytest.param(AttentionConfig(**options), id=case_id(options), marks=marks))
    return cases


CASES = list_cases(by_option=True)
CASES_BY_NAME = list_cases(by_option=False)
each_case = pytest.mark.parametrize("cfg", CASES)
each_name = pytest.mark.parametrize("cfg", CASES_BY_NAME)


def has_sdpa(cfg):
    return not sdpa.problem(make_normaliser(cfg, 2, 16, 40), torch.device("cpu"), torch.float32)


def choose(layer, device, dtype, engine="auto"):
    """The name of the engine that attend() takes."""
    return choose_engine(layer, engine, device, dtype).name


def engines(cfg):
    return ["dense", "rows", "sdpa"] if has_sdpa(cfg) else ["dense", "rows"]


OWN_SCALE = (
    "entmax",
    "asentmax",
    "threshold",
    "stick_breaking",
    "softpick",
    "elastic_softmax",
    "adaptive_temperature",
)


def is_normalised(cfg):
    """Whether rows have a scale of their own: sum |A| <= 1, a softmax shifted, or powers of a
    cosine.
    """
    d, name = cfg.definition, cfg.normaliser
    return (
        isinstance(d, AdaptiveSoftmax)
        or getattr(d, "l1", False)
        or name.startswith("softmax_")
        or name in OWN_SCALE
    )


def make(cfg, n_head, head_dim, train_len, seed=0):
    """A normaliser whose learned parameters are away from their initial values, different in every
    head.
    """
    normaliser = make_normaliser(cfg, n_head=n_head, head_dim=head_dim, train_len=train_len)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(normaliser.named_parameters()):
            low = {"b": -0.3, "tau": -1.5}.get(name, 0.5)
            p.copy_(low + torch.rand(p.shape, generator=g))
    return normaliser


def draw(
    len_q,
    len_k,
    head_dim,
    batch=1,
    n_head=2,
    seed=0,
    dtype=torch.float32,
):
    """q, k, v and the gradient of o, all N(0, 1)."""
    g = torch.Generator().manual_seed(1000 * len_q + len_k + seed)
    shapes = [(batch, n_head, t, head_dim) for t in (len_q, len_k, len_k, len_q)]
    q, k, v, do = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return q, k, v, do


def signals_of(normaliser, q, k):
    """In the place of what a formula reads from a layer's input: the first channels of the keys."""
    n = normaliser.n_signals
    return share_heads(k, q)[..., :n] if n else None


def attend(
    q,
    k,
    v,
    normaliser,
    engine="auto",
    **options,
):
    """`attention.attend` with `signals_of` the keys."""
    signals = signals_of(normaliser, q, k)
    return attention.attend(q, k, v, normaliser, engine, signals=signals, **options)


def weights_of(normaliser, q, k):
    """The dense weights with `signals_of` the keys."""
    return normaliser.weights(q, k, signals=signals_of(normaliser, q, k))


def run(engine, normaliser, q, k, v, do, autocast=False, **options):
    """o and every gradient of (o * do).sum(), with an engine or with weights given as a function."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    params = dict(normaliser.named_parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        o = None if callable(engine) else attend(q, k, v, normaliser, engine, **options)
        o = engine(q, k, params) @ v if o is None else o
    inputs = {"dq": q, "dk": k, "dv": v, **{f"d{name}": p for name, p in params.items()}}
    grads = torch.autograd.grad(
        o, list(inputs.values()), do, allow_unused=True, materialize_grads=True
    )
    return {"o": o.detach(), **dict(zip(inputs, grads, strict=True))}


GATE_TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (1e-3, 5e-3),
    torch.bfloat16: (6e-3, 3e-2),
}


FOX_SHAPES = [(600, 4), (400, 1)]  # queries for 600 keys, and heads of keys for 4 of queries


def fox_errors(attend, dtype, shape, device="cpu"):
    """Relative errors of o, dq, dk, dv and the gradient of the gates, of attention.attend on sdpa."""
    n_queries, kv_heads = shape
    layer = make_normaliser(AttentionConfig(normaliser="fox"), 4, 64, 600, "none", width=256)
    q, k, v, do = (t.to(device) for t in draw(n_queries, 600, 64, batch=2, n_head=4, dtype=dtype))
    gates = 2 * torch.randn(
        2, 4, 600, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    inputs = (
        q,
        k[:, :kv_heads],
        v[:, :kv_heads],
        gates.to(device, torch.promote_types(dtype, torch.float32)),
    )

    def gradients(attend, engine, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        chosen = attention.choose_engine(layer, engine, torch.device(device), dtype)
        o = attend(*leaves[:3], layer, chosen, signals=leaves[3])
        return [o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    exact = gradients(attention.attend, "dense", *(t.double() for t in inputs))
    pairs = zip(gradients(attend, "sdpa", *inputs), exact, strict=True)
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


def exactly(normaliser, *inputs, **options):
    """`run` in float64 on the same numbers; equal to the reference by the first tests of section 2."""
    q, k, v, do = (t.double() for t in inputs)
    return run("dense", copy.deepcopy(normaliser).double(), q, k, v, do, **options)


def assert_close(got, want, inputs, tolerance, label):
    """Norm of the error over norm of the exact value, for o and each gradient.

    Some gradients are sums that cancel, so that their own norm is no measure of their rounding:
    - dq or dk may vanish, exactly (equal keys) or nearly (at most 3 rows, where one key may take
    each
      row whole): held against the largest gradient;
    - a learned parameter's is a sum over all rows, of the terms q dq: held against 10 % of sum |q
    dq|
      where that is larger.
    """
    assert got.keys() == want.keys()
    exact = {name: t.double() for name, t in want.items()}
    largest = max(t.norm() for name, t in exact.items() if name != "o")
    few = inputs[0].shape[2] <= 3
    terms = (inputs[0].double() * exact["dq"]).abs().sum()
    bad = {}
    for name, t in exact.items():
        scale = t.norm()
        if name in ("dq", "dk") and (few or scale <= 1e-9 * largest):
            scale = largest
        if name not in ("o", "dq", "dk", "dv"):
            scale = torch.maximum(scale, largest if few else 0.1 * terms)
        error = float((got[name].double() - t).norm() / scale.clamp(min=1e-30))
        if not error <= tolerance:
            bad[name] = f"{error:.2e}"
    assert not bad, f"{label}: relative errors {bad} above {tolerance}"


def formula(cfg, train_len):
    if cfg.normaliser not in FORMULAS:
        pytest.skip(f"tests/reference.py has no formula for {cfg.normaliser}")
    return lambda q, k, params: reference_weights(cfg, q, k, train_len, params)
