"""Tests of the bench of transports of sharded units."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.ranks import environment
from bench.shard_transports import lengths

ROOT = Path(__file__).parents[2]


def test_replicas_have_equal_work_of_other_lengths() -> None:
    own, other = (lengths("uneven", 8, 0.8, replica) for replica in (0, 1))
    assert sum(own) == pytest.approx(8) == pytest.approx(sum(other))
    assert own != other and own == lengths("uneven", 8, 0.8, 0)
    assert lengths("equal", 8, 0.8, 0) == [1.0] * 8


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_bench_runs(tmp_path: Path) -> None:
    """Uneven microbatches take longer than equal ones where replicas wait for each other in every unit."""
    file = tmp_path / "transports.json"
    words = "--rounds 2 --num-microbatches 8 --unit 1 --pass-ms 10 --hidden-size 64 --output".split()
    done = subprocess.run(
        [sys.executable, "-m", "bench.shard_transports", *words, str(file)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    times = json.loads(file.read_text())["rounds_ms"]
    assert min(times["uneven collective"]) > min(times["equal collective"])
    assert all(len(rounds) == 2 for rounds in times.values()) and len(times) == 4
