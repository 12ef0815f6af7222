"""What a run measures on validation data: its loss, and with log.attention_every attention and
logits.
"""

import numpy as np
import torch
from torch import Tensor

from data.batches import read_windows, val_windows
from data.dataset import IGNORED
from normalisers.base import l1_normalise, share_heads
from normalisers.layer import NormaliserLayer
from positions import UNSCALED
from training.run_log import RunLog
from training.state import TrainState

ATTENTION_ROWS = 64  # the last rows of a sequence, for log.attention_every


@torch.no_grad()
def validate(state: TrainState, log: RunLog) -> float:
    """Mean loss of the first val_tokens of the validation stream, shared by all processes.

    With another train.loss than softmax also the cross-entropy of the unscaled logits. p of the
    re-weighting is that of the last step. A signal is noticed in the next step.
    """
    config = state.config.train
    world = state.world
    micro = state.batches.micro
    n_windows = val_windows(state.val_stream, config.val_tokens, config.seq_len)
    # losses, unscaled ones, targets
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for start in range(0, n_windows, world.size * micro):
        first = start + world.rank * micro
        if first < n_windows:
            batch = read_windows(state.val_stream, first, micro, config.seq_len)
            x, y = torch.from_numpy(np.stack(batch)).to(world.device)  # (micro, T) each
            y[n_windows - first :] = IGNORED  # the last batch is whole, too: one shape is compiled
            with state.raw_model.autocast():
                n = (y != IGNORED).sum()
                sums[2] += n
                sums[0] += state.local_model(x, y, p=state.power).double() * n
                if config.loss != "softmax":
                    sums[1] += state.local_model(x, y, unscaled=True, p=state.power).double() * n
    sums = world.gather(sums).sum(0)
    loss, unscaled = (sums[:2] / sums[2]).tolist()
    log.add_validation(loss, unscaled if config.loss != "softmax" else None)
    return loss


@torch.no_grad()
def measure_attention(state: TrainState, log: RunLog) -> None:
    """Add qk_std and entropy of each layer, and logit_std, on the first validation tokens, to the
    record.

    They are NormSoftmax's Figures 2a, 4 and 2b. logit_std is over the vocabulary.
    """
    if not state.world.is_main or not log.pending:  # a skipped step's record is written already
        return
    model = state.raw_model
    record = log.pending[-1]
    tokens = torch.from_numpy(state.val_stream.read(0, state.config.train.seq_len))[None]  # (1, T)
    tokens = tokens.to(state.world.device)
    with model.autocast():
        inputs = model.attention_inputs(tokens, p=state.power)
        layers = [spread_and_entropy(*of_layer, state.power) for of_layer in inputs]
        hidden = model.hidden(tokens, UNSCALED, p=state.power)  # (1, T, C)
        logits = model.unscaled_logits(hidden[:, -ATTENTION_ROWS:])
    record["logit_std"] = logits.std(-1, correction=0).mean().item()
    for name, values in zip(("qk_std", "entropy"), zip(*layers, strict=True), strict=True):
        record[name] = {f"layer_{i}": value for i, value in enumerate(values)}


def spread_and_entropy(
    normaliser: NormaliserLayer, q: Tensor, k: Tensor, signals: Tensor | None, p: int | None
) -> tuple[float, float]:
    """Means over heads and the last rows: the standard deviation of q.k, the entropy of |A| / sum
    |A|.
    """
    q = q[:, :, -ATTENTION_ROWS:]
    mass = l1_normalise(normaliser.weights(q, k, p=p, signals=signals).abs())  # (1, H, R, T)
    context = normaliser.context(q, k, signals=signals)
    with torch.autocast(q.device.type, enabled=False):
        _, variance = context.moments(q.float() @ share_heads(k, q).float().mT)
    return variance.sqrt().mean().item(), -torch.xlogy(mass, mass).sum(-1).mean().item()
