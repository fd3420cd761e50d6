"""The row of the table of options (``decisions.py``), and the parsers of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Spell = Callable[[str, Any], str]
"""Writes a decision, by its name, and its value as the user gives them."""
Tier = Literal["core", "advanced", "expert", "retired"]
TIERS: dict[Tier, str] = {
    "core": "Which schedule, how much memory, exact or fast.",
    "advanced": "Refinements, which a plan or the program decides where they are left out.",
    "expert": "Measurements, and settings whose effect depends on the cluster.",
}
"""What each tier is for. Retired flags have none: another one has taken their place."""
SWITCH, NEGATABLE = "switch", "negatable switch"
_MOST_RECORDED = 1000
_NUMBER = re.compile("[0-9]+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


class PlanFlag(NamedTuple):
    """The flag of ``zero-bubble plan`` and ``compare`` for a decision.

    Attributes:
        name: after ``--``.
        values, parse: as in ``Decision``.
        help: with the default; "" where the two commands differ.
        on_page: whether the playground offers it.
    """

    name: str
    values: str | tuple[str, ...]
    parse: Callable[[str], Any] | None = None
    help: str = ""
    on_page: bool = False

    @property
    def option(self) -> str:
        """The attribute of the parsed flags."""
        return self.name.replace("-", "_")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``add_argument``, but for the help."""
        return _arguments(self.values, self.parse)

    def add(self, verb: argparse.ArgumentParser, text: str = "") -> None:
        """Add the flag to a command, with its own text where the commands differ. A switch that is off is False."""
        arguments = {**self.arguments, "default": False} if self.values == SWITCH else self.arguments
        verb.add_argument(f"--{self.name}", help=text or self.help, **arguments)


@dataclass(frozen=True)
class Decision:
    """One decision.

    Attributes:
        flag: after ``--zero-bubble-``.
        tier: who needs it.
        values: the accepted words; or the metavariable of a free value; or that it is a switch.
        help: what it does, without the default.
        default: what happens without the flag, in words; "" for a switch that is off.
        parse: makes the value from the text.
        field: the field of ``ZeroBubbleConfig`` that it sets, "" for what only a job decides; by default the flag's
            name.
        path: its place in ``Setup``, such as ``vocabulary.algorithm``; "" for what says how a run is observed.
        plan: the flag of ``zero-bubble plan`` for it, if it has one.
        in_run: whether a run can change it.
        by_auto: whether ``auto`` decides it, so that its flag contradicts a schedule that is decided.
        within: the name of the decision whose flag makes this one too, in place of its own flag, which is retired.
        split: maps the value of a flag that makes several decisions to their values, by name.
        word: the value with which a flag that makes several decisions makes this one, a switch.
    """

    flag: str
    tier: Tier
    values: str | tuple[str, ...]
    help: str
    default: str = ""
    parse: Callable[[str], Any] | None = None
    field: str | None = None
    path: str = ""
    plan: PlanFlag | None = None
    in_run: bool = False
    by_auto: bool = False
    within: str = ""
    split: Callable[[str | None], dict[str, Any]] | None = None
    word: str = ""

    def __post_init__(self) -> None:
        if self.field is None:
            object.__setattr__(self, "field", self.flag.replace("-", "_"))

    @property
    def name(self) -> str:
        """The name of the decision in the tables of refusals."""
        return self.field or self.flag.replace("-", "_")

    @property
    def dest(self) -> str:
        """The attribute of the parsed flags."""
        return "zero_bubble_" + self.flag.replace("-", "_")

    @property
    def of_order(self) -> bool:
        """Whether it is part of the order of passes."""
        return self.path.startswith("order.")

    @property
    def is_of_file(self) -> bool:
        """Whether the schedule of a file has it, so that ``plan`` refuses its flag."""
        return self.path in ("order.stages", "pairs") or self.path.startswith("cuts")

    @property
    def is_in_plan(self) -> bool:
        """Whether a run takes it from the plan itself, so that its flag need not be set."""
        return self.path.partition(".")[0] in ("order", "cuts", "offload", "early_recompute")

    @property
    def text(self) -> str:
        """The help line."""
        if self.tier == "retired":
            return f"retired, and refused from the next minor release on: {self.help}"
        return f"{self.help}; default: {self.default}" if self.default else self.help

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``add_argument``, but for the help."""
        if self.split is None:
            return _arguments(self.values, self.parse)
        shown = {"metavar": self.values} if isinstance(self.values, str) else {"choices": self.values, "nargs": "?"}
        return {**shown, "action": _Split, "split": self.split}

    @property
    def may_be_bare(self) -> bool:
        """Whether the flag may be without a value."""
        return self.values in (SWITCH, NEGATABLE) or (self.split is not None and isinstance(self.values, tuple))

    def worded(self, value: object) -> object:
        """The value of its flag: of a switch, the word for it, if it has one."""
        return self.word if self.word and value is True else value

    def shown(self, value: object, flag: str) -> str:
        """The flag as a user gives it, with the value.

        Args:
            flag: its name, or that of the flag which makes this decision too.
        """
        if value is False:
            return f"--no-zero-bubble-{self.flag}"
        value = self.worded(value)
        is_text = type(value) in (str, int, float) or (isinstance(value, tuple) and all(type(v) is int for v in value))
        plain = is_text and (value or isinstance(value, float))
        return flag + (f" {shown(value)}" if plain else "")


class _Split(argparse.Action):
    """Sets the decisions that the value of a flag makes, by their attributes of the parsed flags.

    Args:
        split: as in ``Decision``.
    """

    def __init__(self, *, split: Callable[[str | None], dict[str, Any]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._split = split

    def __call__(self, parser: Any, namespace: Any, value: Any, flag: str | None = None) -> None:
        try:
            decided = self._split(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        for name, each in decided.items():
            setattr(namespace, f"zero_bubble_{name}", each)


def _arguments(values: str | tuple[str, ...], parse: Callable[[str], Any] | None) -> dict[str, Any]:
    if values == SWITCH:
        return {"action": "store_true", "default": None}
    if values == NEGATABLE:
        return {"action": argparse.BooleanOptionalAction}
    shown: dict[str, Any] = {"choices": values} if isinstance(values, tuple) else {"metavar": values}
    return shown if parse is None else {**shown, "type": parse}


def shown(value: object) -> str:
    """A value as a user gives it, such as ``1536,4096``."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def in_fields(name: str, value: object) -> str:
    """Write a decision as a field of ``ZeroBubbleConfig``."""
    return name if value is True else f"{name}={shown(value)}"


def number_or_auto(text: str) -> int | str:
    """Parse a number, whose size is checked later, or ``auto``.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is a number, or auto; got {text[:40]!r}") from None


def token_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of tokens such as ``1536,2560,4096``.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_NUMBER.fullmatch, parts)):
        raise argparse.ArgumentTypeError(f"ends of slices are numbers of tokens, such as 1536,2560,4096; got {text!r}")
    return tuple(map(int, parts))


def ctas(text: str | None) -> dict[str, Any]:
    """Split the CTAs of messages, and of collectives, if they have their own.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    numbers = (text or "").split(",")
    if len(numbers) > 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise argparse.ArgumentTypeError(f"it is one number of CTAs, or two as in 2,8; got {text!r}")
    return dict(zip(("nccl_ctas", "nccl_collective_ctas"), map(int, numbers), strict=False))


AUTO_UNIT = 0
"""``auto`` as a number of microbatches, because a flag that is not given is None."""


def unit_microbatches(text: str) -> int:
    """Parse a number of microbatches, or ``auto``.

    Raises:
        argparse.ArgumentTypeError: any other text, or a number below 1.
    """
    if text == "auto":
        return AUTO_UNIT
    if not _NUMBER.fullmatch(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a unit has 1 or more microbatches, or auto; got {text!r}")
    return int(text)


def iterations(text: str) -> tuple[range, ...]:
    """Parse numbers and ranges of iterations, both ends included, such as ``10-12,50``.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    matches = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in matches if m]
    if len(ranges) < len(matches) or not all(some and some[0] for some in ranges):
        raise argparse.ArgumentTypeError(
            f"iterations must be positive numbers or ranges of them, such as 10-12,50; got {text!r}"
        )
    if sum(some[-1] - some[0] + 1 for some in ranges) > _MOST_RECORDED:
        raise argparse.ArgumentTypeError(
            f"at most {_MOST_RECORDED} iterations can be recorded, because all are held in memory; got {text!r}; list "
            "fewer"
        )
    return tuple(ranges)
