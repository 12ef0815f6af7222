"""Time and peak memory of the attention engines on a CPU, as ratios to SDPA's softmax in the same
run.

    python -m benchmarks.attention                           # T = 1024, 4096, 16384, one thread
    python -m benchmarks.attention --lengths 1024 --repeats 9
    python -m benchmarks.attention --lengths 2048 --documents 2 8 64

In each repeat a case and softmax run in turn. The table shows the median of the ratios within
repeats of CPU time, and their range. Memory is the peak of live tensor bytes in one forward +
backward, inputs left out. With --documents a case runs in turn with itself on one document, each
by the engine that auto chooses.
"""

import statistics
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import attend, make_normaliser
from benchmarks.timing import print_header, print_row, ratio, seconds
from infra.cli import ArgumentParser, positive_int, run_main
from normalisers.own import list_normalisers
from schema import AttentionConfig, Engine

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
    ("LSSAR p=15", LSSAR, "dense"),
]
DOCUMENT_CASES: list[tuple[str, AttentionConfig, Engine]] = [
    ("softmax", AttentionConfig(), "auto"),
    ("LSSAR p=15", LSSAR, "auto"),
    ("fox", AttentionConfig(normaliser="fox"), "auto"),
]
N_HEAD = 2
HEAD_DIM = 64
DENSE_LIMIT = 4096  # (T, T) tensors of a longer dense run would take tens of GB


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


def measure(
    name: str, options: AttentionConfig, engine: Engine, length: int, documents: int, repeats: int
) -> None:
    """Print one row of the table. documents: in the sequence, 0: none are told apart."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, N_HEAD, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    do = torch.randn(1, N_HEAD, length, HEAD_DIM)
    layer = make_normaliser(options, N_HEAD, HEAD_DIM, length)

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attention(first: Tensor | None = None) -> Tensor:
        return attend(q, k, v, layer, engine, k[..., : layer.n_signals], first=first)

    base: Callable[[], Tensor] = softmax
    case: Callable[[], Tensor] = attention
    if documents:
        size = length // documents
        base = attention
        case = partial(attention, torch.arange(length)[None] // size * size)

    def both(fn: Callable[[], Tensor]) -> object:
        return torch.autograd.grad(fn(), [q, k, v], do)

    both(base)  # warm-up
    both(case)
    clock = partial(seconds, clock=time.process_time)
    rounds = [[clock(partial(both, fn)) for fn in (case, base)] for _ in range(repeats)]
    with torch.no_grad():
        forward = [[clock(fn) for fn in (case, base)] for _ in range(repeats)]
    with PeakBytes() as memory:
        memory.live = {t.untyped_storage()._cdata: 0 for t in (q, k, v, do)}  # also their views
        both(case)
    ours, theirs = zip(*rounds, strict=True)
    ms = f"{1e3 * statistics.median(ours):.1f}"
    ratios = ratio(*zip(*forward, strict=True)), ratio(ours, theirs)
    where = f"{name}, {documents} documents" if documents else f"{name}, {engine}"
    print_row(where, length, *ratios, ms, f"{memory.peak / 1e6:.1f}")


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--lengths", type=positive_int, nargs="+", default=[1024, 4096, 16384])
    add("--documents", type=positive_int, nargs="+")
    add("--repeats", type=positive_int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as train.py
    print(
        f"torch {torch.__version__}, one thread, batch 1, {N_HEAD} heads of {HEAD_DIM}, float32\n"
    )
    print_header("case", "T", "forward", "forward + backward", "ms", "MB")
    cases = DOCUMENT_CASES if args.documents else CASES
    for length in args.lengths:
        for (name, options, engine), documents in product(cases, args.documents or [0]):
            if engine != "dense" or length <= DENSE_LIMIT:
                measure(name, options, engine, length, documents, args.repeats)


if __name__ == "__main__":
    run_main(main)
