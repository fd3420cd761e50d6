"""Times of models with experts: the all-to-all of a layer, and how computation hides it.

A layer with experts sends its tokens to the ranks of their experts (dispatch) and back (combine), in F and in B. These
all-to-alls occupy a lane of their own (``ALL_TO_ALL``). In a plan that overlaps them, the parts of a pass are issued in
a fixed order, that of Megatron's combined schedule, and each starts when its lane is free and the part before it in the
same pass has ended. Per layer, a pair issues

    combine B | attention F | experts B | dispatch F | experts W, dispatch B | experts F, combine F | attention B, W

A pass alone issues its parts in their order; the weight gradient of a BW follows the part of B that it belongs to, so
that of the experts runs beneath the dispatch of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.zero_bubble.core.costs.units import recut
from megatron.zero_bubble.core.ir.ops import ALL_TO_ALL, COMPUTE
from megatron.zero_bubble.core.ir.parts import LanePart
from megatron.zero_bubble.core.ir.passes import BW, B, F, Kind, W


class ExpertParts(NamedTuple):
    """Milliseconds of the parts of the passes of a stage, each of all its layers together.

    Attributes:
        layers: the number of layers with experts, each of which has the same part of every figure.
        attention, dispatch, experts, combine: of F; attention includes all else that F computes.
        combine_grad, experts_grad, dispatch_grad, attention_grad: of B, in the order in which it runs them.
        experts_wgrad, attention_wgrad: of W.
    """

    layers: float
    attention: float
    dispatch: float
    experts: float
    combine: float
    combine_grad: float
    experts_grad: float
    dispatch_grad: float
    attention_grad: float
    experts_wgrad: float
    attention_wgrad: float

    @property
    def all_to_all(self) -> float:
        """The time of all its all-to-alls of a microbatch."""
        return self.dispatch + self.combine + self.combine_grad + self.dispatch_grad

    @property
    def whole(self) -> float:
        """The time of F, B and W, one after the other."""
        return sum(self[1:])

    def sending_once(self) -> ExpertParts:
        """The parts of layers whose B does not repeat F."""
        own = max(0.0, self.experts_grad - self.experts)
        return self._replace(combine_grad=self.combine, experts_grad=own, dispatch_grad=self.dispatch)

    def per_layer(self, contention: float = 1.0) -> ExpertParts:
        """The times of one of its layers, in which computation takes longer by ``contention``."""
        count = self.num_layers
        computing = contention / count
        return ExpertParts(
            1,
            self.attention * computing,
            self.dispatch / count,
            self.experts * computing,
            self.combine / count,
            self.combine_grad / count,
            self.experts_grad * computing,
            self.dispatch_grad / count,
            self.attention_grad * computing,
            self.experts_wgrad * computing,
            self.attention_wgrad * computing,
        )

    def within(self, forward_ms: float, backward_ms: float, wgrad_ms: float) -> ExpertParts:
        """The parts of passes that take so long; what they take besides all-to-alls and experts is attention."""
        return self._replace(
            attention=max(0.0, forward_ms - self.dispatch - self.experts - self.combine),
            attention_grad=max(0.0, backward_ms - self.combine_grad - self.experts_grad - self.dispatch_grad),
            attention_wgrad=max(0.0, wgrad_ms - self.experts_wgrad),
        )

    def divided(self, number: int) -> ExpertParts:
        """The mean of so many layers."""
        return ExpertParts(*(each / number for each in self))

    def plus(self, other: ExpertParts, times: int = 1) -> ExpertParts:
        """The parts of a stage with so many layers more."""
        return ExpertParts(*(own + times * more for own, more in zip(self, other, strict=True)))

    @property
    def num_layers(self) -> int:
        """The number of layers, at least 1."""
        return max(1, round(self.layers))


NO_EXPERTS = ExpertParts(*(0.0,) * len(ExpertParts._fields))
"""The parts of a layer without experts, before ``StageParts.within``."""


def recut_parts(parts: Sequence[ExpertParts], num_stages: int) -> tuple[ExpertParts, ...]:
    """Convert to another number of stages of the same model, as ``recut`` does."""
    columns = [recut(tuple(column), num_stages) for column in zip(*parts, strict=True)]
    return tuple(map(ExpertParts._make, zip(*columns, strict=True)))


def exposed_share(parts: Sequence[ExpertParts]) -> float:
    """The share of a microbatch, F, B and W of all stages, that its all-to-alls take if nothing hides them."""
    whole = sum(stage.whole for stage in parts)
    return sum(stage.all_to_all for stage in parts) / whole if whole else 0.0


@lru_cache(maxsize=4096)
def parts_of(kinds: tuple[Kind, ...], stages: tuple[ExpertParts, ...], contention: float) -> tuple[LanePart, ...]:
    """The parts of a pass, or of a pair of F and B or BW, in the order in which they are issued.

    Args:
        kinds: the kinds of the passes.
        stages: the times of the stage of each.
        contention: by how much longer computation takes next to an all-to-all.
    """
    if len(kinds) == 1:
        found = _alone(kinds[0], 0, stages[0], contention, range(stages[0].num_layers))
    else:
        (forward, backward), both = stages, range(min(stage.num_layers for stage in stages))
        f, b = (stage.per_layer(contention) for stage in stages)
        found = [part for _ in both for part in _together(f, b, kinds[1])]
        # As Megatron does, the layers that one of the passes has more than the other run alone.
        found += _alone(kinds[0], 0, forward, contention, range(len(both), forward.num_layers))
        found += _alone(kinds[1], 1, backward, contention, range(len(both), backward.num_layers))
    return tuple(part for part in found if part.ms)


def length_ms(parts: Sequence[LanePart]) -> float:
    """How long an op with these parts takes if both lanes are free."""
    lanes: dict[str, float] = {}
    ends: dict[int, float] = {}
    for lane, ms, work in parts:
        ready = 0.0 if work is None else ends.get(work, 0.0)
        lanes[lane] = max(ready, lanes.get(lane, 0.0)) + ms
        if work is not None:
            ends[work] = lanes[lane]
    return max(lanes.values(), default=0.0)


def _together(f: ExpertParts, b: ExpertParts, backward: Kind) -> list[LanePart]:
    """A layer of F (work 0) and a layer of a backward (work 1)."""
    wgrad = backward is BW
    return [
        LanePart(ALL_TO_ALL, b.combine_grad, 1),
        LanePart(COMPUTE, f.attention, 0),
        LanePart(COMPUTE, b.experts_grad, 1),
        LanePart(ALL_TO_ALL, f.dispatch, 0),
        *([LanePart(COMPUTE, b.experts_wgrad, None)] if wgrad else []),
        LanePart(ALL_TO_ALL, b.dispatch_grad, 1),
        LanePart(COMPUTE, f.experts, 0),
        LanePart(ALL_TO_ALL, f.combine, 0),
        LanePart(COMPUTE, b.attention_grad, 1),
        *([LanePart(COMPUTE, b.attention_wgrad, None)] if wgrad else []),
    ]


def _alone(kind: Kind, work: int, stage: ExpertParts, contention: float, layers: range) -> list[LanePart]:
    """Some layers of a pass that runs alone; computation takes longer only for what runs next to an all-to-all."""
    one = stage.per_layer()
    forward = [
        LanePart(COMPUTE, one.attention, work),
        LanePart(ALL_TO_ALL, one.dispatch, work),
        LanePart(COMPUTE, one.experts, work),
        LanePart(ALL_TO_ALL, one.combine, work),
    ]
    backward = [
        LanePart(ALL_TO_ALL, one.combine_grad, work),
        LanePart(COMPUTE, one.experts_grad, work),
        LanePart(ALL_TO_ALL, one.dispatch_grad, work),
        LanePart(COMPUTE, one.attention_grad, work),
    ]
    experts_wgrad = LanePart(COMPUTE, one.experts_wgrad * contention, None)
    attention_wgrad = LanePart(COMPUTE, one.attention_wgrad, None)
    of_kind = {
        F: forward,
        B: backward,
        W: [LanePart(COMPUTE, one.experts_wgrad + one.attention_wgrad, work)],
        BW: [*backward[:2], experts_wgrad, *backward[2:], attention_wgrad],
    }
    return [part for _ in layers for part in of_kind[kind]]
