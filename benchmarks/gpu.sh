#!/usr/bin/env bash
# Everything that only a GPU can show about the fused kernels, in one command of under ten minutes:
# correctness, speed against FlashAttention, FlexAttention and plain PyTorch, a whole training step, memory.
#
#   benchmarks/gpu.sh                    the tables of benchmarks/RESULTS.md
#   benchmarks/gpu.sh --tune             also times other block sizes than engines.fused.LAUNCHES
#
# Needs torch with CUDA and Triton, numpy, and pydantic; $PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
