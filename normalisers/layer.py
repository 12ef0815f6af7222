"""A normaliser with its parameters, as the layers of a model own it and every engine receives it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normalisers.base import Normaliser, RowContext, reweight
from positions import SCORE_BIASES

# The triton engine's largest head sizes: beyond, tiles fit neither registers nor shared memory.
FUSED_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}


class NormaliserModule(nn.Module):
    """A normaliser for one attention layer, with its learned parameters (`learned_names`: s, b, p_n, ...).

    Args:
        definition: the formula and its options.
        reweight_p: power of the re-weighting; 0: none.
        n_head, head_dim: of the layer.
        train_len: training length in tokens (L in the formulas that use it).
        position: `model.position`, which may bias the scores (`positions.SCORE_BIASES`).
    """

    def __init__(
        self,
        definition: Normaliser,
        reweight_p: int,
        n_head: int,
        head_dim: int,
        train_len: int,
        position: str = "rope",
    ) -> None:
        super().__init__()
        self.definition, self.reweight_p, self.position = definition, reweight_p, position
        self.n_head, self.head_dim, self.train_len = n_head, head_dim, train_len
        # When decoding re-weighted rows of n keys, weights below skip_mass / n of the row's largest count as
        # 0: less than skip_mass of the row together, so that o changes by less than skip_mass max |v|.
        self.skip_mass = 0.0
        self.learned_names = []
        for name, value in definition.learned(n_head, train_len).items():
            self.register_parameter(name, nn.Parameter(value))
            self.learned_names.append(name)

    def weights(self, q: Tensor, k: Tensor, cached: bool = False) -> Tensor:
        """The dense weights, by definition.

        Args:
            q, k: (B, H, Tq, D) and (B, n_kv_head, Tk, D) after RoPE; the queries are the last Tq positions.
            cached: k comes from `cache_keys`.
        Returns:
            (B, H, Tq, Tk) in float32 (float64 for float64 inputs), 0 at keys after the query.
        """
        with torch.autocast(q.device.type, enabled=False):
            q, k, context = self.prepare(q, k, cached)
            x = q @ k.mT  # (B, H, Tq, Tk)
            return self.row_weights(x.masked_fill(~context.visible(x), -math.inf), context)

    def row_weights(self, x: Tensor, context: RowContext) -> Tensor:
        """Scores (..., R, K), -inf at hidden keys, to weights: the formula, then the re-weighting."""
        if self.by_distance:
            head = torch.arange(self.n_head, device=x.device)[:, None, None]
            x = self.at_distance(x, context.distance(x), head)
        a = self.definition.weights(x, context)
        return reweight(a, context.n, self.reweight_p) if self.reweight_p else a

    @property
    def by_distance(self) -> bool:
        """The weights depend on the keys' distances: the sdpa and triton engines cannot run it."""
        return self.position in SCORE_BIASES or self.definition.by_distance

    def at_distance(self, x: Tensor, t: Tensor, head: Tensor) -> Tensor:
        """The scores x of a head's keys at distance t, t and head expanding to x's shape."""
        x = self.definition.at_distance(x, t)
        bias = SCORE_BIASES.get(self.position)
        return x if bias is None else x + bias(t, head, self.n_head)

    @property
    def has_sdpa(self) -> bool:
        """softmax over queries rescaled by a row factor: the sdpa engine can run it."""
        return self.definition.is_rescaled_softmax and not (self.reweight_p or self.by_distance)

    @property
    def has_flex(self) -> bool:
        """softmax of scores that depend on the distance: the flex engine can run it."""
        return self.definition.is_softmax and self.by_distance and not self.reweight_p

    @property
    def is_fusible(self) -> bool:
        """phi(x) over its row sum or a fixed number, re-weighted or not: the triton engine can run it."""
        return self.definition.is_fusible and not self.by_distance

    def cache_keys(self, k: Tensor) -> Tensor:
        """k as a KV cache holds it: l2-normalised for cosine scores, once instead of in every step."""
        if self.definition.scores != "cosine":
            return k
        return F.normalize(k.to(torch.promote_types(k.dtype, torch.float32)), dim=-1).to(k.dtype)

    def prepare(self, q: Tensor, k: Tensor, cached: bool = False) -> tuple[Tensor, Tensor, RowContext]:
        """q and k in float32 (or float64), (B, H, T, D), rescaled so that their products are the scores."""
        context = self.context(q, k)
        q, k = self.as_float(q, k, cached)
        return q * self.definition.factor(context), share_heads(k.to(q.dtype), q), context

    def as_float(self, q: Tensor, k: Tensor, cached: bool = False) -> tuple[Tensor, Tensor]:
        """q and k in float32 (or float64), l2-normalised or centred as the formula needs.

        k in its own type where nothing is left to do: from a cache, not centred.
        """
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        if not cached:
            k = k.to(q.dtype)
        if self.definition.scores == "cosine":
            q, k = F.normalize(q, dim=-1), k if cached else F.normalize(k, dim=-1)
        if self.definition.centre_keys:
            k = k.to(q.dtype)
            k = k - k[..., :1, :]
        return q, k

    def context(self, q: Tensor, k: Tensor) -> RowContext:
        """The `RowContext` of queries (..., Tq, D) that are the last of the Tk positions of the keys."""
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        if n_queries > n_keys:
            raise ValueError(f"{n_queries} queries for {n_keys} keys: expected at most as many")
        n = torch.arange(n_keys - n_queries + 1, n_keys + 1, dtype=dtype, device=q.device)[:, None]
        return RowContext(n, n_keys, self.train_len, self.head_dim, self.learned(dtype))

    def learned(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Learned parameters, those per head as (H, 1, 1) to broadcast against (B, H, R, K)."""
        values = {name: getattr(self, name).to(dtype) for name in self.learned_names}
        return {name: v if name == "p_n" else v[:, None, None] for name, v in values.items()}


def share_heads(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, n_kv_head, T, D) as q's H heads see them, (B, H, T, D): copied if n_kv_head < H.

    Head h of q belongs to head h // (H / n_kv_head) of t (grouped-query attention, Ainslie et al. 2023).
    """
    group, rest = divmod(q.shape[1], t.shape[1])
    if rest:
        raise ValueError(f"{q.shape[1]} heads of queries for {t.shape[1]} of keys: expected a multiple")
    return t if group == 1 else t.repeat_interleave(group, dim=1)
