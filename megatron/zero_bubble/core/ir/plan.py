"""The plan: the ops of every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.ops import Channel, Effects, Op, Rows, Send
from megatron.zero_bubble.core.ir.pairs import computes
from megatron.zero_bubble.core.ir.registers import Allocation, allocate
from megatron.zero_bubble.core.ir.schedule import Schedule

Cut = tuple[int, ...]
"""A position in each rank's row of ops."""


class Executable(NamedTuple):
    """The ops of one rank, those of its drain, and the registers of both."""

    ops: tuple[Op, ...]
    drain: tuple[Op, ...]
    registers: Allocation


@dataclass(frozen=True)
class Plan:
    """The ops of every rank for one run of ``schedule``.

    Attributes:
        drain: for every rank, the ops that empty the channels if it stops at its ``Validate``; empty for a plan without
            ``Validate``.
        has_messages: whether ops move values between ranks. If not, a value is on another rank one transfer after it
            was produced; such a plan can be simulated but not executed.
    """

    schedule: Schedule
    ops: Rows
    drain: tuple[tuple[Op, ...], ...] = ()
    has_messages: bool = True

    @classmethod
    def bare(cls, schedule: Schedule) -> Plan:
        """A plan with only the ops that compute the passes of ``schedule``."""
        return cls(schedule, tuple(tuple(computes(row, schedule.pairs)) for row in schedule.order), has_messages=False)

    @property
    def stem(self) -> Plan:
        """The part of the plan that is stored: all of it, unless its ops are ``Unrolled``."""
        return self.ops.stem if isinstance(self.ops, Unrolled) else self

    @cached_property
    def channels(self) -> frozenset[Channel]:
        """The (source, target) pairs of ranks between which messages travel."""
        return frozenset(op.message.channel for row in self.stem.ops for op in row if isinstance(op, Send))

    @cached_property
    def digest(self) -> str:
        """A hash of the ops of all ranks, as they are stored: equal on ranks that lower the same schedule."""
        text = "\n".join(" ".join(row) for row in self.stem.to_text())
        if isinstance(self.ops, Unrolled):
            text += f"\n{self.ops.cuts} {self.ops.num_microbatches} {self.ops.copies}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def effects(self) -> tuple[tuple[Effects, ...], ...]:
        """The requirements and results of every op."""
        flow = self.schedule.flow
        return tuple(tuple([op.effects(flow) for op in row]) for row in self.ops)

    def executable(self, rank: int) -> Executable:
        """What ``rank`` executes in every iteration; made once."""
        if rank not in self._executables:
            self._executables[rank] = self._make_executable(rank)
        return self._executables[rank]

    @cached_property
    def _executables(self) -> dict[int, Executable]:
        return {}

    @without_gc()
    def _make_executable(self, rank: int) -> Executable:
        flow, ops = self.schedule.flow, self.ops[rank]
        drain = self.drain[rank] if self.drain else ()
        row = (*ops, *drain)
        return Executable(ops, drain, allocate(row, [op.effects(flow) for op in row], len(ops)))

    def to_text(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(map(str, row)) for row in self.ops)


@dataclass(frozen=True, eq=False)
class Unrolled(Sequence[tuple[Op, ...]]):
    """The ops of every rank, of which the repeated part is stored once: windows are inserted in the rows of ``stem``.
    The row of a rank is made whenever it is read.

    Attributes:
        stem: the plan without the inserted windows.
        cuts: the start of a window, its end, and the end of the next window, which is equal but for its microbatches.
        num_microbatches: how many microbatches later the next window is.
        copies: the number of windows to insert between the two.
    """

    stem: Plan
    cuts: tuple[Cut, Cut, Cut]
    num_microbatches: int
    copies: int

    def __len__(self) -> int:
        return len(self.stem.ops)

    @overload
    def __getitem__(self, rank: int) -> tuple[Op, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Op, ...], ...]: ...
    @without_gc()
    def __getitem__(self, rank: int | slice) -> Any:
        if isinstance(rank, slice):
            return tuple(self[number] for number in range(len(self))[rank])
        row = self.stem.ops[rank]
        begin, end, _ = (cut[rank] for cut in self.cuts)
        inserted = (
            op.later(copy * self.num_microbatches) for copy in range(1, self.copies + 1) for op in row[begin:end]
        )
        return (*row[:end], *inserted, *(op.later(self.copies * self.num_microbatches) for op in row[end:]))

    def lasts_as_long_as(self, schedule: Schedule) -> bool:
        """Whether the stem and the inserted windows together have the microbatches of ``schedule``."""
        of = self.stem.schedule
        count = of.num_microbatches + self.copies * self.num_microbatches
        return self.copies >= 0 and (of.name, of.placement, count) == (
            schedule.name,
            schedule.placement,
            schedule.num_microbatches,
        )

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (Unrolled, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))
