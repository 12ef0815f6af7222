"""What a run measures on validation data: its loss; with log.attention_every attention and logits."""

import torch

from data.batches import val_batch, val_windows
from data.dataset import IGNORED
from positions import UNSCALED
from training.attention_statistics import STATISTICS, model_statistics
from training.optim import power_at
from training.run_log import RunLog
from training.state import TrainState

ATTENTION_ROWS = 64  # the last rows of a sequence, for log.attention_every


@torch.no_grad()
def validate(state: TrainState, log: RunLog) -> str | None:
    """Mean loss of the first val_tokens of the validation stream, shared by all processes.

    With another train.loss than softmax also the cross-entropy of the unscaled logits.

    Returns: The name of a signal that any rank received meanwhile: then there is no result.
    """
    config, world, model, micro = state.config.train, state.world, state.local_model, state.batches.micro
    p = power_at(state.config.attention, max(0, state.step - 1))  # that of the last step
    n_windows = val_windows(state.val_stream, config.val_tokens, config.seq_len)
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    total, unscaled_total, n_targets = sums  # views
    for start in range(0, n_windows, world.size * micro):
        first = start + world.rank * micro
        if first < n_windows:
            batch = val_batch(state.val_stream, first, min(micro, n_windows - first), config.seq_len)
            x, y = (torch.from_numpy(a).to(world.device) for a in batch)  # (micro, T) each
            with state.raw_model.autocast():
                n = (y != IGNORED).sum()
                n_targets += n
                total += model(x, y, p=p).double() * n
                if config.loss != "softmax":
                    unscaled_total += model(x, y, unscaled=True, p=p).double() * n
        if stopped := state.stop.on_any_rank(world):
            return stopped
    loss, unscaled = (world.sum(sums)[:2] / n_targets).tolist()
    state.record_validation(loss)
    log.add_validation(loss, unscaled if config.loss != "softmax" else None)
    return None


def measure_attention(state: TrainState, log: RunLog) -> None:
    """Add qk_std and entropy of each layer, and logit_std, on the first validation tokens, to the record.

    (NormSoftmax, Figures 2a, 4 and 2b; logit_std is over the vocabulary.)
    """
    if not state.world.is_main or not log.pending:  # a skipped step's record is written already
        return
    model, read = state.raw_model, state.val_stream.read
    tokens = torch.from_numpy(read(0, state.config.train.seq_len))[None].to(state.world.device)
    p = power_at(state.config.attention, max(0, state.step - 1))
    with model.autocast():
        values = model_statistics(model, tokens, n_rows=ATTENTION_ROWS, p=p)
        logits = model.unscaled_logits(model.hidden(tokens, UNSCALED, p=p)[:, -ATTENTION_ROWS:])
    log.pending[-1]["logit_std"] = logits.std(-1, correction=0).mean().item()
    by_layer = values.mean((0, 2)).T.tolist()  # (S, n_layer)
    for name, layers in zip(STATISTICS, by_layer, strict=True):
        if name in ("qk_std", "entropy"):
            log.pending[-1][name] = {f"layer_{i}": value for i, value in enumerate(layers)}
