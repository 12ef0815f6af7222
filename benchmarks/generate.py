"""Time of one more token after n cached ones, on trained models that are measured in turn.

    ./demo.sh                                            # trains the two runs that are the default
    python -m benchmarks.generate
    python -m benchmarks.generate runs/softmax runs/lssar --lengths 16384

The cache holds validation text of the first run's dataset: how many weights of a row are 0 is a
property of trained models. Times (on a CPU: CPU time) are medians over the fastest quarter of the
turns, which other processes disturb least. The ratio to the first run is the median of ratios
within those turns, with their range.
"""

import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import print_header, print_row, ratio
from evaluation import open_text
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from model import GPT, KVCache
from positions import RopeScaling
from schema import describe_layers
from training.checkpoint import load_model

RUNS = ["runs/demo_softmax", "runs/demo_lssar"]


class NextToken:
    """A model with all but the last token of a text (1, n + 1) in its cache."""

    def __init__(self, model: GPT, text: Tensor) -> None:
        if not model.cacheable:
            raise UserError(
                f"{model.config.name}: has no KV cache, as its weights depend on all keys"
            )
        self.model = model
        self.token = text[:, -1:]
        self.n = text.shape[1] - 1
        self.rope = RopeScaling("ntk", length=self.n + 1)
        self.cache = KVCache(model.config.model.n_layer, self.n + 1)
        with torch.no_grad(), model.autocast():
            model.hidden(text[:, :-1], self.rope, self.cache)

    @torch.no_grad()
    def milliseconds(self) -> float:
        """Of the next token's logits. The pause begins a new time slice where other processes run,
        too.
        """
        clock = time.perf_counter if self.token.is_cuda else time.process_time
        with self.model.autocast():
            self.step()  # autocast casts the weights in a text's first step alone
            if self.token.is_cuda:
                torch.cuda.synchronize()
            time.sleep(0.003)
            start = clock()
            self.step()
            if self.token.is_cuda:
                torch.cuda.synchronize()
            return 1000 * (clock() - start)

    def step(self) -> None:
        self.model.logits(self.model.hidden(self.token, self.rope, self.cache))
        self.cache.length = self.n


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", default=RUNS, help=f"run folders (default: {' '.join(RUNS)})")
    add("--lengths", nargs="+", type=positive_int, default=[1024, 4096, 16384, 65536])
    add("--repeats", type=positive_int, default=200, help="turns at each length (200)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [load_model(Path(run), device).model for run in args.runs]
    stream = open_text(models[0].config, None)
    for model in models:
        stream.check_model(model.config.model.vocab_size)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device.type}, batch 1\n")
    print_header("attention", "n", "ms a token", "over the first")
    for n in args.lengths:
        text = torch.from_numpy(stream.read(0, n + 1).astype("int64"))[None].to(device)
        tokens = [NextToken(model, text) for model in models]
        turns = [[token.milliseconds() for token in tokens] for _ in range(args.repeats + 2)]
        turns = sorted(turns, key=sum)[: max(1, args.repeats // 4)]
        first, *_ = times = list(zip(*turns, strict=True))
        for model, each in zip(models, times, strict=True):
            ms = f"{statistics.median(each):.2f}"
            print_row(describe_layers(model.config), n, ms, ratio(each, first))


if __name__ == "__main__":
    run_main(main)
