"""Lower bounds for schedules that move activations to host memory and back.

Memory no longer limits how many microbatches are in the pipeline, so the bounds without a limit hold, and this one in
addition: memory times time, as in ``windows``, where a microbatch that moves is on the device only around its F and its
B, for the passes and the copies; but all copies of a rank in one direction have to fit on their lane, one after the
other. The best share of the microbatches that move balances the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.bounds.setting import Setting


class _Stage(NamedTuple):
    """What moving all microbatches of a stage saves of memory times time, and their time on either lane."""

    saved: float
    lane_ms: float

    @property
    def density(self) -> float:
        return self.saved / self.lane_ms if self.lane_ms else math.inf


def by_offload(s: Setting, host_ms: Sequence[float]) -> tuple[float, ...]:
    """Return the bound of every rank in ms, relative to its first F; 0 for ranks without a limit.

    Args:
        host_ms: time of a copy of every stage in one direction.
    """
    return tuple(_of_rank(s, rank, host_ms) if math.isfinite(s.limit[rank]) else 0.0 for rank in range(s.num_ranks))


def _of_rank(s: Setting, rank: int, host_ms: Sequence[float]) -> float:
    stages, limit = s.stages(rank), s.limit[rank]
    area = s.m * sum(s.a[k] * (s.round_trip(k, k) + s.b[k]) + s.g[k] * s.w[k] for k in stages)
    lane = 0.0
    gains = [stage for stage in (_stage(s, k, host_ms[k]) for k in stages) if stage.saved > 0]
    for stage in sorted(gains, key=lambda each: each.density, reverse=True):
        after, less = lane + stage.lane_ms, area - stage.saved
        if after * limit >= less:  # moving a part is best
            part = max(0.0, (area - lane * limit) / (stage.lane_ms * limit + stage.saved))
            return max(lane + part * stage.lane_ms, (area - part * stage.saved) / limit)
        lane, area = after, less
    return area / limit


def _stage(s: Setting, k: int, host_ms: float) -> _Stage:
    away_ms = s.round_trip(k, k) - s.f[k] - 2 * host_ms
    return _Stage(s.m * s.a[k] * away_ms, s.m * host_ms)
