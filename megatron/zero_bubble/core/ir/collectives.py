"""Collectives between all ranks of a pipeline, as ops.

    7F3:hidden>*     give a value to the collective that moves it to all ranks
    7F3:hidden<*7    take part in that collective as a receiver; rank 7 has the value
    2S3:part<>*      tell all ranks what they need to know of this rank's part before the parts can be added
    2S3:part>+7      give this rank's part to the collective that adds the parts of all ranks on rank 7
    7S3:part<+7      the same on rank 7, which receives the sum in place of the parts
    2S3:part>+7=     wait until the collective has read this rank's part, then free it

A rank starts a collective and proceeds; the pass that uses its result waits. The collectives of a kind (``lane``) run
in the same order on all ranks, one after the other, and those of different kinds independently of each other. A result
is complete when all ranks have started the collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron.zero_bubble.core.ir.flow import Flow, Value
from megatron.zero_bubble.core.ir.ops import NET, Effects, Op, Rows, Times, Token
from megatron.zero_bubble.core.ir.passes import Kind, Pass, later
from megatron.zero_bubble.core.ir.schedule import Schedule
from megatron.zero_bubble.core.ir.slices import Slices

_GIVEN = "_given"
"""Ends the name of what a rank has given to a collective."""


# The ops of all ranks ask for the same lanes and tokens.
@lru_cache(maxsize=64)
def _lane(kind: Kind, name: str) -> str:
    return f"{NET} {kind}:{name}"


@lru_cache(maxsize=1024)
def _started(key: Value, num_ranks: int) -> tuple[Token, ...]:
    """By rank, the token that it makes when it has started a collective."""
    return tuple([Token("started", (key, rank)) for rank in range(num_ranks)])


def _given(value: Value) -> Value:
    """What a rank has given of a value."""
    producer, name = value
    return Value(producer, f"{name}{_GIVEN}")


def _of_all_ranks(part: Value) -> Value:
    """The part of the rank of the first stage, by which the parts of all ranks go."""
    (_, kind, microbatch, slice_), name = part  # faster than ``_replace``
    return Value(Pass(0, kind, microbatch, slice_), name)


@dataclass(frozen=True, slots=True)
class Collective(Op):
    """The part of one rank in a collective.

    Attributes:
        value: the value that moves, or the part of this rank.
        rank: the rank of this op.
        root: the rank that has the value, or receives the sum.
        num_ranks: the number of ranks that take part.
    """

    value: Value
    rank: int
    root: int
    num_ranks: int

    @property
    def key(self) -> Value:
        """What identifies the collective on all ranks."""
        return self.value

    @property
    def lane(self) -> str:  # type: ignore[override]
        (_, kind, _, _), name = self.value
        return _lane(kind, name)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def operand(self) -> Value | None:
        """What a rank without a result has given to the collective, which reads it until ``Finish``; None on others."""
        raise NotImplementedError

    def started(self, rank: int) -> Token:
        """The token that ``rank`` makes when it has started the collective."""
        return _started(self.key, self.num_ranks)[rank]

    def arrival(self) -> tuple[Token, ...]:
        tokens = _started(self.key, self.num_ranks)
        return tokens[: self.rank] + tokens[self.rank + 1 :]

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.collective()

    def later(self, by: int) -> Collective:
        return type(self)(later(self.value, by), self.rank, self.root, self.num_ranks)

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that all ranks run the collectives of each kind in the same order."""
        orders: list[dict[str, list[Value]]] = []
        for rank, row in enumerate(rows):
            order: dict[str, list[Value]] = {}
            for op in row:
                if isinstance(op, Collective):
                    order.setdefault(op.lane, []).append(op.key)
                    if op.rank != rank:
                        yield f"{op} is not for rank {rank}", rank
            orders.append(order)
        for rank, order in enumerate(orders):
            for lane in sorted(orders[0].keys() | order.keys()):
                mine, theirs = order.get(lane, []), orders[0].get(lane, [])
                if mine != theirs:
                    place = next(
                        (k for k, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None
                    )
                    what = (
                        f"{len(mine)} on one rank and {len(theirs)} on the other"
                        if place is None
                        else f"{mine[place]} on one rank and {theirs[place]} on the other"
                    )
                    yield f"collectives of {lane!r} differ between ranks {rank} and 0: {what}", rank


@dataclass(frozen=True, slots=True)
class Spread(Collective):
    """Move a value from its rank to all ranks."""

    def __str__(self) -> str:
        return f"{self.value}>*" if self.is_root else f"{self.value}<*{self.root}"

    @property
    def operand(self) -> Value | None:
        return _given(self.value) if self.is_root else None

    def effects(self, flow: Flow) -> Effects:
        makes, operand = (self.started(self.rank),), self.operand
        if operand is not None:
            return Effects(uses=(self.value,), gives=(operand,), makes=makes, arrives=self.arrival())
        return Effects(gives=(self.value,), makes=makes, arrives=self.arrival())


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """Gather on every rank what the parts of all ranks have to be scaled by, before a ``Sum`` on the same lane adds
    them: a few numbers per token, whose time counts as a part of that sum's.
    """

    def __str__(self) -> str:
        return f"{self.value}<>*"

    @property
    def key(self) -> Value:
        first, name = _of_all_ranks(self.value)
        return Value(first, f"{name}_scale")

    @property
    def operand(self) -> Value | None:
        return None  # every rank has a result

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return 0.0

    def effects(self, flow: Flow) -> Effects:
        return Effects(
            takes=(self.value,), gives=(self.value,), makes=(self.started(self.rank),), arrives=self.arrival()
        )


@dataclass(frozen=True, slots=True)
class Sum(Collective):
    """Add the parts of all ranks on the root; the first of the parts then is the sum, and the others are empty."""

    def __str__(self) -> str:
        return f"{self.value}{'<' if self.is_root else '>'}+{self.root}"

    @property
    def key(self) -> Value:
        return _of_all_ranks(self.value)

    @property
    def operand(self) -> Value | None:
        return None if self.is_root else _given(self.value)

    def effects(self, flow: Flow) -> Effects:
        makes, operand = (self.started(self.rank),), self.operand
        if operand is not None:
            return Effects(takes=(self.value,), gives=(operand,), makes=makes, arrives=self.arrival())
        (consumer,) = flow.consumers(self.value)
        parts = tuple([value for value in flow.inputs(consumer) if value.name == self.value.name])
        return Effects(takes=(self.value,), gives=parts, makes=makes, arrives=self.arrival())


@dataclass(frozen=True, slots=True)
class Finish(Op):
    """Wait until a collective has read what this rank gave to it, then free that. The passes of the rank wait with it,
    so that what is freed is free for the next pass.
    """

    collective: Collective

    def __str__(self) -> str:
        return f"{self.collective}="

    def effects(self, flow: Flow) -> Effects:
        assert self.collective.operand is not None, "who receives the result waits for that"
        return Effects(takes=(self.collective.operand,))

    def later(self, by: int) -> Finish:
        return Finish(self.collective.later(by))


def collectives_of(num_ranks: int) -> tuple[type[Op], ...]:
    """The ops with a ``parse`` for a pipeline of ``num_ranks`` ranks, which their text does not say."""

    class _Spread(Spread):
        __slots__ = ()

        @classmethod
        def parse(cls, text: str, rank: int) -> Spread | None:
            match = re.fullmatch(r"(.+)(>\*|<\*([0-9]+))", text)
            return Spread(Value.parse(match[1]), rank, int(match[3] or rank), num_ranks) if match else None

    class _AllGather(AllGather):
        __slots__ = ()

        @classmethod
        def parse(cls, text: str, rank: int) -> AllGather | None:
            match = re.fullmatch(r"(.+)<>\*", text)
            return AllGather(Value.parse(match[1]), rank, rank, num_ranks) if match else None

    class _Sum(Sum):
        __slots__ = ()

        @classmethod
        def parse(cls, text: str, rank: int) -> Sum | None:
            match = re.fullmatch(r"(.+)[<>]\+([0-9]+)", text)
            return Sum(Value.parse(match[1]), rank, int(match[2]), num_ranks) if match else None

    class _Finish(Finish):
        __slots__ = ()

        @classmethod
        def parse(cls, text: str, rank: int) -> Finish | None:
            op = _Spread.parse(text[:-1], rank) or _Sum.parse(text[:-1], rank) if text.endswith("=") else None
            return None if op is None else Finish(op)

    return _Finish, _AllGather, _Spread, _Sum
