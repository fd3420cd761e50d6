"""By which length schedules are compared, what exceeds a memory limit, and which figures count as equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.errors import UserError

ROUNDING = 1e-9
"""Relative difference up to which two lengths, or two amounts of memory, are equal."""


class WithLengths(Protocol):
    """A timeline, or a row of a table with its lengths in ms."""

    @property
    def span_ms(self) -> float: ...

    @property
    def makespan_ms(self) -> float: ...


def length_ms(of: WithLengths, objective: Metric) -> float:
    """The length in ms by which schedules are compared."""
    return of.makespan_ms if objective == "makespan" else of.span_ms


def within(amount: float, limit: float | None) -> bool:
    """Whether an amount of memory is within a limit in the same unit; None for no limit."""
    return limit is None or amount <= limit * (1 + ROUNDING)


def limits_of(limit: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    """The memory limit of every rank; infinity if there is none.

    Raises:
        UserError: limits for another number of ranks.
    """
    if limit is None:
        return (math.inf,) * num_ranks
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * num_ranks
    if len(limits) != num_ranks:
        raise UserError(f"a memory limit must be one figure, or one for each of the {num_ranks} ranks; got {limits}")
    return limits


def excess(peak: float, limit: float | None) -> float:
    """The peak of memory if it is above the limit, else 0, so that all plans within the limit are equally good."""
    return 0.0 if within(peak, limit) else peak


@dataclass(frozen=True)
class Goal:
    """What schedules are compared by.

    Attributes:
        objective: the length to minimize.
        limit: memory limit per rank, in the unit of the memory figures; None for no limit.
    """

    objective: Metric = "makespan"
    limit: float | None = None

    @property
    def most(self) -> float:
        """The limit of a search, which needs one."""
        assert self.limit is not None, "a search has a limit"
        return self.limit

    def value(self, of: WithLengths, peak: float) -> tuple[float, float]:
        """How good a schedule with this peak of memory is; the least is the best."""
        return excess(peak, self.limit), length_ms(of, self.objective)


SHORTEST = Goal()
"""The shortest makespan, within any memory."""


def is_less(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` comes before ``other``, if figures that differ only by rounding are equal."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > ROUNDING * max(abs(a), abs(b)):
            return a < b
    return False
