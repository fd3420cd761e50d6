"""The layout of a plan, and the layouts that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.zero_bubble.core.formats.layout import layout_text, without_predictions
from megatron.zero_bubble.core.search.layout import Layout
from megatron.zero_bubble.planning.part import Part
from megatron.zero_bubble.planning.score import DroppedVariant, Score

EVEN, MOVED = "even split", "even split with layers moved from the last stage"
"""Names of the layouts that a plan is compared with."""


@dataclass(frozen=True)
class RatedLayout:
    """A layout and how good it is.

    Attributes:
        value: the peak memory if it is above the limit (else 0), in the unit of the costs, and the objective in ms; the
            smallest is the best.
        predictions: as in ``LayerCosts``.
    """

    layout: Layout
    value: Score
    predictions: int

    @property
    def excess(self) -> float:
        """The peak memory if it is above the limit, else 0; in the unit of the costs."""
        return self.value[0]

    @property
    def ms(self) -> float:
        """The objective in ms: the makespan or the longest span."""
        return self.value[1]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers per stage, without multi-token prediction."""
        return without_predictions(self.layout)[0] if self.predictions else self.layout

    @property
    def text(self) -> str:
        """Megatron's ``--pipeline-model-parallel-layout``."""
        return layout_text(self.layout, self.predictions)


@dataclass(frozen=True)
class Baseline(RatedLayout):
    """A layout that a plan is compared with.

    Attributes:
        is_bound: whether no schedule was made for it, because none is shorter than ``ms``, which is not below the plan.
    """

    is_bound: bool = False


@dataclass(frozen=True)
class LayoutPlan(Part):
    """The best layout that was found, those that it is compared with, by name, and those without a schedule."""

    best: RatedLayout
    others: Mapping[str, Baseline]
    dropped: tuple[DroppedVariant, ...] = ()

    def gains(self) -> dict[str, float]:
        """Return how much shorter the plan makes an iteration at least, as a share of the time with other layouts."""
        return {name: 1 - self.best.ms / other.ms if other.ms else 0.0 for name, other in self.others.items()}
