"""Samples of different lengths on replicas and microbatches: every sample once, below the cap, and short iterations."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatron.zero_bubble
from megatron.zero_bubble import LengthCost, balance, build, simulate
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.balance import duration, karmarkar_karp, load_of, microbatches, simulator_of

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
    replicas = balance(lengths, num_replicas, num_ranks, most, cost=cost)
    samples = [sample for own in replicas for microbatch in own for sample in microbatch]
    assert sorted(samples) == list(range(len(lengths)))
    assert len(replicas) == num_replicas and all(own and all(own) for own in replicas)
    assert all(load_of(microbatch, lengths).tokens <= most for own in replicas for microbatch in own)
    simulator_of.cache_clear()
    assert balance(tuple(lengths), num_replicas, num_ranks, most, cost=cost) == replicas


@given(lists, st.integers(1, 4), st.sampled_from([0.0, 64.0, 1024.0]))
def test_packing_is_not_worse_than_one_sample_each(lengths: list[int], num_ranks: int, fixed: float) -> None:
    cost = cost_for(4096, fixed)
    own = microbatches(range(len(lengths)), lengths, num_ranks, cost, 2 * 4096)
    singles = tuple((sample,) for sample in range(len(lengths)))
    assert duration(own, lengths, num_ranks, cost) <= duration(singles, lengths, num_ranks, cost) * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30), st.integers(1, 6))
def test_differencing_is_at_most_one_item_from_equal(costs: list[float], parts: int) -> None:
    found = karmarkar_karp(costs, parts)
    sums = [sum(costs[item] for item in part) for part in found]
    assert sorted(item for part in found for item in part) == list(range(len(costs))) and len(found) == parts
    assert all(found) or len(costs) < parts
    assert max(sums) - min(sums) <= max(costs) + 1e-9


def test_short_samples_share_microbatches_if_microbatches_have_a_fixed_cost() -> None:
    lengths = [*range(9, 17), 512]
    assert len(microbatches(range(9), lengths, 2, cost_for(512), 1024)) == 9
    few = microbatches(range(9), lengths, 2, cost_for(512, fixed_tokens=64), 1024)
    assert sorted(few) == [tuple(range(8)), (8,)], (
        "they are not packed with the long one, which fills and drains the pipeline"
    )


def makespan(schedule: str, num_ranks: int, lengths: Sequence[Sequence[int]], cost: LengthCost) -> float:
    """That of microbatches with samples of the given lengths."""
    plan = build(schedule, num_ranks=num_ranks, num_microbatches=len(lengths))
    return simulate(plan, cost.passes(plan.placement, tuple(map(Load.of, lengths)))).makespan_ms


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
        equal = [[[tokens] for tokens in lengths[replica::num_replicas]] for replica in range(num_replicas)]
        found = balance(lengths, num_replicas, num_ranks, longest, schedule, cost)
        own = [[[lengths[sample] for sample in microbatch] for microbatch in replica] for replica in found]
        before.append(max(makespan(schedule, num_ranks, part, cost) for part in equal))
        after.append(max(makespan(schedule, num_ranks, part, cost) for part in own))
        alone.append(makespan(schedule, num_ranks, [[max(lengths)]], cost))
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


@pytest.mark.parametrize(("schedule", "at_least"), [("zb-h1", 1.60), ("zb-v", 1.34)])
def test_the_order_is_the_best_of_several(schedule: str, at_least: float) -> None:
    """Ascending microbatches alone gain 1.58 with zb-h1, and a mountain alone 1.28 with zb-v."""
    _, together, _ = gain(schedule, 4, 2, 16, 8192)
    assert together >= at_least


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_large_lists_take_little_time(schedule: str) -> None:
    """CPU time of a first call, which prepares its schedules; the least of several, because other programs run."""
    lengths, times = lognormal(512, 16384, random.Random(3)), []
    for _ in range(5):
        simulator_of.cache_clear()
        started = time.process_time()
        balance(lengths, 8, 8, 16384, schedule)
        times.append(time.process_time() - started)
    assert min(times) < 0.1


def test_three_lines_in_a_loop() -> None:
    """Public without torch, and in the arguments of a loop."""
    assert {"balance", "LengthCost"} <= set(megatron.zero_bubble.__all__)
    own = balance([8, 3, 5, 2], replicas=2, ranks=2, most_tokens=8)[0]
    assert all(isinstance(sample, int) for microbatch in own for sample in microbatch)
    lengths = [60000, 65000, 50000, 3000, 200]
    of_arrays = balance(numpy.array(lengths, dtype=numpy.int32), replicas=2, ranks=2, most_tokens=65536)  # type: ignore[arg-type]
    assert of_arrays == balance(lengths, replicas=2, ranks=2, most_tokens=65536)


def test_bad_lists_are_refused() -> None:
    with pytest.raises(UserError, match="got 1 samples for 2 replicas"):
        balance([3], 2, 2, 64)
    with pytest.raises(UserError, match="samples must have 1 to 64 tokens, the most of a microbatch; got 3 to 65"):
        balance([3, 65], 2, 2, 64)
    with pytest.raises(UserError, match="replicas must be 1 or more; got 0"):
        balance([3], 0, 2, 64)
    with pytest.raises(UserError, match="got 0 samples for 2 replicas"):
        balance([], 2, 2, 64)
    with pytest.raises(UserError, match="unknown schedule 'zb-hi'"):
        balance([3, 5], 2, 2, 64, "zb-hi")
    with pytest.raises(UserError, match="need a schedule of whole sequences"):
        balance([3, 5], 2, 2, 64, "seq-1f1b")
