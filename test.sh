#!/usr/bin/env bash
# Everything that must hold before a commit: formatting, lint, types, the whole test suite.
#
#   ./test.sh                       all of it
#   ./test.sh tests/test_data.py    arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"
. ./environment.sh

environment requirements-dev.txt
$PYTHON -m ruff check .
$PYTHON -m ruff format --check .
$PYTHON -m mypy
OMP_NUM_THREADS=1 $PYTHON -m pytest -n 2 "$@"
