"""The ``--zero-bubble-*`` flags, shared by this package's training loop and Megatron-LM jobs under the launcher."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.planning.codecs import StrictParser, speller
from megatron.zero_bubble.planning.decisions import DECISIONS, REMOVED
from megatron.zero_bubble.planning.job.planned import run_of
from megatron.zero_bubble.planning.run_options import RunOptions

HELP_ALL = "--zero-bubble-help-all"
as_given = speller("job")
"""Writes a decision, by its name in the tables of refusals, as the flag that makes it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``zero bubble``. Flags that are not given are no attributes of what the parser returns.

    The help has the core tier; ``--zero-bubble-help-all`` prints all of them and ends the program.
    """
    add = parser.add_argument_group("zero bubble").add_argument
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    for option in DECISIONS:
        text = option.text if option.tier == "core" else argparse.SUPPRESS
        add(f"--zero-bubble-{option.flag}", help=text, **{**option.arguments, **absent})
    add(HELP_ALL, action=_HelpAll, nargs=0, help="show all flags of this group and exit", **absent)
    for flag in REMOVED:
        add(f"--zero-bubble-{flag}", action=_Removed, nargs=0, const=flag, help=argparse.SUPPRESS, **absent)


def retired(arguments: Sequence[str]) -> list[str]:
    """One line per flag in a job's arguments that another one has replaced."""
    given = {word.partition("=")[0].replace("--no-zero-bubble-", "--zero-bubble-") for word in arguments}
    rows = (row for row in DECISIONS if row.tier == "retired" and f"--zero-bubble-{row.flag}" in given)
    return [f"--zero-bubble-{row.flag} is {row.text}" for row in rows]


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(full_help(parser), end="")
        parser.exit()


class _Removed(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        raise UserError(f"--zero-bubble-{self.const} was removed, because {REMOVED[self.const]}; leave it out")


def full_help(parser: argparse.ArgumentParser) -> str:
    """The help of a parser with the flags of all tiers."""
    texts = {option.dest: option.text for option in DECISIONS}
    for action in parser._actions:
        action.help = texts.get(action.dest, action.help)
    return parser.format_help()


def taken(options: Any) -> dict[str, Any]:
    """Take our flags out of what a parser with them has returned: their values, by the names of decisions."""
    found = vars(options)
    return {row.name: found.pop(row.dest) for row in DECISIONS if row.dest in found}


def given_in(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split a job's arguments into the values of our flags, by the names of decisions, and the other arguments.

    Raises:
        UserError: an invalid value for one of our flags, or an unknown ``--zero-bubble-*`` flag.
    """
    parser = StrictParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    options, others = parser.parse_known_args(list(arguments))
    for argument in others:
        if argument.startswith(("--zero-bubble-", "--no-zero-bubble-")):
            raise UserError(f"unknown flag {argument.partition('=')[0]}; {HELP_ALL} lists all flags")
    return taken(options), others


def parse_ours(arguments: Sequence[str]) -> tuple[RunOptions, list[str]]:
    """Split a job's arguments into what our flags ask for, and the other arguments. A plan file is read.

    Raises:
        UserError: as ``given_in`` and ``run_of``.
    """
    given, others = given_in(arguments)
    return run_of(given, as_given), others
