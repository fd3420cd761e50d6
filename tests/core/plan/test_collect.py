"""Collectives of vocabulary parallelism in plans: they replace messages, and misplaced ones are rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.zero_bubble import PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Compute, Op, Recv, Send, Validate
from megatron.zero_bubble.core.ir.collectives import AllGather, Collective, Finish, Spread, Sum, collectives_of
from megatron.zero_bubble.core.ir.ops import OPS
from megatron.zero_bubble.core.ir.vocabulary import HIDDEN, PART, TO_ALL_RANKS, Algorithm
from megatron.zero_bubble.core.plan import Additions, communicate, lower, plan_of, plan_of_evaluation, prove
from megatron.zero_bubble.core.plan.collect import collect
from megatron.zero_bubble.core.plan.prove import Queues, num_streams, prove_for_queues
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from tests.helpers.plans import plan_from_text

RANKS, MICROBATCHES = 4, 6
NAMES = ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-1f1b"]


def made(
    name: str = "zb-h1", algorithm: Algorithm = 2, ranks: int = RANKS, microbatches: int = MICROBATCHES
) -> tuple[Schedule, PassCosts]:
    schedule = build(name, num_ranks=ranks, num_microbatches=microbatches)
    costs = PassCosts.uniform(schedule.placement, 18.0, 18.0, 9.0, 0.6)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(ranks, 4.0, 3.0, 0.5, 0.7))
    return with_vocabulary(schedule, costs, algorithm, 0.5, delay=schedule.num_stages > ranks), costs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", [1, 2])
def test_collectives_replace_messages_at_little_cost(name: str, algorithm: Algorithm) -> None:
    schedule, costs = made(name, algorithm, microbatches=2 * MICROBATCHES)
    plan = plan_of(schedule)
    moved = [op.message.value.name for row in plan.ops for op in row if isinstance(op, (Send, Recv))]
    assert not {*TO_ALL_RANKS, PART} & set(moved)
    assert simulate(plan, costs).makespan_ms <= 1.01 * simulate(schedule, costs).makespan_ms
    for queues in (Queues.CHANNEL, Queues.DEVICE):
        prove(plan, queues)
    evaluation = plan_of_evaluation(schedule)
    assert any(isinstance(op, Collective) for row in evaluation.ops for op in row)


def test_a_rank_alone_has_no_collectives() -> None:
    schedule, _ = made(ranks=1)
    assert not any(isinstance(op, Collective) for row in plan_of(schedule).ops for op in row)


def test_collectives_parse_what_they_print() -> None:
    plan = plan_of(made()[0])
    read = plan_from_text(plan.schedule, plan.to_text(), (*collectives_of(RANKS), *OPS))
    assert read.ops == plan.ops


def test_collective_time_is_added_once() -> None:
    schedule, costs = made()
    assert costs.vocabulary is not None
    plan = plan_of(schedule)
    slow = replace(costs, vocabulary=replace(costs.vocabulary, collective_ms=5.0))
    assert simulate(plan, slow).makespan_ms > simulate(plan, costs).makespan_ms
    spans = [span for row in simulate(plan, slow).lanes for span in row]
    assert len(spans) == sum(isinstance(op, Collective) for row in plan.ops for op in row)
    for span in spans:  # gathering the scales counts as a part of the sum
        assert span.end_ms - span.start_ms == pytest.approx(0.0 if isinstance(span.op, AllGather) else 5.0)


def without_one(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Leave out the last receiving collective."""
    at = max(place for place, op in enumerate(row) if isinstance(op, Spread) and not op.is_root)
    return (*row[:at], *row[at + 1 :])


def in_another_order(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Exchange the first two sums of S."""
    first, second = [op for op in row if isinstance(op, Sum) and op.value.producer.kind.value == "S"][:2]
    return tuple({first: second, second: first}.get(op, op) if isinstance(op, Sum) else op for op in row)


def too_late(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Start the first receiving collective at the very end."""
    first = next(op for op in row if isinstance(op, Spread) and not op.is_root)
    return (*(op for op in row if op != first), first)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (without_one, "collectives of 'net .*' differ between ranks 2 and 0"),
        (in_another_order, "collectives of 'net S:part' differ between ranks 2 and 0"),
        (too_late, "differ between ranks 2 and 0|no receive was posted"),
    ],
)
def test_misplaced_collective_is_rejected(edit: Callable[[tuple[Op, ...]], tuple[Op, ...]], what: str) -> None:
    plan = lower(made()[0], (collect, communicate))
    with pytest.raises(PlanError, match=what):
        prove(replace(plan, ops=(*plan.ops[:2], edit(plan.ops[2]), *plan.ops[3:])))


def test_a_collective_that_waits_for_itself_is_rejected() -> None:
    """The last rank computes the loss, from what all ranks make of its output, before it gives them its output."""
    plan = lower(made()[0], (collect, communicate))
    row = plan.ops[-1]
    loss = next(place for place, op in enumerate(row) if str(op) == "3L0")
    hidden = [op for op in row[:loss] if isinstance(op, Spread) and op.value.name == HIDDEN]
    early = {*hidden, *map(Finish, hidden)}
    moved = (*(op for op in row[: loss + 1] if op not in early), *hidden, *row[loss + 1 :])
    moved = (*(op for op in moved if op not in set(map(Finish, hidden))), *map(Finish, hidden))
    with pytest.raises(PlanError, match="the ranks wait for each other"):
        prove(replace(plan, ops=(*plan.ops[:-1], moved)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", [1, 2])
def test_number_of_streams(name: str, algorithm: Algorithm) -> None:
    """A rank between two others has a stream for passes, four for messages, and two for each kind of collective."""
    plan = plan_of(made(name, algorithm)[0])
    kinds = {op.lane for op in plan.ops[0] if isinstance(op, Collective)}
    assert num_streams(plan) == 5 + 2 * len(kinds) <= 32


@pytest.mark.parametrize("algorithm", [1, 2])
def test_sums_of_scaled_parts_follow_what_all_ranks_gather(algorithm: Algorithm) -> None:
    """Only with algorithm 2 in training, and with a pass in between unless that must follow the sum."""
    schedule = made("zb-h1", algorithm)[0]
    gathers = [op for row in plan_of(schedule).ops for op in row if isinstance(op, AllGather)]
    assert len(gathers) == (RANKS * MICROBATCHES if algorithm == 2 else 0)
    assert not any(isinstance(op, AllGather) for row in plan_of_evaluation(schedule).ops for op in row)
    if algorithm == 2:
        row = [op for op in plan_of(schedule).ops[1] if isinstance(op, (AllGather, Sum, Compute))]
        text = [str(op) for op in row if not str(op).startswith("1I")]
        at = text.index("1S4:part<>*")
        assert text[at - 1] == "1S4"
        assert text[at + 2] == "1S4:part>+3"


def test_plans_without_collectives_need_no_queues_of_their_own() -> None:
    """Whatever ends in a single queue ends in several."""
    plan = plan_of(build("zb-h1", num_ranks=4, num_microbatches=8))
    assert num_streams(plan) == 5
    prove_for_queues(plan, 1)
    prove_for_queues(plan, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", [1, 2])
def test_stopped_ranks_complete_the_collectives_that_others_started(name: str, algorithm: Algorithm) -> None:
    plan = plan_of(made(name, algorithm)[0], Additions(post_validation=True))
    begun = [row[: row.index(Validate())] for row in plan.ops]
    started = [
        [op.key for op in (*before, *drain) if isinstance(op, Collective)]
        for before, drain in zip(begun, plan.drain, strict=True)
    ]
    assert started[0]
    assert all(set(keys) == set(started[0]) for keys in started)


def test_many_microbatches_are_lowered_once() -> None:
    schedule = build("zb-h1", num_ranks=4, num_microbatches=200)
    costs = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    plan = plan_of(with_vocabulary(schedule, costs, 2))
    prove(plan)
    whole = lower(plan.schedule, (collect, communicate))
    assert sum(len(row) for row in plan.stem.ops) < sum(map(len, whole.ops)) / 3
