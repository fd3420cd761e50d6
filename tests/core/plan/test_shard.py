"""Sharded units in plans: numbers of gathers and reductions, places of the ops, lanes, and what the proof rejects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Kind, Op, Pass, Plan, Schedule
from megatron.zero_bubble.core.ir.shards import Close, Gather, Open, Reduce, ReleaseWeights, Wait
from megatron.zero_bubble.core.plan import Additions, plan_of, prove
from megatron.zero_bubble.core.plan.shard import Sharding
from tests.helpers.plans import plan_from_text


def sharded(schedule: Schedule, unit: int, whole: int = 2) -> Plan:
    return plan_of(schedule, Additions(sharding=Sharding(unit, whole)))


def looped(name: str, p: int, v: int, m: int, unit: int | None = None) -> Schedule:
    return build(name, num_ranks=p, num_microbatches=m, num_chunks=v, unit_microbatches=unit)


def count(plan: Plan, kind: type[Op]) -> list[int]:
    return [sum(isinstance(op, kind) for op in row) for row in plan.ops]


@given(p=st.integers(2, 4), v=st.integers(2, 5), number=st.integers(1, 4), more=st.integers(0, 2))
def test_gathers_and_reductions_per_unit(p: int, v: int, number: int, more: int) -> None:
    """With one whole chunk, 2v-1 gathers per unit, of which the first chunk of the next unit needs none, and v
    reductions.
    """
    unit = max(p + more, 4)
    plan = sharded(looped("zero-pp", p, v, number * unit, unit), unit, whole=1)
    assert count(plan, Gather) == [number * (2 * v - 2) + 1] * p
    assert count(plan, Reduce) == [number * v] * p


@given(p=st.integers(1, 4), v=st.integers(2, 4), m=st.integers(1, 13), unit=st.integers(1, 6))
def test_units_of_zero_pp_end_by_themselves(p: int, v: int, m: int, unit: int) -> None:
    """A run that chooses the size of units need not know it to reduce gradients at their ends."""
    schedule = looped("zero-pp", p, v, m, unit)
    assert sharded(schedule, 1).ops == sharded(schedule, unit).ops


def most_open(plan: Plan, rank: int) -> int:
    """The most chunks of a rank that have whole gradients at a time."""
    steps = [isinstance(op, Open) - isinstance(op, Close) for op in plan.ops[rank]]
    return max(accumulate(steps))


@pytest.mark.parametrize(("unit", "most"), [(32, 2), (16, 2), (8, 3)])
def test_few_gradients_are_whole(unit: int, most: int) -> None:
    """One unit: those of the chunk in use, and of the one before, while they are reduced. The W's that chained units
    leave for each other keep one more open.
    """
    plan = sharded(looped("zero-pp", 8, 4, 32, unit), unit)
    assert max(most_open(plan, rank) for rank in range(8)) <= most


TORCH = [
    ("breadth-first", 4, 8, None, 8, 5),
    ("zero-pp", 4, 16, 4, 4, 11),
    ("zero-pp", 8, 16, 8, 8, 23),
    ("interleaved-1f1b", 4, 16, None, 4, 15),
    ("interleaved-1f1b", 8, 16, None, 4, 47),
]
"""Orders, and the gathers on rank 0 of 4 that torch.distributed.pipelining 2.13 inserts, which keeps 3 chunks whole."""


@pytest.mark.parametrize(("name", "v", "m", "unit", "reduce_after", "torchs"), TORCH)
def test_no_more_gathers_than_torch(
    name: str, v: int, m: int, unit: int | None, reduce_after: int, torchs: int
) -> None:
    """As many where the order leaves no choice, fewer under interleaved 1F1B; and torch reduces only at the end."""
    gathers = count(sharded(looped(name, 4, v, m, unit), reduce_after, whole=3), Gather)[0]
    assert gathers <= torchs
    assert (gathers < torchs) == (name == "interleaved-1f1b")


@given(
    st.sampled_from(["breadth-first", "zero-pp", "interleaved-1f1b", "gis", "pipe-offload", "zb-v", "1f1b"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_every_order_can_be_sharded(name: str, p: int, whole: int, m: int, unit: int) -> None:
    """The lowering proves each plan; more slots never need more gathers, up to one per chunk."""
    schedule = build(name, num_ranks=p, num_microbatches=m)
    plan = sharded(schedule, unit, whole)
    assert plan_from_text(plan.schedule, plan.to_text()).ops == plan.ops
    chunks = schedule.num_stages // p
    assert min(count(plan, Gather)) >= chunks
    if whole >= chunks:
        assert max(count(plan, Gather)) == chunks
    for row in plan.ops:
        assert {op.slot for op in row if isinstance(op, Gather)} <= set(range(whole))


def test_more_slots_need_fewer_gathers() -> None:
    schedule = looped("interleaved-1f1b", 4, 8, 16)
    numbers = [count(sharded(schedule, 4, whole), Gather)[0] for whole in (1, 2, 3, 8)]
    assert numbers == [179, 52, 43, 8]


def end_ms(schedule: Schedule, gather_ms: float, reduce_ms: float = 0.0) -> float:
    """The end of the last op, if the first one starts at 0."""
    stages = schedule.num_stages
    costs = PassCosts.uniform(schedule.placement, 4.0, 4.0, 4.0)
    costs = replace(costs, gather_ms=(gather_ms,) * stages, reduce_ms=(reduce_ms,) * stages)
    done = simulate(sharded(schedule, schedule.num_microbatches), costs)
    return done.start_ms + done.makespan_ms


def test_gather_is_hidden_behind_one_run() -> None:
    """A run of four forwards takes 4 ms. The first gather has no run before it; those of later ranks hide in the fill
    of the pipeline.
    """
    schedule = looped("zero-pp", 2, 4, 4, 4)
    free = end_ms(schedule, 0.0)
    for gather_ms in (1.0, 4.0):
        assert end_ms(schedule, gather_ms) - free == pytest.approx(gather_ms)
    assert end_ms(schedule, 6.0) - free > 6.0


def test_reduction_is_hidden_but_the_last_one() -> None:
    schedule = looped("zero-pp", 2, 4, 4, 4)
    assert end_ms(schedule, 0.0, 3.0) - end_ms(schedule, 0.0) == pytest.approx(3.0)


def test_ops_of_a_lane_are_in_the_timeline() -> None:
    plan = sharded(looped("zero-pp", 2, 2, 2), 2)
    costs = PassCosts.uniform(plan.schedule.placement, 4.0, 4.0, 4.0)
    done = simulate(plan, replace(costs, gather_ms=(1.0,) * 4, reduce_ms=(2.0,) * 4))
    assert done.timed_lanes == ("net",)
    names = [str(span.op) for span in done.lanes[0] if span.lane == "net"]
    assert names == ["0:gather@0", "2:gather@1", "2:reduce", "0:reduce"]


def without(row: Sequence[Op], *ops: Op) -> tuple[Op, ...]:
    assert set(ops) <= set(row), "the edit must change something"
    return tuple(op for op in row if op not in ops)


def moved(row: Sequence[Op], op: Op, before: Op) -> tuple[Op, ...]:
    rest = without(row, op)
    at = rest.index(before)
    return (*rest[:at], op, *rest[at:])


FIRST, LAST_B, LAST_W = (Compute(Pass(0, kind, m)) for kind, m in ((Kind.F, 0), (Kind.B, 1), (Kind.W, 1)))


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda row: moved(row, FIRST, Wait(0)), "0F0 runs while the weights of stage 0 are not whole"),
        (lambda row: moved(row, ReleaseWeights(0, 0), LAST_B), "0B1 runs while the weights of stage 0 are not whole"),
        (lambda row: moved(row, Wait(0), Gather(0, 0)), "0:wait needs 0F0:gathering"),
        (lambda row: without(row, ReleaseWeights(0, 0)), "0:wait leaves 0F0:weights behind|leaves slot 0 behind"),
        (lambda row: moved(row, Reduce(0), LAST_W), "0W1 runs while the gradients of stage 0 are not open"),
        (lambda row: without(row, Close(0)), "0:reduce leaves 0F0:reducing behind"),
        (lambda row: (*row, Open(0)), "0:open leaves 0F0:gradients behind"),
        (lambda row: (*row, Gather(2, 0)), "2:gather@0 leaves .* behind"),
    ],
)
def test_misplaced_ops_are_rejected(edit: Callable[[Sequence[Op]], tuple[Op, ...]], what: str) -> None:
    plan = sharded(looped("zero-pp", 2, 2, 2), 2)
    prove(plan)
    with pytest.raises(PlanError, match=what):
        prove(replace(plan, ops=(edit(plan.ops[0]), *plan.ops[1:])))


def test_second_chunk_in_one_slot_is_rejected() -> None:
    plan = sharded(looped("zero-pp", 2, 2, 2), 2)
    changes: dict[Op, Op] = {Gather(2, 1): Gather(2, 0), ReleaseWeights(2, 1): ReleaseWeights(2, 0)}
    row = tuple(changes.get(op, op) for op in plan.ops[0])
    with pytest.raises(PlanError, match="2:gather@0 gives slot 0, which rank 0 has already"):
        prove(replace(plan, ops=(row, *plan.ops[1:])))


def test_gradients_opened_while_they_are_reduced_are_rejected() -> None:
    plan = sharded(looped("zero-pp", 2, 2, 4, 2), 2)
    row = list(plan.ops[0])
    close = row.index(Close(0))
    row.insert(close + 2, row.pop(close))
    with pytest.raises(PlanError, match="0:open begins before the gradients of the unit before are closed"):
        prove(replace(plan, ops=(tuple(row), *plan.ops[1:])))
