"""Slots: no two microbatches share one while both are between their F and their W, and there are few."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.core.ir import Op, Plan, Settle
from megatron.zero_bubble.core.plan import num_slots, plan_of, slots
from megatron.zero_bubble.core.schedules import SCHEDULES, build, sliced
from tests.helpers.rows import some

WHOLE = sorted(set(SCHEDULES) - set(sliced()))
OF_WORST_RANK = {
    "1f1b": 8,
    "zb-h1": 8,
    "zb-h2": 15,
    "zb-interleaved": 24,
    "zb-v": 17,
    "v-half": 12,
    "v-min": 10,
    "dualpipe-v": 17,
}


def made(name: str, num_ranks: int, num_microbatches: int) -> Plan:
    return plan_of(build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))


def most_slots(plan: Plan) -> int:
    return max(num_slots(slots(plan, rank)) for rank in range(len(plan.ops)))


def spans(row: tuple[Op, ...], until_settled: bool) -> dict[tuple[int, int], tuple[int, int]]:
    """The first and the last place at which a stage needs the memory of a microbatch."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, op in enumerate(row):
        for work in op.works:
            places[work.stage, work.microbatch].append(place)
        if until_settled and isinstance(op, Settle):
            places[op.message.producer.stage, op.message.producer.microbatch].append(place)
    return {key: (min(of), max(of)) for key, of in places.items()}


def most_alive(of_row: Iterable[tuple[int, int]]) -> int:
    """The most microbatches at a time."""
    return max(Counter(place for begin, end in of_row for place in range(begin, end + 1)).values())


@pytest.mark.parametrize("name", OF_WORST_RANK)
def test_of_the_worst_rank(name: str) -> None:
    plan = made(name, 8, 64)
    assert max(num_slots(slots(plan, rank)) for rank in range(8)) == OF_WORST_RANK[name]
    for rank, row in enumerate(plan.ops):
        assert num_slots(slots(plan, rank)) <= most_alive(spans(row, False).values()) + 2


@given(st.sampled_from(WHOLE), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_live_microbatches_have_slots_of_their_own(name: str, ranks: int, loops: int, until_settled: bool) -> None:
    plan = made(name, ranks, 2 * ranks * loops)
    for rank, row in enumerate(plan.ops):
        of_row = spans(row, until_settled)
        for stage, found in slots(plan, rank, until_settled).items():
            of_stage = [of_row[stage, microbatch] for microbatch in range(len(found))]
            assert max(found) + 1 == most_alive(of_stage)
            for slot in range(max(found) + 1):
                of_slot = sorted(span for span, own in zip(of_stage, found, strict=True) if own == slot)
                assert all(end < begin for (_, end), (begin, _) in pairwise(of_slot))


@pytest.mark.parametrize("name", some(list(OF_WORST_RANK), "zb-h1", "zb-v", "v-half"))
def test_more_microbatches_reuse_the_slots(name: str) -> None:
    few, many = made(name, 4, 24), made(name, 4, 96)
    for rank in range(4):
        assert num_slots(slots(few, rank)) == num_slots(slots(many, rank))


def test_another_plan_reuses_the_slots() -> None:
    assert most_slots(made("zb-h1", 4, 12)) == most_slots(made("1f1b", 4, 12)) < most_slots(made("zb-h2", 4, 12))
