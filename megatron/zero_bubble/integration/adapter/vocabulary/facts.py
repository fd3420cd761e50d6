"""What a rank must know about the passes of the vocabulary in a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.core.ir import Kind, Pass, Schedule
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of


@dataclass(frozen=True)
class VocabularyFacts:
    """Properties of the passes of the vocabulary on one rank that follow from the schedule.

    Attributes:
        algorithm: 1 or 2.
        last_of_kind: the last T and the last J of the rank, in the order in which they run; empty in an evaluation.
    """

    algorithm: Algorithm
    last_of_kind: tuple[Pass, ...]

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> VocabularyFacts | None:
        """The facts about ``rank``; None if the schedule is without vocabulary parallelism."""
        algorithm = algorithm_of(schedule)
        if algorithm is None:
            return None
        last = {p.kind: p for p in schedule.order[rank] if p.kind in (Kind.T, Kind.J)}
        row = schedule.order[rank]
        return cls(algorithm, tuple(sorted(last.values(), key=row.index)))

    def completes(self, work: Pass, tied: bool) -> bool:
        """Whether the weight to which ``work`` (T or J) adds has its whole gradient afterwards.

        Args:
            tied: whether T and J add to the same weight.
        """
        return work == self.last_of_kind[-1] if tied else work in self.last_of_kind
