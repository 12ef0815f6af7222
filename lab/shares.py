"""Shares of successes, with their confidence intervals."""

import math

Share = dict[str, float]  # share, low, high


def proportion(successes: float, n: int) -> Share:
    """The share with its 95 % confidence interval (Wilson 1927), which is not empty at 0 and 1 either."""
    share = successes / n
    z2 = 1.959964**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = 1 / (1 + z2 / n) * math.sqrt(z2 * share * (1 - share) / n + z2 * z2 / (4 * n * n))
    return {"share": share, "low": max(0.0, centre - half), "high": min(1.0, centre + half)}


def percent(value: Share, digits: int = 1) -> str:
    """A share as '62.5 % [54.0, 70.2]'."""
    return "{share:.{0}f} % [{low:.{0}f}, {high:.{0}f}]".format(
        digits, **{k: 100 * v for k, v in value.items()}
    )
