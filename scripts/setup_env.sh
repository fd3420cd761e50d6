#!/usr/bin/env bash
# Create, or reuse, the virtual environment that every script here runs in.
#
#   bash scripts/setup_env.sh      create or update it
#   source scripts/setup_env.sh    the same, and activate it in this shell
#
# ZB_VENV    folder of the environment (default: .venv in the checkout)
# ZB_PYTHON  interpreter that creates it (default: python3)
# ZB_BUILD   which compiled ops to build: auto (the default), cpu, cuda or none; see setup.py
#
# A stamp file in the environment has a hash of all its inputs; while the hash matches, this script has nothing to do.

_zb_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_zb_venv="${ZB_VENV:-$_zb_root/.venv}"

_zb_fail() {
    printf 'setup_env.sh: %s\n' "$*" >&2
    exit 1
}

# Runs in a subshell, so that a shell that sources this file keeps its own options and survives a failure.
_zb_setup() (
    set -euo pipefail
    python="${ZB_PYTHON:-python3}"
    stamp="$_zb_venv/.zero-bubble-stamp"
    wanted="$(cd "$_zb_root" && find setup.py pyproject.toml csrc scripts/constraints.txt scripts/setup_env.sh -type f |
        LC_ALL=C sort | xargs cat | cksum) ${ZB_BUILD:-auto} $_zb_root"
    if [[ -x "$_zb_venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        exit 0
    fi

    command -v "$python" >/dev/null ||
        _zb_fail "needs Python 3.10 or newer, but '$python' is not installed: install it, or set ZB_PYTHON to another"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        _zb_fail "needs Python 3.10 or newer, but '$python' is $("$python" -V): set ZB_PYTHON to a newer one"
    command -v "${CXX:-c++}" >/dev/null ||
        _zb_fail "needs a C++ compiler, but '${CXX:-c++}' is not installed: install one (Debian: g++), or set CXX"

    echo "Setting up $_zb_venv: the first time, this downloads torch and takes a few minutes."
    "$python" -m venv "$_zb_venv" ||
        _zb_fail "'$python -m venv' failed: install Python's venv module (Debian: python3-venv)"
    quiet=(--quiet)
    [[ -t 1 ]] && quiet=()
    install=("$_zb_venv/bin/python" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"}
        --constraint "$_zb_root/scripts/constraints.txt")
    # First the build's requirements, since it is not isolated: our ops are compiled against torch, loops with pybind11.
    "${install[@]}" torch setuptools pybind11 &&
        "${install[@]}" --no-build-isolation --use-pep517 --editable "$_zb_root[train,dev,tensorboard]" ||
        _zb_fail "pip could not install the dependencies, see above; fix the cause and run this again"
    printf '%s\n' "$wanted" >"$stamp"
)

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    _zb_setup && echo "Ready: source $_zb_venv/bin/activate"
elif _zb_setup; then
    source "$_zb_venv/bin/activate"
else
    return 1
fi
