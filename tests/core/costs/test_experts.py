"""Times of models with experts: the parts of a pass, of a pair, and the form of a costs file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zero_bubble import Pass, PassCosts, Placement, build, simulate
from megatron.zero_bubble.core.costs.experts import ExpertParts, length_ms, parts_of
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir.ops import ALL_TO_ALL, COMPUTE
from megatron.zero_bubble.core.ir.passes import BW, B, F, W
from megatron.zero_bubble.core.plan import lower

ONE = ExpertParts(1, 4.0, 6.0, 5.0, 8.0, 5.5, 5.2, 7.5, 9.0, 5.1, 2.4)
CONTENT: dict[str, Any] = {
    "forward_ms": 40.0,
    "backward_ms": [30.0, 20.0],
    "wgrad_ms": 10.0,
    "comm_ms": 1.0,
    "experts": {
        "layers": 4,
        "forward": {"dispatch_ms": 8, "experts_ms": 10, "combine_ms": 12},
        "backward": {"combine_ms": 6, "experts_ms": 8, "dispatch_ms": [4, 2]},
        "wgrad": {"experts_ms": 6},
        "contention": 1.25,
    },
}


def test_a_pair_hides_the_all_to_all_of_both() -> None:
    """Its length is that of the busier lane and of what neither can hide, far below the two passes in sequence."""
    alone = [length_ms(parts_of((kind,), (ONE,), 1.0)) for kind in (F, B, W)]
    assert alone == pytest.approx([23.0, 27.2, 7.5])
    both = parts_of((F, BW), (ONE, ONE), 1.0)
    by_lane = {lane: sum(part.ms for part in both if part.lane == lane) for lane in (COMPUTE, ALL_TO_ALL)}
    assert by_lane == pytest.approx({COMPUTE: 30.7, ALL_TO_ALL: 27.0})
    assert max(by_lane.values()) <= length_ms(both) < 0.65 * sum(alone)
    assert length_ms(parts_of((F, B), (ONE, ONE), 1.2)) > length_ms(parts_of((F, B), (ONE, ONE), 1.0))
    own = length_ms(parts_of((BW,), (ONE,), 1.0))
    assert own == pytest.approx(sum(alone[1:]) - 5.1), "W of experts runs beneath the dispatch of its own B"


def test_layers_that_one_pass_has_more_run_alone() -> None:
    more, fewer = ONE._replace(layers=3), ONE
    parts = parts_of((F, BW), (more, fewer), 1.5)
    assert [part.work for part in parts[-8:]] == [0] * 8
    assert parts[-8].ms == pytest.approx(4.0 / 3), "without contention"
    assert sum(part.ms for part in parts if part.lane == ALL_TO_ALL) == pytest.approx(27.0)
    dense = ExpertParts(0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 2.4)
    assert {part.lane for part in parts_of((F,), (dense,), 1.0)} == {COMPUTE}


def test_only_plans_that_overlap_use_the_parts() -> None:
    costs = CostsFile.parse(json.dumps(CONTENT)).on(Placement.interleaved(1, 2))[0]
    assert costs.forward_ms == (20.0, 20.0) and costs.exposed_share == pytest.approx(0.32)
    assert costs.parts((Pass(0, F, 0),)) == () and costs.overlapping(True).parts((Pass(0, F, 0),))
    forward, backward = Pass(0, F, 1), Pass(1, BW, 0)
    assert costs.pair(forward, backward) < costs.duration(forward) + costs.duration(backward)
    plain = PassCosts(costs.forward_ms, costs.backward_ms, costs.wgrad_ms)
    assert plain.pair(forward, backward) == plain.duration(forward) + plain.duration(backward)
    merged = costs.fit(Placement.linear(1))
    assert merged.experts[0].layers == 4 and merged.experts[0].whole == pytest.approx(100)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "dualpipe-v"])
def test_plans_with_messages_are_simulated_as_schedules(name: str) -> None:
    """What a pass gives is sent when the pass has ended, even if the pair that it is part of has not."""
    schedule = build(name, num_ranks=3, num_microbatches=12, pairs=True)
    costs = CostsFile.parse(json.dumps(CONTENT | {"backward_ms": 25.0, "experts": EVEN})).on(schedule.placement)[0]
    bare, sent = simulate(schedule, costs), simulate(lower(schedule), costs)
    assert sent.spans == bare.spans and sent.makespan_ms == bare.makespan_ms
    for rank in range(3):
        edges = [edge for box in bare.boxes(rank) for edge in box[1:]]
        assert edges == sorted(edges), "boxes do not overlap"
    assert bare.timed_lanes == (ALL_TO_ALL,)


EVEN = CONTENT["experts"] | {"backward": {"combine_ms": 6, "experts_ms": 8, "dispatch_ms": 6}}


def test_a_file_is_read_as_it_was_written() -> None:
    costs = CostsFile.parse(json.dumps(CONTENT)).on(Placement.interleaved(1, 2))[0]
    assert CostsFile.parse(costs_to_json(costs)).on(Placement.interleaved(1, 2))[0] == costs
    assert costs.contention == 1.25 and costs.experts[1].dispatch_grad == 2.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"experts": 3}, "experts must be an object with the keys layers, forward, backward, wgrad; got 3"),
        ({"experts": EVEN | {"wgrad": {}}}, "experts.wgrad must be an object with the keys experts_ms; got"),
        ({"experts": EVEN | {"more": 1}}, "experts must be an object .* got"),
        ({"experts": EVEN | {"contention": 0.5}}, "experts.contention must be 1 or more, .*; got 0.5"),
        ({"experts": EVEN | {"layers": 0}}, "experts.layers must be above 0 on some stage; got 0"),
        ({"experts": EVEN | {"layers": [1, -2]}}, "experts.layers of stage 1 must be a finite number, 0 or above"),
        ({"forward_ms": 29}, "forward_ms must include the parts of experts.forward, which take 15 ms on stage 0; got"),
    ],
)
def test_other_forms_are_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        CostsFile.parse(json.dumps(CONTENT | change)).on(Placement.interleaved(1, 2))


def test_layers_of_a_stage_share_its_experts() -> None:
    """With the layers of every stage, for any other number of stages; attention has what is left of a pass."""
    times = {name: [each, each] for name, each in (("forward_ms", 40), ("backward_ms", 44), ("wgrad_ms", 20))}
    file = CostsFile.parse(json.dumps(CONTENT | times | {"layers_per_stage": [3, 1]}))
    own, _ = file.on(Placement.linear(2))
    halves, _ = file.on(Placement.interleaved(2, 2))
    assert halves.contention == own.contention
    assert [each.dispatch for each in halves.experts] == pytest.approx(
        [*(own.experts[0].dispatch / 3,) * 3, own.experts[1].dispatch]
    )
    for each, f, b, w in zip(halves.experts, halves.forward_ms, halves.backward_ms, halves.wgrad_ms, strict=True):
        assert each.whole == pytest.approx(f + b + w)
    layers = file.layer_costs()
    assert layers is not None and layers.averaged().on((2, 2))[0].experts[0].dispatch == pytest.approx(
        sum(each.dispatch for each in own.experts) / 2
    )
