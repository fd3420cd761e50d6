"""Keeps a rank's weights and gradients as shards, and whole only between the ops that gather, reduce and free them.

Between iterations, either everything is whole, as a job expects that knows nothing of shards, or everything stays
shards, which an optimizer steps in place (``Sharder.keep``). Memory is given back by resizing storages, so that all
views stay valid: parameters, their gradients, and what autograd saved. It is allocated and freed in the order of the
passes, which wait for each collective before they use or free what it wrote; the lane needs to keep nothing alive.

Whole weights and whole gradients of passes have a memory pool each. There, a chunk finds the blocks that another one
left; among activations, small tensors would have split them, and the next gather would ask the device for gigabytes.
What is whole between passes has its memory from the common pool, because a pool keeps its largest size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from megatron.zero_bubble.core.errors import PeerError, UserError
from megatron.zero_bubble.core.ir import Op
from megatron.zero_bubble.core.ir.shards import Close, Gather, Open, Reduce, ReleaseWeights, Wait
from megatron.zero_bubble.engine.platforms import select
from megatron.zero_bubble.engine.platforms.pools import CommonPool, MemoryPool
from megatron.zero_bubble.engine.platforms.streams import Lane, Result
from megatron.zero_bubble.engine.runtime.handler import Awaited, Handler
from megatron.zero_bubble.engine.runtime.observer import IterationObserver, observed_work
from megatron.zero_bubble.engine.runtime.transport import lost_connection
from megatron.zero_bubble.engine.runtime.watchdog import Watchdog

_COMMON = CommonPool()


class Chunk(Protocol):
    """The weights and gradients of one chunk in flat tensors, which are the same in every iteration.

    Attributes:
        weights, gradients: whole tensors, each with a storage of its own.
        own_weights, own_gradients: the parts of them that belong to this replica.
    """

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    own_weights: list[torch.Tensor]
    own_gradients: list[torch.Tensor]

    def gather(self) -> None:
        """Fill ``weights`` with the parts of all replicas. A collective call of the replicas, made on a lane."""

    def reduce(self) -> None:
        """Fill ``own_gradients`` with the sum over all replicas. A collective call of the replicas, made on a lane."""


class Sharder:
    """Runs the ops of sharded units on one rank.

    Args:
        lane: runs all collectives, in order.
        watchdog: with NCCL, follows the waits of the GPU; None if the host waits.
        make_pool: makes a pool of memory on a device of this type.

    Attributes:
        num_gathers, num_reductions: the collectives started so far.
        gathered_bytes, reduced_bytes: the size of what they have gathered and reduced, whole.
        most_whole: the most bytes of whole weights and gradients at a time so far, while chunks were shards.
        keeps: whether chunks are shards also between iterations.
    """

    def __init__(
        self,
        lane: Lane,
        watchdog: Watchdog | None = None,
        make_pool: Callable[[str], MemoryPool] = lambda device: select(device).memory_pool(),
    ) -> None:
        self._lane, self._watchdog, self._make_pool = lane, watchdog, make_pool
        self._weights: MemoryPool = _COMMON
        self._gradients: MemoryPool = _COMMON
        self._chunks: dict[int, _Sharded] = {}
        self._whole: set[int] = set()  # stages that are whole between iterations, for whoever reads their weights
        self.num_gathers = self.num_reductions = self.most_whole = 0
        self.gathered_bytes = self.reduced_bytes = 0
        self.keeps = False

    def keep(self, chunks: Mapping[int, Chunk]) -> None:
        """Free all but the shards of ``chunks``, by stage; from now on, they are shards also between iterations."""
        self._shard(chunks)
        self.keeps = True

    def _shard(self, chunks: Mapping[int, Chunk]) -> None:
        self._chunks = {stage: _Sharded(chunk) for stage, chunk in chunks.items()}
        if self._weights is _COMMON:
            device = next(own.weights[0].device.type for own in chunks.values())
            self._weights, self._gradients = self._make_pool(device), self._make_pool(device)

    def shards(self, stage: int) -> OwnShards:
        """The own parts of a stage that is kept as shards."""
        return self._chunks[stage].shards

    @contextmanager
    def whole_weights(self, stages: Iterable[int]) -> Iterator[None]:
        """Context in which the weights of ``stages``, kept as shards, are whole. A collective call of the replicas.

        What is written to them is lost. Within such a context, stages that are whole already stay as they are.
        """
        used = [stage for stage in stages if stage not in self._whole]
        try:
            for stage in used:
                self._gather_whole(stage)
                self._whole.add(stage)
                self._count()
            yield
        finally:
            for stage in used:
                self._whole.discard(stage)
                self._chunks[stage].free_weights()

    def _gather_whole(self, stage: int) -> None:
        """Make the weights of a stage whole between passes. A collective call of the replicas."""
        sharded = self._chunks[stage]
        sharded.allocate_weights()
        try:
            with torch.no_grad():
                sharded.chunk.gather()
        except RuntimeError as error:
            raise _blame(f"the gathering of the weights of stage {stage}", error) from error

    @contextmanager
    def whole_gradients(self, stages: Iterable[int]) -> Iterator[None]:
        """Context in which the gradients of ``stages``, kept as shards, have their size; only the own parts count."""
        used = [self._chunks[stage] for stage in stages]
        pool = self._gradients if len(used) == 1 else _COMMON  # more than passes have would enlarge the pool for good
        for sharded in used:
            sharded.restore_gradients(pool)
            self._count()
        try:
            yield
        finally:
            for sharded in used:
                sharded.take_gradients()

    @contextmanager
    def iteration(self, chunks: Mapping[int, Chunk]) -> Iterator[None]:
        """Context around the passes of an iteration, in which ``chunks``, by stage, are shards.

        Afterwards, unless they are kept as shards, weights are whole, the same as before, because a job may save them
        without a step of its optimizer. Of the gradients, the own parts are the sums over all units and replicas, and
        the others are zero. After an error, only the own parts of both are valid.

        Raises:
            UserError: within ``whole_weights``, because the passes would free what is read there.
        """
        if self._whole:
            raise UserError(
                f"passes free the weights of sharded units; got an iteration while stages {sorted(self._whole)} are "
                "kept whole to be read (whole_weights, or non_loss_data_func of a Megatron-LM script); run it before "
                "or after, or drop --zero-bubble-shard-weights"
            )
        if self.keeps:
            for sharded in self._chunks.values():
                sharded.shards.gradients = None
            yield
            return
        self._shard(chunks)
        try:
            yield
            for stage in self._chunks:
                self._gather_whole(stage)
        finally:
            # A proved plan has waited for all collectives. After an error, one may wait for a replica that has ended.
            for sharded in self._chunks.values():
                sharded.restore()
            self._chunks.clear()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the lane. Chunks that are kept as shards get their memory back, with NaN where they had no shard."""
        self._lane.close(timeout_s)
        for sharded in self._chunks.values():
            sharded.restore(math.nan)
        self._chunks.clear()

    def handlers(self, observer: IterationObserver | None) -> Mapping[type[Op], Handler]:
        """The handlers of one iteration; ``observer`` is notified when collectives run."""
        return {
            Gather: partial(self._gather, observer),
            Wait: self._wait,
            ReleaseWeights: self._release,
            Open: self._open,
            Reduce: partial(self._reduce, observer),
            Close: self._close,
        }

    def _gather(self, observer: IterationObserver | None, op: Gather, _inputs: Sequence[Any]) -> tuple[Awaited]:
        sharded = self._chunks[op.stage]
        sharded.allocate_weights(self._weights)
        self._count()
        self.num_gathers += 1
        self.gathered_bytes += _size(sharded.chunk.weights)
        return (self._start(observer, op, sharded.chunk.gather),)

    def _wait(self, _op: Wait, inputs: Sequence[Any]) -> Sequence[Any]:
        return inputs

    def _release(self, op: ReleaseWeights, _inputs: Sequence[Any]) -> None:
        self._chunks[op.stage].free_weights()

    def _open(self, op: Open, _inputs: Sequence[Any]) -> tuple[None]:
        self._chunks[op.stage].allocate_gradients(self._gradients)
        self._count()
        return (None,)

    def _reduce(self, observer: IterationObserver | None, op: Reduce, _inputs: Sequence[Any]) -> tuple[Awaited]:
        chunk = self._chunks[op.stage].chunk
        self.num_reductions += 1
        self.reduced_bytes += _size(chunk.gradients)
        return (self._start(observer, op, chunk.reduce),)

    def _close(self, op: Close, _inputs: Sequence[Any]) -> None:
        self._chunks[op.stage].add_gradients()

    def _count(self) -> None:
        self.most_whole = max(self.most_whole, sum(sharded.num_whole for sharded in self._chunks.values()))

    def _start(self, observer: IterationObserver | None, op: Op, collective: Callable[[], None]) -> Awaited:
        def work() -> None:
            with torch.no_grad():
                collective()

        try:
            return _Collective(self._lane.start(observed_work(op, work, observer), ()), op, self._watchdog)
        except RuntimeError as error:
            raise _blame(op, error) from error


class OwnShards:
    """The own parts of a chunk, in the order of its ``own_weights`` and ``own_gradients``.

    Attributes:
        gradients: the sums over all replicas and all units so far; None before the first unit.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights
        self.gradients: list[torch.Tensor] | None = None


class _Sharded:
    """A chunk during an iteration: its shards, and the sizes of what is whole outside of it."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.shards = OwnShards([part.clone() for part in chunk.own_weights])
        self._sizes = {id(whole): whole.untyped_storage().nbytes() for whole in (*chunk.weights, *chunk.gradients)}
        self.free_weights()
        self._free(chunk.gradients)

    @property
    def num_whole(self) -> int:
        return sum(whole.untyped_storage().nbytes() for whole in (*self.chunk.weights, *self.chunk.gradients))

    def allocate_weights(self, pool: MemoryPool = _COMMON) -> None:
        self._allocate(self.chunk.weights, pool)
        for part, shard in zip(self.chunk.own_weights, self.shards.weights, strict=True):
            part.copy_(shard)

    def free_weights(self) -> None:
        self._free(self.chunk.weights)

    def allocate_gradients(self, pool: MemoryPool = _COMMON) -> None:
        self._allocate(self.chunk.gradients, pool)
        for gradients in self.chunk.gradients:
            gradients.zero_()

    def add_gradients(self) -> None:
        """Add the own part to that of earlier units, and free the gradients. The sum of one unit keeps its bits."""
        if self.shards.gradients is None:
            self.take_gradients()
            return
        for shard, part in zip(self.shards.gradients, self.chunk.own_gradients, strict=True):
            shard.add_(part)
        self._free(self.chunk.gradients)

    def take_gradients(self) -> None:
        """Replace the shard by the own part, and free the gradients."""
        self.shards.gradients = [part.clone() for part in self.chunk.own_gradients]
        self._free(self.chunk.gradients)

    def restore_gradients(self, pool: MemoryPool = _COMMON) -> None:
        """Allocate gradients, with the own parts in place."""
        self.allocate_gradients(pool)
        for part, shard in zip(self.chunk.own_gradients, self.shards.gradients or (), strict=False):
            part.copy_(shard)

    def restore(self, others: float | None = None) -> None:
        """Allocate everything, with the own parts in place, and ``others`` in all other weights."""
        self._allocate(self.chunk.weights, _COMMON)
        if others is not None:
            for weights in self.chunk.weights:
                weights.fill_(others)
        self.allocate_weights()
        self.restore_gradients()

    def _allocate(self, tensors: Sequence[torch.Tensor], pool: MemoryPool) -> None:
        pool.allocate(lambda: self._resize(tensors, whole=True))

    def _free(self, tensors: Sequence[torch.Tensor]) -> None:
        self._resize(tensors, whole=False)

    def _resize(self, tensors: Sequence[torch.Tensor], whole: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = self._sizes[id(tensor)] if whole else 0
            if storage.nbytes() != size and storage.resizable():  # on a CPU, it is not if numpy has seen it
                storage.resize_(size)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _blame(op: object, error: RuntimeError) -> RuntimeError | PeerError:
    """What to raise for an error of the collective of ``op``."""
    reason = lost_connection(error)
    if reason is None:
        return RuntimeError(f"{op}, a collective of the data-parallel replicas, failed: {error}")
    return _missed(op, reason)


def _missed(op: object, reason: str) -> PeerError:
    return PeerError(
        f"not all data-parallel replicas took part in {op} ({reason}); a rank has failed or hangs: look for the first "
        "error of the other ranks"
    )


class _Collective(Awaited):
    """A collective that may not be complete."""

    def __init__(self, result: Result, op: Op, watchdog: Watchdog | None) -> None:
        self._result, self._op, self._watchdog = result, op, watchdog

    def wait(self, needed_by: object) -> None:
        """Make the passes wait for the collective.

        Raises:
            PeerError: a replica died or did not take part within the group's timeout. With NCCL, the watchdog ends the
                process with the same message instead.
        """
        op = self._op
        try:
            if self._watchdog is None:
                self._result.wait()
            else:
                self._watchdog.wait(self._result, lambda reason: _missed(op, reason))
        except RuntimeError as error:
            raise _blame(op, error) from error
