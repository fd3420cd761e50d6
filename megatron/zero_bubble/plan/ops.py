"""The ops of a plan: what a rank does, one after the other.

Every op prints in a short form that names the pass it belongs to:

    2F0      compute the pass
    2F0>3    hand the output of pass 2F0 to the sender; it travels to rank 3 while the rank goes on
    1F0<1    expect the output of pass 1F0 from rank 1; the rank goes on, the pass that needs it waits
    2F0=3    the output of 2F0 has reached rank 3: its buffer may be reused
    valid?   the optimizer step before this iteration was right, or everything until here is done again
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.ir import Kind, Pass, Schedule


class Message(NamedTuple):
    """The output of ``producer`` on its way from rank ``source`` to rank ``target``."""

    producer: Pass
    source: int
    target: int

    @property
    def channel(self) -> tuple[int, int]:
        """Messages of one channel arrive in the order they were sent."""
        return (self.source, self.target)

    @property
    def is_activation(self) -> bool:
        """Whether an output travels down the model; a gradient travels up."""
        return self.producer.kind is Kind.F


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one pass on the device."""

    work: Pass

    def __str__(self) -> str:
        return str(self.work)


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending; never waits."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.producer}>{self.message.target}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Post a receive; never waits."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.producer}<{self.message.source}"


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until the receiver has the message, then release the send buffer."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.producer}={self.message.target}"


@dataclass(frozen=True, slots=True)
class Validate:
    """Learn whether the last optimizer step was right; it depends on nothing of this iteration."""

    def __str__(self) -> str:
        return "valid?"


Op = Compute | Send | Recv | Settle | Validate


@dataclass(frozen=True)
class Plan:
    """The ops of every rank for one run of ``schedule``.

    Attributes:
        drain: of every rank, what empties the channels when it stops at its ``Validate``; none without.
    """

    schedule: Schedule
    ops: tuple[tuple[Op, ...], ...]
    drain: tuple[tuple[Op, ...], ...] = ()

    @cached_property
    def channels(self) -> frozenset[tuple[int, int]]:
        """The (source, target) pairs of ranks between which messages travel."""
        return frozenset(op.message.channel for row in self.ops for op in row if isinstance(op, Send))

    @cached_property
    def digest(self) -> str:
        """A fingerprint that is equal on two ranks exactly when they execute the same plan."""
        text = "\n".join(" ".join(map(str, row)) for row in self.ops)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
