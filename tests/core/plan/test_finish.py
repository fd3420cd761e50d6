"""What ranks give to collectives is freed soon, without a wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, build
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Kind, Plan, Schedule
from megatron.zero_bubble.core.ir.collectives import Collective, Finish
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import plan_of, plan_of_evaluation, plan_without_messages
from megatron.zero_bubble.core.plan.plan_of import plan_of_times
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary

RANKS = 4
NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-1f1b")


def made(name: str, algorithm: Algorithm, microbatches: int) -> tuple[Schedule, PassCosts]:
    schedule = build(name, num_ranks=RANKS, num_microbatches=microbatches)
    costs = PassCosts.uniform(schedule.placement, 3.0, 3.0, 2.0, 0.1)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(RANKS, 1.0, 1.0, collective_ms=0.7))
    return with_vocabulary(schedule, costs, algorithm, 0.5, delay=schedule.num_stages > RANKS), costs


def most_kept(plan: Plan) -> Counter[str]:
    """Per kind of collective, the most operands that a rank keeps at a time."""
    most: Counter[str] = Counter()
    for row in plan.ops:
        kept: Counter[str] = Counter()
        for op in row:
            if isinstance(op, Collective) and op.operand is not None:
                kept[op.lane] += 1
            elif isinstance(op, Finish):
                kept[op.collective.lane] -= 1
            most |= kept
        assert not +kept
    return most


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_operands_do_not_grow_with_the_number_of_microbatches(name: str, algorithm: Algorithm) -> None:
    few, many = (most_kept(plan_of(made(name, algorithm, count)[0])) for count in (16, 48))
    assert few == many
    assert max(many.values()) <= 3 * RANKS


def without_finish(plan: Plan) -> Plan:
    ops = tuple(tuple(op for op in row if not isinstance(op, Finish)) for row in plan.ops)
    return replace(plan, ops=ops)


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_passes_start_as_early_as_without(name: str, algorithm: Algorithm) -> None:
    schedule, costs = made(name, algorithm, 9)
    for plan in (
        plan_of(schedule),
        plan_of_evaluation(schedule),
    ):
        whole = replace(plan, ops=tuple(plan.ops))
        timelines = [simulate(each, costs) for each in (whole, without_finish(whole))]
        assert timelines[0].spans == timelines[1].spans


def test_what_the_first_rank_gives_is_freed_when_the_result_is_used() -> None:
    """Its tokens, whose rows its forward takes; its part of S, without which there are no factors for its T."""
    row = [str(op) for op in plan_of(made("zb-h1", 2, 8)[0]).ops[0]]
    for given, user in (("0I0:tokens>*", "0F0"), ("0S0:part>+3", "0T0")):
        assert row.index(given) < row.index(user) < row.index(f"{given}=") <= row.index(user) + 4


def test_last_gradients_are_freed_at_the_end() -> None:
    """The J of other ranks gives nothing back."""
    row = plan_of(made("zb-h1", 2, 8)[0]).ops[0]
    assert isinstance(row[-1], Finish)
    assert row[-1].collective.value.producer.kind is Kind.B


@pytest.mark.parametrize("algorithm", [1, 2])
def test_times_are_planned_without(algorithm: Algorithm) -> None:
    schedule, costs = made("zb-v", algorithm, 9)
    assert not any(isinstance(op, Finish) for row in plan_of_times(schedule).ops for op in row)
    assert timeline_of(schedule, costs) == simulate(plan_without_messages(schedule), costs)
