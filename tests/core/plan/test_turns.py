"""One hardware queue suffices for plans with collectives; without ``in_turn``, some of them block it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from megatron.zero_bubble import build
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Op, Plan, Recv, Send
from megatron.zero_bubble.core.ir.collectives import Collective
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.plan import Additions, communicate, lower, plan_of, plan_of_evaluation, prove_for_queues
from megatron.zero_bubble.core.plan.collect import collect
from megatron.zero_bubble.core.plan.turns import in_turn
from tests.helpers.sources import named

NAMES = (
    *("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-1f1b", "zb-interleaved", "breadth-first"),
    *("dualpipe-v", "zero-pp"),
)
Lowering = Callable[..., Plan]
LOWERINGS: dict[str, Lowering] = {
    "training": plan_of,
    "late receives": lambda schedule: plan_of(schedule, Additions("late")),
    "post-validation": lambda schedule: plan_of(schedule, Additions(post_validation=True)),
    "evaluation": plan_of_evaluation,
}


def plans(name: str, ranks: Iterable[int], lowerings: Iterable[str], step: int = 1) -> Iterator[tuple[str, Plan]]:
    """Yield the plans with either algorithm, for every ``step``-th number of microbatches up to 3p, with a name."""
    algorithms: tuple[Algorithm, ...] = (1, 2)
    for p, algorithm in product(ranks, algorithms):
        for m in range(1, 3 * p + 1, step):
            schedule = named(name, p, vocabulary=algorithm).make(m)
            for what in lowerings:
                yield f"{p=} {m=} {algorithm=} {what}", LOWERINGS[what](schedule)


def refused(plan: Plan) -> bool:
    """What one queue allows, any number allows."""
    try:
        prove_for_queues(plan, 1)
    except PlanError:
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_one_queue_suffices(name: str) -> None:
    some = (*plans(name, (2,), LOWERINGS, 2), *plans(name, (3,), LOWERINGS, 4), *plans(name, (4,), ("training",), 5))
    assert [what for what, plan in some if refused(plan)] == []


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("name", NAMES)
def test_one_queue_suffices_for_every_plan(name: str, num_ranks: int) -> None:
    assert [what for what, plan in plans(name, (num_ranks,), LOWERINGS) if refused(plan)] == []


def streams(row: Iterable[Op]) -> dict[object, list[Op]]:
    """The transfers of a rank by stream."""
    found: dict[object, list[Op]] = {}
    for op in row:
        if isinstance(op, Collective):
            found.setdefault(op.lane, []).append(op)
        elif isinstance(op, (Send, Recv)):
            found.setdefault((type(op), op.message.channel), []).append(op)
    return found


@pytest.mark.parametrize(("name", "p", "m"), [("interleaved-1f1b", 2, 5), ("zb-v", 4, 9), ("zb-interleaved", 3, 7)])
def test_transfers_change_places_only_where_a_plan_blocks_the_queue(name: str, p: int, m: int) -> None:
    """The passes and the order of every stream stay."""
    schedule = named(name, p, vocabulary=2).make(m)
    before = lower(schedule, (collect, communicate))
    after = in_turn(before)
    assert refused(before) and not refused(after)
    for old, new in zip(before.ops, after.ops, strict=True):
        assert [op for op in old if op.works] == [op for op in new if op.works]
        assert streams(old) == streams(new)
        assert sorted(map(str, old)) == sorted(map(str, new))
    assert in_turn(after).ops == after.ops


def test_other_plans_stay_as_they_are() -> None:
    """Also one that a single queue blocks, because collectives are missing."""
    plan = lower(build("zb-h1", num_ranks=4, num_microbatches=6))
    assert in_turn(plan) is plan
    schedule = named("zb-h1", 2, vocabulary=2).make(4)
    plan = lower(schedule, (collect, communicate))
    row = tuple(op for op in plan.ops[0] if not isinstance(op, Collective))
    broken = replace(plan, ops=(row, *plan.ops[1:]))
    assert in_turn(broken) is broken
