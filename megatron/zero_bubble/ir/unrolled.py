"""The ops of a plan whose middle part is stored once and repeated when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from megatron.zero_bubble.ir.collection import without_collection
from megatron.zero_bubble.ir.ops import Op

if TYPE_CHECKING:
    from megatron.zero_bubble.ir.plan import Plan
    from megatron.zero_bubble.ir.schedule import Schedule

Cut = tuple[int, ...]
"""A position in each rank's row of ops."""


@dataclass(frozen=True, eq=False)
class Unrolled(Sequence[tuple[Op, ...]]):
    """The ops of every rank, with inserted windows. The row of a rank is made whenever it is read.

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
    @without_collection()
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
