"""In which order a schedule's passes can run at all.

Every rank runs its list first to last, and a pass waits for its dependencies. ``progress`` follows all ranks at once,
each as far as it gets, in time linear in the number of passes; simulation and the deadlock rule are both built on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.zero_bubble.analysis.errors import ScheduleError
from megatron.zero_bubble.ir import Pass, Schedule


def progress(schedule: Schedule) -> Iterator[tuple[int, Pass, tuple[Pass, ...]]]:
    """Yield ``(rank, pass, its dependencies)``, every pass after its dependencies and its rank's earlier passes.

    Raises:
        ScheduleError: when no rank can go on; it names the ranks that wait for each other and their passes.
    """
    done: set[Pass] = set()
    waiting: dict[Pass, list[int]] = {}
    cursor = [0] * len(schedule.order)
    ready = list(range(len(schedule.order)))
    while ready:
        rank = ready.pop()
        row = schedule.order[rank]
        while cursor[rank] < len(row):
            p = row[cursor[rank]]
            dependencies = schedule.dependencies(p)
            missing = next((d for d in dependencies if d not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, p, dependencies
            done.add(p)
            cursor[rank] += 1
            ready.extend(waiting.pop(p, ()))
    if any(column < len(row) for column, row in zip(cursor, schedule.order, strict=True)):
        raise _deadlock(schedule, cursor, {rank: p for p, ranks in waiting.items() for rank in ranks})


def _deadlock(schedule: Schedule, cursor: list[int], waits_for: dict[int, Pass]) -> ScheduleError:
    """Follow the waits from one blocked rank until they come back to a rank, or end at a pass that nobody runs."""
    holder = {p: rank for rank, row in enumerate(schedule.order) for p in row}
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
        steps.append(f"rank {r} stops at {schedule.order[r][cursor[r]]}, which waits for {needed} {where}")
    bad = cycle[-1] if rank is None else cycle[0]
    sentence = "the order deadlocks: " + "; ".join(steps)
    return ScheduleError(sentence, schedule, bad, cursor[bad], schedule.order[bad][cursor[bad]])
