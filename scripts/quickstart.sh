#!/usr/bin/env bash
# From a fresh clone to a GPT trained under stock 1F1B and under a zero-bubble schedule, side by side.
# Arguments go to scripts/quickstart.py (--help lists them).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
echo "Quickstart: set up an environment (the first time some minutes, then none), then train twice and compare."
source "$root/scripts/setup_env.sh"
exec python "$root/scripts/quickstart.py" "$@"
