"""From which time of a message on the shortest schedule of ``zero-bubble compare`` loses to one with fewer messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.planning.offer import Offer

_STEPS = 10
"""Bisections of the interval of times."""
_MOST = 0.25
"""The longest time considered, as a share of the longest pass: the messages of a pass then take as long as it does."""


@dataclass(frozen=True)
class BreakEven:
    """``schedule`` is shorter than ``shortest`` if a message takes more than ``message_ms`` from each of its ranks."""

    message_ms: float
    shortest: str
    schedule: str

    def __str__(self) -> str:
        return (
            f"{self.schedule} is shorter than {self.shortest} if a message takes more than {self.message_ms:.3g} ms, "
            "with the passes of both in this order"
        )


class Contenders:
    """The shortest of the compared schedules by number of messages.

    Args:
        objective: the length to compare.
    """

    def __init__(self, objective: Metric) -> None:
        self._objective: Metric = objective
        self._shortest: dict[int, tuple[float, str, Offer]] = {}

    def add(self, made: Offer, name: str, messages: int, ms: float) -> None:
        """Add a schedule within the memory limit, and the name to show for it."""
        if messages not in self._shortest or ms < self._shortest[messages][0]:
            self._shortest[messages] = ms, name, made

    def break_even(self) -> BreakEven | None:
        """Compare the shortest schedule with the next one that has fewer messages; neither is searched again.

        Returns:
            None if there is no other, or it stays longer while messages are short compared with passes.
        """
        ranked = sorted((ms, messages) for messages, (ms, *_) in self._shortest.items())
        fewer = [each for each in ranked if each[1] < ranked[0][1]]
        if not fewer:
            return None
        (_, name, first), (_, other, second) = (self._shortest[messages] for _, messages in (ranked[0], fewer[0]))
        if not (first.is_plain and second.is_plain):
            return None  # their plans are made for their costs
        if any(made.costs.halves(made.schedule.placement) for made in (first, second)):
            return None  # the length of one is a lower bound
        costs = first.costs.on(first.schedule.placement)[0]
        low, high = costs.message_ms, costs.message_ms + _MOST * max(*costs.forward_ms, *costs.backward_ms)
        if self._difference_ms(first, second, high) <= 0:
            return None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self._difference_ms(first, second, middle) > 0:
                high = middle
            else:
                low = middle
        return BreakEven(high, name, other)

    def _difference_ms(self, first: Offer, second: Offer, message_ms: float) -> float:
        timelines = (replace(made, costs=made.costs.with_messages(message_ms)).timeline for made in (first, second))
        a, b = (length_ms(each, self._objective) for each in timelines)
        return a - b
