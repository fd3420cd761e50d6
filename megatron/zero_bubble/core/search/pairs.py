"""Search for schedules with pairs: a forward and the backward of another microbatch that a rank runs together.

1. List: make orders by several habits (``pair_lists``).
2. Screen: improve the best of them, and the known orders, a little.
3. Improve the best by single moves (``pair_moves``).

The budget is counted in placed passes, so that the result does not depend on the speed of the machine. There is no
lower bound on such schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from operator import itemgetter

from megatron.zero_bubble.core.analysis.memory import peaks_in_order
from megatron.zero_bubble.core.analysis.score import ROUNDING, Goal, length_ms, within
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Placement, Schedule
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.search.loops import compiled_module
from megatron.zero_bubble.core.search.pair_lists import Habit, listed
from megatron.zero_bubble.core.search.pair_loops import improver
from megatron.zero_bubble.core.search.pair_moves import in_order
from megatron.zero_bubble.core.search.pair_tables import PairTables, Row, length_of, peak

_BUDGET = (1_500_000, 200_000_000)
"""Passes to place at an effort of 1, without and with the compiled moves."""
_MOST_TRIES = 200_000
"""The most orders to time at an effort of 1."""
_LISTING = 50_000
"""The most passes to place in lists."""
_SCREENED = 0.2
"""The share of the budget after which the screening stops."""
_MOST_SCREENED = 4
_LEAST_TRIES = 20
_AHEAD = 2
"""By how many times the number of ranks the forwards in flight on the first rank exceed one per stage."""
_PATIENCE = ((0.3, 0.3), (1.0, 0.3), (0.6, 1.0))


@without_gc()
def pairs_auto(
    figures: Callable[[Placement], tuple[PassCosts, PassMemory]],
    placements: Sequence[Placement],
    num_microbatches: int,
    goal: Goal,
    known: Sequence[Schedule] = (),
    effort: float = 1.0,
) -> Schedule:
    """Search for the shortest schedule with pairs within a memory limit; equal on every machine.

    Args:
        figures: the costs, with the parts of experts, and the memory of a microbatch on each placement.
        placements: those to try.
        known: schedules of such costs; the result is not longer than one of them that is within the limit.
        effort: the budget of the search, relative to the default.

    Raises:
        UserError: when no order is found within the limit.
    """
    best: tuple[float, Schedule] | None = None
    for on in placements:
        tables = PairTables.of(*figures(on), on, num_microbatches)
        own = [schedule for schedule in known if schedule.placement == on and _fits(schedule, tables, goal)]
        for schedule in (*own, *_searched(tables, own, goal, effort / len(placements))):
            ms = length_ms(simulate(schedule, figures(on)[0]), goal.objective)
            if best is None or ms < best[0] * (1 - ROUNDING):
                best = ms, schedule
    if best is None:
        raise UserError(
            f"no schedule with pairs was found within the memory limit of {goal.most:g} per rank; got "
            f"{num_microbatches} microbatches; raise the limit, or leave pairs out"
        )
    return replace(best[1], name="zb-auto")


def _fits(schedule: Schedule, tables: PairTables, goal: Goal) -> bool:
    return within(max(peaks_in_order(schedule, tables.memory)), goal.limit)


def _searched(tables: PairTables, known: Sequence[Schedule], goal: Goal, effort: float) -> Iterator[Schedule]:
    """Yield the best rows that are found, if there are any within the limit."""
    passes = 2 * tables.placement.num_stages * tables.num_microbatches
    budget = effort * min(_BUDGET[compiled_module() is not None] / passes, _MOST_TRIES)
    limit, improve = goal.most * (1 + ROUNDING), improver(tables)
    starts = [tables.rows(schedule) for schedule in known]
    for habit in islice(_habits(tables.placement), _LISTING // passes):
        rows = listed(tables, habit, limit)
        if rows is not None and max(map(peak, rows)) <= limit and all(in_order(tables, row) for row in rows):
            starts.append(rows)
    timed = {_key(rows): (length_of(tables, rows, goal.objective), rows) for rows in starts}
    best = sorted(timed.values(), key=itemgetter(0))[:_MOST_SCREENED]
    tries = max(_LEAST_TRIES, int(_SCREENED * budget / _MOST_SCREENED))
    screened = [improve(rows, limit, goal.objective, tries, 1) for _, rows in best]
    if screened:
        tries = max(_LEAST_TRIES, int((1 - _SCREENED) * budget))
        _, rows = improve(min(screened, key=itemgetter(0))[1], limit, goal.objective, tries, 2)
        yield tables.schedule("zb-auto", rows)


def _key(rows: Sequence[Row]) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(step.works for step in row) for row in rows)


def _habits(on: Placement) -> Iterator[Habit]:
    """Yield habits, the most promising first."""
    ranks = on.num_ranks
    for patience, unit, fused in product(_PATIENCE, (ranks, None), (False, True)):
        yield Habit(on.num_stages + _AHEAD * ranks, 2, unit, True, patience, 0.5, fused, True)
