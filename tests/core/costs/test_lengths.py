from dataclasses import replace

import pytest

from megatron.zero_bubble import Kind, PassCosts, Placement, build, simulate
from megatron.zero_bubble.core.costs.lengths import LengthCost, Load, PackedCosts
from megatron.zero_bubble.core.errors import UserError

LINEAR = Placement.linear(4)


def test_a_sample_takes_linear_and_quadratic_time() -> None:
    cost = LengthCost.of_share(0.25, 1000, fixed_tokens=100)
    assert cost.sample(1000) == pytest.approx(1.0)
    assert cost.sample(500) == pytest.approx(0.75 / 2 + 0.25 / 4)
    assert cost.microbatch(Load.of([500, 500, 500])) == pytest.approx(0.075 + 3 * cost.sample(500))
    assert LengthCost.of_hidden_size(10, 2.0) == LengthCost(120.0, 1.0, 240.0)


def test_the_share_of_passes_is_that_of_all_three() -> None:
    """B takes twice the attention of F, and W none."""
    costs = PassCosts.uniform(LINEAR, 10.0, 13.0, 7.0, attention=0.3)
    assert LengthCost.of_passes(costs, 64) == LengthCost.of_share(0.3, 64)


def test_whole_sequences_have_the_time_of_the_plain_costs() -> None:
    costs = PassCosts.uniform(LINEAR, 10.0, 13.0, 7.0, attention=0.3)
    packed = PackedCosts(**vars(costs), sequence=64, loads=(Load.of([64]),) * 6)
    for name in ("zb-h1", "1f1b"):
        schedule = build(name, num_ranks=4, num_microbatches=6)
        assert simulate(schedule, packed).makespan_ms == pytest.approx(simulate(schedule, costs).makespan_ms)


def test_messages_are_added_to_the_passes_of_a_microbatch() -> None:
    costs = replace(LengthCost(3.0).passes(LINEAR, (Load.of([10]), Load.of([2]))), message_ms=0.5)
    timeline = simulate(build("1f1b", num_ranks=4, num_microbatches=2), costs)
    forwards = {p.microbatch: end - start for p, start, end in timeline.spans[1] if p.kind is Kind.F}
    assert forwards == {0: pytest.approx(11.0), 1: pytest.approx(3.0)}


@pytest.mark.parametrize("name", ["zb-h1", "1f1b", "zb-v"])
def test_the_passes_of_a_microbatch_take_the_time_of_its_samples(name: str) -> None:
    cost = LengthCost.of_share(0.3, 64, fixed_tokens=8)
    loads = (Load.of([64]), Load.of([16, 5, 16]))
    schedule = build(name, num_ranks=4, num_microbatches=2)
    costs = cost.passes(schedule.placement, loads)
    for microbatch, load in enumerate(loads):
        of_rank = [p for p in schedule.order[0] if p.microbatch == microbatch]
        assert sum(map(costs.duration, of_rank)) == pytest.approx(cost.microbatch(load))


def test_attention_takes_twice_as_long_in_b_as_in_f_and_no_time_in_w() -> None:
    costs = LengthCost(3.0, 3.0).passes(LINEAR, (Load(10, 58),))
    assert [costs.durations(2, kind, costs.loads) for kind in (Kind.F, Kind.B, Kind.W)] == [[68.0], [126.0], [10.0]]
    assert costs.durations(2, Kind.BW, costs.loads) == [136.0]


def test_bad_figures_are_refused() -> None:
    with pytest.raises(UserError, match="linear"):
        LengthCost(-1.0)
    with pytest.raises(UserError, match="attention"):
        LengthCost.of_share(1.5, 64)
