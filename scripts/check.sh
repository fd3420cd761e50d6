#!/usr/bin/env bash
# Check format, lint, types, layer contracts, spelling and prose. Every step runs; exit status 0 means that all succeed.
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
step spelling bash -c 'git ls-files -z | xargs -0 codespell'
step prose python scripts/check_prose.py
if ((${#failed[@]})); then
    printf 'check.sh: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
