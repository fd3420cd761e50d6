#!/usr/bin/env bash
# Check that versions of TransformerEngine have what the split of their weight gradients relies on. It reads, and partly
# runs, the Python sources in the wheels from PyPI (0.6 MB each), without their kernels and without a GPU.
#
#   bash scripts/check_transformer_engine.sh [VERSION ...]    default: 2.8.0 to 2.20.2
#
# Prints one line per version. The exit status is the number of versions that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
versions=("$@")
if ((${#versions[@]} == 0)); then
    versions=(2.8.0 2.9.0 2.10.0 2.11.0 2.12.0 2.13.0 2.14.0 2.14.1 2.15.0 2.16.0 2.16.1 2.17.0 2.17.1 2.18.0 2.19.0
        2.20.2)
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
num_failed=0
for version in "${versions[@]}"; do
    pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: --dest "$work/$version" \
        "transformer_engine==$version" && python scripts/try_transformer_engine.py "$work/$version"/*.whl ||
        num_failed=$((num_failed + 1))
done
exit "$num_failed"
