#!/usr/bin/env bash
# Build the documentation site from docs/ into site/; a dead link, or a page outside the navigation, is an error.
#
#   bash scripts/docs.sh           bring the generated parts up to date, then build
#   bash scripts/docs.sh serve     the same, then serve it on this machine and rebuild at every change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

if ! python -c 'import material, mkdocs, mkdocstrings_handlers.python' 2>/dev/null; then
    # The extra "docs" of setup.py, without building the package again.
    mapfile -t needed < <(python - <<'PYTHON'
from importlib.metadata import requires

for requirement in requires("megatron-zero-bubble") or []:
    name, _, marker = requirement.partition(";")
    if marker.strip() in ('extra == "docs"', "extra == 'docs'"):
        print(name.strip())
PYTHON
    )
    python -m pip install --disable-pip-version-check --quiet --constraint scripts/constraints.txt "${needed[@]}"
fi

python scripts/generate_docs.py
export NO_MKDOCS_2_WARNING=1
case "${1:-build}" in
    build) exec python -m mkdocs build --strict ;;
    serve) exec python -m mkdocs serve ;;
    *)
        echo "docs.sh: takes build (the default) or serve, got $1" >&2
        exit 2
        ;;
esac
