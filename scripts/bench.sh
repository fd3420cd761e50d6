#!/usr/bin/env bash
# The benches on this machine in one run of under 20 minutes on two idle cores, then docs/BENCHMARKS.md from their JSON.
#
#   bash scripts/bench.sh            everything; rewrites docs/BENCHMARKS.md and the README's figures
#   bash scripts/bench.sh --quick    a minute or two, to see that the benches run; its figures mean nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec python scripts/bench/run.py "$@"
