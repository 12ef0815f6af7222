"""Time of one more token after n cached ones, on trained models that are measured in turn.

    ./demo.sh                                            # trains the two runs that are the default
    python -m benchmarks.generate
    python -m benchmarks.generate runs/softmax runs/lssar --lengths 16384

The cache holds validation text of the first run's dataset: how many weights of a row are 0 is a
property of trained models. Times (on a CPU: CPU time) are medians over the fastest quarter of the
turns, which other processes disturb least. The ratio to the first run is the median of ratios
within those turns (range: their middle 80 %). `live V` is the share of V's rows with a weight above
0, over all layers and heads.
"""

import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

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

    @torch.no_grad()
    def live_share(self) -> float:
        """Share of the next token's weights that are above 0."""
        shares = []
        with self.model.autocast():
            for layer, q, keys, signals in self.model.attention_inputs(
                self.token, self.rope, self.cache
            ):
                with torch.autocast(q.device.type, enabled=False):
                    weights = layer.dense_weights(q, keys, layer.context(q, keys, signals))
                shares.append((weights > 0).float().mean().item())
        return statistics.mean(shares)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "runs", nargs="*", default=RUNS, help=f"run folders (default: {' '.join(RUNS)})"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=positive_int, default=[1024, 4096, 16384, 65536]
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=200, help="turns at each length (200)"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="dataset folder (default: that of the first run)"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [load_model(Path(run), device).model for run in args.runs]
    stream = open_text(models[0].config, args.data)
    for model in models:
        stream.check_model(model.config.model.vocab_size)
    threads = torch.get_num_threads()
    print(
        f"torch {torch.__version__}, {threads} threads, {device.type}, batch 1, {args.repeats} turns\n"
    )
    print("| n | attention | ms a token | over the first (range) | live V |")
    print("|---:|---|---:|---:|---:|")
    for n in args.lengths:
        text = torch.from_numpy(stream.read(0, n + 1).astype("int64"))[None].to(device)
        tokens = [NextToken(model, text) for model in models]
        turns = [[token.milliseconds() for token in tokens] for _ in range(args.repeats + 2)]
        turns = sorted(turns, key=sum)[: max(1, args.repeats // 4)]
        for i, (model, token) in enumerate(zip(models, tokens, strict=True)):
            ratios = sorted(turn[i] / turn[0] for turn in turns)
            tenth = len(ratios) // 10
            ratio = (
                f"{statistics.median(ratios):.2f} ({ratios[tenth]:.2f}-{ratios[-1 - tenth]:.2f})"
            )
            ms = statistics.median(turn[i] for turn in turns)
            live = token.live_share()
            name = describe_layers(model.config)
            print(f"| {n} | {name} | {ms:.2f} | {ratio} | {live:.3f} |", flush=True)


if __name__ == "__main__":
    run_main(main)
