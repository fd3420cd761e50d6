"""Runs the passes of the vocabulary on one rank: S, T, L, I and J (``ir.vocabulary``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megatron.zero_bubble.adapter.stage import StepArguments
from megatron.zero_bubble.adapter.vocabulary.facts import VocabularyFacts
from megatron.zero_bubble.adapter.vocabulary.shards import Shards
from megatron.zero_bubble.adapter.vocabulary.transfers import Shapes, Tensors
from megatron.zero_bubble.ir import Kind, Pass
from megatron.zero_bubble.kernels import vocabulary
from megatron.zero_bubble.wgrad.accumulate import GradAccumulator
from megatron.zero_bubble.wgrad.grad_sync import GradSync
from megatron.zero_bubble.wgrad.store import Product

_METHODS = {Kind.S: "_softmax", Kind.T: "_weights", Kind.L: "_loss", Kind.I: "_look_up", Kind.J: "_rows"}


class TensorParallel(NamedTuple):
    """How tensor-parallel ranks share the work of a shard: each has rows of its own.

    Attributes:
        group: the tensor-parallel ranks.
        divides_sequence: whether hidden states are divided among them along the sequence.
    """

    group: dist.ProcessGroup
    divides_sequence: bool

    def whole_sequence(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens, (s, b, h)."""
        return tensor_parallel.gather_from_sequence_parallel_region(hidden) if self.divides_sequence else hidden

    def added(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add what the ranks computed, (s, b, h) -> (s/t, b, h)."""
        if self.divides_sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden)

    def softmax(self, own: vocabulary.LocalSoftmax) -> vocabulary.LocalSoftmax:
        """The softmax over the rows of all tensor-parallel ranks, from that over those of this rank."""
        if self.group.size() == 1:
            return own
        parts = [torch.empty_like(own.statistics) for _ in range(self.group.size())]
        dist.all_gather(parts, own.statistics, group=self.group)
        whole = vocabulary.combined(parts)
        probabilities = own.probabilities.mul_(vocabulary.share(own.statistics, whole)[..., None])
        return own._replace(probabilities=probabilities, statistics=whole)


class VocabularyStage:
    """The shards of one rank during one iteration.

    Args:
        step: arguments of the forward-backward function.
        facts: properties of the passes that follow from the schedule.
        shards: the rank's rows of embedding and output layer.
        shapes: shapes of a microbatch.
        tensor: the tensor-parallel ranks.
        loss_of: on the rank of the last stage, returns the loss of a microbatch from those of its tokens, (b, s).
        read_tokens: on the rank of the first stage, returns the tokens of a microbatch, (b, s).
        accumulate: accumulates the gradients of the weights.
        sync: gradient synchronization of the chunk with the shards; None if data parallelism reduces after the passes.
    """

    def __init__(
        self,
        step: StepArguments,
        facts: VocabularyFacts,
        shards: Shards,
        shapes: Shapes,
        tensor: TensorParallel,
        loss_of: Callable[[int, torch.Tensor], torch.Tensor] | None,
        read_tokens: Callable[[int], torch.Tensor] | None,
        accumulate: GradAccumulator,
        sync: GradSync | None,
    ) -> None:
        self._step = step
        self._facts = facts
        self._shards = shards
        self._shapes = shapes
        self._tensor = tensor
        self._loss_of = loss_of
        self._read_tokens = read_tokens
        self._accumulate = accumulate
        self._sync = sync

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run one pass; ``ir.Vocabulary`` defines its inputs and outputs, ``VocabularyTransfers`` their tensors."""
        run: Callable[[Pass, Sequence[Any]], Sequence[Any]] = getattr(self, _METHODS[work.kind])
        return run(work, inputs)

    @torch.no_grad()
    def _softmax(self, _work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        hidden, labels = inputs[0]
        output, trains = self._shards.output, not self._step.forward_only
        weight = output(None)
        whole = self._tensor.whole_sequence(hidden)
        own = vocabulary.local_softmax(whole, weight, labels.t().contiguous(), output.rows)
        softmax = self._tensor.softmax(own)
        if not trains:
            return ((softmax.statistics,),)
        gradient: Tensors = ()
        if self._facts.algorithm == 2:
            parts = vocabulary.hidden_gradient_parts(softmax, weight)
            gradient = tuple(self._tensor.added(part) for part in parts)
        return (softmax.statistics, *gradient), (softmax, hidden)

    def _loss(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        losses, maximum, total, *gradient = inputs[0]
        assert self._loss_of is not None, "L runs where the last stage is"
        step, scaled = self._step, self._step.config.grad_scale_func
        leaf = losses.t().contiguous().requires_grad_(not step.forward_only)
        loss = self._loss_of(work.microbatch, leaf)
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
        return factors, (of_hidden * self._shapes.own(of_losses)[..., None]).to(of_hidden.dtype)

    @torch.no_grad()
    def _weights(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        (of_losses, maximum, total), (softmax, hidden) = inputs
        weight = self._shards.output.used_weight
        whole = torch.stack([maximum, total])
        grad = vocabulary.logits_gradient(softmax, whole, of_losses).to(weight.dtype)
        x = self._tensor.whole_sequence(hidden)
        by_kernel = self._step.config.gradient_accumulation_fusion
        product = Product(weight, None, x.flatten(0, 1), grad.flatten(0, 1), by_kernel)
        with self._synchronized(work):
            self._accumulate.add([[product]], ready=self._is_ready(work))
        return ((self._tensor.added(torch.matmul(grad, weight)),),) if self._facts.algorithm == 1 else ()

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

    def _synchronized(self, work: Pass) -> AbstractContextManager[None]:
        if self._sync is None:
            return nullcontext()
        return self._sync.ready() if self._is_ready(work) else self._sync.paused()
