"""Vector clocks: which ops of other ranks an op of a plan implies.

They are found in one run of the plan without time. Every rank and every token has, of each rank, the number of ops that
must have ended by then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.steps import Step, advance

Clock = tuple[int, ...]


class Clocked(NamedTuple):
    """A step of a rank, at its position in the row.

    Attributes:
        before: the clock of the rank when it has come to the step.
        after: the clock when the step has ended.
    """

    rank: int
    position: int
    step: Step
    before: Clock
    after: Clock


def clocked(rows: Sequence[Sequence[Step]]) -> Iterator[Clocked]:
    """Yield the steps of all ranks, each after those of other ranks that it waits for."""
    clocks: list[Clock] = [(0,) * len(rows) for _ in rows]
    made: dict[Hashable, Clock] = {}
    for rank, position, step in advance(rows, made):
        before = clocks[rank]
        known = [before, *(made[token] for token in step.waits)]
        clock = list(map(max, *known)) if len(known) > 1 else list(before)
        clock[rank] = position + 1
        clocks[rank] = tuple(clock)
        yield Clocked(rank, position, step, before, clocks[rank])
        made.update(dict.fromkeys(step.makes, clocks[rank]))
