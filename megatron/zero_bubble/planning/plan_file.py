"""A plan as its file has it: everything that was decided, and the figures that follow from the costs."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.core.formats.facts import KEY_FACTS
from megatron.zero_bubble.core.formats.layout import LAYERS, LAYOUT, NEEDED_LAYOUT
from megatron.zero_bubble.core.formats.moves import OFFLOAD, moves_content
from megatron.zero_bubble.core.formats.plan import PlanFile, plan_to_json
from megatron.zero_bubble.core.formats.vocabulary import logits_content
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.plans import message_memory
from megatron.zero_bubble.planning.shards import shard_content


def decided(plan: Answer) -> PlanFile:
    """Return what a run takes from the file that ``written`` returns."""
    schedule = plan.timeline.schedule
    return PlanFile(
        schedule,
        plan.costs.needed_layout(schedule.placement) if plan.layouts is None else plan.layouts.best.text,
        None if plan.offloaded is None else plan.offloaded.choice,
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
        content["message_peak"] = message_memory(schedule, costs.message_bytes)
    if plan.layouts is not None:
        content |= _layout_content(plan.layouts)
    else:
        if (layout := costs.needed_layout(schedule.placement)) is not None:
            content[NEEDED_LAYOUT] = layout
        if costs.halves(schedule.placement):
            content["is_lower_bound"] = True
    if plan.offloaded is not None:
        content |= {**offload_content(plan.offloaded), **moves_content(plan.offloaded.moves)}
    if plan.shards is not None:
        content |= shard_content(plan.shards, costs)
    if plan.dropped:
        content["dropped"] = {each.name: each.reason for each in plan.dropped}
    return plan_to_json(plan.timeline, plan.certificate, content)


def offload_content(done: OffloadPlan) -> dict[str, Any]:
    """Return the figures of offloading, and for which choice they are."""
    return {
        OFFLOAD: done.choice,
        "offloaded_share": done.share,
        "offload_added_ms": done.added_ms,
        "device_peak": done.device_peak,
        "host_peak": done.host_peak,
        "pending_wgrad": done.pending_wgrad,
    }


def _layout_content(plan: LayoutPlan) -> dict[str, Any]:
    return {
        LAYOUT: plan.best.text,
        LAYERS: plan.best.layout,
        # At least, where no schedule was made for the other layout.
        "shorter_than": {name.replace(" ", "_"): gain for name, gain in plan.gains().items()},
    }
