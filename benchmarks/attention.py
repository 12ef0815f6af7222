"""Time and peak memory of the attention engines on a CPU, as ratios to SDPA's softmax in the same
run.

    python -m benchmarks.attention                           # T = 1024, 4096, 16384, one thread
    python -m benchmarks.attention --lengths 1024 --repeats 9

In each repeat a case and softmax run in turn. The table shows the median of the ratios within
repeats. Memory is the peak of live tensor bytes in one forward + backward, inputs and gradients
left out.
"""

import math
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import attend, make_normaliser
from infra.cli import ArgumentParser, positive_int, run_main
from normalisers.own import list_normalisers
from schema import AttentionConfig, Engine

NAIVE = "LSSAR p=15 naive"
LSSAR = AttentionConfig(normaliser="lssa", reweight_p=15)
THREE_PAPERS = ("softmax", "phi", "lssa", "ssmax", "ssmax_pn", "norm_softmax", "logit_norm")
OTHERS = [name for name in list_normalisers() if name not in THREE_PAPERS]
CASES: list[tuple[str, AttentionConfig, Engine]] = [
    ("softmax", AttentionConfig(), "rows"),
    ("LSSAR p=15", LSSAR, "rows"),
    ("LSSA", AttentionConfig(normaliser="lssa"), "rows"),
    ("SSMax", AttentionConfig(normaliser="ssmax"), "sdpa"),
    ("NormSoftmax", AttentionConfig(normaliser="norm_softmax"), "sdpa"),
    ("NormSoftmax", AttentionConfig(normaliser="norm_softmax"), "dense"),
    *((name, AttentionConfig(normaliser=name), "rows") for name in OTHERS),
    ("fox", AttentionConfig(normaliser="fox"), "sdpa"),
    (NAIVE, LSSAR, "dense"),
]
N_HEAD = 2
HEAD_DIM = 64
DENSE_LIMIT = 4096  # (T, T) tensors of a longer dense run would take tens of GB
HEADER = "| case | T | fwd | f + b | f + b range | f + b ms | f + b MB |\n|---|---:|---:|---:|---:|---:|---:|"


def naive_lssar(q: Tensor, k: Tensor, v: Tensor, p: int = 15) -> Tensor:
    """LSSAR as the paper's formulas read, in dense float32 tensors (sharp rows overflow: see
    reweight).
    """
    length, head_dim = q.shape[-2:]
    n = torch.arange(1, length + 1, device=q.device, dtype=torch.float32)[:, None]
    x = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * (math.log(head_dim) * n.log())
    a = F.softplus(x).tril()
    a = a / a.sum(-1, keepdim=True)
    b = torch.relu(a * n - (n > 3).float()) ** p  # 0 where a is
    return b / b.sum(-1, keepdim=True) @ v


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensor storages that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for storage in storages:
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def measure(name: str, options: AttentionConfig, engine: Engine, length: int, repeats: int) -> str:
    """One row of the table."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, N_HEAD, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    do = torch.randn(1, N_HEAD, length, HEAD_DIM)

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    layer = make_normaliser(options, N_HEAD, HEAD_DIM, length)

    def case() -> Tensor:
        if name == NAIVE:
            return naive_lssar(q, k, v)
        return attend(q, k, v, layer, engine, signals=k[..., : layer.n_signals])

    def both(fn: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(fn(), [q, k, v], do)

    both(softmax)()  # warm-up
    both(case)()
    pairs = [(seconds(both(case)), seconds(both(softmax))) for _ in range(repeats)]
    with torch.no_grad():
        forward = statistics.median(seconds(case) / seconds(softmax) for _ in range(repeats))
    with PeakBytes() as memory:
        both(case)()
    ratios = [ours / base for ours, base in pairs]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    ms = 1e3 * statistics.median(ours for ours, _ in pairs)
    numbers = f"{forward:.2f} | {statistics.median(ratios):.2f} | {spread} | {ms:.1f}"
    return f"| {name} {engine} | {length} | {numbers} | {memory.peak / 1e6:.0f} |"


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument(
        "--repeats", type=positive_int, default=7, help="half as many above T = 4096"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as train.py
    print(
        f"torch {torch.__version__}, one thread, batch 1, {N_HEAD} heads of {HEAD_DIM}, float32, "
        f"{args.repeats} repeats\n\n{HEADER}"
    )
    for length in args.lengths:
        repeats = args.repeats if length <= 4096 else max(3, args.repeats // 2)
        for name, options, engine in CASES:
            if engine != "dense" or length <= DENSE_LIMIT:
                print(measure(name, options, engine, length, repeats), flush=True)


if __name__ == "__main__":
    run_main(main)
