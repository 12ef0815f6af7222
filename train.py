"""Train a GPT with the attention normaliser that the config names.

    python train.py configs/demo_lssar.toml                               # one process, CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train.py configs/lssar.toml  # 8 GPUs
    python train.py configs/lssar.toml --attention.reweight-p 3 --name lssar_p3

Writes runs/<name>/: config.toml (resolved; `train.py runs/<name>/config.toml --name again` replays it),
metrics.jsonl (one JSON object a line: each step's loss, lr, grad_norm; val_loss where validated) and
checkpoints/. The same command, run again, goes on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attention import choose_engine, describe_attention
from checkpoint import load_newest, load_parameters, save_checkpoint
from config import (
    Config,
    OptimizerConfig,
    UserError,
    changed_keys,
    config_from_command_line,
    config_from_dict,
    run_main,
    to_toml,
    write_atomically,
)
from data.shards import TokenStream, train_batch, val_batch, val_windows
from distributed import World, join_world
from model import GPT

# What may differ between a run and its resumption: it changes neither the model nor the loss curve.
FREE_KEYS = (
    "log.",
    "train.micro_batch",
    "train.device",
    "train.compile",
    "train.checkpoint_every",
    "train.keep_last",
    "train.val_every",
    "attention.engine",
    "attention.compile_rows",
    "data.dir",  # its content is compared instead
)


def main() -> None:
    config = config_from_command_line("train.py", __doc__)
    with join_world(config.train.device) as world:
        Trainer(config, world).run()


class Trainer:
    """A run: its model, optimisers and data, and the loop over steps."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        self.train_stream, self.val_stream = open_streams(config)
        self.per_rank, self.micro = split_batch(config, world.size)
        torch.manual_seed(config.seed)
        self.raw_model = GPT(config).to(world.device)  # plain parameter names, for checkpoints
        self.model: nn.Module = self.raw_model
        compile = config.train.compile
        if compile is True or (compile == "auto" and world.device.type == "cuda"):
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        if world.size > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizers = make_optimizers(self.raw_model, config.optimizer, world.device)
        self.step = 0
        self.val_loss: float | None = None

    def run(self) -> None:
        config, log = self.config.train, self.open_run()
        if self.step == config.max_steps:
            log.say(f"finished: {self.config.run_dir} already has its {config.max_steps} steps")
            return
        self.describe(log)
        while self.step < config.max_steps:
            loss, grad_norm, lr = self.train_step()
            self.step += 1
            log.add_step(self.step, loss, grad_norm, lr)
            validate, save = self.is_due(config.val_every), self.is_due(config.checkpoint_every)
            if self.is_due(self.config.log.every) or validate or save:
                log.flush(self.step)  # before saving: what a checkpoint has seen is in metrics.jsonl
            if validate:
                self.val_loss = self.validate()
                log.add_validation(self.step, self.val_loss)
            if save:
                self.save(log)
        log.close()

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.max_steps

    def train_step(self) -> tuple[Tensor, Tensor, float]:
        """One optimiser step. Returns this process's mean loss, the gradient norm, the learning rate."""
        config = self.config
        lr = set_learning_rates(self.optimizers, config.optimizer, self.step, config.train.max_steps)
        n_micro = self.per_rank // self.micro
        first = self.world.rank * self.per_rank
        total = torch.zeros((), device=self.world.device)
        for i in range(n_micro):
            x, y = self.to_device(
                *train_batch(
                    self.train_stream,
                    self.step,
                    n_seq=self.per_rank * self.world.size,
                    seq_len=config.train.seq_len,
                    order=config.data.order,
                    seed=config.seed,
                    first=first + i * self.micro,
                    count=self.micro,
                )
            )
            with self.sync_gradients(i == n_micro - 1):
                with self.raw_model.autocast():
                    loss = self.model(x, y) / n_micro
                loss.backward()
            total += loss.detach()
        clip = config.train.grad_clip or math.inf
        grad_norm = nn.utils.clip_grad_norm_(self.raw_model.parameters(), clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total, grad_norm, lr

    def sync_gradients(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        """DDP averages gradients in the last backward of a step only."""
        if now or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def to_device(self, *arrays: Any) -> list[Tensor]:
        return [torch.from_numpy(a).to(self.world.device) for a in arrays]

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the first val_tokens of the validation stream, shared by all processes."""
        config = self.config.train
        n_windows = val_windows(self.val_stream, config.val_tokens, config.seq_len)
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        model.eval()
        for first in range(self.world.rank * self.micro, n_windows, self.world.size * self.micro):
            count = min(self.micro, n_windows - first)
            x, y = self.to_device(*val_batch(self.val_stream, first, count, config.seq_len))
            with self.raw_model.autocast():
                total += model(x, y).double() * count
        model.train()
        return self.world.sum(total).item() / n_windows

    def open_run(self) -> RunLog:
        """The run folder: made, or checked and resumed from its newest checkpoint."""
        run_dir = self.config.run_dir
        found = load_newest(run_dir)
        if found is not None:
            path, state = found
            check_same_run(path, state, self.config, self.data_info())
            load_parameters(self.raw_model, state["model"], path)
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.val_loss = state["step"], state["val_loss"]
        if not self.world.agree(self.step):
            raise UserError(f"{run_dir}: the processes see different checkpoints; expected one folder")
        log = RunLog(self.config, self.world, self.step)
        if found is not None and self.step < self.config.train.max_steps:
            log.say(f"resumed from {found[0]}: {self.step} of {self.config.train.max_steps} steps done")
        return log

    def save(self, log: RunLog) -> None:
        if self.world.is_main:
            state = {
                "step": self.step,
                "config": self.config.model_dump(),
                "model": self.raw_model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "val_loss": self.val_loss,
                "data": self.data_info(),
            }
            path = save_checkpoint(self.config.run_dir, state, self.config.train.keep_last)
            log.say(f"saved {path}")
            log.restart_clock()

    def data_info(self) -> dict[str, str]:
        return {
            "tokenizer": self.train_stream.info["tokenizer"],
            "train": self.train_stream.fingerprint,
            "val": self.val_stream.fingerprint,
        }

    def describe(self, log: RunLog) -> None:
        config, tokens = self.config, self.train_stream.n_tokens
        normaliser = self.raw_model.blocks[0].attention.normaliser  # type: ignore[union-attr, operator]
        epochs = config.train.max_steps * config.train.batch_tokens / tokens
        log.say(f"run      {config.run_dir}")
        log.say(
            f"model    {self.raw_model.n_params() / 1e6:.2f}M parameters, {config.model.n_layer} layers, "
            f"{config.model.n_head} heads, width {config.model.n_embd}"
        )
        log.say(
            f"attention {describe_attention(config.attention)}, engine "
            f"{choose_engine(normaliser, config.attention.engine)}"  # type: ignore[arg-type]
        )
        n_val = config.train.seq_len * val_windows(
            self.val_stream, config.train.val_tokens, config.train.seq_len
        )
        log.say(
            f"data     {config.data.dir}: {tokens:,} training tokens ({epochs:.2f} epochs), "
            f"validation on {n_val:,}"
        )
        log.say(
            f"step     {config.train.batch_tokens:,} tokens = {self.world.size} processes x "
            f"{self.per_rank // self.micro} micro-batches x {self.micro} sequences x "
            f"{config.train.seq_len} on {self.world.device.type}, {config.train.dtype}"
        )


def open_streams(config: Config) -> tuple[TokenStream, TokenStream]:
    """Training and validation tokens, checked against the model's vocabulary."""
    streams = TokenStream(config.data.dir, "train"), TokenStream(config.data.dir, "val")
    for stream in streams:
        stream.check_model(config.model.vocab_size)
    val_windows(streams[1], config.train.val_tokens, config.train.seq_len)  # raises if it is too short
    return streams


def split_batch(config: Config, n_processes: int) -> tuple[int, int]:
    """Sequences of a step for each process, and of one forward pass."""
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


def check_same_run(path: Path, state: dict[str, Any], config: Config, data: dict[str, str]) -> None:
    """Resuming with another config or corpus would mix two runs in one curve.

    Raises:
        UserError: naming what differs between the checkpoint and now.
    """
    changed = changed_keys(config_from_dict(state["config"], str(path)), config)
    found = [
        f"{key} was {old!r}, now {new!r}"
        for key, (old, new) in changed.items()
        if not key.startswith(FREE_KEYS)
    ]
    found += [
        f"data: {key} was {state['data'][key]}, now {data[key]}"
        for key in data
        if state["data"][key] != data[key]
    ]
    if found:
        raise UserError(f"{config.run_dir}: holds another run ({'; '.join(found)}): choose another --name")


def make_optimizers(model: GPT, config: OptimizerConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """The optimisers; each parameter is in exactly one group, matrices decayed, vectors not.

    Every group keeps its peak learning rate as `peak_lr`. muon takes the blocks' matrices, adamw the
    embeddings, the output layer and all vectors.
    """
    parameters = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for _, p in parameters.values() if p.ndim >= 2]
    vectors = [p for _, p in parameters.values() if p.ndim < 2]
    hidden = [p for name, p in parameters.values() if p.ndim >= 2 and name.startswith("blocks.")]
    if config.name == "muon":
        hidden_ids = {id(p) for p in hidden}
        matrices = [p for p in matrices if id(p) not in hidden_ids]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if config.name == "sgd":
        optimizers.append(torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum))
    else:
        betas = (config.beta1, config.beta2)
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=device.type == "cuda"))
    if config.name == "muon":
        optimizers.append(
            torch.optim.Muon(
                hidden, lr=config.muon_lr, momentum=config.momentum, weight_decay=config.weight_decay
            )
        )
    grouped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(parameters) and {id(p) for p in grouped} == parameters.keys()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Learning rate of step 0, 1, ... max_steps - 1 over its peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    match config.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2
        case "linear":
            return 1 - (1 - low) * progress
        case "wsd":
            decay_steps = config.decay_fraction * max_steps
            return 1 - (1 - low) * max(0.0, (step - max_steps + decay_steps) / decay_steps)


def set_learning_rates(
    optimizers: list[torch.optim.Optimizer], config: OptimizerConfig, step: int, max_steps: int
) -> float:
    """Set every group's rate for a step; returns that of the main optimiser."""
    factor = lr_factor(config, step, max_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
    return factor * config.lr


class RunLog:
    """metrics.jsonl, config.toml, the console and W&B, written by the main process.

    Losses stay on the device until a flush, so that logging does not make every step wait for the GPU.
    """

    def __init__(self, config: Config, world: World, step: int):
        self.config, self.world = config, world
        self.pending: list[tuple[int, Tensor, Tensor, float]] = []
        self.started, self.flushed_step, self.flushed_time = time.time(), step, time.time()
        self.wandb: Any = None
        if not world.is_main:
            return
        run_dir = config.run_dir
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"{run_dir}: the run folder cannot be made: {e.strerror}") from None
        self.metrics = run_dir / "metrics.jsonl"
        if step == 0 and self.metrics.exists():
            old = self.metrics.rename(run_dir / "metrics.jsonl.old")
            self.say(f"{run_dir} has no checkpoint: starting from step 0, its metrics are now {old.name}")
        write_atomically(run_dir / "config.toml", to_toml(config).encode())
        write_atomically(self.metrics, "".join(lines_up_to(self.metrics, step)).encode())
        if config.log.wandb:
            import wandb

            self.wandb = wandb.init(
                project=config.log.wandb_project,
                name=config.name,
                id=config.name,
                resume="allow",
                dir=str(run_dir),
                config=config.model_dump(),
            )

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def add_step(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        self.pending.append((step, loss, grad_norm, lr))

    def flush(self, step: int) -> None:
        """Average the pending losses over processes, write one line each, print the newest."""
        if not self.pending:
            return
        losses = self.world.sum(torch.stack([loss for _, loss, _, _ in self.pending])) / self.world.size
        norms = torch.stack([grad_norm for _, _, grad_norm, _ in self.pending])
        rows = zip(self.pending, losses.tolist(), norms.tolist(), strict=True)
        records = [{"step": s, "loss": loss, "lr": lr, "grad_norm": n} for (s, _, _, lr), loss, n in rows]
        seconds = max(time.time() - self.flushed_time, 1e-9)
        n_steps = step - self.flushed_step
        rate = n_steps * self.config.train.batch_tokens / seconds
        records[-1]["tokens_per_s"] = round(rate)
        self.write(records)
        self.pending, self.flushed_step = [], step
        self.flushed_time = time.time()
        last, max_steps = records[-1], self.config.train.max_steps
        left = (max_steps - step) * seconds / n_steps
        self.say(
            f"step {step:>{len(str(max_steps))}}/{max_steps} | loss {last['loss']:.4f} | lr {last['lr']:.2e} "
            f"| grad norm {last['grad_norm']:.2f} | {short(rate)} tokens/s | {duration(left)} left"
        )

    def add_validation(self, step: int, val_loss: float) -> None:
        self.write([{"step": step, "val_loss": val_loss}])
        self.say(f"step {step:>{len(str(self.config.train.max_steps))}} | validation loss {val_loss:.4f}")
        self.restart_clock()

    def restart_clock(self) -> None:
        """The time since the last flush was not training."""
        self.flushed_time = time.time()

    def write(self, records: list[dict[str, Any]]) -> None:
        if not self.world.is_main:
            return
        try:
            with open(self.metrics, "a") as f:
                f.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as e:
            raise UserError(f"{self.metrics}: cannot be written: {e.strerror}") from None
        if self.wandb is not None:
            for record in records:
                self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        self.say(f"finished in {duration(time.time() - self.started)}: {self.config.run_dir}")
        if self.wandb is not None:
            self.wandb.finish()


def lines_up_to(metrics: Path, step: int) -> list[str]:
    """The lines of a metrics.jsonl that a run resumed at `step` keeps; later ones will come again."""
    if not metrics.exists():
        return []
    kept = []
    for line in metrics.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # cut short when the run was killed
    return kept


def short(number: float) -> str:
    """1234567 -> '1.23M'."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3725 -> '1h02m'."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"


if __name__ == "__main__":
    run_main(main)
