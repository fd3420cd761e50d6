"""The schedule: the order of the passes on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from megatron.zero_bubble.core.ir.flow import Chain, Flow
from megatron.zero_bubble.core.ir.passes import AND, BW, FORWARDS, Pass, R, groups
from megatron.zero_bubble.core.ir.placement import Placement
from megatron.zero_bubble.core.ir.slices import WHOLE, Slices


def chain_of(schedule: Schedule) -> Chain:
    """The flow of a transformer that is divided into stages."""
    return Chain(schedule.num_stages, schedule.num_slices, schedule.fused, schedule.recomputed, schedule.evaluates)


@dataclass(frozen=True)
class Schedule:
    """What every rank computes: ``order[rank]`` is that rank's passes, first to last.

    Attributes:
        slices: how every sequence is cut; each slice has passes of its own.
        make_flow: makes the flow of values between the passes.
        evaluates: whether the schedule has only forwards, which then save no activations.
        pairs: the forwards that run at the same time as the backward that directly follows them in their row, so that
            each hides the all-to-all of the other's experts.
        overlap_experts: whether passes that run alone overlap the all-to-all of their experts too, as far as their own
            weight gradients and the next pass allow; always so with ``pairs``.
    """

    name: str
    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Pass, ...], ...]
    slices: Slices = WHOLE
    make_flow: Callable[[Schedule], Flow] = chain_of
    evaluates: bool = False
    pairs: frozenset[Pass] = frozenset()
    overlap_experts: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether the all-to-all of experts runs beneath computation."""
        return self.overlap_experts or bool(self.pairs)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_slices(self) -> int:
        return len(self.slices)

    def __getstate__(self) -> dict[str, Any]:
        """Omit cached properties, because schedules are sent between ranks."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def passes(self) -> Iterator[Pass]:
        """Every pass of every rank."""
        for row in self.order:
            yield from row

    @cached_property
    def fused(self) -> frozenset[tuple[int, int, int]]:
        """The (stage, microbatch, slice) whose backward is one BW instead of B and W."""
        return frozenset((p.stage, p.microbatch, p.slice) for p in self.passes() if p.kind is BW)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int, int]]:
        """The (stage, microbatch, slice) whose activations are computed again in an R, not in their backward."""
        return frozenset((p.stage, p.microbatch, p.slice) for p in self.passes() if p.kind is R)

    @cached_property
    def flow(self) -> Flow:
        """The flow of values between the passes."""
        return self.make_flow(self)

    def dependencies(self, p: Pass) -> tuple[Pass, ...]:
        """The passes that must end before ``p`` starts."""
        return tuple([producer for producer, _ in self.flow.inputs(p)])

    def forward_only(self) -> Schedule:
        """The schedule of an evaluation: the same placement and order of forwards, without backwards."""
        order = tuple(tuple(p for p in row if p.kind in FORWARDS) for row in self.order)
        return replace(self, name=f"{self.name} (forward only)", order=order, evaluates=True, pairs=frozenset())

    @property
    def works(self) -> Iterator[Iterator[tuple[Pass, ...]]]:
        """``order`` with passes that run at the same time as one element: pairs and single passes."""
        return (groups(row, self.pairs) for row in self.order)

    def to_text(self) -> tuple[tuple[str, ...], ...]:
        """``order`` as strings, the form of the ``"order"`` key of ``zero-bubble plan --format json``; the two passes
        of a pair are one string, ``3F7&0B4``.
        """
        return tuple(tuple(AND.join(map(str, works)) for works in row) for row in self.works)

    @classmethod
    def from_text(
        cls,
        name: str,
        placement: Placement,
        num_microbatches: int,
        order: Iterable[Iterable[str]],
        slices: Slices = WHOLE,
    ) -> Schedule:
        """Read what ``to_text`` wrote. Only the form of each pass is checked; ``analysis.validate`` checks the rest."""
        cells = [[tuple(map(Pass.parse, cell.split(AND))) for cell in row] for row in order]
        rows = tuple(tuple(p for cell in row for p in cell) for row in cells)
        pairs = frozenset(p for row in cells for cell in row for p in cell[:-1])
        return cls(name, placement, num_microbatches, rows, slices, pairs=pairs)
