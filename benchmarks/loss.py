"""Time of training steps with whole logits and with the loss by chunks of rows, in turn.

    python -m benchmarks.loss float32 4096 12      # type, tokens a step, steps of each

The demo's model with a vocabulary of 4,096 and random tokens, one thread. Times are of the process's
CPU. The ratio is the median over the steps but the first.
"""

import statistics
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from config import load_config
from model import GPT
from training.optim import make_optimizers


def whole_logits(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    torch.set_num_threads(1)
    dtype, n_tokens, n_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    flags = ["--model.vocab-size", "4096", "--train.dtype", dtype]
    config = load_config("configs/demo_softmax.toml", flags)
    models = [GPT(config) for _ in range(2)]
    optimizers = [make_optimizers(model, config.optimizer) for model in models]
    x = torch.randint(4096, (n_tokens // 128, 128))
    times: list[list[float]] = [[], []]
    for _ in range(n_steps):
        for i, model in enumerate(models):
            start = time.process_time()
            with model.autocast():
                loss = model(x, x.roll(-1, 1)) if i else whole_logits(model, x, x.roll(-1, 1))
            loss.backward()
            for optimizer in optimizers[i]:
                optimizer.step()
                optimizer.zero_grad()
            times[i].append(time.process_time() - start)
    for name, of_steps in zip(("whole logits", "chunks"), times, strict=True):
        print(f"{name}: {n_tokens / statistics.median(of_steps[1:]):.0f} tokens/s")
    ratios = sorted(
        after / before for before, after in zip(times[0][1:], times[1][1:], strict=True)
    )
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
