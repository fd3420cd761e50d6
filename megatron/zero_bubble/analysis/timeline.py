"""When every pass ran: the result of a simulation, or of a measured run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal, NamedTuple

from megatron.zero_bubble.ir import Op, Pass, Schedule
from megatron.zero_bubble.ir.ops import COMPUTE

Metric = Literal["makespan", "span"]


class Span(NamedTuple):
    """One pass on the clock."""

    pass_: Pass
    start_ms: float
    end_ms: float


class LaneSpan(NamedTuple):
    """One op that is not a pass, on the clock; of a trace that was read from a file, what the op printed."""

    lane: str
    op: Op | str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """``spans[rank]`` are that rank's passes in the order they ran.

    ``peak_activation[rank]`` is in units of what one microbatch keeps on that rank; it is empty where it is unknown.
    ``lanes[rank]`` are the rank's ops that are no passes and take time; it is empty where no rank has any.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    peak_activation: tuple[float, ...] = ()
    lanes: tuple[tuple[LaneSpan, ...], ...] = ()

    @cached_property
    def start_ms(self) -> float:
        """When the first pass of all started."""
        return min((row[0].start_ms for row in self.spans if row), default=0.0)

    @cached_property
    def makespan_ms(self) -> float:
        """End of everything minus start of everything: an iteration whose optimizer waits for all ranks."""
        lanes = (span.end_ms for row in self.lanes for span in row)
        return max((*(row[-1].end_ms for row in self.spans if row), *lanes), default=0.0) - self.start_ms

    @cached_property
    def span_ms(self) -> float:
        """The longest over ranks of (end of its last pass - start of its first): the papers' cost."""
        return max((row[-1].end_ms - row[0].start_ms for row in self.spans if row), default=0.0)

    @cached_property
    def work_ms(self) -> float:
        """What the busiest rank computes."""
        passes = [sum(end - start for _, start, end in row) for row in self.spans]
        more = [sum(end - start for lane, _, start, end in row if lane == COMPUTE) for row in self.lanes]
        return max((a + b for a, b in zip_longest(passes, more, fillvalue=0.0)), default=0.0)

    def bubble_rate(self, metric: Metric) -> float:
        """The part of ``metric`` in which the busiest rank has nothing to do: (cost - work) / cost."""
        cost = self.makespan_ms if metric == "makespan" else self.span_ms
        return (cost - self.work_ms) / cost if cost > 0 else 0.0
