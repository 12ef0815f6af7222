"""The fused kernels on a GPU: correctness, speed and memory, one row of a file at a time. Run it by gpu.sh.

    benchmarks/gpu.sh main       # correctness, and the main ratios to FlashAttention
    benchmarks/gpu.sh tune       # other block sizes than engines.triton_engine.LAUNCHES
    benchmarks/gpu.sh lengths    # every length and head size
    benchmarks/gpu.sh long       # training step, 131,072 tokens, decoding
    benchmarks/gpu.sh report     # tables and targets of the rows so far; needs no GPU
    TRITON_INTERPRET=1 python -m benchmarks.gpu main --smoke      # on a CPU: does this script run at all?

A row is appended to rows.jsonl the moment it is measured and is never measured twice: a command that was
killed, or stopped at its deadline, resumes where it was. Rows that failed are there with their error, and
rows of other kernels or block sizes than the present ones are marked: --retry measures both again.

Times are medians of CUDA-event timings at 65,536 tokens in 768 dimensions (12 heads of 64, or 6 of 128),
bfloat16, causal, each case in turn with FlashAttention-2's softmax; fwd, bwd and both are medians of ratios
within a turn. TFLOP/s count the matrix products that softmax attention needs (2 forward, 5 backward, half of
them masked), whatever an implementation really does. "naive" is the paper's formula in PyTorch functions on a
quarter of the tokens. FlexAttention gets LSSA as softmax(log softplus(x)), LSSAR as two such calls; its mask
is built outside the timed call; scale_invariant runs on it as our engine flex. Each row is compiled anew.
Launches are timed alone by triton.testing.do_bench, decoding by do_bench_cudagraph.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench, do_bench_cudagraph

import engines.flex
from attention import attend, make_normaliser
from benchmarks.attention import LSSAR, naive_lssar
from config import config_from_dict
from engines import triton as triton_engine
from engines import triton_kernels
from engines.self_check import engine_error
from engines.triton import Launch, phi_attention
from engines.triton_kernels import LOG2E
from infra.cli import ArgumentParser, UserError, run_main
from model import GPT
from schema import AttentionConfig

Row = dict[str, Any]
Plan = Iterator[tuple[str, Callable[[], Row]]]  # a row's key, and what measures it
LSSA = AttentionConfig(normaliser="lssa")
BIASED = AttentionConfig(normaliser="scale_invariant")  # for the flex engine
LIMIT = 540  # seconds of a command
BROKEN = 75  # exit status: a row has broken the CUDA context, the next process resumes after it
# claim, key of its row, column, least and largest value
TARGETS: list[tuple[str, str, str, float, float]] = [
    ("16-bit error", "correct | LSSAR p=15 | d=64", "16-bit T=1000", 0, 0.02),
    ("two backward passes give the same bits", "correct | same bits", "same", 1, 1),
    ("rows with an offset among 64K uniform ones", "correct | uniform rows", "offsets", 0, 0),
    ("the same bits beyond 2^31 elements", "correct | wide offsets", "same", 1, 1),
    *((f"LSSAR / FlashAttention-2, T={t}, d={d}", f"kernel | d={d} | T={t} | LSSAR triton", "both", 0, 1.6)
      for d in (64, 128) for t in (4096, 16384)),
    ("naive / FlashAttention-2, T=4096", "kernel | d=64 | T=4096 | LSSAR naive", "both", 8, math.inf),
    ("training step / softmax's", "step | LSSAR", "ratio", 0, 1.10),
    ("peak memory of a step / softmax's", "step | LSSAR", "memory ratio", 0, 1.05),
    ("seconds of a step on 131,072 tokens", "step | 131072 tokens", "seconds", 0, 60),
    ("decoding with 65,536 keys / softmax", "decode | n=65536", "ratio", 0, 1.0),
]  # fmt: skip

# ---------------------------------------------------------------- rows


def run_part(plan: Plan, path: Path, deadline: float, done: set[str]) -> bool:
    """Measure the rows that are not done; whether the part is complete."""
    running = path.with_name("running")  # keys that ended their process: given up after the second time
    tried = running.read_text().splitlines() if running.exists() else []
    for key, measure in plan:
        if key in done:
            continue
        if time.time() > deadline - 45:
            print(f"stopped before {key}: run the same command again to resume", flush=True)
            return False
        torch._dynamo.reset()  # after 8 graphs of one function the compiler would silently stop compiling
        start = time.time()
        with running.open("a") as file:
            file.write(key + "\n")
        try:
            row = measure() if tried.count(key) < 2 else {"failed": "ended its process twice"}
        except Exception as e:
            row = {"failed": f"{type(e).__name__}: {str(e).strip()}".splitlines()[0][:170]}
        row = {"key": key, **row, "took": round(time.time() - start, 1), "at": start}
        row |= {"on": machine(), "kernels": kernels()}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        running.unlink()
        print(format_row(row), flush=True)
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                os._exit(BROKEN)  # at once: to clean up after a broken context may hang
    return True


def read_rows(path: Path) -> list[Row]:
    """The rows of the file, without a last line that was cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(path: Path, retry: bool, since: float) -> set[str]:
    """The keys of this machine's rows; with retry, without failed or outdated ones from before `since`."""
    rows = {row["key"]: row for row in read_rows(path) if row["on"] == machine()}
    bad = {key for key, row in rows.items() if "failed" in row or is_outdated(row)}
    return {key for key, row in rows.items() if not (retry and key in bad and row["at"] < since)}


@cache
def machine() -> str:
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreted"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


@cache
def kernels() -> str:
    """A hash of the kernels and their block sizes."""
    files = sorted(Path(triton_engine.__file__).parent.glob("triton*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def is_outdated(row: Row) -> bool:
    return bool(row["kernels"] != kernels())


def format_row(row: Row) -> str:
    values = {k: v for k, v in row.items() if k not in ("key", "took", "at", "on", "kernels")}
    cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()]
    return f"{row['key']:50} {'  '.join(cells)}   ({row['took']:.0f} s{', other kernels' * is_outdated(row)})"


def report(path: Path) -> None:
    """For each machine the newest row of each key, and which targets hold."""
    machines: dict[str, dict[str, Row]] = {}
    for row in read_rows(path):
        machines.setdefault(row["on"], {})[row["key"]] = row
    for name, rows in machines.items():
        print(f"\n# {name}")
        print("\n".join(format_row(rows[key]) for key in sorted(rows) if not key.startswith("tune")))
        report_tuning(rows)
        print("\n## Targets")
        for claim, key, column, least, most in TARGETS:
            value = rows.get(key, {}).get(column)
            verdict = "not measured" if value is None else "holds" if least <= value <= most else "MISSED"
            other = " (other kernels)" if key in rows and is_outdated(rows[key]) else ""
            print(f"- {verdict:12} {claim}: {value} (expected {least:g} to {most:g}){other}")


def report_tuning(rows: dict[str, Row]) -> None:
    """The five fastest launches of each kernel."""
    tuned: dict[str, list[tuple[float, str]]] = {}
    for key, row in rows.items():
        if key.startswith("tune") and "ms" in row:
            kernel, launch = key.rsplit(" | ", 1)
            tuned.setdefault(kernel, []).append((row["ms"], launch))
    for kernel, found in tuned.items():
        print(kernel, *(f"{ms:.3f} ms {launch}" for ms, launch in sorted(found)[:5]), sep="\n    ")


# ---------------------------------------------------------------- timing


class Bench:
    """The device, sizes, and how to time on it."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float16 if smoke else torch.bfloat16  # the interpreter has no bfloat16 products
        self.tokens, self.width = (64, 64) if smoke else (65536, 768)

    def seconds(self, fn: Callable[[], object]) -> float:
        if self.smoke:
            before = time.perf_counter()
            fn()
            return time.perf_counter() - before
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # about 1 ms, in which the host gets ahead of the GPU, as in training
        start.record()  # type: ignore[attr-defined]
        fn()
        end.record()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3  # type: ignore[attr-defined]

    def paired(self, case: Callable[[], object], base: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of `case`, and the median ratio to `base` run in turn with it."""
        for fn in (case, base) * (1 if self.smoke else 2):  # warm-up, and compilation
            fn()
        rounds = 1 if self.smoke else max(5, min(50, int(0.3 / self.seconds(case))))
        pairs = [(self.seconds(case), self.seconds(base)) for _ in range(rounds)]
        return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)

    def milliseconds(self, fn: Callable[[], object], timer: Callable[..., float]) -> float:
        """Median by one of Triton's timers."""
        return 1e3 * self.seconds(fn) if self.smoke else timer(fn, return_mode="median")

    def peak_gb(self, fn: Callable[[], object]) -> float:
        """GB allocated at most during a call, what was there before included."""
        if not self.smoke:
            torch.cuda.reset_peak_memory_stats()
        fn()
        return 0.0 if self.smoke else torch.cuda.max_memory_allocated() / 1e9

    def inputs(self, length: int, head_dim: int, tokens: int) -> list[Tensor]:
        """q, k, v and the gradient of o."""
        shape = (max(1, tokens // length), self.width // head_dim, length, head_dim)
        q, k, v, do = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4))
        return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do]

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn if self.smoke else torch.compile(fn, dynamic=False)


# ---------------------------------------------------------------- cases


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend if q.is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


flash = partial(sdpa, SDPBackend.FLASH_ATTENTION)


def flash_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-3 by its own function, forward and backward; raises where it is not installed."""
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

    o = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)  # type: ignore[no-any-return]


def adasplash_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Entmax, alpha = 1.5, by AdaSplash-2's kernels; raises where these are not installed."""
    from adasplash import adasplash_v2  # type: ignore[import-not-found]

    return adasplash_v2(q, k, v)  # type: ignore[no-any-return]


def flex(p: int, bench: Bench, head_dim: int, length: int) -> Callable[..., Tensor]:
    """LSSA as one FlexAttention call; with p, LSSAR as two: the first for each row's Z."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def log_softplus(x: Tensor, i: Tensor) -> Tensor:
        return torch.log(F.softplus(x * math.log(head_dim) * torch.log(i + 1.0)))

    def first(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return log_softplus(x, i)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(bench.device))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if not p:
            return flex_attention(q, k, v, score_mod=first, block_mask=mask, scale=1.0)  # type: ignore[return-value]
        _, lse = flex_attention(q, k, v, score_mod=first, block_mask=mask, scale=1.0, return_lse=True)

        def second(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            r = torch.exp(log_softplus(x, i) - lse[b, h, i]) * (i + 1.0) - torch.where(i >= 3, 1.0, 0.0)
            return torch.where(r > 0, p * torch.log(r.clamp_min(1e-30)), -float("inf"))

        return flex_attention(q, k, v, score_mod=second, block_mask=mask, scale=1.0)  # type: ignore[return-value]

    return bench.compile(fn)


def ours(
    options: AttentionConfig, engine: Any, bench: Bench, head_dim: int, length: int
) -> Callable[..., Tensor]:
    """Compiled as in a model: the compiler fuses the normalisation of q and k, the kernels are ours."""
    normaliser = make_normaliser(options, bench.width // head_dim, head_dim, length)
    normaliser.compile_rows = engine == "rows" and not bench.smoke

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, normaliser, engine)

    return bench.compile(fn) if engine == "triton" else fn


# ---------------------------------------------------------------- the parts


def correct_plan(bench: Bench, head_dims: list[int]) -> Plan:
    options = {"LSSA": LSSA, "LSSAR p=15": LSSAR}
    if not bench.smoke:
        options |= {f"LSSAR p={p}": LSSA.model_copy(update={"reweight_p": p}) for p in (1, 3, 50, 100)}
        options["softmax p=3"] = AttentionConfig(normaliser="softmax", reweight_p=3)
        for phi in ("sigmoid", "gelu", "mish", "relu6"):
            options[phi] = AttentionConfig(normaliser="phi", phi=phi)  # type: ignore[arg-type]

    def errors(option: AttentionConfig, head_dim: int) -> Row:
        normaliser = make_normaliser(option, 2, head_dim, 1024).to(bench.device)
        runs = [(bench.dtype, 1000, "16-bit T=1000"), (torch.float32, 200, "float32 T=200")]
        return {name: engine_error(triton_engine, normaliser, bench.device, dtype, 100 if bench.smoke else length)
                for dtype, length, name in runs}  # fmt: skip

    def flex_errors(head_dim: int) -> Row:
        normaliser = make_normaliser(BIASED, 2, head_dim, 1024).to(bench.device)
        runs = [(bench.dtype, "16-bit T=200"), (torch.float32, "float32 T=200")]
        return {name: engine_error(engines.flex, normaliser, bench.device, dtype) for dtype, name in runs}

    for head_dim in head_dims:
        for name, option in options.items():
            yield f"correct | {name} | d={head_dim}", partial(errors, option, head_dim)
        if not bench.smoke:  # FlexAttention has no backward pass on a CPU
            yield f"correct | scale_invariant flex | d={head_dim}", partial(flex_errors, head_dim)
    yield "correct | same bits", partial(same_bits, bench)
    yield "correct | uniform rows", partial(uniform_rows, bench)
    yield "correct | wide offsets", partial(wide_offsets, bench)


def lssar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LSSAR's kernels alone, without the normalisation of q and k; |q.k| < 240."""
    q = (q * (0.25 * LOG2E.value)).to(v.dtype)
    return phi_attention(q, k, v, phi="softplus", l1=True, p=15, bounded=True)


def grads(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """o, dq, dk, dv of `lssar` from q, k, v and the gradient of o."""
    q, k, v = (t.detach().requires_grad_() for t in inputs[:3])
    o = lssar(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), inputs[3])


def same_bits(bench: Bench) -> Row:
    inputs = bench.inputs(64 if bench.smoke else 4096, 64, bench.tokens)
    first, second = grads(inputs), grads(inputs)
    return {"same": float(all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))}


def uniform_rows(bench: Bench) -> Row:
    """Rows of equal scores: how many got an offset, which is rounding (`normalisers.reweight`); o's error."""
    length, d = (200, 16) if bench.smoke else (65536, 64)
    v = torch.randn(1, 1, length, d, device=bench.device).to(bench.dtype)
    q, k = torch.full_like(v, 1.1 * LOG2E.value / d), torch.ones_like(v)
    o, stats = torch.ops.phi_attention.forward(q, k, v, None, "softplus", True, 15, True, None)
    n = torch.arange(1, length + 1, device=bench.device).double()[:, None]
    want = v.double().cumsum(-2) / n
    return {"offsets": float((stats[..., 1] != 0).sum()), "o": float((o - want).norm() / want.norm())}


def wide_offsets(bench: Bench) -> Row:
    """Views of one fused projection whose rows span more than 2^31 elements, against copies of them."""
    length, heads = (64, 2) if bench.smoke else (131072, 128)
    wide = torch.randn(1, length, 3, heads, 64, device=bench.device, dtype=bench.dtype)
    views = [*wide[:, :, :, -1:].permute(2, 0, 3, 1, 4), torch.randn_like(wide[:, :, 0, -1:].transpose(1, 2))]
    results = [grads(inputs) for inputs in (views, [t.contiguous() for t in views])]
    return {"same": float(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))}


Make = Callable[[Bench, int, int], Callable[..., Tensor]]  # the function o(q, k, v) for a head_dim and length
CASES: dict[str, Make] = {  # what matters most is measured first, at all sizes
    "FlashAttention-2": lambda *_: flash,
    "LSSAR triton": partial(ours, LSSAR, "triton"),
    "LSSA triton": partial(ours, LSSA, "triton"),
    "cuDNN": lambda *_: partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-3": lambda *_: flash_3,
    "LSSA FlexAttention": partial(flex, 0),
    "LSSAR FlexAttention": partial(flex, 15),
    "scale_invariant FlexAttention": partial(ours, BIASED, "flex"),
    "scale_invariant rows": partial(ours, BIASED, "rows"),
    "LSSAR naive": lambda *_: naive_lssar,
    "LSSAR rows": partial(ours, LSSAR, "rows"),
    "entmax AdaSplash-2": lambda *_: adasplash_2,  # tunes itself for minutes
}
LONGEST = {"naive": 4096, "rows": 16384, "FlexAttention": 16384}  # by a name's last word


def kernel_plan(bench: Bench, lengths: list[int], head_dims: list[int]) -> Plan:
    for (name, make), head_dim, length in itertools.product(CASES.items(), head_dims, lengths):
        if length <= LONGEST.get(name.split()[-1], math.inf) and not (bench.smoke and "Flex" in name):
            tokens = max(bench.tokens // 4 if "naive" in name else bench.tokens, length)
            key = f"kernel | d={head_dim} | T={length} | {name}"
            yield key, partial(kernel_row, make, bench, head_dim, length, tokens)


def kernel_row(make: Make, bench: Bench, head_dim: int, length: int, tokens: int) -> Row:
    torch._functorch.config.donated_buffer = False  # else compiled graphs reject retain_graph, below
    fn = make(bench, head_dim, length)
    q, k, v, do = bench.inputs(length, head_dim, tokens)

    def both(f: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(q, k, v), (q, k, v), do)

    def backward(f: Callable[..., Tensor]) -> Callable[[], object]:
        o = f(q, k, v)
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    seconds, ratio = bench.paired(both(fn), both(flash))
    _, backward_ratio = bench.paired(backward(fn), backward(flash))
    with torch.no_grad():
        _, forward_ratio = bench.paired(lambda: fn(q, k, v), lambda: flash(q, k, v))
    flops = 7 * q.shape[0] * bench.width * length**2  # 7 products of 2 T T D H, half of them masked
    return {"fwd": forward_ratio, "bwd": backward_ratio, "both": ratio, "ms": 1e3 * seconds,
            "TFLOP/s": flops / seconds / 1e12, "GB": bench.peak_gb(both(fn))}  # fmt: skip


def step_plan(bench: Bench) -> Plan:
    yield "step | LSSAR", partial(whole_step, bench)
    yield "step | 131072 tokens", partial(long_step, bench)
    for n_keys in (128,) if bench.smoke else (1024, 16384, 65536, 131072):
        yield f"decode | n={n_keys}", partial(decode, bench, n_keys, 0.0)
        yield f"decode | n={n_keys} | skip_mass=1e-4", partial(decode, bench, n_keys, 1e-4)


def stepper(bench: Bench, attention: Row, length: int, batch: int) -> Callable[[], object]:
    """One training step of the 124M model (forward, backward, AdamW), compiled, on random tokens."""
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 32, "vocab_size": 100} if bench.smoke else {}
    train = {"seq_len": length, "batch_tokens": length * 4, "dtype": "float32" if bench.smoke else "bfloat16"}
    values = {"name": "bench", "model": sizes, "attention": attention, "train": train}
    config = config_from_dict(values | {"optimizer": {"warmup_steps": 0}}, "benchmark")
    model = GPT(config, bench.device)
    compiled = bench.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not bench.smoke)
    tokens = torch.randint(config.model.vocab_size, (batch, length + 1), device=bench.device)

    def step() -> None:
        with model.autocast():
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


LSSAR_SECTION = {"normaliser": "lssa", "reweight_p": 15, "engine": "triton"}


def whole_step(bench: Bench) -> Row:
    """LSSAR's step in turn with softmax's; peak memory of each while the other model is not there."""
    length, batch = (32, 2) if bench.smoke else (1024, 32)
    memory = []
    for section in (LSSAR_SECTION, {}):
        step = stepper(bench, section, length, batch)
        step()
        memory.append(bench.peak_gb(step))
        del step
        torch._dynamo.reset()
        gc.collect()
    lssar, softmax = (stepper(bench, section, length, batch) for section in (LSSAR_SECTION, {}))
    seconds, ratio = bench.paired(lssar, softmax)
    return {"ms": 1e3 * seconds, "ratio": ratio, "tokens/s": length * batch / seconds, "GB": memory[0],
            "memory ratio": memory[0] / memory[1] if memory[1] else 1.0}  # fmt: skip


def long_step(bench: Bench) -> Row:
    step = stepper(bench, LSSAR_SECTION, 128 if bench.smoke else 131072, 1)
    step()
    return {"GB": bench.peak_gb(step), "seconds": bench.seconds(step)}


def decode(bench: Bench, n_keys: int, skip_mass: float) -> Row:
    """One token of 8 sequences on 12 heads of 64, on keys as the cache has them, over SDPA's softmax.

    On random keys, of which about 40 % have weight; trained models: benchmarks/generate.py.
    """
    batch, heads = (1, 1) if bench.smoke else (8, 12)
    k, v = (torch.randn(batch, heads, n_keys, 64, device=bench.device, dtype=bench.dtype) for _ in range(2))
    q = torch.randn_like(k[:, :, :1])
    normaliser = make_normaliser(LSSAR, heads, 64, n_keys)
    normaliser.skip_mass = skip_mass
    keys = normaliser.cache_keys(k)
    fn = bench.compile(lambda: attend(q, keys, v, normaliser, "triton", cached=True))
    with torch.no_grad():
        weights = normaliser.weights(q[:1], keys[:1], cached=True)
        live = (weights > weights.amax(-1, keepdim=True) * (skip_mass / n_keys)).float().mean().item()
        ms = bench.milliseconds(fn, do_bench_cudagraph)
        base = bench.milliseconds(lambda: F.scaled_dot_product_attention(q, k, v), do_bench_cudagraph)
    moved = batch * heads * n_keys * (2 * 64 + 8 + 2 * 64 * live)
    return {"us": 1e3 * ms, "ratio": ms / base, "live V": live, "GB/s": moved / ms / 1e6}


# ---------------------------------------------------------------- tuning


def launch_table() -> dict[str, dict[int, Launch]]:
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    return triton_engine.LAUNCHES[min(major, max(triton_engine.LAUNCHES))]


def tune_plan(bench: Bench, head_dims: list[int], done: set[str]) -> Plan:
    """The table's launches and others, one kernel at a time."""
    blocks = [(64, 64), (128, 64), (64, 128), (128, 128), (128, 32), (32, 128)]
    others = [Launch(m, n, max(m, n) // 16, s, r) for m, n in blocks for s in (2, 3) for r in (128, 168, 255)]
    rows = {
        f"tune | d={d} | {kernel} | {tuple(launch)}": (d, kernel, launch)
        for d in head_dims
        for kernel, by_size in launch_table().items()
        for launch in [by_size[max(64, d)], *others[: 1 if bench.smoke else None]]
        if kernel != "forward" or launch.keys <= 64  # one logarithm for the keys of a tile
    }
    if not bench.smoke:
        compile_variants([variant for key, variant in rows.items() if key not in done])
    for key, variant in rows.items():
        yield key, partial(tune_row, bench, *variant)


def with_launch(head_dim: int, kernel: str, launch: Launch, fn: Callable[[], Any]) -> Any:
    by_size, size = launch_table()[kernel], max(64, head_dim)
    kept, by_size[size] = by_size[size], launch
    try:
        return fn()
    finally:
        by_size[size] = kept


def tune_row(bench: Bench, head_dim: int, kernel: str, launch: Launch) -> Row:
    """Milliseconds of forward, or of backward, at T = 4096."""
    q, k, v, do = bench.inputs(64 if bench.smoke else 4096, head_dim, bench.tokens)

    def measure() -> float:
        if kernel == "forward":
            with torch.no_grad():
                return bench.milliseconds(lambda: lssar(q, k, v), do_bench)
        o = lssar(q, k, v)
        return bench.milliseconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), do_bench)

    return {"ms": with_launch(head_dim, kernel, launch, measure)}


def compile_variants(found: list[tuple[int, str, Launch]]) -> None:
    """Fill Triton's cache from many processes: a variant takes seconds to compile, milliseconds to time."""
    print(f"compiling {len(found)} variants", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), spawn, initializer=end_with_parent) as pool:
        try:
            for variant in found:
                pool.submit(compile_variant, *variant)
        except BrokenProcessPool:  # the compiler has aborted: the rest is compiled when it is measured
            print("a compilation ended its process", flush=True)


def end_with_parent() -> None:
    """At the deadline the parent exits at once, whatever its workers do: Linux ends them."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def compile_variant(head_dim: int, kernel: str, launch: Launch) -> None:
    inputs = Bench(smoke=False).inputs(256, head_dim, 256)
    with_launch(head_dim, kernel, launch, lambda: grads(inputs))


# ---------------------------------------------------------------- command line


def plan_of(part: str, bench: Bench, done: set[str]) -> Plan:
    head_dims, smoke = ([64] if bench.smoke else [64, 128]), bench.smoke
    match part:
        case "main":
            yield from correct_plan(bench, head_dims)
            yield from kernel_plan(bench, [64] if smoke else [4096], head_dims)
        case "tune":
            yield from tune_plan(bench, head_dims, done)
        case "lengths":
            yield from kernel_plan(bench, [64, 96] if smoke else [1024, 16384, 2048, 8192, 65536], head_dims)
        case "long":
            yield from step_plan(bench)


def stop() -> None:
    """Rows are on disk already: the process may end in the middle of a compilation."""
    print("stopped at the deadline: run the same command again to resume", flush=True)
    os._exit(0)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("part", choices=["main", "tune", "lengths", "long", "report"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of rows.jsonl (runs/gpu)")
    parser.add_argument("--until", type=float, default=time.time() + LIMIT, metavar="SECONDS",
                        help="stop at this time, in seconds since 1970 (default: in 9 minutes)")  # fmt: skip
    parser.add_argument(
        "--retry", action="store_true", help="measure failed rows and those of other kernels again"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, with TRITON_INTERPRET=1")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rows.jsonl"
    if args.part == "report":
        return report(path)
    if args.smoke != triton_kernels.INTERPRETED:
        raise UserError("--smoke and TRITON_INTERPRET=1 go together; expected both or neither")
    if not args.smoke and not torch.cuda.is_available():
        raise UserError("no CUDA device; expected one (or TRITON_INTERPRET=1 and --smoke)")
    guard = threading.Timer(max(0.0, args.until - time.time()), stop)
    guard.daemon = True
    guard.start()
    torch.manual_seed(0)
    done = finished(path, args.retry, since=args.until - LIMIT)
    try:
        if run_part(plan_of(args.part, Bench(args.smoke), done), path, args.until, done):
            print(f"{args.part} is complete")
    finally:
        guard.cancel()
    report(path)


if __name__ == "__main__":
    run_main(main)
