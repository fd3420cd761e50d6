"""What a job asks for: the options that are given, and its plan file. Options may repeat what the file decides, and
complete what it leaves open; an option that contradicts it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile, read_plan_file
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.decision import AUTO_UNIT, Spell, shown
from megatron.zero_bubble.planning.decisions import DECISIONS
from megatron.zero_bubble.planning.exclusions import refuse_excluded
from megatron.zero_bubble.planning.job.effects import Job, check_effects
from megatron.zero_bubble.planning.observations import Observations
from megatron.zero_bubble.planning.run_options import Balance, RunOptions
from megatron.zero_bubble.planning.setup import Given, Setup
from megatron.zero_bubble.planning.values import (
    ALGORITHMS,
    BALANCE,
    SHARE,
    is_given,
    of_setup,
    placed,
    refuse_repeated,
    values_of,
)

_UNDIVIDED = "off"
_IN_PLAN = tuple(row.name for row in DECISIONS if row.is_in_plan)
_OBSERVED = tuple(field.name for field in fields(Observations))


def run_of(given: Mapping[str, Any], spell: Spell, plan: PlanFile | None = None) -> RunOptions:
    """Make a value of the options that are given, and check them.

    Args:
        given: by the names of decisions; also those with their defaults.
        spell: writes one as the user gave it.
        plan: the content of the schedule file, if it has been read.

    Raises:
        UserError: options that contradict each other or the file, or that have no effect; or an invalid file.
    """
    refuse_repeated(given, spell)
    setup, _ = placed(given, spell)
    if isinstance(setup.order, Given):
        plan = plan or read_plan_file(setup.order.file)
        given = _adopted(plan, setup.order.file, given, spell)
    observations = Observations(**{name: given[name] for name in _OBSERVED if is_given(given.get(name))})
    balance = Balance(given.get(SHARE)) if given.get(BALANCE) else None
    setup, misplaced = placed(of_setup(given), spell)
    if isinstance(setup.order, Given):
        setup = replace(setup, order=replace(setup.order, plan=plan))
    run = RunOptions(setup, observations, balance)
    check_effects(given, Job(run), spell)
    if misplaced:
        raise misplaced[0]
    refuse_excluded(run, spell)
    return run


def other_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are no part of a setup."""
    in_setup = of_setup(given)
    return {name: value for name, value in given.items() if name in _OBSERVED or name not in in_setup}


def _adopted(plan: PlanFile, file: str, given: Mapping[str, Any], spell: Spell) -> dict[str, Any]:
    """The options that are given, with those that a plan decides.

    Raises:
        UserError: an option that contradicts the plan.
    """
    adopted = dict(given)
    for name, planned in _decided(plan, given).items():
        own = _chosen(given, name)
        if own is not None and own != planned:
            raise UserError(
                f"{spell(name, True)} must be that of the schedule file, {shown(planned)}; got {shown(own)} with "
                f"{file}; leave it out, or write another file with zero-bubble plan"
            )
        adopted[name] = None if name in _IN_PLAN or planned == _UNDIVIDED else planned
    return adopted


def _decided(plan: PlanFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan decides, by the names of decisions, in the form in which it is given."""
    setup, on = Setup.of_plan(plan), plan.schedule.placement
    placement = {"placement": name_of(on) or "another one", "num_chunks": on.num_stages // on.num_ranks}
    decided = {"vocabulary": _UNDIVIDED, **placement, **values_of(setup)}
    if setup.cuts is not None and (ends := given.get("slice_ends")) is not None:
        decided["slice_ends"] = setup.cuts.among[0].in_tokens(ends[-1])
    return decided


def _chosen(given: Mapping[str, Any], name: str) -> Any:
    """The value of an option; None if it leaves the choice to the plan."""
    value = given.get(name)
    leaves_open = name == "unit_microbatches" and value == AUTO_UNIT
    return None if leaves_open else ALGORITHMS.get(value, value)
