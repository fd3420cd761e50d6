"""Lower bounds for schedules of sequence slices, for any cuts, placement and order that the slices' flow allows.

The first backward of a rank needs all forwards of one microbatch: its first slice travels from the rank's first stage
to the end of the model with all others behind it, and the last slice travels back to the rank's last stage. Until then,
a rank can run only forwards, as many as there are and as memory allows; the rest of that time it is idle. At the end,
the gradient of a first slice travels from the rank to the first stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.messages import occupied
from megatron.zero_bubble.core.ir import Pass, Placement, Slices
from megatron.zero_bubble.core.ir.passes import BW, B, F, Kind, W
from megatron.zero_bubble.core.ir.workload import Workload


class SlicedBound(NamedTuple):
    """A bound in ms, its reason, and its rank."""

    value_ms: float
    reason: str
    rank: int


def by_slices(
    costs: PassCosts,
    memory: PassMemory,
    work: Workload,
    limits: Sequence[float],
    objective: Metric,
    fused: bool,
) -> SlicedBound:
    """The best of the bounds of all ranks; ``limits`` has the memory limit of each."""
    placement = work.placement
    setting = _Setting(occupied(costs, placement), memory, placement, work.num_microbatches, work.slices, fused)
    bounds = (bound for rank in range(placement.num_ranks) for bound in setting.bounds(rank, limits[rank], objective))
    return max(bounds, key=lambda bound: bound.value_ms)


class _Setting(NamedTuple):
    costs: PassCosts
    memory: PassMemory
    placement: Placement
    num_microbatches: int
    slices: Slices
    fused: bool

    def ms(self, stage: int, kind: Kind, slice_: int) -> float:
        return self.costs.duration(Pass(stage, kind, 0, slice_), self.slices)

    def whole(self, stage: int, kind: Kind) -> float:
        """The time of all slices of a microbatch."""
        return sum(self.ms(stage, kind, slice_) for slice_ in range(len(self.slices)))

    def bounds(self, rank: int, limit: float, objective: Metric) -> Iterator[SlicedBound]:
        stages = self.placement.stages_of(rank)
        first, last, m = min(stages), max(stages), self.num_microbatches
        forward = m * sum(self.whole(stage, F) for stage in stages)
        backward = m * sum(self.whole(stage, BW if self.fused else B) for stage in stages)
        wgrad = 0.0 if self.fused else m * sum(self.whole(stage, W) for stage in stages)
        idle = max(0.0, self._until_backward(first, last) - min(forward, self._fitting(stages, limit)))
        busy = forward + backward + idle
        if objective == "span":
            yield SlicedBound(busy + wgrad, "way of all slices of a microbatch to the end and back", rank)
            return
        late = self._down(first, 0)
        yield SlicedBound(late + busy + wgrad, "way of the first slice to a rank, and its work", rank)
        up = self._up(first) + (0.0 if self.fused else self.ms(0, W, 0))
        yield SlicedBound(late + busy + up, "way of the first slice to a rank, its work, and back", rank)

    def _until_backward(self, first: int, last: int) -> float:
        """From the first forward on stage ``first`` to the first backward on stage ``last`` of the same rank."""
        end, final = len(self.slices) - 1, self.placement.num_stages - 1
        # All slices run on some stage one after the other; before it only the first must pass, after it only the last.
        down = max(
            sum(self.ms(stage, F, 0) for stage in range(first, slow))
            + self.whole(slow, F)
            + sum(self.ms(stage, F, end) for stage in range(slow + 1, final + 1))
            for slow in range(first, final + 1)
        )
        kind = BW if self.fused else B
        back = sum(self.ms(stage, kind, end) for stage in range(last + 1, final + 1))
        hops = sum(self._hop(stage, stage + 1) for stage in range(first, final))
        return down + back + hops + sum(self._hop(stage + 1, stage) for stage in range(last, final))

    def _fitting(self, stages: Sequence[int], limit: float) -> float:
        """The longest time of forwards whose activations fit into the limit."""
        densest = max(
            self.ms(stage, F, slice_) / (self.memory.activation[stage] * share)
            for stage in stages
            for slice_, share in enumerate(self.slices.shares)
        )
        return limit * densest if math.isfinite(limit) else math.inf

    def _down(self, stage: int, slice_: int) -> float:
        return sum(self.ms(s, F, slice_) + self._hop(s, s + 1) for s in range(stage))

    def _up(self, stage: int) -> float:
        kind = BW if self.fused else B
        return sum(self.ms(s, kind, 0) + self._hop(s + 1, s) for s in range(stage))

    def _hop(self, source: int, target: int) -> float:
        ranks = self.placement.stage_to_rank
        return self.costs.comm(ranks[source], ranks[target])
