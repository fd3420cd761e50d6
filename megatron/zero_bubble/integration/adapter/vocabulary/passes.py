"""Runs the passes of the vocabulary on one rank: S, T, L, I and J (``ir.vocabulary``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron.zero_bubble.core.ir import Kind, Pass
from megatron.zero_bubble.engine.kernels import vocabulary
from megatron.zero_bubble.engine.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.engine.wgrad.grad_sync import GradSync
from megatron.zero_bubble.engine.wgrad.gradients import Product
from megatron.zero_bubble.integration.adapter.stage import StepArguments
from megatron.zero_bubble.integration.adapter.vocabulary.facts import VocabularyFacts
from megatron.zero_bubble.integration.adapter.vocabulary.logits import Logits, SavedForT
from megatron.zero_bubble.integration.adapter.vocabulary.shards import VocabularyShards
from megatron.zero_bubble.integration.adapter.vocabulary.tensor_parallel import TensorParallel
from megatron.zero_bubble.integration.adapter.vocabulary.transfers import Shapes

_METHODS = {Kind.S: "_softmax", Kind.T: "_weights", Kind.L: "_loss", Kind.I: "_look_up", Kind.J: "_rows"}


class VocabularyStage:
    """The shards of one rank during one iteration.

    Args:
        step: arguments of the forward-backward function.
        facts: properties of the passes that follow from the schedule.
        shards: the rank's rows of embedding and output layer.
        shapes: shapes of the hidden states of a microbatch at the output layer.
        tensor: the tensor-parallel ranks.
        logits: computes logits, and their gradients.
        saved: notes what S saves for T.
        loss_of: on the rank of the last stage, returns the loss of a microbatch from those of its tokens, (b, s), and
            the totals of their statistics.
        read_tokens: on the rank of the first stage, returns the tokens of a microbatch, (b, s).
        accumulate: accumulates the gradients of the weights.
        sync: gradient synchronization of the chunk with the shards; None if data parallelism reduces after the passes.
    """

    def __init__(
        self,
        step: StepArguments,
        facts: VocabularyFacts,
        shards: VocabularyShards,
        shapes: Shapes,
        tensor: TensorParallel,
        logits: Logits,
        saved: SavedForT,
        loss_of: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None,
        read_tokens: Callable[[int], torch.Tensor] | None,
        accumulate: GradAccumulator,
        sync: GradSync | None,
    ) -> None:
        self._step = step
        self._facts = facts
        self._shards = shards
        self._shapes = shapes
        self._tensor = tensor
        self._logits = logits
        self._saved = saved
        self._loss_of = loss_of
        self._read_tokens = read_tokens
        self._accumulate = accumulate
        self._sync = sync

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run one pass; ``ir.Vocabulary`` defines its inputs and outputs, ``VocabularyTransfers`` their tensors."""
        run: Callable[[Pass, Sequence[Any]], Sequence[Any]] = getattr(self, _METHODS[work.kind])
        return run(work, inputs)

    @torch.no_grad()
    def _softmax(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        hidden, labels = inputs[0]
        output, trains = self._shards.output, not self._step.forward_only
        prepares = trains and self._facts.algorithm == 2
        made = self._logits.softmax(hidden, output(None), labels.t().contiguous(), output.rows, self._tensor, prepares)
        part = made.statistics, *made.gradient
        if not trains:
            return (part,)
        self._saved.add(work, made.saved)
        return part, made.saved

    def _loss(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        losses, maximum, total, *gradient = inputs[0]
        assert self._loss_of is not None, "L runs where the last stage is"
        step, scaled = self._step, self._step.config.grad_scale_func
        leaf = losses.t().contiguous().requires_grad_(not step.forward_only)
        loss = self._loss_of(work.microbatch, leaf, total.t())
        if step.forward_only:
            return ()
        if scaled is not None:
            loss = scaled(loss)
        (of_losses,) = torch.autograd.grad(loss, leaf)
        of_losses = of_losses.t().float()
        factors = of_losses, maximum, total
        if self._facts.algorithm == 1:
            return (factors,)
        (of_hidden,) = gradient
        return factors, (of_hidden * self._shapes.own(of_losses)[..., None]).to(self._shapes.dtype)

    @torch.no_grad()
    def _weights(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        (of_losses, maximum, total), saved = inputs
        output = self._shards.output
        weight, by_kernel = output.used_weight, self._step.config.gradient_accumulation_fusion
        x = self._tensor.whole_sequence(saved.hidden)
        whole = torch.stack([maximum, total])
        of_hidden, done = [], 0
        hooked, summed = self._accumulate.is_hooked(weight), None
        for block, of_logits in self._logits.gradients(saved, x, weight, output.rows, whole, of_losses):
            grad = of_logits.to(weight.dtype)
            done += len(block)
            is_last = done == len(x)
            product = Product(weight, None, block.flatten(0, 1), grad.flatten(0, 1), by_kernel)
            if hooked:  # its hooks see the gradient of a microbatch, not of a block
                summed = product.gradient if summed is None else summed.add_(product.gradient)
            else:
                with self._synchronized(work, is_last):
                    self._accumulate.add([[product]], ready=is_last and self._is_ready(work))
            if self._facts.algorithm == 1:
                of_hidden.append(vocabulary.product_in_float32(grad, weight))
        if summed is not None:
            with self._synchronized(work):
                self._accumulate.add_gradient(weight, summed, ready=self._is_ready(work))
        return ((self._tensor.added(torch.cat(of_hidden)),),) if self._facts.algorithm == 1 else ()

    @torch.no_grad()
    def _look_up(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        if inputs:
            ((ids,),) = inputs
        else:
            assert self._read_tokens is not None, "the first rank reads the tokens"
            ids = self._read_tokens(work.microbatch)
        own = (self._shards.embedding(ids),), *(() if self._step.forward_only else (ids,))
        return own if inputs else ((ids,), *own)

    @torch.no_grad()
    def _rows(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        (gradient,), ids = inputs
        embedding = self._shards.embedding
        with self._synchronized(work):
            grad = vocabulary.rows_gradient(gradient, ids, embedding.rows)
            self._accumulate.add_gradient(embedding.weight, grad, ready=self._is_ready(work))
        return ()

    def _is_ready(self, work: Pass) -> bool:
        """Whether data parallelism may reduce the weight of ``work`` afterwards."""
        tied = self._shards.output.used_weight is self._shards.embedding.weight
        return self._sync is not None and self._facts.completes(work, tied)

    def _synchronized(self, work: Pass, is_last: bool = True) -> AbstractContextManager[None]:
        """Context around the accumulation of a gradient, which may be the last one of ``work``."""
        if self._sync is None:
            return nullcontext()
        return self._sync.ready() if is_last and self._is_ready(work) else self._sync.paused()
