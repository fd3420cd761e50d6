"""What schedules put in order: the passes that follow from placement, microbatches, slices and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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

    @property
    def is_whole(self) -> bool:
        """Whether sequences are whole."""
        return len(self.slices) == 1

    @property
    def crossings(self) -> int:
        """How often activations or gradients of a whole sequence go from rank to rank in an iteration."""
        return 2 * self.num_microbatches * sum(a != b for a, b in pairwise(self.placement.stage_to_rank))

    def crossing(self, widths: Sequence[float]) -> float:
        """As ``crossings``, in messages, if ``widths`` has the size of what each stage hands on."""
        hops = zip(pairwise(self.placement.stage_to_rank), widths, strict=False)
        return 2 * self.num_microbatches * sum(width for (a, b), width in hops if a != b)

    @property
    def num_messages(self) -> int:
        """Messages between ranks in an iteration."""
        return self.crossings * len(self.slices)

    @property
    def figures(self) -> dict[str, int | None]:
        """What tells it from others on its placement, by key of the tables that have it."""
        return {"num_slices": len(self.slices), "vocabulary": self.vocabulary}
