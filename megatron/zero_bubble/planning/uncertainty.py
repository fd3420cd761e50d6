"""How far a predicted gain depends on the figures that it is made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.plan.timelines import timelines_of

SHARE = 0.2
"""By how much of itself each figure is varied."""


def gains(
    before: tuple[Schedule, PassCosts], after: tuple[Schedule, PassCosts], objective: Metric
) -> tuple[float, float]:
    """Return the least and the largest gain of ``after``, as shares of the time of ``before``.

    All F, all B, all W or all transfers take ``SHARE`` more or less time; the order of the passes stays.

    Args:
        before: a schedule and its costs.
        after: another one, and its costs.
    """
    found = [
        1 - own / stock for stock, own in zip(_lengths(*before, objective), _lengths(*after, objective), strict=True)
    ]
    return min(found), max(found)


def _lengths(schedule: Schedule, costs: PassCosts, objective: Metric) -> list[float]:
    timelines = timelines_of(schedule, _varied(costs), PassMemory.uniform(schedule.placement))
    return [length_ms(timeline, objective) for timeline in timelines]


def _varied(costs: PassCosts) -> Iterator[PassCosts]:
    yield costs
    for factor in (1 - SHARE, 1 + SHARE):
        yield replace(costs, forward_ms=_scaled(costs.forward_ms, factor))
        yield replace(costs, backward_ms=_scaled(costs.backward_ms, factor))
        yield replace(costs, wgrad_ms=_scaled(costs.wgrad_ms, factor))
        links = {pair: factor * ms for pair, ms in costs.links.items()}
        yield replace(costs, comm_ms=factor * costs.comm_ms, links=links)


def _scaled(times: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(factor * ms for ms in times)
