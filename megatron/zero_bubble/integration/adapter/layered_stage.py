"""A stage whose passes are made of the nodes of its layers: attention and router, dispatch, experts, and combine.

All linears defer their weight gradients to W. In a fused backward, Megatron's plan of layers calls each node that has
weights when their gradients may be computed: behind the node itself, which for the experts is beneath the dispatch of
the backward, on the stream of the all-to-alls.

Upstream: ``megatron.core.models.common.model_chunk_schedule_plan.TransformerLayerSchedulePlan.run``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules

from megatron.zero_bubble.core.ir import Kind, Pair, Pass
from megatron.zero_bubble.engine.platforms.device import keep_until_used
from megatron.zero_bubble.engine.runtime.early_sends import HandOver
from megatron.zero_bubble.integration.adapter.stage import MegatronStage, StageParts
from megatron.zero_bubble.integration.adapter.versions import layer_plans, nodes_with_weights


class _Backward(NamedTuple):
    """A backward of a stage, with its input, its output, and the gradient of the output; None for the loss."""

    work: Pass
    stage: LayeredStage
    x: torch.Tensor | None
    y: torch.Tensor
    received: torch.Tensor | None


class _WeightGradients:
    """Stands for the modules of a node whose weight gradients wait, for ``TransformerLayerNode.backward_dw``."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.backward_dw = run

    def parameters(self) -> tuple[()]:
        """None: ``run`` itself calls the hooks of their parameters."""
        return ()


class LayeredStage(MegatronStage):
    """One model chunk, whose passes are made of the nodes of its layers."""

    def __init__(self, parts: StageParts) -> None:
        super().__init__(parts)
        self._hand_over: HandOver = lambda work, output: None

    def run_alone(self, work: Pass, inputs: Sequence[Any], hand_over: HandOver) -> Sequence[Any]:
        """Run one pass; as ``run``.

        Args:
            hand_over: called as soon as all nodes of the pass are issued; the current stream then has its output.
        """
        self._hand_over = hand_over
        with self._store.saved.of(work):
            return self.run(work, inputs)

    def run_pair(
        self, pair: Pair, inputs: Sequence[Any], other: LayeredStage, of_other: Sequence[Any], hand_over: HandOver
    ) -> Sequence[Any]:
        """Run a forward of this stage together with a backward of ``other``.

        Args:
            inputs: those of the forward.
            of_other: those of the backward.
            hand_over: called for each of the two passes; see ``run_alone``.

        Returns:
            the outputs of both.
        """
        self._hand_over = hand_over
        forward, backward = pair.forward, pair.backward
        x = self._leaf(inputs)
        (other_x, other_y), received = other._received(of_other)
        other._before_backward(backward)
        defers, saves = self._store.defer(backward, alongside=forward), self._store.saved.of(forward)
        with self._as_stage_rank(), defers, saves, self._slices.forward(forward, False):
            y, grad = self._run_nodes(forward, x, _Backward(backward, other, other_x, other_y, received))
        return *self._forwarded(forward, x, y), *other._backwarded(backward, grad)

    def _splits(self, work: Pass) -> bool:
        return True  # also the microbatches of fused backwards

    def _run_model(self, work: Pass, x: torch.Tensor | None) -> torch.Tensor:
        y, _ = self._run_nodes(work, x, None)
        return y

    def _backward_step(self, work: Pass, x: torch.Tensor | None, y: torch.Tensor, received: torch.Tensor | None) -> Any:
        _, grad = self._run_nodes(None, None, _Backward(work, self, x, y, received))
        return grad

    def _backward_weight(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        for tensor in self._store.tensors(work):
            assert tensor.untyped_storage().nbytes() or not tensor.numel(), f"a node has freed an operand of {work}"
            keep_until_used(tensor)  # it may be from the stream of the all-to-all
        return super()._backward_weight(work, inputs)

    def _run_deferred(self, work: Pass) -> None:
        """Run the weight gradients that the nodes of a fused backward have deferred so far."""
        self._store.settle()
        self._backward_weight(work._replace(kind=Kind.W), ())

    def _run_nodes(self, forward: Pass | None, x: torch.Tensor | None, backward: _Backward | None) -> tuple[Any, Any]:
        """Run a forward of this stage, a backward of any stage, or both; returns the output and the gradient."""
        if backward is None:
            return self._combined(forward, x, None, None, None, None)
        run_deferred, is_fused = partial(backward.stage._run_deferred, backward.work), backward.work.kind is Kind.BW
        for node in nodes_with_weights(backward.y.schedule_plan) if is_fused else ():  # type: ignore[attr-defined]
            node.delay_wgrad_compute, node.bwd_dw_callables = True, [_WeightGradients(run_deferred)]
        made = self._combined(forward, x, backward.stage._model, *backward[2:], backward.work)
        if is_fused and self._store.has(backward.work._replace(kind=Kind.W)):
            run_deferred()  # of an output layer that is a stage of its own
        return made

    def _handing_over(self, work: Pass | None) -> Callable[[torch.Tensor, Any], None] | None:
        """What Megatron calls with the output of a pass, and its chunk, behind the last node of the pass."""
        return None if work is None else lambda output, _: self._hand_over(work, output.detach())

    def _combined(
        self,
        forward: Pass | None,
        x: torch.Tensor | None,
        other: torch.nn.Module | None,
        other_x: torch.Tensor | None,
        other_y: torch.Tensor | None,
        received: torch.Tensor | None,
        backward: Pass | None = None,
    ) -> tuple[Any, Any]:
        """Call megatron-core's combined step; returns the output and the gradient."""
        step = self._step
        y, num_tokens, grad = layer_plans().combined_forward_backward_step(
            step.forward_step_func,
            self._batches,
            self._model if forward is not None else None,
            step.num_microbatches,
            x,
            self._reports,
            other,
            other_x,
            other_y,
            received,
            step.config,
            f_model_chunk_id=self._facts.vp_stage,
            post_forward=self._handing_over(forward),
            post_backward=self._handing_over(backward),
            collect_non_loss_data=step.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                step.first_val_step, step.forward_only, forward is not None and forward.microbatch == 0
            ),
            current_microbatch=None if forward is None else forward.microbatch,
        )
        if forward is not None:
            self._results.num_tokens += num_tokens
        return y, grad
