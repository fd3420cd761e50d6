"""With other placements than 1F1B's, losses and weights must equal stock megatron-core's bit for bit.

A V is compared with stock 1F1B, which has the same layers on other ranks, and interleaved schedules with Megatron's
own. Dropout draws from a rank's random state in the order of its F passes: with several chunks, only an equal order has
equal masks. A gradient norm sums the ranks' parts in another order, so clipping is compared between schedules with the
same placement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from megatron.zero_bubble import PassMemory, simulate
from megatron.zero_bubble.core.analysis.memory import most_kept
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.schedules import SCHEDULES
from tests.helpers.non_loss_data import collect
from tests.helpers.parity import BASE_FLAGS, Layout, Outcome, assert_same_bits, assert_same_model, run_once, train
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_parity import BUCKETS, DROPOUT, EXPERTS, FP16, LLAMA, ROPE, UNTIED

ON_A_V = [None, "zb-v", "v-half", "v-min", "dualpipe-v"]
FEW = ON_A_V[:3]
INTERLEAVED = [None, "interleaved-1f1b", "breadth-first", "zb-interleaved"]
TWO = "--num-virtual-stages-per-pipeline-rank 2"

ROWS = {
    "m=1, tied": (Layout(2, num_layers=4), 1, ""),
    "m=p+1=3, llama, bf16, untied": (Layout(2, num_layers=4), 3, f"--bf16 {LLAMA} {ROPE} {UNTIED}"),
    "m=7, fp16 with loss scale, selective recompute": (
        Layout(2, num_layers=4),
        7,
        f"{FP16} --recompute-granularity selective",
    ),
    "full recompute, two layers per stage, per-token loss": (
        Layout(2, num_layers=8),
        3,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --calculate-per-token-loss",
    ),
    "experts": (Layout(2, num_layers=4), 3, f"{EXPERTS} {UNTIED}"),
    "p=4, bf16": (Layout(4, num_layers=8), 5, "--bf16"),
    "late receives": (Layout(2, num_layers=4), 3, "--zero-bubble-post-receives late"),
    "tp=2 and sequence parallel": (Layout(2, tensor=2, num_layers=4), 3, "--sequence-parallel"),
    "dp=2, distributed optimizer, both overlaps, bf16": (
        Layout(2, data=2, num_layers=4),
        3,
        f"--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BUCKETS}",
    ),
    "dp=2, tied, overlap_grad_reduce, not aligned, m grows from 1": (
        Layout(2, data=2, num_layers=4),
        3,
        f"--overlap-grad-reduce --no-align-grad-reduce {BUCKETS} --rampup-batch-size 4 4 12",
    ),
}

ALL_SCHEDULES = {"m=p+1=3, llama, bf16, untied", "p=4, bf16"}
"""Rows that run every schedule; the others omit two schedules that use the same runtime code."""
QUICK = {name for name in ROWS if name.startswith(("m=p+1", "experts"))}


@pytest.mark.parametrize("name", some(ROWS, *QUICK))
def test_schedules_on_a_v_equal_stock(ranks: RankPool, name: str) -> None:
    layout, num_microbatches, options = ROWS[name]
    schedules = ON_A_V if name in ALL_SCHEDULES else FEW
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), schedules, timeout=180)
    assert_same_model(results, schedules, layout)


@pytest.mark.parametrize("name", some(ROWS, "dp=2, tied, overlap_grad_reduce, not aligned, m grows from 1"))
def test_a_wave_equals_stock(ranks: RankPool, name: str) -> None:
    """Four stages per rank, under the first schedule of ``zb-auto``: its plan comes after more steps."""
    layout, num_microbatches, options = ROWS[name]
    layout = dataclasses.replace(layout, num_layers=2 * layout.num_layers)
    schedules = [None, "zb-auto --zero-bubble-placement wave"]
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), schedules, timeout=180)
    assert_same_model(results, schedules, layout)


@pytest.mark.parametrize(
    ("layout", "num_microbatches", "options"),
    [
        (Layout(2, num_layers=4), 4, f"{TWO} --clip-grad 0.1"),
        pytest.param(Layout(4, num_layers=8), 8, f"{TWO} --bf16 {LLAMA}", marks=pytest.mark.full),
        pytest.param(
            Layout(2, num_layers=8), 4, f"--num-virtual-stages-per-pipeline-rank 4 {UNTIED}", marks=pytest.mark.full
        ),
        pytest.param(
            Layout(2, data=2, num_layers=4),
            2,
            f"{TWO} --overlap-grad-reduce {BUCKETS} --calculate-per-token-loss",
            marks=pytest.mark.full,
        ),
    ],
)
def test_interleaved_schedules_equal_megatrons(
    ranks: RankPool, layout: Layout, num_microbatches: int, options: str
) -> None:
    results = ranks.run(layout.num_ranks, train, layout.flags(num_microbatches, options), INTERLEAVED, timeout=180)
    assert_same_bits(results, INTERLEAVED)


def train_gathering_in_the_step(rank: int, flags: str, schedules: Sequence[str | None]) -> list[Outcome]:
    """Train with the weights of the first chunk gathered as soon as their part of the optimizer has stepped."""
    from pretrain import model

    build_optimizer = model.build_optimizer

    def build_in_parts(args: Any, chunks: Any) -> Any:
        args.overlap_param_gather_with_optimizer_step = len(chunks) > 1
        optimizer = build_optimizer(args, chunks)
        if len(chunks) > 1:
            assert [chunk.overlap_param_gather_with_optimizer_step for chunk in chunks] == [True, False]
            assert len(optimizer.chained_optimizers) == 2
        return optimizer

    model.build_optimizer = build_in_parts
    try:
        return train(rank, flags, schedules)
    finally:
        model.build_optimizer = build_optimizer


@pytest.mark.parametrize("aligned", some(["", "--no-align-param-gather"], "--no-align-param-gather"))
def test_weights_gathered_in_the_optimizer_step_equal_megatrons(ranks: RankPool, aligned: str) -> None:
    """In the order of Megatron's chunks, and on a V, whose second chunk is the first of the ranks in the next step."""
    layout = Layout(2, data=2, num_layers=4)
    gather = f"--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {aligned}"
    interleaved, on_a_v = layout.flags(2, f"{TWO} {gather}"), layout.flags(2, gather)
    results = ranks.run(4, train_gathering_in_the_step, interleaved, INTERLEAVED, timeout=180)
    assert_same_bits(results, INTERLEAVED)
    results = ranks.run(4, train_gathering_in_the_step, on_a_v, FEW[:2], timeout=180)
    assert_same_model(results, FEW[:2], layout)


def test_interleaved_dropout_equals_megatrons(ranks: RankPool) -> None:
    flags = Layout(2, num_layers=4).flags(4, f"{TWO} {DROPOUT}")
    assert_same_bits(ranks.run(2, train, flags, INTERLEAVED[:2], timeout=180), INTERLEAVED[:2])


@pytest.mark.full
def test_schedules_with_equal_placement_have_the_same_bits_with_clipping(ranks: RankPool) -> None:
    """DualPipeV has fused backwards in its steady state; the others split all backwards."""
    flags, schedules = Layout(2, num_layers=4).flags(5, "--clip-grad 0.1"), ON_A_V[1:]
    assert_same_bits(ranks.run(2, train, flags, schedules, timeout=180), schedules)


def test_evaluation_collects_non_loss_data_with_every_schedule(ranks: RankPool) -> None:
    """As in stock, the data are on the last rank, in the order of the microbatches; those of slices are rounded."""
    schedules = [None, *SCHEDULES]
    first, last = ranks.run(2, collect, Layout(2, num_layers=4).flags(3), schedules, timeout=60)
    assert len(set(last[0])) == 3, "each microbatch must have a different value"
    for schedule, found in zip(schedules, last, strict=True):
        if schedule in SCHEDULES and SCHEDULES[schedule].sliced:
            assert [*map(float.fromhex, found)] == pytest.approx([*map(float.fromhex, last[0])], rel=1e-6), schedule
        else:
            assert found == last[0], schedule
    assert not any(first)


UNEVEN = [(5, "", "Et*3|ttL"), (7, "", "Et*4|t*3L"), (5, "--tokenizer-type NullTokenizer --vocab-size 9000", "Et*5|L")]
"""Layers, options, and the layout."""


@pytest.mark.parametrize(
    ("num_layers", "vocabulary", "linear"),
    some(UNEVEN, *UNEVEN[::2]),
)
def test_uneven_layers_get_the_layout_with_the_least_work(
    ranks: RankPool, num_layers: int, vocabulary: str, linear: str
) -> None:
    """The job without further flags equals stock with this layout, and a V equals both."""
    layout, schedules = Layout(2, num_layers=num_layers), ["zb-h1", "zb-v"]
    flags = layout.flags(3, f"{UNTIED} {vocabulary}")
    own = ranks.run(2, train, flags, schedules, timeout=180)
    stock = ranks.run(2, train, f"{flags} --pipeline-model-parallel-layout {linear}", [None], timeout=180)
    assert_same_model([[*a, *b] for a, b in zip(stock, own, strict=True)], [None, *schedules], layout)
    assert_same_bits([[*a, b[0]] for a, b in zip(stock, own, strict=True)], [None, "zb-h1"])


class Peaks(NamedTuple):
    """The peak memory of a rank, measured and planned, and the measured memory of passes from which it is planned."""

    measured: float
    planned: float
    memory: PassMemory


def peaks(_rank: int, flags: str) -> Peaks:
    """Train on two pipeline ranks, and return the peaks of this rank in bytes."""
    from megatron.core import parallel_state

    from megatron.zero_bubble.integration.patching import apply, revert
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse
    from pretrain.distributed import lay_out

    args = parse([*BASE_FLAGS.split(), *flags.split()])
    check(args, torch.distributed.get_world_size())
    lay_out(args)
    pipeline = apply(dataclasses.replace(args.zero_bubble, measure_memory=True))
    try:
        run_once(args)
        group = parallel_state.get_pipeline_model_parallel_group()
        memory = pipeline.memory.gather(group)
        measured = pipeline.memory.peak
    finally:
        revert()
    placement, rank = args.placement, group.rank()
    schedule = args.zero_bubble.sources()(group.size()).make(6)
    timeline = simulate(schedule, even_costs(placement), memory)
    return Peaks(float(measured), most_kept(timeline, memory)[rank], memory)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_measured_peak_memory_is_near_the_plan(ranks: RankPool, schedule: str) -> None:
    """The peak of saved and deferred tensors is within 5 % of the plan's peak of M_B and M_W."""
    flags = Layout(2, num_layers=4).flags(6, f"--zero-bubble-schedule {schedule} --train-iters 1 --eval-iters 0")
    for measured, planned, _ in ranks.run(2, peaks, flags, timeout=60):
        assert measured == pytest.approx(planned, rel=0.05)


SLICES = {
    "even": "--zero-bubble-num-slices 8",
    "uneven, groups of heads": "--zero-bubble-slice-ends 28,44,56,64 --group-query-attention --num-query-groups 2",
    "full recompute": "--zero-bubble-num-slices 4 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}


@pytest.mark.parametrize("name", SLICES)
def test_measured_peak_memory_of_slices_is_near_the_plan(ranks: RankPool, name: str) -> None:
    """Keys and values have buffers for whole sequences, and their gradients as well."""
    length = "--seq-length 64 --max-position-embeddings 64 --hidden-size 32"
    flags = f"--zero-bubble-schedule seq-zb-h1 --train-iters 1 --eval-iters 0 {length} {SLICES[name]}"
    for measured, planned, _ in ranks.run(2, peaks, Layout(2, num_layers=4).flags(6, flags), timeout=60):
        assert 0.85 * planned <= measured <= 1.05 * planned
