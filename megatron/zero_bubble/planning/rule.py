"""The rows of the tables of refusals: what excludes what, and which option of Megatron works with what.

``planning/exclusions.py`` has which choices exclude each other and options of Megatron, and ``planning/job/effects.py``
where a flag has an effect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron.zero_bubble.core.errors import Remedy, as_flag
from megatron.zero_bubble.planning.decision import Spell, in_fields
from megatron.zero_bubble.planning.run_options import RunOptions

Shown = tuple[str, Any]
"""The name of a decision, and its value."""
_DECISION = re.compile("<([a-z_]+)=?([^>]*)>")
LEAVE_ONE_OUT = "leave one of them out"


class Choice(NamedTuple):
    """Something that a user may choose.

    Attributes:
        words: its name in a sentence, without an article for what is excluded.
        shown_by: returns the decisions that choose it; none if it is not chosen.
        plural: what needs something if it is chosen; by default, schedules with it.
        how: how a user chooses it, as in ``remedy_of``.
        refined_by: the decisions that have an effect only with it, and why, as in a sentence after its words.
    """

    words: str
    shown_by: Callable[[RunOptions], Iterable[Shown]]
    plural: str = ""
    how: str = ""
    refined_by: tuple[tuple[str, str], ...] = ()

    def is_made(self, run: RunOptions) -> bool:
        """Whether it is chosen."""
        return next(iter(self.shown_by(run)), None) is not None

    def given(self, run: RunOptions, spell: Spell) -> str:
        """The first decision that chooses it, as ``spell`` writes it."""
        return spell(*next(iter(self.shown_by(run))))

    @property
    def subject(self) -> str:
        """Its name as the subject of a sentence."""
        return self.plural or f"schedules with {self.words}"


class Exclusion(NamedTuple):
    """Two choices that cannot be combined.

    Attributes:
        why: the reason.
        instead: what the user can do, as in ``remedy_of``.
    """

    one: Choice
    other: Choice
    why: str
    instead: str = LEAVE_ONE_OUT

    def sentence(self, run: RunOptions, spell: Spell = in_fields) -> str:
        """The refusal; "" if it does not apply."""
        if not (self.one.is_made(run) and self.other.is_made(run)):
            return ""
        return (
            f"{self.one.words} and {self.other.words} exclude each other, because {self.why}; got "
            f"{self.one.given(run, spell)} and {self.other.given(run, spell)}; {self.remedy(spell)}"
        )

    def remedy(self, spell: Spell = in_fields) -> str:
        """What the user can do."""
        return remedy_of(self.instead, spell)


class Fits(NamedTuple):
    """Several values of an option of Megatron.

    Attributes:
        words: which ones, in words.
        holds: whether one of them is given, and options as attributes.
    """

    words: str
    holds: Callable[[Any, Any], object]


class OptionRule(NamedTuple):
    """The only value of an option of Megatron that works with a choice, or ``Fits`` for several.

    Attributes:
        why: the reason why no other does.
        instead: what the user can do; "" to drop the option.
        is_set: whether the option gets that value at the start, with a line, where it has another: it asks for what the
            choice does by itself.
        flags: the remedy as flags, for a value, where they leave the model and its groups as they are.
    """

    choice: Choice
    option: str
    value: Any
    why: str
    instead: str = ""
    is_set: bool = False
    flags: Callable[[Any], Remedy | None] = lambda _: None

    def sentence(self, options: Any) -> str:
        """The refusal of options, given as attributes; "" if the value works. Missing ones, and None, always do."""
        value = getattr(options, self.option, None)
        if value is None or (self.value.holds(value, options) if isinstance(self.value, Fits) else value == self.value):
            return ""
        given = ", ".join(map(repr, value)) if isinstance(value, list) else repr(value)
        return f"{self.rule}; got {given}; {self.remedy}"

    @property
    def rule(self) -> str:
        """How the refusal begins, whatever the value."""
        needed = f" to be {self.value.words}" if isinstance(self.value, Fits) else f"={self.value!r}"
        return f"{self.choice.subject} need {self.option}{needed}, because {self.why}"

    @property
    def remedy(self) -> str:
        """What the user can do."""
        return self.instead or f"drop {as_flag(self.option)}"


def remedy_of(instead: str, spell: Spell) -> str:
    """What a user can do, in which ``<name=value>`` is a decision to write as the user gives it."""
    return _DECISION.sub(lambda decision: spell(decision[1], decision[2] or True), instead)
