"""The walk of ``examples/ten_minutes.py``, from its first cell to its last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_schedule_of_ones_own_trains_to_the_bits_of_stock() -> None:
    command = [sys.executable, str(ROOT / "examples/ten_minutes.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, stock, zb_h1, own = done.stdout.splitlines()
    assert [line.split()[0] for line in (stock, zb_h1, own)] == ["1f1b", "zb-h1", "w-at-the-end"]
    assert all(line.endswith("  yes") for line in (stock, zb_h1, own)), done.stdout
