"""Insert the ops that free what ranks have given to collectives.

The same rule as for send buffers (``plan.communicate``): a rank frees it after an op that implies that the collective
has ended, because all ranks that need its result have used it. So ``Finish`` does not wait, delays no pass, and cannot
make ranks wait for each other. Without such an op, it is freed at the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from megatron.zero_bubble.core.analysis.steps import Step, steps
from megatron.zero_bubble.core.ir import Op, Plan, Value
from megatron.zero_bubble.core.ir.collectives import Collective, Finish
from megatron.zero_bubble.core.plan.clocks import Clock, clocked


def finish(plan: Plan) -> Plan:
    """Add a ``Finish`` for every collective that leaves a rank without a result."""
    rows = steps(plan)
    first_uses = _first_uses(rows)
    due = [_Due() for _ in rows]
    for rank, _, step, clock, _ in clocked(rows):
        due[rank].proceed(step.op, clock, first_uses)
    return replace(plan, ops=tuple((*row.ops, *row.left()) for row in due))


def _first_uses(rows: Sequence[Sequence[Step]]) -> dict[Value, list[tuple[int, int]]]:
    """By collective, the rank and the position of the first op that uses its result, on every rank that has one."""
    found: defaultdict[Value, list[tuple[int, int]]] = defaultdict(list)
    for rank, row in enumerate(rows):
        used: set[int] = set()
        for position, step in enumerate(row):
            for giver in step.after:
                op = row[giver].op
                if isinstance(op, Collective) and giver not in used:
                    used.add(giver)
                    found[op.key].append((rank, position))
    return found


class _Due:
    """The ops of one rank so far, and its collectives that have no ``Finish`` yet, by lane."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._waiting: dict[str, deque[Collective]] = {}

    def proceed(self, op: Op, clock: Clock, first_uses: dict[Value, list[tuple[int, int]]]) -> None:
        """Add ``op``, and before it, if it is a pass, whatever may be freed after ``clock``.

        Before passes only: other ranks wait for the collectives and messages that follow a pass.
        """
        for queue in self._waiting.values() if op.works else ():
            while queue and all(clock[rank] > position for rank, position in first_uses[queue[0].key]):
                self.ops.append(Finish(queue.popleft()))
        self.ops.append(op)
        if isinstance(op, Collective) and op.operand is not None:
            self._waiting.setdefault(op.lane, deque()).append(op)

    def left(self) -> list[Finish]:
        """What is freed at the end."""
        return [Finish(op) for queue in self._waiting.values() for op in queue]
