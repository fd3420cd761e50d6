"""Figures that are given besides costs, and replace theirs on every placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.costs.static import StageBytes
from megatron.zero_bubble.core.costs.units import spread
from megatron.zero_bubble.core.costs.vocabulary import VocabularyCosts
from megatron.zero_bubble.core.ir import Placement

WithTransfers = TypeVar("WithTransfers", PassCosts, LayerCosts)


@dataclass(frozen=True)
class GivenFigures:
    """What replaces figures of the costs; None, or empty, for what they keep.

    Attributes:
        host_ms: time of a copy of a rank's microbatch to the host or back.
        host_bytes_per_ms: the bandwidth to the host, by which the copy of a stage takes as long as its activation.
        message_ms: as in ``PassCosts``.
        links: ms per (source rank, destination rank); other pairs keep their times.
        gather_ms, reduce_ms: times of the collectives of sharded units, of all stages of a rank together.
        shards_bytes_per_ms: bytes of whole weights or gradients per ms, which give these times where they are None.
        vocabulary: times of the passes of vocabulary parallelism.
    """

    host_ms: float | None = None
    host_bytes_per_ms: float | None = None
    message_ms: float | None = None
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    gather_ms: float | None = None
    reduce_ms: float | None = None
    shards_bytes_per_ms: float | None = None
    vocabulary: VocabularyCosts | None = None

    @property
    def of_any_stages(self) -> GivenFigures:
        """Only what is of messages between ranks and of copies, which pipelines of other stages have as well."""
        return replace(self, gather_ms=None, reduce_ms=None, shards_bytes_per_ms=None, vocabulary=None)

    def replacing(
        self, costs: PassCosts, memory: PassMemory, sizes: StageBytes | None, placement: Placement
    ) -> PassCosts:
        """Return the costs of a placement with these figures.

        Args:
            sizes: bytes per stage, which a bandwidth between replicas needs.
        """
        own: dict[str, Any] = {}
        if self.host_bytes_per_ms is not None:
            own["host_ms"] = tuple(size / self.host_bytes_per_ms for size in memory.activation)
        elif self.host_ms is not None:
            own["host_ms"] = spread(placement, self.host_ms)
        if self.shards_bytes_per_ms is not None and sizes is not None:
            own["gather_ms"] = tuple(size / self.shards_bytes_per_ms for size in sizes.weights)
            own["reduce_ms"] = tuple(size / self.shards_bytes_per_ms for size in sizes.gradients)
        for name in ("gather_ms", "reduce_ms"):
            if (of_rank := getattr(self, name)) is not None:
                own[name] = spread(placement, of_rank)
        if self.vocabulary is not None:
            own["vocabulary"] = self.vocabulary
        return replace(self.transfers(costs, placement.num_ranks), **own)

    def transfers(self, costs: WithTransfers, num_ranks: int) -> WithTransfers:
        """Return costs with the times of messages between ranks, in their shortest form."""
        own: dict[str, Any] = {} if self.message_ms is None else {"message_ms": self.message_ms}
        if self.links:
            times = {**costs.links, **self.links}
            same = len(times) == num_ranks * (num_ranks - 1) and len(set(times.values())) == 1
            comm_ms = next(iter(times.values())) if same else costs.comm_ms
            own |= {"comm_ms": comm_ms, "links": {pair: ms for pair, ms in times.items() if ms != comm_ms}}
        return replace(costs, **own)


NOTHING = GivenFigures()
