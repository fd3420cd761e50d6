"""Vocabulary parallelism against stock megatron-core: equal up to rounding, in float32.

A row combines options that do not mask each other's errors.
"""

from __future__ import annotations

import pytest

from tests.adapter.test_parity import BUCKETS, DROPOUT, EXPERTS, FP16, LLAMA, ROPE, UNTIED
from tests.adapter.test_slices_training import times_ready
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import Layout, Outcome, assert_same_bits, train
from tests.helpers.ranks import RankPool
from tests.helpers.slices import Difference
from tests.helpers.vocabulary import differences, distances_in_bf16, largest_differences


def divided(*schedules: str, more: str = "") -> list[str]:
    """The schedules with both algorithms."""
    return [f"{name} --zero-bubble-vocabulary-parallel {number} {more}" for name in schedules for number in (1, 2)]


MANY = divided("1f1b", "zb-h1")
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DISTRIBUTED = f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BUCKETS}"

ROWS = {
    "untied, llama": (Layout(2), 3, f"{UNTIED} {ROPE} {LLAMA}", [*MANY, *divided("zb-h2")]),
    "tied, p=3, padding, per-token loss": (Layout(3), 4, "--calculate-per-token-loss", MANY),
    "m=1, experts, full recompute": (Layout(2), 1, f"{EXPERTS} {UNTIED} {FULL_RECOMPUTE}", MANY),
    "two stages per rank, tied": (Layout(2, num_layers=4), 3, "", divided("zb-v", "interleaved-1f1b")),
    "tp=2 and sequence parallel": (Layout(2, tensor=2), 3, f"--sequence-parallel {UNTIED} {ROPE}", MANY),
    "tp=2, tied": (Layout(2, tensor=2), 3, "", MANY[2:]),
}
"""Layout, number of microbatches, options, schedules."""

STEPS = {
    "tied, dropout, clipped": (Layout(2), 3, f"{DROPOUT} --clip-grad 0.5", MANY),
    "dp=2, distributed optimizer, both overlaps, fused": (
        Layout(2, data=2),
        3,
        f"{UNTIED} {DISTRIBUTED} --zero-bubble-fuse-wgrad",
        MANY,
    ),
    "dp=2, aligned reduction, tied": (Layout(2, data=2), 2, f"--overlap-grad-reduce {BUCKETS}", MANY[2:]),
    "dp=2, reduction without alignment, tied": (
        Layout(2, data=2),
        3,
        f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS}",
        MANY,
    ),
    "post-validation": (
        Layout(2),
        3,
        f"{UNTIED} --clip-grad 0.5",
        divided("1f1b", "zb-h2", more="--zero-bubble-post-validation"),
    ),
    "two stages per rank, post-validation": (
        Layout(2, num_layers=4),
        3,
        "--clip-grad 0.5",
        divided("zb-v", more="--zero-bubble-post-validation"),
    ),
}


def check(found: list[list[Difference]]) -> None:
    """Check the differences of all schedules on all ranks."""
    for of_rank in found:
        for difference in of_rank:
            assert difference.losses <= 5e-7 and difference.worst <= 2e-6, found


@pytest.mark.parametrize("name", ROWS)
def test_gradients_equal_those_of_whole_layers(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options, schedules = ROWS[name]
    check(ranks.run(layout.num_ranks, differences, layout.flags(num_microbatches, options), schedules, timeout=120))


def check_steps(found: list[list[Outcome]]) -> None:
    """Check losses, of evaluations too, and gradient norms of five steps."""
    for stock, *others in found:
        for outcome in others:
            losses, norms = largest_differences(outcome, stock)
            assert losses <= 5e-7 and norms <= 1e-6, (losses, norms)


@pytest.mark.parametrize("name", STEPS)
def test_five_steps_equal_those_of_whole_layers(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options, schedules = STEPS[name]
    flags = layout.flags(num_microbatches, options)
    found = ranks.run(layout.num_ranks, train, flags, [None, *schedules], timeout=120)
    check_steps(found)


@pytest.mark.parametrize("schedule", divided("zb-h1"))
def test_rejected_steps_are_repeated_from_the_start(ranks: RankPool, schedule: str) -> None:
    """After a rejected step, I reads the batches again, and L reports the losses of the second forwards."""
    flags = f"--zero-bubble-schedule {schedule} --clip-grad 100 --train-iters 14"
    faults = [Fault(9, 1, 0, 1e6), Fault(11, 1, 2, 1e6)]
    modes = ["", "--zero-bubble-post-validation"]
    results = ranks.run(2, train_with_faults, Layout(2).flags(3, flags), modes, faults, True, timeout=120)
    assert_same_bits(results, ["synchronous", "ahead"], 14)
    assert results[0][1].counts["repeated"] == 2, results[0][1].counts


def test_overflowing_steps_are_skipped_as_in_stock(ranks: RankPool) -> None:
    layout = Layout(2)
    for stock, *others in ranks.run(2, train, layout.flags(3, f"{FP16} {UNTIED}"), [None, *MANY], timeout=120):
        for outcome in others:
            assert outcome.loss_scales == stock.loss_scales
            skipped = [norm == "skipped" for norm in outcome.grad_norms]
            assert any(skipped) and skipped == [norm == "skipped" for norm in stock.grad_norms]


@pytest.mark.parametrize("more", ["", "--zero-bubble-fuse-wgrad"])
def test_bf16_is_no_farther_from_float32_than_stock(ranks: RankPool, more: str) -> None:
    flags = Layout(2).flags(3, f"{LLAMA} {ROPE} {UNTIED} {more}")
    for stock, *others in ranks.run(2, distances_in_bf16, flags, MANY, timeout=120):
        assert all(difference.whole <= 1.1 * stock.whole for difference in others), (stock, others)


@pytest.mark.parametrize("options", ["", UNTIED])
def test_every_weight_is_ready_for_its_reduction_once(ranks: RankPool, options: str) -> None:
    """T and J both add to a tied weight, and the last of them makes it ready."""
    flags = Layout(2).flags(3, f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS} {options}")
    for schedule in MANY[1:3]:
        for counts in ranks.run(2, times_ready, flags, schedule, timeout=60):
            assert set(counts) == {1}
