#!/usr/bin/env bash
# Build the documentation site from docs/ into site/; a dead link, or a page outside the navigation, is an error.
#
#   bash scripts/docs.sh           bring the generated parts up to date, then build
#   bash scripts/docs.sh site      build only: scripts/test.sh has checked that the generated parts are up to date
#   bash scripts/docs.sh serve     the same as the first, then serve it on this machine and rebuild at every change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

if ! python -c 'import material, mkdocs, mkdocstrings_handlers.python' 2>/dev/null; then
    # The extra "docs" of pyproject.toml, without building the package again.
    mapfile -t needed < <(python - <<'PYTHON'
from importlib.metadata import requires

for requirement in requires("megatron-zero-bubble") or []:
    name, _, marker = requirement.partition(";")
    if marker.strip() in ('extra == "docs"', "extra == 'docs'"):
        print(name.strip())
PYTHON
    )
    timeout 600 python -m pip install --disable-pip-version-check --quiet --constraint scripts/constraints.txt \
        "${needed[@]}" || {
        echo "docs.sh: pip cannot install ${needed[*]}, see above; once they are in the environment, no network is needed" >&2
        exit 1
    }
fi

# The playground plans in the browser on Pyodide; where it is published, its absence is an error (.github/workflows).
bash scripts/install_pyodide.sh || echo "docs.sh: the site's playground will not plan" >&2

case "${1:-build}" in build | serve) python scripts/generate_docs.py ;; esac
export NO_MKDOCS_2_WARNING=1
case "${1:-build}" in
    build | site) exec python -m mkdocs build --strict ;;
    serve) exec python -m mkdocs serve ;;
    *)
        echo "docs.sh: takes build (the default), site or serve, got $1" >&2
        exit 2
        ;;
esac
