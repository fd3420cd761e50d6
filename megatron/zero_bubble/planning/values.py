"""A ``Setup`` as values by name: the names of ``ZeroBubbleConfig`` and of the tables of refusals.

The names of ``plan`` are the same, but its cuts are those of a question: their places may be open, or shares of a
sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.schedules import ZB_AUTO
from megatron.zero_bubble.planning.decision import AUTO_UNIT, Decision, Spell
from megatron.zero_bubble.planning.decisions import DECISIONS, LAYOUT, OF_PLANS
from megatron.zero_bubble.planning.setup import (
    DEFAULT_CUTS,
    Cuts,
    Given,
    Named,
    Order,
    Searched,
    Setup,
    Synchronous,
    Validated,
    is_file,
)

ROWS = tuple(row for row in (*DECISIONS, LAYOUT) if row.path)
"""The decisions that make up the setup of a job."""
PLAN_ROWS = tuple(row for row in (*ROWS, *OF_PLANS) if row.plan is not None)
"""Those for which ``plan`` has a flag."""
_OF_SEVERAL = ("order", "cuts", "step")
"""The fields of a setup that decisions make together."""
_SECTIONS: dict[str, type[Any]] = {
    name: kind
    for name, hint in get_type_hints(Setup).items()
    for kind in getattr(hint, "__args__", (hint,))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and name not in _OF_SEVERAL
}
"""The classes of the others whose decisions have a place of their own."""
_ALWAYS = ("messages",)
"""Those of them that are never None."""
BALANCE, SHARE = "balance_microbatches", "attention_share"
"""With the first, which is no part of a setup, the second is none either."""
ALGORITHMS: dict[object, Algorithm] = {"1": 1, "2": 2}
"""Of vocabulary parallelism, by the values of its flags."""
_OPEN = {"vocabulary": "off", "layout": "even", "unit_microbatches": AUTO_UNIT}
"""Values that choose nothing."""
_ONE_DECISION = (
    ("the schedule is", "schedule", "schedule_file"),
    ("the cuts of sequences are", "slice_ends", "num_slices"),
    ("the cuts of sequences are", "slice_ends", "attention_share"),
    ("the rounding of weight gradients is", "exact", "fuse_wgrad"),
)
"""Decisions that are one, and how a sentence about it begins."""
_NEITHER = (
    *("slices", "schedule", "schedule_file", "num_slices", "slice_ends", "attention_share", "min_slice_tokens"),
    *("exact", "fuse_wgrad"),
)
"""Decisions of which several make one field."""


def of_setup(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that make up a setup. With balanced microbatches, the share of attention is for the cost of samples."""
    own = dict(values)
    if own.pop(BALANCE, None):
        own.pop(SHARE, None)
    return own


def setup_of(values: Mapping[str, Any], spelled: Spell, of_plan: bool = False) -> Setup:
    """Make a setup of values by name.

    Args:
        spelled: writes a decision as the user gave it.
        of_plan: whether its cuts are those of ``plan``.

    Raises:
        UserError: a decision that is made twice, or that needs another one, which is missing.
    """
    if not of_plan:
        refuse_repeated(values, spelled)
    setup, misplaced = placed(values, spelled, of_plan)
    if misplaced:
        raise misplaced[0]
    return setup


def is_given(value: object) -> bool:
    """Whether a value decides something, as 0 does, and a switch that is off and an empty text do not."""
    return value is not None and value is not False and value != ""


def refuse_repeated(values: Mapping[str, Any], spelled: Spell) -> None:
    """Refuse a decision that is made twice.

    Raises:
        UserError: both values of it.
    """
    for what, *names in _ONE_DECISION:
        made = [name for name in names if is_given(values.get(name))]
        if len(made) > 1:
            given = " and ".join(spelled(name, values[name]) for name in made)
            raise UserError(f"{what} given twice: {given}; leave one of them out")


def placed(values: Mapping[str, Any], spelled: Spell, of_plan: bool = False) -> tuple[Setup, tuple[UserError, ...]]:
    """Make a setup of values by name, as ``setup_of``; those that have no place in it are left out.

    Returns:
        the setup, and a refusal per value that has no place.
    """
    misplaced: list[UserError] = []
    known = {name: value for name, value in values.items() if is_given(value)}
    known = {name: value for name, value in known.items() if value != _OPEN.get(name)}
    if (algorithm := known.get("vocabulary")) in ALGORITHMS:
        known["vocabulary"] = ALGORITHMS[algorithm]
    made: dict[str, Any] = {
        "order": _order(known, spelled, misplaced),
        "cuts": (_cuts_of_plan if of_plan else _cuts)(known),
        "step": Validated(known.get("rollback", "exact")) if known.get("post_validation") else Synchronous(),
        "exact": bool(known.get("exact")) or values.get("fuse_wgrad") is False,
        **{top: _section(top, known, spelled, misplaced) for top in _SECTIONS},
    }
    rows = (row for row in (*ROWS, *OF_PLANS) if row.name in known and row.path.partition(".")[0] not in made)
    return Setup(**made, **{row.path: known[row.name] for row in rows}), tuple(misplaced)


def values_of(setup: Setup) -> dict[str, Any]:
    """The decisions that differ from the defaults; cuts as a job has them.

    Raises:
        UserError: cuts that only a plan can make.
    """
    found = _values(setup, ROWS)
    return found if setup.cuts is None else found | _values_of_cuts(setup.cuts)


def values_of_plan(setup: Setup) -> dict[str, Any]:
    """Those for which ``plan`` has a flag; cuts as it has them."""
    values, names = _values(setup, PLAN_ROWS), [row.name for row in PLAN_ROWS]
    found = {name: values[name] for name in names if name in values}
    return found if setup.cuts is None else found | _values_of_cuts_of_plan(setup.cuts)


def _values(setup: Setup, rows: Sequence[Decision]) -> dict[str, Any]:
    found = (
        {} if setup.order is None else {"schedule_file" if isinstance(setup.order, Given) else "schedule": setup.name}
    )
    for row in rows:
        if row.name not in _NEITHER and (value := _at(setup, row.path)) is not None:
            found[row.name] = value
    return {**found, "exact": True} if setup.exact else found


def _at(setup: Setup, path: str) -> Any:
    """The value at a path; None if it is the default."""
    top, _, leaf = path.partition(".")
    section = getattr(setup, top)
    if not leaf:
        is_made = section is not None and section is not False and section != Synchronous()
        return (True if dataclasses.is_dataclass(section) else section) if is_made else None
    value = getattr(section, leaf, None)
    return value if is_given(value) and value != _default(type(section), leaf) else None


def _section(top: str, values: Mapping[str, Any], spelled: Spell, misplaced: list[UserError]) -> Any:
    """The field that these decisions make; None without them, or without the one that they refine."""
    rows = [row for row in ROWS if row.path.partition(".")[0] == top]
    leaves = {row.path.partition(".")[2]: values[row.name] for row in rows if values.get(row.name) is not None}
    first = next((row for row in rows if _is_needed(_SECTIONS[top], row)), None)
    if first is not None and leaves and values.get(first.name) is None:
        row = next(row for row in rows if values.get(row.name) is not None)
        misplaced.append(
            UserError(
                f"{spelled(row.name, values[row.name])} works only with {spelled(first.name, True)}; give both, or "
                "leave it out"
            )
        )
        return None
    return (
        _SECTIONS[top](**{leaf: value for leaf, value in leaves.items() if leaf}) if leaves or top in _ALWAYS else None
    )


def _is_needed(section: type[Any], row: Decision) -> bool:
    """Whether a section exists only with this decision."""
    leaf = row.path.partition(".")[2]
    return not leaf or _default(section, leaf) is dataclasses.MISSING


def _default(section: type[Any], leaf: str) -> Any:
    return next((field.default for field in dataclasses.fields(section) if field.name == leaf), dataclasses.MISSING)


def _order(values: Mapping[str, Any], spelled: Spell, misplaced: list[UserError]) -> Order | None:
    name = values.get("schedule_file") or values.get("schedule")
    of_file = name is not None and ("schedule_file" in values or is_file(name))
    kind: type[Any] = Given if of_file else Searched if name == ZB_AUTO else Named
    leaves = {"file": name} if kind is Given else {"name": name} if kind is Named else {}
    for row in (*ROWS, *OF_PLANS):
        top, _, leaf = row.path.partition(".")
        if top != "order" or row.name in _NEITHER or row.name not in values:
            continue
        if name is None or all(field.name != leaf for field in dataclasses.fields(kind)):
            given = spelled(row.name, values[row.name])
            misplaced.append(UserError(f"{given} has no effect with {name or 'no schedule'}; leave it out"))
        else:
            leaves[leaf] = values[row.name]
    return None if name is None else kind(**leaves)


def _cuts(values: Mapping[str, Any]) -> Cuts | None:
    number, ends, share = (values.get(name) for name in ("num_slices", "slice_ends", "attention_share"))
    if ends is not None:
        return Cuts(None, ends)
    if share is not None:
        return Cuts(number or DEFAULT_CUTS, share)
    return None if number is None else Cuts(number, "even")


def _values_of_cuts(cuts: Cuts) -> dict[str, Any]:
    if isinstance(cuts.places, tuple):
        return {"slice_ends": cuts.places}
    if cuts.places == "balanced" or not isinstance(cuts.number, int):
        raise UserError(
            f"a job needs numbers to cut sequences by; got {cuts.number} slices, {cuts.places or 'cut as is best'}; "
            "plan them first, and give the ends of the slices"
        )
    return {"num_slices": cuts.number, **({"attention_share": cuts.places} if isinstance(cuts.places, float) else {})}


def _cuts_of_plan(values: Mapping[str, Any]) -> Cuts | None:
    number, places, least = (values.get(name) for name in ("num_slices", "slice_ends", "min_slice_tokens"))
    number = int(str(number)) if str(number).isdigit() else number
    if places not in (None, "even", "balanced"):
        places = tuple(map(float, places.split(",")))
    return None if number is None and places is None else Cuts(number, places, least)


def _values_of_cuts_of_plan(cuts: Cuts) -> dict[str, Any]:
    found = {"num_slices": cuts.number, "min_slice_tokens": cuts.least_tokens}
    found = {name: value for name, value in found.items() if value is not None}
    if isinstance(cuts.places, tuple):
        return {**found, "slice_ends": tuple(end / cuts.places[-1] for end in cuts.places)}
    if cuts.places is None:
        return found
    return {**found, "slice_ends": cuts.places if isinstance(cuts.places, str) else "balanced"}
