"""Pairs: a forward and the backward of another microbatch that a rank runs at the same time.

In a model with experts, the all-to-all of one of the two is hidden beneath the computation of the other. A pair prints
as its two passes, ``3F7&0B4``. It needs the inputs of both before it starts, so rows that run one pass after the other
may deadlock as pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.zero_bubble.core.ir.flow import Flow
from megatron.zero_bubble.core.ir.ops import COMPUTE, Compute, Effects, Memory, Op, Rows, Times
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.core.ir.passes import AND, BW, B, F, Pass, groups, later
from megatron.zero_bubble.core.ir.schedule import Schedule
from megatron.zero_bubble.core.ir.slices import Slices


@dataclass(frozen=True, slots=True)
class Pair(Op):
    """Run a forward together with a backward (B or BW) of another microbatch or stage of the rank.

    Its handler receives the inputs of ``forward``, then those of ``backward``, and returns the outputs in this order.
    """

    forward: Pass
    backward: Pass
    lane: ClassVar[str] = COMPUTE

    @property
    def works(self) -> tuple[Pass, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.forward}{AND}{self.backward}"

    def effects(self, flow: Flow) -> Effects:
        one, other = self.forward, self.backward
        return Effects(flow.inputs(one) + flow.inputs(other), flow.outputs(one) + flow.outputs(other))

    def duration_ms(self, times: Times, slices: Slices) -> float:
        return times.pair(self.forward, self.backward, slices)

    def parts(self, times: Times) -> tuple[LanePart, ...]:
        return times.parts(self.works)

    def memory(self, memory: Memory, slices: Slices) -> tuple[float, float]:
        (start, end), (other_start, other_end) = (memory.changes(work, slices) for work in self.works)
        return start + other_start, end + other_end

    def later(self, by: int) -> Pair:
        return Pair(later(self.forward, by), later(self.backward, by))

    @classmethod
    def parse(cls, text: str, rank: int) -> Pair | None:
        one, between, other = text.partition(AND)
        return cls(Pass.parse(one), Pass.parse(other)) if between else None

    @classmethod
    def faults(cls, schedule: Schedule, rows: Rows, stopped: bool) -> Iterator[tuple[str, int]]:
        """Check that every pair is a forward and a backward that does not need it."""
        for rank, row in enumerate(rows):
            for op in row:
                if isinstance(op, cls) and not can_pair(op.forward, op.backward):
                    yield f"{op} must be {WHAT}", rank


WHAT = "a forward (F) and a backward (B or BW) of another microbatch or another stage"
"""What can run at the same time."""


def can_pair(one: Pass, other: Pass) -> bool:
    """Whether ``one`` and ``other`` can run at the same time: a forward, and a backward that does not need it."""
    return one.kind is F and other.kind in (B, BW) and (one.stage, one.microbatch) != (other.stage, other.microbatch)


def computes(row: Iterable[Pass], pairs: Collection[Pass]) -> Iterator[Op]:
    """The ops that compute a row of passes: each forward of ``pairs`` runs together with the pass that follows it."""
    if not pairs:
        return map(Compute, row)  # faster
    return (Pair(*works) if len(works) > 1 else Compute(*works) for works in groups(row, pairs))


PAIR_OPS: tuple[type[Op], ...] = (Pair,)
