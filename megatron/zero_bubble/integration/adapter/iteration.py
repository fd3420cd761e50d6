"""One iteration of one rank: build the stages and execute the plan, again if an optimizer step is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.core.ir import Compute
from megatron.zero_bubble.engine.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.engine.optimizer.replay import Replay, Rewindable
from megatron.zero_bubble.engine.runtime.executor import Executor
from megatron.zero_bubble.engine.runtime.handlers import Stage, handlers
from megatron.zero_bubble.engine.wgrad.grad_sync import GradSync
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.integration.adapter.balancing import Balancing
from megatron.zero_bubble.integration.adapter.history import Histories
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Part
from megatron.zero_bubble.integration.adapter.recurrences import Recurrences
from megatron.zero_bubble.integration.adapter.slices import SlicedChunk
from megatron.zero_bubble.integration.adapter.stage import MegatronStage, StageParts, StepResults


class Slicing(Part):
    """Keeps what the slices of a sequence share.

    Attributes:
        histories: keys and values of all chunks of this rank.
        balancing: tokens per expert.
        recurrences: the states of scans.
    """

    def __init__(self) -> None:
        self.histories, self.balancing, self.recurrences = Histories(), Balancing(), Recurrences()

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``. Afterwards, nothing is left, also if the iteration failed."""
        try:
            yield
        finally:
            self.histories.clear()
            self.balancing.clear()
            self.recurrences.states.clear()

    @property
    def kept(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The functions ``histories`` and ``states`` of ``IterationStart``."""
        return self.histories.tensors, self.recurrences.states.tensors

    @property
    def num_pending(self) -> int:
        """Number of stages and microbatches of which something is kept."""
        return len(self.histories) + len(self.balancing) + len(self.recurrences.states)


@dataclass(frozen=True)
class Iteration:
    """One iteration of one rank.

    Attributes:
        results: losses and token counts, filled while the iteration runs.
        slicing: what the slices of a sequence share.
        parts: the parts of the pipeline.
        begins: called when the passes begin, and again if they run again.
    """

    facts: IterationFacts
    results: StepResults
    store: WgradStore
    slicing: Slicing
    parts: Sequence[Part]
    begins: Callable[[], None]

    def evaluate(self) -> None:
        """Run the forwards only."""
        self._run(self.facts.call.iterators, [None] * len(self.facts.call.chunks), lambda: True)

    def train(self, syncs: Sequence[GradSync], overlap: bool, optimizer: PostValidatedOptimizer | None) -> None:
        """Run all passes; if the previous optimizer step is rejected, undo it and run them again from the start.

        Args:
            syncs: gradient synchronization of every chunk.
            overlap: whether data parallelism reduces gradients during the passes.
            optimizer: the optimizer whose steps the passes validate; None if steps are final.

        Raises:
            UserError: the passes may run again, and read data that is not an iterator.
        """
        call = self.facts.call
        overlapped = syncs if overlap else [None] * len(call.chunks)
        if optimizer is not None:
            for iterator in call.iterators:
                Rewindable.check(iterator)
        if optimizer is None or not optimizer.is_pending:
            self._run(call.iterators, overlapped, lambda: True)
            return
        replay = Replay(call.chunks, call.iterators) if optimizer.may_run_again else None
        iterators = call.iterators if replay is None else replay.iterators
        optimizer.before_forwards()

        def make_final() -> None:
            optimizer.validate()
            for sync in syncs:
                sync.hold()

        def validate() -> bool:
            if not optimizer.is_right():
                return False
            make_final()
            call.step.scale_auxiliary_losses(self.facts.boundary.device)
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
        facts, prepared, step = self.facts, self.facts.prepared, self.facts.call.step
        boundary, observer = facts.boundary, facts.observer
        with ExitStack() as context:
            chunks = []
            of_chunks = zip(prepared.stages, facts.call.chunks, iterators, syncs, strict=True)
            for stage, chunk, iterator, sync in of_chunks:
                shared = self.slicing.histories, self.slicing.balancing, self.slicing.recurrences
                slices = SlicedChunk(stage.stage, chunk, iterator, boundary.ends, *shared)
                context.enter_context(slices.hooked())
                chunks.append(StageParts(step, self.results, stage, chunk, slices, self.store, sync))
            stages: dict[int, Stage] = {own.facts.stage: MegatronStage(own) for own in chunks}
            for each in self.parts:
                stages.update(each.stages(facts, chunks))
            for each in self.parts:
                context.enter_context(each.iteration(facts))
            by_op = handlers(stages, facts.channels(), boundary.new_buffer, observer, validate)
            by_op[Compute] = self.store.saved.around(by_op[Compute], facts.call.chunks)
            for each in self.parts:
                by_op |= {**each.handlers(facts), **each.replacing(facts, by_op)}
            executor = Executor(prepared.plan, prepared.rank, by_op, observer)
            self.begins()
            return executor.run()
