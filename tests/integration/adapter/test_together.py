"""Features that meet in one job give the bits of the job without them, and do what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers import parity
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, assert_same_bits, assert_same_model
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_auto import STEPS, train_and_wait_for_the_plan
from tests.integration.adapter.test_offload import ALL, CHUNKS, HALF, LARGE, train
from tests.loops import varied
from tests.loops.varied import differences, runs_of

full = pytest.mark.full
AHEAD = "--zero-bubble-post-validation"
SHARDED = f"--zero-bubble-shard-weights --use-distributed-optimizer {CHUNKS}"
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16 --swiglu "
    f"--disable-bias-linear --untie-embeddings-and-output-weights {LARGE}"
)
PAIRS = "--zero-bubble-overlap-experts"
BALANCED = "--zero-bubble-balance-microbatches --calculate-per-token-loss"
TWO, FOUR = Layout(2, data=2, num_layers=4), Layout(4, data=2, num_layers=8)

ROWS = {
    "sharded units": (f"zero-pp {SHARDED} --zero-bubble-unit-microbatches 2", TWO, 4, ""),
    "sharded units, four ranks": (f"zero-pp {SHARDED} --zero-bubble-unit-microbatches 4", FOUR, 16, ""),
    "sharded units on a V": (f"zb-v {SHARDED.removesuffix(CHUNKS)}", TWO, 8, ""),
    "pairs": (f"dualpipe-v {PAIRS}", TWO, 8, EXPERTS),
    "pairs, interleaved": (f"interleaved-1f1b {PAIRS}", TWO, 8, f"{EXPERTS} {CHUNKS}"),
    "pairs, four ranks": (f"dualpipe-v {PAIRS}", FOUR, 12, EXPERTS),
    "W beneath all-to-alls": (f"zb-v {PAIRS}", TWO, 8, EXPERTS),
    "balanced microbatches": ("zb-h1", TWO, 4, BALANCED),
    "balanced microbatches, four ranks": ("zb-v", FOUR, 8, BALANCED),
}
QUICK = ("sharded units",)


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in QUICK else full) for row in ROWS])
def test_offloading_changes_no_bit(ranks: RankPool, row: str) -> None:
    schedule, layout, count, options = ROWS[row]
    runs = [schedule, f"{schedule} {ALL}", f"{schedule} {HALF}"]
    flags = layout.flags(count, f"{LARGE} --clip-grad 1.0 {options}")
    results = ranks.run(layout.num_ranks, train, flags, runs, timeout=300)
    assert_same_bits([[outcome for outcome, _ in of_rank] for of_rank in results], runs)
    none, all_, half = (peak for _, peak in results[0])
    assert none == 0 < half <= all_


def lengths_of(rank: int, runs: Sequence[varied.Run], offload: str) -> list[tuple[varied.Outcome, int]]:
    """Train with every loop, of which those with a schedule move ``offload``; return what is on the host at most."""
    return [varied.train_wide(rank, *run, offload) for run in runs]


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "kind", "offload"),
    [
        (2, "zb-v", "packed", "all"),
        pytest.param(2, "zb-h1", "dense", "50%", marks=full),
        pytest.param(4, "zb-h1", "packed", "all", marks=full),
        pytest.param(4, "zb-v", "dense", "all", marks=full),
    ],
)
def test_microbatches_of_different_lengths_move_with_the_bits_of_stock(
    ranks: RankPool, num_ranks: int, schedule: str, kind: str, offload: str
) -> None:
    runs = runs_of(schedule, kind)
    expected, *ours = zip(*ranks.run(num_ranks, lengths_of, runs, offload, timeout=200), strict=True)
    for (_, _, loop), got in zip(runs[1:], ours, strict=True):
        stock, own = ([outcome for outcome, _ in side] for side in (expected, got))
        assert differences(stock, own) == [], loop.tells
        assert got[0][1] > 0, "nothing was on the host"


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "count", "stages"),
    [
        (Layout(2, data=2, num_layers=6), 8, "Ett|t|tt|tL"),
        (Layout(4, data=2, num_layers=12), 12, "Ett|t|t|tt|tt|t|tt|tL"),
    ],
    ids=["two ranks", "four ranks"],
)
def test_pairs_on_an_uneven_layout_have_the_bits_of_stock(
    ranks: RankPool, layout: Layout, count: int, stages: str
) -> None:
    """Interleaved, on the ranks of stock; and on a V, where gradient norms are other sums."""
    runs = [None, f"interleaved-1f1b {PAIRS}", f"dualpipe-v {PAIRS}"]
    flags = layout.flags(count, f"{EXPERTS} {CHUNKS} --pipeline-model-parallel-layout {stages}")
    results = ranks.run(layout.num_ranks, parity.train, flags, runs, timeout=300)
    assert_same_bits([of_rank[:2] for of_rank in results], runs[:2])
    assert_same_model(results, runs, layout)


AHEAD_ROWS = {
    "pairs": (f"--zero-bubble-schedule dualpipe-v {PAIRS} {EXPERTS}", TWO, 8),
    "pairs, interleaved": (f"--zero-bubble-schedule interleaved-1f1b {PAIRS} {EXPERTS} {CHUNKS}", TWO, 8),
    "pairs, four ranks": (f"--zero-bubble-schedule dualpipe-v {PAIRS} {EXPERTS}", FOUR, 12),
    "balanced microbatches": (f"--zero-bubble-schedule zb-h2 {BALANCED}", TWO, 4),
    "balanced microbatches, four ranks": (f"--zero-bubble-schedule zb-v {BALANCED}", FOUR, 8),
}


@pytest.mark.parametrize("row", some(AHEAD_ROWS, "balanced microbatches"))
def test_steps_that_are_undone_leave_the_bits_of_final_ones(ranks: RankPool, row: str) -> None:
    """Two steps are rejected, also while activations are on the host."""
    options, layout, count = AHEAD_ROWS[row]
    flags = layout.flags(count, f"{LARGE} --clip-grad 100 --train-iters 6 --zero-bubble-exact {options}")
    faults = [Fault(3, 1, 0, 1e9), Fault(5, 0, 2, 1e9)]
    modes = ["", AHEAD, f"{AHEAD} {ALL}"]
    results: Any = ranks.run(layout.num_ranks, train_with_faults, flags, modes, faults, True, timeout=300)
    assert_same_bits([[replace(outcome, counted=()) for outcome in of_rank] for of_rank in results], modes, steps=6)
    for mode in (1, 2):
        assert sum((outcomes[mode].counts for outcomes in results), Counter())["repeated"], results[0][mode].grad_norms


@full
def test_units_of_schedules_that_are_planned_in_the_run(ranks: RankPool) -> None:
    """All replicas switch to the same schedule, whose units are others; one unit has the bits of whole weights."""
    units = f"zb-auto --zero-bubble-placement vee {SHARDED.removesuffix(CHUNKS)} --zero-bubble-unit-microbatches 5"
    runs = ["zb-v", units, f"{units} {ALL}"]
    flags = TWO.flags(5, f"{LARGE} --clip-grad 1.0 --use-distributed-optimizer --train-iters {STEPS}")
    results = ranks.run(TWO.num_ranks, train_and_wait_for_the_plan, flags, runs, timeout=300)
    assert_same_bits([outcomes for outcomes, _ in results], runs, STEPS)
    assert set(results[0][1]) == {"switched to the planned schedule: zb-auto, 1 slices"}
