"""data.documents: a query sees its own document alone, in attention, model, training and decoding."""

import itertools

import pytest
import torch
from attention_cases import attend, draw, each_case, each_name, make
from conftest import slow

from attention import make_normaliser

SIZES = ([7, 1, 13, 2, 71, 3], [97], [96, 1])  # of the documents of three sequences


def first_keys(sizes):
    """`first` of `attend`: (B, T)."""
    rows = []
    for of_sequence in sizes:
        starts = torch.tensor([0, *itertools.accumulate(of_sequence)][:-1])
        rows.append(starts.repeat_interleave(torch.tensor(of_sequence)))
    return torch.stack(rows)


def one_by_one(q, k, v, layer):
    """`attend` of each document of `SIZES` alone, by definition."""
    outputs = []
    for b, sizes in enumerate(SIZES):
        parts = zip(*(t[b : b + 1].split(sizes, dim=2) for t in (q, k, v)), strict=True)
        outputs.append(torch.cat([attend(*part, layer, "dense") for part in parts], dim=2))
    return torch.cat(outputs)


def gradients(run, leaves, layer, do):
    parameters = list(layer.parameters())
    inputs = [*leaves, *parameters]
    out = run(*leaves, layer)
    grads = torch.autograd.grad(out, inputs, do, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def check_documents(cfg, place):
    """o, dq, dk, dv and the parameters' gradients, with grouped heads, and the last queries alone."""
    layer = make_normaliser(cfg, 4, 8, 97, *place)
    layer.load_state_dict(make(cfg, n_head=4, head_dim=8, train_len=97).state_dict())
    layer = layer.double()
    first = first_keys(SIZES)
    q, k, v, do = draw(97, 97, 8, batch=3, n_head=4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k[:, :2], v[:, :2])]
    expected = gradients(one_by_one, leaves, layer, do)
    for engine in ("dense", "rows", "auto"):
        found = gradients(
            lambda *args, engine=engine: attend(*args, engine, first=first), leaves, layer, do
        )
        for n_queries in (30, 1):
            with torch.no_grad():
                last = attend(q[:, :, -n_queries:], k[:, :2], v[:, :2], layer, engine, first=first)
            found.append(last)
            expected.append(expected[0][:, :, -n_queries:])
        for ours, alone in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, alone, atol=1e-10, rtol=1e-10)
        del expected[-2:]


@each_case
def test_each_document_is_computed_alone(cfg):
    check_documents(cfg, ("none", 0))


@each_name
@pytest.mark.parametrize("place", [("none", 5), ("alibi", 0), *slow(("alibi", 5))], ids=str)
def test_documents_with_windows_and_alibi(cfg, place):
    check_documents(cfg, place)


@each_name
def test_a_window_of_one_document_has_the_same_bits(cfg):
    layer = make(cfg, n_head=2, head_dim=8, train_len=97)
    q, k, v, do = draw(97, 97, 8, batch=2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    first = torch.zeros(2, 97, dtype=torch.int64)
    for engine in ("dense", "rows", "auto"):
        pairs = [
            gradients(lambda *args, e=engine, f=each: attend(*args, e, first=f), leaves, layer, do)
            for each in (None, first)
        ]
        for without, with_documents in zip(*pairs, strict=True):
            assert torch.equal(without, with_documents)
