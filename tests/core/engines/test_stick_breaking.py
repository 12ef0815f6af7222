"""The stick_breaking engine's call of its package: scale, grouped heads, fewer queries than keys.

The package's kernels need a GPU. In their place stands their formula, from the authors' text (eqs. 1 to 3).
"""

import sys
import types

import pytest
import torch
from attention_cases import assert_close, draw, make, run

from engines import self_check, stick_breaking
from schema import AttentionConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OPTIONS = [{}, {"scores": "cosine", "scale": "learned", "length_scale": "ln_n"}]


def sb_attn(q, k, v, inv_temp):
    assert q.shape == k.shape == v.shape and all(t.is_contiguous() for t in (q, k, v))
    beta = torch.sigmoid(q @ k.mT * inv_temp).tril(-1)
    rest = torch.cat([1 - beta, torch.ones_like(beta[..., :1])], -1)[..., 1:].flip(-1).cumprod(-1).flip(-1)
    weights = beta * rest
    return weights @ v, 1 - weights.sum(-1)


@pytest.fixture
def package(monkeypatch):
    module = types.ModuleType("stickbreaking_attention")
    module.sb_attn = sb_attn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(stick_breaking, "find_spec", sys.modules.get)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(37, 37), (20, 37), (1, 37)])
def test_agrees_with_the_definition(options, shape, package, monkeypatch):
    layer = make(AttentionConfig(normaliser="stick_breaking", **options), 4, 16, 64).double()
    q, k, v, do = (t.double() for t in draw(*shape, 16, batch=2, n_head=4))
    inputs = (q, k[:, :2], v[:, :2], do)
    want = run("dense", layer, *inputs)
    monkeypatch.setattr(stick_breaking, "problem", lambda *where: "")
    assert_close(run("stick_breaking", layer, *inputs), want, inputs, 1e-12, "float64")
    assert self_check.engine_error(stick_breaking, layer.float(), CPU, torch.float32) < 1e-5


def test_problems(package, monkeypatch):
    layer = make(AttentionConfig(normaliser="stick_breaking"), 4, 16, 64)
    assert not stick_breaking.problem(layer, CUDA, torch.bfloat16)
    assert "needs a CUDA device, found cpu" in stick_breaking.problem(layer, CPU, torch.bfloat16)
    assert "in bfloat16, not in torch.float32" in stick_breaking.problem(layer, CUDA, torch.float32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "in any order" in stick_breaking.problem(layer, CUDA, torch.bfloat16)
    monkeypatch.undo()
    layer.window = 8
    assert "has a window" in stick_breaking.problem(layer, CUDA, torch.bfloat16)
    layer.window = 0
    layer.position = "pope"
    assert "wider in q and k" in stick_breaking.problem(layer, CUDA, torch.bfloat16)
    layer.position = "rope"
    softmax = make(AttentionConfig(normaliser="softmax"), 4, 16, 64)
    assert "is not stick-breaking" in stick_breaking.problem(softmax, CUDA, torch.bfloat16)
    if not stick_breaking.find_spec("stickbreaking_attention"):
        assert "is not installed" in stick_breaking.problem(layer, CUDA, torch.bfloat16)
