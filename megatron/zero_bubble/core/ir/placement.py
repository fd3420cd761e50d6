"""The placement: the assignment of stages to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.sizes import check_size


@dataclass(frozen=True)
class Placement:
    """The assignment of stages to ranks; stages are numbered in model order, ``stage_to_rank[stage]`` is the rank."""

    stage_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = set(self.stage_to_rank)
        if not ranks or ranks != set(range(len(ranks))):
            raise UserError(
                "a placement must give every rank 0..P-1 at least one stage; "
                f"got stage_to_rank={list(self.stage_to_rank)}; renumber the ranks without gaps"
            )

    @classmethod
    def linear(cls, num_ranks: int) -> Placement:
        """One stage per rank, in order: 1F1B, ZB-H1, ZB-H2."""
        check_size(num_ranks)
        return cls(tuple(range(num_ranks)))

    @classmethod
    def interleaved(cls, num_ranks: int, num_chunks: int) -> Placement:
        """Stage s on rank s mod P: Megatron's virtual pipeline."""
        check_size(num_ranks, num_chunks=num_chunks)
        return cls(tuple(range(num_ranks)) * num_chunks)

    @classmethod
    def vee(cls, num_ranks: int) -> Placement:
        """Two stages per rank, s and 2P-1-s: the V of ZB-V (arXiv 2401.10241, section 6)."""
        check_size(num_ranks, num_chunks=2)
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @classmethod
    def wave(cls, num_ranks: int, num_chunks: int) -> Placement:
        """``num_chunks`` stages per rank that run to the last rank and back: two are a V, four a W (Hanayo, SC '23).

        Raises:
            UserError: for an odd number of chunks, with which the last stage would not be on the first rank.
        """
        check_size(num_ranks, num_chunks=num_chunks)
        if num_chunks % 2:
            raise UserError(
                f"a wave goes to the last rank and back, so the stages per rank must be even; got {num_chunks}; "
                f"give {num_chunks + 1}, or use a loop"
            )
        return cls((*range(num_ranks), *reversed(range(num_ranks))) * (num_chunks // 2))

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
