#!/usr/bin/env bash
# Set up a fresh clone, train a GPT under stock 1F1B and under a zero-bubble schedule, and compare the two runs.
# Arguments go to scripts/quickstart.py (--help lists them).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
echo "Quickstart: set up an environment (takes a few minutes the first time), then train twice and compare."
source "$root/scripts/setup_env.sh"
exec python "$root/scripts/quickstart.py" "$@"
