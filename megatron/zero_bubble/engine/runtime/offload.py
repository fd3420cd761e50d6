"""Moves what forwards saved to host memory, and back before their backwards (arXiv 2503.01328, section 3).

What moves is what autograd and the deferred linears saved, and the input and output of the stage, which are needed only
as ends of the graph. A storage that something else refers to when it would be freed stays on the device: rotary
embeddings and masks, outputs that are still being sent, workspaces. No list of such tensors is needed.

Memory of the device is allocated and freed in the order of the passes. What a copy reads or writes stays referenced
until the passes have waited for the copy, so the allocator needs to know nothing of the lanes. Host memory, too, is
taken and given in the order of the passes: a copy starts behind all passes so far, and so behind every copy for which
they have waited, also one of the other direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from megatron.zero_bubble.core.ir import Op, Pass
from megatron.zero_bubble.core.ir.offload import Discard, Evict, Fetch, Reclaim, ReleaseDevice
from megatron.zero_bubble.engine.platforms.host import ALIGNMENT, HostMemory, PinnedBuffer
from megatron.zero_bubble.engine.platforms.streams import Lane, Result
from megatron.zero_bubble.engine.runtime.handler import Awaited, Handler
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, observed_work
from megatron.zero_bubble.engine.runtime.saved import Place, SavedTensors, Window

LEAST_BYTES = 4096
"""Smaller storages stay: a copy takes some microseconds, whatever its size."""

StorageKey = tuple[int, int, int, int]
"""A storage that forwards save again and again: stage, slice, position among the storages of a forward, and bytes."""
_MOVED, _HELD, _SMALL = "moved", "something else refers to them", f"their storages are below {LEAST_BYTES} bytes"
"""What happened to bytes that were planned to move, or why they stayed."""
Ends = Sequence[torch.Tensor | None]
"""The input and the output of a forward: the value ``saved``."""


class Offloader:
    """Runs the ops of offloading on one rank.

    Args:
        saved: the hooks that collect what forwards save.
        host: host memory.
        out, back: run the copies of either direction, in order.
        say: prints what stayed on the device in the first iteration, and why; None to print nothing.
    """

    def __init__(
        self,
        saved: SavedTensors,
        host: HostMemory,
        out: Lane,
        back: Lane,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._saved, self._host, self._out, self._back, self._say = saved, host, out, back, say
        self._bytes: Counter[str] = Counter()
        self._away: dict[Pass, _Away] = {}
        self._stays: set[StorageKey] = set()
        self._stayed: set[StorageKey] = set()
        self._left: set[StorageKey] = set()
        self._planned: Sequence[Op] = ()
        self._sizes: dict[tuple[int, int], int] = {}  # of what a forward moves, by stage and slice

    @property
    def num_away(self) -> int:
        """Number of forwards that have host memory; 0 between iterations."""
        return len(self._away)

    @property
    def host_peak(self) -> int:
        """The most bytes of host memory in use so far."""
        return self._host.peak

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Context around an iteration. If it fails, copies still end, and all host memory is free again.

        Storages that never left in an iteration are not copied in later ones.
        """
        try:
            yield
        except BaseException:
            self._out.join()
            self._back.join()
            self._saved.clear()
            for forward in list(self._away):
                self._free(forward)
            raise
        finally:
            self._saved.expect(())
        assert not self._away, "a proved plan leaves nothing on the host"
        self._stays |= self._stayed - self._left
        if self._say is not None and self._bytes:
            self._say(_summary(self._bytes))
            self._say = None

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop the lanes and free host memory; returns whether all copies have ended, each lane's within the timeout.

        If not, because another rank failed or hangs, host memory stays as it is: a copy may still use it.
        """
        stopped = [lane.close(timeout_s) for lane in (self._out, self._back)]
        if all(stopped):
            self._host.close()
        return all(stopped)

    def expect(self, row: Sequence[Op]) -> None:
        """Collect what the forwards of these ops of a rank save that move, until the end of ``iteration``.

        Also plan host memory: page locking takes long, so it is taken in as few blocks as possible, when the first
        forward of a stage shows how much its forwards move.
        """
        self._saved.expect(op.forward for op in row if isinstance(op, Evict))
        if row is not self._planned:
            self._planned = row
            self._sizes.clear()

    def _reserve(self, forward: Pass, num_bytes: int) -> None:
        key = forward.stage, forward.slice
        if key in self._sizes:
            return
        self._sizes[key] = num_bytes
        used = most = 0
        for op in self._planned:
            if isinstance(op, (Evict, Reclaim)):
                size = -(-self._sizes.get((op.forward.stage, op.forward.slice), 0) // ALIGNMENT) * ALIGNMENT
                used += size if isinstance(op, Evict) else -size
                most = max(most, used)
        self._host.reserve(most)

    def handlers(self, observer: IterationObserver | None) -> Mapping[type[Op], Handler]:
        """The handlers of one iteration; ``observer`` is notified when copies run."""
        return {
            Evict: partial(self._evict, observer),
            ReleaseDevice: self._release,
            Fetch: partial(self._fetch, observer),
            Reclaim: self._reclaim,
            Discard: self._discard,
        }

    def _evict(self, observer: IterationObserver | None, op: Evict, inputs: Sequence[Ends]) -> tuple[_Copy]:
        (ends,) = inputs
        away = self._away[op.forward] = _Away(op.forward, ends, self._saved.take(op.forward), self._stays)
        self._bytes[_SMALL] += away.left_out
        self._reserve(op.forward, away.num_bytes)
        if away.num_bytes:
            away.buffer = self._host.take(away.num_bytes)
        return (self._start(observer, op, self._out, away.out(), away),)

    def _release(self, op: ReleaseDevice, inputs: Sequence[_Away]) -> tuple[_Away]:
        (away,) = inputs
        for key, has_left in away.leave():
            (self._left if has_left else self._stayed).add(key)
            self._bytes[_MOVED if has_left else _HELD] += key[-1]
        return (away,)

    def _fetch(self, observer: IterationObserver | None, op: Fetch, inputs: Sequence[_Away]) -> tuple[_Copy]:
        (away,) = inputs
        return (self._start(observer, op, self._back, away.back(), away.ends),)

    def _reclaim(self, op: Reclaim, inputs: Sequence[Ends]) -> Sequence[Ends]:
        self._free(op.forward)
        return inputs

    def _discard(self, op: Discard, _inputs: Sequence[_Away]) -> None:
        self._free(op.forward)

    def _free(self, forward: Pass) -> None:
        buffer = self._away.pop(forward).buffer
        if buffer is not None:
            self._host.give(buffer)

    def _start(
        self,
        observer: IterationObserver | None,
        op: Op,
        lane: Lane,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        value: Any,
    ) -> _Copy:
        work = partial(_copy, op, pairs)
        return _Copy(lane.start(observed_work(op, work, observer), ()), value)


class _Away:
    """What one forward saved, from its Evict to its Reclaim.

    Args:
        windows: of everything that it saved.
        stays: what never left in earlier iterations.

    Attributes:
        ends: input and output of the forward.
        buffer: its host memory; None if nothing moves.
        num_bytes: the size that the buffer needs.
        left_out: bytes in storages that do not move because they are small, or elsewhere.
    """

    def __init__(self, forward: Pass, ends: Ends, windows: list[Window], stays: set[StorageKey]) -> None:
        self.ends = ends
        self.buffer: PinnedBuffer | None = None
        device = next((end.device for end in ends if end is not None), None)
        places = dict.fromkeys(window.place for window in windows)
        keys = [(forward.stage, forward.slice, number, place.num_bytes) for number, place in enumerate(places)]
        moving = [
            (place, key)
            for place, key in zip(places, keys, strict=True)
            if key not in stays and _can_move(place, device)
        ]
        # Those of odd sizes last, so that the others start as torch aligns tensors on a GPU, without padding.
        self._moving = dict(sorted(moving, key=lambda each: each[0].num_bytes % ALIGNMENT > 0))
        self._windows = [window for window in windows if window.place in self._moving]
        *starts, self.num_bytes = accumulate((place.num_bytes for place in self._moving), initial=0)
        self.left_out = sum(key[-1] for key in keys if key not in stays) - self.num_bytes
        self._starts = dict(zip(self._moving, starts, strict=True))

    def out(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for place in self._moving for pair in self._with_host(place)]

    def back(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Allocate memory on the device; returns the (target, source) of each copy back."""
        pairs = []
        for place in self._starts:
            place.come_back(torch.empty(place.num_bytes, dtype=torch.uint8, device=place.device).untyped_storage())
            pairs += [(device, host) for host, device in self._with_host(place)]
        return pairs

    def leave(self) -> list[tuple[StorageKey, bool]]:
        """Free the memory on the device; returns for each storage whether it left, which it does unless something else
        refers to it.
        """
        for window in self._windows:
            window.leave()
        self._windows.clear()
        for end in self.ends:
            _keep_shape(end)
        left = {place: place.leave() for place in self._moving}
        self._starts = {place: start for place, start in self._starts.items() if left[place]}
        keys, self._moving = self._moving, {}
        return [(key, left[place]) for place, key in keys.items()]

    def _with_host(self, place: Place) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of a storage on host and device, in as many parts as the host has pieces for them."""
        assert self.buffer is not None, "something moves, so there is a buffer"
        own, done = _bytes(place), 0
        for part in self.buffer.parts(self._starts[place], place.num_bytes):
            yield part, own[done : done + part.numel()]
            done += part.numel()


def _summary(num_bytes: Mapping[str, int]) -> str:
    whole = sum(num_bytes.values())
    why = [
        f"{size / 2**20:.3g} MiB because {reason}" for reason, size in num_bytes.items() if reason != _MOVED and size
    ]
    stayed = f"{', '.join(why)} stayed" if why else "nothing stayed"
    return f"offload: of {whole / 2**20:.4g} MiB planned to move in the first iteration, {stayed} on the device"


def _can_move(place: Place, device: torch.device | None) -> bool:
    """Whether a storage is large enough, and on the device. A storage that is empty now is filled again before B:
    ``CheckpointWithoutOutput`` of Megatron frees outputs that it computes again.
    """
    storage = place.storage
    assert storage is not None, "nothing has moved yet"
    return min(place.num_bytes, storage.nbytes()) >= LEAST_BYTES and device in (None, place.device)


def _keep_shape(end: torch.Tensor | None) -> None:
    """Drop the bytes of an end of the graph, of which only graph, shape and gradient are needed. Upstream has done this
    to an output with one element, and the loss is as small.
    """
    if end is not None and end.numel() > 1:
        end.data = torch.empty((), dtype=end.dtype, device=end.device).expand(end.shape)


def _bytes(place: Place) -> torch.Tensor:
    storage = place.storage
    assert storage is not None, "its bytes are on the device"
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(op: Op, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy, and drop the references: they must be gone when ``leave`` asks what else refers to a storage.

    Raises:
        RuntimeError: a copy failed; the message names the op.
    """
    try:
        while pairs:
            target, source = pairs.pop()
            target.copy_(source, non_blocking=True)
    except RuntimeError as error:
        raise RuntimeError(f"{op}, a copy between device and host memory, failed: {error}") from error


class _Copy(Awaited):
    """A value on its way."""

    def __init__(self, result: Result, value: Any) -> None:
        self._result, self._value = result, value

    def wait(self, needed_by: object) -> Any:
        """Make the passes wait for the copy; raises what the copy raised."""
        self._result.wait()
        return self._value
