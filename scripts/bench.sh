#!/usr/bin/env bash
# Run all benches, in under 20 minutes on two idle cores, then write docs/BENCHMARKS.md from their JSON.
#
#   bash scripts/bench.sh            all benches; rewrites docs/BENCHMARKS.md and the README's figures
#   bash scripts/bench.sh --quick    a minute or two, to check that the benches run; its figures are meaningless
#   bash scripts/bench.sh NAME ...   one module of scripts/bench with its own arguments (--help lists them)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
module=run
if [[ "${1:-}" == [a-z]* ]]; then
    module="$1"
    shift
fi
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/scripts:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python -m "bench.$module" "$@"
