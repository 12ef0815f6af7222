"""Speed of the attention kernels on a GPU beside softmax, and of a training step.

    python -m benchmarks.gpu                                  # needs a CUDA device
    TRITON_INTERPRET=1 python -m benchmarks.gpu --smoke       # tiny sizes on a CPU: does this script run?

attention    65,536 tokens in 768 dimensions (12 heads of 64, or 6 of 128), causal, bfloat16. Medians of
             triton.testing.do_bench, forward + backward. The ratios are to softmax by
             F.scaled_dot_product_attention on FlashAttention-2 and on cuDNN, timed right after each
             case. LSSA stands beside the same weights by FlexAttention, as the softmax of log phi.
             At T = 4096 also with 1, 8 and 64 documents of equal length in a sequence. The baselines see one.
step         a compiled training step of a config (forward, backward, AdamW), 32 sequences of 1,024 tokens.
decode       one more token after n cached ones, batch 1, as generation.py runs it. The models are not
             trained.

Several processes compile the kernels before the first row. A row is appended to runs/gpu/rows.jsonl
when it is measured. Whether the kernels are right on this GPU is for `pytest -m gpu`.
"""

import gc
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from attention import ChosenEngine, attend, load_engine, make_normaliser
from benchmarks.generate import NextToken
from benchmarks.timing import print_header, print_row, seconds
from config import load_config
from engines.triton_kernels import INTERPRETED
from infra.cli import ArgumentParser, UserError, n_cores, run_main
from model import GPT
from normalisers.layer import NormaliserLayer
from schema import AttentionConfig, Engine

Row = dict[str, Any]
BASELINES = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
ROWS = Path("runs/gpu/rows.jsonl")
HEAD_DIMS = (64, 128)
CASES: dict[str, tuple[dict[str, Any], Engine]] = {
    "LSSAR p=15": ({"normaliser": "lssa", "reweight_p": 15}, "triton"),
    "LSSAR p=15, deterministic": ({"normaliser": "lssa", "reweight_p": 15}, "triton"),
    "LSSA": ({"normaliser": "lssa"}, "triton"),
    "LSSA, FlexAttention with log phi": ({"normaliser": "lssa"}, "flex"),
    "softmax": ({"normaliser": "softmax"}, "sdpa"),
    "SSMax on QK-norm": ({"normaliser": "ssmax", "scores": "cosine", "scale_init": 1.15}, "sdpa"),
    "FoX": ({"normaliser": "fox"}, "sdpa"),
    "softmax, FlexAttention": ({"normaliser": "softmax"}, "flex"),
    "FoX, FlexAttention": ({"normaliser": "fox"}, "flex"),
    "scale_invariant": ({"normaliser": "scale_invariant"}, "flex"),
}
# GPT-2 124M
CONFIGS = ("softmax", "lssar", "variants/ssmax_qk_norm", "variants/fox", "variants/hybrid_16_fox_4")


class Bench:
    """The device, the sizes, and how to time there."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        # the interpreter has no bfloat16 products
        self.dtype = torch.float16 if smoke else torch.bfloat16
        self.tokens = 64 if smoke else 65536
        self.width = 128 if smoke else 768

    def inputs(self, length: int, head_dim: int) -> list[Tensor]:
        """q, k, v and the gradient of o, (B, H, T, D) each."""
        shape = (max(1, self.tokens // length), self.width // head_dim, length, head_dim)
        q, k, v, do = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4))
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do]

    def attention(
        self, name: str, head_dim: int, length: int
    ) -> tuple[NormaliserLayer, ChosenEngine]:
        """A case for `length` training tokens; its engine, without a self-check at each length."""
        # the baselines beside it, too
        torch.use_deterministic_algorithms(name.endswith("deterministic"))
        options, engine = CASES[name]
        layer = make_normaliser(
            AttentionConfig(**options), self.width // head_dim, head_dim, length
        )
        return layer.to(self.device), ChosenEngine(engine, load_engine(engine).run, engine)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn if self.smoke else torch.compile(fn, dynamic=False)

    def milliseconds(self, fn: Callable[[], object], rep: int = 500) -> float:
        """The median over about `rep` milliseconds; interpreted, the time of one call."""
        if not self.smoke:
            return float(do_bench(fn, rep=rep, return_mode="median"))
        return 1e3 * seconds(fn)


def softmax(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend if q.is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def ratios(ms: float, measure: Callable[[Callable[..., Tensor]], float]) -> Row:
    """ms over what `measure` gives for each baseline that this GPU and this torch have."""
    row = {}
    for name, backend in BASELINES.items():
        try:
            row[f"over {name}"] = ms / measure(partial(softmax, backend))
        except RuntimeError as error:
            print(f"no {name} here: {error}")
    return row


# ---------------------------------------------------------------- compiling first


def compile_all(bench: Bench) -> None:
    """Fill Triton's cache from several processes: one after the other the kernels take minutes."""
    names = [name for name, (_, engine) in CASES.items() if engine == "triton"]
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(min(n_cores(), len(HEAD_DIMS) * len(names)), spawn) as pool:
        futures = [
            pool.submit(compile_case, bench.smoke, name, d) for d in HEAD_DIMS for name in names
        ]
    for error in filter(None, (future.exception() for future in futures)):
        print(f"compiling ahead failed: {error}")  # its row will fail, too


def compile_case(smoke: bool, name: str, head_dim: int) -> None:
    """Run a case and its self-check: what Triton compiles does not depend on batch and length."""
    bench = Bench(smoke)
    q, k, v, do = bench.inputs(16 if smoke else 256, head_dim)
    layer, _ = bench.attention(name, head_dim, k.shape[-2])
    torch.autograd.grad(attend(q, k, v, layer, "triton"), (q, k, v), do)


# ---------------------------------------------------------------- the rows


def attention_row(bench: Bench, name: str, head_dim: int, length: int, documents: int = 0) -> Row:
    *qkv, do = bench.inputs(length, head_dim)
    first = None
    if documents:
        size = length // documents
        first = (torch.arange(length, device=do.device) // size * size).expand(len(do), -1)
    layer, engine = bench.attention(name, head_dim, length)

    def forward_backward(fn: Callable[..., Tensor]) -> float:
        return bench.milliseconds(lambda: torch.autograd.grad(fn(*qkv), qkv, do))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        signals = k[..., : layer.n_signals]
        return attend(q, k, v, layer, engine, signals, first=first)

    # Compiled as in a model, which fuses the normalisation of q and k.
    ms = forward_backward(bench.compile(attention))
    return {"ms": ms} | ratios(ms, forward_backward)


def step_row(bench: Bench, name: str) -> Row:
    length, batch = (32, 2) if bench.smoke else (1024, 32)
    model = make_model(bench, name, length)
    compiled = bench.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(model.config.model.vocab_size, (batch, length + 1), device=bench.device)

    def step() -> None:
        with model.autocast():
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # compiles
    if not bench.smoke:
        torch.cuda.reset_peak_memory_stats()
    step()
    gigabytes = 0.0 if bench.smoke else torch.cuda.max_memory_allocated() / 1e9
    ms = bench.milliseconds(step, rep=3000)
    return {
        "engine": model.engine_note,
        "ms": ms,
        "tokens/s": batch * length / ms * 1e3,
        "GB": gigabytes,
    }


def make_model(bench: Bench, name: str, length: int) -> GPT:
    overrides = f"--train.seq-len {length} --train.batch-tokens {length} --train.micro-batch 1"
    if bench.smoke:
        overrides += " --model.n-layer 2 --model.n-head 1 --model.n-embd 32 --train.dtype float32"
    return GPT(load_config(f"configs/{name}.toml", overrides.split()), bench.device)


def decode_row(bench: Bench, name: str, n: int) -> Row:
    model = make_model(bench, name, min(n, 1024))
    text = torch.randint(model.config.model.vocab_size, (1, n + 1), device=bench.device)
    token = NextToken(model, text)
    return {"ms": statistics.median(token.milliseconds() for _ in range(40))}


def plan(smoke: bool) -> list[tuple[Callable[..., Row], Row]]:
    """What measures each row, and its arguments: LSSAR first, then the steps, decoding and
    documents, then all else.
    """
    lengths = [64] if smoke else [4096, 1024, 2048, 8192, 16384, 65536]
    # no backward on a CPU
    names = [name for name in CASES if not (smoke and CASES[name][1] == "flex")]
    attention = [
        (attention_row, {"name": name, "head_dim": head_dim, "length": length})
        for head_dim, length, name in itertools.product(HEAD_DIMS, lengths, names)
        if not name.endswith("deterministic") or length == lengths[0]
    ]
    documents = [
        (attention_row, {"name": name, "head_dim": 64, "length": lengths[0], "documents": n})
        for n, name in itertools.product((1, 8, 64), names)
        if CASES[name][1] != "sdpa"
    ]
    steps = [(step_row, {"name": name}) for name in CONFIGS]
    cached = [64] if smoke else [1024, 16384]
    decode = [(decode_row, {"name": name, "n": n}) for n in cached for name in CONFIGS]
    return [attention[0], *steps, *decode, *documents, *attention[1:]]


def measure_all(bench: Bench) -> bool:
    """Print and append every row; whether all of them could be measured."""
    device = "CPU, interpreted" if bench.smoke else torch.cuda.get_device_name()
    machine = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    print(*machine.values(), sep=", ")
    columns: list[str] = []
    whole = True
    for measure, arguments in plan(bench.smoke):
        row = {"part": measure.__name__.removesuffix("_row"), **arguments}
        torch._dynamo.reset()  # a function's ninth graph would silently run uncompiled
        try:
            row |= measure(bench, **arguments)
        except Exception as error:  # out of memory, or no such kernel: the other rows may work
            row |= {"failed": repr(error)[:200]}
            whole = False
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        with ROWS.open("a") as file:
            file.write(json.dumps(row | machine | now) + "\n")
        if list(row) != columns:
            columns = list(row)
            print()
            print_header(*columns)
        print_row(*(f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row.values()))
        gc.collect()
        torch.cuda.empty_cache()
    return whole


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument(
        "--smoke", action="store_true", help="tiny, on a CPU, with TRITON_INTERPRET=1"
    )
    args = parser.parse_args()
    if args.smoke != INTERPRETED:
        raise UserError("--smoke and TRITON_INTERPRET=1 go together: expected both or neither")
    if not args.smoke and not torch.cuda.is_available():
        raise UserError("no CUDA device: expected one, or TRITON_INTERPRET=1 and --smoke")
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.smoke)
    compile_all(bench)
    sys.exit(not measure_all(bench))


if __name__ == "__main__":
    run_main(main)
