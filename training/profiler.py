"""Traces of training steps, for https://ui.perfetto.dev or chrome://tracing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def profiler(n_steps: int, path: Path) -> Iterator[Callable[[], None]]:
    """Trace `n_steps` steps to `path` after two of warm-up. 0 traces none.

    Yields what to call after each step.
    """
    if not n_steps:
        yield lambda: None
        return

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(path))
        print(f"wrote {path}: {profile.step_num - 2} steps, for https://ui.perfetto.dev", flush=True)

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=n_steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        yield profile.step
