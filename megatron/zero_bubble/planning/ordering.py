"""The order of a replica's microbatches: the best of a few, by simulating the job's schedule.

Neighbours of like length leave small bubbles. Besides the given order, there are two of this kind: ascending, and a
mountain, which has the longest microbatches in the middle, so that short ones fill and drain the pipeline. None of them
is always the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.zero_bubble.core.analysis.varying import Varying
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load, PackedCosts
from megatron.zero_bubble.core.ir import Schedule


@dataclass(frozen=True)
class Simulator:
    """Finds how long a replica takes for its microbatches.

    Attributes:
        make: the schedule for a number of microbatches.
        cost: that of a microbatch.
        most_kept: schedules kept in the form that is simulated, the last used ones.
    """

    make: Callable[[int], Schedule]
    cost: LengthCost
    most_kept: int = 64
    _prepared: dict[int, tuple[Varying, PackedCosts]] = field(default_factory=dict, repr=False, compare=False)

    def makespan(self, loads: Sequence[Load]) -> float:
        """The time of microbatches in the given order, in the unit of the cost.

        Raises:
            UserError: the schedule supports only microbatches of equal length, or another number of them.
        """
        found = self._prepared.pop(len(loads), None)
        if found is None:
            schedule = self.make(len(loads))
            found = Varying.of(schedule), self.cost.passes(schedule.placement)
        self._prepared[len(loads)] = found
        if len(self._prepared) > self.most_kept:
            del self._prepared[next(iter(self._prepared))]
        varying, costs = found
        return varying.makespan(costs, loads)

    def best(self, loads: Sequence[Load]) -> tuple[float, list[int]]:
        """The least time of the orders, and the positions in ``loads`` in the best of them."""
        times = ((self.makespan([loads[at] for at in order]), order) for order in orders(loads, self.cost))
        return min(times, key=lambda found: found[0])


def orders(loads: Sequence[Load], cost: LengthCost) -> list[list[int]]:
    """The orders that are simulated, as positions in ``loads``, without repetitions; the given one is the first."""
    times = list(map(cost.microbatch, loads))
    ascending = sorted(range(len(loads)), key=lambda at: times[at])
    mountain = ascending[::2] + ascending[1::2][::-1]
    found = [list(range(len(loads)))]
    return found + [order for order in (ascending, mountain) if order not in found]
