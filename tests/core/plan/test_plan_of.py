"""One list of lowering passes makes every plan, which is proved once, and counted without a proof."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build
from megatron.zero_bubble.core.analysis.memory import message_peaks
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Kind, Pass, Plan
from megatron.zero_bubble.core.plan import (
    NOTHING,
    Additions,
    plan_of,
    plan_of_evaluation,
    plan_without_messages,
    prove,
    unproved_plan_of,
)
from megatron.zero_bubble.core.plan.offload import Move, select_longest
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.plans import message_memory

PROVE = sys.modules["megatron.zero_bubble.core.plan.prove"]
UNITS = build("zero-pp", num_ranks=4, num_microbatches=16, unit_microbatches=8)
PAIRS = build("dualpipe-v", num_ranks=4, num_microbatches=16, pairs=True)
H2 = build("zb-h2", num_ranks=4, num_microbatches=40)


def ahead(schedule: Schedule) -> Additions:
    return Additions(post_validation=True, moves=select_longest(schedule, 1.0))


TOGETHER = {
    "nothing": (H2, NOTHING),
    "moves and steps that are undone": (H2, ahead(H2)),
    "sharded units and moves": (UNITS, Additions(moves=select_longest(UNITS, 1.0), sharding=Sharding(8))),
    "pairs, moves, and steps that are undone": (PAIRS, ahead(PAIRS)),
}


@pytest.mark.parametrize("row", TOGETHER)
def test_a_plan_is_proved_once(row: str) -> None:
    proved: list[Plan] = []
    plan = plan_of(*TOGETHER[row], proved.append)
    assert proved == [plan]
    prove(plan)


@pytest.mark.parametrize("row", TOGETHER)
def test_messages_are_counted_without_a_proof(row: str) -> None:
    schedule, added = TOGETHER[row]
    counted = message_peaks(plan_of(schedule, added))
    with mock.patch.object(PROVE, "_prove_run", side_effect=AssertionError("it was proved")):
        assert message_peaks(unproved_plan_of(schedule, added)) == counted
        assert message_memory(schedule, 2.0) == tuple(2.0 * peak for peak in counted), "additions need no messages"


@pytest.mark.parametrize("row", TOGETHER)
def test_what_is_compared_has_the_ops_of_what_runs_but_for_messages(row: str) -> None:
    schedule, added = TOGETHER[row]
    whole = plan_of(schedule, replace(added, post_validation=False))
    bare = plan_without_messages(schedule, added)
    for row_of_run, own in zip(whole.ops, bare.ops, strict=True):
        assert sorted(map(str, own)) == sorted(str(op) for op in row_of_run if not hasattr(op, "message"))


def test_an_evaluation_has_no_moves() -> None:
    added = TOGETHER["sharded units and moves"][1]
    assert plan_of_evaluation(UNITS, added) == plan_of_evaluation(UNITS, replace(added, moves=()))


def test_what_cannot_run_is_refused_with_all_additions() -> None:
    too_late = Move(Pass(0, Kind.F, 0), out=200, back=1)
    with pytest.raises(PlanError, match="refused"):
        plan_of(UNITS, replace(TOGETHER["sharded units and moves"][1], moves=(too_late,)))


@pytest.mark.parametrize(("unit", "before", "after"), [(4, 7.0, 4.0), (8, 11.0, 4.0), (16, 16.0, 8.0)])
def test_the_peak_and_the_time_of_units_that_are_offloaded(unit: int, before: float, after: float) -> None:
    """Copies that fit beneath the passes delay nothing, and have lanes of their own next to gathers and reductions."""
    schedule = build("zero-pp", num_ranks=4, num_microbatches=16, unit_microbatches=unit)
    of_stages = {name: (ms,) * 8 for name, ms in (("gather_ms", 1.0), ("reduce_ms", 1.0), ("host_ms", 5.0))}
    costs = replace(PassCosts.uniform(schedule.placement, 10.0, 10.0, 10.0), **of_stages)  # type: ignore[arg-type]
    sharded = Additions(sharding=Sharding(unit))
    moved = replace(sharded, moves=select_longest(schedule, 1.0))
    whole, own = (timeline_of(schedule, costs, PassMemory.uniform(schedule.placement), of) for of in (sharded, moved))
    assert (max(whole.peak_activation), max(own.peak_activation)) == (before, after)
    assert own.makespan_ms == whole.makespan_ms == 512.0
