"""Duration of passes, and of transfers between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.zero_bubble.costs.units import (
    check_same_length,
    checked_figure,
    checked_figures,
    recut,
    refuse_huge,
    spread,
)
from megatron.zero_bubble.ir import Chain, Pass, Placement
from megatron.zero_bubble.ir.passes import B, F, W

TIMES = ("forward_ms", "backward_ms", "wgrad_ms")


@dataclass(frozen=True)
class PassCosts:
    """Milliseconds per stage of F, B and W, and of a transfer between two ranks.

    ``links`` overrides ``comm_ms`` for (source rank, destination rank). A transfer is pure latency: it delays the
    receiver and does not occupy any rank.

    Raises:
        UserError: for a negative or non-finite figure, or when the three lists differ in length.
    """

    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    wgrad_ms: tuple[float, ...]
    comm_ms: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in TIMES:
            object.__setattr__(self, name, checked_figures(name, getattr(self, name)))
        check_same_length(self, TIMES)
        object.__setattr__(self, "comm_ms", checked_figure("comm_ms", self.comm_ms))
        links = {link: checked_figure(f"links{list(link)}", ms) for link, ms in self.links.items()}
        object.__setattr__(self, "links", links)

    @classmethod
    def uniform(
        cls, placement: Placement, forward_ms: float, backward_ms: float, wgrad_ms: float, comm_ms: float = 0.0
    ) -> PassCosts:
        """Use the same costs on every rank; each of its chunks gets an equal part of them.

        Raises:
            UserError: also for a figure above ``MAX_FIGURE``.
        """
        refuse_huge(forward_ms=forward_ms, backward_ms=backward_ms, wgrad_ms=wgrad_ms, comm_ms=comm_ms)
        f, b, w = (spread(placement, ms) for ms in (forward_ms, backward_ms, wgrad_ms))
        return cls(f, b, w, comm_ms)

    @property
    def num_stages(self) -> int:
        return len(self.forward_ms)

    def fit(self, placement: Placement) -> PassCosts:
        """Convert to the stages of ``placement`` for the same model: stages are divided evenly, or neighbours merged.

        Raises:
            UserError: when neither number of stages is a multiple of the other.
        """
        f, b, w = (recut(getattr(self, name), placement.num_stages) for name in TIMES)
        return PassCosts(f, b, w, self.comm_ms, self.links)

    def duration(self, p: Pass, num_slices: int = 1) -> float:
        """Milliseconds of ``p``; the slices of a sequence take equal parts of the microbatch's time."""
        if p.kind is F:
            whole = self.forward_ms[p.stage]
        elif p.kind is B:
            whole = self.backward_ms[p.stage]
        elif p.kind is W:
            whole = self.wgrad_ms[p.stage]
        else:
            whole = self.backward_ms[p.stage] + self.wgrad_ms[p.stage]
        return whole / num_slices

    def hops(self, placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For every stage of a chain, the transfer times in ms of the input of its F and of the input of its B."""
        chain, rank_of = Chain(placement.num_stages), placement.stage_to_rank

        def hop(p: Pass) -> float:
            source = chain.source(p)
            return 0.0 if source is None else self.comm(rank_of[source.stage], rank_of[p.stage])

        stages = range(placement.num_stages)
        return tuple(hop(Pass(s, F, 0)) for s in stages), tuple(hop(Pass(s, B, 0)) for s in stages)

    def comm(self, source_rank: int, destination_rank: int) -> float:
        """Milliseconds from the end of a pass on one rank to its result on another; 0 within a rank."""
        if source_rank == destination_rank:
            return 0.0
        return self.links.get((source_rank, destination_rank), self.comm_ms)
