"""Find the ranks of a schedule that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from megatron.zero_bubble.core.analysis.errors import ScheduleError
from megatron.zero_bubble.core.analysis.steps import Blocked
from megatron.zero_bubble.core.ir import Pass, Schedule
from megatron.zero_bubble.core.ir.pairs import computes


def deadlock(schedule: Schedule, blocked: Blocked) -> ScheduleError:
    """Describe a deadlock: follow the waits from one blocked rank to a cycle, or to a pass that no rank runs.

    Args:
        blocked: the state in which a run of ``steps_of(schedule)`` stopped.
    """
    cursor, waits_for = blocked.positions, cast("Mapping[int, Pass]", blocked.waits_for)
    holder = {p: rank for rank, row in enumerate(schedule.order) for p in row}
    ops = [list(computes(row, schedule.pairs)) for row in schedule.order]
    rank: int | None = min(waits_for)
    seen: list[int] = []
    while rank is not None and rank not in seen:
        seen.append(rank)
        rank = holder.get(waits_for[rank])
    cycle = seen if rank is None else seen[seen.index(rank) :]
    steps = []
    for r in cycle:
        needed = waits_for[r]
        where = f"on rank {holder[needed]}" if needed in holder else "that no rank runs"
        steps.append(f"rank {r} stops at {ops[r][cursor[r]]}, which waits for {needed} {where}")
    bad = cycle[-1] if rank is None else cycle[0]
    sentence = "the order deadlocks: " + "; ".join(steps)
    column = sum(len(op.works) for op in ops[bad][: cursor[bad]])
    return ScheduleError(sentence, schedule, bad, column, schedule.order[bad][column])
