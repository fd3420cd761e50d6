"""Divide the ops that occupy several lanes of their rank into steps of one lane each.

A rank does not run such an op, it issues it: it waits for the inputs of the op, queues its parts, and proceeds. A part
starts when its lane is free and the part before it in the same pass has ended. What a pass gives is there at the end of
its last part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, cast

from megatron.zero_bubble.core.analysis.steps import Step
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, divided
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.ir import Op, Pass, Slices, Value
from megatron.zero_bubble.core.ir.ops import COMPUTE, Times
from megatron.zero_bubble.core.ir.parts import LanePart

_QUEUE = "queued compute"
"""The lane of the parts that compute, while the rank already waits for the inputs of the next op."""


class _Issue(Op):
    """The rank waits for the inputs of ``whole`` and queues its parts."""

    __slots__ = ("whole",)
    lane = COMPUTE

    def __init__(self, whole: Op) -> None:
        self.whole = whole


class _Queued(Op):
    """A part of an op."""

    __slots__ = ("lane", "ms")

    def __init__(self, part: LanePart) -> None:
        self.lane = _QUEUE if part.lane == COMPUTE else part.lane  # type: ignore[misc]
        self.ms = part.ms

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return self.ms


class _Join(Op):
    """At the end of its row, the rank waits for what it has queued, as any op does on the lane of the passes."""

    __slots__ = ()
    lane = COMPUTE


class _Queue(NamedTuple):
    """The parts of an op, which are numbered from 1.

    Attributes:
        after: for every part, the number of the part before it in its pass; 0 if it waits for none.
        last: the number of the last part of every pass.
        computes: the number of the last part that computes; 0 if there is none.
    """

    parts: tuple[_Queued, ...]
    after: tuple[int, ...]
    last: dict[int, int]
    computes: int


def in_parts(rows: Sequence[Iterable[Step]], costs: PassCosts) -> Sequence[Iterable[Step]]:
    """Return the rows in which every op with parts is one step per part; unchanged if ``costs`` divide none."""
    return [_divided(row, costs) for row in rows] if costs.overlaps and costs.experts else rows


def joined(spans: list[list[Span]], lanes: list[list[LaneSpan]]) -> tuple[list[list[Span]], list[list[LaneSpan]]]:
    """Return the spans of whole passes and those of other lanes after a run of ``in_parts``; unchanged if no op was
    divided.
    """
    if not any(isinstance(span.op, _Issue) for row in lanes for span in row):
        return spans, lanes
    rows = [_joined(row) for row in lanes]
    return [own for own, _ in rows], [others for _, others in rows]


def _divided(row: Iterable[Step], costs: PassCosts) -> Iterator[Step]:
    places: list[int] = []  # by op, the step at whose end its results are there
    at = 0
    computed: tuple[int, ...] = ()  # the last step that computes
    for op, after, waits, makes in row:
        after = tuple([places[position] for position in after])
        if not op.works:
            yield Step(op, after if op.lane != COMPUTE else after + computed, waits, makes)
            places.append(at)
            at += 1
            continue
        queue = _queue(op.parts(costs))
        made: dict[int, list[Hashable]] = defaultdict(list)
        for token in makes:
            made[queue.last.get(_number(op, token), 0)].append(token)
        yield Step(_Issue(op), after, waits, tuple(made[0]))
        for number, (part, before) in enumerate(zip(queue.parts, queue.after, strict=True), 1):
            yield Step(part, (at + before,) if before else (), (), tuple(made[number]) if number in made else ())
        # What several passes give is awaited by tokens (``analysis.steps``).
        places.append(at + queue.last.get(0, 0) if len(op.works) == 1 else at)
        computed = (at + queue.computes,) if queue.computes else computed
        at += 1 + len(queue.parts)
    yield Step(_Join(), computed, (), ())


@lru_cache(maxsize=4096)
def _queue(parts: tuple[LanePart, ...]) -> _Queue:
    last: dict[int, int] = {}
    after, computes = [], 0
    for number, (lane, _, work) in enumerate(parts, 1):
        after.append(0 if work is None else last.get(work, 0))
        if work is not None:
            last[work] = number
        if lane == COMPUTE:
            computes = number
    return _Queue(tuple(map(_Queued, parts)), tuple(after), last, computes)


def _number(op: Op, token: Hashable) -> int:
    """The position among the passes of ``op`` of the one that makes a token: a value, or, in a schedule without ops,
    the pass itself.
    """
    if len(op.works) == 1:
        return 0
    return op.works.index(token.producer if isinstance(token, Value) else cast(Pass, token))


def _joined(row: Iterable[LaneSpan]) -> tuple[list[Span], list[LaneSpan]]:
    """Join the parts of one rank. An op has the rank until the next one computes, even if its last parts end later."""
    ops: list[Op] = []
    begins: list[float] = []
    ends: list[float] = []
    others: list[LaneSpan] = []
    computed, text = 0.0, ""
    for span in row:
        lane, op, start, end, ready = span
        if isinstance(op, _Queued):  # most are
            if end > ends[-1]:
                ends[-1] = end
            if lane == _QUEUE:
                computed = end
            else:
                others.append(LaneSpan(lane, text, start, end, ready))
        elif isinstance(op, _Issue):
            ops.append(op.whole)
            text = str(op.whole)
            begins.append(max(start, computed))
            ends.append(begins[-1])
        elif not isinstance(op, _Join):
            others.append(span)
    boxes = zip(ops, ends, pairwise((*begins, math.inf)), strict=True)
    spans = [
        Span(p, min(start, until), min(end, until))
        for op, ends_at, (begin, until) in boxes
        for p, start, end in divided(op.works, begin, ends_at)
    ]
    return spans, others
