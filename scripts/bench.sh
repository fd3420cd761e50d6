#!/usr/bin/env bash
# The benches on this machine in one run of under 20 minutes on two idle cores, then docs/benchmarks.md from their JSON.
#
#   bash scripts/bench.sh            everything; rewrites docs/benchmarks.json and docs/benchmarks.md
#   bash scripts/bench.sh --quick    a minute or two, to see that the benches run; its figures mean nothing
#   bash scripts/bench.sh NAME ...   one module of scripts/bench with its own arguments (--help lists them)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
module=run
if [[ "${1:-}" == [a-z]* ]]; then
    module="$1"
    shift
fi
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/scripts:$PWD/examples:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python -m "bench.$module" "$@"
