"""Vocabulary parallelism against stock megatron-core: equal up to rounding, in float32.

A row combines options that do not mask each other's errors. ``test_vocabulary_full.py`` has the cross products.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from megatron.zero_bubble.__main__ import main
from tests.helpers.faults import Fault, train_with_faults
from tests.helpers.hybrid_models import differences_of_hybrid
from tests.helpers.parity import Layout, Outcome, _under_each, assert_same_bits, run_once, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.helpers.slices import Difference
from tests.helpers.vocabulary import (
    differences,
    differences_on_context_ranks,
    distances_in_bf16,
    largest_differences,
)
from tests.integration.adapter.test_parity import BUCKETS, DROPOUT, EXPERTS, FP16, LLAMA, ROPE, UNTIED
from tests.integration.adapter.test_slices_training import times_ready


def divided(*schedules: str, more: str = "") -> list[str]:
    """The schedules with both algorithms."""
    return [f"{name} --zero-bubble-vocabulary-parallel {number} {more}" for name in schedules for number in (1, 2)]


FEW = [*divided("1f1b")[:1], *divided("zb-h1")[1:]]
"""Each algorithm once, and backwards that are whole and split."""
PADDING = "--make-vocab-size-divisible-by 1 --vocab-size 36"
"""37 tokens, and 38 with two tensor-parallel ranks: no multiple of any number of ranks in the rows."""
AGAIN = "--zero-bubble-recompute logits"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DISTRIBUTED = f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BUCKETS}"

ROWS = {
    "untied, llama": (Layout(2), 3, f"{UNTIED} {ROPE} {LLAMA}", [*FEW, *divided("zb-h2")[1:]]),
    "tied, p=3, padding, per-token loss": (Layout(3), 4, "--calculate-per-token-loss", FEW),
    "m=1, experts, full recompute": (Layout(2), 1, f"{EXPERTS} {UNTIED} {FULL_RECOMPUTE}", FEW),
    "two stages per rank, tied": (Layout(2, num_layers=4), 3, "", divided("zb-v", "interleaved-1f1b")[1:3]),
    "tp=2 and sequence parallel, padding": (
        Layout(2, tensor=2),
        3,
        f"--sequence-parallel {UNTIED} {ROPE} {PADDING}",
        [*FEW, *divided("zb-h1", more=AGAIN)[:1]],
    ),
    "recomputed logits, tied, per-token loss": (
        Layout(2),
        3,
        "--calculate-per-token-loss",
        divided("zb-h1", more=AGAIN),
    ),
    "two stages per rank, uneven layout": (
        Layout(2, num_layers=6),
        4,
        f"{UNTIED} --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Ett|t|tt|tL",
        divided("zb-v", "interleaved-1f1b")[1:3],
    ),
}
"""Layout, number of microbatches, options, schedules."""

HYBRIDS = [
    ("M*ME", 2, f"{EXPERTS} {UNTIED}"),
    ("M*M-", 2, ""),
    ("M*M-M*M-", 4, UNTIED),
    ("M*M-M*ME", 4, f"{EXPERTS} --calculate-per-token-loss"),
]
"""Layers, number of ranks, options."""

STEPS = {
    "tied, dropout, clipped": (Layout(2), 3, f"{DROPOUT} --clip-grad 0.5", FEW),
    "dp=2, distributed optimizer, both overlaps, fused": (
        Layout(2, data=2),
        3,
        f"{UNTIED} {DISTRIBUTED} --zero-bubble-fuse-wgrad",
        [*FEW, *divided("zb-h1", more=AGAIN)[1:]],
    ),
    "dp=2, reduction without alignment, tied": (
        Layout(2, data=2),
        3,
        f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS}",
        FEW,
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


@pytest.mark.parametrize("name", some(ROWS, *list(ROWS)[1::2]))
def test_gradients_equal_those_of_whole_layers(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options, schedules = ROWS[name]
    check(ranks.run(layout.num_ranks, differences, layout.flags(num_microbatches, options), schedules, timeout=120))


@pytest.mark.parametrize(
    ("pattern", "num_ranks", "options"),
    some(HYBRIDS, HYBRIDS[0]),
)
def test_gradients_of_hybrids_equal_those_of_whole_layers(
    ranks: RankPool, pattern: str, num_ranks: int, options: str
) -> None:
    flags = Layout(num_ranks, num_layers=len(pattern)).flags(3, options)
    check(ranks.run(num_ranks, differences_of_hybrid, pattern, flags, FEW, timeout=120))


@pytest.mark.parametrize(
    ("layout", "options"),
    some(
        [(Layout(2, data=2), UNTIED), (Layout(2, tensor=2, data=2), f"{UNTIED} --sequence-parallel")],
        (Layout(2, data=2), UNTIED),
    ),
)
def test_pipelines_of_context_ranks_divide_their_own_tokens(ranks: RankPool, layout: Layout, options: str) -> None:
    found = ranks.run(layout.num_ranks, differences_on_context_ranks, layout.flags(3, options), FEW, timeout=120)
    check(found)


def check_steps(found: list[list[Outcome]]) -> None:
    """Check losses, of evaluations too, and gradient norms of five steps."""
    for stock, *others in found:
        for outcome in others:
            losses, norms = largest_differences(outcome, stock)
            assert losses <= 5e-7 and norms <= 1e-6, (losses, norms)


@pytest.mark.parametrize("name", some(STEPS, *list(STEPS)[1::2]))
def test_five_steps_equal_those_of_whole_layers(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options, schedules = STEPS[name]
    flags = layout.flags(num_microbatches, options)
    found = ranks.run(layout.num_ranks, train, flags, [None, *schedules], timeout=120)
    check_steps(found)


@pytest.mark.parametrize("schedule", [pytest.param(divided("zb-h1")[0], marks=pytest.mark.full), divided("zb-h1")[1]])
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
    for stock, *others in ranks.run(2, train, layout.flags(3, f"{FP16} {UNTIED}"), [None, *FEW], timeout=120):
        for outcome in others:
            assert outcome.loss_scales == stock.loss_scales
            skipped = [norm == "skipped" for norm in outcome.grad_norms]
            assert any(skipped) and skipped == [norm == "skipped" for norm in stock.grad_norms]


@pytest.mark.parametrize("more", ["", pytest.param("--zero-bubble-fuse-wgrad", marks=pytest.mark.full)])
def test_bf16_is_no_farther_from_float32_than_stock(ranks: RankPool, more: str) -> None:
    flags = Layout(2).flags(3, f"{LLAMA} {ROPE} {UNTIED} {more}")
    for stock, *others in ranks.run(2, distances_in_bf16, flags, FEW, timeout=120):
        assert all(difference.whole <= 1.1 * stock.whole for difference in others), (stock, others)


@pytest.mark.parametrize("options", some(["", UNTIED], ""))
def test_every_weight_is_ready_for_its_reduction_once(ranks: RankPool, options: str) -> None:
    """T and J both add to a tied weight, and the last of them makes it ready."""
    flags = Layout(2).flags(3, f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS} {options}")
    for schedule in (*FEW, *divided("zb-h1", more=AGAIN)[1:]):
        for counts in ranks.run(2, times_ready, flags, schedule, timeout=60):
            assert set(counts) == {1}


def test_plan_of_a_file_equals_whole_layers(ranks: RankPool, tmp_path: Path) -> None:
    """``zero-bubble plan --vocabulary`` writes what a run takes, with and without the flag."""
    sizes = "--num-ranks 2 --num-microbatches 3 --forward-ms 1 --backward-ms 1 --wgrad-ms 1 --format json"
    schedules = []
    for algorithm, flags in (("1", ""), ("2", "--zero-bubble-vocabulary-parallel 2")):
        file = tmp_path / f"{algorithm}.json"
        shards = f"--output-ms 0.5 --output-wgrad-ms 0.3 --vocabulary {algorithm} --memory-limit 2p"
        with redirect_stdout(StringIO()) as text:
            assert main(f"plan --schedule zb-auto --placement linear {sizes} {shards}".split()) == 0
        file.write_text(text.getvalue())
        schedules.append(f"--zero-bubble-schedule-file {file} {flags}")
    flags = Layout(2).flags(3, f"{UNTIED} --eval-iters 0")
    check(ranks.run(2, differences, flags, schedules, timeout=120))


def bytes_from_s_to_t(_rank: int, flags: str, schedules: list[str]) -> list[tuple[float, ...]]:
    """Return what S keeps for T on all ranks, per schedule, as the planner gets it."""
    from megatron.core import parallel_state

    found = []
    for args, pipeline in _under_each(flags, schedules):
        run_once(args)
        found.append(pipeline.memory.gather(parallel_state.get_pipeline_model_parallel_group()).logits)
    return found


@pytest.mark.parametrize("algorithm", [1, 2])
def test_recomputed_logits_keep_only_hidden_states_and_labels(ranks: RankPool, tmp_path: Path, algorithm: int) -> None:
    tokens, hidden, rows = 8 * 2, 16, 16  # of a microbatch, and of the shard
    schedules = divided("zb-h1")[algorithm - 1 : algorithm] + divided("zb-h1", more=AGAIN)[algorithm - 1 : algorithm]
    flags = Layout(2).flags(3, f"{UNTIED} --train-iters 1 --zero-bubble-record-costs {tmp_path}/costs.json")
    for kept, again in ranks.run(2, bytes_from_s_to_t, flags, schedules, timeout=120):
        least = tokens * (4 * hidden + 8)  # hidden states in float32, and labels
        assert set(again) == {least, least + tokens * 8}, "receivers also keep the labels of the message"
        assert min(kept) >= min(again) + tokens * 4 * rows, "also the softmax in float32"


ZEROS = {
    "p=3, untied": (Layout(3), UNTIED, divided("zb-h1")[1:]),
    "dp=2, distributed optimizer, tied, bf16, and post-validated": (
        Layout(2, data=2),
        "--bf16 --use-distributed-optimizer",
        [*FEW[:1], f"{FEW[1]} --zero-bubble-post-validation"],
    ),
    "tp=2, experts, fp32": (Layout(2, tensor=2), f"{EXPERTS} {UNTIED} --sequence-parallel", FEW[:1]),
    "dp=2, ep=2, distributed optimizer, and post-validated": (
        Layout(2, data=2),
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer",
        divided("zb-h1", more="--zero-bubble-post-validation"),
    ),
}


@pytest.mark.parametrize("row", some(ZEROS, *list(ZEROS)[:2]))
def test_zeros_of_padding_are_not_counted(ranks: RankPool, row: str) -> None:
    """The padding of a shard has a gradient of zero, and stock has no shards."""
    layout, options, schedules = ZEROS[row]
    flags = layout.flags(2, f"{PADDING} --log-num-zeros-in-grad --clip-grad 100 --train-iters 1 {options}")
    for stock, *others in ranks.run(layout.num_ranks, train, flags, [None, *schedules], timeout=120):
        for outcome in others:  # a row of padding has 16 zeros; rounding makes or removes few
            assert outcome.num_zeros == pytest.approx(stock.num_zeros, abs=4)
