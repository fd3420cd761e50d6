"""A fake of torch's CUDA streams and events, without a GPU, that checks the order of what is queued.

Every stream, and the host, has a vector clock: of each stream, the number of operations that are known to have ended
before whatever comes next. Tensors registered by ``on_device``, and those made by ``torch.empty`` with a device, count
as memory of the GPU. An access raises ``Unordered`` if the last write is not known to have ended, and ``free`` if
another stream may still use the memory. The fake reports no device "cuda": all tensors are on the CPU, and all
operations run at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from megatron.zero_bubble.engine.platforms import own_streams

Clock = Counter[str]
POOL_SIZE = 32
"""Streams of torch per priority and device."""
_WITHOUT_ACCESS = (
    *("__get__", "detach", "untyped_storage", "__getitem__", "set_"),
    *("size", "stride", "storage_offset", "numel"),
)
"""Functions that read or write no element."""


class Unordered(AssertionError):
    """An operation may run before, or at the same time as, an operation that must come first."""


class FakeEvent:
    """Imitates ``torch.cuda.Event``. Every operation takes 1 ms."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self._cuda, self._timed = cuda, enable_timing
        self.known: Clock = Counter()
        self._at: Clock = Counter()

    def record(self, stream: FakeStream | None = None) -> None:
        self.known = Counter((stream or self._cuda.current).known)

    def synchronize(self) -> None:
        self._cuda.host |= self.known

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._timed and end._timed, "torch needs enable_timing=True"
        assert end.known <= self._cuda.host, "torch raises if the event has not been reached"
        return float(end.known["compute"] - self.known["compute"])


class FakeStream:
    """Imitates ``torch.cuda.Stream``."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name
        self.device = torch.device("cpu")
        self.known: Clock = Counter()

    def wait_stream(self, other: FakeStream) -> None:
        self.known |= other.known

    def wait_event(self, event: FakeEvent) -> None:
        self.known |= event.known

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all its work has ended: always when it is asked, and then the host knows."""
        self._cuda.host |= self.known
        return True

    def queue(self) -> None:
        """Queue an operation. It starts after what the stream and the host have waited for."""
        self.known |= self._cuda.host
        self.known[self.name] += 1


class _Memory:
    """Memory of the GPU, or pinned memory: who may use it, and what uses it.

    Attributes:
        alive: a weak reference, because the memory may be freed by dropping the last tensor.
        written: stream and number of the operation that wrote it last; None for the host.
        used: by stream, the last operation that uses it.
        recorded: streams that the allocator knows of.
    """

    def __init__(self, tensor: torch.Tensor, stream: str, pinned: bool) -> None:
        self.alive = StorageWeakRef(tensor.untyped_storage())  # while it exists, no other storage has this key
        self.stream, self.pinned = stream, pinned
        self.written: tuple[str, int] | None = None
        self.used: Clock = Counter()
        self.recorded: set[str] = set()


class FakeCuda(TorchFunctionMode):
    """The fake GPU and its host.

    Attributes:
        compute: the stream of the passes, current at first.
        host: what the host knows to have ended.
        num_held_back: how often memory was freed that the allocator did not get back at once, because a stream that
            it knows of had not ended with it, as far as the host knew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = FakeStream(self, "compute")
        self.host: Clock = Counter()
        self.num_held_back = 0
        self._memory: dict[int, _Memory] = {}
        self._num_streams = 0
        self._pools: defaultdict[int, list[FakeStream]] = defaultdict(list)
        self._num_pooled: Counter[int] = Counter()
        self._made: list[FakeStream] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the names of ``torch.cuda`` that the platform uses."""

        def record_stream(tensor: torch.Tensor, stream: FakeStream) -> None:
            self._memory[_key(tensor)].recorded.add(stream.name)

        patch.setattr(torch.cuda, "Stream", self.pooled)
        patch.setattr(torch.cuda, "ExternalStream", self.external)
        patch.setattr(own_streams, "_make", self._make)
        patch.setattr(own_streams, "_unused", defaultdict(list))
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(self, enable_timing))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self.on)
        # This function parses its arguments, and refuses the fake stream, before it asks a mode.
        patch.setattr(torch.Tensor, "record_stream", record_stream)

    def stream(self) -> FakeStream:
        """A new stream."""
        self._num_streams += 1
        return FakeStream(self, f"stream {self._num_streams}")

    def pooled(self, device: Any = None, priority: int = 0) -> FakeStream:
        """Imitates ``torch.cuda.Stream``: the streams of a priority are handed out in turn."""
        pool, self._num_pooled[priority] = self._pools[priority], self._num_pooled[priority] + 1
        if len(pool) < POOL_SIZE:
            pool.append(self.stream())
        return pool[(self._num_pooled[priority] - 1) % POOL_SIZE]

    def _make(self, device: Any, priority: int) -> int:
        """Imitates the driver, which returns a handle."""
        self._made.append(self.stream())
        return len(self._made) - 1

    def external(self, handle: int, device: Any) -> FakeStream:
        """Imitates ``torch.cuda.ExternalStream``."""
        return self._made[handle]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register ``tensor`` as memory of the GPU, written by the current stream."""
        self.current.queue()
        self._write(self._add(tensor, pinned=False))
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Give the memory back to the allocator, which its stream may then use for something else."""
        self._free(self._memory.pop(_key(tensor)))

    def free_dropped(self) -> None:
        """The same for all memory whose last tensor is gone."""
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                self._free(self._memory.pop(key))

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register ``tensor`` as pinned memory."""
        return self._added(tensor, pinned=True)

    def _free(self, memory: _Memory) -> None:
        home = self.compute.known if memory.stream == "compute" else Counter()
        for stream, last in memory.used.items():
            if stream not in (memory.stream, *memory.recorded) and home[stream] < last:
                raise Unordered(f"memory is freed while {stream} may still use it, and no record_stream says so")
        self.num_held_back += any(self.host[stream] < memory.used[stream] for stream in memory.recorded)

    def host_waits_for(self, stream: FakeStream) -> bool:
        """Whether the host has waited for everything that is queued on ``stream``."""
        return self.host[stream.name] == stream.known[stream.name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__
        if name == "empty_like" and kwargs.pop("pin_memory", False):
            return self._added(func(*args, **kwargs), pinned=True)
        if name == "empty_like" and (like := self._find(args[0])) is not None and not like.pinned:
            return self._added(func(*args, **kwargs), pinned=False)
        if name == "pin_memory":
            return self._added(args[0].clone(), pinned=True)
        if name == "to" and kwargs.get("non_blocking"):  # the tests copy only to the GPU by this name
            return self._to_device(args[0])
        result = func(*args, **kwargs)
        if name in _WITHOUT_ACCESS:
            return result
        if name == "empty" and kwargs.get("device") is not None and result.numel():
            return self._added(result, pinned=False)
        known = [memory for memory in map(self._find, args) if memory is not None]
        on_host = not any(not memory.pinned for memory in known)
        if name in ("tolist", "item") or (on_host and known):
            self._read_by_host(known)
        elif known:
            self._run(func.__name__, known, kwargs, result)
        return result

    def _run(self, name: str, known: list[_Memory], kwargs: dict[str, Any], result: Any) -> None:
        self.current.queue()
        for memory in known:
            self._check(memory, self.current.known)
        for memory in known[name.endswith("_") :]:
            memory.used[self.current.name] = self.current.known[self.current.name]
        if name.endswith("_"):
            if any(self.current.known[stream] < last for stream, last in known[0].used.items()):
                raise Unordered(f"{self.current.name} overwrites what another stream may still use")
            self._write(known[0])
        elif isinstance(result, torch.Tensor) and _key(result) not in self._memory:
            self._write(self._add(result, pinned=False))
        if any(memory.pinned for memory in known) and not kwargs.get("non_blocking"):
            self.host |= self.current.known

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        source = self._find(tensor)
        self.current.queue()
        if source is None:  # pageable memory
            self.host |= self.current.known
        copy = tensor.clone()
        self._write(self._add(copy, pinned=False))
        return copy

    def _read_by_host(self, known: list[_Memory]) -> None:
        for memory in known:
            if not memory.pinned:
                self.host |= self.current.known  # torch copies it, and waits
            self._check(memory, self.host)

    def _check(self, memory: _Memory, known: Clock) -> None:
        if memory.written is not None and known[memory.written[0]] < memory.written[1]:
            raise Unordered(f"{self.current.name} or the host reads what {memory.written[0]} may still be writing")

    def _write(self, memory: _Memory) -> None:
        memory.used[self.current.name] = self.current.known[self.current.name]
        memory.written = self.current.name, self.current.known[self.current.name]

    def _add(self, tensor: torch.Tensor, pinned: bool) -> _Memory:
        return self._memory.setdefault(_key(tensor), _Memory(tensor, self.current.name, pinned))

    def _added(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        self._add(tensor, pinned)
        return tensor

    def _find(self, value: Any) -> _Memory | None:
        return self._memory.get(_key(value)) if isinstance(value, torch.Tensor) else None


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
