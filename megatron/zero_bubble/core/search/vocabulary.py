"""Insert the passes of vocabulary parallelism into any schedule (arXiv 2411.05288, section 5, generalized).

Between F and B of the last stage, all ranks must meet once per barrier, so the forwards of a schedule have to be ahead
of its backwards by one more microbatch per barrier. ``forwards_ahead`` moves every F to the place of the F before,
which adds forwards to the warm-up. With several stages per rank, backwards are delayed instead, by one period of the
steady state per barrier, so that they take the places of the backwards of earlier microbatches.

The passes of the vocabulary then go on every rank at the same moments of the schedule's own clock: S where the last
stage's F ends, L and T where its B starts (with algorithm 1, a period earlier), I a period before the first stage's F
(on rank 0, which reads the tokens, two periods before), and J a period after its B. Only the order of the passes is
kept; their real durations decide the times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product

from megatron.zero_bubble.core.analysis.orders import outcomes
from megatron.zero_bubble.core.analysis.score import SHORTEST, Goal
from megatron.zero_bubble.core.analysis.timeline import Span, Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.ir import Pass, Schedule
from megatron.zero_bubble.core.ir.passes import BW, B, F, I, J, L, S, T, W
from megatron.zero_bubble.core.ir.vocabulary import FLOWS, Algorithm, Vocabulary
from megatron.zero_bubble.core.search.timed import timed

_LAGS = (0.0, 0.5, 1.0)
"""How many periods after L the T of a rank may come."""
_SLACK = 1e-6
"""Times within this share of a period are equal: the passes of the vocabulary come before the passes of stages."""


def with_vocabulary(
    schedule: Schedule, clock: PassCosts, algorithm: Algorithm, lag: float = 0.0, delay: bool = False
) -> Schedule:
    """Return the passes of ``schedule`` and those of vocabulary parallelism, in the order of one clock.

    Args:
        schedule: a schedule of a chain of stages, with whole sequences.
        clock: costs that define the order; those of the vocabulary do not count.
        algorithm: 1 or 2.
        lag: how many periods after L the passes T come.
        delay: whether backwards are delayed; otherwise, forwards are moved ahead, which requires one stage per rank.

    Raises:
        UserError: for slices, or if stage r is not on rank r.
    """
    (made,) = _with_lags(schedule, clock, algorithm, delay, (lag,))
    return made


def _with_lags(
    schedule: Schedule, clock: PassCosts, algorithm: Algorithm, delay: bool, lags: Sequence[float]
) -> Iterator[Schedule]:
    """Yield what ``with_vocabulary`` returns for each lag."""
    made = replace(schedule, name=f"{schedule.name} (vocabulary {algorithm})", make_flow=FLOWS[algorithm])
    flow = made.flow
    assert isinstance(flow, Vocabulary)
    before, memory = schedule if delay else forwards_ahead(schedule, flow.barriers), PassMemory.uniform(made.placement)
    timeline = timed(before, _positive(clock), memory)
    # The time after which the steady state repeats is the work of the busiest rank per microbatch.
    period = timeline.busy_ms / schedule.num_microbatches
    for lag in lags:
        clock_ms = _Clock(timeline, period, flow, lag * period, flow.barriers * period if delay else 0.0)
        rows = tuple(tuple(p for *_, p in sorted(clock_ms.row(rank))) for rank in range(schedule.num_ranks))
        yield replace(made, order=rows)


def best_with_vocabulary(
    schedule: Schedule,
    costs: PassCosts,
    memory: PassMemory,
    algorithm: Algorithm,
    goal: Goal = SHORTEST,
) -> Schedule:
    """Return the shortest of several insertions within the memory limit, or the one with the lowest peak if none is."""
    even = PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0)
    ways = (False, True) if schedule.num_stages == schedule.num_ranks else (True,)
    made = (_with_lags(schedule, clock, algorithm, delay, _LAGS) for delay, clock in product(ways, (costs, even)))
    orders = tuple(dict.fromkeys(chain.from_iterable(made)))  # several ways may lead to one order
    return min(outcomes(orders, costs, memory), key=lambda outcome: goal.value(outcome, outcome.kept)).order


def _positive(clock: PassCosts) -> PassCosts:
    """Replace forwards that take no time, so that S, which comes at their end, comes after them."""
    least = 2 * _SLACK * max(1.0, *map(sum, zip(clock.forward_ms, clock.backward_ms, clock.wgrad_ms, strict=True)))
    return replace(clock, forward_ms=tuple(max(least, ms) for ms in clock.forward_ms))


def forwards_ahead(schedule: Schedule, count: int) -> Schedule:
    """Move every F to the place of the F of the same stage ``count`` microbatches before; the other passes stay."""
    return replace(schedule, order=tuple(_ahead(row, count) for row in schedule.order))


def _ahead(row: tuple[Pass, ...], count: int) -> tuple[Pass, ...]:
    place = {p: at for at, p in enumerate(row)}
    forwards = [p for p in row if p.kind is F]
    wanted = (
        place[p._replace(microbatch=p.microbatch - count)] if p.microbatch >= count else len(row)
        for p in reversed(forwards)
    )
    # An F is at the latest where the next one is, so that forwards keep their order.
    at = reversed(list(accumulate(wanted, min)))
    moved = [
        (0 if where == len(row) else where, 0, n, p) for n, (where, p) in enumerate(zip(at, forwards, strict=True))
    ]
    others = [(where, 1, 0, p) for p, where in place.items() if p.kind is not F]
    return tuple(p for *_, p in sorted(moved + others))


# Of passes with equal times, those that other ranks wait for come first, and each after those that it depends on.
_ORDER = {I: (0, 0), S: (0, 1), L: (0, 2), T: (1, 0), F: (2, 0), B: (2, 1), BW: (2, 1), W: (2, 2), J: (2, 3)}
_Entry = tuple[float, int, int, int, Pass]


@dataclass(frozen=True)
class _Clock:
    """The times in ms of all passes, on the clock of a schedule without vocabulary passes.

    Attributes:
        lag: the time from L to T.
        later: the time by which backwards are delayed.
    """

    timeline: Timeline
    period: float
    flow: Vocabulary
    lag: float
    later: float

    def row(self, rank: int) -> Iterator[_Entry]:
        """Yield the passes of a rank with their times, and what decides between equal times."""
        for p, start_ms, _ in self.timeline.spans[rank]:
            yield self._entry(p, start_ms + (0.0 if p.kind is F else self.later))
        last, on = self.flow.last, self.timeline.schedule.placement
        ends, turns = self._of(last)
        starts, returns = self._of(0)
        slack = _SLACK * self.period
        first_barrier = self.period if self.flow.algorithm == 1 else math.inf
        for m in range(self.timeline.schedule.num_microbatches):
            end, turn = ends[m].end_ms - slack, turns[m].start_ms + self.later - slack
            factors = min(turn, end + first_barrier)
            # With algorithm 1, the B of the last stage takes the sum of all T.
            weights = factors + self.lag if self.flow.algorithm == 2 else min(turn, factors + self.lag)
            # The other ranks look up tokens that rank 0 reads.
            yield self._entry(Pass(rank, I, m), starts[m].start_ms - self.period * (1 if rank else 2))
            yield self._entry(Pass(rank, S, m), end)
            yield self._entry(Pass(rank, T, m), weights)
            yield self._entry(Pass(rank, J, m), returns[m].end_ms + self.later + self.period)
            if rank == on.stage_to_rank[last]:
                yield self._entry(Pass(last, L, m), factors)

    def _of(self, stage: int) -> tuple[list[Span], list[Span]]:
        """The forwards and the backwards of a stage, by microbatch."""
        spans = self.timeline.spans[self.timeline.schedule.placement.stage_to_rank[stage]]
        own = sorted((span for span in spans if span.pass_.stage == stage), key=lambda span: span.pass_.microbatch)
        return [span for span in own if span.pass_.kind is F], [span for span in own if span.pass_.kind in (B, BW)]

    def _entry(self, p: Pass, ms: float) -> _Entry:
        group, order = _ORDER[p.kind]
        return (
            (ms, group, p.microbatch, order, p)
            if group < 2
            else (ms, group, order, p.stage if p.kind is F else -p.stage, p)
        )
