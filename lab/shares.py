"""Shares of successes, with their confidence intervals."""

import math

Share = dict[str, float]  # share, low, high


def proportion(successes: float, n: int) -> Share:
    """The share with its 95 % confidence interval (Wilson 1927), which is not empty at 0 and 1
    either.
    """
    share = successes / n
    z2 = 1.959964**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = 1 / (1 + z2 / n) * math.sqrt(z2 * share * (1 - share) / n + z2 * z2 / (4 * n * n))
    return {"share": share, "low": max(0.0, centre - half), "high": min(1.0, centre + half)}


def percent(value: Share) -> str:
    """A share as '62.5 % [54.0, 70.2]'."""
    share, low, high = (100 * value[key] for key in ("share", "low", "high"))
    return f"{share:.1f} % [{low:.1f}, {high:.1f}]"
