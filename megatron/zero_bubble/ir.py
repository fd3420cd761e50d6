"""The schedule as a plain value: what every rank computes, in which order.

A ``Pass`` is one unit of compute and prints as ``<stage><kind><microbatch>``, so ``2F0`` is the forward of
microbatch 0 on stage 2; a slice of a sequence other than the first appends ``.<slice>`` (``2F0.1``). Kinds follow the
Zero Bubble paper (arXiv 2401.10241, section 2): F, B (gradient of the input), W (gradient of the weights) and BW, the
fused backward that stock 1F1B runs.

Everything here is frozen and hashable. Nothing learnt at run time is ever written into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Kind(Enum):
    """What a pass computes."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"

    # Members are singletons, so identity hashing is right; Enum's own hashes the name, in Python, on every look-up.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


_PASS = re.compile(r"(\d+)(F|BW|B|W)(\d+)(?:\.(\d+))?")


class Pass(NamedTuple):
    """One unit of compute: ``kind`` of ``microbatch`` (and sequence ``slice``) on ``stage``.

    A tuple, because plans hash and compare passes by the hundred thousand.
    """

    stage: int
    kind: Kind
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        suffix = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind.value}{self.microbatch}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Read what ``str`` wrote.

        Raises:
            ValueError: when ``text`` is not of the form above; the message shows the grammar.
        """
        match = _PASS.fullmatch(text)
        if match is None:
            raise ValueError(
                f"a pass is written <stage><F|B|W|BW><microbatch>[.<slice>], for example 2F0; got {text!r}"
            )
        stage, kind, microbatch, slice_ = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch), int(slice_ or 0))


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage; stages are numbered along the model, ``stage_to_rank[stage]`` is its rank."""

    stage_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = set(self.stage_to_rank)
        if not ranks or ranks != set(range(len(ranks))):
            raise ValueError(
                "a placement must give every rank 0..P-1 at least one stage; "
                f"got stage_to_rank={list(self.stage_to_rank)}; renumber the ranks without gaps"
            )

    @classmethod
    def linear(cls, num_ranks: int) -> Placement:
        """One stage a rank, in order: 1F1B, ZB-H1, ZB-H2."""
        return cls(tuple(range(num_ranks)))

    @classmethod
    def interleaved(cls, num_ranks: int, num_chunks: int) -> Placement:
        """Stage s on rank s mod P: Megatron's virtual pipeline."""
        return cls(tuple(range(num_ranks)) * num_chunks)

    @classmethod
    def vee(cls, num_ranks: int) -> Placement:
        """Two stages a rank, s and 2P-1-s: the V of ZB-V (arXiv 2401.10241, section 6)."""
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @cached_property
    def num_ranks(self) -> int:
        return max(self.stage_to_rank) + 1

    @property
    def num_stages(self) -> int:
        return len(self.stage_to_rank)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.stage_to_rank):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of ``rank`` in model order: its chunks 0, 1, ..."""
        return self._stages[rank]

    def chunk_of(self, stage: int) -> int:
        """The position of ``stage`` among its rank's chunks (Megatron's ``vp_stage``)."""
        return self._stages[self.stage_to_rank[stage]].index(stage)


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
