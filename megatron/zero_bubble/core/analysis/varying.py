"""The makespan of a schedule whose microbatches take different times, for many candidates of their durations.

``simulate`` computes whole timelines. Here, what does not depend on durations is found once per schedule: an order in
which every pass follows the passes that it waits for. Transfers take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zero_bubble.core.costs.lengths import Load, PackedCosts
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Chain, Kind, Schedule
from megatron.zero_bubble.core.ir.passes import W

_NONE = -1


@dataclass(frozen=True)
class Varying:
    """A schedule in the form that ``makespan`` runs.

    Attributes:
        codes: the stage and kind of each code; pass number ``code * num_microbatches + microbatch`` has that code.
        steps: rank, number, and the number of the pass of another rank that must end before, or -1; in an order in
            which every pass follows those that it waits for.
    """

    schedule: Schedule
    codes: tuple[tuple[int, Kind], ...]
    steps: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Varying:
        """Prepare ``schedule``.

        Raises:
            UserError: sequences are sliced, or the vocabulary is divided.
        """
        flow, count, rank_of = schedule.flow, schedule.num_microbatches, schedule.placement.stage_to_rank
        if not isinstance(flow, Chain) or flow.num_slices > 1:
            raise UserError(
                "microbatches of different lengths need a schedule of whole sequences without vocabulary parallelism; "
                f"got {schedule.name!r}; give another, such as zb-h1"
            )
        code_of = {code: number for number, code in enumerate(dict.fromkeys(p[:2] for p in schedule.passes()))}
        rows: list[list[tuple[int, int]]] = []
        for row in schedule.order:
            steps = []
            for p in row:
                source = _NONE
                if p.kind is not W:  # else its B is on the same rank
                    feeder = flow.source(p)
                    if feeder is not None and rank_of[feeder.stage] != rank_of[p.stage]:
                        source = code_of[feeder.stage, feeder.kind] * count + p.microbatch
                steps.append((code_of[p.stage, p.kind] * count + p.microbatch, source))
            rows.append(steps)
        return cls(schedule, tuple(code_of), tuple(_in_time(rows, len(code_of) * count)))

    def makespan(self, costs: PackedCosts, loads: Sequence[Load]) -> float:
        """The time from the start of the first pass to the end of the last one, in the unit of ``costs``.

        Args:
            loads: that of every microbatch, instead of those of ``costs``.
        """
        known: dict[tuple[float, float], list[float]] = {}  # stages are often alike
        of_pass: list[float] = []
        for stage, kind in self.codes:
            rates = costs.rates(stage, kind)
            if rates not in known:
                known[rates] = costs.durations(stage, kind, loads)
            of_pass += known[rates]
        return self._run(of_pass)

    def _run(self, of_pass: Sequence[float]) -> float:
        free, ends = [0.0] * self.schedule.num_ranks, [0.0] * len(of_pass)
        for rank, number, source in self.steps:
            start = free[rank]
            if source >= 0 and ends[source] > start:
                start = ends[source]
            free[rank] = ends[number] = start + of_pass[number]
        return max(free)


def _in_time(rows: Sequence[Sequence[tuple[int, int]]], num_passes: int) -> list[tuple[int, int, int]]:
    """All passes, such that each follows those that it waits for; each rank runs as far as possible at a time."""
    found: list[tuple[int, int, int]] = []
    waiting: dict[int, int] = {}
    ended, lefts, ready = [False] * num_passes, [iter(row) for row in rows], list(range(len(rows)))
    nexts = [next(left, None) for left in lefts]
    while ready:
        rank = ready.pop()
        left, step = lefts[rank], nexts[rank]
        while step is not None:
            number, source = step
            if source >= 0 and not ended[source]:
                waiting[source] = rank
                break
            found.append((rank, number, source))
            ended[number] = True
            if number in waiting:
                ready.append(waiting.pop(number))
            step = next(left, None)
        nexts[rank] = step
    return found
