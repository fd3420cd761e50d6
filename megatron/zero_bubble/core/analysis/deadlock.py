"""Find the ranks of a schedule that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from megatron.zero_bubble.core.analysis.errors import ScheduleError
from megatron.zero_bubble.core.analysis.steps import Blocked, run_to_end, steps_of
from megatron.zero_bubble.core.ir import Pass, Schedule
from megatron.zero_bubble.core.ir.pairs import computes


def deadlock(schedule: Schedule) -> ScheduleError | None:
    """Return the deadlock of a schedule; None if its order comes to its end."""
    try:
        run_to_end(steps_of(schedule))
    except Blocked as blocked:
        return _described(schedule, blocked)
    return None


def _described(schedule: Schedule, blocked: Blocked) -> ScheduleError:
    """Follow the waits from one blocked rank to a cycle, or to a pass that no rank runs."""
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
