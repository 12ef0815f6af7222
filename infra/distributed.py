"""This process among those that torchrun started, or alone, and the signals that ask it to stop."""

import atexit
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, by DDP, its functions keep the group as a default
from torch import Tensor

from infra.cli import UserError, launched

# Parts of gloo's and NCCL's messages when a peer process has exited.
PEER_EXITED = ("Connection closed by peer", "Connection reset by peer", "connectFullMesh failed",
               "Timed out waiting", "ncclRemoteError", "remote process exited")  # fmt: skip
TIMEOUT = timedelta(minutes=30)  # of a collective: a rank may evaluate or write for long
_KEPT_GROUPS: list[Any] = []  # process groups kept until `_free_groups` (see `join_world`)


@dataclass(frozen=True)
class World:
    """Rank, number of processes, and the device of this process."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, values: Tensor) -> Tensor:
        """The values (k,) of every process, as (size, k) float64 in host memory: one collective,
        one sync.
        """
        every = values.double().repeat(self.size, 1)
        if self.size > 1:
            dist.all_gather(list(every), every[self.rank].clone())
        return every.cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """A picklable value of every process, by rank."""
        every = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(every, value)
        return every

    def agree(self, value: Any) -> bool:
        """Whether all processes pass the same picklable value."""
        return all(other == value for other in self.gather_objects(value))


def choose_device(device: str) -> torch.device:
    """The CPU, or the GPU with this process's local rank. auto is cuda where there is one.

    Raises UserError: no CUDA device, or fewer than processes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no CUDA device; expected cpu or auto")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    n_processes = launched("LOCAL_WORLD_SIZE", 1)
    n_gpus = torch.cuda.device_count()
    if n_processes > n_gpus:
        raise UserError(
            f"torchrun --nproc_per_node={n_processes}: expected at most {n_gpus}, the GPUs here"
        )
    return torch.device("cuda", launched("LOCAL_RANK", 0))


def open_store() -> dist.Store:
    """torchrun's store, with keys of this start alone.

    torchrun keeps one store over its restarts (PyTorch issue 135712). Without keys of its own a
    start connects to addresses of the processes before it. The number of restarts tells starts
    apart on one machine. Several machines count them differently.

    Raises UserError: restarts on several machines that share one store.
    """
    n_machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    max_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    has_new_stores = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
    if n_machines != "1" and max_restarts != "0" and not has_new_stores:
        problem = f"torchrun --max-restarts={max_restarts} on {n_machines} machines"
        new_stores = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in each environment"
        raise UserError(f"{problem}: expected --rdzv-backend=c10d, and {new_stores}")
    store: dist.Store = next(dist.rendezvous("env://"))[0]
    start = f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return store if has_new_stores else dist.PrefixStore(start, store)


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the processes that torchrun started, if it did, for the duration of a with block.

    Raises UserError: see `choose_device` and `open_store`; or another process exited during a
    collective.
    """
    size = launched("WORLD_SIZE", 1)
    rank = launched("RANK", 0)
    own_device = choose_device(device)
    use_cuda = own_device.type == "cuda"
    if use_cuda:
        torch.cuda.set_device(own_device)
    else:
        # weights below e^-87, of FoX's far keys, cost a CPU most of its time
        torch.set_flush_denormal(True)
    failed = True
    try:
        if size > 1:
            if "TORCHELASTIC_RUN_ID" not in os.environ:  # no torchrun
                line = (
                    f"process {rank} of {size} waits for the others; to run alone: unset WORLD_SIZE"
                )
                print(line, file=sys.stderr, flush=True)
            backend = "nccl" if use_cuda else "gloo"
            dist.init_process_group(
                backend, store=open_store(), rank=rank, world_size=size, timeout=TIMEOUT,
                device_id=own_device if use_cuda else None,
            )  # fmt: skip
        yield World(rank, size, own_device)
        failed = False
    except RuntimeError as e:
        reason = next((part for part in PEER_EXITED if part in str(e)), "")
        if size > 1 and reason:
            raise UserError(
                f"another process exited ({reason}): see its error, if it had one"
            ) from None
        if isinstance(e, dist.DistNetworkError | dist.DistStoreError):  # nobody is there
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            reason = str(e).splitlines()[0]
            raise UserError(
                f"MASTER_ADDR:MASTER_PORT = {address}: {reason}; to run alone: unset WORLD_SIZE"
            ) from None
        raise
    finally:
        # NCCL would wait for the other ranks, which wait for this one, before its error is printed.
        if dist.is_initialized() and not (failed and use_cuda):
            # If DDP's reducer held the last reference, it would free the group while holding the
            # GIL, and wait for gloo's threads, which need the GIL to free the tensors of the last
            # collective.
            _KEPT_GROUPS.append(dist.group.WORLD)
            dist.destroy_process_group()


@atexit.register
def _free_groups() -> None:
    """End gloo's threads: one that asks for the GIL while the interpreter shuts down aborts the
    process.
    """
    gc.unfreeze()
    gc.collect()  # DDP's reducers
    _KEPT_GROUPS.clear()  # the last reference of a group: it waits without the GIL


class StopSignals:
    """Records SIGTERM, SIGINT, SIGUSR1 (SLURM's warning) and SIGHUP for the duration of a with
    block.

    SIGHUP (the terminal closes) is recorded unless it is ignored, as under nohup.
    A second SIGINT raises KeyboardInterrupt if it arrives a second or more after the first, because
    torchrun forwards Ctrl-C to processes that may have received it from the terminal. It does not
    forward SIGUSR1.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.number = 0  # of the first signal received
        self._interrupted = 0.0  # time of the first SIGINT

    def __enter__(self) -> Self:
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._before = {n: signal.signal(n, self._handle) for n in self.SIGNALS if n not in ignored}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            self._interrupted = self._interrupted or time.monotonic()
            if time.monotonic() - self._interrupted > 1:
                raise KeyboardInterrupt

    @staticmethod
    def name_of(number: int) -> str | None:
        return signal.Signals(number).name if number else None
