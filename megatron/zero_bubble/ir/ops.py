"""Ops: what a rank does, one after the other, and what each op declares about itself.

Every op prints in a short form that names what it belongs to, and parses what it prints:

    2F0      compute the pass
    2F0>3    hand the output of pass 2F0 to the transport, which takes it to rank 3; never waits
    1F0<1    post a receive for the output of pass 1F0 from rank 1; never waits, the pass that takes it does
    2F0=3    wait until rank 3 has the output of 2F0, then release the buffer
    valid?   learn whether the optimizer step before this iteration stands; if not, all ranks stop here and start again

The prover, the simulator, the executor, the recorder and the renderers know of an op only what ``Op`` declares. A new
kind of op is a new class, a lowering pass that places it and a handler that runs it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir.flow import Flow, Value
from megatron.zero_bubble.ir.passes import Kind, Pass

if TYPE_CHECKING:
    from megatron.zero_bubble.ir.plan import Plan

COMPUTE, COPY, NET = "compute", "copy", "net"


class Times(Protocol):
    """What an op's duration is read from: ``costs.PassCosts``."""

    def duration(self, p: Pass, num_slices: int = 1) -> float: ...


class Memory(Protocol):
    """What an op's memory is read from: ``costs.PassMemory``."""

    def delta(self, p: Pass, num_slices: int = 1) -> float: ...

    def size(self, value: Value, num_slices: int = 1) -> float: ...


class Token(NamedTuple):
    """Something that one rank makes true for all ranks, and that stays true."""

    fact: str
    of: Hashable


class Effects(NamedTuple):
    """What an op needs and what it brings about. What is given and taken are values, which are handed to the op's
    handler, and whatever else a rank has and must not lose: the buffer of a message under way, named by the message.

    Attributes:
        uses: what must be on its rank.
        gives: what is on its rank when it ends.
        takes: what must be on its rank, and is gone when it ends.
        waits: tokens that must hold before it starts.
        makes: tokens that hold once it has ended.
        arrives: the token of another rank with which the given values are there; None: when the op ends.
    """

    uses: tuple[Value, ...] = ()
    gives: tuple[Hashable, ...] = ()
    takes: tuple[Hashable, ...] = ()
    waits: tuple[Token, ...] = ()
    makes: tuple[Token, ...] = ()
    arrives: Token | None = None


_NONE = Effects()


class Op:
    """One step of a rank, and everything that others have to know of it.

    A rank runs its ops in order. A value is dropped by the last op of the row that uses it; one that no op of the row
    uses must be taken by a later one.

    Attributes:
        lane: the resource of the rank that the op occupies while it runs; ops of one lane run one after the other, and
            lanes run side by side. None for an op that takes no time of its own.
    """

    __slots__ = ()
    lane: ClassVar[str | None] = None

    def effects(self, flow: Flow) -> Effects:
        """What it needs and what it brings about."""
        return _NONE

    def duration_ms(self, times: Times, num_slices: int) -> float:
        """How long it occupies its lane."""
        return 0.0

    def memory(self, memory: Memory, num_slices: int) -> tuple[float, float]:
        """By how much it changes what its rank keeps: when it starts, and when it ends. An op that changes it has a
        lane, even if it takes no time.
        """
        return 0.0, 0.0

    @classmethod
    def parse(cls, text: str, rank: int) -> Op | None:
        """Read what ``str`` wrote of an op of ``rank``; None when it is of another class."""
        return None

    @classmethod
    def faults(cls, plan: Plan, stopped: bool) -> Iterator[tuple[str, int]]:
        """What no single op shows: a sentence and a rank for every rule of the class that ``plan`` breaks.

        Args:
            stopped: the ops are those of ranks that stop at their ``Validate``, with the drain behind them.
        """
        return iter(())


class Message(NamedTuple):
    """``value`` on its way from rank ``source`` to rank ``target``."""

    value: Value
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.value} from rank {self.source} to rank {self.target}"

    @property
    def producer(self) -> Pass:
        """The pass that made it."""
        return self.value.producer

    @property
    def channel(self) -> tuple[int, int]:
        """Messages of one channel arrive in the order they were sent."""
        return (self.source, self.target)

    @property
    def is_activation(self) -> bool:
        """Whether it comes from a forward; a gradient comes from a backward."""
        return self.producer.kind is Kind.F


def memory_of(p: Pass, memory: Memory, num_slices: int) -> tuple[float, float]:
    """F saves from its start on; a backward and a W free, or replace, at their end."""
    delta = memory.delta(p, num_slices)
    return (delta, 0.0) if p.kind is Kind.F else (0.0, delta)


@dataclass(frozen=True, slots=True)
class Compute(Op):
    """Run one pass on the device."""

    work: Pass
    lane: ClassVar[str] = COMPUTE

    def __str__(self) -> str:
        return str(self.work)

    def effects(self, flow: Flow) -> Effects:
        return Effects(flow.inputs(self.work), flow.outputs(self.work))

    def duration_ms(self, times: Times, num_slices: int) -> float:
        return times.duration(self.work, num_slices)

    def memory(self, memory: Memory, num_slices: int) -> tuple[float, float]:
        return memory_of(self.work, memory, num_slices)

    @classmethod
    def parse(cls, text: str, rank: int) -> Compute | None:
        return cls(Pass.parse(text)) if re.fullmatch(r"\d+[A-Z]+[\d.]+", text) else None

    @classmethod
    def faults(cls, plan: Plan, stopped: bool) -> Iterator[tuple[str, int]]:
        """Every pass of the schedule, on its rank, once."""
        seen: set[Pass] = set()
        for rank, row in enumerate(plan.ops):
            for op in row:
                if isinstance(op, Compute):
                    if op.work in seen:
                        yield f"pass {op.work} runs twice", rank
                    seen.add(op.work)
        missing = [p for p in plan.schedule.passes() if p not in seen]
        if missing and not stopped:
            rank = plan.schedule.placement.stage_to_rank[missing[0].stage]
            yield f"{len(missing)} passes are never computed, {min(map(str, missing))} among them", rank


@dataclass(frozen=True, slots=True)
class Send(Op):
    """Start sending; never waits."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.value}>{self.message.target}"

    def effects(self, flow: Flow) -> Effects:
        message = self.message
        return Effects(uses=(message.value,), gives=(message,), makes=(Token("sent", message),))

    @classmethod
    def parse(cls, text: str, rank: int) -> Send | None:
        match = re.fullmatch(r"(.+)>(\d+)", text)
        return cls(Message(Value.parse(match[1]), rank, int(match[2]))) if match else None

    @classmethod
    def faults(cls, plan: Plan, stopped: bool) -> Iterator[tuple[str, int]]:
        """Sent from its source and received at its target, the n-th send of a channel as its n-th receive."""
        for rank, row in enumerate(plan.ops):
            for op in row:
                at_home = (
                    op.message.source == rank
                    if isinstance(op, (Send, Settle))
                    else not isinstance(op, Recv) or op.message.target == rank
                )
                if not at_home:
                    yield f"{op} is not for rank {rank}", rank
        sent, posted = plan.messages(Send), plan.messages(Recv)
        for channel in sorted(sent.keys() | posted.keys()):
            source, target = channel
            sends, receives = sent.get(channel, []), posted.get(channel, [])
            for place, (mine, other) in enumerate(zip(sends, receives, strict=False)):
                if mine != other:
                    ends = f"{mine.value} on one end and {other.value} on the other"
                    yield f"message {place} of channel {source}>{target} is {ends}", target
            if len(sends) != len(receives):
                yield f"channel {source}>{target} has {len(sends)} sends and {len(receives)} receives", target


@dataclass(frozen=True, slots=True)
class Recv(Op):
    """Post a receive; never waits."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.value}<{self.message.source}"

    def effects(self, flow: Flow) -> Effects:
        message = self.message
        return Effects(gives=(message.value,), makes=(Token("posted", message),), arrives=Token("sent", message))

    @classmethod
    def parse(cls, text: str, rank: int) -> Recv | None:
        match = re.fullmatch(r"(.+)<(\d+)", text)
        return cls(Message(Value.parse(match[1]), int(match[2]), rank)) if match else None


@dataclass(frozen=True, slots=True)
class Settle(Op):
    """Wait until the receiver has the message, then release the send buffer."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.value}={self.message.target}"

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.message,), waits=(Token("posted", self.message),))

    @classmethod
    def parse(cls, text: str, rank: int) -> Settle | None:
        match = re.fullmatch(r"(.+)=(\d+)", text)
        return cls(Message(Value.parse(match[1]), rank, int(match[2]))) if match else None


STEPPED = Token("stepped", None)
"""All ranks have taken the optimizer step before this iteration; no op makes it true."""


@dataclass(frozen=True, slots=True)
class Validate(Op):
    """Learn whether the last optimizer step was right; it depends on nothing of this iteration."""

    def __str__(self) -> str:
        return "valid?"

    def effects(self, flow: Flow) -> Effects:
        return Effects(waits=(STEPPED,))

    @classmethod
    def parse(cls, text: str, rank: int) -> Validate | None:
        return cls() if text == "valid?" else None

    @classmethod
    def faults(cls, plan: Plan, stopped: bool) -> Iterator[tuple[str, int]]:
        """All ranks stop together, so each has one place to do so."""
        for rank, row in enumerate(plan.ops):
            if (count := row.count(cls())) != 1:
                yield f"every rank must validate once; rank {rank} does {count} times", rank


OPS: tuple[type[Op], ...] = (Send, Recv, Settle, Validate, Compute)


def parse_op(text: str, rank: int, ops: Iterable[type[Op]] = OPS) -> Op:
    """The op of ``rank`` that prints as ``text``.

    Args:
        ops: the classes to try, in this order.

    Raises:
        UserError: when it is none of them.
    """
    for op in ops:
        if (found := op.parse(text, rank)) is not None:
            return found
    raise UserError(f"an op is written 2F0, 2F0>3, 1F0<1, 2F0=3 or valid?; got {text!r}")
