"""Copies of both directions at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.core.ir.offload import Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.streams import ThreadLane
from megatron.zero_bubble.engine.runtime.offload import Offloader
from megatron.zero_bubble.engine.runtime.saved import SavedTensors, unpack
from tests.engine.runtime.test_offload import SIZE, Rank


def test_host_memory_that_a_copy_back_still_reads_is_not_overwritten() -> None:
    """The copies of two forwards, one back and one to the host, run at the same time."""
    saved, host, out, back = SavedTensors(), select("cpu").host_memory(), ThreadLane(), ThreadLane()
    offloader, may_read = Offloader(saved, host, out, back), threading.Event()
    by_op = offloader.handlers(None)

    def saved_by(forward: Pass, value: float) -> Any:
        saved.expect([forward])
        return saved.around(lambda _op, _inputs: saved.pack(torch.full(SIZE, value)), [])(Compute(forward), ())

    def away(forward: Pass) -> Any:
        (leaving,) = by_op[Evict](Evict(forward), ((None, None),))
        return by_op[ReleaseDevice](ReleaseDevice(forward), (leaving.wait("release"),))[0]

    first, second = (Pass(0, Kind.F, microbatch) for microbatch in (0, 1))
    packed = saved_by(first, 1.0)
    on_host = away(first)
    back.start(may_read.wait, ())
    (coming,) = by_op[Fetch](Fetch(first), (on_host,))
    other = saved_by(second, 2.0)
    other_on_host = away(second)
    may_read.set()
    by_op[Reclaim](Reclaim(first), (coming.wait("reclaim"),))
    assert torch.equal(unpack(packed), torch.full(SIZE, 1.0))
    (coming,) = by_op[Fetch](Fetch(second), (other_on_host,))
    by_op[Reclaim](Reclaim(second), (coming.wait("reclaim"),))
    assert torch.equal(unpack(other), torch.full(SIZE, 2.0))
    assert host.used == 0 < host.peak
    assert offloader.close()


@pytest.mark.parametrize("direction", ["_out", "_back"])
def test_failed_iteration_waits_for_the_copies_of_either_direction(direction: str) -> None:
    """Else later copies could take the same host memory."""
    rank, ended = Rank(SavedTensors(), select("cpu").host_memory()), list[bool]()
    x = torch.randn(SIZE, requires_grad=True)

    def slow() -> None:
        time.sleep(0.1)
        ended.append(True)

    def fail() -> None:
        with rank.offloader.iteration():
            rank.evict(x, rank.forward(lambda: x.exp().sum()))
            getattr(rank.offloader, direction).start(slow, ())
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert ended and rank.host.used == 0
    assert rank.offloader.close()
