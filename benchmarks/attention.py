"""Time and peak memory of the attention engines, as ratios to SDPA's softmax in the same run.

    python -m benchmarks.attention                           # T = 1024, 4096, 16384 on CPU, 1 thread
    python -m benchmarks.attention --lengths 1024 --repeats 9

Every row is measured side by side with the softmax baseline: in each repeat both run in turn, and the
ratio is taken within the repeat; the table shows the median of those ratios. Memory is the peak of
live tensor bytes during one forward + backward, inputs and gradients left out, counted by a
TorchDispatchMode, so it does not depend on what ran before.
"""

from __future__ import annotations

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
from infra.cli import ArgumentParser, run_main
from normalisers.base import NORMALISERS
from schema import AttentionConfig

LSSAR = AttentionConfig(normaliser="lssa", reweight_p=15)
CASES: dict[str, tuple[AttentionConfig, str]] = {
    "softmax rows": (AttentionConfig(), "rows"),
    "LSSAR p=15 rows": (LSSAR, "rows"),
    "LSSAR p=15 rows, compiled": (LSSAR.model_copy(update={"compile_rows": True}), "rows"),
    "LSSA rows": (AttentionConfig(normaliser="lssa"), "rows"),
    "SSMax sdpa": (AttentionConfig(normaliser="ssmax"), "sdpa"),
    "NormSoftmax sdpa": (AttentionConfig(normaliser="norm_softmax"), "sdpa"),
    "NormSoftmax dense": (AttentionConfig(normaliser="norm_softmax"), "dense"),
    **{
        f"{name} rows": (AttentionConfig(normaliser=name), "rows")
        for name, definition in NORMALISERS.items()
        if definition.__module__ == "rivals"
    },
}
DENSE_LIMIT = 4096  # (T, T) tensors of a longer dense run would take tens of GB


def naive_lssar(q: Tensor, k: Tensor, v: Tensor, p: int = 15) -> Tensor:
    """LSSAR as the paper's formulas read, in dense float32 tensors (sharp rows overflow: see reweight)."""
    length, head_dim = q.shape[-2:]
    n = torch.arange(1, length + 1, device=q.device, dtype=torch.float32)[:, None]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    x = (q @ k.mT).float() * (math.log(head_dim) * n.log())
    a = F.softplus(x) * torch.ones(length, length, device=q.device).tril()
    a = a / a.sum(-1, keepdim=True)
    b = torch.relu(a * n - (n > 3).float()) ** p  # 0 where a is
    return (b / b.sum(-1, keepdim=True)).to(v.dtype) @ v


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensor storages that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.live or storage.nbytes() == 0:
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, key)

    def remove(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def runner(name: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A function that computes one case's output."""
    if name == "softmax SDPA":
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "LSSAR p=15 naive dense":
        return lambda: naive_lssar(q, k, v)
    options, engine = CASES[name]
    normaliser = make_normaliser(options, q.shape[1], q.shape[-1], q.shape[-2])
    return lambda: attend(q, k, v, normaliser, engine)  # type: ignore[arg-type]


def seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def peak_mb(fn: Callable[[], object]) -> float:
    with PeakBytes() as mode:
        fn()
    return mode.peak / 1e6


def measure(name: str, length: int, n_head: int, head_dim: int, repeats: int) -> str:
    """One table row: forward and forward + backward over softmax SDPA, milliseconds, peak memory."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n_head, length, head_dim, requires_grad=True) for _ in range(3))
    g = torch.randn(1, n_head, length, head_dim)
    base, case = runner("softmax SDPA", q, k, v), runner(name, q, k, v)

    def both(fn: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(fn(), [q, k, v], g)

    both(base)(), both(case)()  # warm-up, and compilation
    times = [(seconds(both(case)), seconds(both(base))) for _ in range(repeats)]
    ratios = [ours / theirs for ours, theirs in times]
    with torch.no_grad():
        base(), case()
        forward = [seconds(case) / seconds(base) for _ in range(repeats)]
    ms = 1e3 * statistics.median(ours for ours, _ in times)
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    memory = "-" if "compiled" in name else f"{peak_mb(both(case)):.0f}"
    return (
        f"| {name:26} | {length:6} | {statistics.median(forward):5.2f} | {statistics.median(ratios):5.2f} "
        f"| {spread:11} | {ms:8.1f} | {memory:>6} |"
    )


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, CPU, {args.threads} thread(s), batch 1, {args.heads} heads, head size "
        f"{args.head_dim}, float32, {args.repeats} repeats (half above 4096)\n"
    )
    print("| case                       |      T |   fwd | f + b | f + b range |   f+b ms | MB f+b |")
    print("|----------------------------|-------:|------:|------:|-------------|---------:|-------:|")
    for length in args.lengths:
        for name in ["softmax SDPA", *CASES, "LSSAR p=15 naive dense"]:
            if "dense" in name and length > DENSE_LIMIT:
                continue
            repeats = args.repeats if length <= 4096 else max(3, args.repeats // 2)
            print(measure(name, length, args.heads, args.head_dim, repeats), flush=True)


if __name__ == "__main__":
    run_main(main)
