"""Costs of microbatches of different shapes, to simulate them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.costs.lengths import Shape
from megatron.zero_bubble.ir import WHOLE, Kind, Pass, Slices


@dataclass(frozen=True)
class ShapedCosts(PassCosts):
    """Costs of passes for microbatches of different shapes; all other figures are those of one whole sequence.

    Attributes:
        sequence: tokens of the sequence that the figures are for.
        shapes: the shape of every microbatch.
    """

    sequence: int = 1
    shapes: tuple[Shape, ...] = ()

    def duration(self, p: Pass, slices: Slices = WHOLE) -> float:
        """See ``PassCosts``; for whole sequences only."""
        shape = self.shapes[p.microbatch]
        part = shape.tokens / self.sequence
        if p.kind is Kind.W:
            return shape.sequences * part * self.wgrad_ms[p.stage]
        backward = p.kind is not Kind.F
        whole = (self.backward_ms if backward else self.forward_ms)[p.stage]
        attention = (self.backward_attention if backward else self.forward_attention)[p.stage]
        fused = self.wgrad_ms[p.stage] if p.kind is Kind.BW else 0.0
        return shape.sequences * part * (whole * (1.0 - attention + attention * part) + fused)
