"""Attention statistics against those of the dense weights."""

import math

import pytest
import torch
from attention_cases import draw, each_name, make, signals_of, weights_of
from test_model import make_gpt, random_tokens

import model
from lab import attention_statistics
from lab.attention_statistics import STATISTICS, attention_mass, layer_statistics, model_statistics
from model import KVCache
from positions import RopeScaling
from schema import AttentionConfig

NAMES = list(STATISTICS)


def from_dense(weights, unscaled, scores):
    """STATISTICS of (B, H, Tq, Tk) row by row, from the definitions, as means over rows: (B, H, S)."""
    B, H, n_queries, n_keys = weights.shape
    out = torch.zeros(B, H, n_queries, len(STATISTICS), dtype=torch.float64)
    for b, h, r in torch.cartesian_prod(
        torch.arange(B), torch.arange(H), torch.arange(n_queries)
    ).tolist():
        n = n_keys - n_queries + r + 1
        a = weights[b, h, r, :n].abs().double()
        x = scores[b, h, r, :n].double()
        mass = a.sum().item()
        p = (a / mass).tolist() if mass > 1e-30 else [0.0] * n
        entropy = -sum(v * math.log(v) for v in p if v > 0)
        positive = [n - 1 - j for j in range(n) if x[j] > 0]
        far = [n - 1 - j for j in range(n)]
        out[b, h, r] = torch.tensor(
            [
                unscaled[b, h, r, :n].double().std(correction=0),
                x.std(correction=0),
                entropy,
                entropy / math.log(n) if n > 1 else 0.0,
                math.exp(entropy) if mass > 1e-30 else 0.0,
                max(p),
                p[0],
                sum(v < 2**-16 for v in p) / n,
                sum(v * t for v, t in zip(p, far, strict=True)),
                sum(positive) / len(positive) / max(sum(far) / n, 0.5) if positive else 1.0,
            ]
        )
    return out.mean(2)


@each_name
@pytest.mark.parametrize("len_q", [8, 21])
def test_statistics_are_those_of_the_dense_weights(cfg, len_q, monkeypatch):
    """In blocks of 7 rows and the keys that they see, sequence by sequence."""
    normaliser = make(cfg, n_head=2, head_dim=8, train_len=24)
    q, k, _, _ = draw(len_q, 21, head_dim=8, batch=2)
    q = normaliser.norm_heads(4 * q)  # gives small weights for `tiny` to count
    k = normaliser.norm_heads(k)
    blocks = [(slice(b, b + 1), slice(i, min(i + 7, len_q)), slice(21 - len_q + min(i + 7, len_q)))
              for b in range(2) for i in range(0, len_q, 7)]  # fmt: skip
    monkeypatch.setattr(attention_statistics, "query_blocks", lambda *_: blocks)
    with torch.no_grad():
        signals = signals_of(normaliser, q, k)
        found = layer_statistics(normaliser, q, k, signals).double()
        context = normaliser.context(q, k, signals)
        prepared_q, prepared_k = normaliser.prepare(q, k, context)
        scores = normaliser.scores(prepared_q, prepared_k, context)
        expected = from_dense(weights_of(normaliser, q, k), q @ k.mT, scores)
    counts = [NAMES.index("tiny"), NAMES.index("positive_distance")]
    exact = [i for i in range(len(NAMES)) if i not in counts]
    torch.testing.assert_close(found[..., exact], expected[..., exact], atol=2e-4, rtol=2e-4)
    # A weight within rounding of 2^-16, or a score of 0, may fall on either side.
    torch.testing.assert_close(found[..., counts], expected[..., counts], atol=0.02, rtol=0)


def test_distances_tell_attention_to_the_nearest_keys_from_attention_everywhere():
    """Scores that fall with the distance have their positives, and their weight, close to the
    diagonal.
    """
    layer = make(AttentionConfig(normaliser="softmax"), n_head=1, head_dim=2, train_len=64)
    q = torch.tensor([1.0, 0.0]).expand(1, 1, 1, 2)
    near, far = NAMES.index("distance"), NAMES.index("positive_distance")
    even = layer_statistics(layer, q, torch.zeros(1, 1, 64, 2))[0, 0]
    assert even[near] == pytest.approx(31.5) and even[far] == 1  # no score is above 0
    k = torch.zeros(1, 1, 64, 2)
    k[..., 0] = torch.cat((torch.full((56,), -30.0), torch.full((8,), 30.0)))
    diagonal = layer_statistics(layer, q, k)[0, 0]
    assert diagonal[near] == pytest.approx(3.5) and diagonal[far] == pytest.approx(3.5 / 31.5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "lssa"])
def test_layers_see_what_the_model_computes(monkeypatch, name):
    """Each layer's q and k, two heads sharing one of k, are those of the model's own forward pass."""
    gpt = make_gpt({"normaliser": name}, std=0.2, n_kv_head=1)
    tokens = random_tokens(2, 40)
    rope = RopeScaling("ntk")
    seen = []
    real = model.attend

    def attend(q, k, v, *args, **options):
        seen.append((q, k))
        return real(q, k, v, *args, **options)

    monkeypatch.setattr(model, "attend", attend)
    gpt(tokens, rope=rope)
    expected = [
        layer_statistics(block.attention.normaliser, q[:, :, -5:], k)
        for block, (q, k) in zip(gpt.blocks, list(seen), strict=True)
    ]
    got, want = model_statistics(gpt, tokens, rope, n_rows=5), torch.stack(expected, 1)
    torch.testing.assert_close(got, want)


@torch.no_grad()
def test_attention_mass_is_that_of_the_dense_weights():
    """Of the last row of the model's own forward pass; the cache then continues unchanged."""
    gpt = make_gpt({"normaliser": "lssa", "reweight_p": 3}, std=0.2)
    tokens = random_tokens(2, 20)
    rope = RopeScaling("ntk", length=20)
    where = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    cache = KVCache(2, 20)
    gpt(tokens[:, :-1], rope=rope, cache=cache)
    mass = attention_mass(gpt, tokens[:, -1:], rope, cache, where)
    assert cache.length == 19
    tables = gpt.rope(tokens, rope)
    x = gpt.embedding(tokens)
    for i, block in enumerate(gpt.blocks):
        q, k, *_ = block.attention.project(block.attention_norm(x), *tables[i])
        last = block.attention.normaliser.weights(q, k)[:, :, -1]  # (B, H, T)
        torch.testing.assert_close(
            mass[:, i], (last * where[:, None]).sum(-1), atol=1e-5, rtol=1e-4
        )
        x = block(x, *tables[i])
    last = gpt(tokens[:, -1:], rope=rope, cache=cache)[:, -1]
    torch.testing.assert_close(last, gpt(tokens, rope=rope)[:, -1], atol=1e-4, rtol=0)
