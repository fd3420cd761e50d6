"""The memory of a rank's microbatches over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import accumulate, chain
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span, Timeline
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.ir import Effects, Message, Pass, Plan, Schedule, Slices, Value
from megatron.zero_bubble.core.ir.passes import BW, B, F, W


class MemoryStep(NamedTuple):
    """A step of a memory curve: from ``at_ms`` on, a rank holds ``amount``, in the unit of the memory figures."""

    at_ms: float
    amount: float


def memory_curve(timeline: Timeline, memory: PassMemory) -> tuple[tuple[MemoryStep, ...], ...]:
    """Return one curve per rank, with one step per change."""
    return tuple(tuple(_curve(timeline, rank, memory)) for rank in range(len(timeline.spans)))


def peaks(timeline: Timeline, memory: PassMemory) -> tuple[float, ...]:
    """Return the peak memory of each rank, in units of one microbatch on that rank."""
    changes = (_changes(timeline, rank, memory) for rank in range(len(timeline.spans)))
    most = (highest(change for _, change in of_rank) for of_rank in changes)
    return tuple(peak / one for peak, one in zip(most, _microbatch(timeline, memory), strict=True))


def most_kept(timeline: Timeline, memory: PassMemory) -> tuple[float, ...]:
    """Return the peak memory of each rank, in the unit of the memory figures."""
    return tuple(peak * one for peak, one in zip(timeline.peak_activation, _microbatch(timeline, memory), strict=True))


def peaks_in_order(schedule: Schedule, memory: PassMemory) -> tuple[float, ...]:
    """Return what ``most_kept`` does of any timeline of ``schedule`` without other ops: the peak of a rank depends only
    on the order of its passes.
    """
    memory = memory.recomputing(schedule.recomputed)
    if not any(memory.captured):
        slices = schedule.slices
        return tuple(highest(change for p in row for change in memory.changes(p, slices)) for row in schedule.order)
    return tuple(
        in_graphs(row, memory) + highest(change for p in row for change in _outside(p, memory, schedule.slices))
        for row in schedule.order
    )


def in_graphs(row: Iterable[Pass], memory: PassMemory) -> float:
    """Return what CUDA graphs keep on a rank: on each of its stages, that of as many microbatches as are between their
    F and their W at the same time, since a graph serves one of them after the other.
    """
    live, most = Counter[int](), Counter[int]()
    for p in row:
        live[p.stage] += (p.kind is F) - (p.kind in (W, BW))
        most[p.stage] = max(most[p.stage], live[p.stage])
    return sum(number * memory.captured[stage] for stage, number in most.items())


def _outside(p: Pass, memory: PassMemory, slices: Slices) -> tuple[float, float]:
    """The changes of memory by a pass without what CUDA graphs keep."""
    (start, end), (kept, freed) = memory.changes(p, slices), memory.captured_changes(p)
    return start - kept, end - freed


def host_peaks(plan: Plan, memory: PassMemory) -> tuple[float, ...]:
    """Return the most host memory that each rank has allocated, in the unit of the memory figures. It depends only on
    the order of the rank's ops.
    """
    slices = plan.schedule.slices
    return tuple(highest(op.host_memory(memory, slices) for op in row) for row in plan.ops)


def message_peaks(plan: Plan, widths: Sequence[float] = ()) -> tuple[float, ...]:
    """Return the most memory that each rank has allocated for messages, in messages of whole microbatches; the message
    of a slice is its share of one. It depends only on the order of the rank's ops: what a rank sends is kept until it
    is settled, and what it receives has a buffer from the receive to the last pass that uses it.

    Args:
        widths: by stage, the size of what it hands on; by default, all are alike.
    """
    shares, stem = plan.schedule.slices.shares, plan.stem
    sizes = widths or (1.0,) * plan.schedule.num_stages

    def size_of(p: Pass) -> float:
        return shares[p.slice] * sizes[p.stage - (p.kind is B or p.kind is BW)]

    return tuple(highest(_of_messages(row, size_of)) for row in stem.effects)


def _of_messages(row: Sequence[Effects], size_of: Callable[[Pass], float]) -> Iterator[float]:
    last = {value: place for place, effects in enumerate(row) for value in effects.uses}
    received: set[Value] = set()
    for place, effects in enumerate(row):
        for given in effects.gives:
            if isinstance(given, Message):
                yield size_of(given.producer)
            elif effects.arrives and isinstance(given, Value):
                received.add(given)
                yield size_of(given.producer)
        for taken in effects.takes:
            if isinstance(taken, Message):
                yield -size_of(taken.producer)
        for used in effects.uses:
            if used in received and last[used] == place:
                yield -size_of(used.producer)


def highest(changes: Iterable[float]) -> float:
    """Return the peak of what is 0 at first and changes by these amounts, in order."""
    return max(accumulate(changes, initial=0.0))


def _microbatch(timeline: Timeline, memory: PassMemory) -> Iterator[float]:
    """Return the memory of one microbatch on each rank after F on all chunks of the rank."""
    on = timeline.schedule.placement
    return (sum(memory.activation[stage] for stage in on.stages_of(rank)) for rank in range(on.num_ranks))


def _curve(timeline: Timeline, rank: int, memory: PassMemory) -> Iterator[MemoryStep]:
    amount = 0.0
    for at_ms, change in _changes(timeline, rank, memory):
        amount += change
        yield MemoryStep(at_ms, amount)


def _changes(timeline: Timeline, rank: int, memory: PassMemory) -> Iterator[tuple[float, float]]:
    """Return the times and sizes of a rank's memory changes. At equal times, memory is freed before it is added."""
    slices, memory = timeline.schedule.slices, memory.recomputing(timeline.schedule.recomputed)
    changes = _of_passes(timeline.spans[rank], memory, slices)
    if any(memory.captured):
        graphs = in_graphs((span.pass_ for span in timeline.spans[rank]), memory)
        changes = chain([(0.0, graphs)], changes)
    if not timeline.lanes:
        return changes
    ops = [span for span in timeline.lanes[rank] if not isinstance(span.op, str)]  # parts of passes are text
    if not ops:
        return changes
    lanes = sorted(change for span in ops for change in _of_op(span, memory, slices))
    return merge(changes, lanes, key=lambda change: (change[0], change[1] > 0))


def _of_passes(spans: Sequence[Span], memory: PassMemory, slices: Slices) -> Iterator[tuple[float, float]]:
    """Return one change per pass, or two for a pass that changes memory at its start and at its end."""
    outside = any(memory.captured)
    for p, start_ms, end_ms in spans:
        at_start, at_end = _outside(p, memory, slices) if outside else memory.changes(p, slices)
        if at_start:
            yield start_ms, at_start
        if at_end or not at_start:
            yield end_ms, at_end


def _of_op(span: LaneSpan, memory: PassMemory, slices: Slices) -> Iterator[tuple[float, float]]:
    assert not isinstance(span.op, str), "only ops of a plan say what memory they change"
    at_start, at_end = span.op.memory(memory, slices)
    if at_start:
        yield span.start_ms if span.issued_ms is None else span.issued_ms, at_start
    if at_end:
        yield span.end_ms, at_end
