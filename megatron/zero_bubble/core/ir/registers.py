"""Allocate registers for the values of a rank once per plan, so that a run needs no look-up by value."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from megatron.zero_bubble.core.ir.flow import Value
from megatron.zero_bubble.core.ir.ops import COMPUTE, Effects, Op


class Registers(NamedTuple):
    """The registers of one op, in the order of its ``effects``.

    Attributes:
        reads: the registers that it reads: first the values that it uses, then those that it takes.
        may_wait: whether a value that it reads may still be in transit.
        ends: the registers among ``reads`` that are empty afterwards.
        writes: the registers that it writes.
    """

    reads: tuple[int, ...]
    may_wait: bool
    ends: tuple[int, ...]
    writes: tuple[int, ...]


class Allocation(NamedTuple):
    """The registers of a rank's ops and of its drain, and the number of registers."""

    row: tuple[Registers, ...]
    drain: tuple[Registers, ...]
    size: int


def allocate(ops: Sequence[Op], effects: Sequence[Effects], end: int) -> Allocation:
    """Allocate one register per value; the last op that uses a value empties its register.

    Args:
        ops: the ops of a rank, followed by its drain, which starts at ``end``.
        effects: the effects of each op.
    """
    number: dict[Value, int] = {}
    arriving: set[Value] = set()  # from another rank, or from a lane that the rank does not wait for
    for op, (uses, gives, takes, *_, arrives) in zip(ops, effects, strict=True):
        for value in _values((*uses, *takes, *gives)):
            number.setdefault(value, len(number))
        if arrives or op.lane not in (None, COMPUTE):
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
    """Return only the values; other resources matter to the proof, but need no register."""
    return [resource for resource in resources if isinstance(resource, Value)]
