"""Reorder transfers where a single hardware queue would make ranks wait for each other.

In one queue, what waits for the previous transfer of its stream holds back everything behind it. Some plans that run
with a queue per stream block there. The plan is run without time by the rules of one queue (``prove.in_one_queue``).
Where it blocks, a rank does one of two things that it can do at once:

* It posts a receive for which another rank waits, earlier than planned.
* It runs what follows the transfers that it cannot start yet, if that does not need them.

Every stream keeps its order. Plans that do not block stay as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.steps import Blocked, Step, advance, run_to_end, steps
from megatron.zero_bubble.core.ir import Op, Plan, Recv
from megatron.zero_bubble.core.ir.collectives import Collective
from megatron.zero_bubble.core.plan.prove import in_one_queue, stream_of
from megatron.zero_bubble.core.plan.unroll import alike


@alike
def in_turn(plan: Plan) -> Plan:
    """A lowering pass: reorder transfers, so that the plan runs with one hardware queue if that is possible. Plans
    without collectives stay as they are.
    """
    if not any(isinstance(op, Collective) for row in plan.ops for op in row):
        return plan
    planned = in_one_queue(steps(plan))
    try:
        run_to_end(planned)
    except Blocked:
        return _reordered(plan, planned)
    return plan


def _reordered(plan: Plan, planned: Sequence[Sequence[Step]]) -> Plan:
    rows = [[_Item(number, step) for number, step in enumerate(row)] for row in planned]
    maker = {token: rank for rank, row in enumerate(rows) for item in row for token in item.step.makes}
    made: set[Hashable] = set()
    done: list[list[Op]] = [[] for _ in rows]
    while True:
        try:
            for rank, _, step in advance([[item.step for item in row] for row in rows], made):
                made.update(step.makes)
                done[rank].append(step.op)
        except Blocked as blocked:
            rows = [row[at:] for row, at in zip(rows, blocked.positions, strict=True)]
            wanted = [(maker.get(token), token) for token in _in_a_cycle(blocked.waits_for, maker)]
            if not any(_goes_on(rows[rank], token, made) for rank, token in wanted if rank is not None):
                return plan
        else:
            return replace(plan, ops=tuple(map(tuple, done)))


class _Item(NamedTuple):
    """A step, and its position in the plan."""

    number: int
    step: Step


def _in_a_cycle(waits_for: Mapping[int, Hashable], maker: Mapping[Hashable, int]) -> list[Hashable]:
    """The tokens for which ranks wait: first those of a cycle of ranks that wait for each other, then all."""
    rank: int | None = next(iter(waits_for))
    ranks: list[int] = []
    while rank is not None and rank not in ranks:
        ranks.append(rank)
        rank = maker.get(waits_for[rank])
    cycle = [] if rank is None else ranks[ranks.index(rank) :]
    return [*(waits_for[each] for each in cycle), *waits_for.values()]


def _goes_on(row: list[_Item], token: Hashable, made: set[Hashable]) -> bool:
    """Move what a rank can do at once to the front of its row; another rank waits for ``token`` of it."""
    wanted = next((place for place, item in enumerate(row) if token in item.step.makes), None)
    if wanted is not None and isinstance(row[wanted].step.op, Recv) and made.issuperset(row[wanted].step.waits):
        row.insert(0, row.pop(wanted))
        return True
    held = list(takewhile(lambda item: _can_be_late(item.step.op) and not made.issuperset(item.step.waits), row))
    if not held or len(held) == len(row):
        return False
    following = row[len(held)].step
    streams = {stream_of(item.step.op) for item in held}
    if any(item.number in following.after for item in held) or stream_of(following.op) in streams:
        return False
    if not made.issuperset(following.waits):
        return False
    row.insert(0, row.pop(len(held)))
    return True


def _can_be_late(op: Op) -> bool:
    """Whether an op is a transfer that a rank may start later; a message leaves when it is made."""
    return isinstance(op, (Recv, Collective))
