"""Search for a schedule that is within a memory limit after offloading.

A schedule above the limit may be within it once activations move to host memory, and is often shorter than one that
needs no offloading. So schedules are made for the limit and for more memory, all are offloaded, and the shortest that
is then within the limit is taken (arXiv 2503.01328, section 4, plans in the same two steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.offload import Offloaded
from megatron.zero_bubble.planning.vocabulary import Planned

_MORE_MEMORY = (1.5, 2.0)
"""Limits of searches whose schedules are then offloaded, as multiples of the given one."""
_PEAKS = (1.0, 2.0)
"""The same, as multiples of the peak of 1F1B: twice as much is enough for every schedule without idle time."""
_ROUNDING = 1e-9
S = TypeVar("S")


class Found(NamedTuple):
    """A schedule before and after offloading."""

    planned: Planned
    offloaded: Offloaded


def search_limits(costs: Figures, limit: float, vocabulary: bool = False) -> tuple[float, ...]:
    """Return the memory limits to search with for schedules that ``limit`` bounds after offloading; itself first.

    Args:
        vocabulary: return every second one, because each search also inserts the passes of the vocabulary.
    """
    of_1f1b = costs.num_ranks * costs.microbatch
    larger = {*(factor * limit for factor in _MORE_MEMORY), *(factor * of_1f1b for factor in _PEAKS)}
    found = limit, *sorted(each for each in larger if each > limit * (1 + _ROUNDING))
    return found[::2] if vocabulary else found


def best_offloaded(
    make: Callable[[S], Iterable[Planned]],
    move: Callable[[Timeline, Figures], Offloaded],
    searches: Sequence[S],
    limit: float | None,
    objective: Metric,
) -> Found:
    """Return the best plan: the shortest within the limit after offloading; if none is, that with the smallest peak.

    Args:
        make: makes schedules, for one of ``searches``.
        move: offloads a schedule with its own costs.
        searches: what to make schedules for, mostly memory limits.
        limit: memory limit per rank on the device, in the unit of the costs; None for no limit.

    Raises:
        UserError: when none of ``searches`` has a schedule; the reason is that of the first one.
    """
    best: Found | None = None
    missing: list[UserError] = []
    seen: set[Timeline] = set()
    for most in searches:
        for planned in _suppressed(make(most), missing):
            # Copies only delay, so what is longer already cannot become the best.
            if planned.timeline in seen or not _may_beat(planned, best, limit, objective):
                continue
            seen.add(planned.timeline)
            found = Found(planned, move(planned.timeline, planned.costs))
            if best is None or value(found.offloaded, limit, objective) < value(best.offloaded, limit, objective):
                best = found
    if best is None:
        raise missing[0]
    return best


def value(plan: Offloaded, limit: float | None, objective: Metric) -> tuple[float, float, float]:
    """The order of plans, best first: the peak if it is above the limit (else 0), the objective in ms, the peak."""
    peak = max(plan.device_peak)
    excess = 0.0 if limit is None or peak <= limit * (1 + _ROUNDING) else peak
    return excess, _ms(plan.timeline, objective), peak


def _may_beat(planned: Planned, best: Found | None, limit: float | None, objective: Metric) -> bool:
    if best is None or value(best.offloaded, limit, objective)[0] > 0:
        return True
    return _ms(planned.timeline, objective) <= _ms(best.offloaded.timeline, objective)


def _ms(timeline: Timeline, objective: Metric) -> float:
    return timeline.makespan_ms if objective == "makespan" else timeline.span_ms


def _suppressed(found: Iterable[Planned], missing: list[UserError]) -> Iterator[Planned]:
    """Yield what is found until an error, which is added to ``missing``: other limits may admit schedules."""
    try:
        yield from found
    except UserError as error:
        missing.append(error)
