"""What a job takes from its plan file. Its options may repeat what the file decides, and complete what it leaves open;
an option that contradicts it is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile, read_plan_file
from megatron.zero_bubble.planning.codecs import flag_of, speller
from megatron.zero_bubble.planning.decision import Decision
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.rule import shown
from megatron.zero_bubble.planning.setup import is_file

_UNDIVIDED = "off"
_PLANNED = tuple(row for row in DECISIONS if row.planned is not None)
"""The decisions that a plan file makes."""


def decisions(plan: PlanFile, file: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``ZeroBubbleConfig`` that a plan decides.

    Args:
        given: the options that the user gave, by field.

    Raises:
        UserError: an option that contradicts the plan.
    """
    return _decided(plan, file, given, lambda each: each.name)


def adopt(options: argparse.Namespace) -> None:
    """Set the ``--zero-bubble-*`` flags that the plan file of a job decides, if it has one, as if they were given.

    The file is read once, here; ``config_of`` takes its content from ``zero_bubble_plan``.

    Raises:
        UserError: a schedule by name and a file, a bad file, or a flag that contradicts it.
    """
    schedule, file = options.zero_bubble_schedule, options.zero_bubble_schedule_file
    refuse_excluded({"schedule": schedule, "schedule_file": file}, spell=speller("job"))
    if schedule and is_file(schedule):
        file = options.zero_bubble_schedule_file = schedule
        options.zero_bubble_schedule = None
    if not file:
        return
    options.zero_bubble_plan = plan = read_plan_file(file)
    given: dict[str, Any] = {each.name: getattr(options, each.dest) for each in _PLANNED}
    given["unit_microbatches"] = given["unit_microbatches"] or None  # auto, which the plan has decided
    if given["vocabulary"] in ("1", "2"):
        given["vocabulary"] = int(given["vocabulary"])
    decided = _decided(plan, file, given, lambda each: flag_of(each.name))
    for each in _PLANNED:
        if decided.get(each.name) is not None and not each.is_in_plan:
            value = decided[each.name]
            setattr(options, each.dest, str(value) if each.name == "vocabulary" else value)


def _decided(plan: PlanFile, file: str, given: Mapping[str, Any], spelled: Callable[[Decision], str]) -> dict[str, Any]:
    decided: dict[str, Any] = {}
    for each in _PLANNED:
        own = given[each.name]
        assert each.planned is not None, "all of these are planned"
        planned = each.planned(plan, own)
        if own is not None and planned is not None and own != planned:
            raise UserError(
                f"{spelled(each)} must be that of the schedule file, {shown(planned)}; got {shown(own)} with {file}; "
                "leave it out, or write another file with zero-bubble plan"
            )
        if planned is not None:
            decided[each.name] = None if each.is_in_plan or planned == _UNDIVIDED else planned
    return decided
