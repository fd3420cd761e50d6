"""Microbatches of different lengths with steps that are validated later: a rejected step leaves equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.helpers.ranks import RankPool
from tests.loops.varied import STAGES, batches, build, passes, shapes_of

ITERATIONS, SPIKES = 14, (5, 6, 11)
COUNTS = (4, 5, 3)


class Case(NamedTuple):
    """A run in which some gradients of one rank are not finite, in single iterations and in a row."""

    schedule: str
    bad_rank: int
    kind: str
    tells: bool


def _optimizer(chunks: Sequence[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=0.0, clip_grad=1e4)
    return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)


def steps(rank: int, case: Case, ahead: bool) -> tuple[list[Any], list[str], dict[str, int]]:
    """Train; return the logged steps, the digests of the weights, and how often steps were repeated."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    import megatron.zero_bubble
    from megatron.zero_bubble.job.config import ZeroBubbleConfig

    parallel_state.destroy_model_parallel()
    config = ZeroBubbleConfig(schedule=case.schedule, fuse_wgrad=False, post_validation=ahead)
    pipeline = megatron.zero_bubble.apply(config)
    virtual_size = STAGES.get(case.schedule)
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=dist.get_world_size(),
            virtual_pipeline_model_parallel_size=virtual_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        chunks = build(dist.get_world_size(), virtual_size, case.kind)
        optimizer = _optimizer(chunks)
        if ahead:
            optimizer = pipeline.post_validated(optimizer, chunks)
        log: list[Any] = []
        for iteration in range(ITERATIONS):
            data = batches(COUNTS[iteration % len(COUNTS)], iteration, case.kind)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            if case.tells:
                with megatron.zero_bubble.shapes(shapes_of(data)):
                    losses = passes(chunks, data)
            else:
                losses = passes(chunks, data)
            if iteration in SPIKES and rank == case.bad_rank:
                chunks[0].buffers[0].grad_data.mul_(1e9)
            if ahead:
                log += [(*done.of, done.grad_norm) for done in optimizer.take_outcomes()]
                optimizer.step_ahead((iteration, losses))
            else:
                _, norm, _ = optimizer.step()
                log.append((iteration, losses, norm))
        if ahead:
            optimizer.settle()
            log += [(*done.of, done.grad_norm) for done in optimizer.take_outcomes()]
        assert pipeline.num_pending == 0
        weights = [each for chunk in chunks for each in chunk.parameters()]
        digests = [hashlib.sha256(each.detach().numpy().tobytes()).hexdigest()[:16] for each in weights]
        return log, digests, dict(optimizer.counts) if ahead else {}
    finally:
        megatron.zero_bubble.revert()
        parallel_state.destroy_model_parallel()


def both(rank: int, case: Case) -> list[Any]:
    """Without and with post-validation."""
    return [steps(rank, case, ahead) for ahead in (False, True)]


full = pytest.mark.full


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        (2, Case("zb-v", 1, "packed", tells=False)),
        *(
            pytest.param(num_ranks, Case(schedule, bad_rank, "dense", tells), marks=full)
            for num_ranks in (2, 4)
            for schedule in ("zb-h1", "zb-h2", "zb-v")
            for tells in (False, True)
            for bad_rank in range(num_ranks)
        ),
    ],
    ids=str,
)
def test_rejected_steps_end_with_equal_bits(ranks: RankPool, num_ranks: int, case: Case) -> None:
    results = ranks.run(num_ranks, both, case, timeout=120)
    for expected, ahead in results:
        assert ahead[:2] == expected[:2]
    counts = results[0][1][2]
    # Of a bad gradient on the first rank, the others learn before they step.
    assert counts.get("repeated" if case.bad_rank else "waited", 0) >= 1, counts
