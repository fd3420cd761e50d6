"""The bench of different lengths on the wall clock: its orders and its ratios, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ranks
from bench.lengths import HIDDEN
from bench.lengths_wall import MOST_TOKENS, VARIANTS, Variant, drawn, in_ms, ordered, planned_ms, summary
from megatron.zero_bubble import LengthCost

RANKS, COUNT = 4, 12


def test_all_variants_run_the_same_microbatches() -> None:
    loads = drawn(COUNT, seed=0)
    assert len(loads) == COUNT and max(load.tokens for load in loads) <= MOST_TOKENS
    assert drawn(COUNT, seed=0) == loads != drawn(COUNT, seed=1)
    for order in ("verl", "balance"):
        assert sorted(ordered(loads, order, "zb-v", RANKS)) == sorted(loads)
    times = list(map(LengthCost.of_hidden_size(HIDDEN).microbatch, ordered(loads, "verl", "1f1b", RANKS)))
    top = times.index(max(times))
    assert times[:top] == sorted(times[:top]) and times[top:] == sorted(times[top:], reverse=True), "small at both ends"


def test_planned_gain_is_that_of_the_simulation() -> None:
    """The bench is worth its time only if a gain of at least 1.15 is predicted."""
    gains = []
    for seed in range(3):
        loads = drawn(COUNT, seed)
        cost = in_ms(loads, pass_ms=40.0)
        stock, ours = (
            planned_ms(variant, ordered(loads, variant.order, variant.schedule or "1f1b", RANKS), cost, RANKS)
            for variant in (Variant(None, "verl"), Variant("zb-v", "balance", "shapes"))
        )
        assert ours > COUNT * 3 * 40.0, "more than the work of a rank"
        gains.append(stock / ours)
    assert min(gains) > 1.15, gains


def test_ratios_compare_iterations_of_a_round() -> None:
    times = {"stock 1f1b, verl's order": [200.0, 300.0, 250.0], "zb-v, order of balance, shapes": [100.0, 100.0, 125.0]}
    rows = [{"draw": 0, "variant": name, "planned_ms": 100.0, "rounds_ms": own} for name, own in times.items()]
    stock, ours = summary(rows)
    assert stock["measured_gain"] == 1.0 and ours["measured_gain"] == 2.0 and ours["least_gain"] == 2.0
    assert ours["measured_over_planned"] == 1.0 and stock["measured_over_planned"] == 2.5


@pytest.mark.full
def test_every_variant_runs(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = "--num-ranks 2 --num-microbatches 4 --pass-ms 5 --draws 1 --rounds 1 --output".split()
    command = [sys.executable, "-m", "bench.lengths_wall", *words, str(file)]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["variant"] for row in json.loads(file.read_text())["rows"]] == [variant.name for variant in VARIANTS]
