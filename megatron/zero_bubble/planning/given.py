"""Figures that are given besides costs, and replace theirs on every placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.layers import LayerCosts
from megatron.zero_bubble.core.costs.static import StageBytes
from megatron.zero_bubble.core.costs.units import spread
from megatron.zero_bubble.core.ir import Placement

WithTransfers = TypeVar("WithTransfers", PassCosts, LayerCosts)
_SIZES: dict[str, Callable[[PassMemory, StageBytes | None, int], Sequence[float] | None]] = {
    "host_ms": lambda memory, _, __: memory.activation,
    "gather_ms": lambda _, sizes, replicas: None if sizes is None else sizes.sent(replicas)[0],
    "reduce_ms": lambda _, sizes, replicas: None if sizes is None else sizes.sent(replicas)[1],
}
"""The bytes per stage of each transfer; None if unknown."""


class Bandwidth(NamedTuple):
    """Bytes per ms, which give the times of transfers of known sizes.

    Attributes:
        replicas: those among which weights and gradients are sent.
    """

    bytes_per_ms: float
    replicas: int = 1


@dataclass(frozen=True)
class GivenFigures:
    """What replaces figures of the costs; None, or empty, for what they keep.

    Attributes:
        message_ms: as in ``PassCosts``.
        links: ms per (source rank, destination rank); other pairs keep their times.
        figures: by field of ``PassCosts``: the time of all stages of a rank together, the bandwidth by which the
            transfers of ``_SIZES`` take their time, or the value of the field.
    """

    message_ms: float | None = None
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    figures: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def of_any_stages(self) -> GivenFigures:
        """Only what is of messages between ranks and of copies, which pipelines of other stages have as well."""
        return replace(self, figures={name: value for name, value in self.figures.items() if name == "host_ms"})

    def replacing(
        self, costs: PassCosts, memory: PassMemory, sizes: StageBytes | None, placement: Placement
    ) -> PassCosts:
        """Return the costs of a placement with these figures.

        Args:
            sizes: bytes per stage, which a bandwidth between replicas needs.
        """
        own: dict[str, Any] = {}
        for name, value in self.figures.items():
            if not isinstance(value, Bandwidth):
                own[name] = spread(placement, value) if isinstance(value, (int, float)) else value
            elif (per_stage := _SIZES[name](memory, sizes, value.replicas)) is not None:
                own[name] = tuple(size / value.bytes_per_ms for size in per_stage)
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
