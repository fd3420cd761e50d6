"""The watchdog names the pass and what its GPU waits for in vain, by NCCL's rules on simulated GPUs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zero_bubble import Pass, build
from megatron.zero_bubble.core.errors import PeerError
from megatron.zero_bubble.core.ir import Message, Value
from megatron.zero_bubble.core.ir.collectives import Spread
from megatron.zero_bubble.core.ir.shards import Gather
from megatron.zero_bubble.core.plan import lower
from megatron.zero_bubble.engine.runtime import watchdog as watchdogs
from megatron.zero_bubble.engine.runtime.collectives import Lanes, Transfer, collective_handlers
from megatron.zero_bubble.engine.runtime.handler import Awaited
from megatron.zero_bubble.engine.runtime.shards import Sharder
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog
from tests.engine.runtime.test_collectives import plan_with_vocabulary
from tests.engine.runtime.test_nccl import Iteration
from tests.engine.runtime.test_shards import TwoReplicas
from tests.helpers.nccl import COMPUTE, Event, GPUs, Marks

FORWARD = Message(Value(Pass.parse("0F3")), 0, 1)
NOT_RECEIVED = (
    "pipeline rank 1 could not run 1F3: the output of 0F3 did not arrive from pipeline rank 0 on channel 0>1 (the GPU "
    "has waited 90 s); rank 0 has failed or hangs: look at its output first"
)
NOT_SENT = (
    "pipeline rank 0 could not deliver the output of 0F3 to pipeline rank 1 on channel 0>1 (the GPU has waited 90 s); "
    "rank 1 has failed or hangs: look at its output first"
)


def watched(gpus: GPUs) -> list[Watchdog]:
    return [Watchdog(Marks(gpus, rank), timedelta(seconds=100)) for rank in range(gpus.num_ranks)]


@pytest.mark.parametrize(("end", "text"), [("receive", NOT_RECEIVED), ("send", NOT_SENT)])
def test_a_gpu_that_waits_too_long_is_named_with_pass_and_channel(end: str, text: str) -> None:
    gpus = GPUs(2)
    both = watched(gpus)
    ends = gpus.transports(frozenset({FORWARD.channel}), both)
    assert gpus.run()
    waits = both[1 if end == "receive" else 0]
    gpus.compute(waits._marks.rank, lambda: None)  # type: ignore[attr-defined]
    if end == "receive":
        ends[1].post(FORWARD, torch.zeros(1)).wait(Pass.parse("1F3"))
    else:
        ends[0].send(FORWARD, torch.ones(1))
        ends[0].settle(FORWARD)
    assert waits.check(0.0) is None, "the GPU has not reached the wait"
    assert waits.check(1000.0) is None
    assert not gpus.run()
    assert waits.check(1000.0) is None, "the GPU begins to wait"
    assert waits.check(1089.0) is None
    error = waits.check(1090.0)
    assert isinstance(error, PeerError)
    assert str(error) == text


def test_a_message_that_arrives_late_starts_the_next_wait_anew() -> None:
    gpus = GPUs(2)
    both = watched(gpus)
    sender, receiver = gpus.transports(frozenset({FORWARD.channel}), both)
    following = FORWARD.later(1)
    for message in (FORWARD, following):
        receiver.post(message, torch.zeros(1)).wait(Pass.parse("1F3"))
    assert not gpus.run()
    assert both[1].check(0.0) is None
    sender.send(FORWARD, torch.ones(1))
    assert not gpus.run()
    assert both[1].check(89.0) is None
    assert both[1].check(178.0) is None, "the second message is awaited since 89 s only"
    assert "the output of 0F4 did not arrive" in str(both[1].check(179.0))
    sender.send(following, torch.ones(1))
    assert gpus.run()
    assert both[1].check(1000.0) is None


def test_watchdog_keeps_no_message() -> None:
    """It sees the end of a wait up to a second later, in which a rank may handle gigabytes of messages."""
    gpus = GPUs(2)
    sender, receiver = gpus.transports(frozenset({FORWARD.channel}), watched(gpus))
    sender.send(FORWARD, torch.ones(1))
    receive = receiver.post(FORWARD, torch.zeros(1))
    buffers = [weakref.ref(receive.wait(Pass.parse("1F3"))), weakref.ref(sender._in_flight[FORWARD][1])]
    sender.settle(FORWARD)
    del receive
    assert gpus.run()
    assert [buffer() for buffer in buffers] == [None, None]


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_every_rank_that_waits_for_a_stopped_rank_says_so(stopped: int) -> None:
    """Only the neighbours of the rank that hangs wait for it; the others wait for ranks that wait."""
    plan = lower(build("zb-h1", num_ranks=3, num_microbatches=3))
    gpus = GPUs(3)
    all_three = watched(gpus)
    transports = gpus.transports(plan.channels, all_three)
    assert gpus.run()
    Iteration(plan, gpus, [each for each in transports if each.rank != stopped]).issue()
    assert not gpus.run()
    for rank, each in enumerate(all_three):
        each.check(0.0)
        error = each.check(90.0)
        assert (error is None) is (rank == stopped), error
        if abs(rank - stopped) == 1:
            assert f"; rank {stopped} has failed or hangs" in str(error)


class OnLane:
    """A ``Lane`` whose collectives wait for ``arrived``."""

    def __init__(self, gpus: GPUs, rank: int) -> None:
        self._gpus, self._stream, self.arrived = gpus, (rank, COMPUTE), Event()

    def start(self, work: Callable[[], Any], uses: Iterable[torch.Tensor]) -> OnLane:
        self.made = work()
        return self

    def wait(self) -> Any:
        self._gpus.wait(self._stream, self.arrived)
        return self.made


class ThreeRanks:
    """What ``Lanes`` takes for the group of a pipeline, and its transfers."""

    def spread(self, value: Value, held: Any, root: int) -> Transfer:
        return Transfer(lambda group: None, (), lambda: torch.ones(1))


def start_spread(lane: OnLane, watchdog: Watchdog) -> Awaited:
    """A collective of vocabulary parallelism that rank 1 of 3 takes part in."""
    plan = plan_with_vocabulary("zb-h1", 1)
    lanes = Lanes(ThreeRanks(), lambda: lane, None, watchdog=watchdog)  # type: ignore[arg-type]
    op = next(op for op in plan.ops[1] if isinstance(op, Spread))
    lanes._lanes[op.lane] = lane, ThreeRanks()  # type: ignore[assignment]
    (awaited,) = collective_handlers(plan, lanes, ThreeRanks())[Spread](op, [])  # type: ignore[arg-type]
    return awaited


def start_gather(lane: OnLane, watchdog: Watchdog) -> Awaited:
    """The gathering of the weights of a sharded unit."""
    chunk, sharder = TwoReplicas(), Sharder(lane, watchdog)  # type: ignore[arg-type]
    sharder.keep({0: chunk})
    (awaited,) = sharder.handlers(None)[Gather](Gather(0, 0), ())
    return awaited


MISSED = (
    "pipeline rank 1 could not run 1I0: not all ranks took part in the collective for 0I0:tokens (the GPU has waited 90"
)
NOT_GATHERED = (
    "not all data-parallel replicas took part in 0:gather@0 (the GPU has waited 90 s); a rank has failed or hangs"
)


@pytest.mark.parametrize(("start", "text"), [(start_spread, MISSED), (start_gather, NOT_GATHERED)])
def test_a_collective_on_a_lane_is_named_with_the_pass(start: Callable[..., Awaited], text: str) -> None:
    gpus = GPUs(3)
    watchdog, lane = watched(gpus)[1], OnLane(gpus, 1)
    awaited = start(lane, watchdog)
    result = awaited.wait(Pass.parse("1I0"))
    assert not gpus.run()
    assert watchdog.check(0.0) is None
    assert str(watchdog.check(90.0)).startswith(text)
    if result is not None:
        kept = weakref.ref(result)
        del result, awaited
        lane.made = None
        assert kept() is None, "the watchdog keeps no result"
    lane.arrived.reached = True
    assert gpus.run()
    assert watchdog.check(1000.0) is None


@contextmanager
def running(watchdog: Watchdog) -> Iterator[None]:
    watchdog.start()
    try:
        yield
    finally:
        watchdog.close()


def test_the_thread_gives_up_once_and_ends_the_process_by_default() -> None:
    gpus, errors, given_up = GPUs(2), [], threading.Event()

    def give_up(error: PeerError) -> None:
        errors.append(str(error))
        given_up.set()

    watchdog = Watchdog(Marks(gpus, 1), timedelta(seconds=0.2), give_up)
    _, receiver = gpus.transports(frozenset({FORWARD.channel}), [watchdog, watchdog])
    assert gpus.run()
    with running(watchdog):
        receiver.post(FORWARD, torch.zeros(1)).wait(Pass.parse("1F3"))
        assert not gpus.run()
        assert given_up.wait(10.0)
    assert len(errors) == 1
    assert errors[0].startswith("pipeline rank 1 could not run 1F3")
    with mock.patch.multiple(watchdogs, report=mock.DEFAULT, end_process=mock.DEFAULT, dist=mock.DEFAULT) as patched:
        patched["dist"].get_rank.return_value = 5
        watchdogs._end(PeerError("a reason"))
    patched["report"].assert_called_once_with("rank 5: a reason")
    patched["end_process"].assert_called_once_with(1)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_ends_when_it_is_closed_or_the_gpu_fails() -> None:
    class BrokenMarks(Marks):
        def reached(self, mark: object) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpus = GPUs(1)
    for marks, closes in ((Marks(gpus, 0), True), (BrokenMarks(gpus, 0), False)):
        watchdog = Watchdog(marks, timedelta(seconds=0.2), pytest.fail)
        watchdog.wait(mock.Mock(), mock.Mock())
        watchdog.start()
        if closes:
            watchdog.close()
        watchdog._thread.join(10.0)
        assert not watchdog._thread.is_alive()
