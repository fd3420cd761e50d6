"""What schedules put in order: the passes that follow from placement, microbatches, slices and vocabulary."""

from __future__ import annotations

from typing import NamedTuple

from megatron.zero_bubble.core.ir.placement import Placement
from megatron.zero_bubble.core.ir.schedule import Schedule
from megatron.zero_bubble.core.ir.slices import WHOLE, Slices
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of


class Workload(NamedTuple):
    """What schedules of the same passes have in common.

    Attributes:
        slices: how every sequence is cut.
        vocabulary: the algorithm of vocabulary parallelism whose passes they have; None without it.
    """

    placement: Placement
    num_microbatches: int
    slices: Slices = WHOLE
    vocabulary: Algorithm | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Workload:
        """That of a schedule."""
        return cls(schedule.placement, schedule.num_microbatches, schedule.slices, algorithm_of(schedule))
