"""Compare several orders of the same passes: what a pass takes, and what it waits for, is found once for all of them.

The rules are those of ``analysis.simulate``, for schedules without ops, whose passes do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import sub
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.memory import highest, most_kept
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.messages import of_schedule
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.ir.ops import Compute


class Outcome(NamedTuple):
    """What comes of an order.

    Attributes:
        kept: the most memory that a rank keeps, in the unit of the memory figures.
    """

    order: Schedule
    makespan_ms: float
    span_ms: float
    kept: float


def outcomes(orders: Sequence[Schedule], costs: PassCosts, memory: PassMemory) -> Iterator[Outcome]:
    """Yield the outcome of each order: what its timeline by ``simulate`` says, to the last bit, but much faster.

    Args are those of ``simulate``, with as many stages as the orders.
    """
    counts = not orders[0].overlaps and not any(memory.captured)  # graphs keep more than the changes of passes
    passes = _Passes(orders[0], costs, memory) if counts else None
    for order in orders:
        if passes is None or (found := passes.run(order)) is None:
            timeline = simulate(order, costs, memory)  # it describes a deadlock
            kept = max(most_kept(timeline, memory))
            found = Outcome(order, timeline.makespan_ms, timeline.span_ms, kept)
        yield found


class _Passes:
    """The passes of a schedule by number."""

    def __init__(self, schedule: Schedule, costs: PassCosts, memory: PassMemory) -> None:
        self._number = {p: number for number, p in enumerate(schedule.passes())}
        (times, slices), memory = of_schedule(costs, schedule), memory.recomputing(schedule.recomputed)
        rank_of, stages_of = schedule.placement.stage_to_rank, schedule.placement.stages_of
        self._duration = [times.duration(p, slices) for p in self._number]
        self._changes = [[change for change in memory.changes(p, slices) if change] for p in self._number]
        self._one = [sum(memory.activation[s] for s in stages_of(rank)) for rank in range(schedule.num_ranks)]
        self._waits: list[
            list[tuple[int, float]]
        ] = []  # the passes that one waits for, and how long their results take
        for p in self._number:
            rank, op, own = rank_of[p.stage], Compute(p), []
            for other in schedule.dependencies(p):
                source = rank_of[other.stage]
                arrives = 0.0 if source == rank else times.comm(source, rank) + op.arrival_ms(times, other)
                own.append((self._number[other], arrives))
            self._waits.append(own)

    def run(self, order: Schedule) -> Outcome | None:
        """Run every pass as early as possible; None for an order that deadlocks."""
        rows = [[self._number[p] for p in row] for row in order.order]
        duration, waits = self._duration, self._waits
        ends: list[float | None] = [None] * len(duration)
        places, starts, free = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
        waiting: dict[int, list[int]] = {}  # by pass, the ranks whose next pass waits for it
        ready = [*range(len(rows))]
        while ready:
            rank = ready.pop()
            row, now, place = rows[rank], free[rank], places[rank]
            while place < len(row):
                number = row[place]
                start = now
                for other, ms in waits[number]:
                    end = ends[other]
                    if end is None:
                        break
                    start = max(start, end + ms)
                else:
                    if not place:
                        starts[rank] = start
                    ends[number] = now = start + duration[number]
                    ready += waiting.pop(number, ())
                    place += 1
                    continue
                waiting.setdefault(other, []).append(rank)
                break
            free[rank], places[rank] = now, place
        if any(place < len(row) for place, row in zip(places, rows, strict=True)):
            return None
        most = (highest(change for number in row for change in self._changes[number]) for row in rows)
        kept = max(peak / one * one for peak, one in zip(most, self._one, strict=True))  # rounded as ``most_kept``
        return Outcome(order, max(free) - min(starts), max(map(sub, free, starts)), kept)
