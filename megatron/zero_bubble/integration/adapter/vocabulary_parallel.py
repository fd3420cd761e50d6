"""Vocabulary parallelism as a part of a pipeline, which divides the vocabulary over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.zero_bubble.core.ir import Op, Pass
from megatron.zero_bubble.core.ir.passes import VOCABULARY_KINDS
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.engine.runtime.collectives import collective_handlers
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.engine.runtime.handlers import Stage
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Part
from megatron.zero_bubble.integration.adapter.stage import MegatronStage, StageParts
from megatron.zero_bubble.integration.adapter.stage_outputs import looked_up_tokens, stage_of_predictions
from megatron.zero_bubble.integration.adapter.vocabulary.logits import KeptLogits, Logits, RecomputedLogits, SavedForT
from megatron.zero_bubble.integration.adapter.vocabulary.looked_up import Passing, Predicting
from megatron.zero_bubble.integration.adapter.vocabulary.passes import VocabularyStage
from megatron.zero_bubble.integration.adapter.vocabulary.predictions import PredictedLosses
from megatron.zero_bubble.integration.adapter.vocabulary.shards import VocabularyShards, language_model_of
from megatron.zero_bubble.integration.adapter.vocabulary.stages import FirstStage, LastStage, ReadingStage
from megatron.zero_bubble.integration.adapter.vocabulary.tensor_parallel import TensorParallel
from megatron.zero_bubble.integration.adapter.vocabulary.transfers import Shapes, VocabularyTransfers


class VocabularyParallel(Part):
    """Divides the vocabulary over the ranks, if the schedule does.

    Args:
        accumulate: accumulates the gradients of the weights.
        divided: says whether T computes the logits again, or S keeps them for it; None without such passes.

    Attributes:
        saved: notes what S saves for T.
    """

    def __init__(self, accumulate: GradAccumulator, divided: Divided | None) -> None:
        self._accumulate = accumulate
        recomputes = divided is not None and divided.recompute_logits
        self._logits: Logits = RecomputedLogits() if recomputes else KeptLogits()
        self.saved = SavedForT()

    def stages(self, iteration: IterationFacts, chunks: Sequence[StageParts]) -> Mapping[int, Stage]:
        """The stages of the rank, which also run the passes of the vocabulary."""
        facts = iteration.prepared.vocabulary
        if facts is None:
            return {}
        shards = VocabularyShards.of(chunks[0].model)
        step, *_, sync = chunks[0]  # the first chunk has the shards
        predicting = stage_of_predictions(step.config, iteration.prepared.schedule.num_stages)
        tensor = TensorParallel(iteration.call.groups.tp, step.config.sequence_parallel)
        stages: dict[int, Stage] = {}
        loss_of = read_tokens = None
        for own in chunks:
            stage: MegatronStage
            if own.facts.is_last:
                predicted = None if predicting is None else _predicted(own, shards, tensor)
                stage = last = LastStage(own, shards.output, facts.algorithm, predicted)
                loss_of = last.loss
            elif own.facts.stage == 0:
                stage = first = (
                    FirstStage(own, shards.embedding)
                    if predicting is None
                    else ReadingStage(own, shards.embedding, tensor, predicting > 0)
                )
                read_tokens = first.read_tokens
            else:
                stage = MegatronStage(own)
            stages[own.facts.stage] = _with_rows(stage, own, predicting, shards, tensor)
        vocabulary = VocabularyStage(
            step,
            facts,
            shards,
            _shapes(iteration, shards),
            tensor,
            self._logits,
            self.saved,
            loss_of,
            read_tokens,
            self._accumulate,
            sync,
        )
        return {number: _WithVocabulary(stage, vocabulary) for number, stage in stages.items()}

    def handlers(self, iteration: IterationFacts) -> Mapping[type[Op], Handler]:
        facts, plan = iteration.prepared.vocabulary, iteration.prepared.plan
        if facts is None:
            return {}
        shards = VocabularyShards.of(iteration.call.chunks[0])
        shapes = _shapes(iteration, shards), _shapes_of_embedding(iteration, shards)
        trains, num_ranks = not iteration.forward_only, plan.schedule.num_ranks
        transfers = VocabularyTransfers(*shapes, num_ranks, facts.algorithm, trains)
        return collective_handlers(plan, iteration.links.lanes, transfers, iteration.observer)

    @property
    def num_pending(self) -> int:
        """Number of S whose logits are kept for T."""
        return len(self.saved)


def _predicted(own: StageParts, shards: VocabularyShards, tensor: TensorParallel) -> PredictedLosses:
    return PredictedLosses(language_model_of(own.model), shards.output, tensor.num_parts)


def _with_rows(
    stage: MegatronStage, own: StageParts, predicting: int | None, shards: VocabularyShards, tensor: TensorParallel
) -> Stage:
    """A stage that uses the rows that come with the hidden states, or passes them on, where any stage predicts."""
    if predicting is None or not 0 < own.facts.stage <= predicting:
        return stage
    if own.facts.stage < predicting:
        return Passing(stage)
    return Predicting(stage, shards.embedding, tensor, own.step.forward_only)


def _shapes(iteration: IterationFacts, shards: VocabularyShards) -> Shapes:
    """Those at the output layer: the hidden states of the next token, and of each depth of prediction."""
    boundary, tensor, config = iteration.boundary, iteration.call.groups.tp, iteration.call.step.config
    # With context parallelism, every pipeline has its part of a sequence.
    length, *rest = boundary.hidden
    hidden = length * (1 + (getattr(config, "mtp_num_layers", None) or 0)), *rest
    num_tokens = hidden[0] * (tensor.size() if config.sequence_parallel else 1)
    part = tensor.rank() if config.sequence_parallel else 0
    return Shapes(hidden, num_tokens, part, shards.embedding.weight.dtype, boundary.device)


def _shapes_of_embedding(iteration: IterationFacts, shards: VocabularyShards) -> Shapes:
    boundary, config = iteration.boundary, iteration.call.step.config
    num_tokens = looked_up_tokens(boundary.hidden, config, iteration.call.groups)
    return Shapes(boundary.hidden, num_tokens, 0, shards.embedding.weight.dtype, boundary.device)


class _WithVocabulary:
    """One stage, and the passes of the vocabulary that are named after it."""

    def __init__(self, stage: Stage, vocabulary: VocabularyStage) -> None:
        self._stage, self._vocabulary = stage, vocabulary

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """See ``runtime.handlers.Stage``."""
        return (self._vocabulary if work.kind in VOCABULARY_KINDS else self._stage).run(work, inputs)
