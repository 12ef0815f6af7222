"""Around the loop: no garbage collection within a step, and torch's profiler on demand."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def manual_gc() -> Iterator[None]:
    """Collect garbage only on gc.collect(): a rank that collects within a step delays all others.

    What exists before the loop is frozen: scanning all of torch's objects takes 0.1 s and more.
    """
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@contextmanager
def profiler(n_steps: int, path: Path) -> Iterator[Callable[[], None]]:
    """Trace `n_steps` steps after two of warm-up (0: none) to `path`; yields what to call after a step."""
    if not n_steps:
        yield lambda: None
        return

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(path))
        print(f"wrote {path}: {n_steps} steps, for https://ui.perfetto.dev or chrome://tracing", flush=True)

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=n_steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        yield profile.step
