"""A run's loss on validation data."""

import math

import numpy as np
import torch

from data.batches import read_windows, val_windows
from data.dataset import IGNORED, TokenStream
from schema import TrainConfig
from training.run_log import RunLog
from training.state import TrainState

# Validation losses of llm.c's run_gpt2_124M.sh on FineWeb-10B, by step of 524,288 tokens.
LLM_C = {2000: 3.8585, 4000: 3.6176, 8000: 3.4431, 12000: 3.3509, 15250: 3.2969, 19560: 3.2722}
LLM_C_TOKENS = 524_288  # a step


def llm_c_loss(step: int) -> float | None:
    """llm.c's loss at a step: linear in ln(step) between the published ones, None outside them."""
    if not min(LLM_C) <= step <= max(LLM_C):
        return None
    steps = [math.log(known) for known in LLM_C]
    return float(np.interp(math.log(step), steps, [*LLM_C.values()]))


def expected_loss(config: TrainConfig, stream: TokenStream, step: int) -> float | None:
    """`llm_c_loss` of a softmax, if the data and the tokens of a step are llm.c's."""
    is_llm_c = config.batch_tokens == LLM_C_TOKENS and stream.is_fineweb
    return llm_c_loss(step) if is_llm_c else None


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
                sums[0] += state.raw_model(x, y).double() * n
                if config.loss != "softmax":
                    sums[1] += state.raw_model(x, y, unscaled=True).double() * n
    sums = world.gather(sums).sum(0)
    loss, unscaled = (sums[:2] / sums[2]).tolist()
    expected = expected_loss(config, state.val_stream, state.step)
    log.add_validation(loss, unscaled if config.loss != "softmax" else None, expected)
    return loss
