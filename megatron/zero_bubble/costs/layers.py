"""Costs of the parts of a model: its layers, the embedding, and the output layer with the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum

from megatron.zero_bubble.costs.memory import MEMORY, PassMemory
from megatron.zero_bubble.costs.passes import HOST, TIMES, PassCosts
from megatron.zero_bubble.costs.units import checked_figure, checked_share, refuse_huge
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement

_SHARES = ("forward_attention", "backward_attention")
_NEARLY_NOTHING = 1e-3
"""Activation of a stage that keeps nothing known, relative to the largest layer."""


@dataclass(frozen=True)
class Part:
    """Figures of one microbatch in one layer, in the embedding, or in the output layer with the loss.

    Attributes:
        forward_ms, backward_ms, wgrad_ms: time of F, B and W.
        activation, wgrad, history: memory, as in ``PassMemory``.
        forward_attention, backward_attention: shares of attention in F and B, as in ``PassCosts``.
        host_ms: time to copy what F saves to host memory, or back; 0 if unknown.

    Raises:
        UserError: for a negative, huge or non-finite figure, or a share above 1.
    """

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    wgrad_ms: float = 0.0
    activation: float = 0.0
    wgrad: float = 0.0
    history: float = 0.0
    forward_attention: float = 0.0
    backward_attention: float = 0.0
    host_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse_huge(**{name: value})
            object.__setattr__(self, name, (checked_share if name in _SHARES else checked_figure)(name, value))

    @property
    def work_ms(self) -> float:
        """Time of F, B and W together."""
        return self.forward_ms + self.backward_ms + self.wgrad_ms


@dataclass(frozen=True)
class LayerCosts:
    """The parts of a model in order, for every division of its layers among stages.

    A layout is the number of layers per stage, in model order. The embedding is on the first stage, and the output
    layer with the loss on the last one.

    Attributes:
        layers: one part per layer.
        input_memory: memory of a stage's input, which a stage keeps at least; 0 if unknown.
        recomputed: as in ``PassMemory``.
        comm_ms, links: as in ``PassCosts``.
    """

    layers: tuple[Part, ...]
    embedding: Part = Part()
    loss: Part = Part()
    comm_ms: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    input_memory: float = 0.0
    recomputed: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def work_ms(self) -> tuple[float, ...]:
        """Time of F, B and W together, per layer."""
        return tuple(layer.work_ms for layer in self.layers)

    def rank_work_ms(self, placement: Placement, layout: Sequence[int]) -> tuple[float, ...]:
        """Time of F, B and W of one microbatch, per rank."""
        per_stage = [fsum(part) for part in self._parts_of(layout, "work_ms")]
        return tuple(fsum(per_stage[s] for s in placement.stages_of(rank)) for rank in range(placement.num_ranks))

    def on(self, layout: Sequence[int]) -> tuple[PassCosts, PassMemory]:
        """Return costs and memory per stage.

        Raises:
            UserError: when the numbers of layers do not add up, or a stage keeps nothing in memory.
        """
        if sum(layout) != self.num_layers or min(layout) < 0:
            raise UserError(
                f"the layers per stage must add up to {self.num_layers}; got {', '.join(map(str, layout))}; change them"
            )
        forward, backward, wgrad = (self._summed(layout, name) for name in TIMES)
        host = self._summed(layout, HOST)
        costs = PassCosts(forward, backward, wgrad, self.comm_ms, self.links, host_ms=host)
        if self._has_attention:
            of_f = zip(self._products(layout, _SHARES[0], TIMES[0]), forward, strict=True)
            of_b = zip(self._products(layout, _SHARES[1], TIMES[1]), backward, strict=True)
            costs = costs.with_attention(*(tuple(min(1.0, a / t) if t else 0.0 for a, t in of) for of in (of_f, of_b)))
        least = self.input_memory or _NEARLY_NOTHING * max(layer.activation for layer in self.layers)
        activation, wgrad = (self._summed(layout, name) for name in MEMORY)
        kept = tuple(max(least, amount) for amount in activation)
        return costs, PassMemory(kept, wgrad, self._summed(layout, "history"), self.recomputed)

    @cached_property
    def _has_attention(self) -> bool:
        return any(layer.forward_attention or layer.backward_attention for layer in self.layers)

    @cached_property
    def _columns(self) -> dict[str, tuple[float, ...]]:
        """Every figure of all parts in model order."""
        parts = (self.embedding, *self.layers, self.loss)
        names = (*TIMES, HOST, *MEMORY, "history", *_SHARES, "work_ms")
        columns = {name: tuple(getattr(part, name) for part in parts) for name in names}
        for share, ms in zip(_SHARES, TIMES, strict=False):
            columns[share + ms] = tuple(a * b for a, b in zip(columns[share], columns[ms], strict=True))
        return columns

    def _parts_of(self, layout: Sequence[int], name: str) -> Iterator[tuple[float, ...]]:
        """Yield one figure of all parts on each stage."""
        column, start, last = self._columns[name], 1, len(layout) - 1
        for stage, count in enumerate(layout):
            yield column[start - (stage == 0) : start + count + (stage == last)]
            start += count

    def _summed(self, layout: Sequence[int], name: str) -> tuple[float, ...]:
        # fsum, because the result of sum depends on the version of Python.
        return tuple(map(fsum, self._parts_of(layout, name)))

    def _products(self, layout: Sequence[int], share: str, ms: str) -> tuple[float, ...]:
        return tuple(map(fsum, self._parts_of(layout, share + ms)))


def of_stages(costs: PassCosts, memory: PassMemory | None, layout: Sequence[int]) -> LayerCosts:
    """Derive the parts of a model of equal layers from figures of its stages.

    The stages between the first and the last give the mean of a layer; what the first and the last take beyond their
    layers is the embedding's, and the output layer's. Without memory figures, all layers keep the same.

    Raises:
        UserError: when the layout is for another number of stages, or no stage between the ends has layers.
    """
    inner = range(1, len(layout) - 1)
    count = sum(layout[s] for s in inner)
    if len(layout) != costs.num_stages:
        raise UserError(
            f"layers_per_stage must have one number for each of the {costs.num_stages} stages of the lists; got "
            f"{len(layout)}; give as many"
        )
    if not count:
        raise UserError(
            "layers_per_stage must give layers to a stage between the first and the last, from which the time of a "
            f"layer is taken; got {', '.join(map(str, layout))}; give the costs per layer instead"
        )
    columns = {name: getattr(costs, name) for name in (*TIMES, HOST)}
    if memory is not None:
        columns |= {name: getattr(memory, name) for name in (*MEMORY, "history")}
    layer = {name: fsum(figures[s] for s in inner) / count for name, figures in columns.items()}
    embedding, loss = (
        Part(**{name: max(0.0, figures[s] - layout[s] * layer[name]) for name, figures in columns.items()})
        for s in (0, -1)
    )
    for share, ms in zip(_SHARES, TIMES, strict=False):
        both = zip(getattr(costs, share), getattr(costs, ms), strict=True)
        attention = [a * b for a, b in both]
        layer[share] = min(1.0, fsum(attention[s] for s in inner) / count / layer[ms]) if layer[ms] else 0.0
    if memory is None:
        layer |= dict.fromkeys(MEMORY, 1.0)
    return LayerCosts((Part(**layer),) * sum(layout), embedding, loss, costs.comm_ms, costs.links)
