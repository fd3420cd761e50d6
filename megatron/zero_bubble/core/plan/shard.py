"""Insert the ops that gather the weights of a chunk, release them, and reduce its gradients once per unit.

A *run* is a sequence of passes of one stage that need its weights, without such a pass of another stage between them.
Weights are gathered before a run, unless they are still whole, and stay until their slot is needed for another stage:
that of the stage whose next run is farthest, which minimizes the number of gathers (Belady, 1966). A gather starts at
the beginning of the run before, so that this run hides it; with one slot, it starts at the end of that run.

Gradients are opened before the first backward of a unit and reduced behind its last weight gradient. They are closed
where the next reduction of the rank starts, so that the passes between hide the reduction. A unit ends after
at least the given number of microbatches, and only where the backwards of another stage follow, because a second
reduction of the same stage in a row would bring nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import NamedTuple

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Op, Pass, Placement, Plan
from megatron.zero_bubble.core.ir.passes import BW, B
from megatron.zero_bubble.core.ir.shards import (
    NEED_GRADIENTS,
    NEED_WEIGHTS,
    Close,
    Gather,
    Open,
    Reduce,
    ReleaseWeights,
    Wait,
)

DEFAULT_OPEN_CHUNKS = 2
"""Chunks of a rank whose weights are whole at a time: one is in use while the next one is gathered."""


@dataclass(frozen=True)
class Sharding:
    """How the chunks of a rank are sharded over its replicas.

    Attributes:
        unit_microbatches: microbatches after which gradients are reduced at the earliest.
        open_chunks: the most chunks of a rank whose weights are whole at a time.
    """

    unit_microbatches: int
    open_chunks: int = DEFAULT_OPEN_CHUNKS

    def __post_init__(self) -> None:
        assert self.unit_microbatches > 0 and self.open_chunks > 0, "both are counts"


def shard(plan: Plan, sharding: Sharding) -> Plan:
    """A lowering pass: add the ops of sharded units to every rank.

    Args:
        plan: a plan of a training iteration that does not validate optimizer steps.
    """
    assert not plan.drain, "ranks that stop in the middle are not supported"
    return replace(plan, ops=tuple(tuple(_row(row, sharding)) for row in plan.ops))


def most_whole(row: Iterable[Op], weights: Sequence[float], gradients: Sequence[float]) -> float:
    """The most of whole weights and gradients at a time on a rank with these ops, given their sizes by stage."""
    now = most = 0.0
    for op in row:
        if isinstance(op, Gather):
            now += weights[op.stage]
        elif isinstance(op, ReleaseWeights):
            now -= weights[op.stage]
        elif isinstance(op, Open):
            now += gradients[op.stage]
        elif isinstance(op, Close):
            now -= gradients[op.stage]
        most = max(most, now)
    return most


def traffic_bytes(row: Iterable[Op], weights: Sequence[float], gradients: Sequence[float]) -> tuple[float, float]:
    """What the gathers and the reductions of these ops gather and reduce, given the whole sizes by stage."""
    row = list(row)
    return (
        sum(weights[op.stage] for op in row if isinstance(op, Gather)),
        sum(gradients[op.stage] for op in row if isinstance(op, Reduce)),
    )


def _row(row: Sequence[Op], sharding: Sharding) -> Iterator[Op]:
    passes = [work for op in row for work in op.works]
    before: defaultdict[int, list[Op]] = defaultdict(list)  # by position among the passes
    for place, op in (*_weights(passes, sharding.open_chunks), *_gradients(passes, sharding.unit_microbatches)):
        before[place].append(op)
    place = 0
    for op in row:
        for _ in op.works:
            yield from sorted(before[place], key=_turn)
            place += 1
        yield op
    yield from sorted(before[place], key=_turn)


_ORDER_AT_ONE_PLACE = (ReleaseWeights, Reduce, Gather, Close, Open, Wait)


def _turn(op: Op) -> int:
    """The order at one place: a slot is free before it is used again, and collectives start before the rank waits."""
    return _ORDER_AT_ONE_PLACE.index(type(op))


class _Run(NamedTuple):
    """Passes of one stage that need its weights: the positions of the first one, and behind the last one."""

    stage: int
    begin: int
    end: int


def _runs(passes: Sequence[Pass]) -> list[_Run]:
    needing = [(p.stage, place) for place, p in enumerate(passes) if p.kind in NEED_WEIGHTS]
    runs = []
    for stage, group in groupby(needing, key=lambda each: each[0]):
        places = [place for _, place in group]
        runs.append(_Run(stage, places[0], places[-1] + 1))
    return runs


class _Resident(NamedTuple):
    """A stage with whole weights: its slot, and its last run so far."""

    slot: int
    last: _Run


def _weights(passes: Sequence[Pass], open_chunks: int) -> Iterator[tuple[int, Op]]:
    """The ops on weights, each with the number of passes before it."""
    runs = _runs(passes)
    later: defaultdict[int, list[int]] = defaultdict(list)  # by stage: the numbers of its runs, last one first
    for number in reversed(range(len(runs))):
        later[runs[number].stage].append(number)

    def next_run(stage: int) -> int:
        return later[stage][-1] if later[stage] else len(runs)

    resident: dict[int, _Resident] = {}
    free = list(reversed(range(open_chunks)))
    current: int | None = None
    for number, run in enumerate(runs):
        later[run.stage].pop()
        start = runs[number - 1].begin if number else 0
        if run.stage not in resident:
            if not free:
                victims = [stage for stage in resident if stage != current] or list(resident)
                victim = max(victims, key=next_run)
                slot, last = resident.pop(victim)
                yield last.end, ReleaseWeights(victim, slot)
                start = max(start, last.end)
                free.append(slot)
            slot = free.pop()
            yield start, Gather(run.stage, slot)
            yield run.begin, Wait(run.stage)
        else:
            slot = resident[run.stage].slot
        resident[run.stage] = _Resident(slot, run)
        current = run.stage
    for stage, (slot, last) in resident.items():
        yield last.end, ReleaseWeights(stage, slot)


def _gradients(passes: Sequence[Pass], unit_microbatches: int) -> Iterator[tuple[int, Op]]:
    """The ops on gradients, each with the number of passes before it."""
    stages = dict.fromkeys(p.stage for p in passes)
    units = [(end, begin, stage) for stage in stages for begin, end in _units(passes, stage, unit_microbatches)]
    opened: defaultdict[int, list[int]] = defaultdict(list)
    for _, begin, stage in units:
        opened[stage].append(begin)
    units.sort()
    for (end, begin, stage), following in zip_longest(units, units[1:]):
        yield begin, Open(stage)
        yield end, Reduce(stage)
        again = (later for later in opened[stage] if later >= end)
        yield min(len(passes) if following is None else following[0], *again, len(passes)), Close(stage)


def _units(passes: Sequence[Pass], stage: int, unit_microbatches: int) -> list[tuple[int, int]]:
    """For every unit of ``stage``, the positions of its first backward, and behind its last pass."""
    unit_of: dict[tuple[int, int], int] = {}  # by microbatch and slice
    ended: set[int] = set()  # microbatches of the current unit whose last slice has run its backward
    unit, last = 0, stage
    for p in passes:
        if p.kind not in (B, BW):
            continue
        if p.stage == stage:
            if last != stage and len(ended) >= unit_microbatches:
                unit, ended = unit + 1, set()
            unit_of[p.microbatch, p.slice] = unit
            if p.slice == 0:  # backwards of a microbatch end with its first slice
                ended.add(p.microbatch)
        last = p.stage
    bounds: dict[int, tuple[int, int]] = {}
    for place, p in enumerate(passes):
        if p.stage == stage and p.kind in NEED_GRADIENTS:
            number = unit_of[p.microbatch, p.slice]
            bounds[number] = bounds.get(number, (place, 0))[0], place + 1
    return _apart([bounds[number] for number in sorted(bounds)])


def _apart(units: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge units that overlap: the gradients of a stage are in one place."""
    merged: list[tuple[int, int]] = []
    for begin, end in units:
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def check_chunks(placement: Placement) -> None:
    """Raise UserError for one stage per rank, whose weights would be whole all the time."""
    chunks = placement.num_stages // placement.num_ranks
    if chunks < 2:
        raise UserError(
            "sharded units need 2 or more stages per rank, of which only some are whole at a time; got 1; choose a "
            "schedule with several stages per rank, such as zero-pp"
        )
