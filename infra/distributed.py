"""This process among the processes that torchrun started, or alone, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from infra.cli import UserError

# What gloo and NCCL say when the process at the other end is gone.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "connectFullMesh failed", "Timed out waiting"),
    *("ncclRemoteError", "remote process exited"),
)
GLOO_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class World:
    """Rank, number of processes, and the device that this one computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor summed over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, values: Tensor) -> Tensor:
        """The values (k,) of every process, as (size, k) float64 in main memory: one collective, one wait."""
        mine = values.double()
        if self.size == 1:
            return mine[None].cpu()
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return torch.stack(every).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """A picklable value of every process, in the order of ranks."""
        every = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(every, value)
        return every

    def agree(self, number: int) -> bool:
        """Whether all processes name the same number."""
        ends = torch.tensor([number, -number], device=self.device)
        if self.size > 1:
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        return bool(ends[0] == -ends[1])


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the other processes, if torchrun started us, for the length of a with block.

    Args:
        device: "cpu", "cuda", or "auto": cuda where there is one.
    Raises:
        UserError: no CUDA device though one was asked for, or fewer than processes; another process ended
            while this one waited for it.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no CUDA device; expected cpu or auto")
    use_cuda = torch.cuda.is_available() and device != "cpu"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if use_cuda and here > torch.cuda.device_count():
        raise UserError(
            f"torchrun started {here} processes on a machine with {torch.cuda.device_count()} GPUs; "
            "expected --nproc_per_node to be at most that"
        )
    if use_cuda:
        torch.cuda.set_device(local_rank)
    try:
        if size > 1:
            # gloo waits half an hour by default for a process that has died while all were being connected.
            dist.init_process_group(
                "nccl" if use_cuda else "gloo", timeout=None if use_cuda else GLOO_TIMEOUT
            )
        yield World(rank, size, torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"))
    except RuntimeError as e:
        if size > 1 and any(words in str(e) for words in LOST):
            reason = str(e).strip().splitlines()[0][-160:]
            raise UserError(
                f"another process has ended ({reason}); what it said before is the cause"
            ) from None
        raise
    finally:
        if size > 1:
            dist.destroy_process_group()


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 (SLURM's warning) as a wish to stop, for the length of a with block.

    A second SIGINT, a second or more after the first, stops at once, by KeyboardInterrupt: torchrun forwards
    Ctrl-C to processes that the terminal may have told already. torchrun does not forward SIGUSR1.

    Attributes:
        number: of the signal that came, or 0.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.number = 0
        self._interrupted: float | None = None  # when the first SIGINT came
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > 1:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        self.number = self.number or number

    @staticmethod
    def name_of(number: int) -> str | None:
        return signal.Signals(number).name if number else None
