"""Offloading, as ops: what a forward saved moves to host memory, and back before its backward.

    2F0^     start to copy what 2F0 saved to the host
    2F0~     wait until it is there, then free it on the device
    2F0v     allocate it on the device, and start to copy it back
    2F0_     wait until it is there, then free it on the host
    2F0x     free it on the host, because the ranks have stopped

The method is that of PipeOffload (arXiv 2503.01328, section 3). The copies of a rank run in order on two lanes, one per
direction, because links are duplex (section 5 has one for both; docs/offload.md has what was measured). A copy is read,
and the memory that it reads is freed, only by an op that waits for it. So the order of the ops alone proves that no
backward reads what is not there, and that no copy overwrites what another one still reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megatron.zero_bubble.core.ir.flow import SAVED, Flow, Value
from megatron.zero_bubble.core.ir.ops import COMPUTE, COPY_BACK, COPY_OUT, Effects, Memory, Op, Times
from megatron.zero_bubble.core.ir.passes import Pass
from megatron.zero_bubble.core.ir.slices import Slices

LEAVING = "leaving"
"""What a forward saved, while it is copied to the host and still on the device."""
HOST = "host"
"""What a forward saved, in host memory only."""
COMING = "coming"
"""What a forward saved, while it is copied back to the device and still on the host."""


class HostBuffer(NamedTuple):
    """The host memory of what ``forward`` saved. Unlike a value, it must be freed also when the ranks stop."""

    forward: Pass

    def __str__(self) -> str:
        return f"the host memory of {self.forward}"


@dataclass(frozen=True, slots=True)
class _Move(Op):
    """An op on what ``forward`` saved."""

    forward: Pass
    sign: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.forward}{self.sign}"

    @property
    def saved(self) -> Value:
        """The value on the device."""
        return Value(self.forward, SAVED)

    @property
    def leaving(self) -> Value:
        return Value(self.forward, LEAVING)

    @property
    def on_host(self) -> Value:
        return Value(self.forward, HOST)

    @property
    def coming(self) -> Value:
        return Value(self.forward, COMING)

    @classmethod
    def parse(cls, text: str, rank: int) -> _Move | None:
        match = re.fullmatch(rf"([0-9]+F[0-9.]+){re.escape(cls.sign)}", text)
        return cls(Pass.parse(match[1])) if match else None


class Evict(_Move):
    """Allocate host memory and start to copy to it; never waits. The device keeps its memory until
    ``ReleaseDevice``.
    """

    __slots__ = ()
    lane: ClassVar[str] = COPY_OUT
    sign = "^"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.saved,), gives=(self.leaving, HostBuffer(self.forward)))

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.copy(self.saved, slices)

    def host_memory(self, memory: Memory, slices: Slices) -> float:
        return memory.size(self.saved, slices)


class ReleaseDevice(_Move):
    """Wait until the copy is on the host, then free the device's memory. The passes of the rank wait with it, so that
    what is freed is free for the next pass.
    """

    __slots__ = ()
    lane: ClassVar[str] = COMPUTE
    sign = "~"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.leaving,), gives=(self.on_host,))

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        return 0.0, -memory.size(self.saved, slices)


class Fetch(_Move):
    """Allocate device memory and start to copy back; never waits. The host keeps its memory until ``Reclaim``."""

    __slots__ = ()
    lane: ClassVar[str] = COPY_BACK
    sign = "v"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.on_host,), gives=(self.coming,))

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.copy(self.saved, slices)

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        return memory.size(self.saved, slices), 0.0


class Reclaim(_Move):
    """Wait until the copy is back on the device, then free the host's memory. The passes of the rank wait with it, and
    copies to the host wait for the passes before them, so none overwrites what the copy back still reads.
    """

    __slots__ = ()
    lane: ClassVar[str] = COMPUTE
    sign = "_"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.coming, HostBuffer(self.forward)), gives=(self.saved,))

    def host_memory(self, memory: Memory, slices: Slices) -> float:
        return -memory.size(self.saved, slices)


class Discard(_Move):
    """Free the host memory without a copy: part of the drain, when the ranks stop after a rejected optimizer step."""

    __slots__ = ()
    sign = "x"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.on_host, HostBuffer(self.forward)))

    def host_memory(self, memory: Memory, slices: Slices) -> float:
        return -memory.size(self.saved, slices)


OFFLOAD_OPS: tuple[type[Op], ...] = (Evict, ReleaseDevice, Fetch, Reclaim, Discard)
