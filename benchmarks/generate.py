"""Time of one more token after n cached ones, with the KV cache and without.

    python -m benchmarks.generate
    python -m benchmarks.generate configs/softmax.toml configs/lssar.toml --lengths 1024 4096 16384

Models are untrained (the time does not depend on the weights) and lengths exceed the training length. With
the cache a token takes a constant time, for the layers' matrices, plus a time in proportion to n, for the
keys: the table gives the least-squares line and each time's ratio to it. Without the cache all n tokens go
through the model again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from attention import describe_attention
from config import load_config
from infra.cli import ArgumentParser, positive_int, run_main
from model import GPT, KVCache
from positions import RopeScaling

CONFIGS = ["configs/demo_softmax.toml", "configs/demo_lssar.toml"]


def main() -> None:
    parser = ArgumentParser(__doc__, prog="python -m benchmarks.generate")
    parser.add_argument("configs", nargs="*", default=CONFIGS)
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=positive_int, default=30, help="tokens timed at each length (30)")
    parser.add_argument("--uncached-up-to", type=int, default=4096, help="longest without the cache (4096)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device.type}, float32, batch 1\n")
    print("| attention                  |      n | ms a token | over the line | ms without cache | ratio |")
    print("|----------------------------|-------:|-----------:|--------------:|-----------------:|------:|")
    lines = []
    for path in args.configs:
        config = load_config(path)
        name, model = describe_attention(config.attention), GPT(config, device).eval()
        times = [token_times(model, n, args.repeats, n <= args.uncached_up_to) for n in args.lengths]
        slope, constant = np.polyfit(args.lengths, [cached for cached, _ in times], 1)
        for n, (cached, uncached) in zip(args.lengths, times, strict=True):
            ratio = f"{uncached:16.1f} | {uncached / cached:5.0f}" if uncached else f"{'-':>16} | {'-':>5}"
            print(
                f"| {name:26} | {n:6} | {cached:10.2f} | {cached / (constant + slope * n):13.2f} | {ratio} |"
            )
        lines.append(f"{name}: {constant:.2f} ms + {1000 * slope:.2f} ms for 1000 cached keys")
    print("\n" + "\n".join(lines))


@torch.no_grad()
def token_times(model: GPT, n: int, repeats: int, uncached: bool) -> tuple[float, float | None]:
    """Milliseconds for the token after n others, with the cache and, on demand, without."""
    tokens = torch.randint(model.config.model.vocab_size, (1, n), device=model.embedding.weight.device)
    rope = RopeScaling("ntk", length=n + 1)
    cache = KVCache(model.config.model.n_layer, n + 1)

    def prefill() -> None:
        cache.length = 0
        model.logits(model.hidden(tokens, rope, cache)[:, -1])

    def one_more() -> None:
        model.logits(model.hidden(tokens[:, :1], rope, cache)[:, -1])
        cache.length = n

    prefill()
    slow = milliseconds(prefill, max(1, repeats // 10)) if uncached else None
    return milliseconds(one_more, repeats), slow


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after a warm-up call."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    run_main(main)
