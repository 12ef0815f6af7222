"""Time of training steps with whole logits and with the loss by chunks of rows, in turn.

    python -m benchmarks.loss float32 4096 12      # type, tokens a step, steps of each

The demo's model with a vocabulary of 4,096 and random tokens, one thread. Times are of the process's
CPU. The ratio is the median over the steps but the first.
"""

import statistics
import sys
import time
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import print_header, print_row, ratio, seconds
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
    y = x.roll(-1, 1)

    def step(i: int) -> None:
        with models[i].autocast():
            loss = models[i](x, y) if i else whole_logits(models[0], x, y)
        loss.backward()
        for optimizer in optimizers[i]:
            optimizer.step()
            optimizer.zero_grad()

    rounds = [
        [seconds(partial(step, i), time.process_time) for i in (0, 1)] for _ in range(n_steps)
    ]
    whole, chunks = zip(*rounds[1:], strict=True)
    print_header("", "tokens/s", "over whole logits")
    for name, each in (("whole logits", whole), ("chunks", chunks)):
        print_row(name, f"{n_tokens / statistics.median(each):.0f}", ratio(each, whole))


if __name__ == "__main__":
    main()
