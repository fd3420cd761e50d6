#!/usr/bin/env bash
# The browser that tests of pages need: Debian's Chromium and its driver. Installs them where it may, else says what to do;
# without them those tests are skipped, so a failure here is no reason to stop.
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ "$(id -u)" != 0 ]]; then
    echo "install_browser.sh: no Chromium; tests of pages will be skipped: as root, apt-get install chromium chromium-driver" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --yes --no-install-recommends chromium chromium-driver >/dev/null
