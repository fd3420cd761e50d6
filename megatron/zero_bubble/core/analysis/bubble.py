"""The measured bubble of a run, and the bubble of its schedule at the same pass times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import WHOLE, Flow, Kind, Pass, Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.schedule import chain_of


class RankIteration(NamedTuple):
    """An iteration on one rank, measured by the rank's clock.

    Attributes:
        span_ms: time from the start of its first pass to the end of its last one.
        work_ms: total time of its passes, each counted once; the discarded run of a repeated pass is not counted.
    """

    span_ms: float
    work_ms: float


class RankIterations(NamedTuple):
    """Several iterations of one rank; every rank has the same iterations.

    Attributes:
        order: the passes of the last iteration.
        pass_ms: mean time of a pass by stage, kind and slice.
        make_flow: makes the flow of the last iteration's schedule.
        last_ms: time of each pass of the last iteration, if its microbatches may have different lengths.
        pairs: its forwards that run together with the next pass.
    """

    iterations: tuple[RankIteration, ...]
    order: tuple[Pass, ...]
    pass_ms: Mapping[tuple[int, Kind, int], float]
    make_flow: Callable[[Schedule], Flow] = chain_of
    last_ms: Mapping[Pass, float] | None = None
    pairs: frozenset[Pass] = frozenset()


@dataclass(frozen=True)
class Bubble:
    """Bubble rates of the span (the papers' figure), over several iterations.

    Attributes:
        measured: the share of the longest rank's time in which the busiest rank computed nothing.
        planned: the bubble rate of the last iteration's schedule, simulated with the mean pass times and without
            transfer times. ``measured`` exceeds it because of late messages, host gaps and passes of unequal length.
            If the microbatches may have different lengths, the times are those of the last iteration's own passes.
        idle, planned_idle: the same with the mean work of the ranks in place of that of the busiest one.
    """

    num_iterations: int
    measured: float
    planned: float
    idle: float
    planned_idle: float

    def __str__(self) -> str:
        return (
            f"bubble {self.measured:.1%} (planned {self.planned:.1%}), "
            f"mean idle {self.idle:.1%} (planned {self.planned_idle:.1%})"
        )


def bubble_of(ranks: Sequence[RankIterations]) -> Bubble:
    """Compute the bubble from the measurements of all ranks of a pipeline, in order of rank."""
    together = list(zip(*(rank.iterations for rank in ranks), strict=True))
    span_ms = sum(max(row.span_ms for row in iteration) for iteration in together)
    work_ms = sum(max(row.work_ms for row in iteration) for iteration in together)
    mean_ms = sum(sum(row.work_ms for row in iteration) / len(iteration) for iteration in together)
    schedule = _schedule(ranks)
    none = (0.0,) * schedule.num_stages
    means = {key: ms for rank in ranks for key, ms in rank.pass_ms.items()}
    last = {work: ms for rank in ranks for work, ms in (rank.last_ms or {}).items()}
    times = _MeasuredTimes(none, none, none, pass_ms=means, own_ms=last)
    planned = simulate(schedule, times)
    measured, idle = ((span_ms - ms) / span_ms if span_ms else 0.0 for ms in (work_ms, mean_ms))
    return Bubble(len(together), measured, planned.bubble_rate("span"), idle, planned.idle_rate("span"))


def _schedule(ranks: Sequence[RankIterations]) -> Schedule:
    stage_to_rank = {work.stage: rank for rank, row in enumerate(ranks) for work in row.order}
    passes = list(chain.from_iterable(row.order for row in ranks))
    return Schedule(
        "measured",
        Placement(tuple(stage_to_rank[stage] for stage in sorted(stage_to_rank))),
        1 + max(work.microbatch for work in passes),
        tuple(row.order for row in ranks),
        Slices.even(1 + max(work.slice for work in passes)),
        ranks[0].make_flow,
        pairs=frozenset().union(*(rank.pairs for rank in ranks)),
    )


@dataclass(frozen=True)
class _MeasuredTimes(PassCosts):
    """Measured times instead of figures per stage: slices of a sequence need not take equal times, nor microbatches.

    Attributes:
        pass_ms: mean times by stage, kind and slice.
        own_ms: times of single passes, which come first.
    """

    pass_ms: Mapping[tuple[int, Kind, int], float] = field(default_factory=dict, hash=False)
    own_ms: Mapping[Pass, float] = field(default_factory=dict, hash=False)

    def duration(self, p: Pass, slices: Slices = WHOLE) -> float:
        own = self.own_ms.get(p)
        return self.pass_ms.get((p.stage, p.kind, p.slice), 0.0) if own is None else own
