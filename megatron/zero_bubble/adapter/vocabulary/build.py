"""Makes the stages of a rank in a pipeline that divides the vocabulary over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.adapter.boundary import Boundary
from megatron.zero_bubble.adapter.stage import MegatronStage, StageParts
from megatron.zero_bubble.adapter.vocabulary.facts import VocabularyFacts
from megatron.zero_bubble.adapter.vocabulary.logits import Logits, SavedForT
from megatron.zero_bubble.adapter.vocabulary.passes import VocabularyStage
from megatron.zero_bubble.adapter.vocabulary.shards import Shards
from megatron.zero_bubble.adapter.vocabulary.stages import FirstStage, LastStage
from megatron.zero_bubble.adapter.vocabulary.tensor_parallel import TensorParallel
from megatron.zero_bubble.adapter.vocabulary.transfers import Shapes, VocabularyTransfers
from megatron.zero_bubble.ir import Op, Pass, Plan
from megatron.zero_bubble.ir.passes import VOCABULARY
from megatron.zero_bubble.runtime.collectives import Lanes, collective_handlers
from megatron.zero_bubble.runtime.handler import Handler
from megatron.zero_bubble.runtime.handlers import Stage
from megatron.zero_bubble.runtime.observer import IterationObserver
from megatron.zero_bubble.wgrad.accumulate import GradAccumulator


@dataclass(frozen=True)
class VocabularyStages:
    """Makes the stages of one rank; implements ``adapter.iteration.StageMaker``.

    Attributes:
        facts: properties of the passes of the vocabulary that follow from the schedule.
        boundary: shapes of the tensors between stages.
        tensor: the tensor-parallel group.
        lanes: run the collectives.
        accumulate: accumulates the gradients of the weights.
        logits: computes logits, and their gradients.
        saved: notes what S saves for T.
    """

    facts: VocabularyFacts
    boundary: Boundary
    tensor: dist.ProcessGroup
    lanes: Lanes
    accumulate: GradAccumulator
    logits: Logits
    saved: SavedForT

    def make(self, parts: Sequence[StageParts]) -> Mapping[int, Stage]:
        """The stages of the rank, which also run the passes of the vocabulary."""
        shards = Shards.of(parts[0].model)
        stages: dict[int, MegatronStage] = {}
        loss_of = read_tokens = None
        for own in parts:
            if own.facts.is_last:
                stages[own.facts.stage] = last = LastStage(own, shards.output, self.facts.algorithm)
                loss_of = last.loss
            elif own.facts.stage == 0:
                stages[0] = first = FirstStage(own, shards.embedding)
                read_tokens = first.read_tokens
            else:
                stages[own.facts.stage] = MegatronStage(own)
        step, *_, sync = parts[0]  # the first chunk has the shards
        divides = step.config.sequence_parallel
        vocabulary = VocabularyStage(
            step,
            self.facts,
            shards,
            self._shapes(shards),
            TensorParallel(self.tensor, divides),
            self.logits,
            self.saved,
            loss_of,
            read_tokens,
            self.accumulate,
            sync,
        )
        return {number: _WithVocabulary(stage, vocabulary) for number, stage in stages.items()}

    def handlers(
        self, plan: Plan, parts: Sequence[StageParts], observer: IterationObserver | None
    ) -> Mapping[type[Op], Handler]:
        """The handlers of the collectives."""
        shapes = self._shapes(Shards.of(parts[0].model))
        transfers = VocabularyTransfers(shapes, self.facts.algorithm, trains=not parts[0].step.forward_only)
        return collective_handlers(plan, self.lanes, transfers, observer)

    def _shapes(self, shards: Shards) -> Shapes:
        hidden, num_tokens = self.boundary.activation, self.boundary.ends[-1]
        part = self.tensor.rank() if hidden[0] < num_tokens else 0
        return Shapes(hidden, num_tokens, part, shards.embedding.weight.dtype, self.boundary.device)


class _WithVocabulary:
    """One stage, and the passes of the vocabulary that are named after it."""

    def __init__(self, stage: MegatronStage, vocabulary: VocabularyStage) -> None:
        self._stage, self._vocabulary = stage, vocabulary

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """See ``runtime.handlers.Stage``."""
        return (self._vocabulary if work.kind in VOCABULARY else self._stage).run(work, inputs)
