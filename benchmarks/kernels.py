"""Compile every attention kernel for real GPUs on a machine without one, and print what came out.

    python -m benchmarks.kernels                             # sm_80, sm_90, sm_100, head_dim 64, 128, 256
    python -m benchmarks.kernels --arch 90 --head-dim 64 --p 3
    python -m benchmarks.kernels --arch 90 --head-dim 64 --dtype bfloat16 --all-forms
    python -m benchmarks.kernels --arch 90 --grouped         # k and v with fewer heads than q

The kernels are LSSAR's (phi = softplus, l1, a power), or those of every phi (`all_forms`), with the
block sizes of the launch table. The table has registers a thread, bytes spilled to local memory,
shared memory of a block against what the architecture allows, and instructions per score in each
loop with matrix products, counted in the machine code: a guide to speed where there is no GPU.
`forward` and `backward` are for inference and training. Where there is a power, `forward_u` trains.
`backward_rows` and `backward_kv` do as `backward` in a fixed order. The loops of forward are the
pass for Z on whole tiles, on diagonal ones, and exactly where rows need it, then the same for o.
Those of backward_rows are whole, diagonal, of the other two diagonal, whole. The last lines add up
whole tiles.

Exit status 1 if a kernel needs more shared memory than there is, lost its loops, or, one of LSSAR
for 16-bit inputs at head_dim 64, spills. It may on sm_90, whose blocks were chosen by their times,
and with --rising.
"""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines import triton_kernels
from engines.triton import PHIS, Launch, launch_of
from engines.triton_kernels import INTERPRETED, Form
from infra.cli import ArgumentParser, UserError, integer, run_main

# The kernel, and the tensors that it is not given.
KERNELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "forward": (triton_kernels._forward, ("u_ptr",)),
    "forward_u": (triton_kernels._forward, ()),
    "backward": (triton_kernels._backward, ()),
    "backward_rows": (triton_kernels._backward_rows, ()),
    "backward_kv": (triton_kernels._backward, ("dq_sum_ptr",)),
}
# KB a block may have (CUDA C++ guide, table 27)
SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
FIRSTS = ("first_ptr", "ends_ptr")
FLOATS = ("shift_ptr", "stats_ptr", "rows_ptr", "dq_sum_ptr")
MATRIX_OPS = re.compile(r"HGMMA|HMMA|UTC\w*MMA")
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE
)
TIMED = (90,)  # block sizes from an H100
DIVISIBLE = [["tt.divisibility", 16]]
HEADER = (
    "| arch   | inputs   |   d | form              | kernel        | regs | spill | shared KB     "
    "| instructions per score        |\n"
    "|--------|----------|-----|-------------------|---------------|------|-------|---------------"
    "|-------------------------------|"
)


class Case(NamedTuple):
    """A kernel to compile; `grouped`: k and v have fewer heads than q."""

    kernel: str
    arch: int
    form: Form
    grouped: bool

    @property
    def inputs(self) -> str:
        """What it is compiled for: architecture, type and head size."""
        return (
            f"sm_{self.arch} {'bfloat16' if self.form.fast else 'float32'} head_dim {self.form.d}"
        )

    @property
    def launch(self) -> Launch:
        kernel = "backward" if self.kernel == "backward_kv" else self.kernel
        return launch_of(kernel, self.form, self.arch // 10)


def source_of(case: Case) -> ASTSource:
    """The kernel with the types, constants and alignments of its arguments."""
    kernel, absent = KERNELS[case.kernel]
    constants_by_name = {"form": case.form, "BM": case.launch.BM, "BN": case.launch.BN}
    constants_by_name |= dict.fromkeys(absent if case.form.has_shift else (*absent, "shift_ptr"))
    constants_by_name |= {} if case.form.has_first else dict.fromkeys(FIRSTS)
    constants_by_name |= {} if case.grouped else {"group": 1}
    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants_by_name:
            types[name] = "constexpr"
            constants[(i,)] = constants_by_name[name]
        elif name.endswith("_ptr"):
            by_query_head = case.grouped and name in ("dk_ptr", "dv_ptr")
            is_float = name in FLOATS or by_query_head or not case.form.fast
            floats = "*fp32" if is_float else "*bf16"
            types[name] = "*i32" if name in FIRSTS else floats
            aligned[(i,)] = DIVISIBLE
        elif name.endswith("_strides"):
            types[name] = ("i32",) * 3
            aligned |= {(i, axis): DIVISIBLE for axis in range(3)}
        else:
            types[name] = "i32"
    return ASTSource(kernel, types, constants, aligned)


def disassemble(cubin: bytes) -> tuple[int, int, str]:
    """Registers a thread, bytes spilled, and the machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert usage is not None, output[:1000]
    return int(usage[1]), int(usage[2]), output


def loop_lengths(code: str) -> list[int]:
    """The number of instructions of each innermost loop with matrix products."""
    lines = [(int(match[1], 16), match[2], match[3]) for match in INSTRUCTION.finditer(code)]
    line_at = {address: i for i, (address, _, _) in enumerate(lines)}
    lengths = []
    for i, (address, op, operands) in enumerate(lines):
        jump = re.search(r"0x([0-9a-f]+)", operands) if op.startswith("BRA") else None
        target = int(jump[1], 16) if jump else address
        if target < address and target in line_at:
            body = lines[line_at[target] : i + 1]
            if any(MATRIX_OPS.match(op) for _, op, _ in body):
                lengths.append(len(body))
    return lengths


def examine(case: Case) -> tuple[str, list[str], float]:
    """One line of the table, what is wrong with the kernel, and its instructions a score on whole
    tiles.
    """
    form = case.form
    launch = case.launch
    target = GPUTarget("cuda", case.arch, 32)
    compiled = triton.compile(source_of(case), target=target, options=launch._asdict())
    registers, spilled, code = disassemble(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    is_forward = case.kernel.startswith("forward")
    n_sums = (2 + (form.sums != form.sums_again)) * (is_forward and form.two_pass)
    n_loops = n_sums + 2 + (is_forward and form.log)
    scores_a_thread = launch.BM * launch.BN / launch.num_warps / 32
    # what follows are waits
    per_score = [n / scores_a_thread for n in loop_lengths(code)][:n_loops]
    whole = {n_sums + (case.kernel in ("backward", "backward_kv")), *([0] if n_sums else [])}
    limit = SHARED_LIMITS[case.arch]
    problems = []
    if len(per_score) < n_loops:
        problems.append(f"{case}: lost {n_loops - len(per_score)} loops")
    if shared > limit * 1024:
        problems.append(f"{case}: {shared} bytes of shared memory")
    if (
        spilled
        and form.bounded
        and not form.rising
        and not form.has_first
        and form.fast
        and form.d == 64
        and case.arch not in TIMED
    ):
        problems.append(f"{case}: spills {spilled} bytes")
    arch, dtype, _, head_dim = case.inputs.split()
    power = f" p{'<' if form.rising else '='}{form.p}" if form.p else ""
    phi = (
        f"{form.phi}{' l1' * form.l1}{' shift' * form.has_shift}{power}{' first' * form.has_first}"
    )
    line = (
        f"| {arch:6} | {dtype:8} | {head_dim:>3} | {phi:17} | {case.kernel:13} | {registers:4} "
        f"| {spilled:5} | {shared / 1024:6.1f} of {limit} "
        f"| {' '.join(f'{x:.1f}' for x in per_score):29} |"
    )
    return line, problems, sum(x for i, x in enumerate(per_score) if i in whole)


def all_forms(fast: bool, head_dim: int) -> list[Form]:
    """Every phi with l1 and what else it may have: a power, sigmoid's shift. Then three with less."""
    full = [(phi, True, 3, phi == "sigmoid") for phi in PHIS]
    plain = [(phi, False, 0, False) for phi in ("exp", "softplus")]
    plain.append(("softplus", True, 0, False))
    return [
        Form(phi, l1, p, False, False, shift, fast, head_dim) for phi, l1, p, shift in full + plain
    ]


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    dtypes = ["bfloat16", "float32"]
    add(
        "--arch",
        type=int,
        nargs="+",
        choices=SHARED_LIMITS,
        default=[80, 90, 100],
        help="80: sm_80",
    )
    add("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    add("--dtype", nargs="+", default=dtypes, choices=dtypes)
    add("--p", type=integer(0, 256), default=15, help="of the re-weighting, 0: none (default: 15)")
    add("--rising", action="store_true", help="for all powers below --p, as while p rises")
    add("--grouped", action="store_true", help="grouped-query attention")
    add("--documents", action="store_true", help="rows with a first key, of a document or window")
    add("--all-forms", action="store_true", help="instead of LSSAR's alone")
    args = parser.parse_args()
    if INTERPRETED:
        raise UserError("TRITON_INTERPRET = 1: interpreted kernels cannot be compiled; unset it")
    cases = []
    for arch in args.arch:
        for fast in (dtype == "bfloat16" for dtype in args.dtype):
            for head_dim in (d for d in args.head_dim if fast or d <= 128):
                power = args.p, args.rising
                lssar = Form("softplus", True, *power, True, False, fast, head_dim, args.documents)
                forms = all_forms(fast, head_dim) if args.all_forms else [lssar]
                cases += [
                    Case(kernel, arch, form, args.grouped)
                    for form in forms
                    for kernel in KERNELS
                    if form.p or kernel != "forward_u"  # u is for the power's gradient
                ]
    print(f"triton {triton.__version__}, torch {torch.__version__}\n\n{HEADER}")
    problems: list[str] = []
    per_score: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for case, (line, wrong, whole) in zip(cases, pool.map(examine, cases), strict=True):
            print(line, flush=True)
            problems += wrong
            per_score.setdefault(case.inputs, {})[case.kernel] = whole
    if not args.all_forms:
        print("\nInstructions a score on whole tiles, forward + backward:")
        for inputs, kernels in per_score.items():
            forward = kernels["forward_u" if args.p else "forward"]
            in_order = forward + kernels["backward_rows"] + kernels["backward_kv"]
            print(f"- {inputs}: {forward + kernels['backward']:.1f}, deterministic {in_order:.1f}")
    if problems:
        print("\n" + "\n".join(problems), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
