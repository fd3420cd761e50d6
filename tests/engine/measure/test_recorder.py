"""Tests of the recorder: a recording has every pass, send and receive, in a possible order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble import PassCosts, Schedule, build, simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.analysis.trace import Trace
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Compute, Kind, Message, Pass, Plan, Recv, Send, Settle, Validate, Value
from megatron.zero_bubble.core.ir.collectives import AllGather, Collective
from megatron.zero_bubble.core.ir.vocabulary import Algorithm, algorithm_of
from megatron.zero_bubble.core.plan import communicate, lower, plan_of, with_validation
from megatron.zero_bubble.core.search.vocabulary import with_vocabulary
from megatron.zero_bubble.engine.measure.clocks import Offset
from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.engine.measure.recorder import Recorder, UnreadMarks, _Origin
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.cpu import CpuPlatform
from megatron.zero_bubble.engine.runtime.groups import Directions
from megatron.zero_bubble.engine.runtime.handler import STOP, Awaited
from megatron.zero_bubble.engine.runtime.handlers import handlers
from megatron.zero_bubble.engine.runtime.transport import Transport
from tests.helpers.emulate.execute import execute
from tests.helpers.emulate.stages import SleepingStage
from tests.helpers.ranks import RankPool

PASS_MS = 4.0
MARK = select("cpu").mark


def recorded(_rank: int, schedule: Schedule) -> Trace:
    assert dist.group.WORLD is not None
    plan = lower(schedule, (communicate, with_validation))
    transport = Transport(Directions.of(dist.group.WORLD), plan.channels)
    costs = PassCosts.uniform(schedule.placement, PASS_MS, PASS_MS, PASS_MS)
    recorder = Recorder(select("cpu"))
    recorder.start(dist.group.WORLD)
    execute(plan, SleepingStage(schedule, costs, (8,)), transport, observer=recorder)
    trace = gather_trace(schedule.name, recorder.stop(), dist.group.WORLD)
    assert not recorder.is_on
    return trace


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_every_event_of_an_iteration_is_recorded(ranks: RankPool, name: str) -> None:
    schedule = build(name, num_ranks=3, num_microbatches=4)
    plan = lower(schedule)
    traces = ranks.run(3, recorded, schedule)
    assert traces[0] == traces[1] == traces[2]
    trace: Trace = traces[0]
    assert trace.timeline.schedule.order == schedule.order
    assert trace.timeline.schedule.placement == schedule.placement
    assert trace.timeline.start_ms == 0.0
    for row, ops in zip(trace.ranks, plan.ops, strict=True):
        assert [sent[:2] for sent in row.sends] == [
            (op.message.producer, op.message.target) for op in ops if isinstance(op, Send)
        ]
        assert sorted(received[:2] for received in row.receives) == sorted(
            (op.message.producer, op.message.source) for op in ops if isinstance(op, Recv)
        )
        assert len(row.settles) == sum(isinstance(op, Settle) for op in ops)
        assert len(row.validations) == 1
        assert row.clock_error_ms >= 0.0
        for event in (*row.settles, *row.validations):
            assert event.start_ms <= event.end_ms


def test_recorded_times_of_all_ranks_are_consistent(ranks: RankPool) -> None:
    """No message arrives before it is sent or is used before it arrives, and waiting never overlaps a pass."""
    schedule = build("zb-v", num_ranks=3, num_microbatches=4)
    trace: Trace = ranks.run(3, recorded, schedule)[0]
    spans = {span.pass_: span for row in trace.timeline.spans for span in row}
    sent = {(sent.producer, rank): sent for rank, row in enumerate(trace.ranks) for sent in row.sends}
    for rank, row in enumerate(trace.ranks):
        for producer, source, posted_ms, awaited_ms, arrived_ms in row.receives:
            assert posted_ms <= awaited_ms <= arrived_ms
            step = 1 if producer.kind is Kind.F else -1
            consumer = spans[producer._replace(stage=producer.stage + step)]
            assert spans[producer].end_ms <= sent[producer, source].at_ms
            assert arrived_ms <= consumer.start_ms
            assert arrived_ms >= spans[producer].end_ms
            for span in trace.timeline.spans[rank]:
                assert span.end_ms <= awaited_ms or span.start_ms >= arrived_ms


class _Peer(Awaited):
    """A transport whose peer accepts and sends everything; records the times of the calls."""

    def __init__(self) -> None:
        self.posted: list[float] = []
        self.waited: list[float] = []
        self.settled: list[float] = []

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        pass

    def settle(self, message: Message) -> None:
        self.settled.append(MARK())

    def post(self, message: Message, buffer: torch.Tensor) -> _Peer:
        self.posted.append(MARK())
        return self

    def wait(self, needed_by: object) -> torch.Tensor:
        self.waited.append(MARK())
        return torch.zeros(1)


def test_wait_is_between_its_marks() -> None:
    """Holds even for very short waits."""
    recorder = Recorder(select("cpu"))
    recorder._origin = recorder._new_origin(Offset())
    peer = _Peer()
    ops = handlers({}, peer, lambda _: torch.zeros(1), recorder)
    message = Message(Value(Pass(0, Kind.F, 0)), 0, 1)
    receive = ops[Recv](Recv(message), [])[0]
    meanwhile = MARK()
    receive.wait("1F0")
    ops[Settle](Settle(message), [])
    marks = recorder.stop()
    ((_, posted, awaited, arrived),) = marks.received
    assert posted <= peer.posted[0] <= meanwhile <= awaited <= peer.waited[0] <= arrived
    ((_, start, end),) = marks.settled
    assert arrived <= start <= peer.settled[0] <= end


def test_restarted_iteration_drops_earlier_records() -> None:
    """After a rejected step, records before its validation are not part of the iteration."""
    recorder = Recorder(select("cpu"))
    recorder._origin = recorder._new_origin(Offset())
    for right in (False, True):
        ops = handlers({}, _Peer(), lambda _: torch.zeros(1), recorder, lambda right=right: right)
        for microbatch in (0, 1):
            work = Pass(0, Kind.F, microbatch)
            recorder.begin(Compute(work))
            recorder.end(Compute(work))
            ops[Send](Send(Message(Value(work), 0, 1)), [torch.zeros(1)])
        assert (ops[Validate](Validate(), []) is STOP) is not right
        ops[Settle](Settle(Message(Value(Pass(0, Kind.F, 0)), 0, 1)), [])
        if not right:
            recorder.restarted()
    row = recorder.stop().times()
    assert [str(span.pass_) for span in row.spans] == ["0F0", "0F1"]
    assert [str(sent.producer) for sent in row.sends] == ["0F0", "0F1"]
    assert len(row.settles) == len(row.validations) == 1


def test_stopped_recorder_records_nothing() -> None:
    recorder = Recorder(select("cpu"))
    op, message = Compute(Pass.parse("0F0")), Message(Value(Pass.parse("0F0")), 0, 1)
    recorder.begin(op)
    recorder.end(op)
    recorder.posted(message)
    recorder.waiting()
    recorder.received(message)
    recorder.settled(message)
    recorder.sent(message)
    recorder.validated(True)
    recorder.restarted()
    with pytest.raises(AssertionError, match="without start"):
        recorder.stop()


class Clock(CpuPlatform):
    """A clock whose time is set by the test."""

    now_ms = 0.0

    def mark(self) -> float:
        return self.now_ms / 1e3


def replayed(plan: Plan, timeline: Timeline, rank: int) -> UnreadMarks:
    """Record a rank that runs its plan exactly as simulated."""
    clock = Clock()
    recorder = Recorder(clock)
    recorder._origin = _Origin(0.0, 0.0, 0.0)
    recorder.planned(plan.schedule)
    passes = {span.pass_: span for span in timeline.spans[rank]}
    lanes = {span.op: span for span in timeline.lanes[rank]}
    for op in plan.ops[rank]:
        if isinstance(op, Compute):
            clock.now_ms = passes[op.work].start_ms
            recorder.begin(op)
            clock.now_ms = passes[op.work].end_ms
            recorder.end(op)
        elif isinstance(op, Collective):
            recorder.begin(op)
            issued_ms, clock.now_ms = clock.now_ms, lanes[op].start_ms
            recorder.started(op)
            clock.now_ms = issued_ms
            recorder.end(op)
            clock.now_ms = lanes[op].end_ms
            recorder.completed(op)
            clock.now_ms = issued_ms
    return recorder.stop()


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_recorded_costs_of_a_divided_vocabulary_predict_the_iteration(name: str, algorithm: Algorithm) -> None:
    """On a virtual clock, so exactly; the collectives are recorded where they run, not where they are issued."""
    schedule = build(name, num_ranks=3, num_microbatches=6)
    costs = PassCosts.uniform(schedule.placement, 5.0, 6.0, 4.0, comm_ms=0.5)
    costs = replace(costs, vocabulary=VocabularyCosts.uniform(3, 3.0, 2.0, 0.3, 0.4, collective_ms=0.7))
    plan = plan_of(with_vocabulary(schedule, costs, algorithm, lag=0.5, delay=True))
    planned = simulate(plan, costs)
    marks = [replayed(plan, planned, rank) for rank in range(3)]
    ran = marks[0].schedule
    assert ran is not None
    trace = Trace.of(name, tuple(row.times() for row in marks), ran.slices, ran.make_flow)
    assert trace.timeline.schedule.order == plan.schedule.order
    assert algorithm_of(trace.timeline.schedule) == algorithm
    for measured, due in zip(trace.timeline.lanes, planned.lanes, strict=True):
        assert {(span.op, span.lane) for span in measured} == {(span.op, span.lane) for span in due}
    spans = [span for row in trace.ranks for span in row.lanes if not isinstance(span.op, AllGather)]  # takes no time
    lengths = {span.end_ms - span.start_ms for span in spans}
    assert min(lengths) == pytest.approx(0.7) and max(lengths) == pytest.approx(0.7)
    predicted = simulate(plan, median_costs([trace.timeline]))
    assert predicted.makespan_ms == pytest.approx(trace.timeline.makespan_ms)


def test_collectives_that_complete_after_the_iteration_are_forgotten() -> None:
    schedule = build("zb-h1", num_ranks=2, num_microbatches=1)
    plan = plan_of(with_vocabulary(schedule, PassCosts.uniform(schedule.placement, 1, 1, 1), 2))
    op = next(op for op in plan.ops[0] if isinstance(op, Collective))
    recorder = Recorder(select("cpu"))
    for _ in range(2):
        recorder._origin = recorder._new_origin(Offset())
        recorder.completed(op)  # that of the iteration before
        recorder.started(op)
        assert recorder.stop().lanes == []
