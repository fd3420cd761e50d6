#!/usr/bin/env bash
# Checks and measurements on GPUs, in parts of at most nine minutes. Results go to runs/gpu_day/gpu_day.json.
#
#   bash scripts/gpu_day.sh pack         collect what a machine without a network needs, in build/gpu_day/packed
#   bash scripts/gpu_day.sh PART         run a part; what was packed is unpacked before
#   bash scripts/gpu_day.sh PART --cpu   the steps of a part that run without a GPU, at tiny sizes
#   bash scripts/gpu_day.sh PART --steps TEXT ...    only the steps whose names contain one of the texts
#   bash scripts/gpu_day.sh --help       the parts, in the order of what they are worth
#   bash scripts/gpu_day.sh page FILE... store the results in docs/gpu_day.json and write docs/gpu.md
#
# A part prints a table last; its exit status is the number of steps that failed. scripts/gpu_day/steps.py has the steps.
# ZB_PYTHON is the interpreter, with torch (default: python3). Nothing is installed into it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD/scripts:$PWD/examples:$PWD:$PWD/build/gpu_day/site${PYTHONPATH:+:$PYTHONPATH}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/build/gpu_day/inductor}"
module=run
case "${1:-}" in
    pack | page)
        module="$1"
        shift
        ;;
esac
python="${ZB_PYTHON:-python3}"
if missing="$("$python" -c 'import psutil, torch' 2>&1)"; then
    exec "$python" -m "gpu_day.$module" "$@"
fi
echo "gpu_day.sh: $python needs torch and psutil, got ${missing##*$'\n'}; run \`source .venv/bin/activate\` first, or set" \
    "ZB_PYTHON to an interpreter that has both" >&2
exit 2
