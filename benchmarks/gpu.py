"""The fused kernels on a GPU: correctness, speed and memory, as tables. Run it by benchmarks/gpu.sh.

    python -m benchmarks.gpu                                 # all of it
    python -m benchmarks.gpu --only correct kernels --lengths 4096 --head-dims 64
    python -m benchmarks.gpu --tune                          # and other block sizes
    TRITON_INTERPRET=1 python -m benchmarks.gpu --smoke      # on a CPU: does this script run at all?

Kernel times are medians of CUDA-event timings at 65,536 tokens in 768 dimensions (12 heads of 64, or 6 of
128), bfloat16, causal, each row measured in turn with FlashAttention's softmax; ratios are taken within a
turn. TFLOP/s count the matrix products that softmax attention needs (2 forward, 5 backward, half of them
masked), whatever an implementation really does; the peak is measured in the same run. "naive" is the
paper's formula in PyTorch functions; as its (T, T) tensors do not fit, a quarter of the tokens are given to
it and to FlashAttention. FlexAttention gets LSSA as softmax(log softplus(x)), LSSAR as two such calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import attend, make_normaliser
from config import AttentionConfig, Config, config_from_dict
from engines import fused
from engines.fused import Launch, fused_error
from infra.cli import ArgumentParser, UserError, run_main
from model import GPT

LSSA = AttentionConfig(normaliser="lssa")
LSSAR = AttentionConfig(normaliser="lssa", reweight_p=15)
TARGETS: list[tuple[str, bool]] = []  # what issue-sized claims were checked, and whether they hold
WIDTH = 768
FLEX_LENGTHS = (1024, 4096, 16384)  # each is compiled anew, which takes a while


class Bench:
    """The device, sizes, and how to time on it."""

    def __init__(self, smoke: bool):
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float16 if smoke else torch.bfloat16  # the interpreter has no bfloat16 products
        self.tokens = 128 if smoke else 65536
        self.peak = 0.0  # FLOP/s

    def seconds(self, fn: Callable[[], object]) -> float:
        if self.smoke:
            before = time.perf_counter()
            fn()
            return time.perf_counter() - before
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[attr-defined]
        fn()
        end.record()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3  # type: ignore[attr-defined]

    def paired(self, case: Callable[[], object], base: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of `case`, and the median ratio to `base` run in turn with it."""
        case(), base(), case(), base()  # warm-up, and compilation
        rounds = 1 if self.smoke else max(5, min(50, int(0.3 / self.seconds(case))))
        pairs = [(self.seconds(case), self.seconds(base)) for _ in range(rounds)]
        return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)

    def peak_memory(self, fn: Callable[[], object]) -> float:
        """GB allocated at most during a call, what was there before included."""
        if self.smoke:
            fn()
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 1e9

    def inputs(self, length: int, head_dim: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = (max(1, tokens // length), WIDTH // head_dim, length, head_dim)
        q, k, v, do = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def target(claim: str, value: float, limit: float, at_least: bool = False) -> None:
    TARGETS.append((f"{claim}: {value:.2f} ({'>=' if at_least else '<='} {limit})",
                    value >= limit if at_least else value <= limit))  # fmt: skip


# ---------------------------------------------------------------------------------------------------
# What is measured
# ---------------------------------------------------------------------------------------------------


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.is_cuda:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def naive(q: Tensor, k: Tensor, v: Tensor, p: int = 15) -> Tensor:
    """LSSAR as the paper's formulas read, in PyTorch functions; scores and weights in float32."""
    length, head_dim = q.shape[-2:]
    n = torch.arange(1, length + 1, device=q.device, dtype=torch.float32)[:, None]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    x = (q @ k.mT).float() * (math.log(head_dim) * n.log())
    mask = torch.ones(length, length, device=q.device).tril()
    a = F.softplus(x) * mask
    a = a / a.sum(-1, keepdim=True)
    r = torch.relu(a * n - (n > 3).float())
    b = (r / r.amax(-1, keepdim=True)) ** p * mask  # divided by its maximum: p = 15 overflows without
    return (b / b.sum(-1, keepdim=True)).to(v.dtype) @ v


def flex(q: Tensor, k: Tensor, v: Tensor, p: int) -> Tensor:
    """LSSA as one FlexAttention call; with p, LSSAR as two: the first for each row's Z."""
    from torch.nn.attention.flex_attention import create_block_mask

    length, head_dim = q.shape[-2:]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def log_softplus(x: Tensor, i: Tensor) -> Tensor:
        return torch.log(F.softplus(x * math.log(head_dim) * torch.log(i + 1.0)))

    def first(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return log_softplus(x, i)

    mask = create_block_mask(causal, None, None, length, length, device=str(q.device))
    if not p:
        return compiled_flex()(q, k, v, score_mod=first, block_mask=mask, scale=1.0)
    _, lse = compiled_flex()(q, k, v, score_mod=first, block_mask=mask, scale=1.0, return_lse=True)

    def second(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        a = torch.exp(log_softplus(x, i) - lse[b, h, i]) * (i + 1.0)
        r = a - torch.where(i >= 3, 1.0, 0.0)
        return torch.where(r > 0, p * torch.log(r.clamp_min(1e-30)), -float("inf"))

    return compiled_flex()(q, k, v, score_mod=second, block_mask=mask, scale=1.0)


_FLEX: list[Any] = []


def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not _FLEX:
        _FLEX.append(torch.compile(flex_attention, dynamic=False))
    return _FLEX[0]


def ours(options: AttentionConfig, engine: str, head_dim: int, length: int) -> Callable[..., Tensor]:
    normaliser = make_normaliser(options, WIDTH // head_dim, head_dim, length)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, normaliser, engine)  # type: ignore[arg-type]

    # As in a compiled model: the normalisation of q and k is fused by the compiler, the kernels are ours.
    return torch.compile(fn) if engine == "triton" and torch.cuda.is_available() else fn


def cases(length: int, head_dim: int, smoke: bool) -> dict[str, tuple[Callable[..., Tensor], int]]:
    """name -> (function, share of the tokens it gets)."""
    compiled_rows = LSSAR.model_copy(update={"compile_rows": not smoke})
    found: dict[str, tuple[Callable[..., Tensor], int]] = {
        "LSSA triton": (ours(LSSA, "triton", head_dim, length), 1),
        "LSSAR p=15 triton": (ours(LSSAR, "triton", head_dim, length), 1),
    }
    if length <= 16384:
        found["LSSAR rows, compiled"] = (ours(compiled_rows, "rows", head_dim, length), 1)
    if length <= 4096:
        found["LSSAR naive"] = (naive, 4)
    if not smoke and length in FLEX_LENGTHS:
        found["LSSA FlexAttention"] = (lambda q, k, v: flex(q, k, v, 0), 1)
        found["LSSAR FlexAttention, 2 calls"] = (lambda q, k, v: flex(q, k, v, 15), 1)
    return found


def measure_peak(bench: Bench) -> None:
    n = 64 if bench.smoke else 8192
    a, b = (torch.randn(n, n, device=bench.device, dtype=bench.dtype) for _ in range(2))
    seconds, _ = bench.paired(lambda: a @ b, lambda: a @ b)
    bench.peak = 2 * n**3 / seconds
    print(f"matrix peak, {n} x {n} x {n} {str(bench.dtype)[6:]}: {bench.peak / 1e12:.0f} TFLOP/s\n")


def correct(bench: Bench, head_dims: list[int]) -> None:
    print("## Correctness: largest relative error of o, dq, dk, dv against float64 dense weights\n")
    print("| normaliser | d | 16-bit, T = 200 | 16-bit, T = 1000 | float32, T = 200 |")
    print("|---|---:|---:|---:|---:|")
    options = [LSSA, *(LSSA.model_copy(update={"reweight_p": p}) for p in (1, 3, 15, 50, 100))]
    options += [AttentionConfig(normaliser="softmax", reweight_p=3)]
    options += [AttentionConfig(normaliser="phi", phi=phi) for phi in ("sigmoid", "gelu", "mish", "relu6")]  # type: ignore[arg-type]
    worst = 0.0
    for head_dim in head_dims:
        for option in options[:3] if bench.smoke else options:
            normaliser = make_normaliser(option, 2, head_dim, 1024).to(bench.device)
            errors = [
                fused_error(normaliser, bench.device, dtype, length)
                for dtype, length in ((bench.dtype, 200), (bench.dtype, 1000), (torch.float32, 200))
                if not bench.smoke or length == 200
            ]
            name = f"{option.normaliser} p = {option.reweight_p or '-'}"
            print(f"| {name} | {head_dim} | {' | '.join(f'{e:.1e}' for e in errors)} |", flush=True)
            worst = max(worst, *errors[:-1])
    target("largest 16-bit error", worst, 0.02)
    q, k, v, do = bench.inputs(64 if bench.smoke else 4096, 64, bench.tokens)
    runs = []
    for _ in range(2):
        o = attend(q, k, v, make_normaliser(LSSAR, q.shape[1], 64, 4096), "triton")
        runs.append(torch.autograd.grad(o, (q, k, v), do))
    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    TARGETS.append(("two backward passes give the same bits", same))
    print()


def kernels(bench: Bench, lengths: list[int], head_dims: list[int]) -> None:
    print("## Kernels: times FlashAttention's softmax\n")
    print("| d | T | case | fwd | fwd+bwd | ms fwd+bwd | TFLOP/s | of peak |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|")
    for head_dim in head_dims:
        for length in lengths:
            kernel_row(bench, "softmax FlashAttention", flash, length, head_dim, bench.tokens)
            for name, (fn, share) in cases(length, head_dim, bench.smoke).items():
                tokens = max(length, bench.tokens // share)
                try:
                    ratio = kernel_row(bench, name, fn, length, head_dim, tokens)
                except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as e:
                    print(f"| {head_dim} | {length} | {name} | failed: {str(e).splitlines()[0][:80]} |")
                    if bench.device.type == "cuda":
                        torch.cuda.empty_cache()
                    continue
                if name == "LSSAR p=15 triton" and length >= 4096:
                    target(f"LSSAR fwd+bwd / FlashAttention, T = {length}, d = {head_dim}", ratio, 1.6)
                    ours_per_flash = ratio
                if name == "LSSAR naive" and length == 4096:
                    target("naive / LSSAR, T = 4096", ratio / ours_per_flash, 5, at_least=True)


def kernel_row(bench: Bench, name: str, fn: Callable, length: int, head_dim: int, tokens: int) -> float:
    """Prints a row; returns the ratio of forward + backward to FlashAttention's."""
    q, k, v, do = bench.inputs(length, head_dim, tokens)

    def both(f: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(q, k, v), (q, k, v), do)

    seconds, ratio = bench.paired(both(fn), both(flash))
    with torch.no_grad():
        _, forward = bench.paired(lambda: fn(q, k, v), lambda: flash(q, k, v))
    flops = 7 * q.shape[0] * WIDTH * length**2  # 7 products of 2 T T D H, half of them masked
    print(
        f"| {head_dim} | {length} | {name} | {forward:.2f} | {ratio:.2f} | {1e3 * seconds:.2f} "
        f"| {flops / seconds / 1e12:.0f} | {100 * flops / seconds / bench.peak:.0f} % |",
        flush=True,
    )
    return ratio


def gpt(attention: dict[str, Any], length: int, smoke: bool) -> Config:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 32, "vocab_size": 100} if smoke else {}
    train = {"seq_len": length, "batch_tokens": length * 4, "dtype": "float32" if smoke else "bfloat16"}
    values = {"name": "bench", "model": sizes, "attention": attention, "train": train}
    return config_from_dict(values | {"optimizer": {"warmup_steps": 0}}, "benchmark")


def stepper(bench: Bench, attention: dict[str, Any], length: int, batch: int) -> Callable[[], object]:
    """One training step of the 124M model (forward, backward, AdamW), compiled, on random tokens."""
    config = gpt(attention, length, bench.smoke)
    model = GPT(config, bench.device)
    print(f"engine {model.engine_description}", flush=True)
    compiled: Any = model if bench.smoke else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not bench.smoke)
    tokens = torch.randint(config.model.vocab_size, (batch, length + 1), device=bench.device)

    def step() -> None:
        with model.autocast():
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def whole_step(bench: Bench) -> None:
    print("\n## A training step of the 124M model, compiled, bfloat16\n")
    length, batch = (32, 2) if bench.smoke else (1024, 32)
    sections = {"softmax": {}, "LSSAR": {"normaliser": "lssa", "reweight_p": 15, **engine(bench)}}
    memory = {name: alone(bench, section, length, batch) for name, section in sections.items()}
    softmax, lssar = (stepper(bench, section, length, batch) for section in sections.values())
    seconds, ratio = bench.paired(lssar, softmax)
    print(f"\nT = {length}, {batch} sequences: LSSAR p=15 {1e3 * seconds:.1f} ms, {ratio:.3f} x softmax; ")
    print(f"peak memory {memory['LSSAR']:.2f} GB against {memory['softmax']:.2f} GB")
    target("whole step / softmax", ratio, 1.10)
    if not bench.smoke:
        target("peak memory / softmax", memory["LSSAR"] / memory["softmax"], 1.05)


def alone(bench: Bench, attention: dict[str, Any], length: int, batch: int) -> float:
    """Peak GB of a step while no other model is alive."""
    step = stepper(bench, attention, length, batch)
    step()
    return bench.peak_memory(step)


def engine(bench: Bench) -> dict[str, str]:
    return {"engine": "triton"} if bench.smoke else {}


def long_context(bench: Bench) -> None:
    print("\n## 131,072 tokens on one GPU, and decoding\n")
    length = 128 if bench.smoke else 131072
    attention = {"normaliser": "lssa", "reweight_p": 15, **engine(bench)}
    step = stepper(bench, attention, length, 1)
    step()
    memory = bench.peak_memory(step)
    print(f"124M model, one training step on one sequence of {length}: "
          f"{bench.seconds(step):.2f} s, peak {memory:.1f} GB")  # fmt: skip
    TARGETS.append((f"{length} tokens on one GPU", True))
    for n_keys in [128] if bench.smoke else [1024, 16384, 131072]:
        k, v = (torch.randn(1, 12, n_keys, 64, device=bench.device, dtype=bench.dtype) for _ in range(2))
        q = k[:, :, -1:]
        normaliser = make_normaliser(LSSAR, 12, 64, n_keys)
        with torch.no_grad():
            seconds, ratio = bench.paired(
                lambda q=q, k=k, v=v, n=normaliser: attend(q, k, v, n, "triton"),  # type: ignore[misc]
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),  # type: ignore[misc]
            )
        gb = 2 * k.numel() * k.itemsize / 1e9
        print(
            f"decoding one token, {n_keys} keys, 12 heads: {1e6 * seconds:.0f} us "
            f"({gb / seconds:.0f} GB/s of keys and values), {ratio:.2f} x SDPA's softmax"
        )


def tune(bench: Bench, head_dims: list[int]) -> None:
    """Other launch configurations, one kernel at a time, the others as in the table."""
    print("\n## Launch configurations: ms of forward, or forward + backward, T = 4096\n")
    major = torch.cuda.get_device_capability()[0]
    table = fused.LAUNCHES[min(major, max(fused.LAUNCHES))]
    candidates = {
        "forward": [Launch(m, n, m // 16, s, r)
                    for m in (64, 128) for n in (64, 128) for s in (2, 3) for r in (128, 168, 255)],
        "backward_q": [Launch(m, n, m // 16, s, r)
                       for m in (64, 128) for n in (32, 64) for s in (1, 2, 3) for r in (168, 255)],
        "backward_kv": [Launch(m, n, n // 16, s, r)
                        for n in (64, 128) for m in (32, 64) for s in (1, 2, 3) for r in (168, 255)],
    }  # fmt: skip
    for head_dim in head_dims:
        size = 64 if head_dim <= 64 else 128
        q, k, v, do = bench.inputs(4096, head_dim, bench.tokens)
        fn = ours(LSSAR, "triton", head_dim, 4096)
        for kernel, launches in candidates.items():
            kept, times = table[kernel][size], {}
            for launch in [kept, *launches]:
                table[kernel][size] = launch
                try:
                    if kernel == "forward":
                        with torch.no_grad():
                            times[launch], _ = bench.paired(lambda: fn(q, k, v), lambda: None)  # noqa: B023
                    else:
                        times[launch], _ = bench.paired(
                            lambda: torch.autograd.grad(fn(q, k, v), (q, k, v), do),  # noqa: B023
                            lambda: None,
                        )
                except Exception as e:  # does not fit, or does not compile
                    print(f"{launch}: {type(e).__name__}")
            table[kernel][size] = kept
            for launch, seconds in sorted(times.items(), key=lambda item: item[1])[:5]:
                mark = " (the table's)" if launch == kept else ""
                print(f"d = {head_dim} {kernel}: {1e3 * seconds:.3f} ms {tuple(launch)}{mark}", flush=True)


def main() -> None:
    parser = ArgumentParser(__doc__)
    parts = ["correct", "kernels", "step", "long"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts to run (default: all)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], choices=[64, 128])
    parser.add_argument("--tune", action="store_true", help="also time other block sizes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, with TRITON_INTERPRET=1")
    args = parser.parse_args()
    if args.smoke != fused.INTERPRETED:
        raise UserError("--smoke and TRITON_INTERPRET=1 go together; expected both or neither")
    if not args.smoke and not torch.cuda.is_available():
        raise UserError("no CUDA device; expected one (or TRITON_INTERPRET=1 and --smoke)")
    bench = Bench(args.smoke)
    torch.manual_seed(0)
    name = "CPU, interpreted" if args.smoke else torch.cuda.get_device_name()
    import triton

    print(f"# {date.today()}, {name}, torch {torch.__version__}, triton {triton.__version__}\n")
    measure_peak(bench)
    if "correct" in args.only:
        correct(bench, args.head_dims)
    if "kernels" in args.only:
        kernels(bench, [64] if args.smoke else args.lengths, args.head_dims)
    if "step" in args.only:
        whole_step(bench)
    if "long" in args.only:
        long_context(bench)
    if args.tune and not args.smoke:
        tune(bench, args.head_dims)
    print("\n## Targets\n")
    for claim, holds in TARGETS:
        print(f"- {'holds' if holds else 'MISSED'}: {claim}")


if __name__ == "__main__":
    run_main(main)
