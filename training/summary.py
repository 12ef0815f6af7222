"""What train.py prints about a run before it starts, and what --dry-run adds."""

from __future__ import annotations

from attention import describe_attention
from data.shards import val_windows
from training.run_log import format_duration, peak_memory
from training.state import TrainState

BYTES_PER_PARAMETER = {"adamw": 16, "muon": 16, "sgd": 12}  # weights, gradients and optimiser state


def describe_run(state: TrainState) -> list[str]:
    config, batches, world = state.config, state.batches, state.world
    model, train, n_tokens = config.model, config.train, batches.stream.n_tokens
    n_val = train.seq_len * val_windows(state.val_stream, train.val_tokens, train.seq_len)
    epochs, n_micro = train.max_steps * train.batch_tokens / n_tokens, batches.per_rank // batches.micro
    return [
        f"run      {config.run_dir}",
        f"model    {state.raw_model.n_params() / 1e6:.2f}M parameters, {model.n_layer} layers, "
        f"{model.n_head} heads, width {model.n_embd}",
        f"attention {describe_attention(config.attention)}, engine {state.engine}",
        f"data     {config.data.dir}: {n_tokens:,} training tokens ({epochs:.2f} epochs), "
        f"validation on {n_val:,}",
        f"step     {train.batch_tokens:,} tokens = {world.size} processes x {n_micro} micro-batches x "
        f"{batches.micro} sequences x {train.seq_len} on {world.device.type}, {train.dtype}",
        *(["compiling the model: the first step takes a minute or more"] if state.is_compiled else []),
    ]


def describe_costs(state: TrainState, seconds: float) -> list[str]:
    """Memory and time of a run whose steps take `seconds` each."""
    train, stream = state.config.train, state.batches.stream
    n_bytes = state.raw_model.n_params() * BYTES_PER_PARAMETER[state.config.optimizer.name]
    shard, total = stream.n_tokens / stream.n_shards, train.max_steps * seconds
    return [
        f"memory   {n_bytes / 1e9:.2f} GB for weights, gradients and optimiser; "
        f"{peak_memory(state.world.device) / 1e9:.2f} GB at the peak, in one process",
        f"shards   {shard / train.batch_tokens:,.1f} steps to a shard of {shard:,.0f} tokens",
        f"time     {seconds:.3g} s a step: {format_duration(1000 * seconds)} for 1000 steps, "
        f"{format_duration(total)} for all {train.max_steps}",
    ]
