"""Samples of different lengths on replicas and microbatches: every sample once, below the cap, and short iterations."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import PassCosts, build, simulate
from megatron.zero_bubble.costs.lengths import LengthCost, Shape
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.planning.balance import balance, duration, karmarkar_karp, microbatches, shape_of
from tests.helpers.lengths import ShapedCosts

HIDDEN = 2048


def cost_for(longest: int, fixed_tokens: float = 0.0) -> LengthCost:
    """That of section 4 of the paper's evaluation, ``s * (12 h + s)``."""
    return LengthCost.of_share(longest / (12 * HIDDEN + longest), longest, fixed_tokens)


def lognormal(number: int, longest: int, generator: random.Random) -> list[int]:
    return [min(longest, max(64, int(generator.lognormvariate(8.2, 1.3)))) for _ in range(number)]


lists = st.lists(st.integers(1, 4096), min_size=1, max_size=40)


@given(lists, st.integers(1, 5), st.integers(1, 4), st.integers(4096, 20000), st.sampled_from([0.0, 64.0, 1024.0]))
def test_every_sample_once_below_the_cap_and_repeatable(
    lengths: list[int], num_replicas: int, num_ranks: int, most: int, fixed: float
) -> None:
    lengths += [1] * (num_replicas - len(lengths))
    cost = cost_for(4096, fixed)
    replicas = balance(lengths, num_replicas, num_ranks, cost, most)
    samples = [sample for own in replicas for microbatch in own for sample in microbatch]
    assert sorted(samples) == list(range(len(lengths)))
    assert len(replicas) == num_replicas and all(own and all(own) for own in replicas)
    for own in replicas:
        shapes = [shape_of(microbatch, lengths) for microbatch in own]
        assert all(shape.sequences * shape.tokens <= most for shape in shapes)
        assert shapes == sorted(shapes, key=lambda shape: shape.tokens)
    assert balance(list(lengths), num_replicas, num_ranks, cost, most) == replicas


@given(lists, st.integers(1, 4), st.sampled_from([0.0, 64.0, 1024.0]), st.integers(1, 10))
def test_runs_of_like_lengths_beat_differencing_and_one_sample_each(
    lengths: list[int], num_ranks: int, fixed: float, parts: int
) -> None:
    """Inside a replica, parts of equal cost would mix lengths, and pad short samples to the longest."""
    cost, most = cost_for(4096, fixed), 2 * 4096
    own = microbatches(range(len(lengths)), lengths, num_ranks, cost, most)
    found = duration(own, lengths, num_ranks, cost)
    singles = tuple((sample,) for sample in range(len(lengths)))
    assert found <= duration(singles, lengths, num_ranks, cost) * (1 + 1e-9)
    if num_ranks > 1 or parts > len(lengths):
        return  # the limits of a run are powers of two, so the time to fill the pipeline is not the least
    mixed = tuple(tuple(part) for part in karmarkar_karp([cost.sample(s) for s in lengths], parts))
    if all(len(part) * shape_of(part, lengths).tokens <= most for part in mixed):
        assert found <= duration(mixed, lengths, num_ranks, cost) * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30), st.integers(1, 6))
def test_differencing_is_at_most_one_item_from_equal(costs: list[float], parts: int) -> None:
    sums = [sum(costs[item] for item in part) for part in karmarkar_karp(costs, parts)]
    assert sum(sums) == pytest.approx(sum(costs))
    assert max(sums) - min(sums) <= max(costs) + 1e-9


def test_short_samples_share_microbatches_if_microbatches_have_a_fixed_cost() -> None:
    lengths = [*range(9, 17), 512]
    assert len(microbatches(range(9), lengths, 2, cost_for(512), 1024)) == 9
    few = microbatches(range(9), lengths, 2, cost_for(512, fixed_tokens=64), 1024)
    assert [shape_of(own, lengths) for own in few] == [Shape(8, 16), Shape(1, 512)]


def makespan_ms(schedule: str, num_ranks: int, lengths: Sequence[int], longest: int) -> float:
    """One sample per microbatch, with F = B = W for the longest sample."""
    attention = longest / (12 * HIDDEN + longest)
    plan = build(schedule, num_ranks=num_ranks, num_microbatches=len(lengths))
    costs = PassCosts.uniform(plan.placement, 10.0, 10.0 * (1 + attention), 10.0 * (1 - attention), 0.0, attention)
    shapes = tuple(Shape(1, tokens) for tokens in lengths)
    return simulate(plan, ShapedCosts(**vars(costs), sequence=longest, shapes=shapes)).makespan_ms


def gain(
    schedule: str, num_ranks: int, num_replicas: int, each: int, longest: int, lists: int = 6
) -> tuple[float, float, float]:
    """Time of equal counts in random order over that of balanced replicas, the least of the lists and of all together,
    and the most that is possible in all together: no iteration is shorter than its longest sample alone.
    """
    generator, cost = random.Random(1), cost_for(longest)
    before, after, alone = [], [], []
    for _ in range(lists):
        lengths = lognormal(num_replicas * each, longest, generator)
        equal = [lengths[replica::num_replicas] for replica in range(num_replicas)]
        balanced = balance(lengths, num_replicas, num_ranks, cost, longest)
        own = [[lengths[sample] for (sample,) in microbatches] for microbatches in balanced]
        before.append(max(makespan_ms(schedule, num_ranks, part, longest) for part in equal))
        after.append(max(makespan_ms(schedule, num_ranks, part, longest) for part in own))
        alone.append(makespan_ms(schedule, num_ranks, [max(lengths)], longest))
    least = min(b / a for b, a in zip(before, after, strict=True))
    return least, sum(before) / sum(after), sum(before) / sum(alone)


ROWS = ((2, 2, 16, 65536), (2, 8, 8, 65536), (2, 8, 4, 8192), (2, 2, 16, 8192), (4, 2, 16, 65536), (4, 8, 4, 8192))


@pytest.mark.parametrize(("num_ranks", "num_replicas", "each", "longest"), ROWS)
def test_iterations_are_shorter_than_with_equal_counts(
    num_ranks: int, num_replicas: int, each: int, longest: int
) -> None:
    """At least 1.3 times, unless the longest sample alone takes as long as the whole iteration."""
    least, together, most = gain("zb-h1", num_ranks, num_replicas, each, longest)
    assert least >= 0.999
    assert together >= min(1.3, 0.99 * most), (least, together, most)


def test_bad_lists_are_refused() -> None:
    cost = cost_for(64)
    with pytest.raises(UserError, match="got 1 samples for 2 replicas"):
        balance([3], 2, 2, cost, 64)
    with pytest.raises(UserError, match="samples must have 1 to 64 tokens, the most of a microbatch; got 3 to 65"):
        balance([3, 65], 2, 2, cost, 64)
