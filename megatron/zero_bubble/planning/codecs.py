"""Read and write a ``Setup`` in the words of each reader: flags of a job or of ``zero-bubble plan``, variables of the
environment, the playground's query, JSON. All of them come from the table of decisions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, overload
from urllib.parse import parse_qsl, urlencode

from megatron.zero_bubble.core.errors import UserError, as_flag
from megatron.zero_bubble.planning.decision import NEGATABLE, Decision, Spell, in_fields, shown
from megatron.zero_bubble.planning.decisions import DECISIONS, LAYOUT, OF_PLANS
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.values import (
    BALANCE,
    PLAN_ROWS,
    ROWS,
    of_setup,
    setup_of,
    values_of,
    values_of_plan,
)

Medium = Literal["job", "plan", "env", "query", "json"]
_LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_BALANCE = next(row for row in DECISIONS if row.name == BALANCE)
"""What else says what the setup of a job is."""


class StrictParser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


class Difference(NamedTuple):
    """What turns one job into another.

    Attributes:
        add: the flags to add, with their values.
        leave_out: the names of the flags to leave out, before the others are added.
    """

    add: tuple[str, ...]
    leave_out: tuple[str, ...]


@overload
def spell(setup: Setup, as_: Literal["job", "plan"] = "job") -> tuple[str, ...]: ...
@overload
def spell(setup: Setup, as_: Literal["env"]) -> dict[str, str]: ...
@overload
def spell(setup: Setup, as_: Literal["query"]) -> str: ...
@overload
def spell(setup: Setup, as_: Literal["json"]) -> dict[str, Any]: ...
def spell(setup: Setup, as_: Medium = "job") -> Any:
    """Write a setup in the words of a reader. What ``plan`` has no flag for, such as post-validation, is left out.

    Returns:
        words of a command line for ``job`` and ``plan``; variables for ``env``; the text of a ``query``; the content of
        ``json``.

    Raises:
        UserError: cuts that only a plan can make.
    """
    of_plan = as_ in ("plan", "query")
    values = {_row(name): value for name, value in (values_of_plan if of_plan else _of_job)(setup).items()}
    if as_ == "json":
        return {row.name: list(value) if isinstance(value, tuple) else value for row, value in values.items()}
    if as_ == "env":  # a layout is a flag of Megatron's own
        values.pop(LAYOUT, None)
        return {variable(row): "1" if value is True else shown(value) for row, value in values.items()}
    if as_ == "query":
        return urlencode({_flag(row, as_)[2:]: "" if value is True else shown(value) for row, value in values.items()})
    return tuple(word for row, value in values.items() for word in _words(_flag(row, as_), value))


def parse(given: Sequence[str] | str | Mapping[str, Any], as_: Medium = "job") -> Setup:
    """Read what ``spell`` has written, or a user. Words and variables that are no part of a setup are ignored.

    Raises:
        UserError: a value that a decision does not have, or a decision that needs another one, which is missing.
    """
    if isinstance(given, str):
        flags = parse_qsl(given, keep_blank_values=True)
        return parse([word for flag, value in flags for word in _words(f"--{flag}", value or True)], "plan")
    if isinstance(given, Mapping):
        if as_ == "json":
            made = ((_row(name), value) for name, value in given.items())
            words = [word for row, value in made for word in _words(_flag(row), row.worded(value))]
        else:
            words = [word for row in (*ROWS, _BALANCE) for word in words_of_variable(row, given.get(variable(row), ""))]
        return parse(words)
    parser = StrictParser(add_help=False, allow_abbrev=False)
    rows = (*ROWS, _BALANCE) if as_ == "job" else PLAN_ROWS
    for row in rows:
        if as_ == "plan" and row.plan is not None:
            parser.add_argument(_flag(row, as_), dest=row.dest, **row.plan.arguments)
        else:
            parser.add_argument(_own_flag(row), dest=row.dest, **row.arguments)
    options, _ = parser.parse_known_args(list(given))
    values = of_setup({row.name: getattr(options, row.dest) for row in rows})
    return setup_of(values, speller(as_), of_plan=as_ == "plan")


def setup_of_flags(flags: Mapping[str, Any], **other: Any) -> Setup:
    """The setup that the parsed flags of ``plan`` give, and those of ``compare``, which names no schedule.

    Args:
        other: values in place of those of the flags, by the names of decisions.

    Raises:
        UserError: as ``parse``.
    """
    named = flags.get("schedule") is not None
    values = {row.name: flags.get(row.plan.option) for row in PLAN_ROWS if row.plan is not None}
    if not named:
        values = {row.name: values[row.name] for row in PLAN_ROWS if row.name == "schedule_file" or not row.of_order}
    steps = {"post_validation": flags["objective"] == "span"}
    return setup_of(values | steps | other, speller("plan"), of_plan=True)


def difference(old: Setup, new: Setup) -> Difference:
    """The flags that a job with one setup adds and leaves out to run another; both, for those with another value. Flags
    that are retired, of which a job may have some, are left out with those that replace them.
    """
    before, after = _of_job(old), _of_job(new)
    added = {_row(name): value for name, value in after.items() if before.get(name) != value}
    words = tuple(word for row, value in added.items() for word in _words(_flag(row), value))
    left = (_row(name) for name, value in before.items() if after.get(name) != value)
    return Difference(words, tuple(flag for row in left for flag in (_flag(row), *_replaced_by(row))))


def speller(as_: Medium | None = None) -> Spell:
    """Return what writes a decision, by its name in the tables of refusals, as its reader gives it.

    Args:
        as_: the reader; None for the fields of ``ZeroBubbleConfig``.
    """

    def spelled(name: str, value: object) -> str:
        row = next((row for row in (*DECISIONS, LAYOUT, *OF_PLANS) if row.name == name), None)
        if as_ in ("plan", "query"):
            return " ".join(_words(as_flag(name) if row is None else _flag(row, as_), value))
        if row is None or as_ in (None, "json"):
            return in_fields(name, value)
        if as_ == "env":
            value = row.worded(value)
            return f"{variable(_row(row.within) if row.within else row)}={1 if value is True else shown(value)}"
        return row.shown(value, _flag(row))

    return spelled


def flag_of(name: str) -> str:
    """The flag of a job that makes a decision, by its name."""
    return _flag(_row(name))


def variable(row: Decision) -> str:
    """The name of the variable of a decision."""
    return row.dest.upper()


def words_of_variable(row: Decision, value: str) -> list[str]:
    """The flag as it would be on a command line, given the value of its variable; nothing for an empty one.

    Raises:
        UserError: a switch that is neither 1 nor 0.
    """
    if not value:
        return []
    if not row.may_be_bare or (isinstance(row.values, tuple) and value in row.values):
        return [f"{_own_flag(row)}={value}"]
    if value not in ("0", "1"):
        name = variable(row)
        raise UserError(f"{name} must be 1 (on) or 0 (off); got {value!r}; give one of them, or unset the variable")
    if value == "1":
        return [_own_flag(row)]
    return [f"--no-zero-bubble-{row.flag}"] if row.values == NEGATABLE else []


def _of_job(setup: Setup) -> dict[str, Any]:
    """The values that the flags of a job have, of which some make several decisions."""
    values = values_of(setup)
    for row in DECISIONS:
        if row.within and row.name in values:
            value = row.worded(values.pop(row.name))
            if row.path == "messages.collective_ctas":
                value = setup.messages.ctas, value
            if row.word and row.within in values:
                value = f"{_row(row.within).word},{value}"
            values[row.within] = value
    return {name: _row(name).worded(value) for name, value in values.items()}


def _flag(row: Decision, as_: Medium = "job") -> str:
    if as_ in ("plan", "query"):
        return f"--{row.flag if row.plan is None else row.plan.name}"
    return _own_flag(_row(row.within) if row.within else row)


def _replaced_by(row: Decision) -> Iterator[str]:
    return (_own_flag(each) for each in ROWS if each.within == row.name)


def _own_flag(row: Decision) -> str:
    return _LAYOUT_FLAG if row is LAYOUT else f"--zero-bubble-{row.flag}"


def _words(flag: str, value: Any) -> Iterator[str]:
    yield flag
    if value is not True:
        yield shown(tuple(value) if isinstance(value, list) else value)


def _row(name: str) -> Decision:
    row = next((row for row in (*ROWS, *OF_PLANS) if row.name == name), None)
    if row is None:
        raise UserError(f"a setup decides {', '.join(row.name for row in ROWS)}; got {name}; leave it out")
    return row
