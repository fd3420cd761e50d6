"""Weights and gradients in shards: what is whole when, sums over units, errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron.zero_bubble import build
from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.core.ir import Compute, Kind, Plan
from megatron.zero_bubble.core.plan import Additions, plan_of
from megatron.zero_bubble.core.plan.shard import Sharding
from megatron.zero_bubble.engine.platforms.streams import ThreadLane
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.shards import Sharder

SIZE = 6


class TwoReplicas:
    """A chunk of replica 0 of two; both replicas have the same weights and gradients."""

    def __init__(self) -> None:
        self.weights = [torch.arange(1.0, SIZE + 1)]
        self.gradients = [torch.zeros(SIZE)]
        self.own_weights = [self.weights[0][: SIZE // 2]]
        self.own_gradients = [self.gradients[0][: SIZE // 2]]
        self.error: str | None = None

    def gather(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)
        self.weights[0][SIZE // 2 :] = self.own_weights[0] + SIZE // 2

    def reduce(self) -> None:
        self.own_gradients[0] *= 2
        self.gradients[0][SIZE // 2 :] = -1.0


@pytest.fixture
def sharder() -> Iterator[Sharder]:
    made = Sharder(ThreadLane())
    yield made
    made.close()


def run(sharder: Sharder, chunks: dict[int, TwoReplicas], unit: int = 4) -> list[int]:
    """Run the passes of one rank with two chunks and four microbatches; return the bytes of whole weights in each."""
    schedule = build("zero-pp", num_ranks=1, num_microbatches=4, unit_microbatches=unit)
    plan: Plan = plan_of(schedule, Additions(sharding=Sharding(unit, 1)))
    whole = []

    def compute(op: Compute, _inputs: object) -> list[None]:
        chunk = chunks[op.work.stage]
        if op.work.kind is not Kind.W:
            assert chunk.weights[0].tolist() == [1, 2, 3, 4, 5, 6], "whole"
        if op.work.kind is not Kind.F:
            chunk.gradients[0] += 1.0
        whole.append(sum(each.weights[0].untyped_storage().nbytes() for each in chunks.values()))
        return [None for _ in schedule.flow.outputs(op.work)]

    by_op: dict[type, Handler] = {Compute: compute, **sharder.handlers(None)}
    with sharder.iteration(chunks):
        assert all(each.weights[0].untyped_storage().nbytes() == 0 for each in chunks.values())
        Executor(plan, 0, by_op).run()
    return whole


@pytest.mark.parametrize("unit", [4, 2, 1])
def test_whole_only_where_needed(sharder: Sharder, unit: int) -> None:
    chunks = {0: TwoReplicas(), 1: TwoReplicas()}
    for iteration in (1, 2):
        whole = run(sharder, chunks, unit)
        for chunk in chunks.values():
            assert chunk.weights[0].tolist() == [1, 2, 3, 4, 5, 6], "a job may save them without a step"
        assert set(whole) == {0, 4 * SIZE}, "at most one chunk is whole, and none in the last W"
        for chunk in chunks.values():
            assert chunk.own_weights[0].tolist() == [1, 2, 3]
            # B and W of four microbatches on two replicas, and zero in the part of the other replica.
            assert chunk.gradients[0].tolist() == [16, 16, 16, 0, 0, 0]
            chunk.gradients[0].zero_()
        assert sharder.num_reductions == iteration * 2 * 4 // unit
    assert sharder.most_whole <= 3 * 4 * SIZE, "weights of one chunk, and gradients of two"


@pytest.mark.parametrize(
    ("text", "error", "what"),
    [
        ("no such buffer", RuntimeError, r"0:gather@0, a collective of the data-parallel replicas, failed: no such"),
        ("Connection closed by peer", PeerError, r"not all data-parallel replicas took part in 0:gather@0"),
    ],
)
def test_failed_collective_is_named(sharder: Sharder, text: str, error: type[Exception], what: str) -> None:
    chunks = {0: TwoReplicas(), 1: TwoReplicas()}
    chunks[0].error = text
    with pytest.raises(error, match=what):
        run(sharder, chunks)
    for chunk in chunks.values():
        assert chunk.own_weights[0].tolist() == [1, 2, 3], "weights have their memory again"


def test_storage_that_cannot_be_resized_stays_whole(sharder: Sharder) -> None:
    chunks = {0: TwoReplicas(), 1: TwoReplicas()}
    chunks[0].weights[0].numpy()
    with sharder.iteration(chunks):
        assert chunks[0].weights[0].untyped_storage().nbytes() == 4 * SIZE


def test_kept_as_shards_between_iterations(sharder: Sharder) -> None:
    """What an optimizer writes to a shard is gathered; each iteration begins its sums from zero."""
    chunks = {0: TwoReplicas(), 1: TwoReplicas()}
    sharder.keep(chunks)
    for _ in range(2):
        run(sharder, chunks, 2)
        assert bytes_whole(chunks) == 0
        for stage, chunk in chunks.items():
            (gradient,) = sharder.shards(stage).gradients or []
            assert gradient.tolist() == [16, 16, 16]
            with sharder.whole_gradients([stage]):
                assert chunk.own_gradients[0].tolist() == [16, 16, 16]
                chunk.own_gradients[0] /= 2
                assert bytes_whole(chunks) == 4 * SIZE
            assert sharder.shards(stage).gradients == [pytest.approx(torch.tensor([8.0, 8, 8]))]
    sharder.shards(0).weights[0] += 10
    with sharder.whole_weights([0]):
        assert chunks[0].weights[0].tolist() == [11, 12, 13, 14, 15, 16]
        assert bytes_whole(chunks) == 4 * SIZE
        with sharder.whole_weights([0, 1]):
            assert bytes_whole(chunks) == 8 * SIZE
        assert bytes_whole(chunks) == 4 * SIZE, "what was whole before stays whole"
        with pytest.raises(UserError, match=r"got an iteration while stages \[0\] are kept whole"):
            run(sharder, chunks, 2)
        assert chunks[0].weights[0].tolist() == [11, 12, 13, 14, 15, 16]
    assert bytes_whole(chunks) == 0


def test_weights_of_other_replicas_are_nan_after_the_end() -> None:
    sharder, chunks = Sharder(ThreadLane()), {0: TwoReplicas()}
    sharder.keep(chunks)
    sharder.close()
    own, others = chunks[0].weights[0].view(2, -1)
    assert own.tolist() == [1, 2, 3]
    assert others.isnan().all()


def bytes_whole(chunks: dict[int, TwoReplicas]) -> int:
    return sum(t.untyped_storage().nbytes() for each in chunks.values() for t in (*each.weights, *each.gradients))


def test_passes_have_a_pool_for_weights_and_one_for_gradients() -> None:
    """What is whole between passes comes from the common pool: a pool keeps its largest size."""
    chunks = {0: TwoReplicas(), 1: TwoReplicas()}
    pools: list[Pool] = []

    class Pool:
        """Counts the bytes of weights and of gradients that are allocated in it, for the one chunk of a call."""

        def __init__(self, device: str) -> None:
            assert device == "cpu", "the device of the chunks"
            self.made: dict[str, list[int]] = {"weights": [], "gradients": []}
            pools.append(self)

        def allocate(self, work: Callable[[], None]) -> None:
            before = self._whole()
            work()
            for kind, size in self._whole().items():
                if size > before[kind]:
                    self.made[kind].append(size - before[kind])

        def _whole(self) -> dict[str, int]:
            return {
                kind: sum(t.untyped_storage().nbytes() for each in chunks.values() for t in getattr(each, kind))
                for kind in self.made
            }

    sharder, one = Sharder(ThreadLane(), make_pool=Pool), 4 * SIZE
    sharder.keep(chunks)
    assert len(pools) == 2
    run(sharder, chunks, 2)
    weights, gradients = pools
    gathers = sharder.num_gathers
    assert weights.made == {"weights": [one] * gathers, "gradients": []}
    assert gradients.made == {"weights": [], "gradients": [one] * sharder.num_reductions}
    with sharder.whole_gradients([1]), sharder.whole_weights([0, 1]):
        assert bytes_whole(chunks) == 3 * one
    with sharder.whole_gradients([0, 1]):
        assert bytes_whole(chunks) == 2 * one
    sharder.close()
    assert len(weights.made["weights"]) == gathers, "weights between passes are in the common pool"
    assert len(gradients.made["gradients"]) == sharder.num_reductions + 1, "of the step, those of one chunk at a time"
    assert bytes_whole(chunks) == 4 * one


def test_pools_of_whole_chunks_serve_passes_only() -> None:
    """Where chunks are whole between iterations, a pool must not grow to the size of the model."""
    num_allocated = []

    class Pool:
        def __init__(self, _device: str) -> None:
            self._place = len(num_allocated)
            num_allocated.append(0)

        def allocate(self, work: Callable[[], None]) -> None:
            work()
            num_allocated[self._place] += 1

    chunks, sharder = {0: TwoReplicas(), 1: TwoReplicas()}, Sharder(ThreadLane(), make_pool=Pool)
    for iteration in (1, 2):
        run(sharder, chunks, 2)
        assert num_allocated == [sharder.num_gathers, sharder.num_reductions], iteration
    sharder.close()


def test_an_error_of_a_collective_keeps_no_values_of_the_passes() -> None:
    lane = ThreadLane()
    sharder = Sharder(lane)
    chunks = {0: TwoReplicas(), 1: TwoReplicas()}
    chunks[0].error = "Connection closed by peer"

    def run_passes() -> weakref.ref[torch.Tensor]:
        value = torch.ones(1)
        with pytest.raises(PeerError, match="Connection closed by peer"):
            run(sharder, chunks)
        return weakref.ref(value)

    for _ in range(2):
        value = run_passes()
        lane.join()
        assert value() is None
    sharder.close()
