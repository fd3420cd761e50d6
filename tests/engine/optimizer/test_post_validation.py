"""Steps taken ahead of validation equal those of the synchronous optimizer bit for bit, over many iterations.

Compared are losses, norms, loss scales, weights and optimizer states. Faults corrupt the gradient of a layer norm's
weight in one microbatch on one rank in chosen iterations. An evaluation after every tenth iteration makes a step final
outside the passes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, Placement, simulate
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.search import zb_auto
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.parity import BASE_FLAGS, Layout, assert_same_bits, rebuild_process_groups, run_once
from tests.helpers.ranks import RankFailure, RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_parity import BUCKETS, DROPOUT, EXPERTS, FP16, LLAMA, ROPE, UNTIED

MODES = ["", "--zero-bubble-post-validation"]
STEPS = 50
FEW = 22
"""The iterations of rows that run by default: two evaluations, and a fault before and after one."""
DISTRIBUTED = f"--use-distributed-optimizer --overlap-grad-reduce {BUCKETS}"
LATE_BETAS = "--adam-beta2 0.999"
SPIKE = 1e6
LOOSE = "--clip-grad 100"
"""A clip threshold that no norm of these models reaches without a fault."""


@dataclass(frozen=True)
class Row:
    """A job, its faults, and the kinds of steps that must occur on its ranks."""

    layout: Layout
    num_microbatches: int
    schedule: str
    options: str
    faults: list[Fault]
    expected: set[str] = field(default_factory=lambda: {"ahead", "repeated"})
    steps: int = STEPS


LAST_OF_TWO = [Fault(10, 1, 0, SPIKE), Fault(21, 1, 2, SPIKE), Fault(22, 1, 1, SPIKE), Fault(40, 0, 1, SPIKE)]
OVERFLOWS = [Fault(10, 1, 0, math.nan), Fault(20, 1, 1, math.inf), Fault(21, 1, 1, math.inf), Fault(31, 0, 2, math.nan)]
SOON = [replace(fault, iteration=at) for fault, at in zip(LAST_OF_TWO, (5, 11, 12, 18), strict=True)]
OVERFLOWS_SOON = [replace(fault, iteration=at) for fault, at in zip(OVERFLOWS, (10, 14, 15, 19), strict=True)]

SCALED = f"{LOOSE} {FP16} --loss-scale-window 7"
SCALE_CHANGES = {"ahead", "repeated", "skipped"}

ROWS = {
    "vocabulary parallelism, zb-h2, fp16, NaN and Inf": Row(
        Layout(2), 3, "zb-h2 --zero-bubble-vocabulary-parallel 2", f"{SCALED} {UNTIED}", OVERFLOWS, SCALE_CHANGES
    ),
    "vocabulary parallelism, algorithm 1, zb-v, fp16, NaN and Inf, tied": Row(
        Layout(2, num_layers=4), 3, "zb-v --zero-bubble-vocabulary-parallel 1", SCALED, OVERFLOWS, SCALE_CHANGES
    ),
    "zb-h2, fp32, spikes": Row(Layout(2), 3, "zb-h2", f"{LOOSE} {UNTIED}", LAST_OF_TWO),
    "zb-v, bf16, late betas, spikes, dropout": Row(
        Layout(2, num_layers=4), 3, "zb-v", f"{LOOSE} --bf16 {LATE_BETAS} {DROPOUT}", SOON, steps=FEW
    ),
    "zb-h2, fp16 with loss scale, NaN and Inf, tied": Row(
        Layout(2), 3, "zb-h2", SCALED, OVERFLOWS_SOON, SCALE_CHANGES, FEW
    ),
    "dp=2, distributed optimizer, overlapped parameter gather, zb-h1, fp16": Row(
        Layout(2, data=2),
        3,
        "zb-h1",
        f"{LOOSE} {FP16} {DISTRIBUTED} --overlap-param-gather",
        OVERFLOWS_SOON[:3],
        SCALE_CHANGES,
        steps=17,
    ),
    "late receives, zb-v, fp32, spikes": Row(
        Layout(2, num_layers=4), 3, "zb-v", f"{LOOSE} --zero-bubble-post-receives late", LAST_OF_TWO
    ),
    "dp=2, distributed optimizer, overlapped parameter gather, zb-v, fp16": Row(
        Layout(2, data=2, num_layers=4),
        3,
        "zb-v",
        f"{LOOSE} {FP16} {DISTRIBUTED} --overlap-param-gather",
        OVERFLOWS,
        {"ahead", "repeated", "skipped"},
    ),
    "a stage without parameters, zb-h2, bf16": Row(
        Layout(3, num_layers=3),
        5,
        "zb-h2",
        f"{LOOSE} --bf16 --pipeline-model-parallel-layout Ett||tL",
        [Fault(10, 2, 1, SPIKE), Fault(30, 0, 1, SPIKE)],
    ),
    "experts, zb-h2, fp16, growing loss scale": Row(
        Layout(2),
        3,
        "zb-h2",
        f"{LOOSE} {EXPERTS} {UNTIED} {LATE_BETAS} {FP16} --loss-scale-window 5",
        OVERFLOWS,
        {"ahead", "repeated", "skipped"},
    ),
}
QUICK = [name for name, row in ROWS.items() if row.steps < STEPS]

MORE = {
    "vocabulary parallelism, algorithm 1, zb-h2, p=3, fp16, Inf, tied": Row(
        Layout(3), 5, "zb-h2 --zero-bubble-vocabulary-parallel 1", SCALED, OVERFLOWS, SCALE_CHANGES
    ),
    "vocabulary parallelism, zb-v, fp16, growing loss scale, experts": Row(
        Layout(2, num_layers=4),
        5,
        "zb-v --zero-bubble-vocabulary-parallel 2",
        f"{LOOSE} {FP16} {EXPERTS} {UNTIED} --loss-scale-window 3",
        OVERFLOWS,
        SCALE_CHANGES,
    ),
    "vocabulary parallelism, tp=2 and sequence parallel, zb-h1, fp16": Row(
        Layout(2, tensor=2),
        3,
        "zb-h1 --zero-bubble-vocabulary-parallel 1",
        f"{SCALED} --sequence-parallel {UNTIED}",
        OVERFLOWS,
        SCALE_CHANGES,
    ),
    "p=4, zb-h2, bf16, faults in first, middle and last stages": Row(
        Layout(4),
        7,
        "zb-h2",
        f"{LOOSE} --bf16 {LLAMA} {ROPE}",
        [Fault(9, 0, 0, SPIKE), Fault(20, 2, 3, SPIKE), Fault(30, 3, 6, SPIKE), Fault(31, 1, 6, SPIKE)],
        {"ahead", "repeated", "waited"},
    ),
    "p=4, zb-v, fp16": Row(
        Layout(4, num_layers=8), 9, "zb-v", f"{LOOSE} {FP16}", [Fault(10, 3, 1, math.nan), Fault(11, 2, 8, math.inf)]
    ),
    "p=4, zb-h2, fp16, late betas": Row(Layout(4), 7, "zb-h2", f"{LOOSE} {FP16} {LATE_BETAS}", OVERFLOWS),
    "dp=2, distributed optimizer, bf16, zb-h2": Row(
        Layout(2, data=2), 3, "zb-h2", f"{LOOSE} --bf16 {DISTRIBUTED}", LAST_OF_TWO
    ),
    "dp=2, distributed optimizer, fp32, zb-h1": Row(
        Layout(2, data=2), 3, "zb-h1", f"{LOOSE} {DISTRIBUTED} --overlap-param-gather", LAST_OF_TWO
    ),
    "dp=2, ep=2": Row(
        Layout(2, data=2),
        2,
        "zb-h2",
        f"{LOOSE} {EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
        LAST_OF_TWO,
    ),
    "tp=2 and sequence parallel": Row(
        Layout(2, tensor=2), 3, "zb-h2", f"{LOOSE} --bf16 --sequence-parallel", LAST_OF_TWO
    ),
    "experts, zb-v, fp32": Row(
        Layout(2, num_layers=4), 3, "zb-v", f"{LOOSE} {EXPERTS} {UNTIED} --moe-z-loss-coeff 0.01", LAST_OF_TWO
    ),
    "per-token loss, zeros counted, zb-v": Row(
        Layout(2, num_layers=4), 3, "zb-v", f"{LOOSE} --calculate-per-token-loss --log-num-zeros-in-grad", LAST_OF_TWO
    ),
    "sgd": Row(Layout(2), 3, "zb-h2", f"{LOOSE} --optimizer sgd", LAST_OF_TWO),
    "slices, experts, full recompute": Row(
        Layout(2),
        3,
        "seq-zb-h1",
        f"{LOOSE} {EXPERTS} {UNTIED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        LAST_OF_TWO,
    ),
    "batch size ramp-up": Row(
        Layout(2), 5, "zb-h2", f"{LOOSE} --rampup-batch-size 4 2 100 {UNTIED}", LAST_OF_TWO
    ),
}  # fmt: skip


def counts_of(ranks: RankPool, row: Row, daring: bool = True) -> Counter[str]:
    """Compare both modes; return the counts of the kinds of steps, summed over the ranks."""
    layout, steps = row.layout, row.steps
    schedule = f"--zero-bubble-schedule {row.schedule}" if row.schedule else ""
    flags = f"{layout.flags(row.num_microbatches, row.options)} {schedule} --train-iters {steps} --eval-interval 10"
    results = ranks.run(layout.num_ranks, train_with_faults, flags, MODES, row.faults, daring, timeout=240)
    assert_same_bits(results, ["synchronous", "ahead"], steps)
    return sum((ahead.counts for _, ahead in results), Counter())


@pytest.mark.parametrize("name", some(ROWS, *QUICK))
def test_same_bits_as_the_synchronous_optimizer(ranks: RankPool, name: str) -> None:
    counts = counts_of(ranks, ROWS[name])
    assert ROWS[name].expected <= counts.keys(), counts


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_same_bits_in_more_jobs(ranks: RankPool, name: str) -> None:
    counts = counts_of(ranks, MORE[name])
    assert MORE[name].expected <= counts.keys(), counts


def test_norms_just_above_and_below_the_clip_threshold(ranks: RankPool) -> None:
    """The largest norm equals the threshold and is not clipped; with a threshold smaller by one bit, it is."""
    layout, faults, steps = Layout(2), [Fault(5, 1, 1, 1e4)], 7
    flags = f"{layout.flags(3, LOOSE)} --zero-bubble-schedule zb-h2 --train-iters {steps} --eval-interval 10"
    first, _ = ranks.run(2, train_with_faults, flags, [""], faults, timeout=120)
    norms = [float.fromhex(norm) for norm in first[0].grad_norms]
    assert norms.index(max(norms)) == 4, norms
    clip = max(norms) + 1e-6  # Megatron clips if threshold / (norm + 1e-6) is below 1
    allowed, clipped = (
        counts_of(ranks, Row(layout, 3, "zb-h2", f"--clip-grad {limit!r}", faults, steps=steps))
        for limit in (clip, math.nextafter(clip, 0))
    )
    assert (allowed["repeated"], clipped["repeated"]) == (0, 1), (allowed, clipped)


@pytest.mark.full
def test_same_bits_with_a_plan_for_twice_the_memory(ranks: RankPool, tmp_path: Path) -> None:
    placement = Placement.linear(4)
    costs, memory = PassCosts.uniform(placement, 10, 11, 8, 0.5), PassMemory.uniform(placement)
    schedule = zb_auto(costs, memory, 4, 7, 8.0, placement="linear", objective="span")
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(simulate(schedule, costs, memory)))
    faults = [Fault(10, 3, 0, SPIKE), Fault(30, 1, 6, SPIKE)]
    row = Row(Layout(4), 7, "", f"--bf16 {LOOSE} --zero-bubble-schedule-file {file}", faults)
    assert {"ahead", "repeated"} <= counts_of(ranks, row).keys()


def test_steps_that_will_be_clipped_are_synchronous(ranks: RankPool) -> None:
    """With norms above the threshold no step is taken ahead; with norms well below it, all but the first are."""
    steps = 9
    clipped, free = (
        counts_of(ranks, Row(Layout(2), 3, "zb-h2", f"--clip-grad {clip} {UNTIED}", [], steps=steps), daring=False)
        for clip in (0.1, 100)
    )
    assert clipped == {"synchronous": 2 * steps}
    assert free == {"synchronous": 2, "ahead": 2 * (steps - 1)}


def test_spikes_do_not_end_steps_ahead(ranks: RankPool) -> None:
    """A single large norm makes the next one uncertain, but few steps are synchronous."""
    counts = counts_of(ranks, replace(ROWS["zb-h2, fp32, spikes"], faults=SOON, steps=FEW), daring=False)
    assert counts["synchronous"] <= 2 * 5 and counts["repeated"] >= 3, counts


def test_without_clipping_no_step_is_repeated(ranks: RankPool) -> None:
    """Without clipping, a spike does not invalidate a step."""
    row = Row(Layout(2), 3, "zb-h2", f"--clip-grad 0 {UNTIED}", SOON[:3], steps=14)
    assert counts_of(ranks, row) == {"ahead": 2 * row.steps}


def test_inverse_rollback_is_equal_up_to_rounding(ranks: RankPool) -> None:
    row = ROWS["zb-h2, fp32, spikes"]
    flags = f"{row.layout.flags(3, row.options)} --zero-bubble-schedule zb-h2 --train-iters {FEW}"
    modes = [MODES[1], f"{MODES[1]} --zero-bubble-rollback inverse"]
    for exact, inverse in ranks.run(2, train_with_faults, flags, modes, SOON, True, timeout=120):
        assert inverse.counts["ahead"] >= 10, inverse.counts
        expected, found = ([float.fromhex(norm) for norm in one.grad_norms] for one in (exact, inverse))
        assert found == pytest.approx(expected, rel=1e-3) and found != expected


def train_without_settling_in_steps(_rank: int, flags: str) -> Counter[str]:
    """Train with a step that fails if it waits for the pipeline's pending messages."""
    from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer

    step = PostValidatedOptimizer.step_ahead

    def watched(optimizer: PostValidatedOptimizer) -> None:
        def waits() -> None:
            raise AssertionError("a step must not wait for the last rank to receive the losses")

        on_settle, optimizer.on_settle = optimizer.on_settle, waits
        step(optimizer)
        optimizer.on_settle = on_settle

    PostValidatedOptimizer.step_ahead = watched
    try:
        return train_with_faults(_rank, flags, MODES[1:], [])[0].counts
    finally:
        PostValidatedOptimizer.step_ahead = step


def test_steps_on_a_v_do_not_wait_for_the_losses(ranks: RankPool) -> None:
    flags = f"{Layout(2, num_layers=4).flags(3, LOOSE)} --zero-bubble-schedule zb-v --train-iters 4"
    assert ranks.run(2, train_without_settling_in_steps, flags, timeout=60) == [{"synchronous": 1, "ahead": 3}] * 2


def passes_without_an_optimizer(_rank: int) -> None:
    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse

    args = parse([*BASE_FLAGS.split(), *Layout(2).flags(2).split(), "--zero-bubble-schedule", "zb-h1"])
    check(args, 2)
    rebuild_process_groups(args)
    apply(ZeroBubbleConfig(schedule="zb-h1", post_validation=True))
    try:
        run_once(args)
    finally:
        revert()


def test_post_validation_without_an_optimizer_is_rejected(ranks: RankPool) -> None:
    with pytest.raises(
        RankFailure, match="post-validation needs the optimizer whose steps the passes validate, got none"
    ):
        ranks.run(2, passes_without_an_optimizer, timeout=60)
