"""The advice that a job gets: the best changes, and which of them is worth making."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.planning.change import AdviceRow, Today
from megatron.zero_bubble.planning.score import DroppedVariant
from megatron.zero_bubble.planning.uncertainty import gains

WORTH = 0.01
"""The least gain, as a share of the time, that is worth a change by measured costs."""
WORTH_ESTIMATED = 0.02
"""The same by estimated costs."""
_NEARLY = 0.01
"""The share of the time that a simpler change may lose against the fastest."""


class Barred(NamedTuple):
    """A plan that the job cannot run: its length in ms, and what stands in the way, as a sentence."""

    name: str
    ms: float
    why: str


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        rows: the best changes, the fastest first; empty if nothing can be gained.
        dropped: changes that are refused or have no plan, with the reason.
        barred: shorter plans that the job cannot run, by what stands in the way.
        left_out: the changes that were not planned, because enough had been searched for.
        num_planned: the changes that have a plan.
        worth: the least gain that is worth a change, as a share of the time of the job as it is.
    """

    today: Today
    rows: tuple[AdviceRow, ...]
    objective: Metric
    worth: float
    dropped: tuple[DroppedVariant, ...] = ()
    left_out: tuple[str, ...] = ()
    num_planned: int = 0
    barred: tuple[Barred, ...] = ()

    @property
    def is_estimated(self) -> bool:
        """Whether the costs are estimates."""
        return self.worth == WORTH_ESTIMATED

    @property
    def best(self) -> AdviceRow | None:
        """The change to make: the simplest that is nearly as fast as the fastest; None if none is worth it."""
        fits = [row for row in self.rows if row.fits and row.gain >= self.worth]
        fastest = max((row.gain for row in fits), default=0.0)
        near = (row for row in fits if row.gain > fastest - _NEARLY)
        return min(near, key=lambda row: (row.change.effort, row.ms), default=None)

    @cached_property
    def gain_range(self) -> tuple[float, float] | None:
        """The least and the largest gain of ``best`` if passes or transfers take another time (``uncertainty``); None
        if there is none, or where all-to-alls, copies or collectives take part.
        """
        best, (timeline, costs, _) = self.best, self.today
        if best is None or not best.plan.is_plain:
            return None
        schedules = (timeline.schedule, costs), (best.plan.schedule, best.plan.costs)
        before, after = ((schedule, of.on(schedule.placement)[0]) for schedule, of in schedules)
        return None if before[1].has_all_to_alls or after[1].has_all_to_alls else gains(before, after, self.objective)
