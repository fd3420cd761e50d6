"""The proof rejects every plan that could hang or compute with missing inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import SCHEDULES, Pass, Placement, Schedule, build
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Op, Plan, Recv, Send
from megatron.zero_bubble.core.plan import Queues, lower, plan_of_evaluation, prove, prove_for_queues
from tests.helpers.strategies import schedules


def edited(plan: Plan, rank: int, ops: list[Op]) -> Plan:
    return replace(plan, ops=(*plan.ops[:rank], tuple(ops), *plan.ops[rank + 1 :]))


@given(schedules(min_ranks=2), st.data())
def test_missing_op_is_rejected(schedule: Schedule, data: st.DataObject) -> None:
    plan = lower(schedule)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    ops = list(plan.ops[rank])
    del ops[data.draw(st.integers(0, len(ops) - 1))]
    with pytest.raises(PlanError, match="refused"):
        prove(edited(plan, rank, ops))


@given(schedules(min_ranks=2), st.data())
def test_repeated_op_is_rejected(schedule: Schedule, data: st.DataObject) -> None:
    plan = lower(schedule)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    ops = list(plan.ops[rank])
    index = data.draw(st.integers(0, len(ops) - 1))
    ops.insert(index, ops[index])
    with pytest.raises(PlanError, match="refused"):
        prove(edited(plan, rank, ops))


@pytest.mark.parametrize("kind", [Send, Recv])
def test_overtaking_messages_are_rejected(kind: type[Op]) -> None:
    plan = lower(build("zb-h2", num_ranks=2, num_microbatches=4))
    rank = 0 if kind is Send else 1
    ops = list(plan.ops[rank])
    first, second = [i for i, op in enumerate(ops) if isinstance(op, kind)][:2]
    if kind is Send:  # both passes are computed before either output is sent
        ops = [op for i, op in enumerate(ops) if i not in (first, second)]
        after = ops.index(Compute(Pass.parse("0F1"))) + 1
        ops[after:after] = [plan.ops[0][second], plan.ops[0][first]]
    else:
        ops[first], ops[second] = ops[second], ops[first]
    with pytest.raises(PlanError, match=r"channel|no receive was posted"):
        prove(edited(plan, rank, ops))


def test_deadlock_is_rejected_with_the_ranks_positions() -> None:
    rows = ["0F0 0B0 0W0 0F1 0B1 0W1", "1F1 1B1 1W1 1F0 1B0 1W0"]
    schedule = Schedule.from_text("crossed", Placement.linear(2), 2, map(str.split, rows))
    with pytest.raises(PlanError) as error:
        lower(schedule)
    assert "the ranks wait for each other" in str(error.value)
    assert "> rank 0" in str(error.value) and "[0B0]" in str(error.value)
    assert "> rank 1" in str(error.value) and "[1F1]" in str(error.value)


def test_single_queue_rejects_a_plan_that_several_queues_allow() -> None:
    """With a single queue this plan deadlocks.

    Rank 1 receives 0F1 only after 1B0, which waits through rank 2 for 3B0. Rank 0 runs 3B0 after the send of 0F2, which
    a single queue cannot complete before 0F1 is received.
    """
    rows = [
        "0F0 3F0 0F1 0F2 3B0 0B0 3F1 3B1 0B1 3F2 3B2 0B2 0W0 0W1 0W2 3W0 3W1 3W2",
        "1F0 4F0 4B0 1B0 1W0 4W0 1F1 4F1 4B1 1B1 1F2 4F2 4B2 1B2 1W1 1W2 4W1 4W2",
        "2F0 5F0 5B0 2B0 2F1 5F1 5B1 2B1 2F2 5F2 5B2 2B2 2W0 2W1 2W2 5W0 5W1 5W2",
    ]
    schedule = Schedule.from_text("late", Placement.interleaved(3, 2), 3, map(str.split, rows))
    plan = lower(schedule)
    with pytest.raises(PlanError, match="the ranks wait for each other"):
        prove(plan, Queues.DEVICE)
    with pytest.raises(PlanError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1; set it to 32, or choose another schedule"):
        prove_for_queues(plan)
    prove_for_queues(lower(build("zb-h2", num_ranks=3, num_microbatches=6)))


def blocked_by_one_queue_per_direction(ranks: Iterable[int]) -> tuple[int, Counter[tuple[str, str]]]:
    """Prove the plans of all published schedules with 1 to 3p microbatches; count those that deadlock."""
    proved, blocked = 0, Counter[tuple[str, str]]()
    for name, p in product(SCHEDULES, ranks):
        for m in range(1, 3 * p + 1):
            schedule = build(name, num_ranks=p, num_microbatches=m)
            for kind, plan in (("training", lower(schedule)), ("evaluation", plan_of_evaluation(schedule))):
                proved += 1
                try:
                    prove(plan, Queues.DIRECTION)
                except PlanError:
                    blocked[name, kind] += 1
    return proved, blocked


def test_one_queue_per_direction_blocks_plans_that_several_queues_allow() -> None:
    """So would NCCL's eagerly created communicators block them."""
    _, blocked = blocked_by_one_queue_per_direction((2, 3))
    kinds = ("training", "evaluation")
    names = ("interleaved-1f1b", "zb-interleaved", "breadth-first", "gis", "gis-h", "pipe-offload", "zero-pp")
    expected = {*product(names, kinds), ("seq-interleaved-1f1b", "training")}
    assert blocked.keys() == expected, blocked


@pytest.mark.full
def test_number_of_plans_that_one_queue_per_direction_blocks() -> None:
    proved, blocked = blocked_by_one_queue_per_direction(range(2, 9))
    assert proved == 2 * 105 * len(SCHEDULES)
    expected = {("interleaved-1f1b", "training"): 33, ("interleaved-1f1b", "evaluation"): 21}
    expected |= {("breadth-first", "training"): 21, ("breadth-first", "evaluation"): 36}
    expected |= {("gis", "training"): 82, ("gis", "evaluation"): 46, ("gis-h", "training"): 86}
    expected |= {("gis-h", "evaluation"): 83, ("pipe-offload", "training"): 97, ("pipe-offload", "evaluation"): 91}
    expected |= {("zero-pp", "training"): 63, ("zero-pp", "evaluation"): 63}
    expected |= {("zb-interleaved", "training"): 37, ("zb-interleaved", "evaluation"): 21}
    assert blocked == expected | {("seq-interleaved-1f1b", "training"): 29, ("seq-interleaved-1f1b", "evaluation"): 3}
