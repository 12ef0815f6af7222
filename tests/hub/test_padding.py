"""hub/padding.py: in a padded batch each sequence is as it is without the padding."""

import pytest
import torch

from attention import attend, make_normaliser
from hub.padding import PaddedCache, attend_spans
from model import GPT
from schema import AttentionConfig, Config


@pytest.mark.parametrize("n_queries", [9, 1, 4])
@pytest.mark.parametrize(
    "options", [{"normaliser": "lssa", "reweight_p": 3}, {"normaliser": "ssmax"}], ids=str
)
def test_padded_sequences_are_computed_alone(options, n_queries):
    """With spans of real keys: each sequence's rows are its own without padding, padding gives
    zeros.
    """
    normaliser = make_normaliser(AttentionConfig(**options), n_head=4, head_dim=8, train_len=16)
    k, v = torch.randn(4, 2, 9, 8, requires_grad=True), torch.randn(4, 2, 9, 8)
    q = torch.randn(4, 4, n_queries, 8)
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [1] * 5 + [0] * 4, [0] * 9])
    spans = [(0, 9), (3, 9), (0, 5), (0, 0)]
    for engine in ("dense", "auto"):
        out = attend_spans(spans, q, k, v, normaliser, engine)
        for b, real in enumerate(mask.bool()):
            ours = out[b, :, real[-n_queries:]]
            assert not out[b, :, ~real[-n_queries:]].any()
            if ours.shape[1]:
                rows = q[b : b + 1, :, real[-n_queries:]]
                alone = attend(
                    rows, k[b : b + 1, :, real], v[b : b + 1, :, real], normaliser, engine
                )
                torch.testing.assert_close(ours, alone[0], rtol=1e-5, atol=1e-6)
        (dk,) = torch.autograd.grad(out.sum(), k)
        assert not dk.transpose(1, 2)[~mask.bool()].any()


@pytest.mark.parametrize(("key_shift", "documents"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("normaliser", ["softmax", "fox"])
def test_a_padded_batch_gives_each_sequences_own_logits(normaliser, key_shift, documents):
    """No key of the padding is counted, summed by a gate, or shifted into a sequence."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 61}
    model = sizes | {"position": "none", "key_shift": key_shift}
    train = {"seq_len": 16, "batch_tokens": 64, "micro_batch": 4, "dtype": "float32"}
    config = Config(
        name="x",
        model=model,
        attention={"normaliser": normaliser},
        data={"documents": documents},
        train=train,
    )
    gpt = GPT(config).double()
    if gpt.end_of_text is not None:
        gpt.end_of_text.fill_(7)
    for p in gpt.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)
    tokens = torch.randint(61, (2, 24))
    tokens[:, 15] = 7
    cache = PaddedCache(n_layer=1, max_length=24)
    cache.spans = [(0, 24), (5, 24)]
    with torch.no_grad():
        padded = gpt(tokens, cache=cache)
        torch.testing.assert_close(padded[0], gpt(tokens)[0], atol=1e-9, rtol=0)
        torch.testing.assert_close(padded[1, 5:], gpt(tokens[1:, 5:])[0], atol=1e-9, rtol=0)
