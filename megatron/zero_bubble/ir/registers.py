"""Where the values of a rank are while it runs a plan: worked out once, so that running needs no look-up by value."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from megatron.zero_bubble.ir.flow import Value
from megatron.zero_bubble.ir.ops import COMPUTE, Effects, Op


class Registers(NamedTuple):
    """Of one op, the registers that it reads (what it uses, then what it takes), those of them that hold nothing
    afterwards, and those that it writes, in the order of its ``effects``.

    ``may_wait`` says whether something that it reads may still be on its way.
    """

    reads: tuple[int, ...]
    may_wait: bool
    ends: tuple[int, ...]
    writes: tuple[int, ...]


class Allocation(NamedTuple):
    """The registers of a rank's ops and of its drain, and how many registers there are."""

    row: tuple[Registers, ...]
    drain: tuple[Registers, ...]
    size: int


def allocate(ops: Sequence[Op], effects: Sequence[Effects], end: int) -> Allocation:
    """A register for each value; what an op is the last to use is gone behind it.

    Args:
        ops: a rank's, and its drain behind them, from ``end`` on.
        effects: of each of the ops.
    """
    number: dict[Value, int] = {}
    arriving: set[Value] = set()  # from another rank, or from a lane that the rank does not wait for
    for op, (uses, gives, takes, *_, arrives) in zip(ops, effects, strict=True):
        for value in _values((*uses, *takes, *gives)):
            number.setdefault(value, len(number))
        if arrives is not None or op.lane not in (None, COMPUTE):
            arriving.update(_values(gives))
    last_use = {value: position for position in range(end) for value in effects[position].uses}

    def registers(position: int) -> Registers:
        uses, gives, takes, *_ = effects[position]
        taken = _values(takes)
        reads = (*uses, *taken)
        ends = [value for value in uses if last_use.get(value, position) <= position]
        return Registers(
            tuple([number[value] for value in reads]),
            not arriving.isdisjoint(reads),
            tuple([number[value] for value in (*ends, *taken)]),
            tuple([number[value] for value in _values(gives)]),
        )

    rows = [registers(position) for position in range(len(ops))]
    return Allocation(tuple(rows[:end]), tuple(rows[end:]), len(number))


def _values(resources: Iterable[Hashable]) -> list[Value]:
    """What else an op gives and takes is there for the proof, and nothing is kept for it."""
    return [resource for resource in resources if isinstance(resource, Value)]
