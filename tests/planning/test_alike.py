"""Replicas that share experts run equally many microbatches, of like times at the same time; others differ."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble import LengthCost, balance, build, simulate
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.packing import load_of

MOST = 4096


@given(
    st.lists(st.integers(1, MOST), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([MOST, 10000]),
)
def test_every_sample_once_and_equally_many_microbatches_in_a_group(
    lengths: list[int], groups: int, together: int, ranks: int, most: int
) -> None:
    replicas = groups * together
    lengths += [1] * max(replicas - len(lengths), -len(lengths) % together)
    found = balance(lengths, replicas, ranks, most, together=together)
    samples = [sample for own in found for microbatch in own for sample in microbatch]
    assert sorted(samples) == list(range(len(lengths))) and len(found) == replicas
    assert all(load_of(microbatch, lengths).tokens <= most for own in found for microbatch in own)
    for first in range(0, replicas, together):
        (count,) = {len(own) for own in found[first : first + together]}
        assert count and all(all(own) for own in found[first : first + together])


def lockstep(parts: list[list[list[int]]], together: int, ranks: int, cost: LengthCost) -> float:
    """The time of the slowest group, whose replicas wait for each other in every microbatch."""
    times = []
    for first in range(0, len(parts), together):
        rows = zip(*parts[first : first + together], strict=True)
        loads = tuple(max(map(Load.of, row), key=cost.microbatch) for row in rows)
        plan = build("zb-h1", num_ranks=ranks, num_microbatches=len(loads))
        times.append(simulate(plan, cost.passes(plan.placement, loads)).makespan_ms)
    return max(times)


@pytest.mark.parametrize("together", [2, 4, 8])
def test_iterations_are_shorter_than_with_equal_counts(together: int) -> None:
    """Simulated for 8 replicas of 4 ranks with 16 samples each: 1.65 times with two replicas per group, and more with
    larger groups, because each of them waits for its longest sample.
    """
    generator, cost = random.Random(1), LengthCost.of_hidden_size(5120, 1024)
    before, after = 0.0, 0.0
    for _ in range(2):
        lengths = [min(8192, max(64, int(generator.lognormvariate(8.2, 1.3)))) for _ in range(128)]
        equal = [[[tokens] for tokens in lengths[replica::8]] for replica in range(8)]
        found = balance(lengths, 8, 4, 16384, cost=cost, together=together)
        own = [[[lengths[sample] for sample in microbatch] for microbatch in part] for part in found]
        before, after = before + lockstep(equal, together, 4, cost), after + lockstep(own, together, 4, cost)
    assert before / after >= 1.5


def test_groups_may_run_different_numbers() -> None:
    found = balance([4096, 4096, *[512] * 16], 4, 2, MOST, together=2)
    assert len({len(own) for own in found}) == 2


@pytest.mark.parametrize(("samples", "replicas"), [(9, 4), (12, 3)])
def test_samples_and_replicas_that_do_not_divide_are_refused(samples: int, replicas: int) -> None:
    with pytest.raises(UserError, match="must be a multiple of the 2 replicas that share experts"):
        balance([8] * samples, replicas, 2, 64, together=2)
