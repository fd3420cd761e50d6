#!/usr/bin/env bash
# Put Pyodide, a Python in WebAssembly, on which the static playground plans, into build/pyodide-VERSION/. It is an npm
# package; without npm, print what to do. Without Pyodide the playground's browser tests are skipped, and the site is
# built without it, so callers may ignore a failure of this script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

version="$(python -c 'from megatron.zero_bubble.cli.playground.static import PYODIDE; print(PYODIDE)')"
folder="build/pyodide-$version"
if [[ -d "$folder" ]]; then
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "install_pyodide.sh: needs npm, of Node.js; install it, or unpack npm's package pyodide@$version as $folder" >&2
    exit 1
fi
mkdir -p build
work="$(mktemp -d build/pyodide.XXXXXX)"
trap 'rm -rf "$work"' EXIT
# npm itself waits for minutes, and tries again, where there is no network.
if ! timeout 300 npm pack --silent --fetch-timeout=60000 --fetch-retries=1 --pack-destination "$work" \
    "pyodide@$version" >"$work/npm.log" 2>&1; then
    echo "install_pyodide.sh: npm cannot get pyodide@$version within 5 minutes:" \
        "$(grep -m 1 . "$work/npm.log" || echo no answer); connect this machine to npm's registry," \
        "or unpack pyodide-$version.tgz of another machine's 'npm pack pyodide@$version' as $folder" >&2
    exit 1
fi
tar -xzf "$work/pyodide-$version.tgz" -C "$work"
mv "$work/package" "$folder"
