"""Pairs on a Megatron model: a forward and a backward run layer by layer, so that each hides the other's all-to-all.

megatron-core divides the layers of a model into nodes for this: attention and router, dispatch, experts, and combine.
Its layer plans issue the nodes of two microbatches in turn, those that communicate on a stream of their own. All passes
of such an iteration are made of nodes, because the backward of a microbatch runs those of its forward.

Upstream: ``megatron.core.pipeline_parallel.combined_1f1b.combined_forward_backward_step``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.adapter.part import IterationFacts, Part
from megatron.zero_bubble.adapter.prepared import chosen_by
from megatron.zero_bubble.adapter.stage import MegatronStage, StageParts
from megatron.zero_bubble.adapter.versions import check_layer_plans, layer_plans
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Flow, Kind, Op, Pair, Pass, Schedule, Value
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.rule import Choices
from megatron.zero_bubble.runtime.handler import EarlyHandler, Give, Handler

HandOver = Callable[[Pass, torch.Tensor], None]


class ExpertOverlap(Part):
    """Runs the pairs of a schedule, if it has some.

    Args:
        choices: what the configuration chooses, for refusals.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._stages: dict[int, LayeredStage] = {}

    def check(self, config: Any, schedule: Schedule) -> None:
        """See ``Part``."""
        if schedule.pairs:
            refuse_excluded({**self._choices, **chosen_by(schedule)})
            if not getattr(config, "overlap_moe_expert_parallel_comm", False):
                raise UserError(
                    "schedules with pairs of a forward and a backward need overlap_moe_expert_parallel_comm=True in "
                    "the configuration of the model, so that the loop's forward step returns a plan of its layers; "
                    "got False; set it, or choose a schedule without pairs"
                )
            layer_plans()
            check_layer_plans(config)

    def stages(self, iteration: IterationFacts, chunks: Sequence[StageParts]) -> Mapping[int, LayeredStage]:
        """See ``Part``."""
        if not iteration.prepared.schedule.pairs:
            return {}
        for own in chunks:
            _check_returns_plans(own)
        self._stages = {own.facts.stage: LayeredStage(own) for own in chunks}
        return self._stages

    @contextmanager
    def iteration(self, iteration: IterationFacts) -> Iterator[None]:
        """See ``Part``. The stages of an iteration do not outlive it."""
        try:
            yield
        finally:
            self._stages = {}

    def handlers(self, iteration: IterationFacts) -> Mapping[type[Op], EarlyHandler]:
        """The handler of pairs."""
        return {Pair: _Pairs(self._stages, iteration.prepared.schedule.flow)} if self._stages else {}


class _Pairs:
    """Runs pairs; what one of the two passes gives to another rank is sent while the other still runs."""

    def __init__(self, stages: Mapping[int, LayeredStage], flow: Flow) -> None:
        self._stages, self._flow = stages, flow

    def giving(self, give: Give) -> Handler:
        """See ``EarlyHandler``."""

        def run(op: Pair, inputs: Sequence[Any]) -> Sequence[Any]:
            gives = op.effects(self._flow).gives

            def hand_over(work: Pass, output: torch.Tensor) -> None:
                if (value := Value(work)) in gives:
                    give(gives.index(value), output)

            forward, backward = self._stages[op.forward.stage], self._stages[op.backward.stage]
            taken = len(self._flow.inputs(op.forward))
            return forward.run_pair(op, inputs[:taken], backward, inputs[taken:], hand_over)

        return run


def _check_returns_plans(own: StageParts) -> None:
    """Reject a loop whose forward step, or a model that, cannot return a plan of its layers.

    Raises:
        UserError: the rule, what was got, and the remedy.
    """
    function = own.step.forward_step_func
    taken = inspect.signature(function).parameters.values()
    if not any(each.name == "return_schedule_plan" or each.kind is each.VAR_KEYWORD for each in taken):
        raise UserError(
            "schedules with pairs of a forward and a backward need a forward step that takes return_schedule_plan, and "
            "then returns model.build_schedule_plan(...) instead of model(...), as in Megatron-LM's pretrain_gpt.py; "
            f"got {getattr(function, '__name__', function)}; add the argument, or choose a schedule without pairs"
        )
    try:
        get_attr_wrapped_model(own.model, "build_schedule_plan")
    except RuntimeError as error:
        raise UserError(
            "schedules with pairs of a forward and a backward need a model whose layers can be planned, as "
            f"megatron-core's GPTModel, by build_schedule_plan; got {type(own.model).__name__} without it; choose a "
            "schedule without pairs"
        ) from error


class LayeredStage(MegatronStage):
    """One model chunk, whose passes are made of the nodes of its layers."""

    def run_pair(
        self, pair: Pair, inputs: Sequence[Any], other: LayeredStage, of_other: Sequence[Any], hand_over: HandOver
    ) -> Sequence[Any]:
        """Run a forward of this stage together with a backward of ``other``.

        Args:
            inputs: those of the forward.
            of_other: those of the backward.
            hand_over: called with each pass, as soon as all its nodes are issued, and its output for another stage; its
                current stream is one that has the output.

        Returns:
            the outputs of both.
        """
        forward, backward = pair.forward, pair.backward
        x = self._leaf(inputs)
        (other_x, other_y), received = other._received(of_other)
        other._before_backward(backward)
        # One context for both: a forward only asks whether its microbatch is split, a backward stores for its own.
        defers = self._store.defer(backward, backward.kind is Kind.B, paired=self._splits(forward))
        with self._as_stage_rank(), defers, self._slices.forward(forward, False):
            sent = {
                "post_forward": lambda output, _: hand_over(forward, output.detach()),
                "post_backward": lambda output, _: hand_over(backward, output),
            }
            y, grad = self._step_both(forward, x, other, other_x, other_y, received, **sent)
        return *self._forwarded(forward, x, y), *other._backwarded(backward, grad)

    def _run_model(self, work: Pass, x: torch.Tensor | None) -> torch.Tensor:
        y, _ = self._step_both(work, x, None, None, None, None)
        return y

    def _backward_step(self, x: torch.Tensor | None, y: torch.Tensor, received: torch.Tensor | None) -> Any:
        _, grad = self._step_both(None, None, self, x, y, received)
        return grad

    def _backward_weight(self, work: Pass, inputs: Sequence[Any]) -> Sequence[Any]:
        for tensor in self._store.tensors(work):
            assert tensor.untyped_storage().nbytes() or not tensor.numel(), f"a node has freed an operand of {work}"
            tensor.record_stream(torch.cuda.current_stream())  # it may be from the stream of the all-to-all
        return super()._backward_weight(work, inputs)

    def _step_both(
        self,
        forward: Pass | None,
        x: torch.Tensor | None,
        other: LayeredStage | None,
        other_x: torch.Tensor | None,
        other_y: torch.Tensor | None,
        received: torch.Tensor | None,
        **called: Callable[[torch.Tensor, Any], None],
    ) -> tuple[Any, Any]:
        """Run a forward of this stage, a backward of ``other``, or both; returns the output and the gradient.

        Args:
            called: what Megatron calls with the output of a pass and its chunk when the nodes of the pass are issued.
        """
        step = self._step
        y, num_tokens, grad = layer_plans().combined_forward_backward_step(
            step.forward_step_func,
            self._batches,
            self._model if forward is not None else None,
            step.num_microbatches,
            x,
            self._reports,
            None if other is None else other._model,
            other_x,
            other_y,
            received,
            step.config,
            f_model_chunk_id=self._facts.vp_stage,
            collect_non_loss_data=step.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                step.first_val_step, step.forward_only, forward is not None and forward.microbatch == 0
            ),
            current_microbatch=None if forward is None else forward.microbatch,
            **called,
        )
        if forward is not None:
            self._results.num_tokens += num_tokens
        return y, grad
