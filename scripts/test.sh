#!/usr/bin/env bash
# Run all checks, then all tests; with --full, also the rows of the full matrix. With --quick, only the files that
# tests/README.md names, which prove every promise once, and no checks. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

selection=(-m "not full") what="${1:-}"
case "$what" in --full | --quick) shift ;; esac
if [[ "$what" == --full ]]; then
    selection=()
elif [[ "$what" == --quick ]]; then
    mapfile -t -O ${#selection[@]} selection < <(grep -o '`tests/[a-z_/]*\.py`' tests/README.md | tr -d '`')
fi
# Processes that tests start, among them ranks, then read the package compiled, if the caller's shell forbids that too.
export PYTHONDONTWRITEBYTECODE=
[[ "$what" == --quick ]] || bash scripts/check.sh
printf '== tests\n'
# Each worker has a pool of ranks; files with ranks are not divided (tests/conftest.py).
OMP_NUM_THREADS=1 exec python -m pytest -n 2 --durations=25 ${selection[@]+"${selection[@]}"} "$@"
