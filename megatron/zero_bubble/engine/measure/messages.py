"""The time that messages take from passes, from recorded iterations.

Between two passes that follow each other on a rank, the host has work to do even if the input of the second is there:
it starts the sends of the first, takes the receives of the second, and issues that pass. The gap grows with the number
of these messages; this growth is the time of a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.messages import ends_of
from megatron.zero_bubble.core.ir.passes import VOCABULARY_KINDS


def measured_message_ms(timelines: Sequence[Timeline], transfer_ms: float) -> float:
    """The time of a message at each of its ranks in ms: the slope of a line through the median gaps between passes with
    0, 1, 2, ... messages, by least squares; 0 if all gaps have equally many messages.

    Ranks that run other ops between their passes do not count, nor do gaps before or after passes of the
    vocabulary, whose messages are collectives.

    Args:
        timelines: measured iterations, whose spans do not include messages.
        transfer_ms: the time in which a message certainly arrives; a receiver may have waited for a later one.
    """
    gaps = defaultdict(list)
    for timeline in timelines:
        for count, ms in _gaps(timeline, transfer_ms):
            gaps[count].append(ms)
    points = [(count, median(times), len(times)) for count, times in gaps.items()]
    weight = sum(number for *_, number in points)
    mean = sum(count * number for count, _, number in points) / weight if weight else 0.0
    spread = sum(number * (count - mean) ** 2 for count, _, number in points)
    rise = sum(number * (count - mean) * ms for count, ms, number in points)
    return max(0.0, rise / spread) if spread else 0.0


def _gaps(timeline: Timeline, transfer_ms: float) -> Iterator[tuple[int, float]]:
    """Yield the number of messages and the length of the gaps at whose start the next input had arrived."""
    schedule = timeline.schedule
    placement, ends = schedule.placement, {p: end for row in timeline.spans for p, _, end in row}
    one = replace(PassCosts.uniform(placement, 0.0, 0.0, 0.0), message_ms=1.0).messages_on(placement)
    for rank, row in enumerate(timeline.spans):
        if timeline.lanes and timeline.lanes[rank]:
            continue
        for (before, _, end), (p, start, _) in pairwise(row):
            inputs = (ends[d] for d in schedule.dependencies(p) if placement.stage_to_rank[d.stage] != rank)
            is_there = max(inputs, default=end - transfer_ms) + transfer_ms <= end
            if is_there and before.kind not in VOCABULARY_KINDS and p.kind not in VOCABULARY_KINDS:
                yield round(ends_of(before, one)[1] + ends_of(p, one)[0]), start - end
