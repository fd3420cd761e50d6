#!/usr/bin/env bash
# Check format, lint, types and layer contracts. Every step runs; the exit status is 0 if all of them succeed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh || exit 1

failed=()
step() {
    local name="$1"
    shift
    printf '== %s: %s\n' "$name" "$*"
    "$@" || failed+=("$name")
}

step format ruff format --check .
step lint ruff check .
step types mypy
step layers lint-imports --no-cache
if ((${#failed[@]})); then
    printf 'check.sh: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
