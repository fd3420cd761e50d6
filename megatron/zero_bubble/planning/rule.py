"""The row of every table of refusals: what a choice needs or excludes, why, and what to do instead.

``planning/exclusions.py`` has the choices that exclude each other, ``planning/job/options.py`` what options of Megatron
must be, and ``planning/job/rules.py`` where a flag has an effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import UserError, as_flag

Choices = Mapping[str, Any]
"""The values of fields of ``ZeroBubbleConfig``, and of flags that only some programs have, under their names with
underscores. A field that is missing has its default."""
Spell = Callable[[str, Any], str]
"""Writes a field and its value as the user gives them."""
_FIELD = re.compile("<([a-z_]+)=?([^>]*)>")
LEAVE_ONE_OUT = "leave one of them out"
_NOTHING = ("", "off", "none", "even")


class Choice(NamedTuple):
    """Something that a user may choose.

    Attributes:
        words: its name in a sentence, without an article for what is excluded.
        shown_by: returns the fields that choose it; nothing if it is not chosen.
        plural: what needs something if it is chosen; by default, schedules with it.
    """

    words: str
    shown_by: Callable[[Choices], Iterable[str]]
    plural: str = ""

    def given(self, choices: Choices, spell: Spell) -> str:
        """The first field that chooses it, with its value, as ``spell`` writes them."""
        field = next(iter(self.shown_by(choices)))
        return spell(field, choices[field])


class Rule(NamedTuple):
    """If a choice is made, something else must have one value.

    Attributes:
        subject: the choice.
        needs: another choice, or the name of an option of Megatron.
        value: of an option, the only value that works; of a choice, True if it must be made and False if it must not,
            which is then symmetric.
        why: the reason; of a choice that must be made, the sentence after its words, in which ``{schedule}`` and
            ``{last}``, the last iteration, stand for values.
        instead: what the user can do, where ``<field=value>`` is written as the user gives fields; by default, drop the
            option, or leave out a choice.
    """

    subject: Choice
    needs: Choice | str
    value: Any
    why: str
    instead: str = ""

    def sentence(self, choices: Choices, options: Any = None, spell: Spell | None = None) -> str:
        """Return the refusal, "" if the rule holds; for the arguments, see ``check``."""
        fields, spell = list(self.subject.shown_by(choices)), spell or _with
        if not fields:
            return ""
        remedy = self.spelled(spell)
        if isinstance(self.needs, str):
            value = getattr(options, self.needs, self.value)
            if value in (self.value, None):
                return ""
            subject = self.subject.plural or f"schedules with {self.subject.words}"
            return f"{subject} need {self.needs}={self.value!r}, because {self.why}; got {value!r}; {remedy}"
        if bool(list(self.needs.shown_by(choices))) is self.value:
            return ""
        if not self.value:
            return (
                f"{self.subject.words} and {self.needs.words} exclude each other, because {self.why}; got "
                f"{self.subject.given(choices, spell)} and {self.needs.given(choices, spell)}; {remedy}"
            )
        why = self.why.format(schedule=_schedule_of(choices), last=choices.get("train_iters"))
        return f"{spell(fields[0], choices[fields[0]])} works only with {self.needs.words}{why}; {remedy}"

    @property
    def what(self) -> str:
        """The name of what is needed or excluded."""
        return self.needs if isinstance(self.needs, str) else self.needs.words

    @property
    def remedy(self) -> str:
        """What the user can do, with the names of fields."""
        return self.spelled(_with)

    def spelled(self, spell: Spell) -> str:
        """What the user can do, with fields as ``spell`` writes them."""
        otherwise = f"drop {as_flag(self.needs)}" if isinstance(self.needs, str) else "leave it out"
        default = otherwise if self.value is not False or isinstance(self.needs, str) else LEAVE_ONE_OUT
        return _FIELD.sub(lambda field: spell(field[1], field[2] or True), self.instead or default)


def check(rules: Iterable[Rule], choices: Choices, options: Any = None, spell: Spell | None = None) -> None:
    """Raise the sentence of the first rule that does not hold.

    Args:
        options: the options of Megatron as attributes: a configuration or the flags of a job. Missing ones have the
            value that works.
        spell: writes a field and its value as the user gave them; by default ``field=value``.

    Raises:
        UserError: the rule, the values and the remedy.
    """
    if (reason := broken(rules, choices, options)) is not None:
        raise UserError(reason.sentence(spell))


class Reason(NamedTuple):
    """Why choices are refused.

    Attributes:
        rule: the one that does not hold.
        choices, options: as in ``check``.
    """

    rule: Rule
    choices: Choices
    options: Any = None

    def sentence(self, spell: Spell | None = None) -> str:
        """The rule, the values and the remedy, in the words of a reader; by default, with fields and their values."""
        return self.rule.sentence(self.choices, self.options, spell)


def broken(rules: Iterable[Rule], choices: Choices, options: Any = None) -> Reason | None:
    """The first rule that does not hold; for the arguments, see ``check``."""
    return next((Reason(rule, choices, options) for rule in rules if rule.sentence(choices, options)), None)


def is_chosen(value: object) -> bool:
    """Whether a value chooses something, as 0 does."""
    return not (value is None or value is False or value in _NOTHING)


def chosen(*fields: str) -> Callable[[Choices], list[str]]:
    """Those of the fields whose values choose something."""
    return lambda choices: [field for field in fields if is_chosen(choices.get(field))]


def is_value(field: str, *values: object) -> Callable[[Choices], list[str]]:
    """The field if it has one of the values."""
    return lambda choices: [field] if any(choices.get(field) is value for value in values) else []


def _schedule_of(choices: Choices) -> str:
    """The schedule's name or file, ``none`` without either."""
    return str(choices.get("schedule") or choices.get("schedule_file") or "none")


def shown(value: object) -> str:
    """A value as a user gives it, such as ``1536,4096``."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _with(field: str, value: object) -> str:
    return field if value is True else f"{field}={shown(value)}"
