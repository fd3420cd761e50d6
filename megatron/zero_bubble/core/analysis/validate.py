"""Validate that a pipeline can run a schedule. There is one function per rule; the first fault found is raised.

Later rules rely on earlier ones: if every pass is present exactly once and on its rank, running the order decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.core.analysis.deadlock import deadlock
from megatron.zero_bubble.core.analysis.errors import ScheduleError
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Pass, Schedule, Value
from megatron.zero_bubble.core.ir.flow import OPERANDS, SAVED
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.pairs import WHAT, can_pair
from megatron.zero_bubble.core.ir.passes import FORWARDS
from megatron.zero_bubble.core.ir.repeats import find_repeats
from megatron.zero_bubble.core.ir.sizes import check_size

__all__ = ["ScheduleError", "validate"]

Cell = tuple[int, int, Pass]
"""Rank, position in the rank's order (one past the end: missing) and the pass."""
Faults = Iterator[tuple[str, Cell]]

_KEPT = 2
"""Repeated windows of a schedule that are checked: if the second can follow the first, so can any number of them."""


@without_gc()
def validate(schedule: Schedule, *, forward_only: bool = False) -> None:
    """Check every rule; ``forward_only`` expects an order without any backward, as an evaluation runs.

    Raises:
        ScheduleError: for a violated rule; the message has the rule in one sentence, and the grid with the bad cell.
        UserError: when there is not exactly one list of passes per rank, or for too large a schedule.
    """
    if len(schedule.order) != schedule.num_ranks:
        raise UserError(
            f"{schedule.name}: the order must have one list for each of the {schedule.num_ranks} ranks; "
            f"got {len(schedule.order)}"
        )
    stages_per_rank = -(-schedule.num_stages // schedule.num_ranks)
    check_size(schedule.num_ranks, schedule.num_microbatches, stages_per_rank, schedule.num_slices)
    repeats = find_repeats(schedule)
    if repeats is not None:
        try:
            _check(repeats.stem(schedule, _KEPT), forward_only)
        except ScheduleError:
            pass  # the error for the whole schedule shows its own microbatches
        else:
            return
    _check(schedule, forward_only)


def _check(schedule: Schedule, forward_only: bool) -> None:
    backwards = no_backward if forward_only else every_backward
    for rule in (
        known_passes,
        right_rank,
        at_most_once,
        split_or_fused,
        every_forward,
        backwards,
        every_neighbour,
        pairs_of_two,
        wgrad_after_backward,
    ):
        for sentence, (rank, column, bad) in rule(schedule):
            raise ScheduleError(sentence, schedule, rank, column, bad)
    no_deadlock(schedule)


def known_passes(schedule: Schedule) -> Faults:
    """Stages, microbatches and slices are within their counts."""
    for rank, column, p in _cells(schedule):
        for what, value, count in (
            ("stage", p.stage, schedule.num_stages),
            ("microbatch", p.microbatch, schedule.num_microbatches),
            ("slice", p.slice, schedule.num_slices),
        ):
            if not 0 <= value < count:
                yield f"a {what} must be within 0..{count - 1}; rank {rank} has {p}", (rank, column, p)


def right_rank(schedule: Schedule) -> Faults:
    """A pass runs on the rank of its stage."""
    for rank, column, p in _cells(schedule):
        home = schedule.placement.stage_to_rank[p.stage]
        if rank != home:
            yield f"{p} must run on rank {home}, which holds stage {p.stage}; it is on rank {rank}", (rank, column, p)


def at_most_once(schedule: Schedule) -> Faults:
    """No pass is repeated."""
    seen: set[Pass] = set()
    for rank, column, p in _cells(schedule):
        if p in seen:
            yield f"{p} must run once; rank {rank} repeats it", (rank, column, p)
        seen.add(p)


def split_or_fused(schedule: Schedule) -> Faults:
    """A backward is one BW, or a B and a W, never both."""
    for rank, column, p in _cells(schedule):
        if p.kind in (Kind.B, Kind.W) and (p.stage, p.microbatch, p.slice) in schedule.fused:
            fused = Pass(p.stage, Kind.BW, p.microbatch, p.slice)
            yield f"a backward is either fused or split; rank {rank} has both {fused} and {p}", (rank, column, p)


def every_forward(schedule: Schedule) -> Faults:
    """Every stage runs F of every microbatch and slice."""
    present = set(schedule.passes())
    for p in _forwards(schedule):
        if p not in present:
            yield _missing(schedule, p)


def every_backward(schedule: Schedule) -> Faults:
    """Every F has its backward, and a B has its W."""
    present = set(schedule.passes())
    schedule = replace(schedule, evaluates=False) if schedule.evaluates else schedule
    for p in _forwards(schedule):
        for backward in _consumers(schedule, p, SAVED):
            if backward not in present:
                yield _missing(schedule, backward)
            for wgrad in _consumers(schedule, backward, OPERANDS):
                if wgrad not in present:
                    yield _missing(schedule, wgrad)


def no_backward(schedule: Schedule) -> Faults:
    """An evaluation runs forwards only."""
    for rank, column, p in _cells(schedule):
        if p.kind not in FORWARDS:
            yield f"a forward-only order must have only F passes; rank {rank} has {p}", (rank, column, p)


def every_neighbour(schedule: Schedule) -> Faults:
    """Every pass that makes an input of a pass of the order, or that uses one of its outputs, is in the order."""
    present, flow = set(schedule.passes()), schedule.flow
    for p in schedule.passes():
        consumers = (consumer for value in flow.outputs(p) for consumer in flow.consumers(value))
        for neighbour in (*schedule.dependencies(p), *consumers):
            if neighbour not in present:
                yield _missing(schedule, neighbour)


def pairs_of_two(schedule: Schedule) -> Faults:
    """A pass that runs together with the next one is an F, and the next one is a B or BW that does not need it."""
    for rank, row in enumerate(schedule.order):
        for column, p in enumerate(row):
            if p in schedule.pairs and not (row[column + 1 :] and can_pair(p, row[column + 1])):
                after = f"followed by {row[column + 1]}" if row[column + 1 :] else "the last pass"
                yield f"a pair must be {WHAT}; on rank {rank}, {p} is {after}", (rank, column, p)


def wgrad_after_backward(schedule: Schedule) -> Faults:
    """W comes after the B that produces its inputs."""
    done: set[Pass] = set()
    for rank, column, p in _cells(schedule):
        done.add(p)
        if p.kind is Kind.W and not done.issuperset(schedule.dependencies(p)):
            (needed,) = schedule.dependencies(p)
            yield f"{p} must come after {needed} on rank {rank}", (rank, column, p)


def no_deadlock(schedule: Schedule) -> None:
    """Ranks that run their lists in order never wait for each other in a cycle; raises the error itself."""
    if (error := deadlock(schedule)) is not None:
        raise error


def _cells(schedule: Schedule) -> Iterator[Cell]:
    for rank, row in enumerate(schedule.order):
        for column, p in enumerate(row):
            yield rank, column, p


def _consumers(schedule: Schedule, p: Pass, name: str) -> tuple[Pass, ...]:
    """Return the passes that use the output ``name`` of ``p``; none if ``p`` does not have this output."""
    value = Value(p, name)
    return schedule.flow.consumers(value) if value in schedule.flow.outputs(p) else ()


def _forwards(schedule: Schedule) -> Iterator[Pass]:
    """Yield F of every stage, microbatch and slice, whether or not the order has it."""
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for slice_ in range(schedule.num_slices):
                yield Pass(stage, Kind.F, microbatch, slice_)


def _missing(schedule: Schedule, p: Pass) -> tuple[str, Cell]:
    rank = schedule.placement.stage_to_rank[p.stage]
    return f"rank {rank} must run {p}; it is missing", (rank, len(schedule.order[rank]), p)
