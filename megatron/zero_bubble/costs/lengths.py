"""Costs of samples of different lengths, and of the microbatches that they are padded to."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from megatron.zero_bubble.costs.passes import PassCosts
from megatron.zero_bubble.costs.units import checked_figure, checked_share


class Shape(NamedTuple):
    """The samples of a microbatch, all padded to ``tokens``, the length of the longest."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class LengthCost:
    """The time of a sample as a function of its length, in any unit: ``linear * s + quadratic * s^2`` for s tokens.

    Matrix products and element-wise kernels take time in proportion to the tokens, causal attention to their square.
    ``fixed`` is the time that a microbatch takes in addition, whatever its shape.

    Raises:
        UserError: for a negative or non-finite figure.
    """

    linear: float
    quadratic: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "fixed"):
            checked_figure(name, getattr(self, name))

    @classmethod
    def of_share(cls, attention: float, sequence: int, fixed_tokens: float = 0.0) -> LengthCost:
        """From the share that attention takes of F, B and W of a sample of ``sequence`` tokens, as a unit of time.

        Args:
            fixed_tokens: the tokens of a short sample that takes as long as the fixed part of a microbatch.

        Raises:
            UserError: also for a share that is not between 0 and 1.
        """
        share = checked_share("attention", attention)
        linear = (1.0 - share) / sequence
        return cls(linear, share / sequence**2, fixed_tokens * linear)

    @classmethod
    def of_passes(cls, costs: PassCosts, sequence: int, fixed_tokens: float = 0.0) -> LengthCost:
        """From passes of all stages for samples of ``sequence`` tokens, measured or estimated, as a unit of time."""
        forward = sum(map(mul, costs.forward_ms, costs.forward_attention))
        backward = sum(map(mul, costs.backward_ms, costs.backward_attention))
        whole = sum((*costs.forward_ms, *costs.backward_ms, *costs.wgrad_ms))
        return cls.of_share((forward + backward) / whole if whole else 0.0, sequence, fixed_tokens)

    def sample(self, tokens: int) -> float:
        """The time of a sample, in the unit of these figures."""
        return (self.linear + self.quadratic * tokens) * tokens

    def microbatch(self, shape: Shape) -> float:
        """The time of a microbatch with its padding, in the unit of these figures."""
        return self.fixed + shape.sequences * self.sample(shape.tokens)
