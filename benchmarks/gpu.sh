#!/usr/bin/env bash
# What only a GPU can show about the fused kernels, in commands of at most nine minutes that resume where they were.
#
#   benchmarks/gpu.sh main       correctness, and the main ratios to FlashAttention
#   benchmarks/gpu.sh tune       other block sizes than engines.fused.LAUNCHES
#   benchmarks/gpu.sh lengths    every length and head size
#   benchmarks/gpu.sh long       training step, 131,072 tokens, decoding
#   benchmarks/gpu.sh report     tables and targets of the rows so far
#
# Rows go to $OUT/rows.jsonl (default: runs/gpu; rows that lie there are copied to another $OUT first).
# Needs torch with CUDA, Triton and numpy; $PYTHON names the interpreter. Where that has no pydantic, it is
# installed for this command from $WHEELS (default: wheels), see README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
until=$(($(date +%s) + 540))
if [ -x .venv/bin/python ]; then python=${PYTHON:-.venv/bin/python}; else python=${PYTHON:-python3}; fi
out=${OUT:-runs/gpu} wheels=${WHEELS:-wheels}

if ! $python -c "import pydantic" 2> /dev/null; then
    site=$(mktemp -d)
    $python -m pip install --quiet --no-index --find-links "$wheels" --target "$site" pydantic || {
        echo "error: $python has no pydantic, and $wheels no wheels of it; see benchmarks/README.md" >&2
        exit 2
    }
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
mkdir -p "$out"
if [ ! -e "$out/rows.jsonl" ] && [ -e runs/gpu/rows.jsonl ]; then cp runs/gpu/rows.jsonl "$out"; fi
# 75, SIGABRT, SIGSEGV: a row has broken the CUDA context or the process; another process does the rest.
status=75
while [[ $status =~ ^(75|134|139)$ ]] && [ "$(date +%s)" -lt $until ]; do
    status=0
    $python -m benchmarks.gpu "$@" --out "$out" --until $until || status=$?
done
exit $status
