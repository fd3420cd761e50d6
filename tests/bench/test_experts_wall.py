"""The bench of experts on the wall clock: lanes overlap as planned, and pairs run through our handler and stock's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import ranks
from bench.expert_stages import Lanes
from bench.experts_wall import STOCK, VARIANTS, costs_on, summary
from megatron.zero_bubble import Kind, Pass, Placement

F, BW = Pass(0, Kind.F, 1), Pass(0, Kind.BW, 0)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes()
    lanes.sleeps = True
    yield lanes
    lanes.close()


def test_a_pair_hides_the_all_to_all(lanes: Lanes) -> None:
    """Half of a microbatch is all-to-all. The least of several times, because the machine may be busy."""
    costs = costs_on(0, 2, Placement.interleaved(2, 2)).overlapping(True)
    for works in [(F,), (BW,), (F, BW)] * 5:
        lanes.run(tuple(work.kind for work in works), costs.parts(works))
    least = {kinds: min(times) for kinds, times in lanes.took_ms.items()}
    together, alone = least[Kind.F, Kind.BW], least[Kind.F,] + least[Kind.BW,]
    assert together >= costs.pair(F, BW) and together < 0.8 * alone


def test_ratios_compare_iterations_of_a_round() -> None:
    of_ops = {STOCK: {"F": 10.0, "BW": 20.0, "F BW": 21.0}, "zb-v": {"F": 10.0, "B": 10.0, "W": 5.0}}
    rounds = {STOCK: [100.0, 200.0, 110.0], "zb-v": [150.0, 300.0, 99.0]}
    rows = [
        {"variant": name, "planned_ms": 100.0, "rounds_ms": rounds[name], "ops_ms": of_ops[name]} for name in rounds
    ]
    stock, other = summary(rows)
    assert stock["over_planned"] == 1.1 and stock["of_stock"] == 1.0 and stock["pair"] == 0.7
    assert other["of_stock"] == 1.5 and other["pair"] is None


@pytest.mark.full
def test_every_variant_runs(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = "--num-ranks 2 --num-microbatches 4 --layers 2 --rounds 1 --output".split()
    command = [sys.executable, "-m", "bench.experts_wall", *words, str(file)]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["variants"]
    assert [row["variant"] for row in rows] == [variant.name for variant in VARIANTS]
    pairs = [row["pair"] for row, variant in zip(rows, VARIANTS, strict=True) if variant.pairs]
    assert len(pairs) == 3 and all(pair < 0.8 for pair in pairs), pairs
