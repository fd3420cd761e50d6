"""A flow, two collectives and their lowering pass, defined outside the package: broadcast and reduction of a value.

The last stage's output is broadcast to all ranks. Each rank runs one more stage on it, as a shard of an output layer
would, and the last stage's backward takes the sum of the shards' outputs. Both collectives are on the ``net`` lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import unescape
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import Kind, Pass, PassCosts, PassMemory, Placement, Schedule, simulate
from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span
from megatron.zero_bubble.core.analysis.trace import Trace
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.ir import Chain, Compute, Effects, Flow, Op, Plan, Send, Slices, Token, Value
from megatron.zero_bubble.core.ir.ops import NET, OPS, Rows, Times
from megatron.zero_bubble.core.plan import communicate, lower, prove
from megatron.zero_bubble.core.render.perfetto import render_perfetto
from megatron.zero_bubble.core.render.svg import render_svg
from megatron.zero_bubble.engine.measure.gather import gather_trace
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.clock import VirtualClock
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.links import VirtualLinks
from tests.helpers.emulate.stages import VirtualStage
from tests.helpers.plans import plan_from_text
from tests.helpers.ranks import RankPool

RANKS, MICROBATCHES, COLLECTIVE_MS, HOP_MS = 4, 6, 1.5, 0.5
PART = "part"
"""Name of a shard's output, its part of the sum."""


@dataclass(frozen=True)
class Sharded:
    """Stages 0 to p-1 are a chain; stages p to 2p-1 take the output of p-1, and p-1's backward takes their outputs."""

    chain: Chain

    @classmethod
    def of(cls, schedule: Schedule) -> Sharded:
        return cls(Chain(schedule.num_ranks))

    @property
    def sinks(self) -> tuple[int, ...]:
        return tuple(range(self.chain.num_stages, 2 * self.chain.num_stages))

    @property
    def last(self) -> int:
        return self.chain.num_stages - 1

    def parts(self, microbatch: int) -> tuple[Value, ...]:
        return tuple(Value(Pass(shard, Kind.F, microbatch), PART) for shard in self.sinks)

    def inputs(self, p: Pass) -> tuple[Value, ...]:
        if p.stage > self.last:
            return (Value(Pass(self.last, Kind.F, p.microbatch)),)
        if p.stage == self.last and p.kind is Kind.B:
            return (*self.parts(p.microbatch), *self.chain.inputs(p))
        return self.chain.inputs(p)

    def outputs(self, p: Pass) -> tuple[Value, ...]:
        if p.stage > self.last:
            return (Value(p, PART),)
        more = (Value(p),) if p.stage == self.last and p.kind is Kind.F else ()
        return (*more, *self.chain.outputs(p))

    def consumers(self, value: Value) -> tuple[Pass, ...]:
        p = value.producer
        if value.name == PART:
            return (Pass(self.last, Kind.B, p.microbatch),)
        if value == Value(Pass(self.last, Kind.F, p.microbatch)):
            return tuple(Pass(shard, Kind.F, p.microbatch) for shard in self.sinks)
        return self.chain.consumers(value)


def schedule() -> Schedule:
    """Return GPipe with the rank's shard passes after its forwards."""
    placement = Placement((*range(RANKS), *range(RANKS)))

    def row(rank: int) -> tuple[Pass, ...]:
        order = ((rank, Kind.F), (RANKS + rank, Kind.F), (rank, Kind.B), (rank, Kind.W))
        return tuple(Pass(stage, kind, m) for stage, kind in order for m in range(MICROBATCHES))

    return Schedule("sharded", placement, MICROBATCHES, tuple(map(row, range(RANKS))), make_flow=Sharded.of)


@dataclass(frozen=True, slots=True)
class _Collective(Op):
    microbatch: int
    rank: int
    lane: ClassVar[str] = NET
    word: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.word}{self.microbatch}"

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return COLLECTIVE_MS

    @classmethod
    def parse(cls, text: str, rank: int) -> _Collective | None:
        match = re.fullmatch(rf"{cls.word}(\d+)", text)
        return cls(int(match[1]), rank) if match else None

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Any:
        """Yield an error for each rank that runs the collectives in another order than rank 0."""
        orders = [[op.microbatch for op in row if isinstance(op, cls)] for row in rows]
        for rank, order in enumerate(orders):
            if order != orders[0]:
                yield f"rank {rank} runs {cls.word} in the order {order}, rank 0 in {orders[0]}", rank


class Spread(_Collective):
    """Broadcast the last rank's value to all other ranks."""

    __slots__ = ()
    word = "spread"

    def effects(self, flow: Flow) -> Effects:
        value, token = Value(Pass(RANKS - 1, Kind.F, self.microbatch)), Token("spread", self.microbatch)
        if self.rank == RANKS - 1:
            return Effects(uses=(value,), makes=(token,))
        return Effects(gives=(value,), waits=(token,))


class Sum(_Collective):
    """Sum all parts on the last rank, where the sum replaces the rank's own part."""

    __slots__ = ()
    word = "sum"

    def effects(self, flow: Flow) -> Effects:
        assert isinstance(flow, Sharded)
        parts = flow.parts(self.microbatch)
        if self.rank == RANKS - 1:
            others = tuple(Token("part", part) for part in parts[:-1])
            return Effects(takes=parts[-1:], gives=parts, waits=others)
        return Effects(takes=(parts[self.rank],), makes=(Token("part", parts[self.rank]),))


def collect(plan: Plan) -> Plan:
    """Lowering pass: insert Spread where values are made or used, and Sum where parts are made or used."""

    def row(rank: int, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        found: list[Op] = []
        for op in ops:
            assert isinstance(op, Compute)
            stage, kind, microbatch, _ = op.work
            if stage >= RANKS and rank < RANKS - 1:
                found.append(Spread(microbatch, rank))
            if stage == RANKS - 1 and kind is Kind.B:
                found.append(Sum(microbatch, rank))
            found.append(op)
            if stage == RANKS - 1 and kind is Kind.F:
                found.append(Spread(microbatch, rank))
            if stage >= RANKS and rank < RANKS - 1:
                found.append(Sum(microbatch, rank))
        return tuple(found)

    return replace(plan, ops=tuple(row(rank, ops) for rank, ops in enumerate(plan.ops)))


def lowered() -> Plan:
    return lower(schedule(), (collect, communicate))


def costs() -> PassCosts:
    return PassCosts((5.0,) * RANKS + (2.0,) * RANKS, (6.0,) * 2 * RANKS, (4.0,) * 2 * RANKS, HOP_MS)


def test_collectives_replace_messages() -> None:
    plan = lowered()
    prove(plan)
    hops = 2 * (RANKS - 1) * MICROBATCHES
    assert sum(isinstance(op, Send) for row in plan.ops for op in row) == hops
    by_messages = lower(schedule())
    assert sum(isinstance(op, Send) for row in by_messages.ops for op in row) == 2 * hops
    read = plan_from_text(plan.schedule, plan.to_text(), (Spread, Sum, *OPS))
    assert read.ops == plan.ops


def test_without_collectives_values_are_sent_as_messages() -> None:
    """The flow alone is enough to simulate the schedule; its messages arrive when the simulation expects the values."""
    bare, by_messages = simulate(schedule(), costs()), simulate(lower(schedule()), costs())
    assert bare.spans == by_messages.spans
    assert simulate(lowered(), costs()).makespan_ms > bare.makespan_ms


def used_before(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Run a shard before its input arrives."""
    at = next(place for place, op in enumerate(row) if isinstance(op, Spread))
    return (*row[:at], row[at + 1], row[at], *row[at + 2 :])


def never_summed(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Leave one part on its rank."""
    return tuple(op for op in row if op != Sum(MICROBATCHES - 1, 0))


def in_another_order(row: tuple[Op, ...]) -> tuple[Op, ...]:
    change = {Sum(0, 0): Sum(1, 0), Sum(1, 0): Sum(0, 0)}
    return tuple(change.get(op, op) if isinstance(op, Sum) else op for op in row)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (used_before, "the output of 3F0 is used by 4F0 but no receive was posted for it"),
        (never_summed, "rank 1 runs sum in the order"),
        (in_another_order, "rank 1 runs sum in the order"),
    ],
)
def test_misplaced_collective_is_rejected(edit: Callable[[tuple[Op, ...]], tuple[Op, ...]], what: str) -> None:
    plan = lowered()
    with pytest.raises(PlanError, match=what):
        prove(replace(plan, ops=(edit(plan.ops[0]), *plan.ops[1:])))


def test_missing_sum_is_rejected() -> None:
    plan = lowered()
    last = Sum(MICROBATCHES - 1, 0)
    rows = [
        tuple(op for op in row if not (isinstance(op, Sum) and op.microbatch == last.microbatch)) for row in plan.ops
    ]
    with pytest.raises(PlanError, match=r"leaves 4F5:part behind|is used by 3B5"):
        prove(replace(plan, ops=tuple(rows)))


def test_deadlock_between_collectives_is_rejected() -> None:
    """The last rank waits in Sum before the last Spread, while other ranks need that Spread before their Sum."""
    plan = lowered()
    row = list(plan.ops[-1])
    spread, total = row.index(Spread(MICROBATCHES - 1, RANKS - 1)), row.index(Sum(MICROBATCHES - 1, RANKS - 1))
    row.insert(total, row.pop(spread))
    with pytest.raises(PlanError, match="the ranks wait for each other"):
        prove(replace(plan, ops=(*plan.ops[:-1], tuple(row))))


class _Shards(VirtualStage):
    """Each shard outputs its stage number; the last stage's backward receives their sum."""

    def __init__(self, *of_a_stage: Any) -> None:
        super().__init__(*of_a_stage, 2)
        self.sums: list[float] = []

    def run(self, work: Pass, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if work.stage == RANKS - 1 and work.kind is Kind.B:
            self.sums.append(sum(float(part[1]) for part in inputs[:RANKS]))
        outputs = super().run(work, inputs)
        if work.stage >= RANKS:
            outputs[0][1] = work.stage
        return outputs


Ran = tuple[list[Span], list[LaneSpan], list[float], Trace]


def run(rank: int, plan: Plan) -> Ran:
    """Execute the plan; return this rank's spans, lanes and sums, and the recording of all ranks."""
    assert dist.group.WORLD is not None
    transport, clock = Transport(Directions.of(dist.group.WORLD), plan.channels), VirtualClock()
    last = RANKS - 1
    to_all, to_last = (
        dist.new_group(list(range(RANKS))) for _ in range(2)
    )  # one group per kind of collective, each with its own order
    under_way: list[Any] = []

    def spread(op: Spread, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
        ready = inputs[0].clone() if rank == last else torch.empty(2, dtype=torch.float64)
        if rank == last:
            ready[0] = clock.occupy(op, float(ready[0]), COLLECTIVE_MS)
        under_way.append(dist.broadcast(ready, last, group=to_all, async_op=True))
        if rank == last:
            return None
        under_way.pop().wait()
        ready[0] = clock.occupy(op, float(ready[0]) + HOP_MS, COLLECTIVE_MS)
        return [ready]

    def add(op: Sum, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
        (part,) = inputs
        total, times = part[1:].clone(), torch.zeros(RANKS, dtype=torch.float64)
        times[rank] = part[0] if rank == last else clock.occupy(op, float(part[0]), COLLECTIVE_MS) + HOP_MS
        both = torch.cat((total, times))
        work = dist.reduce(both, last, group=to_last, async_op=True)
        if rank < last:
            under_way.append((work, both))
            return None
        work.wait()
        total, times = both[:1], both[1:]
        end_ms = clock.occupy(op, float(times.max()), COLLECTIVE_MS)
        nothing = torch.tensor([end_ms, 0.0], dtype=torch.float64)
        return [nothing] * last + [torch.cat((nothing[:1], total))]

    stage, recorder = _Shards(plan.schedule, costs(), clock), Recorder(select("cpu"))
    recorder.start(dist.group.WORLD)
    execute(
        plan,
        stage,
        VirtualLinks(transport, costs()),
        observer=recorder,
        more={Spread: spread, Sum: add},
    )
    trace = gather_trace(plan.schedule.name, recorder.stop(), dist.group.WORLD)
    dist.barrier(to_all)
    dist.barrier(to_last)
    transport.close()
    dist.destroy_process_group(to_all)
    dist.destroy_process_group(to_last)
    return clock.spans, clock.lanes, stage.sums, trace


def test_collectives_are_executed_as_planned_recorded_and_drawn(ranks: RankPool) -> None:
    plan = lowered()
    planned = simulate(plan, costs())
    rows: list[Ran] = ranks.run(RANKS, run, plan)
    for rank, (spans, lanes, sums, _) in enumerate(rows):
        assert tuple(spans) == planned.spans[rank]
        assert tuple(lanes) == planned.lanes[rank]
        assert sums == ([float(sum(range(RANKS, 2 * RANKS)))] * MICROBATCHES if rank == RANKS - 1 else [])
    trace = rows[0][3]
    collectives = [[str(op) for op in row if isinstance(op, _Collective)] for row in plan.ops]
    assert [[str(span.op) for span in row.lanes] for row in trace.ranks] == collectives
    drawn = render_svg(planned)
    names = [name for names in re.findall(r'class="lane"[^>]* data-numbers="([^"]*)"', drawn) for name in names.split()]
    assert sorted(map(unescape, names)) == sorted(text for row in collectives for text in row)
    memory = PassMemory.uniform(plan.schedule.placement)
    measured = replace(trace, timeline=replace(trace.timeline, schedule=plan.schedule))
    events = render_perfetto(ComparedIteration(1, planned, measured, costs(), memory))
    assert events.count('"name": "spread') == 2 * RANKS * MICROBATCHES
