"""The lanes of a rank while its ops run.

An op occupies one lane for its duration, or several, if it has parts (``ir.parts``). A rank does not run such an op, it
issues it: it waits for the inputs of the op, queues its parts, and proceeds. A part starts when its lane is free and
the part before it in the same pass has ended. What a pass gives is there at the end of its last part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import cast

from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, divided
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import Op, Pass, Slices, Value
from megatron.zero_bubble.core.ir.ops import COMPUTE
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.core.ir.passes import Kind

Made = dict[Hashable, tuple[float, int | None]]
"""By token, the time in ms at which it holds, and the rank that made it; None for one of the previous iteration."""


class Lanes:
    """The lanes of one rank.

    Attributes:
        free: the time in ms at which the rank has ended its passes. The next op starts then, while ops on other lanes
            may still run.
        ends: the times at which the results of the ops of an iteration are there.
        spans, others: the passes of the iteration, and its ops on other lanes.
    """

    __slots__ = ("_lane_free", "_rank", "_slices", "_times", "ends", "free", "others", "spans")

    def __init__(self, rank: int, times: PassCosts, slices: Slices) -> None:
        self._rank, self._times, self._slices = rank, times, slices
        self._lane_free: defaultdict[str, float] = defaultdict(float)
        self.free = 0.0
        self.begin()

    def begin(self) -> None:
        self.ends: list[float] = []
        self.spans: list[Span] = []
        self.others: list[LaneSpan] = []

    def run(self, op: Op, ready: float, waited: float, makes: Sequence[Hashable], made: Made) -> None:
        """Run an op on its lane, once its inputs are there and the lane is free.

        Args:
            ready: when all its inputs are there.
            waited: when those of other ranks are there.
            makes: the tokens that hold at its end.
            made: receives them.
        """
        lane, lanes, reached = op.lane, self._lane_free, self.free
        start = ready if lane is None else max(ready, lanes.get(lane, 0.0))
        end = start + op.duration_ms(self._times, self._slices)
        self.ends.append(end)
        for token in makes:
            made[token] = end, self._rank
        if lane is None:
            self.free = waited
            return
        lanes[lane] = end
        if lane == COMPUTE:
            self.free = end
        if works := op.works:
            self.spans.extend(divided(works, start, end))
        else:
            self.others.append(LaneSpan(lane, op, start, end, reached))

    def end(self) -> None:
        """End the iteration."""


class QueueingLanes(Lanes):
    """The lanes of a rank that issues the passes of its ops in parts."""

    __slots__ = ("_boxes", "_parts")

    def begin(self) -> None:
        super().begin()
        self._boxes: list[tuple[tuple[Pass, ...], float, float]] = []
        self._parts: dict[tuple[tuple[int, Kind], ...], tuple[LanePart, ...]] = {}

    def run(self, op: Op, ready: float, waited: float, makes: Sequence[Hashable], made: Made) -> None:
        """Issue an op with passes, and queue its parts. Any other op waits on its lane for what is queued there."""
        if not (works := op.works):
            super().run(op, ready, waited, makes, made)
            return
        lanes, others, text = self._lane_free, self.others, ""
        self.free = ready
        begin = latest = max(ready, lanes.get(COMPUTE, 0.0))
        ends = [ready] * len(works)
        for lane, ms, work in self._parts_of(op, works):
            start = lanes[lane]
            issued = ready if work is None else ends[work]
            if issued > start:
                start = issued
            lanes[lane] = end = start + ms
            if work is not None:
                ends[work] = end
            if end > latest:
                latest = end
            if lane != COMPUTE:
                text = text or str(op)
                others.append(LaneSpan(lane, text, start, end, ready))
        self._boxes.append((works, begin, latest))
        if len(works) == 1:
            self.ends.append(ends[0])
            for token in makes:
                made[token] = ends[0], self._rank
        else:
            self.ends.append(ready)  # what several passes give is awaited by tokens (``analysis.steps``)
            for token in makes:
                # A value, or, in a schedule without ops, the pass itself.
                maker = token.producer if isinstance(token, Value) else cast(Pass, token)
                made[token] = ends[works.index(maker)], self._rank

    def end(self) -> None:
        """Wait for what is queued. An op has the rank until the next one computes, even if its last parts end later."""
        self.free = max(self.free, self._lane_free.get(COMPUTE, 0.0))
        nexts = pairwise((*(begin for _, begin, _ in self._boxes), math.inf))
        for (works, begin, end), (_, until) in zip(self._boxes, nexts, strict=True):
            spans = divided(works, begin, end)
            if end > until:
                spans = [Span(p, min(start, until), min(ends_at, until)) for p, start, ends_at in spans]
            self.spans.extend(spans)

    def _parts_of(self, op: Op, works: tuple[Pass, ...]) -> tuple[LanePart, ...]:
        """Those of an op, which are alike for all microbatches."""
        key = tuple([p[:2] for p in works])
        if (parts := self._parts.get(key)) is None:
            parts = self._parts[key] = op.parts(self._times)
        return parts


def lanes_of(rank: int, times: PassCosts, slices: Slices) -> Lanes:
    """The lanes of a rank whose ops take ``times``."""
    make = QueueingLanes if times.overlaps and times.experts else Lanes
    return make(rank, times, slices)
