"""What is chosen together with a schedule, besides its order: layers per stage, moves to host memory, sharded units."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.ir import Plan
from megatron.zero_bubble.core.plan import Additions
from megatron.zero_bubble.planning.figures import Figures


class Part:
    """One choice, and its figures; by default, one that adds nothing to the plan.

    Attributes:
        adds_ops: whether its plan is more than the passes of the schedule.
        suits_any_costs: whether it stays what it is with other costs.
    """

    adds_ops: ClassVar[bool] = False
    suits_any_costs: ClassVar[bool] = False

    @property
    def held(self) -> tuple[float, ...] | None:
        """Bytes per rank that it takes besides activations; None if there are none, or they are unknown."""
        return None

    def adding(self, added: Additions) -> Additions:
        """What the plan has with it, in addition to what it has without."""
        return added

    def on(self, timeline: Timeline, memory: PassMemory) -> Self:
        """The same choice in a plan with more ops, which has another timeline."""
        return self

    def recosted(self, costs: Figures, plan: Plan, timeline: Timeline) -> Self:
        """The same choice with other costs, by which its plan takes another time; for those that suit any costs."""
        return self

    def content(self, costs: Figures) -> dict[str, Any]:
        """The keys of the plan's JSON."""
        return {}
