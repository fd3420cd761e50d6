"""Where the values of a rank are while it runs a plan: worked out once, so that running needs no look-up by value."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from megatron.zero_bubble.ir.flow import Value
from megatron.zero_bubble.ir.ops import Effects


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


def allocate(row: Sequence[Effects], drain: Sequence[Effects]) -> Allocation:
    """A register for each value; what an op of ``row`` is the last to use is gone behind it."""
    number: dict[Value, int] = {}
    arriving: set[Value] = set()
    for effects in (*row, *drain):
        for value in _values((*effects.uses, *effects.takes, *effects.gives)):
            number.setdefault(value, len(number))
        if effects.arrives is not None:
            arriving.update(_values(effects.gives))
    last_use = {value: position for position, effects in enumerate(row) for value in effects.uses}

    def registers(position: int, effects: Effects) -> Registers:
        takes = _values(effects.takes)
        reads = (*effects.uses, *takes)
        ends = [value for value in effects.uses if last_use.get(value, position) == position]
        return Registers(
            tuple([number[value] for value in reads]),
            not arriving.isdisjoint(reads),
            tuple([number[value] for value in (*ends, *takes)]),
            tuple([number[value] for value in _values(effects.gives)]),
        )

    return Allocation(
        tuple([registers(position, effects) for position, effects in enumerate(row)]),
        tuple([registers(len(row), effects) for effects in drain]),
        len(number),
    )


def _values(resources: Iterable[Hashable]) -> list[Value]:
    """What else an op gives and takes is there for the proof, and nothing is kept for it."""
    return [resource for resource in resources if isinstance(resource, Value)]
