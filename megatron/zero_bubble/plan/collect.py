"""Insert the collectives of vocabulary parallelism: values for all ranks, and sums of the parts of all ranks.

A rank starts a collective directly after the pass that makes its input. A rank that only receives starts it directly
after the pass that uses the result of the previous collective of the same kind: a collective is complete when all ranks
have started it, so no rank may let the others wait, and a rank has one receiving collective of each kind at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.ir import Op, Pass, Plan
from megatron.zero_bubble.ir.collectives import Spread, Sum
from megatron.zero_bubble.ir.vocabulary import PART, TO_ALL_RANKS, Vocabulary
from megatron.zero_bubble.plan.finish import finish
from megatron.zero_bubble.plan.unroll import alike


@alike
def collect(plan: Plan) -> Plan:
    """A lowering pass: add the collectives, and free what ranks have given to them. Plans without vocabulary
    parallelism, or of one rank, stay as they are.
    """
    if not isinstance(plan.schedule.flow, Vocabulary) or plan.schedule.num_ranks == 1:
        return plan
    return finish(replace(plan, ops=tuple(_row(plan, rank) for rank in range(len(plan.ops)))))


def _row(plan: Plan, rank: int) -> tuple[Op, ...]:
    schedule, flow = plan.schedule, plan.schedule.flow
    size = schedule.num_ranks

    def home(p: Pass) -> int:
        return schedule.placement.stage_to_rank[p.stage]

    def received(op: Op) -> list[Spread]:
        inputs = [value for work in op.works for value in flow.inputs(work)]
        found = [(value, home(value.producer)) for value in inputs if value.name in TO_ALL_RANKS]
        return [Spread(value, rank, root, size) for value, root in found if root != rank]

    def given(op: Op) -> Iterator[Op]:
        for value in (value for work in op.works for value in flow.outputs(work)):
            if value.name in TO_ALL_RANKS:
                yield Spread(value, rank, rank, size)
            elif value.name == PART:
                yield Sum(value, rank, home(flow.consumers(value)[0]), size)

    waiting: dict[str, deque[Spread]] = {}
    for op in plan.ops[rank]:
        for spread in received(op):
            waiting.setdefault(spread.lane, deque()).append(spread)
    row: list[Op] = [queue.popleft() for queue in waiting.values()]
    for op in plan.ops[rank]:
        row += [op, *given(op)]
        row += [waiting[spread.lane].popleft() for spread in received(op) if waiting[spread.lane]]
    return tuple(row)
