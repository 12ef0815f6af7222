"""Train a GPT with the attention normaliser that the config names.

    python train.py configs/demo_lssar.toml                               # one process, CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train.py configs/lssar.toml  # 8 GPUs
    python train.py configs/lssar.toml --attention.reweight-p 3 --name lssar_p3
    python train.py configs/lssar.toml --dry-run                          # sizes, memory, speed; no run
    python train.py configs/lssar.toml --profile 5                        # also trace 5 steps

Writes runs/<name>/: config.toml (resolved; `train.py runs/<name>/config.toml --name again` replays it),
metrics.jsonl (a line for each step), starts.jsonl (commit, versions, hardware) and checkpoints/. The same
command, run again, goes on from the newest checkpoint. SIGTERM, Ctrl-C and SIGUSR1 finish the step and save;
a second Ctrl-C does not wait.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attention import describe_attention
from config import (
    Config,
    OptimizerConfig,
    TrainConfig,
    changed_keys,
    config_from_dict,
    parse_command_line,
)
from data.batches import train_batch, val_batch, val_windows
from data.dataset import IGNORED, TokenStream
from evals.attention_statistics import STATISTICS, model_statistics
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import StopSignals, World, join_world
from model import GPT
from training.checkpoint import (
    CheckpointWriter,
    clear_unfinished,
    link,
    load_newest,
    load_parameters,
    take_over,
)
from training.run_log import DryLog, RunLog, duration, finite, peak_memory

# What may differ between a run and its resumption: it changes neither the model nor, unless a step goes
# wrong, the loss curve.
FREE_KEYS = (
    "log.",
    "train.micro_batch",
    "train.device",
    "train.compile",
    "train.checkpoint_every",
    "train.keep_last",
    "train.keep_every",
    "train.val_every",
    "train.on_bad_step",
    "train.max_skips",
    "train.outlier_z",
    "attention.engine",
    "attention.compile_rows",
    "data.dir",  # its content is compared instead
)
DRY_STEPS = 4  # of --dry-run; the first is not timed
ATTENTION_ROWS = 64  # the last ones of a sequence, whose statistics log.attention_every asks for
GUARD_WINDOW = 128  # steps that an outlier is compared with


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print sizes, memory and speed; no run")
    parser.add_argument("--profile", type=positive_int, default=0, metavar="N", help="also trace N steps")
    config, args = parse_command_line(parser)
    if args.dry_run and args.profile:
        raise UserError("--profile: not together with --dry-run")
    with join_world(config.train.device) as world:
        trainer = Trainer(config, world)
        if args.dry_run:
            trainer.dry_run()
        else:
            trainer.run(args.profile)


class Trainer:
    """A run: its model, optimisers and data, and the loop over steps."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        self.train_stream, self.val_stream = open_streams(config)
        self.per_rank, self.micro = split_batch(config, world.size)
        torch.manual_seed(config.seed)
        self.raw_model = GPT(config).to(world.device)  # plain parameter names, for checkpoints
        self.engine = self.raw_model.fix_engine()
        self.model: nn.Module = self.raw_model
        compile = config.train.compile
        self.compiled = compile is True or (compile == "auto" and world.device.type == "cuda")
        if self.compiled:
            self.model = torch.compile(self.model)  # type: ignore[assignment]
        if world.size > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizers = make_optimizers(self.raw_model, config.optimizer, world.device)
        self.flops_per_step = self.raw_model.flops_per_token() * config.train.batch_tokens
        self.guard = Guard(config.train)
        self.step = 0
        self.validation: dict[str, Any] = {"step": -1, "loss": None, "best": None, "best_step": None}
        self.loader = ThreadPoolExecutor(1)
        self.next_batch: tuple[int, Future[list[tuple[Tensor, Tensor]]]] | None = None
        self.stop = StopSignals()

    def run(self, profiled: int = 0) -> None:
        """Train until max_steps or until a signal asks to stop."""
        config, log = self.config.train, self.open_run()
        writer = CheckpointWriter(self.config.run_dir, config.keep_last, config.keep_every)
        if self.step == config.max_steps and self.is_validated():
            log.close(f"finished: {self.config.run_dir} already has its {config.max_steps} steps")
            return
        self.describe(log)
        with self.stop, no_collections(), profiler(profiled, self.config.run_dir, self.world) as profile:
            try:
                stopped = self.loop(log, writer, profile)
            except KeyboardInterrupt:
                raise  # at once
            except BaseException:
                writer.finish()  # a checkpoint that is being written is worth some seconds
                raise
            writer.finish()
        if stopped:
            log.close(
                f"stopped by {stopped} after step {self.step} of {config.max_steps}, saved: "
                "the same command goes on"
            )
        else:
            log.close(f"finished in {duration(log.seconds())}: {self.config.run_dir}")

    def loop(self, log: RunLog, writer: CheckpointWriter, profile: Any) -> str | None:
        """The steps. Returns the name of the signal that ended them early, if one did."""
        config, stopped = self.config.train, None
        if not self.is_validated():  # a stop came before it was done
            stopped = self.validate(log)
            if not stopped:
                self.save(log, writer)
            log.clock.restart()
        while not stopped and self.step < config.max_steps:
            stopped = self.train_step(log)
            profile.step()
            if self.config.log.attention_every and self.step % self.config.log.attention_every == 0:
                self.measure_attention(log)
            writer.check()
            validate, save = self.is_due(config.val_every), self.is_due(config.checkpoint_every)
            if self.is_due(self.config.log.every) or validate or save or stopped:
                log.flush()  # before saving: what a checkpoint has seen is in metrics.jsonl
            if validate and not stopped:
                stopped = self.validate(log)
            if save or stopped or self.is_best():
                self.save(log, writer)
            if validate or save:
                gc.collect()
                log.clock.restart()
        return stopped

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.train.max_steps

    def is_best(self) -> bool:
        """Whether this step has the best validation loss so far."""
        return self.validation["best_step"] == self.step

    def is_validated(self) -> bool:
        return (
            self.step == 0 < self.config.train.max_steps
            or not self.is_due(self.config.train.val_every)
            or self.validation["step"] == self.step
        )

    def train_step(self, log: RunLog) -> str | None:
        """One step: forward and backward, the decision to take it, the optimiser.

        Returns:
            The name of a signal that came to any process, if one did.
        Raises:
            UserError: the step is bad and the config says not to skip it, or not so many in a row.
        """
        config, clock = self.config, log.clock
        clock.mark("other")
        lr = set_learning_rates(self.optimizers, config.optimizer, self.step, config.train.max_steps)
        batch = self.take_batch()
        clock.mark("data")
        loss = self.forward_backward(batch)
        clip = config.train.grad_clip or math.inf
        grad_norm = nn.utils.clip_grad_norm_(self.raw_model.parameters(), clip)
        # The one wait of a step: nobody takes a step that any process finds bad.
        signal_number = self.stop.number
        values = self.world.gather(torch.stack([loss, grad_norm, torch.full_like(loss, signal_number)]))
        losses, norms = values[:, 0].tolist(), values[:, 1].tolist()
        clock.mark("forward_backward")
        reason = self.guard.judge(losses, norms)
        if not reason:
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        clock.mark("optimizer")
        clock.n_steps += 1
        log.add_step(self.step, statistics.fmean(losses), norms[0], lr, reason)
        if reason:
            self.refuse_or_go_on(log, reason)
        return self.stop.name_of(int(values[:, 2].max()))

    def forward_backward(self, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Accumulate the gradient of this process's micro-batches; their mean loss.

        With a mask each micro-batch weighs as much as its share of the step's targets, so that the mean over
        processes is that over all targets.
        """
        shares = self.shares_of_targets(batch)
        total = torch.zeros((), device=self.world.device)
        for i, ((x, y), share) in enumerate(zip(batch, shares, strict=True)):
            x, y = (t.to(self.world.device, non_blocking=True) for t in (x, y))
            with self.sync_gradients(i == len(batch) - 1):
                with self.raw_model.autocast():
                    loss = self.model(x, y) * share
                loss.backward()
            total += loss.detach()
        return total

    def shares_of_targets(self, batch: list[tuple[Tensor, Tensor]]) -> list[float]:
        """The weight of each micro-batch's mean loss; 1 in sum over processes is their number."""
        if self.train_stream.mask is None:
            return [1 / len(batch)] * len(batch)
        counts = torch.tensor([int((y != IGNORED).sum()) for _, y in batch], device=self.world.device)
        n_targets = int(self.world.gather(counts.sum()[None]).sum())
        return [count * self.world.size / n_targets for count in counts.tolist()]

    def take_batch(self) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches (x, y) of this step; those of the next are read in the background meanwhile."""
        if self.next_batch is None or self.next_batch[0] != self.step:
            self.next_batch = (self.step, self.loader.submit(self.read_batch, self.step))
        batch = self.next_batch[1].result()
        self.next_batch = (self.step + 1, self.loader.submit(self.read_batch, self.step + 1))
        return batch

    def read_batch(self, step: int) -> list[tuple[Tensor, Tensor]]:
        config = self.config
        first = self.world.rank * self.per_rank
        batch = []
        for i in range(first, first + self.per_rank, self.micro):
            x, y = train_batch(
                self.train_stream,
                config.data.skip_steps + step,
                n_seq=self.per_rank * self.world.size,
                seq_len=config.train.seq_len,
                order=config.data.order,
                seed=config.seed,
                first=i,
                count=self.micro,
            )
            batch.append((self.pinned(x), self.pinned(y)))
        return batch

    def pinned(self, array: Any) -> Tensor:
        """Page-locked where a GPU is to fetch it: else the copy would make the host wait."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.world.device.type == "cuda" else tensor

    def sync_gradients(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        """DDP averages gradients in the last backward of a step only."""
        if now or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def refuse_or_go_on(self, log: RunLog, reason: str) -> None:
        """After a bad step: stop, or say that it was skipped."""
        config, n_seq = self.config.train, self.per_rank * self.world.size
        first = (self.step - 1) * n_seq
        where = (
            f"step {self.step}: {reason}, on sequences {first} to {first + n_seq - 1} of the data in "
            f"{self.config.data.order} order, {self.per_rank} a rank"
        )
        log.flush()
        if config.on_bad_step == "stop" and not self.guard.is_outlier:
            raise UserError(
                f'{where}: stopped, the last checkpoint is untouched (train.on_bad_step = "skip" leaves such '
                "steps out)"
            )
        if self.guard.skipped >= config.max_skips:
            raise UserError(
                f"{where}: stopped after {self.guard.skipped} such steps in a row (train.max_skips)"
            )
        log.say(f"{where}: skipped")

    @torch.no_grad()
    def validate(self, log: RunLog) -> str | None:
        """Mean loss of the first val_tokens of the validation stream, shared by all processes.

        With another train.loss than softmax also the cross-entropy of the bare logits.

        Returns:
            The name of a signal that came meanwhile: then there is no result.
        """
        config = self.config.train
        n_windows = val_windows(self.val_stream, config.val_tokens, config.seq_len)
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        total, plain_total, n_targets = sums  # views
        stopped = None
        model.eval()
        for start in range(0, n_windows, self.world.size * self.micro):
            first = start + self.world.rank * self.micro
            count = max(0, min(self.micro, n_windows - first))
            if count:
                batch = val_batch(self.val_stream, first, count, config.seq_len)
                x, y = (torch.from_numpy(a).to(self.world.device) for a in batch)
                with self.raw_model.autocast():
                    n = (y != IGNORED).sum()
                    n_targets += n
                    total += model(x, y).double() * n
                    if config.loss != "softmax":
                        plain_total += model(x, y, plain=True).double() * n
            stopped = self.any_stop()
            if stopped:
                break
        model.train()
        if not stopped:
            self.world.sum(sums)
            loss = (total / n_targets).item()
            plain = (plain_total / n_targets).item() if config.loss != "softmax" else None
            best = self.validation["best"]
            self.validation |= {"step": self.step, "loss": loss}
            if math.isfinite(loss) and (best is None or loss < best):
                self.validation |= {"best": loss, "best_step": self.step}
            log.add_validation(self.step, loss, plain)
        return stopped

    def measure_attention(self, log: RunLog) -> None:
        """Each layer's score deviation and entropy, on the first validation tokens, by the main process."""
        if not self.world.is_main:
            return
        tokens = torch.from_numpy(self.val_stream.read(0, self.config.train.seq_len))[None]
        with self.raw_model.autocast():
            values = model_statistics(self.raw_model, tokens.to(self.world.device), n_rows=ATTENTION_ROWS)
        by_layer = values.mean((0, 2)).T.tolist()  # (S, n_layer)
        for name, layers in zip(STATISTICS, by_layer, strict=True):
            if name in ("score_std", "entropy"):
                log.add_to_step({name: {f"layer_{i}": finite(value) for i, value in enumerate(layers)}})

    def any_stop(self) -> str | None:
        """The name of a signal that came to any process."""
        number = torch.tensor([self.stop.number], device=self.world.device)
        return self.stop.name_of(int(self.world.gather(number).max()))

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
            self.step, self.validation = state["step"], state["validation"]
            self.guard.load_state_dict(state["guard"])
            if len(state["rng"]) == self.world.size:
                set_rng(state["rng"][self.world.rank])
        account = [] if found is not None else self.initialise()
        told = zlib.crc32("\n".join(account).encode())
        if not (self.world.agree(self.step) and self.world.agree(told)):
            raise UserError(f"{run_dir}: the processes see different checkpoints; expected one folder")
        if self.world.is_main:
            clear_unfinished(run_dir)
            if found is not None and self.is_best():
                link(found[0], found[0].with_name("best.pt"))  # a kill may have come before that
        log = RunLog(self.config, self.world, self.step, self.validation["step"], self.flops_per_step)
        if found is not None and self.step < self.config.train.max_steps:
            log.say(f"resumed from {found[0]}: {self.step} of {self.config.train.max_steps} steps done")
        if account:
            log.say("\n".join(account))
            log.write_file("init_from.txt", account)
        return log

    def initialise(self) -> list[str]:
        """Take over the weights that init_from names, if it names any; returns the account of it."""
        source = self.config.init_from
        return take_over(self.raw_model, source, self.train_stream.info["tokenizer"]) if source else []

    def save(self, log: RunLog, writer: CheckpointWriter) -> None:
        rng = self.world.gather_objects(get_rng(self.world.device))
        if self.world.is_main:
            state = {
                "step": self.step,
                "config": self.config.model_dump(),
                "model": self.raw_model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "validation": self.validation,
                "guard": self.guard.state_dict(),
                "rng": rng,
                "data": self.data_info(),
            }
            writer.save(state, self.is_best())

    def data_info(self) -> dict[str, str]:
        return {
            "tokenizer": self.train_stream.info["tokenizer"],
            "train": self.train_stream.fingerprint,
            "val": self.val_stream.fingerprint,
        }

    def describe(self, log: RunLog) -> None:
        """What is about to happen, on the console."""
        config, tokens = self.config, self.train_stream.n_tokens
        epochs = config.train.max_steps * config.train.batch_tokens / tokens
        log.say(f"run      {config.run_dir}")
        log.say(
            f"model    {self.raw_model.n_params() / 1e6:.2f}M parameters, {config.model.n_layer} layers, "
            f"{config.model.n_head} heads, width {config.model.n_embd}"
        )
        log.say(f"attention {describe_attention(config.attention)}, engine {self.engine}")
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
        if self.compiled:
            log.say("compiling the model: the first step takes a minute or more")

    def dry_run(self) -> None:
        """Say what a run would take, after a few steps that leave nothing behind."""
        config = self.config
        log = DryLog(config, self.world, self.flops_per_step)
        for line in self.initialise():
            log.say(line)
        self.describe(log)
        with self.stop:
            for i in range(DRY_STEPS):
                if self.train_step(log):
                    raise KeyboardInterrupt
                if i == 0:
                    log.clock.restart()
        seconds = (
            log.clock.report(config.train.batch_tokens, self.flops_per_step, self.world.size)["step_ms"]
            / 1000
        )
        n_params = self.raw_model.n_params()
        bytes_each = {"adamw": 16, "muon": 16, "sgd": 12}[config.optimizer.name]
        shard = self.train_stream.n_tokens / self.train_stream.n_shards
        log.say(
            f"memory   {n_params * bytes_each / 1e9:.2f} GB for weights, gradients and optimiser; "
            f"{peak_memory(self.world.device) / 1e9:.2f} GB at the peak of {DRY_STEPS} steps, in one process"
        )
        log.say(f"shards   {shard / config.train.batch_tokens:,.1f} steps to a shard of {shard:,.0f} tokens")
        log.say(
            f"time     {seconds:.3g} s a step: {duration(1000 * seconds)} for 1000 steps, "
            f"{duration(config.train.max_steps * seconds)} for all {config.train.max_steps}"
        )


class Guard:
    """Finds the steps that must not be taken.

    A loss or a gradient norm that is not finite is bad. With `outlier_z`, so is one that lies more than so
    many standard deviations above the mean of the last GUARD_WINDOW steps taken (as in llm.c), from the
    moment there are so many.

    Attributes:
        skipped: bad steps in a row.
        is_outlier: what was wrong with the last of them, was finite.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.outlier_z = config.outlier_z
        self.recent: dict[str, deque[float]] = {
            "loss": deque(maxlen=GUARD_WINDOW),
            "gradient norm": deque(maxlen=GUARD_WINDOW),
        }
        self.skipped, self.is_outlier = 0, False

    def judge(self, losses: list[float], norms: list[float]) -> str:
        """What is wrong with a step of which each process has a loss and a gradient norm; "" for nothing."""
        reason = self._reason(losses, norms)
        self.skipped = self.skipped + 1 if reason else 0
        if not reason:
            self.recent["loss"].append(statistics.fmean(losses))
            self.recent["gradient norm"].append(norms[0])
        return reason

    def _reason(self, losses: list[float], norms: list[float]) -> str:
        for what, values in (("loss", losses), ("gradient norm", norms)):
            for rank, value in enumerate(values):
                if not math.isfinite(value):
                    self.is_outlier = False
                    return f"{what} {value} on rank {rank}"
        for what, value in (("loss", statistics.fmean(losses)), ("gradient norm", norms[0])):
            recent = self.recent[what]
            if self.outlier_z and len(recent) == GUARD_WINDOW:
                deviation = statistics.stdev(recent)
                z = (value - statistics.fmean(recent)) / deviation if deviation else 0.0
                if z > self.outlier_z:
                    self.is_outlier = True
                    return f"{what} {value:.4g}, {z:.1f} deviations above the last {GUARD_WINDOW}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, **{what: list(values) for what, values in self.recent.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        for what, values in self.recent.items():
            values.extend(state[what])


def get_rng(device: torch.device) -> dict[str, Tensor]:
    """torch's random state. Nothing draws from it after initialisation today; a dropout would."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector out of the steps: a rank that collects makes all the others wait."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def profiler(n_steps: int, run_dir: Path, world: World) -> Iterator[Any]:
    """torch's profiler over `n_steps` steps after two that warm up, on the main process; 0: none."""
    if not n_steps or not world.is_main:
        yield NoProfile()
        return
    path = run_dir / "profile.json.gz"

    def write(profile: Any) -> None:
        profile.export_chrome_trace(str(path))
        print(f"wrote {path}: {n_steps} steps, for https://ui.perfetto.dev or chrome://tracing", flush=True)

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=n_steps, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        yield profile


class NoProfile:
    def step(self) -> None:
        pass


def open_streams(config: Config) -> tuple[TokenStream, TokenStream]:
    """Training and validation tokens, checked against the model's vocabulary."""
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


if __name__ == "__main__":
    run_main(main)
