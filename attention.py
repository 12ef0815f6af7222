"""Causal attention with any normaliser, on the first engine without a problem: the public API.

    layer = make_normaliser(AttentionConfig(normaliser="lssa", reweight_p=15), 12, 64, 1024)
    weights = layer.weights(q, k)              # the definition, dense (B, H, Tq, Tk)
    out = attend(q, k, v, layer)               # the same weights times v, in O(T) memory

What an engine computes and can run, its own file in engines/ says (`problem`).
"""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from engines import self_check
from infra.cli import UserError
from normalisers.layer import NormaliserLayer
from schema import AttentionConfig, Engine

# For CUDA, checked by `self_check` before use.
COMPILED: tuple[Engine, ...] = ("triton", "flex")
OUTPUT_NORM_EPS = 1e-5


class ChosenEngine(NamedTuple):
    """An engine that runs a layer on a device. `note`: its name, with the error of its self-check."""

    name: str
    run: Callable[..., Tensor]
    note: str


def make_normaliser(
    options: AttentionConfig,
    n_head: int,
    head_dim: int,
    train_len: int,
    position: str = "rope",
    window: int = 0,
    width: int = 0,
) -> NormaliserLayer:
    """The normaliser that `options` name. train_len: L of the formulas. position, window: of
    `[model]`.

    width: of the layer's input, from which some formulas compute `signals`
    (`NormaliserLayer.read`).
    """
    return NormaliserLayer(
        options.definition, options.reweight_p, n_head, head_dim, train_len, position, window, width
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: NormaliserLayer,
    engine: Engine | ChosenEngine = "auto",
    signals: Tensor | None = None,
    normed: bool = False,
    first: Tensor | None = None,
) -> Tensor:
    """Causal attention: layer.weights(q, k) @ v, RMS-normalised per head where the formula has
    output_norm.

    Args:
        q: (B, H, Tq, D) after RoPE, the last Tq of the Tk positions.
        k, v: (B, n_kv_head, Tk, D). Head h of q belongs to head h // (H / n_kv_head) of k and v.
        engine: a name, resolved at this call; a model resolves it once (`choose_engine`).
        signals: (B, H, Tk, S) of all keys, from `layer.read`, for formulas that read the layer's
        input.
        normed: q and k have passed `layer.norm_heads`, as a model's have.
        first: (B, Tk) int64, of each key the index of the first key of its document: where a
        document starts its own. A query sees its document alone. None: one document.
    Returns:
        (B, H, Tq, D) in v's type. Scores and weights are float32 (float64 for float64 inputs).
    Raises:
        UserError: for an engine that cannot run this normaliser here.
        ValueError: no such engine; q has not the layer's heads and head size, or more queries than
        keys.
    """
    if not normed:
        q = layer.norm_heads(q)
        k = layer.norm_heads(k)
    heads = (layer.n_head, layer.head_dim)
    if (q.shape[1], q.shape[3]) != heads:
        raise ValueError(f"q of shape {tuple(q.shape)}: expected (B, {heads[0]}, Tq, {heads[1]})")
    if isinstance(engine, str):
        engine = choose_engine(layer, engine, q.device, v.dtype, first is not None)
    if first is not None and is_one_document(first):
        first = None
    run = engine.run
    has_bias = layer.by_distance or layer.decays
    if q.shape[-2] == 1 and (engine.name in COMPILED or (engine.name == "sdpa" and has_bias)):
        run = load_engine("rows").run  # without a compiled form or a mask for each length
    with torch.autocast(q.device.type, enabled=False):
        out = run(q, k, v, layer, layer.context(q, k, signals, first))
    if layer.definition.output_norm:
        out = F.rms_norm(out, out.shape[-1:], eps=OUTPUT_NORM_EPS)
    return out


def is_one_document(first: Tensor) -> bool:
    """Whether no sequence has another, which then costs nothing; a GPU or a graph does not wait."""
    is_known = first.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_known and not first[:, -1].any()


def choose_engine(
    layer: NormaliserLayer,
    name: Engine,
    device: torch.device,
    dtype: torch.dtype,
    documents: bool = False,
) -> ChosenEngine:
    """The named engine; for "auto" the first without a problem for inputs on this device and of
    this type.

    documents: sequences of several, which sdpa on CUDA would leave to rows.
    Raises UserError: the named engine cannot run this layer there. ValueError: there is none of
    that name.
    """
    if name not in get_args(Engine):
        raise ValueError(f"engine = {name!r}: expected one of {', '.join(get_args(Engine))}")
    compiled = COMPILED if device.type == "cuda" else ()
    order: tuple[Engine, ...] = (name,)
    if name == "auto":
        order = ("sdpa", *compiled, "rows")
    problem = ""
    for candidate in order:
        try:
            module = load_engine(candidate)
        except ImportError as e:  # CUDA without Triton
            problem = f"cannot be imported: {e}"
            warnings.warn(f"engine {candidate} {problem}", stacklevel=2)
            continue
        problem = module.problem(layer, device, dtype)
        if candidate == "sdpa" and documents and compiled:
            problem = problem or "has no documents on CUDA"
        note: str = candidate
        # The self-check cannot be traced: a compiled caller has chosen before, or trusts the
        # kernels.
        if candidate in compiled and not problem and not torch.compiler.is_compiling():
            error, problem = self_check.check(candidate, module, layer, device, dtype, documents)
            note = f"{candidate} (self-check: relative error {error:.1e})"
        if not problem:
            return ChosenEngine(candidate, module.run, note)
    raise UserError(f"train.engine = {name!r}: {problem}; expected auto")


def load_engine(name: Engine) -> ModuleType:
    """The module of an engine, imported where used. Those of flex and rows load torch's compiler."""
    engine: ModuleType
    if name == "sdpa":
        from engines import sdpa as engine
    elif name == "triton":
        from engines import triton as engine
    elif name == "flex":
        from engines import flex as engine
    elif name == "dense":
        from engines import dense as engine
    else:
        from engines import rows as engine
    return engine
