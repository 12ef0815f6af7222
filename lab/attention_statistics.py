"""Statistics of a trained model's attention weights, for each layer and head.

A row with weights A over its n visible keys has p = |A| / sum |A| (A itself, for a softmax). The
weights are those of the normaliser's definition, in blocks of rows: O(block * T) memory.
"""

import torch
from torch import Tensor

from engines.rows import block_scores, query_blocks
from model import GPT, KVCache
from normalisers.base import l1_normalise, share_heads
from normalisers.layer import NormaliserLayer
from positions import UNSCALED, RopeScaling

STATISTICS = {
    "qk_std": "standard deviation over the visible keys of q.k, or of the cosine (NormSoftmax, Figure 2a)",
    "score_std": "standard deviation over the visible keys of the scores, without a bias by distance",
    "entropy": "entropy of p in nats",
    "relative_entropy": "entropy over ln n: 1 is a uniform row, 0 a row on one key",
    "effective_keys": "exp(entropy): the number of keys whose uniform weights have the same entropy",
    "largest": "largest p",
    "first_token": "p of the first token of the document, the attention sink",
    "tiny": "share of the visible keys with p < 2^-16",
    "distance": "distance of a key, in tokens, as a mean weighted by p",
    "positive_distance": "mean distance of the keys with a positive score over that of all visible keys",
}
TINY = 2.0**-16


@torch.no_grad()
def model_statistics(
    model: GPT, tokens: Tensor, rope: RopeScaling = UNSCALED, n_rows: int = 0
) -> Tensor:
    """STATISTICS of tokens (B, T), as means over their last `n_rows` rows, 0: all.

    Returns: (B, n_layer, n_head, len(STATISTICS)) float32.
    """
    layers = model.attention_inputs(tokens, rope)
    of_layers = [
        layer_statistics(each, q[:, :, -n_rows:], k, *rest) for each, q, k, *rest in layers
    ]
    return torch.stack(of_layers, dim=1)


def layer_statistics(
    normaliser: NormaliserLayer,
    q: Tensor,
    k: Tensor,
    signals: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Means over the rows of q (B, H, Tq, D), the last positions of k (B, H, Tk, D), as
    `Attention.project` gives them.

    A row of zero weights has entropy 0 and 0 effective keys. A row without positive scores has
    positive_distance 1, that of positive scores anywhere. Returns: (B, H, len(STATISTICS)).
    """
    with torch.autocast(q.device.type, enabled=False):
        unscaled_q = q.float()
        unscaled_k = share_heads(k, q).float()
        context = normaliser.context(q, k, signals, first)
        q, k = normaliser.prepare(q, k, context)
        total = q.new_zeros(*q.shape[:2], len(STATISTICS))
        for batch, block, keys in query_blocks(q, k, normaliser, context):
            unscaled = unscaled_q[batch, :, block] @ unscaled_k[batch, :, keys].mT  # (b, H, R, K)
            x, block_context, *_ = block_scores(q, k, normaliser, context, batch, block, keys)
            hidden = ~block_context.visible(x)
            weights = normaliser.row_weights(x, block_context)
            mass = l1_normalise(weights.abs())  # (b, H, R, K)
            n = block_context.n.squeeze(-1)  # (R,), or (b, 1, R) with documents
            distance = block_context.distance(x)  # (R, K)
            positive = l1_normalise((~hidden & (x > 0)).to(x.dtype))
            nearness = (positive * distance).sum(-1) / ((n - 1) / 2).clamp_min(0.5)
            first_key = -(keys.start or 0) if block_context.first is None else block_context.first
            is_first = torch.arange(x.shape[-1], device=x.device) == first_key
            entropy = -torch.xlogy(mass, mass).sum(-1)
            rows = {
                "qk_std": block_context.moments(unscaled)[1].sqrt().squeeze(-1),
                "score_std": block_context.moments(x)[1].sqrt().squeeze(-1),
                "entropy": entropy,
                "relative_entropy": entropy / n.clamp_min(2).log(),  # 0 for a row of one key
                "effective_keys": torch.where((mass > 0).any(-1), entropy.exp(), 0.0),
                "largest": mass.amax(-1),
                "first_token": (mass * is_first).sum(-1),
                "tiny": (~hidden & (mass < TINY)).sum(-1) / n,
                "distance": (mass * distance).sum(-1),
                "positive_distance": torch.where((positive > 0).any(-1), nearness, 1.0),
            }
            # (b, H, S)
            total[batch] += torch.stack([rows[key].sum(-1) for key in STATISTICS], dim=-1)
        return total / q.shape[-2]


@torch.no_grad()
def attention_mass(
    model: GPT, token: Tensor, rope: RopeScaling, cache: KVCache, where: Tensor
) -> Tensor:
    """Sum of p over the keys `where` (B, n) in the row of token (B, 1), which follows the n - 1
    cached ones.

    The cache's length does not change. Returns: (B, n_layer, n_head) float32.
    """
    layers = []
    for normaliser, q, keys, *rest in model.attention_inputs(token, rope, cache):
        with torch.autocast(q.device.type, enabled=False):
            context = normaliser.context(q, keys, *rest)
            weights = normaliser.dense_weights(q, keys, context)[:, :, 0]
        layers.append((l1_normalise(weights.abs()) * where[:, None]).sum(-1))  # (B, H, n) -> (B, H)
    return torch.stack(layers, dim=1)
