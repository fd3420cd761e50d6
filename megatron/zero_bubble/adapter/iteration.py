"""One iteration of one rank: build the stages and execute the plan, again if an optimizer step is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megatron.zero_bubble.adapter.boundary import Boundary
from megatron.zero_bubble.adapter.history import Histories
from megatron.zero_bubble.adapter.shards import ShardedUnits
from megatron.zero_bubble.adapter.slices import SlicedChunk
from megatron.zero_bubble.adapter.stage import MegatronStage, StageFacts, StageParts, StepArguments, StepResults
from megatron.zero_bubble.ir import Compute, Op, Plan, Slices
from megatron.zero_bubble.ir.offload import Evict
from megatron.zero_bubble.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.optimizer.replay import Replay, Rewindable
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.handler import Handler
from megatron.zero_bubble.runtime.handlers import Stage, handlers
from megatron.zero_bubble.runtime.observer import IterationObserver
from megatron.zero_bubble.runtime.offload import Offloader
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.wgrad.grad_sync import GradSync
from megatron.zero_bubble.wgrad.store import WgradStore


class StageMaker(Protocol):
    """Makes the stages of a rank."""

    def make(self, parts: Sequence[StageParts]) -> Mapping[int, Stage]:
        """The stages by number; ``parts`` are those of each chunk."""

    def handlers(
        self, plan: Plan, parts: Sequence[StageParts], observer: IterationObserver | None
    ) -> Mapping[type[Op], Handler]:
        """The handlers of ops that the stages need in addition to the basic ones."""


class ChainStages:
    """Makes the stages of a transformer that is divided into stages, and nothing else."""

    def make(self, parts: Sequence[StageParts]) -> Mapping[int, Stage]:
        """See ``StageMaker``."""
        return {own.facts.stage: MegatronStage(own) for own in parts}

    def handlers(
        self, _plan: Plan, _parts: Sequence[StageParts], _observer: IterationObserver | None
    ) -> Mapping[type[Op], Handler]:
        """See ``StageMaker``."""
        return {}


@dataclass(frozen=True)
class Iteration:
    """The plan, model chunks, data and transport of one iteration on one rank.

    Attributes:
        stages: the schedule's facts about this rank's stages, one per chunk.
        results: losses and token counts, filled while the iteration runs.
        observer: is notified of every op, message and wait; None if the iteration is not observed.
        maker: makes the stages.
        offloader: runs the ops of offloading; None if the plan has none.
        units: runs the ops of sharded units; None if the plan has none.
    """

    plan: Plan
    stages: Sequence[StageFacts]
    chunks: Sequence[torch.nn.Module]
    iterators: Sequence[Any]
    step: StepArguments
    results: StepResults
    boundary: Boundary
    transport: Transport
    store: WgradStore
    histories: Histories
    observer: IterationObserver | None
    maker: StageMaker
    offloader: Offloader | None = None
    units: ShardedUnits | None = None

    def evaluate(self) -> None:
        """Run the forwards only."""
        self._run(self.iterators, [None] * len(self.chunks), lambda: True)

    def train(self, syncs: Sequence[GradSync], overlap: bool, optimizer: PostValidatedOptimizer | None) -> None:
        """Run all passes; if the previous optimizer step is rejected, undo it and run them again from the start.

        Args:
            syncs: gradient synchronization of every chunk.
            overlap: whether data parallelism reduces gradients during the passes.
            optimizer: the optimizer whose steps the passes validate; None if steps are final.

        Raises:
            UserError: the passes may run again, and read data that is not an iterator.
        """
        overlapped = syncs if overlap else [None] * len(self.chunks)
        if optimizer is not None:
            for iterator in self.iterators:
                Rewindable.check(iterator)
        if optimizer is None or not optimizer.is_pending:
            self._run(self.iterators, overlapped, lambda: True)
            return
        replay = Replay(self.chunks, self.iterators) if optimizer.may_run_again else None
        iterators = self.iterators if replay is None else replay.iterators
        optimizer.before_forwards()

        def make_final() -> None:
            optimizer.validate()
            for sync in syncs:
                sync.hold()

        def validate() -> bool:
            if not optimizer.is_right():
                return False
            make_final()
            self.step.scale_auxiliary_losses(self.boundary.device)
            if replay is not None:
                replay.confirm()
            return True

        if not self._run(iterators, overlapped, validate):
            assert replay is not None, "a step was rejected although may_run_again is False"
            make_final()
            replay.rewind()
            self.results.clear()
            self.store.clear()
            self._run(iterators, overlapped, lambda: True)

    def _run(self, iterators: Sequence[Any], syncs: Sequence[GradSync | None], validate: Callable[[], bool]) -> bool:
        """Build the stages and execute the plan. Returns False if validation stopped it and it must run again."""
        with ExitStack() as hooks:
            parts = []
            for facts, chunk, iterator, sync in zip(self.stages, self.chunks, iterators, syncs, strict=True):
                slices = SlicedChunk(facts.stage, chunk, iterator, self.boundary.ends, self.histories)
                hooks.enter_context(slices.hooked())
                parts.append(StageParts(self.step, self.results, facts, chunk, slices, self.store, sync))
            stages = self.maker.make(parts)
            by_op = handlers(stages, self.transport, self.boundary.new_buffer, self.observer, validate)
            by_op.update(self.maker.handlers(self.plan, parts, self.observer))
            row = self.plan.executable(self.transport.rank).ops
            self.store.saved.begin(self.chunks, (op.forward for op in row if isinstance(op, Evict)))
            by_op[Compute] = self.store.saved.around(by_op[Compute])
            if self.offloader is not None:
                by_op.update(self.offloader.handlers(self.observer))
                self.offloader.expect(row)
                hooks.enter_context(self.offloader.iteration())
            if self.units is not None:
                by_op.update(self.units.handlers(self.observer))
                hooks.enter_context(self.units.iteration(self.stages, self.chunks))
            return Executor(self.plan, self.transport.rank, by_op, self.observer).run()


class Call(NamedTuple):
    """One call of the forward-backward function."""

    step: StepArguments
    groups: Any
    chunks: list[torch.nn.Module]
    iterators: list[Any]
    boundary: Callable[[Slices], Boundary]
    force_all_reduce: bool | None
    is_uneven: bool
