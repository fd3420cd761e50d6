"""Pairs on a Megatron model: a forward and a backward run layer by layer, so that each hides the other's all-to-all.

megatron-core divides the layers of a model into nodes for this: attention and router, dispatch, experts, and combine.
Its layer plans issue the nodes of two microbatches in turn, those that communicate on a stream of their own. All passes
of such an iteration are made of nodes, because the backward of a microbatch runs those of its forward.

Upstream: ``megatron.core.pipeline_parallel.combined_1f1b.combined_forward_backward_step``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Compute, Op, Pair, Schedule, Send
from megatron.zero_bubble.engine.runtime.early_sends import EarlySends
from megatron.zero_bubble.engine.runtime.handler import Handler
from megatron.zero_bubble.integration.adapter.layered_stage import LayeredStage
from megatron.zero_bubble.integration.adapter.part import IterationFacts, Part
from megatron.zero_bubble.integration.adapter.prepared import as_scheduled
from megatron.zero_bubble.integration.adapter.stage import StageParts
from megatron.zero_bubble.integration.adapter.versions import check_layer_plans, layer_plans
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.run_options import RunOptions
from megatron.zero_bubble.planning.setup import Setup


class ExpertOverlap(Part):
    """Runs the pairs of a schedule, if it has some.

    Args:
        setup: what the job runs, for refusals.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._stages: dict[int, LayeredStage] = {}

    def check(self, config: Any, schedule: Schedule) -> None:
        if schedule.overlaps:
            refuse_excluded(RunOptions(as_scheduled(self._setup, schedule)))
            if not getattr(config, "overlap_moe_expert_parallel_comm", False):
                raise UserError(
                    "schedules that hide the all-to-all of experts need overlap_moe_expert_parallel_comm=True in the "
                    "configuration of the model, so that the loop's forward step returns a plan of its layers; got "
                    "False; set it, or choose a schedule without this overlap"
                )
            layer_plans()
            check_layer_plans(config)

    def stages(self, iteration: IterationFacts, chunks: Sequence[StageParts]) -> Mapping[int, LayeredStage]:
        if not iteration.prepared.schedule.overlaps:
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

    def replacing(self, iteration: IterationFacts, basic: Mapping[type[Op], Handler]) -> Mapping[type[Op], Handler]:
        """The handlers of passes and of pairs, which send what a pass gives as soon as its nodes are issued: while the
        other pass of a pair still runs, and before the weight gradients of the last node of a fused backward.
        """
        stages, prepared = self._stages, iteration.prepared
        if not stages:
            return {}
        flow, sends = prepared.schedule.flow, EarlySends(prepared.plan.executable(prepared.rank).ops, basic[Send])

        def run_alone(op: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
            return stages[op.work.stage].run_alone(op.work, inputs, sends.during(op))

        def run_pair(op: Pair, inputs: Sequence[Any]) -> Sequence[Any]:
            forward, backward = stages[op.forward.stage], stages[op.backward.stage]
            taken = len(flow.inputs(op.forward))
            return forward.run_pair(op, inputs[:taken], backward, inputs[taken:], sends.during(op))

        return {Compute: run_alone, Pair: run_pair, Send: sends.send}


def _check_returns_plans(own: StageParts) -> None:
    """Reject a loop whose forward step, or a model that, cannot return a plan of its layers.

    Raises:
        UserError: the rule, what was got, and the remedy.
    """
    function = own.step.forward_step_func
    taken = inspect.signature(function).parameters.values()
    if not any(each.name == "return_schedule_plan" or each.kind is each.VAR_KEYWORD for each in taken):
        raise UserError(
            "schedules that hide the all-to-all of experts need a forward step that takes return_schedule_plan, and "
            "then returns model.build_schedule_plan(...) instead of model(...), as in Megatron-LM's pretrain_gpt.py; "
            f"got {getattr(function, '__name__', function)}; add the argument, or choose a schedule without this "
            "overlap"
        )
    try:
        get_attr_wrapped_model(own.model, "build_schedule_plan")
    except RuntimeError as error:
        raise UserError(
            "schedules that hide the all-to-all of experts need a model whose layers can be planned, as "
            f"megatron-core's GPTModel, by build_schedule_plan; got {type(own.model).__name__} without it; choose a "
            "schedule without this overlap"
        ) from error
