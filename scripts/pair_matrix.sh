#!/usr/bin/env bash
# Train jobs on 2 to 4 CPU ranks that cover pairs of values of the options of a run, and compare them with stock.
#
#   bash scripts/pair_matrix.sh            the first jobs of the array, which the default tests run too
#   bash scripts/pair_matrix.sh --full     all pairs: about 230 jobs
#   bash scripts/pair_matrix.sh --only "schedule=zb-h2 step=ahead dtype=fp16"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD/scripts:$PWD/examples:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python -W ignore -m pair_matrix "$@"
