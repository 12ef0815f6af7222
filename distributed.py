"""This process among the processes that torchrun started, or alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from config import UserError


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
        UserError: no CUDA device though one was asked for, or fewer than processes.
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
    if size > 1:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    try:
        yield World(rank, size, torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"))
    finally:
        if size > 1:
            dist.destroy_process_group()
