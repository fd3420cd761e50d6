"""Compute the start of every pass of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.search.problem import NONE, Problem, Rows


class RowTimes(NamedTuple):
    """The times of rows.

    Attributes:
        starts: start of the pass by rank and place.
        number: microbatch of the pass by rank and place.
        places: place in its row of the n-th pass of a code, by code and n.
    """

    starts: list[list[float]]
    number: list[list[int]]
    places: list[list[int]]


def times(problem: Problem, rows: Rows, fused: Sequence[Sequence[int]] | None) -> RowTimes:
    """Run every pass as early as possible, until the end or a deadlock, in time linear in the number of passes.

    ``fused`` is what ``problem.fused`` returns; with None, all backwards are split.
    """
    marks = fused or [bytes(len(row)) for row in rows]
    tables = problem.tables
    duration, source, hop, receiver = tables.duration, tables.source, tables.hop, tables.receiver
    ends: list[list[float]] = [[] for _ in duration]
    ends.append([0.0] * problem.num_microbatches)  # code NONE: always available
    starts: list[list[float]] = [[] for _ in rows]
    number: list[list[int]] = [[] for _ in rows]
    places: list[list[int]] = [[] for _ in duration]
    free = [0.0] * len(rows)
    waits_for = [NONE] * len(rows)
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, now, own = rows[rank], free[rank], marks[rank]
        for place in range(len(starts[rank]), len(row)):
            code = row[place]
            mine, inputs = ends[code], ends[source[code]]
            n = len(mine)
            after_fused = place > 0 and own[place - 1]  # the input comes from the B before, which ends with this pass
            if not after_fused:
                if n >= len(inputs):
                    waits_for[rank] = source[code]
                    break
                now = max(now, inputs[n] + hop[code])
            starts[rank].append(now)
            number[rank].append(n)
            places[code].append(place)
            now += duration[code]
            if own[place]:
                continue
            mine.append(now)
            if after_fused:
                inputs.append(now)
                code = source[code]
            if (other := receiver[code]) != NONE and waits_for[other] == code:
                waits_for[other] = NONE
                runnable.append(other)
        free[rank] = now
    return RowTimes(starts, number, places)
