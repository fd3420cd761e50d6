"""Where the schedules of a job come from: a name, a file, or a search during the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.zero_bubble.formats.plan import read_schedule_file
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.schedules import build, recipe

AUTO = "zb-auto"
FIRST_SCHEDULE = {"linear": "zb-h1", "vee": "zb-v"}
"""What ``zb-auto`` runs until it has planned, by its placement."""


@dataclass(frozen=True)
class ScheduleSource:
    """The schedules of a job on a pipeline of a known number of ranks, resolved: a file has been read and validated.

    Attributes:
        name: of the schedule, or its file.
        placement: where the stages are, whatever the number of microbatches.
        make: the schedule for a number of microbatches; that of a file, whatever the number; the first one under
            ``zb-auto``.
    """

    name: str
    placement: Placement
    make: Callable[[int], Schedule]

    @classmethod
    def by_name(cls, name: str, num_ranks: int, num_chunks: int | None = None) -> ScheduleSource:
        """The schedules called ``name``, with ``num_chunks`` stages per rank where the name leaves that open.

        Raises:
            UserError: an unknown name, or a number of chunks that it does not have.
        """
        known = recipe(name)
        placement = known.placement(num_ranks, known.num_chunks(num_chunks))

        def make(num_microbatches: int) -> Schedule:
            return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)

        return cls(name, placement, make)

    @classmethod
    def from_file(cls, path: str | Path) -> ScheduleSource:
        """The schedule of a file, which is read here and not again.

        Raises:
            UserError: the file cannot be read, or holds no valid schedule.
        """
        schedule = read_schedule_file(path)
        return cls(str(path), schedule.placement, lambda _: schedule)

    @classmethod
    def automatic(cls, placement: Literal["linear", "vee"], num_ranks: int) -> ScheduleSource:
        """The placement of ``zb-auto``, and the schedules that it measures under before it plans others."""
        first = cls.by_name(FIRST_SCHEDULE[placement], num_ranks)
        return cls(AUTO, first.placement, first.make)


SourceOnRanks = Callable[[int], ScheduleSource]
"""From the number of pipeline ranks to the source, where that number is not known yet."""
