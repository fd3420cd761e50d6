"""Where the time of all ranks goes that is not work: transfers, warm-up and cool-down, and imbalance.

The bubble is idle time of the busiest rank. It hides what the other ranks lose to imbalance: with one rank that never
waits, the bubble is 0, however little the others have to do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.search.timed import timed


class Idle(NamedTuple):
    """Mean idle time of all ranks in ms, by cause. With the mean work of the ranks, it adds up to the makespan.

    Attributes:
        transfers: how much longer the iteration is than the same order in which nothing but passes takes time: no
            messages between ranks, no collectives, no copies to host memory.
        warm_up: in that order, the idle time of the busiest rank: while the pipeline fills and drains, or where a pass
            has to wait for another one.
        imbalance: the work of the busiest rank minus the mean of all ranks.
    """

    transfers: float
    warm_up: float
    imbalance: float

    @property
    def total(self) -> float:
        """The mean over ranks of the makespan minus the rank's work."""
        return sum(self)


def idle_of(timeline: Timeline, costs: PassCosts) -> Idle:
    """Divide the idle time of a simulated timeline by cause.

    Args:
        costs: those that it was simulated with.
    """
    schedule = timeline.schedule
    free = timed(schedule, costs.without_transfers, PassMemory.uniform(schedule.placement))
    transfers, warm_up = timeline.makespan_ms - free.makespan_ms, free.makespan_ms - free.work_ms
    return Idle(max(0.0, transfers), max(0.0, warm_up), max(0.0, free.work_ms - free.mean_work_ms))


def exposed_ms(timeline: Timeline, costs: PassCosts) -> float:
    """What the all-to-alls of experts add to the mean work of a rank: those that nothing hides, and by how much longer
    computation takes next to those that are hidden; 0 if they are unknown.

    Args:
        costs: those of the same layers, in any division among stages.
    """
    schedule = timeline.schedule
    per_rank = schedule.num_microbatches / schedule.num_ranks
    sent = per_rank * math.fsum(parts.all_to_all for parts in costs.experts)
    if not schedule.overlaps:
        return sent
    work = per_rank * math.fsum((*costs.forward_ms, *costs.backward_ms, *costs.wgrad_ms))
    return max(0.0, timeline.mean_work_ms - (work - sent))
