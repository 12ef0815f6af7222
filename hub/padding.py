"""Batches padded on the left or right: each sequence is computed as it is without its padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention import ChosenEngine, attend
from infra.cli import UserError
from model import KVCache
from normalisers.layer import NormaliserLayer
from schema import Engine

Spans = Sequence[tuple[int, int]]  # of each sequence, the positions [start, stop) of its real keys


def mask_spans(mask: Tensor) -> list[tuple[int, int]] | None:
    """The spans of a padding mask (B, Tk), nonzero at real keys. None: no padding.

    Raises:
        UserError: padding between real keys.
    """
    real = mask.bool().cpu()
    starts = real.int().argmax(1)
    stops = starts + real.sum(1)
    places = torch.arange(real.shape[1])
    if not real.equal((places >= starts[:, None]) & (places < stops[:, None])):
        raise UserError(
            "attention_mask: has zeros between ones; expected padding on the left or right only"
        )
    return None if real.all() else list(zip(starts.tolist(), stops.tolist(), strict=True))


def attend_spans(
    spans: Spans | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: NormaliserLayer,
    engine: ChosenEngine | Engine = "auto",
    signals: Tensor | None = None,
    normed: bool = False,
    first: Tensor | None = None,
) -> Tensor:
    """`attention.attend` of sequences with the same span together.

    n counts real keys only. Padding gets zeros.
    """
    if spans is None:
        return attend(q, k, v, layer, engine, signals, normed, first)
    out = v.new_zeros(*q.shape[:-1], v.shape[-1])
    n_before = k.shape[-2] - q.shape[-2]
    for start, stop in set(spans):
        sequences = [b for b, span in enumerate(spans) if span == (start, stop)]
        queries = slice(max(start - n_before, 0), max(stop - n_before, 0))
        keys = slice(start, stop)
        if queries.start < queries.stop:
            real = q[sequences, :, queries], k[sequences, :, keys], v[sequences, :, keys]
            read = None if signals is None else signals[sequences, :, keys]
            own = None if first is None else (first[sequences, keys] - start).clamp_min(0)
            out[sequences, :, queries] = attend(*real, layer, engine, read, normed, own)
    return out


class PaddedCache(KVCache):
    """A cache for sequences with `spans`; None: without padding."""

    spans: Spans | None = None

    def attend(self, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]  # `self`
        return attend_spans(self.spans, *args, **options)

    def keys_before(self, k: Tensor) -> Tensor:
        before = super().keys_before(k)
        for sequence, (first, _) in enumerate(self.spans or ()):
            before[sequence, :, first] = 0
        return before
