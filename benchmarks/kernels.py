"""Compile every attention kernel for real GPUs on a machine without one, and print what came out.

    python -m benchmarks.kernels                             # sm_80, sm_90, sm_100, head_dim 64, 128, 256
    python -m benchmarks.kernels --arch 90 --head-dim 64 --p 3
    python -m benchmarks.kernels --arch 90 --head-dim 64 --dtype bfloat16 --all-forms
    python -m benchmarks.kernels --arch 90 --grouped         # k and v with fewer heads than q

LSSAR's kernels (phi = softplus, l1, a power), or those of every phi with and without l1, power and shift,
with the launch table's block sizes. Columns: registers a thread, bytes spilled to local memory, shared
memory of a block against what the architecture allows, and instructions per score in each loop with matrix
products (forward: the pass for Z on whole and on diagonal tiles, and exactly where rows need it; the pass for
o likewise; backward_q: whole, diagonal, exact; backward_kv: diagonal, whole, exact), counted in the machine
code: without a GPU the best guide to a kernel's speed. The last lines add up whole tiles. Exit status 1 if a
kernel needs more shared memory than there is, lost its loops, or, one of LSSAR for 16-bit inputs at head_dim
64, spills.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from infra.cli import ArgumentParser, UserError, run_main

KERNELS = ("forward", "backward_q", "backward_kv", "decode_scores", "decode_values", "decode_combine")
SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KB a block may have (CUDA C++ guide, table 27)
FLOATS = ("shift_ptr", "stats_ptr", "rows_ptr", "scores_ptr", "sums_ptr", "parts_ptr", "totals_ptr")
MATRIX_OPS = re.compile(r"HGMMA|HMMA|UTC\w*MMA")
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE
)


class Compiled(NamedTuple):
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    per_score: list[float]  # of the loops in order
    whole: float  # together, of those that run on tiles off the diagonal
    lost: int  # loops


def signature(kernel: Any, form: Any, launch: Any, grouped: bool) -> tuple[dict, dict, dict]:
    """Argument types, constants and alignments of a kernel, by the names of its arguments."""
    from engines.triton_decode import MAX_SPLITS

    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    values = {"form": form, "BM": launch.rows, "BN": launch.keys, "SPLITS": MAX_SPLITS}
    values |= {} if grouped else {"group": 1}
    of_inputs = "*bf16" if form.fast else "*fp32"
    for i, name in enumerate(kernel.arg_names):
        if name.endswith("_ptr"):
            is_float = name in FLOATS or (grouped and name in ("dk_ptr", "dv_ptr"))  # by heads of q
            types[name] = "*fp32" if is_float else of_inputs
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif name.endswith("_strides"):
            n = 2 if "decode" in kernel.__name__ and name[0] in "qo" else 3
            types[name] = ("i32",) * n
            aligned |= {(i, axis): [["tt.divisibility", 16]] for axis in range(n)}
        elif name in values:
            types[name], constants[(i,)] = "constexpr", values[name]
        else:
            types[name] = "fp32" if name == "cut" else "i32"
    return types, constants, aligned


class Case(NamedTuple):
    kernel: str
    dtype: str
    head_dim: int
    arch: int
    grouped: bool
    # of triton_kernels.Form
    phi: str
    l1: bool
    p: int
    bounded: bool
    has_shift: bool

    def __str__(self) -> str:
        form = f"{self.phi}, l1 = {self.l1}, p = {self.p}, has_shift = {self.has_shift}"
        heads = "grouped heads, " * self.grouped
        return f"{self.kernel} {self.dtype} sm_{self.arch} head_dim {self.head_dim} ({heads}{form})"


def all_forms() -> list[tuple[str, bool, int, bool, bool]]:
    """Every phi with and without l1, a power where it may have one, a shift where a normaliser has one."""
    from engines.triton_kernels import PHIS, SIGNED

    return [
        (phi, l1, p, False, has_shift)
        for phi in PHIS
        for l1 in (True, False)
        for p in ((0, 3) if l1 and phi not in SIGNED else (0,))
        for has_shift in ((False, True) if phi == "sigmoid" else (False,))
    ]


def compile_kernel(case: Case) -> Compiled:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engines import triton as at
    from engines import triton_decode

    dtype = getattr(torch, case.dtype)
    form = at.Form(*case[5:], dtype != torch.float32, case.head_dim)
    decoding = case.kernel.startswith("decode")
    decode_launch = at.Launch(1, triton_decode.DECODE_KEYS, 4, 3)
    launch = decode_launch if decoding else at.launch_of(case.kernel, form, case.arch // 10)
    kernel = getattr(triton_decode if decoding else at, f"_{case.kernel}")
    types, constants, aligned = signature(kernel, form, launch, case.grouped)
    compiled = triton.compile(
        ASTSource(kernel, types, constants, aligned),
        target=GPUTarget("cuda", case.arch, 32),
        options={} if decoding else at.launch_options(launch),
    )
    scores = launch.rows * launch.keys / launch.warps / 32
    n_sums = (2 + (form.sums != form.sums_again)) * (case.kernel == "forward" and form.two_pass)
    n_loops = 0 if decoding else n_sums + 2 + form.log
    whole = {n_sums + (case.kernel == "backward_kv"), *([0] if n_sums else [])}
    return read_cubin(compiled.asm["cubin"], compiled.metadata.shared, scores, n_loops, whole)


def read_cubin(cubin: bytes, shared: int, scores: float, n_loops: int, whole: set[int]) -> Compiled:
    """Registers and spills from the resource table, loops with matrix products from the disassembly."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        table, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    usage = re.search(r"REG:(\d+) STACK:(\d+)", table)
    assert usage is not None, table
    found = loops(code, scores)[:n_loops]  # what follows are waits
    off_diagonal = sum(x for i, x in enumerate(found) if i in whole)
    return Compiled(int(usage[1]), int(usage[2]), shared, found, off_diagonal, n_loops - len(found))


def loops(code: str, scores: float) -> list[float]:
    """Instructions of each innermost loop with matrix products, over the scores a thread computes in it."""
    lines = [(int(m[1], 16), m[2], m[3]) for m in INSTRUCTION.finditer(code)]
    at = {address: i for i, (address, _, _) in enumerate(lines)}
    found = []
    for i, (address, op, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target is None or int(target[1], 16) >= address or int(target[1], 16) not in at:
            continue
        body = lines[at[int(target[1], 16)] : i + 1]
        if any(MATRIX_OPS.match(op) for _, op, _ in body):
            found.append(len(body) / scores)
    return found


def row(case: Case) -> tuple[str, str | None, float]:
    """One line of the table, what is wrong with this kernel, and its instructions a score on whole tiles."""
    result = compile_kernel(case)
    limit, problem = SHARED_LIMITS.get(case.arch, 99), None
    if result.lost:
        problem = f"{case}: lost {result.lost} loops"
    if result.shared > limit * 1024:
        problem = f"{case}: {result.shared} bytes of shared memory"
    if result.spilled and case.bounded and (case.dtype, case.head_dim) == ("bfloat16", 64):
        problem = f"{case}: spills {result.spilled} bytes"
    per_score = " ".join(f"{x:.1f}" for x in result.per_score)
    phi = f"{case.phi}{' l1' * case.l1}{' shift' * case.has_shift}" + (f" p={case.p}" if case.p else "")
    line = (
        f"| sm_{case.arch:<3} | {case.dtype:8} | {case.head_dim:3} | {phi:17} | {case.kernel:11} "
        f"| {result.registers:4} | {result.spilled:5} | {result.shared / 1024:6.1f} of {limit} "
        f"| {per_score:29} |"
    )
    return line, problem, result.whole


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], help="80 is sm_80, ...")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"]
    )
    parser.add_argument("--p", type=int, default=15, help="power of the re-weighting, 0: none (default: 15)")
    parser.add_argument("--grouped", action="store_true", help="grouped-query attention")
    parser.add_argument("--all-forms", action="store_true", help="instead of LSSAR's alone")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET = 1: interpreted kernels cannot be compiled; unset it")
    import torch
    import triton

    forms = all_forms() if args.all_forms else [("softplus", True, args.p, True, False)]
    cases = [
        Case(kernel, dtype, head_dim, arch, args.grouped, *form)
        for arch in args.arch
        for dtype in args.dtype
        for head_dim in args.head_dim
        if head_dim <= (128 if dtype == "float32" else 256)
        for form in forms
        for kernel in KERNELS
    ]
    print(f"triton {triton.__version__}, torch {torch.__version__}\n")
    head = (
        "arch  ",
        "inputs  ",
        "  d",
        f"{'form':17}",
        f"{'kernel':11}",
        "regs",
        "spill",
        f"{'shared KB':13}",
    )
    print(f"| {' | '.join(head)} | {'instructions per score':29} |")
    print(f"|{'|'.join('-' * (len(title) + 2) for title in head)}|{'-' * 31}|")
    problems, sums = [], dict[str, float]()
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for case, (line, problem, whole) in zip(cases, pool.map(row, cases), strict=True):
            print(line, flush=True)
            problems += [problem] if problem else []
            name = f"sm_{case.arch} {case.dtype} head_dim {case.head_dim}"
            sums[name] = sums.get(name, 0.0) + whole
    if not args.all_forms:
        print("\nInstructions a score on whole tiles, forward + backward:")
        print("\n".join(f"- {name}: {total:.1f}" for name, total in sums.items()))
    if problems:
        print("\n" + "\n".join(problems), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
