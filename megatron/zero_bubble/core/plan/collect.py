"""Insert the collectives of vocabulary parallelism: values for all ranks, and sums of the parts of all ranks.

A rank starts a collective directly after the pass that makes its input. A rank that only receives starts it directly
after the pass that uses the result of the previous collective of the same kind: a collective is complete when all ranks
have started it, so no rank may let the others wait, and a rank has one receiving collective of each kind at a time.

A rank that receives a sum starts it after its next pass of the same kind, if that comes before the pass that uses the
sum: other ranks may look up tokens, for example, a period later, and the next collective of the kind would hold back
the hardware queue until they have.

Parts that must be scaled before they are added need two collectives, the second of which holds back its hardware queue
until all ranks have started the first. So a rank starts the sum one pass later, when the others have probably come as
far, unless that pass must follow the one that uses the sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from megatron.zero_bubble.core.analysis.steps import steps
from megatron.zero_bubble.core.ir import Op, Pass, Plan
from megatron.zero_bubble.core.ir.collectives import AllGather, Collective, Spread, Sum
from megatron.zero_bubble.core.ir.vocabulary import PART, TO_ALL_RANKS, Vocabulary
from megatron.zero_bubble.core.plan.clocks import Clock, clocked
from megatron.zero_bubble.core.plan.finish import finish
from megatron.zero_bubble.core.plan.unroll import alike


@alike
def collect(plan: Plan) -> Plan:
    """A lowering pass: add the collectives, and free what ranks have given to them. Plans without vocabulary
    parallelism, or of one rank, stay as they are.
    """
    return _finished(plan) if _has_collectives(plan) else plan


@alike
def start_collectives(plan: Plan) -> Plan:
    """A lowering pass: add the collectives as ``collect`` does, but free nothing, which takes no time."""
    return _started(plan) if _has_collectives(plan) else plan


def _has_collectives(plan: Plan) -> bool:
    return isinstance(plan.schedule.flow, Vocabulary) and plan.schedule.num_ranks > 1


# The simulation, the memory of messages, and the proof of a schedule begin with the same.
@lru_cache(maxsize=4)
def _finished(plan: Plan) -> Plan:
    return finish(_started(plan))


@lru_cache(maxsize=4)
def _started(plan: Plan) -> Plan:
    flow = plan.schedule.flow
    assert isinstance(flow, Vocabulary), "only these have collectives"
    clocks: list[list[Clock]] = [[] for _ in plan.ops]
    for rank, _, _, _, clock in clocked(steps(plan)):
        clocks[rank].append(clock)
    return replace(plan, ops=tuple(_row(plan, flow, rank, clocks[rank]) for rank in range(len(plan.ops))))


def _row(plan: Plan, flow: Vocabulary, rank: int, clocks: Sequence[Clock]) -> tuple[Op, ...]:
    schedule, size = plan.schedule, plan.schedule.num_ranks

    def home(p: Pass) -> int:
        return schedule.placement.stage_to_rank[p.stage]

    def received(op: Op) -> list[Spread]:
        inputs = [value for work in op.works for value in flow.inputs(work)]
        found = [(value, home(value.producer)) for value in inputs if value.name in TO_ALL_RANKS]
        return [Spread(value, rank, root, size) for value, root in found if root != rank]

    def given(op: Op) -> Iterator[Collective]:
        for value in (value for work in op.works for value in flow.outputs(work)):
            if value.name in TO_ALL_RANKS:
                yield Spread(value, rank, rank, size)
            elif value.name == PART:
                if flow.is_scaled(value):
                    yield AllGather(value, rank, rank, size)
                yield Sum(value, rank, home(flow.consumers(value)[0]), size)

    waiting: dict[str, deque[Spread]] = {}
    arriving = [received(op) for op in plan.ops[rank]]
    for spread in chain.from_iterable(arriving):
        waiting.setdefault(spread.lane, deque()).append(spread)
    row: list[Op] = [queue.popleft() for queue in waiting.values()]
    later = _Later(plan, flow)
    for op, clock, spreads in zip(plan.ops[rank], clocks, arriving, strict=True):
        row += [*later.due_before(clock), op, *later.due_after(op)]
        for collective in given(op):
            row += later.started_by(collective)
        row += [waiting[spread.lane].popleft() for spread in spreads if waiting[spread.lane]]
    return tuple(row)


class _Later:
    """The sums that a rank has yet to start."""

    def __init__(self, plan: Plan, flow: Vocabulary) -> None:
        self._flow = flow
        self._places = [{work: place for place, op in enumerate(row) for work in op.works} for row in plan.ops]
        self._sums: list[Sum] = []

    def started_by(self, collective: Collective) -> Iterator[Collective]:
        """What a rank starts once it has the input of ``collective``."""
        if isinstance(collective, Sum) and (collective.is_root or self._flow.is_scaled(collective.value)):
            self._sums.append(collective)
        else:
            yield collective

    def due_before(self, clock: Clock) -> list[Sum]:
        """What must be started before an op that ends with ``clock``: the op follows the pass that uses the sum."""
        return self._taken([total for total in self._sums if clock[total.root] > self._place_of_user(total)])

    def due_after(self, op: Op) -> list[Sum]:
        """What a rank starts after ``op``."""
        kinds = {work.kind for work in op.works}
        return self._taken(
            [total for total in self._sums if self._flow.is_scaled(total.value) or total.value.producer.kind in kinds]
        )

    def _place_of_user(self, total: Sum) -> int:
        (user,) = self._flow.consumers(total.value)
        return self._places[total.root][user]

    def _taken(self, due: list[Sum]) -> list[Sum]:
        self._sums = [total for total in self._sums if total not in due]
        return due
