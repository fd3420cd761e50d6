"""Ops: the steps of a rank, in order, and the facts that each op declares.

Every op prints in a short form with its pass or message, and parses what it prints:

    2F0      compute the pass
    2F0>3    give the output of pass 2F0 to the transport, which sends it to rank 3; never waits
    1F0<1    post a receive for the output of pass 1F0 from rank 1; never waits, but the pass that uses it does
    2F0=3    wait until rank 3 has the output of 2F0, then release the buffer
    valid?   learn whether the previous optimizer step is valid; if not, all ranks stop here and restart the iteration

The prover, the simulator, the executor, the recorder and the renderers use only the facts that ``Op`` declares. A new
kind of op needs a class, a lowering pass that inserts it and a handler that runs it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.flow import Flow, Value
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.core.ir.passes import VOCABULARY_KINDS, F, Pass, later
from megatron.zero_bubble.core.ir.schedule import Schedule
from megatron.zero_bubble.core.ir.slices import WHOLE, Slices

COMPUTE, COPY_OUT, COPY_BACK, NET, ALL_TO_ALL = "compute", "copy out", "copy back", "net", "all-to-all"


class Times(Protocol):
    """The source of an op's duration: ``costs.PassCosts``."""

    def duration(self, p: Pass, slices: Slices = WHOLE) -> float: ...

    def parts(self, works: tuple[Pass, ...]) -> tuple[LanePart, ...]: ...

    def pair(self, forward: Pass, backward: Pass, slices: Slices = WHOLE) -> float: ...

    def copy(self, value: Value, slices: Slices = WHOLE) -> float: ...

    def collective(self) -> float: ...

    def gather(self, stage: int) -> float: ...

    def reduce(self, stage: int) -> float: ...


class Memory(Protocol):
    """The source of an op's memory: ``costs.PassMemory``."""

    def changes(self, p: Pass, slices: Slices = WHOLE) -> tuple[float, float]: ...

    def size(self, value: Value, slices: Slices = WHOLE) -> float: ...


class Token(NamedTuple):
    """A fact that one rank makes true for all ranks, and that stays true."""

    fact: str
    of: Hashable


class Effects(NamedTuple):
    """The requirements and results of an op. ``gives`` and ``takes`` contain values, which the op's handler receives,
    and other resources that a rank must not lose: the buffer of a message in transit, identified by the message.

    Attributes:
        uses: values that must be on the op's rank.
        gives: resources that are on the rank when the op ends.
        takes: resources that must be on the rank, and that the op removes.
        waits: tokens that must hold before the op starts.
        makes: tokens that hold once the op has ended.
        arrives: the tokens of other ranks with which the given values arrive; none if they exist when the op ends.
    """

    uses: tuple[Value, ...] = ()
    gives: tuple[Hashable, ...] = ()
    takes: tuple[Hashable, ...] = ()
    waits: tuple[Token, ...] = ()
    makes: tuple[Token, ...] = ()
    arrives: tuple[Token, ...] = ()


_NONE = Effects()

Channel = tuple[int, int]
"""The (source, target) ranks of messages, which arrive in the order in which they are sent."""


class Op:
    """One step of a rank, with all facts that other code needs about it.

    A rank runs its ops in order. The last op of a row that uses a value drops it; if no op of the row uses a value, a
    later op must take it.

    Attributes:
        lane: the resource of the rank that the op occupies while it runs; the ops of one lane run one after the other,
            and lanes run concurrently. None for an op that takes no time.
    """

    __slots__ = ()
    lane: ClassVar[str | None] = None

    @property
    def works(self) -> tuple[Pass, ...]:
        """The passes that the op computes; none for an op that only moves or waits for something."""
        return ()

    def effects(self, flow: Flow) -> Effects:
        """The requirements and results of the op."""
        return _NONE

    def duration_ms(self, times: Times, slices: Slices) -> float:
        """How long the op occupies its lane."""
        return 0.0

    def parts(self, times: Times) -> tuple[LanePart, ...]:
        """The parts of an op that occupies several lanes, in the order in which it issues them; the next op may start
        when the lanes of its own parts are free. Empty for an op that occupies its lane for ``duration_ms``.
        """
        return ()

    def arrival_ms(self, times: Times, token: Hashable) -> float:
        """How much longer than a message ``token`` takes from another rank to this op."""
        return 0.0

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        """The changes of its rank's memory at its start and at its end. An op that changes memory has a lane, even if
        it takes no time. On a lane other than that of the passes, memory is allocated when the rank issues the op.
        """
        return 0.0, 0.0

    def host_memory(self, memory: Memory, slices: Slices) -> float:
        """The change of host memory by the op."""
        return 0.0

    def later(self, by: int) -> Op | None:
        """The op that does the same for microbatches that are ``by`` later; its effects must be the same ``later``.

        None, for every op of the class, if there is none: plans with such ops are stored in full.
        """
        return None

    @classmethod
    def parse(cls, text: str, rank: int) -> Op | None:
        """Read what ``str`` wrote for an op of ``rank``; None if it is an op of another class."""
        return None

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check the rules of the class that involve several ops; yield a sentence and a rank for each broken rule.

        Args:
            schedule: the schedule that ``rows`` execute.
            rows: the ops of every rank.
            stopped: whether the ops are those of ranks that stop at their ``Validate``, followed by the drain.
        """
        return iter(())


Rows = Sequence[tuple[Op, ...]]
"""The ops of every rank."""


class Message(NamedTuple):
    """``value``, sent from rank ``source`` to rank ``target``."""

    value: Value
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.value} from rank {self.source} to rank {self.target}"

    @property
    def producer(self) -> Pass:
        """The pass that produced the value."""
        return self.value.producer

    @property
    def channel(self) -> Channel:
        """The channel; messages of one channel arrive in the order in which they are sent."""
        return (self.source, self.target)

    def later(self, by: int) -> Message:
        """The message for a microbatch that is ``by`` later."""
        (producer, name), source, target = self  # faster than ``passes.later``, for millions of ops
        return Message(Value(later(producer, by), name), source, target)

    @property
    def is_activation(self) -> bool:
        """Whether the value comes from a forward; a gradient comes from a backward."""
        return self.producer.kind is F


@dataclass(frozen=True, slots=True)
class Compute(Op):
    """Run one pass on the device."""

    work: Pass
    lane: ClassVar[str] = COMPUTE

    @property
    def works(self) -> tuple[Pass, ...]:
        return (self.work,)

    def __str__(self) -> str:
        return str(self.work)

    def effects(self, flow: Flow) -> Effects:
        return Effects(flow.inputs(self.work), flow.outputs(self.work))

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.duration(self.work, slices)

    def parts(self, times: Times) -> tuple[LanePart, ...]:
        return times.parts(self.works)

    def arrival_ms(self, times: Times, token: Hashable) -> float:
        """In a schedule without ops, passes are tokens, and all ranks take part in what passes of the vocabulary take
        and make.
        """
        collective = isinstance(token, Pass) and (self.work.kind in VOCABULARY_KINDS or token.kind in VOCABULARY_KINDS)
        return times.collective() if collective else 0.0

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        return memory.changes(self.work, slices)

    def later(self, by: int) -> Compute:
        return Compute(later(self.work, by))

    @classmethod
    def parse(cls, text: str, rank: int) -> Compute | None:
        return cls(Pass.parse(text)) if re.fullmatch(r"[0-9]+[A-Z]+[0-9.]+", text) else None

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that every pass of the schedule runs once."""
        seen: set[Pass] = set()
        for rank, row in enumerate(rows):
            for op in row:
                for work in op.works:
                    if work in seen:
                        yield f"pass {work} runs twice", rank
                    seen.add(work)
        missing = [p for p in schedule.passes() if p not in seen]
        if missing and not stopped:
            rank = schedule.placement.stage_to_rank[missing[0].stage]
            yield f"{len(missing)} passes are never computed, including {min(map(str, missing))}", rank


@dataclass(frozen=True, slots=True)
class _OfMessage(Op):
    """An op on a message, written with its value, a sign and the other rank: the target, unless the op receives."""

    message: Message
    sign: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.message.value}{self.sign}{self.message.target}"

    def later(self, by: int) -> _OfMessage:
        return type(self)(self.message.later(by))

    @classmethod
    def parse(cls, text: str, rank: int) -> _OfMessage | None:
        match = re.fullmatch(rf"(.+){cls.sign}([0-9]+)", text)
        return cls(Message(Value.parse(match[1]), rank, int(match[2]))) if match else None


class Send(_OfMessage):
    """Start sending; never waits."""

    __slots__ = ()
    sign = ">"

    def effects(self, flow: Flow) -> Effects:
        message = self.message
        return Effects(uses=(message.value,), gives=(message,), makes=(Token("sent", message),))

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that messages are sent on their source rank and received on their target rank, and that the n-th send
        of a channel matches its n-th receive.
        """
        for rank, row in enumerate(rows):
            for op in row:
                at_home = (
                    op.message.source == rank
                    if isinstance(op, (Send, Settle))
                    else not isinstance(op, Recv) or op.message.target == rank
                )
                if not at_home:
                    yield f"{op} is not for rank {rank}", rank
        sent, posted = messages(Send, rows), messages(Recv, rows)
        for channel in sorted(sent.keys() | posted.keys()):
            source, target = channel
            sends, receives = sent.get(channel, []), posted.get(channel, [])
            for place, (mine, other) in enumerate(zip(sends, receives, strict=False)):
                if mine != other:
                    ends = f"{mine.value} on one end and {other.value} on the other"
                    yield f"message {place} of channel {source}>{target} is {ends}", target
            if len(sends) != len(receives):
                yield f"channel {source}>{target} has {len(sends)} sends and {len(receives)} receives", target


class Recv(_OfMessage):
    """Post a receive; never waits."""

    __slots__ = ()
    sign = "<"

    def __str__(self) -> str:
        return f"{self.message.value}{self.sign}{self.message.source}"

    def effects(self, flow: Flow) -> Effects:
        message = self.message
        return Effects(gives=(message.value,), makes=(Token("posted", message),), arrives=(Token("sent", message),))

    @classmethod
    def parse(cls, text: str, rank: int) -> Recv | None:
        match = re.fullmatch(rf"(.+){cls.sign}([0-9]+)", text)
        return cls(Message(Value.parse(match[1]), int(match[2]), rank)) if match else None


class Settle(_OfMessage):
    """Wait until the receiver has the message, then release the send buffer."""

    __slots__ = ()
    sign = "="

    def effects(self, flow: Flow) -> Effects:
        return Effects(takes=(self.message,), waits=(Token("posted", self.message),))


STEPPED = Token("stepped", None)
"""All ranks have taken the optimizer step before this iteration; no op makes this token."""


@dataclass(frozen=True, slots=True)
class Validate(Op):
    """Learn whether the previous optimizer step was valid; this does not depend on any pass of this iteration."""

    def __str__(self) -> str:
        return "valid?"

    def effects(self, flow: Flow) -> Effects:
        return Effects(waits=(STEPPED,))

    @classmethod
    def parse(cls, text: str, rank: int) -> Validate | None:
        return cls() if text == "valid?" else None

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that every rank validates once: all ranks stop together, each at its one ``Validate``."""
        for rank, row in enumerate(rows):
            if (count := row.count(cls())) != 1:
                yield f"every rank must validate once; rank {rank} validates {count} times", rank


def messages(kind: type[Send | Recv], rows: Rows) -> dict[Channel, list[Message]]:
    """The messages of all ops of class ``kind`` by channel, in the order of the rank that has the op."""
    found: dict[Channel, list[Message]] = {}
    for row in rows:
        for op in row:
            if isinstance(op, kind):
                found.setdefault(op.message.channel, []).append(op.message)
    return found


OPS: tuple[type[Op], ...] = (Send, Recv, Settle, Validate, Compute)


def parse_op(text: str, rank: int, ops: Iterable[type[Op]] = OPS) -> Op:
    """Parse the op of ``rank`` that prints as ``text``.

    Args:
        ops: the classes to try, in this order.

    Raises:
        UserError: when no class can parse ``text``.
    """
    for op in ops:
        if (found := op.parse(text, rank)) is not None:
            return found
    raise UserError(f"an op is written 2F0, 2F0>3, 1F0<1, 2F0=3 or valid?; got {text!r}")
