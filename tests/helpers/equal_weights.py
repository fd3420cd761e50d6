"""Weights of stages with a given number of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.zero_bubble.core.costs.static import ParameterBytes, StageBytes
from megatron.zero_bubble.core.ir import Placement


@dataclass(frozen=True)
class EqualStages:
    """Weights in 2 bytes, gradients in 4, and 12 bytes of optimizer state, for as many parameters on every stage.

    Attributes:
        parameters: those of a stage of a placement.
    """

    parameters: Callable[[Placement], float]

    def of_ranks(self, placement: Placement, layout: tuple[int, ...] | None = None) -> tuple[float, ...]:
        """Bytes per rank."""
        sizes = self.of_stages(placement)
        return tuple(sizes.whole(placement.stages_of(rank), 1) for rank in range(placement.num_ranks))

    def of_stages(self, placement: Placement, layout: tuple[int, ...] | None = None) -> StageBytes:
        """Bytes per stage."""
        own = (self.parameters(placement),) * placement.num_stages
        return StageBytes.of(own, (0.0,) * placement.num_stages, ParameterBytes(2, 4, 12), own)

    def of_layers(self) -> EqualStages:
        """They have no vocabulary."""
        return self

    def without_copies(self) -> EqualStages:
        """Nor a copy of one."""
        return self
