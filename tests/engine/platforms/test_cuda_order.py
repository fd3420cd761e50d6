"""Tests of the order of what the CUDA platform queues, on a fake GPU. Without any one of the orders, they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.core.ir.offload import Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.engine.optimizer import global_state
from megatron.zero_bubble.engine.optimizer.global_state import Reduction
from megatron.zero_bubble.engine.platforms import cuda as platform_module
from megatron.zero_bubble.engine.platforms.cuda import CudaPlatform, CudaResult, PinnedMemory
from megatron.zero_bubble.engine.platforms.streams import Lane, Result
from megatron.zero_bubble.engine.runtime.offload import Offloader
from megatron.zero_bubble.engine.runtime.saved import SavedTensors, unpack
from megatron.zero_bubble.integration.adapter import loss_reports
from megatron.zero_bubble.integration.adapter.loss_reports import LossReportList
from tests.engine.platforms.fake_cuda import POOL_SIZE, FakeCuda, FakeEvent, FakeStream, Unordered


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(CudaPlatform, "current_device", lambda self: torch.device("cpu"))
    for module in (global_state, loss_reports):
        monkeypatch.setattr(module, "select", lambda _type: CudaPlatform())
    platform_module._stream_for_copies.cache_clear()
    with fake:
        yield fake
    platform_module._stream_for_copies.cache_clear()


def collect_on_a_lane(cuda: FakeCuda) -> float:
    """Per microbatch, a pass, a collective of its output on a lane, another pass meanwhile, and the pass that needs the
    result.
    """
    lane, passes, value = CudaPlatform().lane(), cuda.on_device(torch.ones(2)), cuda.on_device(torch.zeros(()))
    for _ in range(3):
        result = start_sum(cuda, lane)
        cuda.free_dropped()
        passes.mul_(2.0)
        before = dict(cuda.compute.known)
        total, _ = result.wait()
        assert cuda.compute.known != before, "passes do not wait for the collective"
        value.add_(total.sum())
        del total, result
        cuda.free_dropped()
        assert not cuda.host_waits_for(cuda.compute), "the host waits for passes"
    return float(value.item())


def start_sum(cuda: FakeCuda, lane: Lane) -> Result:
    part, total = cuda.on_device(torch.ones(2)), cuda.on_device(torch.zeros(2))
    part.mul_(3.0)

    def work() -> tuple[torch.Tensor, None]:
        total.copy_(part).mul_(2.0)
        return total, None

    return lane.start(work, [part, total])


def read_a_loss(cuda: FakeCuda) -> float:
    """A loss on its way to the host, while passes are queued behind it."""
    loss = cuda.on_device(torch.zeros(2))
    loss.add_(4.0)
    losses = LossReportList()
    losses.append({"lm loss": (loss,)})
    cuda.free(loss)
    passes = cuda.on_device(torch.ones(2))
    passes.mul_(2.0)
    values = losses[0]["lm loss"][0].wait().tolist()
    assert not cuda.host_waits_for(cuda.compute), "the host waits for passes"
    return sum(values)


class PinnedByFake(PinnedMemory):
    """Pinned memory without CUDA's runtime."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return self._cuda.pinned(torch.empty(num_bytes, dtype=torch.uint8))


def offload(cuda: FakeCuda) -> float:
    """What four forwards saved goes to the host and back, one after the other, with a pass during each copy. A copy to
    the host starts while the one before it comes back, and uses the host memory of the one before that.
    """
    saved, platform = SavedTensors(), CudaPlatform()
    offloader = Offloader(saved, PinnedByFake(cuda), platform.lane(), platform.lane())
    by_op = offloader.handlers(None)
    passes, sums = cuda.on_device(torch.ones(2)), []

    def come_back(forward: Pass, kept: Any, coming: Any) -> None:
        before = dict(cuda.compute.known)
        ends = coming.wait("reclaim")
        assert cuda.compute.known != before, "passes do not wait for the copy"
        by_op[Reclaim](Reclaim(forward), (ends,))
        sums.append(unpack(kept).sum())

    returning: tuple[Any, ...] | None = None
    for forward in (Pass(0, Kind.F, microbatch) for microbatch in range(4)):

        def run() -> Any:
            x = cuda.on_device(torch.ones(32, 32))
            x.mul_(3.0)
            return saved.pack(x)

        saved.expect([forward])
        kept = saved.around(lambda _op, _inputs, run=run: run(), [])(Compute(forward), ())
        (leaving,) = by_op[Evict](Evict(forward), ((None, None),))
        passes.mul_(2.0)
        if returning is not None:
            come_back(*returning)
            returning = None
        away = leaving.wait("release")
        by_op[ReleaseDevice](ReleaseDevice(forward), (away,))
        cuda.free_dropped()
        assert kept.place.storage is None, "the memory is free"
        passes.mul_(2.0)
        (coming,) = by_op[Fetch](Fetch(forward), (away,))
        passes.mul_(2.0)
        assert not cuda.host_waits_for(cuda.compute), "the host waits for passes"
        returning = forward, kept, coming
        del kept, away, coming, leaving
        cuda.free_dropped()
    assert returning is not None
    come_back(*returning)
    assert offloader.host_peak == 2 * 32 * 32 * 4
    return sum(each.item() for each in sums)


class NcclWork:
    """Imitates NCCL's handle: ``wait`` makes the current stream wait, and not the host."""

    def __init__(self, cuda: FakeCuda, ran_on: FakeStream) -> None:
        self._cuda, self._ran_on = cuda, ran_on

    def wait(self) -> None:
        self._cuda.current.wait_stream(self._ran_on)


def reduce_figures(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> float:
    """Figures that NCCL reduces while passes are queued."""
    nccl = cuda.stream()

    def all_reduce(figures: torch.Tensor, *_: Any, async_op: bool) -> NcclWork:
        nccl.wait_stream(cuda.compute)
        with cuda.on(nccl):
            figures.mul_(2.0)
        return NcclWork(cuda, nccl)

    patch.setattr(dist, "all_reduce", all_reduce)
    reduction = Reduction(cuda.on_device(torch.full((2,), 1.5)), dist.ReduceOp.SUM, None)  # type: ignore[arg-type]
    passes = cuda.on_device(torch.ones(2))
    passes.mul_(2.0)
    before = dict(cuda.compute.known)
    figures = reduction.wait()
    assert not cuda.host_waits_for(cuda.compute), "the host waits for passes"
    assert cuda.compute.known == before, "passes wait for the reduction"
    return sum(figures)


def test_lane_runs_between_its_operands_and_the_reader_of_its_results(cuda: FakeCuda) -> None:
    assert collect_on_a_lane(cuda) == 3 * 12.0


def test_memory_of_lanes_does_not_grow_with_the_run_ahead_of_the_host(cuda: FakeCuda) -> None:
    collect_on_a_lane(cuda)
    assert cuda.num_held_back == 0
    read_a_loss(cuda)
    assert cuda.num_held_back == 1, "the fake notices memory that the allocator gets back late"


@pytest.mark.parametrize("end", [lambda lane: lane.join(), lambda lane: lane.close(1.0)], ids=["join", "close"])
def test_memory_of_a_result_that_nobody_waits_for_stays_until_the_lane_has_ended(
    cuda: FakeCuda, end: Callable[[Lane], object]
) -> None:
    """As after a pass that failed: the lane still reads its operands, and writes its result."""
    lane = CudaPlatform().lane()
    start_sum(cuda, lane)
    cuda.free_dropped()  # raises Unordered if an operand or a result is gone
    before = len(cuda._memory)
    end(lane)
    cuda.compute.known |= cuda.host  # what is queued next
    cuda.free_dropped()
    assert len(cuda._memory) < before, "the memory is never freed"


def test_fake_notices_a_result_that_keeps_nothing(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    init = CudaResult.__init__
    monkeypatch.setattr(CudaResult, "__init__", lambda self, made, _uses, *more: init(self, made, (), *more))
    with pytest.raises(Unordered):
        collect_on_a_lane(cuda)


def test_nothing_follows_the_work_of_a_lane(cuda: FakeCuda) -> None:
    """It would hold back the passes in the same hardware queue until the work has ended."""
    lane, ran = CudaPlatform().lane(), []
    queue = lane._stream.queue  # type: ignore[attr-defined]
    lane._stream.queue = lambda: (ran.append("queued"), queue())  # type: ignore[attr-defined]
    total = cuda.on_device(torch.ones(2))

    def work() -> torch.Tensor:
        total.mul_(2.0)
        ran.append("work")
        return total

    assert lane.start(work, [total]).wait() is total
    assert ran == ["queued", "work"]


def test_waiting_for_a_result_frees_what_ran_before_it_on_the_lane(cuda: FakeCuda) -> None:
    """As the gathering before a sum, whose result nobody else waits for."""
    lane = CudaPlatform().lane()
    start_sum(cuda, lane)
    start_sum(cuda, lane).wait()
    assert not lane._under_way


def test_loss_is_read_without_a_wait_for_the_passes_behind_it(cuda: FakeCuda) -> None:
    assert read_a_loss(cuda) == 8.0


def test_offload_copies_between_the_passes_that_write_and_read(cuda: FakeCuda) -> None:
    assert offload(cuda) == 4 * 3 * 32 * 32


def test_fake_notices_host_memory_that_a_copy_back_still_reads(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were free when the copy back starts, which is safe only if all copies are on one lane."""
    fetch = Offloader._fetch

    def give_early(self: Offloader, observer: Any, op: Fetch, inputs: Any) -> Any:
        coming = fetch(self, observer, op, inputs)
        self._free(op.forward)
        return coming

    monkeypatch.setattr(Offloader, "_fetch", give_early)
    monkeypatch.setattr(Offloader, "_reclaim", lambda self, op, inputs: inputs)
    with pytest.raises(Unordered, match="overwrites what another stream may still use"):
        offload(cuda)


def test_lanes_share_no_stream_with_one_another_or_with_the_pool(cuda: FakeCuda) -> None:
    """A 33rd user of torch's pool gets the stream of the first; so do the communicators of NCCL, which take from it."""
    others = [torch.cuda.Stream(priority=priority) for priority in (-1, 0) for _ in range(POOL_SIZE)]
    platform = CudaPlatform()
    lanes = [platform.lane() for _ in range(POOL_SIZE + 1)]
    copies = platform_module._stream_for_copies(torch.device("cpu"))
    own = [*(lane._stream for lane in lanes), copies]
    assert len({stream.name for stream in (*own, *others)}) == len(own) + len(others)  # type: ignore[attr-defined]


def test_streams_of_closed_lanes_are_used_again(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not one whose work has not ended: it may wait for a rank that is lost."""
    first = CudaPlatform().lane()
    assert first.close(0.0)
    second = CudaPlatform().lane()
    assert second._stream is first._stream
    monkeypatch.setattr(FakeStream, "query", lambda self: False)
    assert not second.close(0.0)
    assert CudaPlatform().lane()._stream is not second._stream


def test_lane_closes_when_its_own_work_has_ended(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the passes: they may wait for a rank that is lost. It gives up if its work waits for them."""
    lane, passes = CudaPlatform().lane(), cuda.on_device(torch.ones(2))
    lane.start(lambda: None, ())
    passes.mul_(2.0)
    assert lane.close(0.0)
    assert not cuda.host_waits_for(cuda.compute), "the host waits for passes"
    monkeypatch.setattr(FakeStream, "query", lambda self: False)
    assert not lane.close(0.01)


@pytest.mark.parametrize("forgotten", ["wait_stream", "wait_event"])
def test_fake_notices_a_forgotten_wait_for_a_copy(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    monkeypatch.setattr(FakeStream, forgotten, lambda *_: None)
    with pytest.raises(Unordered):
        offload(cuda)


def test_reduced_figures_are_read_without_a_wait_for_passes(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reduce_figures(cuda, monkeypatch) == 6.0


@pytest.mark.parametrize(
    ("use", "forgotten"),
    [
        (collect_on_a_lane, (FakeStream, "wait_stream")),
        (read_a_loss, (FakeStream, "wait_stream")),
        (read_a_loss, (torch.Tensor, "record_stream")),
    ],
)
def test_fake_notices_what_is_forgotten(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, use: Callable[[FakeCuda], float], forgotten: tuple[type, str]
) -> None:
    monkeypatch.setattr(*forgotten, lambda *_: None)
    with pytest.raises(Unordered):
        use(cuda)


def test_fake_notices_a_forgotten_event(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)
    with pytest.raises(Unordered):
        read_a_loss(cuda)


def test_marks_wait_for_the_end_mark_only(cuda: FakeCuda) -> None:
    platform = CudaPlatform()
    passes = cuda.on_device(torch.ones(2))
    start = platform.mark()
    for _ in range(3):
        passes.mul_(2.0)
    end = platform.mark()
    passes.mul_(2.0)
    assert platform.elapsed_ms(start, end) == 3.0
    assert not cuda.host_waits_for(cuda.compute)


def test_copy_to_the_device_does_not_wait_for_passes(cuda: FakeCuda) -> None:
    passes = cuda.on_device(torch.ones(2))
    tokens = CudaPlatform().to_device(torch.arange(3), torch.device("cpu"))
    assert not cuda.host_waits_for(cuda.compute)
    assert (tokens.sum() + passes.sum()).item() == 5.0
