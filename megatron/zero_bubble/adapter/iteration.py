"""One iteration of one rank: its stages, made for it, and the plan they run; twice where a step must be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.zero_bubble.adapter.boundary import Boundary
from megatron.zero_bubble.adapter.stage import MegatronStage, StageFacts, StepArguments, StepResults
from megatron.zero_bubble.ir import Plan
from megatron.zero_bubble.optimizer.post_validation import PostValidatedOptimizer
from megatron.zero_bubble.optimizer.replay import Replay
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.handlers import handlers
from megatron.zero_bubble.runtime.observer import IterationObserver
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.wgrad.grad_sync import GradSync
from megatron.zero_bubble.wgrad.store import WgradStore


@dataclass(frozen=True)
class Iteration:
    """Everything that the passes of one iteration work on.

    Attributes:
        stages: what the schedule says of this rank's stages, one for each chunk.
        results: gathered while it runs.
        observer: sees every op, message and wait; None where the iteration is not observed.
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
    observer: IterationObserver | None

    def evaluate(self) -> None:
        """Forwards only."""
        self._run(self.iterators, [None] * len(self.chunks), lambda: True)

    def train(self, syncs: Sequence[GradSync], overlap: bool, optimizer: PostValidatedOptimizer | None) -> None:
        """All passes, those before the validation of the last step twice if it was wrong.

        Args:
            syncs: of every chunk.
            overlap: whether the passes tell data parallelism which gradients are ready.
            optimizer: takes steps ahead; None where every step is final.
        """
        told = syncs if overlap else [None] * len(self.chunks)
        if optimizer is None or not optimizer.is_pending:
            self._run(self.iterators, told, lambda: True)
            return
        replay = Replay(self.chunks, self.iterators) if optimizer.may_run_again else None
        iterators = self.iterators if replay is None else replay.iterators
        optimizer.before_forwards()

        def validate() -> bool:
            right = optimizer.validate()
            for sync in syncs:
                sync.hold()
            if right:
                self.step.scale_auxiliary_losses(self.boundary.device)
                if replay is not None:
                    replay.confirm()
            return right

        if not self._run(iterators, told, validate):
            assert replay is not None, "nothing runs again that could not be wrong"
            replay.rewind()
            self.results.clear()
            self.store.clear()
            self._run(iterators, told, lambda: True)

    def _run(self, iterators: Sequence[Any], syncs: Sequence[GradSync | None], validate: Callable[[], bool]) -> bool:
        """Make the stages and execute the plan; False when it stopped, to be run again."""
        stages = {
            facts.stage: MegatronStage(self.step, self.results, facts, chunk, iterator, self.store, sync)
            for facts, chunk, iterator, sync in zip(self.stages, self.chunks, iterators, syncs, strict=True)
        }
        by_op = handlers(stages, self.transport, self.boundary.new_buffer, self.observer, validate)
        return Executor(self.plan, self.transport.rank, by_op, self.observer).run()
