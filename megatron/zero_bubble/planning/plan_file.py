"""A plan as its file has it: everything that was decided, and the figures that follow from the costs."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.formats.facts import KEY_FACTS
from megatron.zero_bubble.core.formats.layout import LAYERS, LAYOUT, NEEDED_LAYOUT
from megatron.zero_bubble.core.formats.plan import PlanFile, plan_to_json
from megatron.zero_bubble.core.formats.schedule import logits_content
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.plans import message_memory


def decided(plan: Answer) -> PlanFile:
    """Return what a run takes from the file that ``written`` returns."""
    schedule, laid_out, moved = plan.timeline.schedule, plan.part(LayoutPlan), plan.part(OffloadPlan)
    return PlanFile(
        schedule,
        plan.costs.needed_layout(schedule.placement) if laid_out is None else laid_out.best.text,
        None if moved is None else moved.choice,
        plan.added,
        plan.divided,
        plan.costs.facts,
    )


def written(plan: Answer) -> str:
    """Return the text of the plan's file."""
    costs, schedule = plan.costs, plan.timeline.schedule
    content = logits_content(plan.divided)
    if costs.facts:
        content[KEY_FACTS] = dict(costs.facts)
    if costs.message_bytes is not None:
        content["message_peak"] = message_memory(
            schedule, costs.message_bytes, widths=costs.widths_on(schedule.placement)
        )
    if (laid_out := plan.part(LayoutPlan)) is not None:
        content |= _layout_content(laid_out)
    else:
        if (layout := costs.needed_layout(schedule.placement)) is not None:
            content[NEEDED_LAYOUT] = layout
        if costs.halves(schedule.placement):
            content["is_lower_bound"] = True
    for part in plan.parts:
        content |= part.content(costs)
    if plan.dropped:
        content["dropped"] = {each.name: each.reason for each in plan.dropped}
    return plan_to_json(plan.timeline, plan.certificate, content)


def _layout_content(plan: LayoutPlan) -> dict[str, Any]:
    return {
        LAYOUT: plan.best.text,
        LAYERS: plan.best.layers,
        # At least, where no schedule was made for the other layout.
        "shorter_than": {name.replace(" ", "_"): gain for name, gain in plan.gains().items()},
    }
