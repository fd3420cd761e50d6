"""Five lines add post-validation to a loop of one's own on megatron-core; the results stay equal bit for bit.

``train`` is the loop before the change, ``train_ahead`` the loop after it; docs/post-validation.md shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.zero_bubble.core.errors import UserError
from tests.helpers.ranks import RankPool
from tests.helpers.steps import scheduler_of
from tests.integration.adapter.test_foreign_loop import MICROBATCHES, SEQUENCE, build_model, forward_step, samples

ITERATIONS, SPIKES = 14, (5, 6, 11)
Log = list[tuple[Any, ...]]


def setup() -> tuple[list[Any], Any, Any, Iterator[torch.Tensor]]:
    from megatron.core import tensor_parallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model = [build_model()]
    config = OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.0, clip_grad=100.0)
    optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    return model, optimizer, scheduler_of(optimizer), samples()


def passes(model: list[Any], data: Iterator[torch.Tensor], iteration: int) -> list[Any]:
    """Run forwards and backwards; on the last rank, gradients of some iterations are much too large."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=2,
    )
    if iteration in SPIKES and parallel_state.is_pipeline_last_stage():
        for buffer in model[0].buffers:
            buffer.grad_data.mul_(1e6)
    return losses


def train(log: Log, save: Callable[[Any], None]) -> Any:
    model, optimizer, scheduler, data = setup()
    for iteration in range(ITERATIONS):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = passes(model, data, iteration)
        updated, grad_norm, _ = optimizer.step()
        if updated:
            scheduler.step(increment=1)
        log.append((iteration, losses, updated, grad_norm))
    save(model[0].state_dict())
    return optimizer


def train_ahead(log: Log, save: Callable[[Any], None], pipeline: Any, iterations: int = ITERATIONS) -> Any:
    model, optimizer, scheduler, data = setup()
    optimizer = pipeline.post_validated(optimizer, model)
    for iteration in range(iterations):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = passes(model, data, iteration)
        report(optimizer.take_outcomes(), scheduler, log)
        optimizer.step_ahead((iteration, losses))
    optimizer.settle()
    report(optimizer.take_outcomes(), scheduler, log)
    save(model[0].state_dict())
    return optimizer


def report(outcomes: list[Any], scheduler: Any, log: Log) -> None:
    """The end of ``train``'s loop, for iterations whose steps are final."""
    for done in outcomes:
        if done.updated:
            scheduler.step(increment=1)
        log.append((*done.of, done.updated, done.grad_norm))


def weights_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]


def both(rank: int) -> tuple[Log, Log, dict[str, int]]:
    from megatron.core import parallel_state

    import megatron.zero_bubble
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    logs: list[Log] = [[], []]
    saved: list[Any] = []
    megatron.zero_bubble.apply(ZeroBubbleConfig(schedule="zb-h2"))
    train(logs[0], lambda state: saved.append(weights_of(state)))
    megatron.zero_bubble.revert()
    pipeline = megatron.zero_bubble.apply(ZeroBubbleConfig(schedule="zb-h2", post_validation=True))
    optimizer = train_ahead(logs[1], lambda state: saved.append(weights_of(state)), pipeline)
    assert pipeline.num_pending == 0
    megatron.zero_bubble.revert()
    assert all(torch.equal(one, other) for one, other in zip(*saved, strict=True))
    return logs[0], logs[1], dict(optimizer.counts)


def test_loop_with_steps_ahead_logs_and_saves_the_same(ranks: RankPool) -> None:
    results = ranks.run(2, both)
    for stock, ahead, _ in results:
        assert ahead == stock and len(stock) == ITERATIONS
    first = results[0][2]
    assert first["repeated"] >= 2 and first["ahead"] >= 5, first


def wrong_uses(rank: int) -> dict[str, str]:
    """Return the sentences of wrong uses."""
    from megatron.core import parallel_state

    import megatron.zero_bubble
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    model, optimizer, _, data = setup()
    said: dict[str, str] = {}

    def refused(what: str, use: Callable[[], object]) -> None:
        try:
            use()
        except UserError as error:
            said[what] = str(error)

    pipeline = megatron.zero_bubble.apply("zb-h2")
    refused("without post-validation", lambda: pipeline.post_validated(optimizer, model))
    megatron.zero_bubble.revert()
    pipeline = megatron.zero_bubble.apply(ZeroBubbleConfig(schedule="zb-h2", post_validation=True, rollback="inverse"))
    plain, optimizer.chained_optimizers[0].optimizer = optimizer.chained_optimizers[0].optimizer, None
    optimizer.chained_optimizers[0].optimizer = torch.optim.SGD(plain.param_groups, lr=0.1)
    refused("sgd with inverse", lambda: pipeline.post_validated(optimizer, model))
    optimizer.chained_optimizers[0].optimizer = plain
    ahead = pipeline.post_validated(optimizer, model)
    refused("data that is no iterator", lambda: passes(model, [*range(9)], 0))  # type: ignore[arg-type]
    for iteration in range(2):  # the first step is synchronous
        passes(model, data, iteration)
        ahead.step_ahead()
    assert ahead.is_pending
    refused("stepping twice", ahead.step_ahead)
    refused("stepping twice, once synchronously", ahead.step)
    refused("saving", model[0].state_dict)
    refused("saving for a distributed checkpoint", model[0].module.sharded_state_dict)
    ahead.settle()
    model[0].state_dict()
    refused("stepping after the step was settled", ahead.step_ahead)
    megatron.zero_bubble.revert()
    refused("stepping ahead after revert()", ahead.step_ahead)
    return said


def test_wrong_uses_are_one_sentence(ranks: RankPool) -> None:
    for said in ranks.run(2, wrong_uses):
        assert list(said) == [
            "without post-validation",
            "sgd with inverse",
            "data that is no iterator",
            "stepping twice",
            "stepping twice, once synchronously",
            "saving",
            "saving for a distributed checkpoint",
            "stepping after the step was settled",
            "stepping ahead after revert()",
        ]
        assert said["saving"].endswith("call settle() of the post-validated optimizer on all ranks first")
        assert said["stepping twice"].startswith("an iteration has one optimizer step")
        assert all("\n" not in sentence and "; " in sentence for sentence in said.values())


def steps_ahead(pipeline: Any, count: int) -> Any:
    """The first step is synchronous, so that it is complete without ``settle``; the second is left pending."""
    model, optimizer, _, data = setup()
    optimizer = pipeline.post_validated(optimizer, model)
    for iteration in range(count):
        passes(model, data, iteration)
        optimizer.step_ahead((iteration, None))
    assert optimizer.is_pending == (count > 1)
    return optimizer


def left_after_revert(rank: int) -> list[tuple[int, int, int]]:
    """Process groups, threads and open files after each of some uses of post-validation."""
    from megatron.core import parallel_state
    from torch.distributed.distributed_c10d import _world

    import megatron.zero_bubble
    from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    found = []
    for steps in (None, 0, 1, 2, 0):  # 0: a training run that ends settled
        if steps is not None:
            pipeline = megatron.zero_bubble.apply(ZeroBubbleConfig(schedule="zb-h2", post_validation=True))
            if steps:
                ahead = steps_ahead(pipeline, steps)
            else:
                train_ahead([], lambda state: None, pipeline, 3)
            megatron.zero_bubble.revert()
            if steps == 2:
                ahead.settle()
        torch.distributed.barrier()
        threads, files = (sum(1 for _ in Path(f"/proc/self/{what}").iterdir()) for what in ("task", "fd"))
        found.append((len(_world.pg_map), threads, files))
    return found


def test_no_process_group_is_left_after_revert(ranks: RankPool) -> None:
    """The first use may start threads and open files that belong to torch or to the job's own groups."""
    for unused, first, *more in ranks.run(2, left_after_revert):
        assert {groups for groups, *_ in (unused, first, *more)} == {unused[0]}
        assert more == [first] * 3
