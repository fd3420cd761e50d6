"""A stage that is a chunk of a Megatron model; its passes run through megatron-core's own step functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import get_model_type

from megatron.zero_bubble.adapter.placement import as_pipeline_rank, megatron_rank
from megatron.zero_bubble.adapter.versions import supported_kwargs
from megatron.zero_bubble.ir import Kind, Pass, Schedule
from megatron.zero_bubble.wgrad.grad_sync import GradSync
from megatron.zero_bubble.wgrad.store import WgradStore


@dataclass(frozen=True)
class StepArguments:
    """What Megatron's training loop hands to its forward-backward function, as far as a pass needs it."""

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    config: Any
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None

    def scale_auxiliary_losses(self, device: torch.device) -> None:
        """Tell the losses of experts and of multi-token prediction the loss scale, as every forward does: the last
        optimizer step may have changed it since the last forward.
        """
        config = self.config
        scale = torch.ones(1, device=device)
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        parts = 1 if config.calculate_per_token_loss else self.num_microbatches
        if getattr(config, "num_moe_experts", None) is not None:
            of_ranks = 1 if config.calculate_per_token_loss else self.cp_size
            MoEAuxLossAutoScaler.set_loss_scale(scale * of_ranks / parts)
        if getattr(config, "mtp_num_layers", None) is not None:
            MTPLossAutoScaler.set_loss_scale(scale / parts)


@dataclass
class StepResults:
    """What one iteration gathers on this rank: the number of tokens (0-dim int tensor on the compute device), and, on
    the last stage, the losses behind them.
    """

    num_tokens: torch.Tensor
    forward_data: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Count from the beginning."""
        self.num_tokens.zero_()
        self.forward_data.clear()


@dataclass(frozen=True)
class StageFacts:
    """What a schedule says of one stage.

    Attributes:
        is_last: whether it computes the loss.
        vp_stage: its number among the rank's chunks, None where there is one.
        megatron_rank: the pipeline rank that Megatron must take this process for; None where it is the true one.
        last_backward: the microbatch whose backward comes last, -1 where there is none.
        max_in_flight: the most microbatches whose F ran and whose backward did not.
        fused: the (microbatch, slice) whose backward is one BW.
        tail: its W's behind the rank's last F and backward.
    """

    stage: int
    is_last: bool
    vp_stage: int | None
    megatron_rank: int | None
    last_backward: int
    max_in_flight: int
    fused: frozenset[tuple[int, int]]
    tail: tuple[Pass, ...]

    @classmethod
    def of(cls, schedule: Schedule, stage: int) -> StageFacts:
        placement = schedule.placement
        rank = placement.stage_to_rank[stage]
        last_backward, in_flight, most = -1, 0, 0
        for p in schedule.order[rank]:
            if p.stage != stage or p.kind is Kind.W:
                continue
            if p.kind is not Kind.F:
                last_backward = p.microbatch
            in_flight += 1 if p.kind is Kind.F else -1
            most = max(most, in_flight)
        vp_stage = placement.chunk_of(stage) if len(placement.stages_of(rank)) > 1 else None
        taken_for = megatron_rank(placement, rank, placement.chunk_of(stage))
        elsewhere = None if taken_for == rank else taken_for
        row = schedule.order[rank]
        tail = takewhile(lambda p: p.kind is Kind.W, reversed(row))
        own = tuple(reversed([p for p in tail if p.stage == stage]))
        fused = frozenset((microbatch, slice_) for at, microbatch, slice_ in schedule.fused if at == stage)
        return cls(stage, stage in schedule.flow.sinks, vp_stage, elsewhere, last_backward, most, fused, own)


# By name: a table of bound methods would be a reference cycle, which keeps a model until the collector runs.
_METHODS = {Kind.F: "_forward", Kind.B: "_backward", Kind.BW: "_backward", Kind.W: "_backward_weight"}


class MegatronStage:
    """One model chunk during one iteration.

    Args:
        step: the call's arguments.
        results: where losses and token counts go.
        facts: what the schedule says of the stage.
        model: the chunk, as Megatron wraps it.
        data_iterator: the chunk's.
        sync: told when the last microbatch's backward runs; None where data parallelism reduces after the passes.
    """

    def __init__(
        self,
        step: StepArguments,
        results: StepResults,
        facts: StageFacts,
        model: torch.nn.Module,
        data_iterator: Any,
        store: WgradStore,
        sync: GradSync | None,
    ) -> None:
        self._step = step
        self._results = results
        self._facts = facts
        self._model = model
        self._model_type = get_model_type(model)
        self._data_iterator = data_iterator
        self._store = store
        self._sync = sync

    def run(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run one pass of a chain: see ``ir.Chain`` for what it takes and makes."""
        run: Callable[[Pass, Sequence[Any]], Sequence[Any]] = getattr(self, _METHODS[work.kind])
        return run(work, inputs)

    def _forward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """The stage's output, detached, unless it is the loss, and what its backward starts from."""
        step = self._step
        split = (work.microbatch, work.slice) not in self._facts.fused
        x = inputs[0] if inputs else None
        if x is not None:
            x = x.detach().requires_grad_(not step.forward_only)
        with self._as_stage_rank(), self._store.defer(work) if split and not step.forward_only else nullcontext():
            y, num_tokens = schedules.forward_step(
                step.forward_step_func,
                self._data_iterator,
                self._model,
                step.num_microbatches,
                x,
                self._results.forward_data,
                step.config,
                collect_non_loss_data=step.collect_non_loss_data,
                checkpoint_activations_microbatch=self._recomputes(work.microbatch),
                is_first_microbatch=schedules.check_first_val_step(
                    step.first_val_step, step.forward_only, work.microbatch == 0
                ),
                current_microbatch=work.microbatch,
                vp_stage=self._facts.vp_stage,
                **supported_kwargs(
                    schedules.forward_step, cp_group_size=step.cp_size, is_last_stage=self._facts.is_last
                ),
            )
        self._results.num_tokens += num_tokens
        output = () if self._facts.is_last else (y.detach(),)
        if step.forward_only:
            return output
        schedules.deallocate_output_tensor(y, step.config.deallocate_pipeline_outputs)
        return (*output, (x, y))

    def _backward(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        """The gradient of the stage's input. What W needs stays in the store."""
        *received, (x, y) = inputs
        split = work.kind is Kind.B
        if self._sync is not None and work.microbatch == self._facts.last_backward:
            self._sync.enable()
        if not split:
            self._store.join()
        with self._as_stage_rank(), self._store.defer(work, split):
            of_type = supported_kwargs(schedules.backward_step, model_type=self._model_type)
            grad = schedules.backward_step(x, y, received[0] if received else None, config=self._step.config, **of_type)
        output = (grad,) if self._facts.stage else ()
        assert None not in output, f"{work} has a consumer but no output: no gradient reached the stage's input"
        return (*output, None) if split else output

    def _backward_weight(self, work: Pass, _inputs: Sequence[Any]) -> Sequence[Any]:
        if self._sync is None or not self._sync.enabled:
            self._store.run(work)
            return ()
        if len(self._facts.tail) > 1 and work == self._facts.tail[0]:
            self._store.group(self._facts.tail)
        last = self._facts.last_backward
        self._store.run(work, lambda origin: origin.microbatch != last, self._sync.paused)
        return ()

    def _as_stage_rank(self) -> AbstractContextManager[None]:
        taken_for = self._facts.megatron_rank
        return nullcontext() if taken_for is None else as_pipeline_rank(taken_for)

    def _recomputes(self, microbatch: int) -> bool | None:
        """Megatron's ``num_microbatches_with_partial_activation_checkpoints`` (arXiv 2205.05198, appendix C)."""
        partial = self._step.config.num_microbatches_with_partial_activation_checkpoints
        return None if partial is None else microbatch % self._facts.max_in_flight >= partial
