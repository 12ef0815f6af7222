"""What the benchmarks print of their times: the median of ratios within rounds, and their range."""

import statistics
import time
from collections.abc import Callable, Iterable


def seconds(fn: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    fn()
    return clock() - start


def ratio(ours: Iterable[float], base: Iterable[float]) -> str:
    """How many times the base's: median (range), each value over the base's of the same round."""
    ratios = sorted(a / b for a, b in zip(ours, base, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def print_row(*cells: object) -> None:
    """A line of a table, as soon as it is measured."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(*columns: str) -> None:
    print_row(*columns)
    print(f"|---|{'---:|' * (len(columns) - 1)}", flush=True)
