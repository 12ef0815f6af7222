"""Time and bytes of one more token after n cached ones, on trained models that are measured in turn.

    ./demo.sh                                            # trains the two runs that are the default
    python -m benchmarks.generate
    python -m benchmarks.generate runs/softmax runs/lssar --lengths 16384 --skip-mass 1e-4

The cache holds validation text of the first run's dataset: how many weights of a row are 0 is a property of
trained models. Times (on a CPU: CPU time) are medians over the fastest quarter of the turns, which other
processes disturb least; the ratio to the first run is the median of ratios within those turns (range: their
middle 80 %).
`live V` is the share of V's rows with a weight above 0 (or above what skip_mass leaves out), over all layers
and heads; `bytes` is what the fused kernels move for a key and head in 16 bits (engines/triton_decode.py;
softmax by SDPA: 4 D).
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from evals.common import open_validation
from infra.cli import ArgumentParser, positive_int, run_main
from model import GPT, KVCache
from positions import RopeScaling
from schema import describe_attention
from training.attention_statistics import attention_inputs
from training.checkpoint import load_model

RUNS = ["runs/demo_softmax", "runs/demo_lssar"]


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="*", default=RUNS, help=f"run folders (default: {' '.join(RUNS)})")
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--repeats", type=positive_int, default=200, help="turns at each length (200)")
    parser.add_argument("--data", metavar="DIR", help="dataset folder (default: that of the first run)")
    parser.add_argument(
        "--skip-mass", type=float, default=0.0, help="of a row, left out at most (default: 0)"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [load_model(Path(run), device)[0].eval() for run in args.runs]
    for model in models:
        model.skip_mass(args.skip_mass)
    stream = open_validation(models[0].config, args.data)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device.type}, batch 1, "
          f"skip_mass {args.skip_mass:g}, {args.repeats} turns\n")  # fmt: skip
    print("|      n | attention                  | ms a token | over the first (range)   | live V | bytes |")
    print("|-------:|----------------------------|-----------:|-------------------------:|-------:|------:|")
    for n in args.lengths:
        text = torch.from_numpy(stream.read(0, n + 1).astype("int64"))[None].to(device)
        steps = [Step(model, text) for model in models]
        turns = [[step.milliseconds() for step in steps] for _ in range(args.repeats + 2)]
        turns = sorted(turns, key=sum)[: max(1, args.repeats // 4)]
        for i, (model, step) in enumerate(zip(models, steps, strict=True)):
            ratios = sorted(turn[i] / turn[0] for turn in turns)
            tenth = len(ratios) // 10
            ratio = f"{statistics.median(ratios):.2f} ({ratios[tenth]:.2f}-{ratios[-1 - tenth]:.2f})"
            with model.autocast():
                live, d = step.live_share(), model.config.model.head_dim
            moved = 4 * d if model.engine_description == "sdpa" else 2 * d + 8 + 2 * d * live
            name = describe_attention(model.config.attention)
            print(f"| {n:6} | {name:26} | {statistics.median(turn[i] for turn in turns):10.2f} "
                  f"| {ratio:24} | {live:6.3f} | {moved:5.0f} |", flush=True)  # fmt: skip


class Step:
    """A model with all but the last token of a text (1, n + 1) in its cache."""

    def __init__(self, model: GPT, text: Tensor) -> None:
        self.model, self.token, self.n = model, text[:, -1:], text.shape[1] - 1
        self.rope = RopeScaling("ntk", length=self.n + 1)
        self.cache = KVCache(model.config.model.n_layer, self.n + 1)
        with torch.inference_mode(), model.autocast():
            model.hidden(text[:, :-1], self.rope, self.cache)

    @torch.inference_mode()
    def milliseconds(self) -> float:
        """Of the next token's logits. The pause begins a new time slice where other processes run, too."""
        time.sleep(0.003)
        clock = time.perf_counter if self.token.is_cuda else time.process_time
        start = clock()
        with self.model.autocast():
            self.model.logits(self.model.hidden(self.token, self.rope, self.cache))
        if self.token.is_cuda:
            torch.cuda.synchronize()
        self.cache.length = self.n
        return 1000 * (clock() - start)

    @torch.inference_mode()
    def live_share(self) -> float:
        """Share of the next token's weights that are above 0, or above what skip_mass leaves out."""
        shares = []
        for normaliser, q, keys in attention_inputs(self.model, self.token, self.rope, self.cache):
            weights = normaliser.weights(q, keys, cached=True)
            cut = weights.amax(-1, keepdim=True) * (normaliser.skip_mass / keys.shape[-2])
            shares.append((weights > cut).float().mean().item())
        return statistics.mean(shares)


if __name__ == "__main__":
    run_main(main)
