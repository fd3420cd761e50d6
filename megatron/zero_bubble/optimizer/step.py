"""One step of a post-validated optimizer: what is known of it, how it is taken, what comes of it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megatron.zero_bubble.optimizer.global_state import Reduction


class StepMode(enum.Enum):
    """How a rank did one step; the values are the words of the log."""

    AHEAD = "ahead"
    SYNCHRONOUS = "synchronous"
    WAITED = "waited"
    SKIPPED = "skipped"
    REPEATED = "repeated"


class Tally(NamedTuple):
    """How steps were taken so far.

    Attributes:
        first: by the first rank, in the words of ``StepMode``.
        waited, repeated: by all ranks together.
    """

    first: Counter[str]
    waited: int
    repeated: int
    num_ranks: int

    @property
    def steps(self) -> int:
        """The same on every rank."""
        return self.first.total()


@dataclass(frozen=True)
class Outcome:
    """What ``MegatronOptimizer.step`` returns, and the loss scale after it; final."""

    updated: bool
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float


@dataclass
class Step:
    """A step whose global state is on its way.

    Attributes:
        how: as decided so far.
        can_be_wrong: whether it clips or has a loss scale at all.
        someone_ahead: whether any rank of the pipeline stepped ahead; then the first one did.
    """

    found_inf: list[Reduction]
    squares: list[Reduction]
    zeros: list[Reduction]
    can_be_wrong: bool
    how: StepMode = StepMode.AHEAD
    someone_ahead: bool = False


@dataclass
class PartialState:
    """What is known when a rank must decide: of its stage and of those before it.

    Attributes:
        square: the sum of the squares of all gradients.
        waits: whether one of these ranks does not step ahead because it could not take the step back.
    """

    square: float = 0.0
    found_inf: bool = False
    waits: bool = False

    def add(self, square: float, found_inf: bool, waits: bool) -> None:
        """Those of other ranks."""
        self.square += square
        self.found_inf |= found_inf
        self.waits |= waits
