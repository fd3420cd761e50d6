"""Costs of samples of different lengths, and of the microbatches that they are packed into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.costs.units import checked_figure, checked_share
from megatron.zero_bubble.core.ir import WHOLE, Pass, Placement, Slices, Value
from megatron.zero_bubble.core.ir.passes import BW, B, F, Kind, W


class SequenceShape(NamedTuple):
    """The sequences of a microbatch, all padded to ``tokens``; samples that are packed are one sequence."""

    sequences: int
    tokens: int


class Load(NamedTuple):
    """What the time of a microbatch depends on: its tokens, and the sum of the squares of its samples' lengths."""

    tokens: int
    squares: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Load:
        """That of packed samples: none attends to another."""
        own = tuple(lengths)
        return cls(sum(own), sum(tokens * tokens for tokens in own))


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
    def of_hidden_size(cls, hidden_size: int, fixed_tokens: float = 0.0) -> LengthCost:
        """``12 h s + s^2``, from the products of a layer and of its causal attention; ``fixed_tokens`` as below."""
        linear = 12.0 * hidden_size
        return cls(linear, 1.0, fixed_tokens * linear)

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

    def whole(self, tokens: int) -> Whole:
        """A sequence of ``tokens`` with the share of attention that these figures give it."""
        time = self.sample(tokens)
        return Whole(tokens, self.quadratic * tokens * tokens / time if time else 0.0)

    def sample(self, tokens: int) -> float:
        """The time of a sample, in the unit of these figures."""
        return (self.linear + self.quadratic * tokens) * tokens

    def microbatch(self, load: Load) -> float:
        """The time of a microbatch, in the unit of these figures."""
        return self.fixed + self.linear * load.tokens + self.quadratic * load.squares

    def passes(self, placement: Placement, loads: tuple[Load, ...] = ()) -> PackedCosts:
        """The passes of microbatches on equal stages: F, B and W take equally long, except for attention, which takes
        twice as long in B as in F, and no time in W.

        One rank takes ``microbatch`` in all, in the unit of these figures.
        """
        whole = self.linear + self.quadratic
        share = self.quadratic / whole if whole else 0.0
        third = whole / 3
        costs = PassCosts.uniform(placement, third, third * (1 + share), third * (1 - share), attention=share)
        fixed = self.fixed / self.linear if self.linear else 0.0
        return PackedCosts(**vars(costs), sequence=1, loads=loads, fixed_tokens=fixed)


class Whole(NamedTuple):
    """The sequence for which the times of microbatches of other lengths are stated.

    Attributes:
        tokens: its length.
        attention: the share of its F that attention takes; in B it takes twice as long, and in W no time.
    """

    tokens: int
    attention: float

    @property
    def backward_attention(self) -> float:
        """The share of its B, if F, B and W take equally long except for attention."""
        return 2 * self.attention / (1 + self.attention)

    def parts(self, kind: Kind, load: Load) -> float:
        """The time of a pass over that of the same kind for this sequence."""
        share = {F: self.attention, B: self.backward_attention, BW: self.attention}.get(kind, 0.0)
        return (1.0 - share) * load.tokens / self.tokens + share * load.squares / self.tokens**2


@dataclass(frozen=True)
class PackedCosts(PassCosts):
    """Costs of the passes of microbatches of packed samples; all other figures are those of one whole sequence.

    Attributes:
        sequence: tokens of the sequence that the figures are for.
        loads: that of every microbatch.
        fixed_tokens: tokens that take as long as the fixed part of a microbatch, see ``LengthCost.of_share``.
    """

    sequence: int = 1
    loads: tuple[Load, ...] = ()
    fixed_tokens: float = 0.0

    def duration(self, p: Pass, slices: Slices = WHOLE) -> float:
        """See ``PassCosts``; for whole sequences only."""
        per_token, per_square = self.rates(p.stage, p.kind)
        load = self.loads[p.microbatch]
        return per_token * (load.tokens + self.fixed_tokens) + per_square * load.squares

    def copy(self, value: Value, slices: Slices = WHOLE) -> float:
        """See ``PassCosts``: what F saved grows with its tokens."""
        return self.host_ms[value.producer.stage] * self.loads[value.producer.microbatch].tokens / self.sequence

    def rates(self, stage: int, kind: Kind) -> tuple[float, float]:
        """Milliseconds per token, and per square of a sample's tokens, of one kind of pass."""
        if kind is BW:
            of_b, of_w = self.rates(stage, B), self.rates(stage, W)
            return of_b[0] + of_w[0], of_b[1]
        if kind is W:
            return self.wgrad_ms[stage] / self.sequence, 0.0
        forward = kind is F
        ms = (self.forward_ms if forward else self.backward_ms)[stage]
        share = (self.forward_attention if forward else self.backward_attention)[stage]
        return ms * (1.0 - share) / self.sequence, ms * share / self.sequence**2

    def durations(self, stage: int, kind: Kind, loads: Iterable[Load]) -> list[float]:
        """``duration`` of one kind of pass for each of ``loads``."""
        per_token, per_square = self.rates(stage, kind)
        fixed = per_token * self.fixed_tokens
        return [fixed + per_token * tokens + per_square * squares for tokens, squares in loads]
