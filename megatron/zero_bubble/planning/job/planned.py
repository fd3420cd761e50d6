"""What a job takes from its plan file. Its options may repeat what the file decides, and complete what it leaves open;
an option that contradicts it is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile, read_plan_file
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.rule import shown
from megatron.zero_bubble.planning.setup import is_file

_UNDIVIDED = "off"


class _Decision(NamedTuple):
    """An option that a plan decides.

    Attributes:
        field: its name in ``ZeroBubbleConfig``.
        planned: what the plan has in its place, given the plan and the value of the option; None if it leaves it open.
        flag: its name after ``--zero-bubble-``, if that is not the field's.
        in_plan: whether the plan itself is all that a run needs, so that the option is not set.
    """

    field: str
    planned: Callable[[PlanFile, Any], Any]
    flag: str | None = None
    in_plan: bool = False

    @property
    def option(self) -> str:
        """The attribute of the parsed flags."""
        return f"zero_bubble_{self.flag or self.field}".replace("-", "_")


def _placement_of(plan: PlanFile, _: Any) -> str:
    return name_of(plan.schedule.placement) or "another one"


def _chunks_of(plan: PlanFile, _: Any) -> int:
    return plan.schedule.num_stages // plan.schedule.num_ranks


def _slice_ends(plan: PlanFile, ends: Any) -> tuple[int, ...] | None:
    return None if ends is None else plan.schedule.slices.in_tokens(ends[-1])


_DECISIONS = (
    _Decision("vocabulary", lambda plan, _: plan.vocabulary or _UNDIVIDED, "vocabulary-parallel"),
    _Decision("recompute_logits", lambda plan, _: plan.recompute_logits or None),
    _Decision("shard_weights", lambda plan, _: True if plan.sharding else None),
    _Decision("unit_microbatches", lambda plan, _: plan.sharding and plan.sharding.unit_microbatches),
    _Decision("whole_stages", lambda plan, _: plan.sharding and plan.sharding.open_chunks),
    _Decision("num_slices", lambda plan, _: len(plan.schedule.slices), in_plan=True),
    _Decision("slice_ends", _slice_ends, in_plan=True),
    _Decision("placement", _placement_of, in_plan=True),
    _Decision("num_chunks", _chunks_of, in_plan=True),
    _Decision("offload", lambda plan, _: plan.offload or ("its moves" if plan.moves else None), in_plan=True),
)


def decisions(plan: PlanFile, file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``ZeroBubbleConfig`` that a plan decides.

    Args:
        given: the options that the user gave, by field.

    Raises:
        UserError: an option that contradicts the plan.
    """
    return _decided(plan, file, given, lambda each: each.field)


def adopt(options: argparse.Namespace) -> None:
    """Set the ``--zero-bubble-*`` flags that the plan file of a job decides, if it has one, as if they were given.

    The file is read once, here; ``config_of`` takes its content from ``zero_bubble_plan``.

    Raises:
        UserError: a schedule by name and a file, a bad file, or a flag that contradicts it.
    """
    schedule, file = options.zero_bubble_schedule, options.zero_bubble_schedule_file
    refuse_excluded({"schedule": schedule, "schedule_file": file}, spell=lambda *of: f"{_flag_of(of[0])} {of[1]}")
    if schedule and is_file(schedule):
        file = options.zero_bubble_schedule_file = schedule
        options.zero_bubble_schedule = None
    if not file:
        return
    options.zero_bubble_plan = plan = read_plan_file(file)
    given: dict[str, Any] = {each.field: getattr(options, each.option) for each in _DECISIONS}
    given["unit_microbatches"] = given["unit_microbatches"] or None  # auto, which the plan has decided
    if given["vocabulary"] in ("1", "2"):
        given["vocabulary"] = int(given["vocabulary"])
    decided = _decided(plan, file, given, lambda each: _flag_of(each.flag or each.field))
    for each in _DECISIONS:
        if decided.get(each.field) is not None and not each.in_plan:
            value = decided[each.field]
            setattr(options, each.option, str(value) if each.field == "vocabulary" else value)


def _flag_of(name: str) -> str:
    return f"--zero-bubble-{name.replace('_', '-')}"


def _decided(
    plan: PlanFile, file: str, given: Mapping[str, Any], spelled: Callable[[_Decision], str]
) -> dict[str, Any]:
    decided: dict[str, Any] = {}
    for each in _DECISIONS:
        own = given[each.field]
        planned = each.planned(plan, own)
        if own is not None and planned is not None and own != planned:
            raise UserError(
                f"{spelled(each)} must be that of the schedule file, {shown(planned)}; got {shown(own)} with {file}; "
                "leave it out, or write another file with zero-bubble plan"
            )
        if planned is not None:
            decided[each.field] = None if each.in_plan or planned == _UNDIVIDED else planned
    return decided
