"""The time that messages take from the passes of their ranks: ``PassCosts.message_ms``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron.zero_bubble.core.costs.passes import PassCosts
from megatron.zero_bubble.core.ir import WHOLE, Pass, Placement, Schedule, Slices
from megatron.zero_bubble.core.ir.ops import COMPUTE
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.core.ir.passes import BW, B, F

MessageTimes = Sequence[tuple[float, float]]
"""For every stage, the time in ms of a message to or from the stage above, and to or from the stage below."""
NO_MESSAGES = 0.0, 0.0


def ends_of(p: Pass, messages: MessageTimes) -> tuple[float, float]:
    """Milliseconds by which its messages make ``p`` longer, before it computes and after it."""
    if p.kind is F:
        return messages[p.stage]
    if p.kind is B or p.kind is BW:
        above, below = messages[p.stage]
        return below, above
    return NO_MESSAGES


@dataclass(frozen=True)
class CostsWithMessages(PassCosts):
    """Costs on one placement, whose durations include the messages of a pass.

    Attributes:
        messages: per stage, the ms that a message to or from the stage above takes, and one to or from the stage below.
        without: the costs without messages, which may depend on the microbatch.
    """

    messages: tuple[tuple[float, float], ...] = ()
    without: PassCosts | None = None

    def duration(self, p: Pass, slices: Slices = WHOLE) -> float:
        """Milliseconds for which ``p`` occupies its rank, from the handling of its input to that of its output."""
        computing = super().duration if self.without is None else self.without.duration
        return computing(p, slices) + sum(ends_of(p, self.messages))

    def parts(self, works: tuple[Pass, ...]) -> tuple[LanePart, ...]:
        """The parts of passes that overlap, between the messages that their rank handles before and after them."""
        if not (parts := super().parts(works)):
            return ()
        ends = [(ends_of(p, self.messages), number) for number, p in enumerate(works)]
        before = [LanePart(COMPUTE, ms, number) for (ms, _), number in ends if ms]
        return (*before, *parts, *(LanePart(COMPUTE, ms, number) for (_, ms), number in ends if ms))


def occupied(costs: PassCosts, placement: Placement) -> PassCosts:
    """Return ``costs`` with durations that include messages; unchanged if these take no time."""
    if not costs.message_ms or isinstance(costs, CostsWithMessages):
        return costs
    figures = {each.name: getattr(costs, each.name) for each in fields(PassCosts)}
    return CostsWithMessages(**figures, messages=costs.messages_on(placement), without=costs)


def of_schedule(costs: PassCosts, schedule: Schedule) -> tuple[PassCosts, Slices]:
    """Return what the durations of a schedule's ops depend on: ``costs``, with messages, with lanes that overlap if the
    schedule says so, and with its recomputation as passes, and its slices.
    """
    own = costs.overlapping(schedule.overlaps).recomputing(schedule.recomputed)
    return occupied(own, schedule.placement), schedule.slices
