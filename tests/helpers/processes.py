"""Processes that a test starts: ranks of one job, and those that should not be left."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all have ended, one has failed, or ``timeout`` seconds are over."""
    deadline = time.monotonic() + timeout
    while any(each.poll() is None for each in ranks) and not any(each.poll() for each in ranks):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def running(mark: Path) -> str:
    """The processes that have a path among their words."""
    return subprocess.run(["pgrep", "-f", str(mark)], capture_output=True, text=True, check=False).stdout


def until(holds: Callable[[], bool]) -> bool:
    """Wait for something, a minute at most; return whether it holds."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()
