"""One step of a post-validated optimizer: its partial and global state, mode and outcome."""

from __future__ import annotations

import enum
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.zero_bubble.engine.optimizer.global_state import Reduction


class StepMode(enum.Enum):
    """How a rank took a step; the values appear in the log."""

    AHEAD = "ahead"
    SYNCHRONOUS = "synchronous"
    WAITED = "waited"
    SKIPPED = "skipped"
    REPEATED = "repeated"


class Tally(NamedTuple):
    """The number of steps so far by mode; as a string, a log message.

    Attributes:
        first: steps of the first rank, by value of ``StepMode``.
        waited, repeated: steps summed over all ranks.
    """

    first: Counter[str]
    waited: int
    repeated: int
    num_ranks: int

    @property
    def steps(self) -> int:
        """Number of steps, the same on every rank."""
        return self.first.total()

    def __str__(self) -> str:
        words = [f"{number} {how}" for how, number in self.first.most_common()]
        return (
            f"{self.steps} optimizer steps, on the first rank {', '.join(words) or 'none'}; {self.repeated} repeated "
            f"and {self.waited} waited for on all {self.num_ranks} ranks"
        )


@dataclass(frozen=True)
class Outcome:
    """The final results of a step: those of ``MegatronOptimizer.step``, and the loss scale after the step.

    Attributes:
        how: how this rank took the step.
        of: what the loop passed to ``step_ahead``, for example the number and the losses of the iteration.
    """

    updated: bool
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float
    how: StepMode = StepMode.SYNCHRONOUS
    of: Any = None


class Verdict(NamedTuple):
    """What the global state says about a step.

    Attributes:
        found_inf: whether a gradient is infinite, per optimizer with a loss scale.
        norm: of all gradients.
        num_zeros: number of zeros in all gradients, if the job logs it.
        wrong: whether a step that was taken ahead must be undone.
    """

    found_inf: list[bool]
    norm: float
    num_zeros: float | None
    wrong: bool


@dataclass
class OptimizerStep:
    """A step whose global state is still being reduced.

    Attributes:
        found_inf: whether a gradient is infinite, per optimizer with a loss scale.
        sums: per group of ranks, the sum of squares of all gradients and, if the job logs it, the number of zeros.
        of: what the loop passed to ``step_ahead``.
        how: the mode decided so far.
        can_be_wrong: whether the step can be rejected, because the job clips gradients or has a loss scale.
        someone_ahead: whether any rank of the pipeline stepped ahead; if so, the first rank did.
        verdict: None until the global state has arrived.
    """

    found_inf: list[Reduction]
    sums: list[Reduction]
    can_be_wrong: bool
    of: Any = None
    how: StepMode = StepMode.AHEAD
    someone_ahead: bool = False
    verdict: Verdict | None = None

    def arrive(self) -> None:
        """Wait for the sums, which all ranks have started; not for a rank that has failed."""
        with suppress(RuntimeError):
            for reduction in (*self.found_inf, *self.sums):
                reduction.wait()


@dataclass
class PartialState:
    """The state on which a rank decides how to step: that of its own stage and of all previous ranks.

    Attributes:
        square: sum of the squares of all gradients.
        found_inf: whether a gradient is infinite.
        waits: whether one of these ranks waits for the global state, for example because it could not undo the step.
    """

    square: float = 0.0
    found_inf: bool = False
    waits: bool = False

    def add(self, square: float, found_inf: bool, waits: bool) -> None:
        self.square += square
        self.found_inf |= found_inf
        self.waits |= waits
