"""A new kind of op, defined outside the package, is proved, simulated, executed, recorded and drawn.

The op copies a forward's saved tensors to the host, on a lane of its own, which frees memory until they are copied
back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, PassMemory, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.analysis.memory import memory_curve
from megatron.zero_bubble.core.analysis.timeline import LaneSpan, Span
from megatron.zero_bubble.core.analysis.trace import Trace
from megatron.zero_bubble.core.errors import PlanError
from megatron.zero_bubble.core.formats.trace import Recording, trace_from_json, trace_to_json
from megatron.zero_bubble.core.ir import Compute, Effects, Flow, Kind, Op, Plan, Slices, Value
from megatron.zero_bubble.core.ir.flow import SAVED
from megatron.zero_bubble.core.ir.ops import OPS, Memory, Times
from megatron.zero_bubble.core.ir.passes import later
from megatron.zero_bubble.core.ir.plan import Unrolled
from megatron.zero_bubble.core.plan import alike, communicate, lower, prove, with_validation
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

COPY, COPY_MS = "copy", 4.0


@dataclass(frozen=True, slots=True)
class _Copy(Op):
    value: Value
    lane: ClassVar[str] = COPY
    word: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.word}({self.value})"

    @property
    def on_host(self) -> Value:
        return self.value._replace(name="host")

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return COPY_MS

    def later(self, by: int) -> _Copy:
        return type(self)(later(self.value, by))

    @classmethod
    def parse(cls, text: str, rank: int) -> _Copy | None:
        match = re.fullmatch(rf"{cls.word}\((.*)\)", text)
        return cls(Value.parse(match[1])) if match else None


class Offload(_Copy):
    __slots__ = ()
    word = "off"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.value,), gives=(self.on_host,))

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        return 0.0, -memory.size(self.value, slices)


class Reload(_Copy):
    __slots__ = ()
    word = "on"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.on_host,), gives=(self.value,))

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        return memory.size(self.value, slices), 0.0


@alike
def offload(plan: Plan) -> Plan:
    """Lowering pass: offload microbatches whose backward is more than four passes away; reload two passes before it."""
    return replace(plan, ops=tuple(map(_with_copies, plan.ops)))


def _with_copies(row: tuple[Op, ...]) -> tuple[Op, ...]:
    passes = [op.work for op in row if isinstance(op, Compute)]
    back = {(p.stage, p.microbatch): place for place, p in enumerate(passes) if p.kind in (Kind.B, Kind.BW)}
    away = {p: back[p.stage, p.microbatch] for place, p in enumerate(passes) if p.kind is Kind.F}
    away = {p: end for p, end in away.items() if end - passes.index(p) > 4}
    ops: list[Op] = []
    for op in row:
        if isinstance(op, Compute):
            ops += [Reload(Value(p, SAVED)) for p, end in away.items() if passes[end - 2] == op.work]
        ops.append(op)
        if isinstance(op, Compute) and op.work in away:
            ops.append(Offload(Value(op.work, SAVED)))
    return tuple(ops)


def schedule_and_costs(name: str) -> tuple[Schedule, PassCosts, PassMemory]:
    schedule = build(name, num_ranks=4, num_microbatches=8)
    on = schedule.placement
    return schedule, PassCosts.uniform(on, 5.0, 6.0, 4.0, 0.5), PassMemory.uniform(on, 8.0, 2.0)


def offloaded(name: str) -> Plan:
    return lower(schedule_and_costs(name)[0], (communicate, offload))


NAMES = ("zb-h1", "zb-h2", "zb-v", "interleaved-1f1b")


@pytest.mark.parametrize("name", NAMES)
def test_offload_lowers_the_peak_memory(name: str) -> None:
    schedule, costs, memory = schedule_and_costs(name)
    without, timeline = simulate(schedule, costs, memory), simulate(offloaded(name), costs, memory)
    assert max(timeline.peak_activation) < max(without.peak_activation)
    for curve in memory_curve(timeline, memory):
        assert curve[-1].amount == pytest.approx(0.0)
        assert min(kept.amount for kept in curve) >= -1e-9
    for row in timeline.lanes:
        assert all(before.end_ms <= after.start_ms for before, after in pairwise(row))
        assert {span.lane for span in row} <= {COPY}


def test_backward_waits_for_its_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies slower than the passes in between, the plan takes longer than without offloading."""
    monkeypatch.setattr(sys.modules[__name__], "COPY_MS", 15.0)
    schedule, costs, _ = schedule_and_costs("zb-h2")
    timeline = simulate(offloaded("zb-h2"), costs)
    ends = {(rank, str(span.op)): span.end_ms for rank, row in enumerate(timeline.lanes) for span in row}
    for rank, row in enumerate(timeline.spans):
        for p, start_ms, _ in row:
            if p.kind is Kind.B:
                saved = Value(p._replace(kind=Kind.F), SAVED)
                assert start_ms >= ends.get((rank, str(Reload(saved))), 0.0)
    assert timeline.makespan_ms > simulate(schedule, costs).makespan_ms


@pytest.mark.parametrize("passes", sorted(permutations(("communicate", "offload", "with_validation"))), ids=str)
def test_lowering_passes_can_run_in_any_order(passes: tuple[str, ...]) -> None:
    """When the ranks stop after a rejected optimizer step, values on the host are dropped like all others."""
    if passes.index("with_validation") < passes.index("communicate"):
        pytest.skip("with_validation drains the channels that communicate creates")
    by_name = {"communicate": communicate, "offload": offload, "with_validation": with_validation}
    plan = lower(schedule_and_costs("zb-h2")[0], [by_name[name] for name in passes])
    assert plan.drain
    assert sum(isinstance(op, Offload) for row in plan.ops for op in row) == sum(
        isinstance(op, Offload) for row in offloaded("zb-h2").ops for op in row
    )


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-1f1b"])
def test_a_plan_with_the_op_stores_what_repeats_once(name: str) -> None:
    """Because the lowering pass is declared ``alike`` and the op has a ``later``; the ops are the same without them."""

    def undeclared(plan: Plan) -> Plan:
        return offload(plan)

    schedule = build(name, num_ranks=4, num_microbatches=96)
    plan = lower(schedule, (communicate, offload))
    assert isinstance(plan.ops, Unrolled)
    in_full = lower(schedule, (communicate, undeclared))
    assert isinstance(in_full.ops, tuple)
    assert plan.ops == in_full.ops
    stored, repeated = (
        sum(isinstance(op, Offload) for row in of for op in row) for of in (plan.ops.stem.ops, plan.ops)
    )
    assert 0 < stored < repeated / 2


def test_text_form_round_trip() -> None:
    plan = offloaded("zb-h2")
    read = plan_from_text(plan.schedule, plan.to_text(), (Offload, Reload, *OPS))
    assert read.ops == plan.ops and read.digest == plan.digest


def _place(row: tuple[Op, ...], kind: type[Op]) -> int:
    return next(place for place, op in enumerate(row) if isinstance(op, kind))


def without_reload(row: tuple[Op, ...]) -> tuple[Op, ...]:
    at = _place(row, Reload)
    return (*row[:at], *row[at + 1 :])


def reloaded_late(row: tuple[Op, ...]) -> tuple[Op, ...]:
    at = _place(row, Reload)
    return (*row[:at], *row[at + 1 :], row[at])


def offloaded_early(row: tuple[Op, ...]) -> tuple[Op, ...]:
    at = _place(row, Offload)
    return (row[at], *row[:at], *row[at + 1 :])


def offloaded_at_the_end(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Offload a value after its last use."""
    away, back = row[_place(row, Offload)], row[_place(row, Reload)]
    return (*(op for op in row if op not in (away, back)), away)


def never_fetched(row: tuple[Op, ...]) -> tuple[Op, ...]:
    """Reload a value that is not on the host."""
    return (*row, Reload(Value(row[0].work, SAVED)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (without_reload, "is used by 0B0 but is not there: it is not computed yet, or it was moved away"),
        (reloaded_late, "is used by 0B0 but is not there"),
        (offloaded_early, "is used by off\\(0F0:saved\\) but is not there"),
        (offloaded_at_the_end, "is used by off\\(0F0:saved\\) but is not there"),
        (never_fetched, "needs 0F0:host, which rank 0 does not have"),
    ],
)
def test_misplaced_ops_are_rejected(edit: Callable[[tuple[Op, ...]], tuple[Op, ...]], what: str) -> None:
    plan = offloaded("zb-h2")
    prove(plan)
    with pytest.raises(PlanError, match=what):
        prove(replace(plan, ops=(edit(plan.ops[0]), *plan.ops[1:])))


def test_value_left_on_the_host_is_rejected() -> None:
    """No op reloads the value, so the proof must report it as left behind."""

    class Keep(Offload):
        __slots__ = ()

        def effects(self, flow: Flow) -> Effects:
            return Effects(gives=(self.on_host,))

    plan = offloaded("1f1b")
    row = (*plan.ops[0], Keep(Value(plan.ops[0][0].work, SAVED)))  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="off\\(0F0:saved\\) leaves 0F0:host behind"):
        prove(replace(plan, ops=(row, *plan.ops[1:])))


Ran = tuple[list[Span], list[LaneSpan], Trace]


def run(rank: int, plan: Plan, costs: PassCosts) -> Ran:
    """Execute the plan; return this rank's spans and lanes on the virtual clock, and the recording of all ranks."""
    assert dist.group.WORLD is not None
    transport, clock = Transport(Directions.of(dist.group.WORLD), plan.channels), VirtualClock()

    def copy(op: _Copy, inputs: Sequence[Any]) -> list[torch.Tensor]:
        (held,) = inputs
        end_ms = clock.occupy(op, float(held[0]), COPY_MS)
        return [torch.full_like(held, end_ms)]

    recorder = Recorder(select("cpu"))
    recorder.start(dist.group.WORLD)
    execute(
        plan,
        VirtualStage(plan.schedule, costs, clock),
        VirtualLinks(transport, costs),
        observer=recorder,
        more={Offload: copy, Reload: copy},
    )
    trace = gather_trace(plan.schedule.name, recorder.stop(), dist.group.WORLD)
    transport.close()
    return clock.spans, clock.lanes, trace


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_op_is_executed_as_planned_recorded_and_drawn(ranks: RankPool, name: str) -> None:
    _, costs, memory = schedule_and_costs(name)
    plan = offloaded(name)
    planned = simulate(plan, costs, memory)
    rows: list[Ran] = ranks.run(4, run, plan, costs)
    for rank, (spans, lanes, _) in enumerate(rows):
        assert tuple(spans) == planned.spans[rank]
        assert tuple(lanes) == planned.lanes[rank]
    trace = rows[0][2]
    copies = [[str(op) for op in row if isinstance(op, _Copy)] for row in plan.ops]
    assert [[str(span.op) for span in row.lanes] for row in trace.ranks] == copies
    read = trace_from_json(trace_to_json(Recording(costs, {1: trace}, memory)))
    assert [[(span.lane, span.op) for span in row.lanes] for row in read.traces[1].ranks] == [
        [(COPY, text) for text in row] for row in copies
    ]
    assert read.compared(1).memory is None, "ops read from a file have no memory effects"
    drawn = render_svg(planned, trace.timeline)
    names = [name for names in re.findall(r'class="lane"[^>]* data-numbers="([^"]*)"', drawn) for name in names.split()]
    assert sorted(names) == sorted(2 * [text for row in copies for text in row])
    assert ">copy</text>" in drawn
    events = render_perfetto(ComparedIteration(1, planned, trace, costs, memory))
    assert events.count('"name": "on(') == sum(name.startswith("on(") for name in names)
    assert events.count('"args": {"name": "copy"}') == 8
