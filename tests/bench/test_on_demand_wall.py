"""The bench of communication on demand on the wall clock: its order of passes and its ratios, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ranks
from bench.lengths import DATA, DIVISIONS
from bench.on_demand_wall import UNITS, in_turn, summary
from megatron.zero_bubble.core.ir.shards import Gather, Reduce
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.shard import Sharding


def test_every_unit_is_gathered_and_reduced_in_every_microbatch() -> None:
    plan = plan_of(in_turn(3), Additions(sharding=Sharding(unit_microbatches=1)))
    [row] = plan.ops
    gathers, reductions = ([op.stage for op in row if isinstance(op, kind)] for kind in (Gather, Reduce))
    assert reductions == 3 * list(reversed(range(UNITS)))
    # A unit that is used twice in a row, by F and B or by two microbatches, stays whole.
    assert len(gathers) >= 3 * (2 * UNITS - 2 * 2) and set(gathers) == set(range(UNITS))


def test_ratios_are_those_to_on_demand() -> None:
    rows = [
        {"data": "RL", "draw": draw, "division": how, "simulated_ms": 10.0 * (4 - at), "rounds_ms": [20.0 * (4 - at)]}
        for draw in range(2)
        for at, how in enumerate(DIVISIONS)
    ]
    found = summary(rows)
    assert [row["simulated"] for row in found] == [row["measured"] for row in found] == [4.0, 3.0, 2.0, 1.0]
    assert {row["measured_over_simulated_ms"] for row in found} == {2.0}


@pytest.mark.full
def test_every_division_runs(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = "--replicas 2 --each 2 --iteration-ms 50 --draws 1 --rounds 1 --output".split()
    command = [sys.executable, "-m", "bench.on_demand_wall", *words, str(file)]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(file.read_text())["rows"]) == len(DATA) * len(DIVISIONS)
