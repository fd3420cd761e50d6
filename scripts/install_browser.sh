#!/usr/bin/env bash
# Install the browser for tests of HTML pages: Debian's Chromium and its driver. Without root or apt-get, print how to
# install them. Without a browser these tests are skipped, so callers may ignore a failure of this script.
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ "$(id -u)" != 0 ]]; then
    echo "install_browser.sh: no Chromium, page tests will be skipped; as root, apt-get install chromium chromium-driver" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends chromium chromium-driver >/dev/null
