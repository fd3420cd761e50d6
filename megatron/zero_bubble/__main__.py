"""The ``zero-bubble`` command line.

``list`` prints the schedules; ``plan`` builds a schedule, or reads one from a file, and prints its cost; ``compare``
prints one line per schedule for the same costs; ``playground`` shows all schedules in a browser; ``trace`` draws
recorded iterations; ``dry-run`` describes a training job without starting it; ``report`` prints the environment.
Invalid input prints one sentence on stderr and exits with code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from megatron.zero_bubble import __version__
from megatron.zero_bubble.core.errors import UserError, beyond_floats
from megatron.zero_bubble.core.schedules import SCHEDULES, ZB_AUTO

_COMMANDS = {
    "list": "list the schedules with their bubble and memory",
    "advise": "say what a training job gains, and the flags to add",
    "plan": "build a schedule and print its cost",
    "compare": "compare all schedules for the same costs",
    "playground": "explore schedules interactively in a browser",
    "trace": "compare a recorded iteration with its plan",
    "dry-run": "check a training job: rank layout, plan and memory",
    "catalogue": "judge all recipes of a folder of launch scripts",
    "report": "print the environment for a bug report",
}
"""The commands and their lines in ``--help``; ``cli/`` has a module for each but ``list``."""


_LETTERS = (
    "p: ranks; v: stages (chunks) per rank; m: microbatches; n: slices per sequence; F, B, W: times of a microbatch's "
    "passes and M: its activation memory, on one rank; bubble: idle time (not a rate) of a rank from its first to its "
    "last pass, without communication"
)
"""First line of ``list``."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that prints errors without the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    root = parser(only=arguments[0] if arguments else "")
    if not arguments:
        root.error(f"a command is required: {', '.join(_COMMANDS)}; --help says what each does")
    options, others = root.parse_known_args(arguments)
    if others:
        after = (
            "; the machines are --nodes and --gpus-per-node, and the flags of the training script come last, after a "
            "separate --"
            if options.name in ("advise", "dry-run")
            else ""
        )
        root.error(f"unrecognized arguments: {' '.join(others)}{after}")
    try:
        output: str = options.command(options)
    except (UserError, OverflowError) as error:
        why = beyond_floats(error) if isinstance(error, OverflowError) else error
        print(f"zero-bubble {options.name}: {why}", file=sys.stderr)
        return 2
    try:
        sys.stdout.write(output)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (for example `head`) closed the pipe; without this, Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the command-line parser, with one sub-parser per command; given ``only``, others have no flags."""
    root = _Parser(
        prog="zero-bubble", description="Plan, compare and inspect zero-bubble pipeline schedules.", allow_abbrev=False
    )
    root.add_argument("--version", action="version", version=__version__)
    verbs = root.add_subparsers(
        dest="name", required=True, metavar="COMMAND", help="'zero-bubble COMMAND --help' lists the flags of a command"
    )
    for name, summary in _COMMANDS.items():
        verb = verbs.add_parser(name, help=summary, allow_abbrev=False)
        if name == "list":
            verb.description = "List the schedules with formulas for their bubble and their memory."
            verb.set_defaults(command=list_schedules)
        elif only in (None, name):  # importing all commands takes longer than most of them run
            module = name.replace("-", "_")
            getattr(import_module(f"megatron.zero_bubble.cli.{module}"), f"add_{module}")(verb)
    return root


def list_schedules(_: argparse.Namespace) -> str:
    """List the schedules, one line per schedule."""
    lines = [_LETTERS]
    bubble, memory = (max(len(getattr(one, name)) + 2 for one in SCHEDULES.values()) for name in ("bubble", "memory"))
    for recipe in SCHEDULES.values():
        lines.append(f"{recipe.name:21}bubble {recipe.bubble:{bubble}}memory {recipe.memory:{memory}}{recipe.summary}")
    lines.append(f"{ZB_AUTO:21}the shortest schedule found for the given costs within --memory-limit")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
