#!/usr/bin/env bash
# Build the source distribution and one wheel per Python, then try each wheel in an environment that has nothing else.
#
#   bash scripts/check_packages.sh [PYTHON ...]    default: those of python3.10 to python3.13 that are installed
#
# ZB_PROJECT_URL   address of the project's repository, for the links of the registry's page (default: none)
# ZB_SITE_URL      address of its site, for the link to the playground there (default: none)
#
# What was built lies in dist/. A wheel holds the planner's compiled loops and no torch ops: those are compiled against
# the torch of the training environment, see docs/installation.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
pythons=("$@")
if ((${#pythons[@]} == 0)); then
    for minor in 10 11 12 13; do
        "python3.$minor" -V >/dev/null 2>&1 && pythons+=("python3.$minor")
    done
fi
if ((${#pythons[@]} == 0)); then
    echo "check_packages.sh: found none of python3.10 to python3.13; name interpreters as arguments" >&2
    exit 1
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

unset PYTHONPATH  # only what pip installs counts
export ZB_BUILD=none
rm -rf dist
python -m build --sdist --outdir dist . >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log"; exit 1; }
for python in "${pythons[@]}"; do
    venv="$work/$("$python" -c "import sys; print(sys.implementation.cache_tag)")"
    printf '== %s\n' "$("$python" -V)"
    "$python" -m venv "$venv"
    "$venv/bin/pip" --quiet --disable-pip-version-check wheel --no-deps --wheel-dir "$venv/dist" dist/*.tar.gz
    "$venv/bin/pip" --quiet --disable-pip-version-check install "$venv"/dist/*.whl
    cp "$venv"/dist/*.whl dist/
    rm -r "$venv/dist"
    # In another folder: the checkout's own package must not be found.
    (cd "$work" && "$venv/bin/python" - "$venv/bin/zero-bubble" <"$OLDPWD/scripts/try_package.py")
    "$venv/bin/pip" --quiet --disable-pip-version-check uninstall --yes megatron-zero-bubble
    left="$(find "$venv" -path '*zero_bubble*' -o -name 'zero-bubble*')"
    [[ -z "$left" ]] || { printf 'check_packages.sh: uninstalling leaves\n%s\n' "$left" >&2; exit 1; }
done
python -m venv "$work/twine"
"$work/twine/bin/pip" --quiet --disable-pip-version-check install twine
"$work/twine/bin/twine" check --strict dist/*
ls -l dist
