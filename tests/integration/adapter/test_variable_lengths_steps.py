"""Microbatches of different lengths with steps that are validated later: a rejected step leaves equal bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from megatron.zero_bubble.engine.runtime.observer import IterationObserver
from tests.helpers.ranks import RankPool
from tests.loops.models import destroy_groups, digests
from tests.loops.varied import STAGES, batches, build, passes, shapes_of

ITERATIONS, FAULTS = 9, (3, 4, 7)
COUNTS = (4, 5, 3)
SPIKE, NAN = 1e9, math.nan
WAYS = ("stock", "synchronous", "ahead")


class Case(NamedTuple):
    """A run in which some gradients of one rank are wrong, in single iterations and in a row.

    Attributes:
        fault: what a gradient is multiplied by. A large one is clipped; with NaN, a job with a loss scale skips steps.
    """

    schedule: str
    bad_rank: int
    kind: str
    tells: bool
    fault: float = SPIKE

    @property
    def skips(self) -> bool:
        return math.isnan(self.fault)


class Restarts(IterationObserver):
    """Counts iterations whose passes ran again, because the step before them was rejected."""

    count = 0

    def restarted(self) -> None:
        self.count += 1


class Outcome(NamedTuple):
    """What one rank has after a run.

    Attributes:
        log: of every step, its iteration, losses, and norm (None if it was skipped).
        weights: digests, by the names in the whole model.
        counts: how often steps were repeated, and passes.
    """

    log: list[Any]
    weights: dict[str, str]
    counts: dict[str, int]


def _optimizer(chunks: Sequence[Any], skips: bool) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    scaled = {"use_distributed_optimizer": True, "loss_scale": 256.0} if skips else {}
    config = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, clip_grad=1e4, **scaled)
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for chunk in chunks:
        chunk.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def steps(rank: int, case: Case, way: str) -> Outcome:
    """Train under stock Megatron, or under the schedule without and with post-validation."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    destroy_groups()
    restarts, pipeline = Restarts(), None
    if way != "stock":
        config = ZeroBubbleConfig(schedule=case.schedule, fuse_wgrad=False, post_validation=way == "ahead")
        pipeline = megatron.zero_bubble.apply(config, [restarts])
    virtual_size = None if pipeline is None else STAGES.get(case.schedule)
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=dist.get_world_size(),
            virtual_pipeline_model_parallel_size=virtual_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        chunks = build(dist.get_world_size(), virtual_size, case.kind, use_distributed_optimizer=case.skips)
        optimizer = _optimizer(chunks, case.skips)
        if pipeline is not None and way == "ahead":
            optimizer = pipeline.post_validated(optimizer, chunks)
        log = list(_iterations(rank, case, chunks, optimizer, way == "ahead"))
        assert pipeline is None or pipeline.num_pending == 0
        counts = {**optimizer.counts, "restarted": restarts.count} if way == "ahead" else {}
        return Outcome(log, digests(chunks), counts)
    finally:
        megatron.zero_bubble.revert()
        destroy_groups()


def _iterations(rank: int, case: Case, chunks: Sequence[Any], optimizer: Any, ahead: bool) -> Any:
    """Yield the log of every step."""
    import megatron.zero_bubble

    for iteration in range(ITERATIONS):
        data = batches(COUNTS[iteration % len(COUNTS)], iteration, case.kind)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with megatron.zero_bubble.shapes(shapes_of(data)) if case.tells else nullcontext():
            losses = passes(chunks, data)
        if iteration in FAULTS and rank == case.bad_rank:
            chunks[0].buffers[0].grad_data[: 1 if case.skips else None].mul_(case.fault)
        if ahead:
            yield from ((*done.of, done.grad_norm) for done in optimizer.take_outcomes())
            optimizer.step_ahead((iteration, losses))
        else:
            updated, norm, _ = optimizer.step()
            yield iteration, losses, norm if updated else None
    if ahead:
        optimizer.settle()
        yield from ((*done.of, done.grad_norm) for done in optimizer.take_outcomes())


def all_ways(rank: int, case: Case) -> list[Outcome]:
    """Under stock, without and with post-validation."""
    return [steps(rank, case, way) for way in WAYS]


full = pytest.mark.full


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        (2, Case("zb-v", 1, "packed", tells=False)),
        (2, Case("zb-h1", 1, "dense", tells=False, fault=NAN)),
        *(
            pytest.param(num_ranks, Case(schedule, bad_rank, kind, tells, fault), marks=full)
            for num_ranks in (2, 4)
            for schedule, kind in (("zb-h1", "packed"), ("zb-h2", "dense"), ("zb-v", "dense"))
            for tells in (False, True)
            for fault in (SPIKE, NAN)
            for bad_rank in range(num_ranks)
        ),
    ],
    ids=str,
)
def test_rejected_steps_end_with_equal_bits(ranks: RankPool, num_ranks: int, case: Case) -> None:
    stock, synchronous, ahead = zip(*ranks.run(num_ranks, all_ways, case, timeout=120), strict=True)
    for own, expected in zip(ahead, synchronous, strict=True):
        assert own[:2] == expected[:2]
    if case.skips:
        assert [iteration for iteration, _, norm in ahead[0].log if norm is None] == list(FAULTS)
    if case.skips or case.schedule != "zb-v":  # a V sums the norm, by which stock clips, in another order
        assert _losses(ahead) == _losses(stock)
        assert _weights(ahead) == _weights(stock)
    counts = ahead[0].counts
    if case.bad_rank:
        assert (counts["repeated"], counts["restarted"]) >= (1, 1), counts
    else:  # the others learn of it before they step
        assert counts["skipped" if case.skips else "waited"] >= 1, counts


def _losses(of_ranks: Sequence[Outcome]) -> list[Any]:
    (losses,) = {str([losses for _, losses, _ in each.log]) for each in of_ranks if each.log[0][1]}
    return [losses]


def _weights(of_ranks: Sequence[Outcome]) -> dict[str, str]:
    return {name: digest for each in of_ranks for name, digest in each.weights.items()}
