"""Runs the passes of one stage, a chunk of a Megatron model, with megatron-core's own step functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_type

from megatron.zero_bubble.core.ir import Kind, Pass, Schedule
from megatron.zero_bubble.engine.optimizer.log_sums import counted_in_part
from megatron.zero_bubble.engine.wgrad.grad_sync import GradSync
from megatron.zero_bubble.engine.wgrad.store import WgradStore
from megatron.zero_bubble.integration.adapter import several
from megatron.zero_bubble.integration.adapter.placement import as_pipeline_rank, megatron_rank
from megatron.zero_bubble.integration.adapter.recompute import recompute
from megatron.zero_bubble.integration.adapter.slices import SlicedChunk
from megatron.zero_bubble.integration.adapter.versions import set_auxiliary_scales, supported_kwargs


@dataclass(frozen=True)
class StepArguments:
    """The arguments of Megatron's forward-backward function that passes need."""

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    config: Any
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None

    def scale_auxiliary_losses(self, device: torch.device, share: float = 1.0) -> None:
        """Set the scales of the auxiliary losses of experts, multi-token prediction and attention.

        Every forward sets them, but the optimizer step may have changed them since the last forward.

        Args:
            share: share of a sequence's tokens in the slice whose backward follows. The auxiliary loss of experts is a
                mean over the tokens of a slice; with a loss per token, Megatron itself multiplies it by their number.
        """
        config = self.config
        set_auxiliary_scales(config, self.num_microbatches, self.cp_size, device)
        if share != 1.0 and getattr(config, "num_moe_experts", None) and not config.calculate_per_token_loss:
            MoEAuxLossAutoScaler.set_loss_scale(MoEAuxLossAutoScaler.main_loss_backward_scale * share)


@dataclass
class StepResults:
    """Results of one iteration on this rank.

    Attributes:
        num_tokens: number of tokens; a 0-dim int tensor on the compute device.
        forward_data: losses of the microbatches, on the rank of the last stage.
    """

    num_tokens: torch.Tensor
    forward_data: list[Any]

    def clear(self) -> None:
        self.num_tokens.zero_()
        self.forward_data.clear()


_PAIRED = (Kind.F, Kind.B, Kind.BW)
"""The forward of a microbatch on a stage, and its backward."""


@dataclass(frozen=True)
class StageFacts:
    """Properties of one stage that follow from the schedule.

    Attributes:
        is_last: whether the stage computes the loss.
        vp_stage: index of the stage among the rank's chunks; None if the rank has one chunk.
        megatron_rank: pipeline rank under which Megatron must see this process; None for its actual rank.
        last_backward: microbatch and slice of the last backward pass; None if there is none.
        max_in_flight: maximum number of microbatches between their first F and their last backward pass.
        fused: (microbatch, slice) pairs whose backward is a fused BW.
        tail: W passes of the stage after the rank's last F or backward pass.
    """

    stage: int
    is_last: bool
    vp_stage: int | None
    megatron_rank: int | None
    last_backward: tuple[int, int] | None
    max_in_flight: int
    fused: frozenset[tuple[int, int]]
    tail: tuple[Pass, ...]

    @classmethod
    def of(cls, schedule: Schedule, stage: int) -> StageFacts:
        placement = schedule.placement
        rank = placement.stage_to_rank[stage]
        last_backward, in_flight, most = None, 0, 0
        for p in schedule.order[rank]:
            if p.stage != stage or p.kind not in _PAIRED:
                continue
            if p.kind is not Kind.F:
                last_backward = p.microbatch, p.slice
            if p.slice == 0:  # first of the forwards of a microbatch, and last of its backwards
                in_flight += 1 if p.kind is Kind.F else -1
            most = max(most, in_flight)
        vp_stage = placement.chunk_of(stage) if len(placement.stages_of(rank)) > 1 else None
        taken_for = megatron_rank(placement, rank, placement.chunk_of(stage))
        elsewhere = None if taken_for == rank else taken_for
        row = schedule.order[rank]
        tail = takewhile(lambda p: p.kind not in _PAIRED, reversed(row))
        own = tuple(reversed([p for p in tail if p.stage == stage and p.kind is Kind.W]))
        fused = frozenset((microbatch, slice_) for at, microbatch, slice_ in schedule.fused if at == stage)
        return cls(stage, stage in schedule.flow.sinks, vp_stage, elsewhere, last_backward, most, fused, own)


# Method names, because bound methods would form a reference cycle, which keeps a model alive until garbage collection.
_METHODS = {
    Kind.F: "_forward",
    Kind.R: "_recompute",
    Kind.B: "_backward",
    Kind.BW: "_backward",
    Kind.W: "_backward_weight",
}


class StageParts(NamedTuple):
    """What a stage is made of.

    Attributes:
        step: arguments of the forward-backward function.
        results: receives losses and token counts.
        facts: properties of the stage that follow from the schedule.
        model: the chunk, as wrapped by Megatron.
        slices: the slices in which the chunk runs its sequences; has the data iterator of the chunk.
        store: receives the deferred weight gradients of B passes.
        sync: enabled at the last backward of the stage; None if data parallelism reduces after the passes.
    """

    step: StepArguments
    results: StepResults
    facts: StageFacts
    model: torch.nn.Module
    slices: SlicedChunk
    store: WgradStore
    sync: GradSync | None


class MegatronStage:
    """One model chunk during one iteration."""

    def __init__(self, parts: StageParts) -> None:
        step, results, facts, model, slices, store, sync = parts
        self._step = step
        self._results = results
        self._facts = facts
        self._model = model
        self._model_type = get_model_type(model)
        self._slices = slices
        self._batches = slices.batches
        self._reports: list[Any] = []  # of the slices of the current microbatch
        self._store = store
        self._sync = sync

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run one pass; ``ir.Chain`` defines its inputs and outputs."""
        run: Callable[[Pass, Sequence[Any]], Sequence[Any]] = getattr(self, _METHODS[work.kind])
        return run(work, inputs)

    def _forward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the stage's detached output, unless the stage is the last, and the (input, output) for backward.

        ``_slices`` keeps the keys and values for the next slice.
        """
        step = self._step
        x = self._leaf(inputs)
        defers = nullcontext() if step.forward_only else self._store.defer(work, self._splits(work))
        with self._as_stage_rank(), defers, self._slices.forward(work, step.forward_only), self._counted(work):
            y = self._run_model(work, x)
        return self._forwarded(work, x, y)

    def _splits(self, work: Pass) -> bool:
        """Whether linears defer weight gradients in an F or a backward: if the microbatch has a W."""
        return (work.microbatch, work.slice) not in self._facts.fused

    def _forwarded(self, work: Pass, x: Any, y: Any) -> Sequence[Any]:
        step = self._step
        if self._reports and self._slices.is_last(work):
            self._results.forward_data.append(self._slices.report(self._reports))
            self._reports.clear()
        output = self._output(y)
        history = () if self._slices.is_last(work) else (None,)
        if step.forward_only:
            return *output, *history
        if not isinstance(y, tuple):  # of several, one may be an operand of another
            schedules.deallocate_output_tensor(y, step.config.deallocate_pipeline_outputs)
        return *output, (x, y), *history

    def _leaf(self, inputs: Sequence[Any]) -> Any:
        """The input of F as a leaf of autograd, or a list of them; None on the first stage, which reads tokens."""
        return several.leaves(inputs[0], not self._step.forward_only) if self._facts.stage else None

    def _run_model(self, work: Pass, x: Any) -> Any:
        step = self._step
        return self._forward_step(work, x, step.forward_step_func, self._reports, step.collect_non_loss_data)

    def _forward_step(
        self,
        work: Pass,
        x: Any,
        forward_step_func: Callable[..., Any],
        reports: list[Any],
        collect_non_loss_data: bool,
    ) -> Any:
        """Call megatron-core's forward step, which also computes the loss on the last stage."""
        step = self._step
        y, num_tokens = schedules.forward_step(
            forward_step_func,
            self._batches,
            self._model,
            step.num_microbatches,
            x,
            reports,
            step.config,
            collect_non_loss_data=collect_non_loss_data,
            checkpoint_activations_microbatch=self._recomputes(work.microbatch),
            is_first_microbatch=schedules.check_first_val_step(
                step.first_val_step, step.forward_only, work.microbatch == work.slice == 0
            ),
            current_microbatch=work.microbatch,
            vp_stage=self._facts.vp_stage,
            **supported_kwargs(schedules.forward_step, cp_group_size=step.cp_size, is_last_stage=self._facts.is_last),
        )
        if work.slice == 0:  # the number of tokens of the whole microbatch
            self._results.num_tokens += num_tokens
        if isinstance(x, list):
            (y,) = y
        return y if self._facts.is_last else several.value_of(y)

    def _output(self, y: Any) -> Sequence[Any]:
        return () if self._facts.is_last else (several.detached(y),)

    def _recompute(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the (input, output) of F, whose graph has the activations of checkpointed layers again."""
        ((_, y),) = inputs
        defers = self._store.defer(work, self._splits(work))
        with self._as_stage_rank(), defers, self._slices.at(work), self._counted(work):
            recompute(y)
        return inputs

    def _backward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the gradient of the stage's input, except on the first stage.

        The store keeps the operands of W, and ``_slices`` the gradients of keys and values for the previous slice.
        """
        (x, y), received = self._received(inputs)
        self._before_backward(work)
        if self._slices.is_cut and self._has_experts:
            self._step.scale_auxiliary_losses(self._results.num_tokens.device, self._slices.share(work))
        defers = self._store.defer(work, self._splits(work))
        with self._as_stage_rank(), defers, self._slices.at(work), self._counted(work):
            grad = self._backward_step(work, several.differentiable(x), y, received)
        return self._backwarded(work, several.gradients_of(x, grad) if isinstance(x, list) else grad)

    def _before_backward(self, work: Pass) -> None:
        """Enable the reduction of gradients before the last backward."""
        if self._sync is not None and (work.microbatch, work.slice) == self._facts.last_backward:
            self._sync.enable()

    def _backward_step(self, work: Pass, x: Any, y: Any, received: Any) -> Any:
        """Call megatron-core's backward step; returns the gradient of ``x``."""
        if isinstance(y, tuple):
            return several.backward(x, y, received)
        of_type = supported_kwargs(schedules.backward_step, model_type=self._model_type)
        return schedules.backward_step(x, y, received, config=self._step.config, **of_type)

    def _backwarded(self, work: Pass, grad: Any) -> Sequence[Any]:
        output = self._input_gradient(grad)
        assert None not in output, f"{work} has a consumer but no output: no gradient reached the stage's input"
        operands, history = ((None,) if work.kind is Kind.B else ()), ((None,) if work.slice else ())
        return *output, *operands, *history

    def _received(self, inputs: Sequence[Any]) -> tuple[tuple[Any, Any], Any]:
        """Input and output of F, and the gradient of the output; None for the loss."""
        return (inputs[0], None) if self._facts.is_last else (inputs[1], inputs[0])

    def _input_gradient(self, gradient: torch.Tensor) -> Sequence[Any]:
        """What B returns for the previous stage."""
        return (gradient,) if self._facts.stage else ()

    def _backward_weight(self, work: Pass, _inputs: Sequence[Any]) -> Sequence[Any]:
        if self._sync is None or not self._sync.enabled:
            self._store.run(work)
            return ()
        if len(self._facts.tail) > 1 and work == self._facts.tail[0]:
            self._store.group(self._facts.tail)
        last = self._facts.last_backward
        self._store.run(work, lambda origin: (origin.microbatch, origin.slice) != last, self._sync.paused)
        return ()

    @property
    def _has_experts(self) -> bool:
        return getattr(self._step.config, "num_moe_experts", None) is not None

    def _counted(self, work: Pass) -> AbstractContextManager[None]:
        """Context in which the auxiliary losses of a slice count for the log by its share of the sequence."""
        return counted_in_part(self._slices.share(work)) if self._slices.is_cut and self._has_experts else nullcontext()

    def _as_stage_rank(self) -> AbstractContextManager[None]:
        taken_for = self._facts.megatron_rank
        return nullcontext() if taken_for is None else as_pipeline_rank(taken_for)

    def _recomputes(self, microbatch: int) -> bool | None:
        """Megatron's ``num_microbatches_with_partial_activation_checkpoints`` (arXiv 2205.05198, appendix C)."""
        partial = self._step.config.num_microbatches_with_partial_activation_checkpoints
        return None if partial is None else microbatch % self._facts.max_in_flight >= partial
