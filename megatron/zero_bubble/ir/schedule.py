"""The schedule: the order of the passes on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron.zero_bubble.ir.passes import Kind, Pass
from megatron.zero_bubble.ir.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """What every rank computes: ``order[rank]`` is that rank's passes, first to last."""

    name: str
    placement: Placement
    num_microbatches: int
    order: tuple[tuple[Pass, ...], ...]
    num_slices: int = 1

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    def passes(self) -> Iterator[Pass]:
        """Every pass of every rank."""
        for row in self.order:
            yield from row

    @cached_property
    def fused(self) -> frozenset[tuple[int, int, int]]:
        """The (stage, microbatch, slice) whose backward is one BW instead of B and W."""
        return frozenset((p.stage, p.microbatch, p.slice) for p in self.passes() if p.kind is Kind.BW)

    def backward_of(self, stage: int, microbatch: int, slice_: int = 0) -> Pass:
        """The pass that produces the input gradient of ``stage``: its BW where fused, else its B."""
        fused = self.fused and (stage, microbatch, slice_) in self.fused
        return Pass(stage, Kind.BW if fused else Kind.B, microbatch, slice_)

    def dependencies(self, p: Pass) -> tuple[Pass, ...]:
        """The passes that must end before ``p`` starts; slices go forward in order and back in reverse."""
        stage, kind, microbatch, slice_ = p
        if kind is Kind.W:
            return (Pass(stage, Kind.B, microbatch, slice_),)
        needs: list[Pass] = []
        if kind is Kind.F:
            if stage > 0:
                needs.append(Pass(stage - 1, Kind.F, microbatch, slice_))
            if slice_ > 0:
                needs.append(Pass(stage, Kind.F, microbatch, slice_ - 1))
            return tuple(needs)
        if stage < len(self.placement.stage_to_rank) - 1:
            needs.append(self.backward_of(stage + 1, microbatch, slice_))
        else:
            needs.append(Pass(stage, Kind.F, microbatch, slice_))
        if slice_ < self.num_slices - 1:
            needs.append(self.backward_of(stage, microbatch, slice_ + 1))
        return tuple(needs)

    def forward_only(self) -> Schedule:
        """The same placement and order of forwards without any backward: what an evaluation runs."""
        order = tuple(tuple(p for p in row if p.kind is Kind.F) for row in self.order)
        return Schedule(f"{self.name} (forward only)", self.placement, self.num_microbatches, order, self.num_slices)

    def to_text(self) -> tuple[tuple[str, ...], ...]:
        """``order`` as strings, the form of the ``"order"`` key of ``zero-bubble plan --format json``."""
        return tuple(tuple(map(str, row)) for row in self.order)

    @classmethod
    def from_text(
        cls,
        name: str,
        placement: Placement,
        num_microbatches: int,
        order: Iterable[Iterable[str]],
        num_slices: int = 1,
    ) -> Schedule:
        """Read what ``to_text`` wrote; only the form of each pass is checked, ``analysis.validate`` checks the rest."""
        rows = tuple(tuple(map(Pass.parse, row)) for row in order)
        return cls(name, placement, num_microbatches, rows, num_slices)
