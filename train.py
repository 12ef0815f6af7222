"""Train a GPT with the attention normaliser that the config names.

    python train.py configs/demo_lssar.toml                               # one process, CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train.py configs/lssar.toml  # 8 GPUs
    python train.py configs/lssar.toml --optimizer.lr 1e-3 --name lssar_1e-3
    python train.py configs/lssar.toml --dry-run                          # four steps, memory, speed; no run

GPT-2 124M are configs/softmax.toml, configs/lssar.toml (LSSAR, p raised to 15) and, for SSMax on
QK-norm, configs/variants/ssmax_qk_norm.toml.

Writes runs/<name>/: config.toml (resolved; `train.py runs/<name>/config.toml --name again` replays
it, on the engine that fits there), metrics.jsonl (a line per step), starts.jsonl (commit, versions,
hardware), checkpoints/ and, at its end, loss.png. The same command, run again, resumes from the
newest checkpoint. SIGTERM, SIGHUP, Ctrl-C and SIGUSR1 finish the step (and a validation before it)
and save. A second Ctrl-C stops at once. --dry-run takes steps of two micro-batches at most, with
random tokens where there are no data.
"""

import infra.packages  # noqa: F401

import gc
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from config import parse_command_line
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import join_world
from infra.files import exclusive_lock, fingerprint
from training.checkpoint import load_newest, save_checkpoint
from training.loader import Batch
from training.optim import power_at, set_learning_rates
from training.run_log import RunLog, format_duration
from training.state import TrainState, init_from_run
from training.trial import describe, shorten
from training.validation import validate


def main() -> None:
    parser = ArgumentParser(__doc__)
    dry_run_help = "four steps of at most two micro-batches, a validation, memory and speed; no run"
    parser.add_argument("--dry-run", action="store_true", help=dry_run_help)
    config, args = parse_command_line(parser)
    with ExitStack() as stack:
        stack.callback(gc.enable)  # last of all, for a notebook: its process goes on
        stack.callback(gc.unfreeze)
        world = stack.enter_context(join_world(config.train.device))
        run_config = config
        if args.dry_run:
            scratch = stack.enter_context(TemporaryDirectory())
            run_config = shorten(config, world, Path(scratch))
        state = TrainState(run_config, world)
        if world.is_main:
            stack.enter_context(exclusive_lock(run_config.run_dir))
        log = start_or_resume(state)
        gc.freeze()  # scanning all of torch's objects takes 0.1 s and more,
        gc.disable()  # and a rank that collects garbage within a step delays all others
        train(state, log)
        if world.is_main and state.step == run_config.train.max_steps:
            if args.dry_run:
                log.print(*describe(config, run_config))
            else:
                draw_losses(log, run_config.run_dir)


def start_or_resume(state: TrainState) -> RunLog:
    """Load the run's newest checkpoint, or else the weights that init_from names, and open the
    run's folder.

    Raises UserError: the folder holds another run, init_from does not fit, or the processes see
    different files.
    """
    config = state.config
    newest = load_newest(config.run_dir)
    init_summary: list[str] = []
    if newest is not None:
        state.restore(*newest)
    elif config.init_from:
        tokenizer = state.data_info["tokenizer"]
        init_summary = init_from_run(state.raw_model, config.init_from, tokenizer)
    file = fingerprint(newest[0]) if newest is not None else ""
    # the last line may name data.dir
    if not state.world.agree([state.step, file, init_summary[:-1]]):
        problem = "the processes see different checkpoints"
        raise UserError(f"{config.run_dir}: {problem}; expected one folder")
    log = RunLog(state)
    log.open_folder(init_summary)
    if newest is not None:
        log.print(f"resumed from {newest[0]}: {state.step} of {config.train.max_steps} steps done")
    return log


# ---------------------------------------------------------------- the loop


def train(state: TrainState, log: RunLog) -> None:
    """Train until max_steps or until a rank receives a signal to stop."""
    config = state.config.train
    log.describe_run()
    began = time.monotonic()
    first = state.step + 1
    with state.stop:
        stopped = None
        if config.max_steps == 0 and not state.is_resumed:
            validate(state, log)
            save(state)
        elif any(state.world.gather_objects(log.lacks_validation)):  # a stop has left it out
            validate(state, log)
            log.restart_clock()
        while state.step < config.max_steps and not stopped:
            stopped = train_step(state, log)
            if state.step == config.max_steps:  # the run is finished, not stopped
                stopped = None
            val_due = state.is_due(config.val_every)
            save_due = state.is_due(config.checkpoint_every)

            # Log, before saving: metrics.jsonl has every step that a checkpoint contains.
            if state.is_due(state.config.log.every) or val_due or save_due or stopped:
                log.flush()

            # Validate. After a stop on resume: who sent the signal may not wait for it.
            if val_due and not stopped:
                validate(state, log)

            # Save, after the validation: metrics.jsonl has every one up to a checkpoint, too.
            if save_due or stopped:
                save(state)
            if val_due or save_due or state.step == first:  # which compiles
                gc.collect()
                log.restart_clock()
        if stopped:
            at = f"step {state.step} of {config.max_steps}"
            log.close(f"stopped by {stopped} after {at}, saved: the same command resumes the run")
        else:
            log.close(
                f"finished in {format_duration(time.monotonic() - began)}: {state.config.run_dir}"
            )


def train_step(state: TrainState, log: RunLog) -> str | None:
    """One step: forward and backward, the search for NaN and infinity, the optimiser.

    Returns: The name of a signal that any rank received, if one did.
    Raises UserError: a loss or a gradient is not finite.
    """
    config = state.config
    lr = set_learning_rates(state.optimizers, config.optimizer, state.step, config.train.max_steps)
    batch = state.batches.read(state.step)
    loss = forward_backward(state, batch)
    parameters = list(state.raw_model.parameters())
    grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # The step's host sync (masks need one more): all ranks stop if one has a bad step.
    signal = torch.full_like(loss, state.stop.number)
    losses, norms, signals = state.world.gather(torch.stack([loss, grad_norm, signal])).T.tolist()
    state.step += 1
    log.add_step(statistics.fmean(losses), norms[0], lr)
    if problem := find_problem(losses, norms):
        log.flush()
        raise UserError(describe_problem(state, problem))
    nn.utils.clip_grads_with_norm_(parameters, config.train.grad_clip or math.inf, grad_norm)
    for optimizer in state.optimizers:
        optimizer.step()
    state.raw_model.zero_grad()
    return state.stop.name_of(int(max(signals)))


def forward_backward(state: TrainState, batch: Batch) -> Tensor:
    """Accumulate the gradient of this process's micro-batches; returns their mean loss."""
    config = state.config.train
    device = state.world.device
    state.raw_model.set_power(power_at(state.config.attention, state.step))
    weights, n_targets = state.batches.loss_weights(batch)
    total = torch.zeros((), device=device)
    for i, ((x, y), weight) in enumerate(zip(batch, weights, strict=True)):  # x, y: (micro, T) each
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        if state.world.size > 1:  # DDP averages gradients in the last backward of a step only
            state.model.require_backward_grad_sync = i == len(batch) - 1
        with state.raw_model.autocast():
            loss = weight * state.model(x, y, label_smoothing=config.label_smoothing)
        (loss * n_targets if config.reduction == "sum" else loss).backward()
        total += loss.detach()
    return total


def find_problem(losses: list[float], norms: list[float]) -> str:
    """Why a step is bad, given the loss and the gradient norm of each rank; "" if it is good."""
    for what, values in (("loss", losses), ("gradient norm", norms)):
        for rank, value in enumerate(values):
            if not math.isfinite(value):
                return f"{what} {value} on rank {rank}"
    return ""


def name_spoilt(model: nn.Module) -> str:
    """The last parameter whose gradient is not finite, the first that backward reached; "" without
    one.
    """
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    names = [name for name, grad in grads.items() if not grad.isfinite().all()]
    return f", first in that of {names[-1]}" if names else ""


def describe_problem(state: TrainState, problem: str) -> str:
    """The bad step in a line: what it is, where in the model, on which data."""
    if problem.startswith("gradient"):
        problem += name_spoilt(state.raw_model)
    data = state.config.data
    end = (data.skip_steps + state.step) * state.batches.n_seq
    sequences = f"sequences {end - state.batches.n_seq} to {end - 1} in {data.order} order"
    stopped = "stopped, the last checkpoint is unchanged"
    return f"step {state.step}: {problem}, on {sequences}: {stopped}"


def save(state: TrainState) -> None:
    config = state.config.train
    checkpoint = state.to_checkpoint()  # on every rank: a collective
    if state.world.is_main:
        save_checkpoint(state.config.run_dir, checkpoint, config.keep_last, config.keep_every)
    # a process that ended before could take this one's launcher down
    state.world.gather_objects(None)


def draw_losses(log: RunLog, folder: Path) -> None:
    """The finished run's picture. Without it the run is finished as well."""
    from measure import draw_training  # matplotlib and pandas load for a second

    try:
        draw_training(folder)
    except OSError as e:
        log.print(f"warning: no picture: {e}")


if __name__ == "__main__":
    run_main(main)
