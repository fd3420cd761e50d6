"""Sharded units: the bits of plain data parallelism with one unit, counted collectives, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from megatron.zero_bubble import PassMemory, Schedule, build
from megatron.zero_bubble.core.ir import Op
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan import shard as plan_shard
from megatron.zero_bubble.core.plan.shard import Sharding
from tests.helpers import parity
from tests.helpers.parity import Layout, Outcome, assert_same_bits
from tests.helpers.ranks import RankFailure, RankPool
from tests.integration.adapter.test_offload import measuring_pipelines

BASE = "--use-distributed-optimizer --clip-grad 1.0"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FP16 = "--fp16 --initial-loss-scale 1048576 --hysteresis 1"  # the first steps overflow, and are skipped
WHOLE = "--zero-bubble-whole-stages"
SHARDED = "--zero-bubble-shard-weights --zero-bubble-unit-microbatches"


class TrainingResult(NamedTuple):
    """One training of one rank.

    Attributes:
        outcome: its results.
        gathers, reductions: collectives of weights and gradients per iteration; None without shards.
        gathered, reduced: their bytes per iteration.
        whole: the most bytes of whole weights and gradients at a time, optimizer steps and evaluations included.
        kept: bytes of whole weights and gradients after the last step, of what has several replicas.
        sizes: bytes of the weights and the gradients of every chunk, without experts that have no other replica.
        weights: all parameters after the last step.
    """

    outcome: Outcome
    gathers: float
    reductions: float
    gathered: float
    reduced: float
    whole: int
    kept: int
    sizes: list[tuple[int, int]]
    weights: torch.Tensor


def train(rank: int, flags: str, schedules: Sequence[str | None]) -> list[TrainingResult]:
    """Train with each schedule, from the same initial weights."""
    start, done = None, []
    for args, pipeline in parity._under_each(flags, schedules):
        chunks: list[Any] = []
        splits = parity._splits(args)
        outcome, start = parity._train_once(args, splits, start, pipeline, lambda own, _, to=chunks: to.extend(own))
        sharder = None if pipeline is None or pipeline.units is None else pipeline.units.sharder
        whole = 0 if sharder is None else sharder.most_whole
        of_chunks = [sharded_buffers(chunk) for chunk in chunks]
        kept = sum(t.untyped_storage().nbytes() for own in of_chunks for b in own for t in (b.param_data, b.grad_data))
        sizes = [(sum(b.param_data.nbytes for b in own), sum(b.grad_data.nbytes for b in own)) for own in of_chunks]
        with nullcontext() if sharder is None else pipeline.units.whole_weights():
            weights = torch.cat([p.detach().float().reshape(-1) for chunk in chunks for p in chunk.parameters()])
        counts = (0, 0, 0, 0) if sharder is None else (sharder.num_gathers, sharder.num_reductions, *moved(sharder))
        done.append(
            TrainingResult(outcome, *(count / args.train_iters for count in counts), whole, kept, sizes, weights)
        )
    return done


def sharded_buffers(chunk: Any) -> list[Any]:
    """The buffers of a chunk, without experts that have no other replica."""
    experts = [buffer for buffer in chunk.expert_parallel_buffers if buffer.data_parallel_world_size > 1]
    return [*chunk.buffers, *experts]


def moved(sharder: Any) -> tuple[int, int]:
    return sharder.gathered_bytes, sharder.reduced_bytes


def planned(schedule: Schedule, sharding: Sharding, rank: int) -> Sequence[Op]:
    """The ops of a rank."""
    return plan_of(schedule, Additions(sharding=sharding)).ops[rank]


full = pytest.mark.full
TWO, FOUR = Layout(2, data=2, num_layers=4), Layout(4, data=2, num_layers=8)
ROWS = {
    "fp32": ("zero-pp", TWO, 4, f"{CHUNKS} 2"),
    "bf16, untied": ("zero-pp", TWO, 4, f"{CHUNKS} 2 --bf16 --untie-embeddings-and-output-weights"),
    "fp16, overflows": ("zero-pp", TWO, 4, f"{CHUNKS} 2 {FP16}"),
    "four chunks": ("zero-pp", Layout(2, data=2, num_layers=8), 4, f"{CHUNKS} 4"),
    "per-token loss": ("zero-pp", TWO, 4, f"{CHUNKS} 2 --calculate-per-token-loss"),
    "recompute": ("zero-pp", TWO, 4, f"{CHUNKS} 2 --recompute-granularity selective"),
    "full recompute": (
        "zero-pp",
        Layout(2, data=2, num_layers=4),
        4,
        f"{CHUNKS} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "dropout": ("zero-pp", TWO, 4, f"{CHUNKS} 2 --attention-dropout 0.1 --hidden-dropout 0.1"),
    "fused backwards": ("breadth-first", TWO, 4, f"{CHUNKS} 2"),
    "interleaved": ("interleaved-1f1b", TWO, 4, f"{CHUNKS} 2"),
    "V": ("zb-v", TWO, 4, "--untie-embeddings-and-output-weights"),
    "tied V": ("zb-v", TWO, 4, "--calculate-per-token-loss"),
    "slices": ("seq-interleaved-1f1b --zero-bubble-num-slices 2", TWO, 4, f"{CHUNKS} 2"),
    "tensor parallelism": ("zero-pp", Layout(2, tensor=2, data=2, num_layers=4), 4, f"{CHUNKS} 2"),
    "four ranks": ("zero-pp", FOUR, 8, f"{CHUNKS} 2"),
    "uneven layout": (
        "zero-pp",
        Layout(2, data=2, num_layers=6),
        4,
        f"{CHUNKS} 2 --pipeline-model-parallel-layout Ett|t|tt|tL --untie-embeddings-and-output-weights",
    ),
    "uneven layout, four ranks": (
        "zero-pp",
        Layout(4, data=2, num_layers=12),
        8,
        f"{CHUNKS} 2 --pipeline-model-parallel-layout Ett|t|t|tt|tt|t|tt|tL",
    ),
    "four ranks, bf16, untied": ("zero-pp", FOUR, 8, f"{CHUNKS} 2 --bf16 --untie-embeddings-and-output-weights"),
}

UNSHARDED = {
    "dropout": "zero-pp --zero-bubble-unit-microbatches 4",
    "V": "zb-v",
    "tied V": "zb-v",
    "slices": "seq-interleaved-1f1b --zero-bubble-num-slices 2",
}
"""What to compare a row with with other random numbers than stock, other slices, or another order of sums."""


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in ("bf16, untied", "uneven layout") else full) for row in ROWS]
)
def test_one_unit_has_the_bits_of_plain_data_parallelism(ranks: RankPool, row: str) -> None:
    """Losses, gradient norms, weights and states of five clipped steps; evaluations between them see whole weights."""
    name, layout, count, options = ROWS[row]
    runs = [UNSHARDED.get(row), f"{name} {SHARDED} {count}"]
    results = ranks.run(layout.num_ranks, train, layout.flags(count, f"{BASE} {options}"), runs, timeout=200)
    assert_same_bits([[trained.outcome for trained in of_rank] for of_rank in results], runs)
    for of_rank in results:
        assert of_rank[1].reductions == (4 if row == "four chunks" else 2)
        assert ("skipped" in of_rank[1].outcome.grad_norms) == row.startswith("fp16")


NO_EVALUATION = "--eval-iters 0 --train-iters 3"


def measured_memory(_rank: int, flags: str, schedules: Sequence[str]) -> list[PassMemory]:
    """Train with each schedule; return the measured memory of a microbatch, by stage."""
    from megatron.core import parallel_state

    found = []
    for args, pipeline in measuring_pipelines(flags, schedules):
        parity.run_once(args)
        found.append(pipeline.memory.gather(parallel_state.get_pipeline_model_parallel_group()))
    return found


def test_measured_memory_of_a_microbatch_is_that_without_shards(ranks: RankPool) -> None:
    """Gathered weights have other addresses in every unit, and are no activations."""
    flags = Layout(2, data=2, num_layers=8).flags(4, f"{BASE} {CHUNKS} 4 --eval-iters 0 --train-iters 1")
    runs = ["zero-pp", f"zero-pp {SHARDED} 2 {WHOLE} 2"]
    for plain, sharded in ranks.run(4, measured_memory, flags, runs, timeout=120):
        assert len(plain.activation) == 8
        assert sharded == plain


@pytest.mark.full
def test_smaller_units(ranks: RankPool) -> None:
    """Units of one and two of four microbatches differ by the order of additions only.

    Collectives, their bytes and the bytes of whole weights and gradients are those of the plan, also in the step.
    """
    layout, v = Layout(2, data=2, num_layers=8), 4
    kinds = [Sharding(4), Sharding(2), Sharding(1), Sharding(4, 1), Sharding(2, 1)]
    runs = [f"zero-pp {SHARDED} {of.unit_microbatches} {WHOLE} {of.open_chunks}" for of in kinds]
    flags = layout.flags(4, f"{BASE} {CHUNKS} {v} {NO_EVALUATION}")
    results = ranks.run(4, train, flags, [None, *runs], timeout=200)
    for rank, (plain, *sharded) in enumerate(results):
        assert plain.kept == sum(map(sum, plain.sizes))
        for of, trained in zip(kinds, sharded, strict=True):
            unit, k = of.unit_microbatches, of.open_chunks
            assert torch.allclose(trained.weights, plain.weights, rtol=0, atol=1e-5), unit
            schedule = build("zero-pp", num_ranks=2, num_microbatches=4, num_chunks=v, unit_microbatches=unit)
            row = planned(schedule, of, rank // 2)
            weights, gradients = by_stage(trained.sizes, rank // 2)
            assert (trained.gathered, trained.reduced) == plan_shard.traffic_bytes(row, weights, gradients)
            assert trained.kept == 0
            assert trained.whole == plan_shard.most_whole(row, weights, gradients)
            units = 4 // unit
            assert trained.reductions == v * units
            if (unit, k) != (1, 2):  # one microbatch does not fill the pipeline of two ranks: other runs
                assert trained.gathers == 2 * (v - k) * units + k
        largest = sum(sorted(w for w, _ in plain.sizes)[-2:]) + sum(sorted(g for _, g in plain.sizes)[-2:])
        assert sharded[0].whole <= largest, "(k_w + k_g) / v of all, with two of each"


def by_stage(sizes: Sequence[tuple[int, int]], rank: int) -> tuple[list[float], list[float]]:
    """Sizes of weights and of gradients by stage, for a rank of two, whose stages are every second one."""
    weights, gradients = [0.0] * 2 * len(sizes), [0.0] * 2 * len(sizes)
    weights[rank::2], gradients[rank::2] = zip(*sizes, strict=True)
    return weights, gradients


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("", "sharded units need use_distributed_optimizer=True"),
        (f"{BASE} --overlap-grad-reduce", "sharded units need overlap_grad_reduce=False"),
        (f"{BASE} --zero-bubble-schedule zb-h1", "sharded units need 2 or more stages per rank"),
    ],
)
def test_unsupported_jobs_are_refused(options: str, what: str) -> None:
    from megatron.zero_bubble.core.errors import UserError
    from megatron.zero_bubble.planning.job.arguments.checks import check
    from megatron.zero_bubble.planning.job.arguments.parser import parse

    schedule = "" if "--zero-bubble-schedule" in options else "--zero-bubble-schedule zero-pp"
    words = f"{parity.BASE_FLAGS} {TWO.flags(4)} {schedule} --zero-bubble-shard-weights {options}".split()
    with pytest.raises(UserError, match=what):
        check(parse(words), 4)


def train_differently(rank: int, flags: Sequence[str], schedule: str) -> None:
    """Train with flags that depend on the replica."""
    parity.train(rank, flags[rank % 2], [schedule])


def test_replicas_with_different_plans_are_refused(ranks: RankPool) -> None:
    flags = TWO.flags(4, f"{BASE} {CHUNKS} 2")
    schedules = [f"{flags} --zero-bubble-unit-microbatches {size}" for size in (2, 4)]
    with pytest.raises(RankFailure, match="all data-parallel replicas of sharded units must run the same plan"):
        ranks.run(4, train_differently, schedules, "zero-pp --zero-bubble-shard-weights", timeout=60)


def test_replica_that_changes_its_microbatches_alone_is_refused(ranks: RankPool) -> None:
    """Two iterations of two microbatches, then one replica runs four: every rank ends with the same sentence."""
    alone = TWO.flags(4, f"{BASE} {CHUNKS} 2 --rampup-batch-size 8 8 16 --eval-iters 0")
    flags = [TWO.flags(2, f"{BASE} {CHUNKS} 2 --eval-iters 0"), alone]
    with pytest.raises(RankFailure) as caught:
        ranks.run(4, train_differently, flags, "zero-pp --zero-bubble-shard-weights", timeout=60)
    assert len(caught.value.reports) == 4
    for report in caught.value.reports.values():
        assert "must run the same number of microbatches per iteration, because they gather" in report
        assert "got 2, 4; give all of them the same, or train without shard_weights" in report


def train_with_late_answers(rank: int, flags: Sequence[str], schedule: str) -> None:
    """As ``train_differently``, but as over NCCL: replicas learn with their first passes what the others begin."""
    from megatron.zero_bubble.integration.adapter import shards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "backend_of", lambda _group: "nccl")
        train_differently(rank, flags, schedule)


def test_new_plan_is_made_only_after_the_other_replicas_have_answered(ranks: RankPool) -> None:
    """Else its collectives would meet the gathers of replicas that have a plan already."""
    alone = TWO.flags(4, f"{BASE} {CHUNKS} 2 --rampup-batch-size 8 8 16 --eval-iters 0")
    flags = [TWO.flags(2, f"{BASE} {CHUNKS} 2 --eval-iters 0"), alone]
    with pytest.raises(RankFailure) as caught:
        ranks.run(4, train_with_late_answers, flags, "zero-pp --zero-bubble-shard-weights", timeout=60)
    changed = [caught.value.reports.get(rank, "") for rank in (1, 3)]
    assert any("got 2, 4; give all of them the same" in report for report in changed)
    assert not any("same plan" in report for report in caught.value.reports.values())
