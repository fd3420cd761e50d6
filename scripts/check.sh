#!/usr/bin/env bash
# Format, lint, types and layer contracts: every step runs, and the exit status tells whether all were clean.
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
    printf 'check.sh: not clean: %s\n' "${failed[*]}" >&2
    exit 1
fi
