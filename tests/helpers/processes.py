"""Processes that are ranks of one job, started by a test itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all have ended, one has failed, or ``timeout`` seconds are over."""
    deadline = time.monotonic() + timeout
    while any(each.poll() is None for each in ranks) and not any(each.poll() for each in ranks):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
