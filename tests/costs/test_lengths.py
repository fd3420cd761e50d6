import pytest

from megatron.zero_bubble import PassCosts, Placement, build, simulate
from megatron.zero_bubble.costs.lengths import LengthCost, Shape
from megatron.zero_bubble.errors import UserError
from tests.helpers.lengths import ShapedCosts

LINEAR = Placement.linear(4)


def test_a_sample_takes_linear_and_quadratic_time() -> None:
    cost = LengthCost.of_share(0.25, 1000, fixed_tokens=100)
    assert cost.sample(1000) == pytest.approx(1.0)
    assert cost.sample(500) == pytest.approx(0.75 / 2 + 0.25 / 4)
    assert cost.microbatch(Shape(3, 500)) == pytest.approx(0.075 + 3 * cost.sample(500))


def test_the_share_of_passes_is_that_of_all_three() -> None:
    """B takes twice the attention of F, and W none."""
    costs = PassCosts.uniform(LINEAR, 10.0, 13.0, 7.0, attention=0.3)
    assert LengthCost.of_passes(costs, 64) == LengthCost.of_share(0.3, 64)


def test_whole_sequences_have_the_time_of_the_plain_costs() -> None:
    costs = PassCosts.uniform(LINEAR, 10.0, 13.0, 7.0, attention=0.3)
    shaped = ShapedCosts(**vars(costs), sequence=64, shapes=(Shape(1, 64),) * 6)
    for name in ("zb-h1", "1f1b"):
        schedule = build(name, num_ranks=4, num_microbatches=6)
        assert simulate(schedule, shaped).makespan_ms == pytest.approx(simulate(schedule, costs).makespan_ms)


@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_the_passes_of_a_microbatch_take_the_time_of_its_shape(name: str) -> None:
    costs = PassCosts.uniform(LINEAR, 10.0, 13.0, 7.0, attention=0.3)
    shaped = ShapedCosts(**vars(costs), sequence=64, shapes=(Shape(1, 64), Shape(3, 16)))
    schedule = build(name, num_ranks=4, num_microbatches=2)
    of_rank = [p for p in schedule.order[0] if p.microbatch == 1]
    expected = 30.0 * LengthCost.of_share(0.3, 64).microbatch(Shape(3, 16))
    assert sum(map(shaped.duration, of_rank)) == pytest.approx(expected)


def test_bad_figures_are_refused() -> None:
    with pytest.raises(UserError, match="linear"):
        LengthCost(-1.0)
    with pytest.raises(UserError, match="attention"):
        LengthCost.of_share(1.5, 64)
