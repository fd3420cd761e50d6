"""A stage that is a chunk of a Megatron model: passes run through megatron-core's own ``forward_step``/``backward_step``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from megatron.zero_bubble.ir import Pass
from megatron.zero_bubble.runtime.gradients import GradSync
from megatron.zero_bubble.runtime.wgrad_store import WgradStore


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


@dataclass
class StepResults:
    """What one iteration gathers on this rank: the number of tokens (0-dim int tensor on the compute device), and, on
    the last stage, the losses behind them."""

    num_tokens: torch.Tensor
    forward_data: list[Any] = field(default_factory=list)


class MegatronStage:
    """One model chunk during one iteration.

    Args:
        step: the call's arguments.
        model: the chunk, as Megatron wraps it.
        data_iterator: the chunk's.
        is_last: whether it computes the loss.
        vp_stage: its number among the rank's chunks, None where there is one.
        last_backward: the microbatch whose backward comes last on this chunk.
        recompute_window: how many microbatches of the chunk are in flight at most, for partial recomputation.
    """

    def __init__(
        self,
        step: StepArguments,
        results: StepResults,
        model: torch.nn.Module,
        data_iterator: Any,
        store: WgradStore,
        sync: GradSync | None,
        is_last: bool,
        vp_stage: int | None,
        last_backward: int,
        recompute_window: int,
    ) -> None:
        self._step = step
        self._results = results
        self._model = model
        self._data_iterator = data_iterator
        self._store = store
        self._sync = sync
        self._is_last = is_last
        self._vp_stage = vp_stage
        self._last_backward = last_backward
        self._recompute_window = recompute_window
        self._saved: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor, bool]] = {}

    def forward(self, work: Pass, x: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        step = self._step
        if x is not None:
            x = x.detach().requires_grad_(not step.forward_only)
        with self._store.defer(work) if split and not step.forward_only else contextlib.nullcontext():
            y, num_tokens = schedules.forward_step(
                step.forward_step_func,
                self._data_iterator,
                self._model,
                step.num_microbatches,
                x,
                self._results.forward_data,
                step.config,
                step.cp_size,
                collect_non_loss_data=step.collect_non_loss_data,
                checkpoint_activations_microbatch=self._recomputes(work.microbatch),
                is_first_microbatch=schedules.check_first_val_step(
                    step.first_val_step, step.forward_only, work.microbatch == 0
                ),
                current_microbatch=work.microbatch,
                vp_stage=self._vp_stage,
                is_last_stage=self._is_last,
            )
        self._results.num_tokens += num_tokens
        output = None if self._is_last else y.detach()
        if not step.forward_only:
            self._saved[work.microbatch, work.slice] = (x, y, split)
            schedules.deallocate_output_tensor(y, step.config.deallocate_pipeline_outputs)
        return output

    def backward(self, work: Pass, grad: torch.Tensor | None) -> torch.Tensor | None:
        x, y, split = self._saved.pop((work.microbatch, work.slice))
        if self._sync is not None and work.microbatch == self._last_backward:
            self._sync.enable()
        with self._store.defer(work) if split else contextlib.nullcontext():
            return schedules.backward_step(x, y, grad, get_model_type(self._model), self._step.config)

    def backward_weight(self, work: Pass) -> None:
        late = self._sync is not None and self._sync.enabled and work.microbatch != self._last_backward
        with self._sync.paused() if late and self._sync is not None else contextlib.nullcontext():
            self._store.run(work)

    def _recomputes(self, microbatch: int) -> bool | None:
        """Megatron's ``num_microbatches_with_partial_activation_checkpoints`` (arXiv 2205.05198, appendix C)."""
        partial = self._step.config.num_microbatches_with_partial_activation_checkpoints
        return None if partial is None else microbatch % self._recompute_window >= partial
