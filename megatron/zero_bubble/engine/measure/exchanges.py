"""The all-to-alls of experts in recorded iterations, as parts of the measured passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.zero_bubble.core.analysis.trace import ExpertExchange, Trace
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.experts import NO_EXPERTS, ExpertParts
from megatron.zero_bubble.core.ir import Kind, Pass

_IN_FORWARD = {"dispatch": "dispatch", "combine": "combine"}
_IN_BACKWARD = {
    "combine_grad": "combine_grad",
    "dispatch_grad": "dispatch_grad",
    # Full recomputation repeats those of F.
    "dispatch": "dispatch_grad",
    "combine": "combine_grad",
}
_FIRST, _SECOND = ("dispatch", "combine_grad"), ("combine", "dispatch_grad")
"""All-to-alls between which the experts compute."""


def with_exchanges(costs: PassCosts, traces: Iterable[Trace]) -> PassCosts:
    """Return measured costs with their parts of experts; unchanged if no all-to-all took time.

    A part is the share of its passes that it took in all recorded iterations; passes of pairs do not count, because
    their all-to-alls wait for the other pass. Experts compute between two all-to-alls of a layer. Which part of W is
    theirs is not measured: it is assumed to be as large as their part of what F computes.
    """
    of_stages: dict[tuple[int, Kind], _Kind] = defaultdict(_Kind)
    for trace in traces:
        for rank in trace.ranks:
            exchanges: dict[Pass, list[ExpertExchange]] = defaultdict(list)
            for each in rank.exchanges:
                if len(each.works) == 1:
                    exchanges[each.works[0]].append(each)
            for work, start, end in rank.spans:
                if own := exchanges.get(work):
                    of_stages[work.stage, work.kind].add(own, end - start)
    parts = tuple(_parts(stage, costs, of_stages) for stage in range(costs.num_stages))
    return costs.with_experts(parts) if any(own.all_to_all for own in parts) else costs


@dataclass
class _Kind:
    """What the passes of one kind took on a stage, in milliseconds of all of them together.

    Attributes:
        parts: of every all-to-all, and of the experts.
        whole_ms: of the whole passes.
        passes: their number.
        layers: the number of layers with experts that they ran.
    """

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    whole_ms: float = 0.0
    passes: int = 0
    layers: int = 0

    def add(self, exchanges: Sequence[ExpertExchange], whole_ms: float) -> None:
        for part, ms in _times(exchanges):
            self.parts[part] += ms
        self.whole_ms += whole_ms
        self.passes += 1
        self.layers += sum(each.part in _FIRST for each in exchanges)

    def share(self, part: str) -> float:
        """The share of the passes that a part takes."""
        return self.parts[part] / self.whole_ms if self.whole_ms else 0.0


def _times(exchanges: Sequence[ExpertExchange]) -> Iterator[tuple[str, float]]:
    """Yield the parts of a pass with their times, experts included."""
    ended: float | None = None
    fields = _IN_FORWARD if exchanges[0].works[0].kind is Kind.F else _IN_BACKWARD
    for each in exchanges:
        yield fields[each.part], each.end_ms - each.start_ms
        if each.part in _SECOND and ended is not None:
            yield "experts", each.start_ms - ended
        ended = each.end_ms if each.part in _FIRST else None


def _parts(stage: int, costs: PassCosts, of_stages: Mapping[tuple[int, Kind], _Kind]) -> ExpertParts:
    forward = of_stages.get((stage, Kind.F))
    backward = of_stages.get((stage, Kind.B)) or of_stages.get((stage, Kind.BW))
    if forward is None or backward is None:
        return NO_EXPERTS
    f, b, w = costs.forward_ms[stage], costs.backward_ms[stage], costs.wgrad_ms[stage]
    computed = 1 - forward.share("dispatch") - forward.share("combine")
    return NO_EXPERTS._replace(
        layers=round(forward.layers / forward.passes),
        dispatch=f * forward.share("dispatch"),
        experts=f * forward.share("experts"),
        combine=f * forward.share("combine"),
        combine_grad=b * backward.share("combine_grad"),
        experts_grad=b * backward.share("experts"),
        dispatch_grad=b * backward.share("dispatch_grad"),
        experts_wgrad=w * forward.share("experts") / computed if computed > 0 else 0.0,
    )
