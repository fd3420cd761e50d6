"""Storages that forwards save, on their way to the host and back, on one rank and without a model."""

from __future__ import annotations

import gc
import random
import resource
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassMemory, build
from megatron.zero_bubble.core.analysis.memory import host_peaks
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Kind, Pass
from megatron.zero_bubble.core.ir.offload import Discard, Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.offload import select_longest
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.cpu import host as cpu_host
from megatron.zero_bubble.engine.platforms.host import ALIGNMENT, Extent, HostMemory, PinnedBuffer
from megatron.zero_bubble.engine.platforms.streams import ThreadLane
from megatron.zero_bubble.engine.runtime.offload import Offloader
from megatron.zero_bubble.engine.runtime.saved import SavedTensors, unpack

FIRST = Pass(0, Kind.F, 0)
SIZE = 64, 64


class Rank:
    """The ops of one rank, one by one."""

    def __init__(self, saved: SavedTensors, host: HostMemory) -> None:
        self.saved, self.host = saved, host
        self.offloader = Offloader(saved, host, *(select("cpu").lane() for _ in range(2)))
        self.by_op = self.offloader.handlers(None)

    def forward(self, run: Any, model: Sequence[torch.nn.Module] = (), moves: bool = True) -> Any:
        self.saved.expect([FIRST] if moves else [])
        return self.saved.around(lambda _op, _inputs: run(), model)(Compute(FIRST), ())

    def evict(self, *ends: torch.Tensor | None) -> Any:
        return self.by_op[Evict](Evict(FIRST), (ends,))[0]

    def release(self, leaving: Any) -> Any:
        return self.by_op[ReleaseDevice](ReleaseDevice(FIRST), (leaving.wait("release"),))[0]

    def fetch(self, on_host: Any) -> None:
        coming = self.by_op[Fetch](Fetch(FIRST), (on_host,))[0]
        self.by_op[Reclaim](Reclaim(FIRST), (coming.wait("reclaim"),))


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(SavedTensors(), select("cpu").host_memory())
    yield made
    made.offloader.close()


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Saves views and aliases: a product with an input of two shapes, an output, and a transposed weight."""
    y = (x @ weight.t()).exp()
    return (y.view(-1) * y.t().reshape(-1)).sum() + (y * x).sum()


def test_gradients_are_the_same_and_memory_is_freed_in_between(rank: Rank) -> None:
    weight = torch.nn.Linear(*SIZE, bias=False)
    start = torch.randn(SIZE)
    want = start.clone().requires_grad_()
    chain(want, weight.weight).backward()
    grads = want.grad, weight.weight.grad
    weight.weight.grad = None
    x = start.clone().requires_grad_()
    y = rank.forward(lambda: chain(x, weight.weight), [weight])
    leaving = rank.evict(x, y)
    gc.disable()  # memory must be free without it
    try:
        storage = x.untyped_storage()
        on_host = rank.release(leaving)
    finally:
        gc.enable()
    assert rank.host.used >= 2 * start.nbytes, "input and exponential are on the host"
    assert rank.host.used < 4 * start.nbytes, "views and aliases of a storage move once, and weights not at all"
    assert x.untyped_storage().nbytes() < storage.nbytes() and x.shape == start.shape
    del storage
    rank.fetch(on_host)
    assert rank.host.used == 0 and rank.offloader.num_away == 0
    y.backward()
    assert x.grad is not None and weight.weight.grad is not None
    assert torch.equal(x.grad, grads[0]) and torch.equal(weight.weight.grad, grads[1])


def test_storage_that_something_else_refers_to_stays(rank: Rank) -> None:
    shared, x = torch.randn(SIZE), torch.randn(SIZE, requires_grad=True)
    want = shared * (x.detach() * shared).exp()
    with rank.offloader.iteration():
        y = rank.forward(lambda: (x * shared).exp().sum())
        leaving = rank.evict(x, y)
        assert rank.host.used == 2 * x.nbytes
        rank.fetch(rank.release(leaving))
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, want)
    rank.release(rank.evict(x, rank.forward(lambda: (x * shared).exp().sum())))
    assert rank.host.used == x.nbytes, "what never left in an iteration is not copied in the next one"
    rank.by_op[Discard](Discard(FIRST), ())


def test_storage_that_stayed_once_may_leave_later(rank: Rank) -> None:
    """For example, an output that was still being sent."""
    x, held = torch.randn(SIZE, requires_grad=True), []

    def run() -> torch.Tensor:
        held.append(x.exp())
        return (held[0] * 1.0).sum()

    for held_by in ((True, False), (True, True), (True,)):
        with rank.offloader.iteration():
            for is_held in held_by:
                leaving = rank.evict(x, rank.forward(run))
                assert rank.host.used == x.nbytes, "it is copied again"
                if not is_held:
                    held.clear()
                rank.fetch(rank.release(leaving))
                held.clear()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_change_in_place_is_noticed(rank: Rank, moves: bool, late: bool) -> None:
    """Of a saved tensor that moves, and of one whose memory is only measured; ``late``: while others have moved, which
    is possible for a tensor that stays because something else refers to it.
    """
    rank.saved.counter = lambda storage: None
    x = torch.randn(SIZE, requires_grad=True)
    outputs = []

    def run() -> torch.Tensor:
        outputs.append(x.exp())
        return (outputs[0] * 1.0).sum()

    def change() -> None:
        with torch.no_grad():
            outputs[0].mul_(2.0)

    y = rank.forward(run, moves=moves)
    if not late:
        change()
    if moves:
        rank.fetch(rank.release(rank.evict(x, y)))
    if late:
        change()
    with pytest.raises(RuntimeError, match="modified by an inplace operation: .* is at version 1; expected version 0"):
        y.backward()


def test_measured_storage_counts_while_it_is_on_the_device(rank: Rank) -> None:
    alive: list[int] = []

    class Counted:
        def __init__(self, storage: torch.UntypedStorage) -> None:
            self._size = storage.nbytes()
            alive.append(self._size)

        def __del__(self) -> None:
            alive.remove(self._size)

    rank.saved.counter = Counted
    x = torch.randn(SIZE, requires_grad=True)
    y = rank.forward(lambda: x.exp().sum())
    assert sum(alive) == x.nbytes
    on_host = rank.release(rank.evict(x, y))
    assert alive == []
    rank.fetch(on_host)
    assert sum(alive) == x.nbytes
    y.backward()
    del on_host
    assert alive == []


def test_failed_iteration_leaves_nothing_on_the_host(rank: Rank) -> None:
    x = torch.randn(SIZE, requires_grad=True)

    def fail() -> None:
        with rank.offloader.iteration():
            rank.release(rank.evict(x, rank.forward(lambda: x.exp().sum())))
            assert rank.host.used
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert rank.host.used == 0 and rank.offloader.num_away == 0


class Stuck(ThreadLane):
    """A lane whose last copy never ends."""

    def close(self, timeout_s: float) -> bool:
        super().close(timeout_s)
        return False


def test_host_memory_is_kept_while_copies_may_use_it() -> None:
    for out, back, blocks in ((ThreadLane, ThreadLane, 0), (Stuck, ThreadLane, 1), (ThreadLane, Stuck, 1)):
        host, lanes = select("cpu").host_memory(), (out(), back())
        host.take(ALIGNMENT)
        assert Offloader(SavedTensors(), host, *lanes).close() == (not blocks)
        assert len(host._blocks) == blocks
        assert not any(lane._thread.is_alive() for lane in lanes), "both are stopped"


class Subclass(torch.Tensor):
    """A tensor with a storage, which its view of the storage does not describe."""


class OfParts(torch.Tensor):
    """A tensor without a storage of its own, as those of fp8 are."""

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> OfParts:
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)  # type: ignore[attr-defined]

    def __init__(self, part: torch.Tensor) -> None:
        self.part = part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*(arg.part if isinstance(arg, OfParts) else arg for arg in args), **(kwargs or {}))
        return OfParts(result) if isinstance(result, torch.Tensor) else result


def of_subclass(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(Subclass)


@pytest.mark.parametrize("wrap", [of_subclass, OfParts])
def test_tensor_of_a_subclass_stays_and_keeps_no_graph(rank: Rank, wrap: Any) -> None:
    rank.saved.counter = lambda storage: None
    x = wrap(torch.randn(SIZE)).requires_grad_()
    kept: list[Any] = []

    def run() -> torch.Tensor:
        kept.append(x.exp())  # saves its result
        return x.exp() * 2

    y = rank.forward(run, [torch.nn.Linear(*SIZE)])
    rank.fetch(rank.release(rank.evict(None, None)))
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad.norm(), (x.detach().exp() * 2).norm())
    alive = weakref.ref(kept[0])
    gc.disable()
    try:
        kept.clear()
        assert alive() is None, "it is free without the garbage collector, so the graph does not refer to it"
    finally:
        gc.enable()


@pytest.mark.parametrize("wrap", [of_subclass, OfParts])
def test_change_in_place_of_a_subclass_is_noticed(rank: Rank, wrap: Any) -> None:
    x = wrap(torch.randn(SIZE)).requires_grad_()
    y = rank.forward(x.exp)
    with torch.no_grad():
        y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: .* is at version 1; expected version 0"):
        y.sum().backward()


def test_outside_of_forwards_nothing_is_packed() -> None:
    saved, x = SavedTensors(), torch.randn(2)
    assert saved.pack(x) is x is unpack(x)


def test_host_memory_is_used_again_and_limited() -> None:
    host = select("cpu").host_memory(6 * ALIGNMENT)
    first, second = host.take(2 * ALIGNMENT), host.take(3 * ALIGNMENT)
    with pytest.raises(UserError, match="3072 bytes per rank; this rank has 2560 bytes in use and needs 1024 more"):
        host.take(2 * ALIGNMENT)
    (piece,) = first.parts(0, first.num_bytes)
    host.give(first)
    (again,) = host.take(ALIGNMENT).parts(0, ALIGNMENT)
    assert again.data_ptr() == piece.data_ptr()
    host.give(second)
    assert host.take(5 * ALIGNMENT).num_bytes == 5 * ALIGNMENT, "pieces of other sizes make room for it"
    assert (host.used, host.peak) == (6 * ALIGNMENT, 6 * ALIGNMENT)
    host.close()
    assert host.take(6 * ALIGNMENT).num_bytes == 6 * ALIGNMENT


def test_padding_does_not_count(rank: Rank) -> None:
    """A plan that just fits must fit in the run, too, whatever the sizes."""
    x, odd = torch.randn(SIZE, requires_grad=True), torch.randn(5001, requires_grad=True)
    want = torch.autograd.grad(odd.exp().exp().sum() + x.exp().exp().sum(), (odd, x))
    size = 2 * (odd.nbytes + x.nbytes)
    rank.host._limit = size
    y = rank.forward(lambda: odd.exp().exp().sum() + x.exp().exp().sum())
    on_host = rank.release(rank.evict(None, None))
    assert rank.host.used == size
    rank.fetch(on_host)
    assert all(map(torch.equal, torch.autograd.grad(y, (odd, x)), want))


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "interleaved-1f1b", "gis", "pipe-offload"])
def test_a_plan_runs_with_its_peak_as_the_limit(name: str) -> None:
    """In every iteration and on every rank; what stages save has different, odd sizes."""
    schedule = build(name, num_ranks=4, num_microbatches=12)
    plan = plan_of(schedule, Additions(moves=tuple(select_longest(schedule, 1.0))))
    sizes = [5001 + 777 * stage for stage in range(schedule.placement.num_stages)]
    memory = PassMemory(tuple(map(float, sizes)), (0.0,) * len(sizes))
    for row, limit in zip(plan.ops, host_peaks(plan, memory), strict=True):
        host, held = select("cpu").host_memory(int(limit)), {}
        for op in row * 3:
            if isinstance(op, Evict):
                held[op.forward] = host.take(sizes[op.forward.stage])
            elif isinstance(op, Reclaim):
                host.give(held.pop(op.forward))
        assert (host.peak, host.used) == (limit, 0)
        host.close()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40), st.randoms())
def test_what_fits_by_bytes_fits_in_host_memory(steps: list[tuple[int, bool]], draw: random.Random) -> None:
    """Whatever is taken and given back: blocks are as large as the most bytes in use, and no two buffers overlap."""
    blocks: list[int] = []

    class Counting(HostMemory):
        def _allocate(self, num_bytes: int) -> torch.Tensor:
            blocks.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8)

    host, taken = Counting(), [(PinnedBuffer(0, (), ()), 0)]
    for number, (size, gives) in enumerate(steps):
        if gives:
            if taken:
                host.give(taken.pop(draw.randrange(len(taken)))[0])
            continue
        taken.append((host.take(size * ALIGNMENT), number))
        for part in taken[-1][0].parts(0, size * ALIGNMENT):
            part.fill_(number)
    assert sum(blocks) == host.peak
    for buffer, number in taken:
        assert sum(part.numel() for part in buffer.parts(0, buffer.num_bytes)) == buffer.num_bytes
        assert all(bool((part == number).all()) for part in buffer.parts(0, buffer.num_bytes))


def test_a_buffer_of_several_pieces_is_read_in_order() -> None:
    pieces = torch.arange(10, dtype=torch.uint8).split([3, 1, 6])
    buffer = PinnedBuffer(10, [Extent(0, 0, 3), Extent(1, 4, 5), Extent(1, 8, 14)], pieces)
    for start, num_bytes in [(0, 10), (1, 5), (3, 1), (4, 6), (2, 1)]:
        found = torch.cat([*buffer.parts(start, num_bytes)])
        assert found.tolist() == list(range(start, start + num_bytes))


def test_full_host_is_named() -> None:
    """A limit of the size of files stands for a full host: both refuse the pages before anything is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match="need 8192 more bytes on this machine, got File too large; low") as caught:
            select("cpu").host_memory().take(8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not caught.value.everywhere, "the rank itself must say it"


def test_memory_that_the_container_does_not_have_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_host, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("95000\n")
    (tmp_path / "memory.stat").write_text("anon 94000\nfile 1000\n")
    assert select("cpu").host_memory().take(4096).num_bytes == 4096
    with pytest.raises(UserError, match="need 8192 more bytes on this machine, got 5000 bytes available; lower the"):
        select("cpu").host_memory().take(8192)
    (tmp_path / "memory.stat").write_text("inactive_file 2000\nactive_file 1500\n")
    assert select("cpu").host_memory().take(8192).num_bytes == 8192, "what was read from files can be dropped"
    (tmp_path / "memory.stat").write_text("anon 94000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert select("cpu").host_memory().take(8192).num_bytes == 8192


def test_systems_without_files_in_memory_have_anonymous_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_host.os, "memfd_create")
    (part,) = select("cpu").host_memory().take(ALIGNMENT).parts(0, ALIGNMENT)
    assert part.fill_(7).sum() == 7 * ALIGNMENT


def test_host_memory_has_no_name_by_which_it_could_be_truncated() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    buffer = select("cpu").host_memory().take(ALIGNMENT)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "zero-bubble-host" in line]
    assert maps and all(line.endswith("(deleted)") for line in maps), "it is mapped"
    assert set(Path("/proc/self/fd").iterdir()) <= before, "no descriptor is left"
    assert buffer.num_bytes == ALIGNMENT
