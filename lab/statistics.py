"""What lab.diagnose measures in a row of weights A over n visible keys. p = |A| / sum |A|."""

STATISTICS = {
    "qk_std": "standard deviation over the visible keys of q.k, unscaled (NormSoftmax, Figure 2a)",
    "score_std": "standard deviation over the visible keys of the scores, without a bias by distance",
    "entropy": "entropy of p in nats",
    "relative_entropy": "entropy over ln n: 1 is a uniform row, 0 a row on one key",
    "effective_keys": "exp(entropy): the number of keys whose uniform weights have the same entropy",
    "largest": "largest p",
    "first_token": "p of the first token, the attention sink",
    "tiny": "share of the visible keys with p < 2^-16",
    "distance": "distance of a key, in tokens, as a mean weighted by p",
    "positive_distance": "mean distance of the keys with a positive score over that of all visible keys",
}
