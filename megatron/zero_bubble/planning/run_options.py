"""What a user asks of a run: its setup, and what is no part of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.zero_bubble.planning.observations import Observations
from megatron.zero_bubble.planning.setup import Setup


@dataclass(frozen=True)
class Balance:
    """Data-parallel replicas get equal work instead of equally many microbatches.

    Attributes:
        attention_share: the share of a forward of ``--seq-length`` tokens that attention takes; None for an estimate.
    """

    attention_share: float | None = None


@dataclass(frozen=True)
class RunOptions:
    """What a run does, how it is observed, and what its microbatches are.

    Attributes:
        balance: how samples are divided among replicas; None for equally many.
        lengths: the name and value of what makes the lengths of microbatches differ, such as ``shapes``; None where
            they are equal.
    """

    setup: Setup = field(default_factory=Setup)
    observations: Observations = field(default_factory=Observations)
    balance: Balance | None = None
    lengths: tuple[str, Any] | None = None

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule of this package runs."""
        return self.setup.order is not None
