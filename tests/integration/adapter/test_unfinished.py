"""After a call that ended with an exception, the next one is refused on every rank within seconds, or joins again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import megatron.zero_bubble
from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from tests.helpers.ranks import RankPool
from tests.helpers.rows import some
from tests.integration.adapter.test_foreign_loop import SEQUENCE, VOCABULARY
from tests.loops import models, varied

REFUSED = "a call of the forward-backward function must be finished before the next one; the last one of this rank "
REJOIN = "call megatron.zero_bubble.disconnect() on all of them"
MICROBATCHES, SOON_S = 4, 30.0  # on a slow machine; the timeout of the job's groups is longer
JOB_TIMEOUT_S = 240.0


class Way(NamedTuple):
    """A schedule with what runs with it; ``virtual_size`` is the number of stages per rank, if there are several."""

    options: dict[str, Any]
    virtual_size: int | None = None
    has_headers: bool = False


WAYS = {
    "line": Way({"schedule": "zb-h1"}),
    "late receives": Way({"schedule": "zb-h2", "post_receives": "late"}),
    "line with headers": Way({"schedule": "zb-h1"}, has_headers=True),
    "V": Way({"schedule": "zb-v"}, 2),
    "V with headers": Way({"schedule": "zb-v"}, 2, has_headers=True),
    "interleaved": Way({"schedule": "zb-interleaved"}, 2),
    "searched wave": Way({"schedule": "zb-auto", "placement": "wave", "num_chunks": 2, "memory_limit": "1.2p"}, 2),
    "vocabulary": Way({"schedule": "zb-h1", "vocabulary": 1}),
    "offloading": Way({"schedule": "zb-h1", "offload": "all"}),
    "slices": Way({"schedule": "seq-zb-h1", "num_slices": 2}),
}


class Mistake(Exception):
    """A mistake of the user's loop."""


class _Failing(Executor):
    """Fails at an op of its row."""

    at = 0

    def _execute(self, ops: Sequence[Any], registers: Sequence[Any]) -> bool:
        if self.at >= len(ops):
            return super()._execute(ops, registers)
        super()._execute(ops[: self.at], registers[: self.at])
        raise Mistake(f"at {ops[self.at]}")


Outcome = tuple[list[str], list[str]]


def samples(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator) for _ in range(MICROBATCHES)]


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Reports a tensor, which can be added over slices."""
    text = next(data)
    losses = model(text[:, :-1], torch.arange(SEQUENCE).expand(2, -1), None, labels=text[:, 1:])
    return losses, lambda output: (output.mean(), {"loss": output.mean().detach()})


def call(
    way: Way,
    chunks: Sequence[Any],
    seed: int,
    samples: Callable[[int], list[Any]] = samples,
    forward_step: Callable[..., Any] = forward_step,
    forward_only: bool = False,
) -> Outcome:
    """The losses of a call, and the bits of all gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.zero_grad()  # as an optimizer does
    if way.has_headers:
        losses = varied.passes(chunks, varied.batches(MICROBATCHES, seed, "dense"), 0.1)
    else:
        iterators: list[Iterator[Any]] = [iter(samples(seed)) for _ in chunks]
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=forward_only,
        )
        losses = [report["loss"].item().hex() for report in reports]
    gradients = [weight.main_grad for chunk in chunks for weight in chunk.parameters()]
    return losses, [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in gradients]


def built(way: Way, num_ranks: int = 2) -> tuple[Any, list[Any]]:
    """The pipeline and the chunks of a way; it has two ranks, or more with headers."""
    from megatron.core import parallel_state, tensor_parallel

    models.destroy_groups()
    pipeline = megatron.zero_bubble.apply(ZeroBubbleConfig(**way.options))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=way.virtual_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    if way.has_headers:
        # A loss per token would add a broadcast of Megatron's, where a rank waits for one that has failed.
        return pipeline, varied.build(num_ranks, way.virtual_size, "dense", options={"calculate_per_token_loss": False})
    return pipeline, models.build(way.virtual_size, "weights")


class Ending(NamedTuple):
    """How a call ended on a rank: the class of the error and its sentence, and the seconds that it took."""

    kind: str
    sentence: str
    seconds: float


def ending(run: Any) -> Ending:
    start = time.monotonic()
    try:
        run()
    except (Mistake, StopIteration, KeyboardInterrupt, UserError, PeerError) as error:
        return Ending(type(error).__name__, str(error), time.monotonic() - start)
    return Ending("", "", time.monotonic() - start)


class After(NamedTuple):
    """What a rank saw after a failure: the failed call, what was left of it, and the next call."""

    failed: Ending
    num_pending: int
    following: Ending
    joined_again: bool


def failures(rank: int, name: str, failing: Sequence[int], share: float | None = None) -> list[After]:
    """Fail at ops of this rank's row, if it is among the ``failing`` ones: at a share of all, or at one after another.

    The calls of one job, whose ranks join again after each failure.
    """
    way = WAYS[name]
    pipeline, chunks = built(way)
    try:
        expected = call(way, chunks, 1)
        (prepared,) = pipeline._prepared.values()
        sizes = [len(prepared.plan.executable(each).ops) for each in range(2)]
        most = max(sizes[each] for each in failing)
        places = range(most) if share is None else [int(share * (most - 1))]
        return [
            failure(way, pipeline, chunks, min(place, sizes[rank] - 1) if rank in failing else None, expected)
            for place in places
        ]
    finally:
        megatron.zero_bubble.revert()
        models.destroy_groups()


def failure(way: Way, pipeline: Any, chunks: Sequence[Any], at: int | None, expected: Outcome) -> After:
    """Fail at an op of this rank's row, unless it is None, and join again."""
    with pytest.MonkeyPatch.context() as patch:
        if at is not None:
            patch.setattr(_Failing, "at", at)
            patch.setattr("megatron.zero_bubble.integration.adapter.iteration.Executor", _Failing)
        failed = ending(partial(call, way, chunks, 2))
    num_pending = pipeline.num_pending
    following = ending(partial(call, way, chunks, 3))
    torch.distributed.barrier()
    megatron.zero_bubble.disconnect()
    return After(failed, num_pending, following, call(way, chunks, 1) == expected)


def check(of_ranks: Sequence[Sequence[After]], failing: Sequence[int]) -> None:
    for rank, afters in enumerate(of_ranks):
        for failed, num_pending, following, joined_again in afters:
            assert failed.kind in (("Mistake", "PeerError") if rank in failing else ("", "PeerError")), failed
            assert following.kind in ("UserError", "PeerError"), following
            if failed.kind:
                assert following.kind == "UserError"
                assert following.sentence.startswith(f"{REFUSED}ended with {failed.kind}; start the job again")
                assert REJOIN in following.sentence
                assert num_pending == 0
            assert max(failed.seconds, following.seconds) < SOON_S
            assert joined_again


JOBS = "line with headers", "V", "vocabulary"
FAILING = [(name, failing) for failing in ([0], [1], [0, 1]) for name in JOBS]


@pytest.mark.parametrize(("name", "failing"), some(FAILING, *FAILING[::4], FAILING[1]))
def test_no_call_follows_one_that_failed(ranks: RankPool, name: str, failing: list[int]) -> None:
    check(ranks.run(2, failures, name, failing, 0.5, timeout=JOB_TIMEOUT_S), failing)


def epoch(_rank: int) -> tuple[Ending, Ending]:
    """The data of an epoch end among the microbatches of a call; the loop goes on with those of the next one."""
    way = WAYS["line"]
    _, chunks = built(way)
    try:
        call(way, chunks, 1)
        short = ending(partial(call, way, chunks, 2, lambda seed: samples(seed)[:-1]))
        return short, ending(partial(call, way, chunks, 3))
    finally:
        megatron.zero_bubble.revert()
        models.destroy_groups()


def test_data_that_end_too_early(ranks: RankPool) -> None:
    (first, following), (last, of_last) = ranks.run(2, epoch, timeout=JOB_TIMEOUT_S)
    assert first.kind == "StopIteration"
    assert following.sentence.startswith(f"{REFUSED}ended with StopIteration; give every call as many microbatches as")
    assert last.kind == "PeerError"
    assert last.sentence.endswith("look at its output first; pipeline rank 0 ended with StopIteration")
    assert of_last.sentence.startswith(f"{REFUSED}ended with PeerError; start the job again from its last checkpoint")
    assert max(each.seconds for each in (first, following, last, of_last)) < SOON_S


def among_four(rank: int) -> Ending:
    """The last of four ranks fails in the middle of its row."""
    way = WAYS["line with headers"]
    pipeline, chunks = built(way, 4)
    try:
        call(way, chunks, 1)
        (prepared,) = pipeline._prepared.values()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 3:
                patch.setattr(_Failing, "at", len(prepared.plan.executable(rank).ops) // 2)
                patch.setattr("megatron.zero_bubble.integration.adapter.iteration.Executor", _Failing)
            return ending(partial(call, way, chunks, 2))
    finally:
        megatron.zero_bubble.revert()
        models.destroy_groups()


def test_ranks_that_wait_for_others_name_the_first_that_failed(ranks: RankPool) -> None:
    *waiting, failed = ranks.run(4, among_four, timeout=JOB_TIMEOUT_S)
    assert failed.kind == "Mistake"
    for each in waiting:
        assert each.kind == "PeerError" and each.seconds < SOON_S
        assert each.sentence.endswith(f"; pipeline rank 3 ended with Mistake: {failed.sentence}"), each


@pytest.mark.full
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_at_every_op(ranks: RankPool, name: str, failing: list[int]) -> None:
    check(ranks.run(2, failures, name, failing, timeout=JOB_TIMEOUT_S), failing)
