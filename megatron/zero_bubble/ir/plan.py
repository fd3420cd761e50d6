"""The plan: the ops of every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.ir.collection import without_collection
from megatron.zero_bubble.ir.offload import OFFLOAD_OPS
from megatron.zero_bubble.ir.ops import OPS, Compute, Effects, Message, Op, Recv, Send, parse_op
from megatron.zero_bubble.ir.registers import Allocation, allocate
from megatron.zero_bubble.ir.schedule import Schedule
from megatron.zero_bubble.ir.shards import SHARD_OPS
from megatron.zero_bubble.ir.unrolled import Unrolled

Channel = tuple[int, int]


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
    ops: Sequence[tuple[Op, ...]]
    drain: tuple[tuple[Op, ...], ...] = ()
    has_messages: bool = True

    @classmethod
    def bare(cls, schedule: Schedule) -> Plan:
        """A plan with only the passes of ``schedule``."""
        return cls(schedule, tuple(tuple(map(Compute, row)) for row in schedule.order), has_messages=False)

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

    def messages(self, kind: type[Send | Recv]) -> dict[Channel, list[Message]]:
        """The messages of all ops of class ``kind`` by channel, in the order of the rank that has the op."""
        found: dict[Channel, list[Message]] = {}
        for row in self.ops:
            for op in row:
                if isinstance(op, kind):
                    found.setdefault(op.message.channel, []).append(op.message)
        return found

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

    @without_collection()
    def _make_executable(self, rank: int) -> Executable:
        flow, ops = self.schedule.flow, self.ops[rank]
        drain = self.drain[rank] if self.drain else ()
        row = (*ops, *drain)
        return Executable(ops, drain, allocate(row, [op.effects(flow) for op in row], len(ops)))

    def allocation(self, rank: int) -> Allocation:
        """The registers that hold the values of ``rank`` while it runs."""
        return self.executable(rank).registers

    def to_text(self) -> tuple[tuple[str, ...], ...]:
        """``ops`` as strings."""
        return tuple(tuple(map(str, row)) for row in self.ops)

    @classmethod
    def from_text(
        cls,
        schedule: Schedule,
        rows: Iterable[Iterable[str]],
        ops: Iterable[type[Op]] = (*OPS, *OFFLOAD_OPS, *SHARD_OPS),
        has_messages: bool = True,
    ) -> Plan:
        """Read what ``to_text`` wrote; ``ops`` are the allowed classes of ops.

        Raises:
            UserError: for an op of any other class.
        """
        classes = tuple(ops)
        parsed = (tuple(parse_op(text, rank, classes) for text in row) for rank, row in enumerate(rows))
        return cls(schedule, tuple(parsed), has_messages=has_messages)
