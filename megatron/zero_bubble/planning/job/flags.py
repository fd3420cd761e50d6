"""The ``--zero-bubble-*`` flags, shared by this package's training loop and Megatron-LM jobs under the launcher."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.planning.codecs import StrictParser, speller
from megatron.zero_bubble.planning.decisions import DECISIONS, LAYOUT, REMOVED
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.values import ROWS, SHARE, of_setup, values_of

HELP_ALL = "--zero-bubble-help-all"
_DEVICE = "auto"
_ALGORITHMS: dict[str | None, Algorithm] = {"1": 1, "2": 2}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group ``zero bubble``. Flags that are not given are None, except the device; see ``config_of``.

    The help has the core tier; ``--zero-bubble-help-all`` prints all of them and ends the program.
    """
    add = parser.add_argument_group("zero bubble").add_argument
    for option in DECISIONS:
        text = option.text if option.tier == "core" else argparse.SUPPRESS
        add(f"--zero-bubble-{option.flag}", help=text, **option.arguments)
    add(HELP_ALL, action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all flags of this group and exit")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for flag in REMOVED:
        add(f"--zero-bubble-{flag}", action=_Removed, nargs=0, const=flag, **hidden)
    # The plan is the content of the schedule file, once it is read (``planned.adopt``).
    parser.set_defaults(zero_bubble_device=_DEVICE, zero_bubble_plan=None)


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


def has_schedule(options: argparse.Namespace) -> bool:
    """Whether a zero-bubble schedule is selected, by name or by file."""
    return bool(options.zero_bubble_schedule or options.zero_bubble_schedule_file)


def records(options: argparse.Namespace) -> bool:
    """Whether the flags request recording of iterations."""
    return bool(options.zero_bubble_trace or options.zero_bubble_record_costs)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The decisions that the flags make, by the names of the tables of refusals."""
    choices = {o.name: value for o in DECISIONS if (value := getattr(options, o.dest)) is not None}
    plan = options.zero_bubble_plan
    moves = plan is not None and plan.moves and options.zero_bubble_offload is None
    return choices | ({"moves": options.zero_bubble_schedule_file} if moves else {})


def decide(options: argparse.Namespace, setup: Setup) -> None:
    """Set the flags of a setup as if they, and no others that make up one, were given."""
    others = (SHARE,) if options.zero_bubble_balance_microbatches else ()
    for row in DECISIONS:
        if row.path and row.name not in others:
            setattr(options, row.dest, None)
    options.zero_bubble_plan, options.pipeline_model_parallel_layout = None, None
    for name, value in values_of(setup).items():
        row = next(row for row in ROWS if row.name == name)
        dest = "pipeline_model_parallel_layout" if row is LAYOUT else row.dest
        setattr(options, dest, str(value) if name == "vocabulary" else value)


as_given = speller("job")
"""Writes a decision, by its name in the tables of refusals, as the flag that makes it."""


def config_of(
    options: argparse.Namespace,
    num_chunks: int | None = None,
    measure_memory: bool = False,
    peer_timeout_s: float | None = None,
) -> ZeroBubbleConfig:
    """Convert the parsed flags to a configuration.

    Args:
        num_chunks: stages per rank, if the job defines it.
        measure_memory: whether to measure the memory of each pass, once.
        peer_timeout_s: timeout of messages between ranks.

    Raises:
        UserError: flags that exclude each other, or an invalid configuration.
    """
    choices = of_setup(given(options))
    fields = {o.field: choices[o.field] for o in DECISIONS if o.field in choices}
    if "unit_microbatches" in fields:
        fields["unit_microbatches"] = fields["unit_microbatches"] or None
    if "vocabulary" in fields:
        fields["vocabulary"] = vocabulary_algorithm(options)
    if num_chunks is not None:
        fields["num_chunks"] = num_chunks
    return ZeroBubbleConfig(
        **fields,
        plan=options.zero_bubble_plan,
        measure_memory=measure_memory,
        peer_timeout_s=peer_timeout_s,
    )


def vocabulary_algorithm(options: argparse.Namespace) -> Algorithm | None:
    """The algorithm of vocabulary parallelism; None if it is off."""
    return _ALGORITHMS.get(options.zero_bubble_vocabulary_parallel)


def parse_ours(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a job's arguments into the parsed ``--zero-bubble-*`` flags and the remaining arguments, unchanged.

    Raises:
        UserError: an invalid value for one of our flags, or an unknown ``--zero-bubble-*`` flag.
    """
    parser = StrictParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    options, others = parser.parse_known_args(list(arguments))
    for argument in others:
        if argument.startswith(("--zero-bubble-", "--no-zero-bubble-")):
            raise UserError(f"unknown flag {argument.partition('=')[0]}; {HELP_ALL} lists all flags")
    return options, others
