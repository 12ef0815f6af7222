"""Batches for the training loop: a step's micro-batches."""

import torch
from torch import Tensor

from data.batches import train_batch, val_windows
from data.dataset import IGNORED, TokenStream
from infra.cli import UserError
from infra.distributed import World
from schema import Config, TrainConfig

Batch = list[tuple[Tensor, Tensor]]  # micro-batches x, y: (micro, T) int64 each


def open_streams(config: Config) -> tuple[TokenStream, TokenStream]:
    """Training and validation tokens.

    Raises UserError: the data does not fit the model's vocabulary, train.seq_len or
    train.val_tokens.
    """
    seq_len = config.train.seq_len
    train = TokenStream(config.data.dir, "train")
    val = TokenStream(config.data.dir, "val")
    train.check_model(config.model.vocab_size)
    length = train.info.get("sequence_length", seq_len)
    if length != seq_len:
        reason = f"{train.folder} has sequences of {length} tokens"
        raise UserError(f"train.seq_len = {seq_len}: expected {length}; {reason}")
    val_windows(val, config.train.val_tokens, seq_len)  # raises if it is too short
    return train, val


def share_batch(config: TrainConfig, n_processes: int) -> tuple[int, int]:
    """Sequences of a forward pass, and those of a step, of each process.

    Raises UserError: the processes and micro-batches do not divide the batch.
    """
    n_seq = config.batch_tokens // config.seq_len
    per_process = n_seq // n_processes
    if n_seq % n_processes:
        problem = f"{n_seq} sequences cannot be shared by {n_processes} processes"
        raise UserError(f"train.batch_tokens = {config.batch_tokens}: {problem}")
    micro = min(config.micro_batch, per_process)
    if per_process % micro:
        expected = (
            f"expected a divisor of the {per_process} sequences of each of {n_processes} processes"
        )
        raise UserError(f"train.micro_batch = {micro}: {expected}")
    return micro, per_process


class BatchLoader:
    """The micro-batches of this process, which depend on the config and the step only.

    n_seq, per_rank, micro: sequences of a step, those of this process, and those of a forward pass.
    Raises UserError: see `share_batch`.
    """

    def __init__(self, stream: TokenStream, config: Config, world: World) -> None:
        self.stream = stream
        self.config = config
        self.world = world
        self.n_seq = config.train.batch_tokens // config.train.seq_len
        self.micro, self.per_rank = share_batch(config.train, world.size)

    def read(self, step: int) -> Batch:
        """The micro-batches of a step, page-locked for a GPU: their copy then does not block the
        host.
        """
        config = self.config
        arrays = train_batch(
            self.stream, config.data.skip_steps + step, self.n_seq, config.train.seq_len,
            config.data.order, config.seed, self.per_rank * self.world.rank, self.per_rank,
        )  # fmt: skip
        x, y = (torch.from_numpy(each).split(self.micro) for each in arrays)  # (micro, T) each
        if self.world.device.type == "cuda":
            return [(a.pin_memory(), b.pin_memory()) for a, b in zip(x, y, strict=True)]
        return list(zip(x, y, strict=True))

    def loss_weights(self, batch: Batch) -> tuple[list[float], int]:
        """Weights of the micro-batches' mean losses, and the step's targets. A collective if there
        is a mask.

        With a mask the weights are shares of the targets: the mean over ranks is then that over all
        targets.
        """
        if self.stream.mask is None:
            return [1 / len(batch)] * len(batch), self.config.train.batch_tokens
        counts = torch.tensor(
            [int((y != IGNORED).sum()) for _, y in batch], device=self.world.device
        )
        n_targets = max(1, int(self.world.gather(counts.sum()[None]).sum()))
        return [count * self.world.size / n_targets for count in counts.tolist()], n_targets
