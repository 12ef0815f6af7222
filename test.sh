#!/usr/bin/env bash
# The checks before a commit: lint, formatting, types, the direction of imports, tests.
#
#   ./test.sh                         all but the tests marked slow
#   ./test.sh --all                   slow tests, too (CI)
#   ./test.sh tests/core/test_sweep.py     other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"
. ./environment.sh

tests=(-m "not slow")
if [ "${1:-}" = --all ]; then
    shift
    tests=()
fi
environment requirements-dev.txt
$PYTHON -m ruff check .
$PYTHON -m ruff format --check .
$PYTHON -m mypy -n 2
$PYTHON -m tach check
OMP_NUM_THREADS=1 $PYTHON -m pytest -n 2 ${tests[@]+"${tests[@]}"} "$@"
