#!/usr/bin/env bash
# Run all checks, then all tests; with --full, also the rows of the full matrix. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

selection=(-m "not full")
if [[ "${1:-}" == --full ]]; then
    selection=()
    shift
fi
bash scripts/check.sh
printf '== tests\n'
# One worker runs the tests that start ranks, the other one the rest (tests/conftest.py).
OMP_NUM_THREADS=1 exec python -m pytest -n 2 ${selection[@]+"${selection[@]}"} "$@"
