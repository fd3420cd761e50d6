"""The first and the last stage of a pipeline whose vocabulary is divided over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.integration.adapter.stage import MegatronStage, StageParts
from megatron.zero_bubble.integration.adapter.versions import given_to, supported_kwargs
from megatron.zero_bubble.integration.adapter.vocabulary.batches import ReadAhead
from megatron.zero_bubble.integration.adapter.vocabulary.looked_up import rows_among, with_token_0
from megatron.zero_bubble.integration.adapter.vocabulary.predictions import PredictedLosses
from megatron.zero_bubble.integration.adapter.vocabulary.shards import EmbeddingShard, OutputShard, language_model_of
from megatron.zero_bubble.integration.adapter.vocabulary.tensor_parallel import TensorParallel


class _Tokens(Exception):
    """Ends the forward step of I at the call of the model."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.ids = ids


def _stop(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = given_to(model, args, kwargs)
    if given.get("decoder_input") is not None or given.get("input_ids") is None:
        raise UserError(
            "with vocabulary parallelism, the model must get tokens, which all ranks look up; got decoder_input in "
            "their place; pass input_ids, or train with --zero-bubble-vocabulary-parallel off"
        )
    raise _Tokens(given["input_ids"])


class FirstStage(MegatronStage):
    """The stage with the embedding: its F takes the rows that all I looked up, and its B returns their gradient.

    Args:
        embedding: the rank's shard of the embedding.
    """

    def __init__(self, parts: StageParts, embedding: EmbeddingShard) -> None:
        super().__init__(parts)
        self._embedding = embedding
        self._read_ahead = ReadAhead(self._batches)
        if self._batches is not None:  # with tensor parallelism, one rank reads for all
            self._batches = self._read_ahead

    def read_tokens(self, microbatch: int) -> torch.Tensor:
        """The tokens of a microbatch, (b, s): what the job's forward step passes to the model."""
        model, recomputes = language_model_of(self._model), self._recomputes(microbatch)
        hook = model.register_forward_pre_hook(_stop, with_kwargs=True)
        more = () if recomputes is None else (recomputes,)
        try:
            with self._as_stage_rank(), self._read_ahead.ahead(microbatch):
                self._step.forward_step_func(self._batches, self._model, *more)
        except _Tokens as found:
            return found.ids.contiguous()
        finally:
            hook.remove()
        raise UserError(
            "with vocabulary parallelism, the forward step must run the model that it is given, whose tokens are "
            "looked up before its forward; it did not; train with --zero-bubble-vocabulary-parallel off"
        )

    def _leaf(self, inputs: Sequence[Any]) -> torch.Tensor:
        (rows,) = inputs[0]
        return rows.detach().requires_grad_(not self._step.forward_only)

    def _run_model(self, work: Pass, x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None, "the first stage takes rows of the embedding"
        with self._read_ahead.again(work.microbatch), self._embedding.delivering(self._rows_of(work, x)):
            return super()._run_model(work, None)

    def _rows_of(self, _work: Pass, rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """What the embedding returns for the tokens with which the model calls it."""
        return lambda _: rows

    def _input_gradient(self, gradient: torch.Tensor) -> Sequence[Any]:
        return ((gradient,),)


class ReadingStage(FirstStage):
    """A first stage whose rows another one uses too, or itself: that of multi-token prediction.

    Args:
        tensor: the tensor-parallel ranks.
        passes: whether another stage uses them, to which they travel with the tokens, as ``looked_up`` describes.
    """

    def __init__(self, parts: StageParts, embedding: EmbeddingShard, tensor: TensorParallel, passes: bool) -> None:
        super().__init__(parts, embedding)
        self._tensor, self._passes = tensor, passes
        self._tokens: dict[int, torch.Tensor] = {}  # of the microbatches between I and F

    def read_tokens(self, microbatch: int) -> torch.Tensor:
        """The tokens of a microbatch, and token 0."""
        self._tokens[microbatch] = ids = with_token_0(super().read_tokens(microbatch), self._tensor.num_parts)
        return ids

    def _rows_of(self, work: Pass, rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return rows_among(rows, self._tokens[work.microbatch])

    def _forward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        outputs, tokens = super()._forward(work, inputs), self._tokens.pop(work.microbatch)
        if not self._passes:
            return outputs
        (rows,), (hidden, *more) = inputs[0], outputs
        with torch.no_grad():
            passed = self._tensor.added(rows.transpose(0, 1).contiguous())
        return (hidden, passed, tokens), *more

    def _backward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        if not self._passes:
            return super()._backward(work, inputs)
        (gradient, passed), *others = inputs
        ((own,), *more) = super()._backward(work, (gradient, *others))
        with torch.no_grad():
            return (own + self._tensor.whole_sequence(passed).transpose(0, 1),), *more


class LastStage(MegatronStage):
    """The stage before the output layer: its F returns the hidden states and labels, and keeps the job's loss function
    for L; its B takes the gradient of the hidden states.

    Args:
        output: the rank's shard of the output layer.
        algorithm: that of the schedule.
        predicted: the losses of multi-token prediction; None without it.
    """

    def __init__(
        self, parts: StageParts, output: OutputShard, algorithm: Algorithm, predicted: PredictedLosses | None
    ) -> None:
        super().__init__(parts)
        self._shard = output
        self._algorithm = algorithm
        self._predicted = predicted
        self._loss_functions: dict[int, Any] = {}  # of the microbatches between F and L
        self._labels: torch.Tensor | None = None

    def loss(self, microbatch: int, losses: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """The loss of a microbatch, from those of its tokens, (b, s).

        megatron-core's forward step computes, scales, counts and reports it, and takes ``losses`` for the output of a
        model: not all versions have a function for the loss alone.

        Args:
            total: the statistic of all shards, (b, s).
        """
        step, function = self._step, self._loss_functions.pop(microbatch)
        with self._as_stage_rank():
            if self._predicted is not None:
                losses = self._predicted.losses(microbatch, losses, total.log())
            output = losses, function
            loss, num_tokens = schedules.forward_step(
                lambda *_: output,
                None,
                self._model,
                step.num_microbatches,
                None,
                self._results.forward_data,
                step.config,
                collect_non_loss_data=step.collect_non_loss_data,
                vp_stage=self._facts.vp_stage,
                **supported_kwargs(schedules.forward_step, cp_group_size=step.cp_size, is_last_stage=True),
            )
        self._results.num_tokens += num_tokens
        return loss

    def _run_model(self, work: Pass, x: torch.Tensor | None) -> torch.Tensor:
        def forward_step(*args: Any) -> tuple[torch.Tensor, Any]:
            with nullcontext() if self._predicted is None else self._predicted.forward(work.microbatch):
                _, self._loss_functions[work.microbatch] = self._step.forward_step_func(*args)
            hidden, self._labels = self._shard.take()
            return hidden, _no_loss

        # On the last stage, a forward step returns an output without computing a loss only if it collects other data.
        return self._forward_step(work, x, forward_step, [], collect_non_loss_data=True)

    def _output(self, y: torch.Tensor) -> Sequence[Any]:
        labels, self._labels = self._labels, None
        assert labels is not None, "F has run"
        return ((y.detach(), labels),)

    def _received(self, inputs: Sequence[Any]) -> tuple[tuple[Any, torch.Tensor], torch.Tensor | None]:
        gradient = inputs[0][0] if self._algorithm == 1 else inputs[0]
        return inputs[-1], gradient


def _no_loss(_hidden: torch.Tensor, non_loss_data: bool) -> None:
    """In place of the job's loss function in F of the last stage."""
    assert non_loss_data, "L computes the loss"
