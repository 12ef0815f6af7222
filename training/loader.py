"""Batches for the training loop: a step's micro-batches, the next step's read in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from config import Config
from data.batches import train_batch, val_windows
from data.dataset import IGNORED, TokenStream
from infra.cli import UserError
from infra.distributed import World

Batch = list[tuple[Tensor, Tensor]]  # micro-batches x, y: (micro, T) int64 each


def open_streams(config: Config) -> tuple[TokenStream, TokenStream]:
    """Training and validation tokens.

    Raises:
        UserError: the data does not fit the model's vocabulary, train.seq_len or train.val_tokens.
    """
    streams = TokenStream(config.data.dir, "train"), TokenStream(config.data.dir, "val")
    for stream in streams:
        stream.check_model(config.model.vocab_size)
        length = stream.info.get("sequence_length", config.train.seq_len)
        if length != config.train.seq_len:
            raise UserError(
                f"train.seq_len = {config.train.seq_len}: {stream.folder} has sequences of {length} tokens; "
                "expected that length"
            )
    val_windows(streams[1], config.train.val_tokens, config.train.seq_len)  # raises if it is too short
    return streams


def split_batch(config: Config, n_processes: int) -> tuple[int, int]:
    """Sequences per step of each process, and sequences per forward pass.

    Raises:
        UserError: they do not divide the batch.
    """
    n_seq = config.train.batch_tokens // config.train.seq_len
    if n_seq % n_processes:
        raise UserError(
            f"train.batch_tokens = {config.train.batch_tokens}: {n_seq} sequences cannot be shared by "
            f"{n_processes} processes; expected a multiple"
        )
    per_rank = n_seq // n_processes
    micro = min(config.train.micro_batch, per_rank)
    if per_rank % micro:
        raise UserError(
            f"train.micro_batch = {config.train.micro_batch}: expected a divisor of the {per_rank} "
            f"sequences that each of {n_processes} processes has in a step"
        )
    return per_rank, micro


class BatchLoader:
    """The micro-batches of this process, which depend on the config and the step only.

    Attributes:
        per_rank, micro: see `split_batch`.
    """

    def __init__(self, stream: TokenStream, config: Config, world: World) -> None:
        self.stream, self.config, self.world = stream, config, world
        self.per_rank, self.micro = split_batch(config, world.size)
        self._thread = ThreadPoolExecutor(1)
        self._prefetched: dict[int, Future[Batch]] = {}

    def take(self, step: int) -> Batch:
        """The micro-batches of a step; starts reading those of the next one."""
        future = self._prefetched.get(step) or self._thread.submit(self.read, step)
        self._prefetched = {step + 1: self._thread.submit(self.read, step + 1)}
        return future.result()

    def read(self, step: int) -> Batch:
        """The micro-batches of a step, page-locked for a GPU: their copy then does not block the host."""
        config, on_gpu = self.config, self.world.device.type == "cuda"
        n_seq, begin = self.per_rank * self.world.size, self.per_rank * self.world.rank
        batch = []
        for first in range(begin, begin + self.per_rank, self.micro):
            arrays = train_batch(
                self.stream, config.data.skip_steps + step, n_seq, config.train.seq_len,
                config.data.order, config.seed, first, count=self.micro,
            )  # fmt: skip
            x, y = (torch.from_numpy(a) for a in arrays)
            batch.append((x.pin_memory(), y.pin_memory()) if on_gpu else (x, y))
        return batch

    def loss_weights(self, batch: Batch) -> list[float]:
        """Weights of the micro-batches' mean losses. A collective if the data has a mask.

        With a mask they are shares of the targets: the mean over ranks is then that over all targets.
        """
        if self.stream.mask is None:
            return [1 / len(batch)] * len(batch)
        counts = torch.tensor([int((y != IGNORED).sum()) for _, y in batch], device=self.world.device)
        n_targets = int(self.world.gather(counts.sum()[None]).sum())
        return [count * self.world.size / n_targets for count in counts.tolist()]

    def describe(self, step: int) -> str:
        """Where a step's batch is in the data, for messages."""
        n_seq, order = self.per_rank * self.world.size, self.config.data.order
        last = (step + 1) * n_seq - 1
        return f"sequences {step * n_seq} to {last} of the data in {order} order, {self.per_rank} per rank"
