"""The ``zero-bubble`` command.

``list`` prints the schedules; ``plan`` builds one, or reads one from a file, and says what it costs; ``compare`` has a
line for each at the same costs; ``playground`` shows them all in a browser; ``trace`` draws what a run recorded;
``dry-run`` says what a training job would be. Wrong input is one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron.zero_bubble import __version__
from megatron.zero_bubble.cli.compare import add_compare
from megatron.zero_bubble.cli.dry_run import add_dry_run
from megatron.zero_bubble.cli.plan import add_plan
from megatron.zero_bubble.cli.playground import add_playground
from megatron.zero_bubble.cli.report import add_report
from megatron.zero_bubble.cli.trace import add_trace
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.job.source import AUTO
from megatron.zero_bubble.planning.figures import beyond_floats
from megatron.zero_bubble.schedules import SCHEDULES


class _Parser(argparse.ArgumentParser):
    """argparse without the usage block in front of its errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(arguments)
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
        # The reader, `head` for example, has seen enough; without this Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line, one sub-command a verb."""
    root = _Parser(prog="zero-bubble", description="Pipeline schedules without bubbles.", allow_abbrev=False)
    root.add_argument("--version", action="version", version=__version__)
    verbs = root.add_subparsers(
        dest="name", required=True, metavar="COMMAND", help="list, plan, compare, playground, trace, dry-run, report"
    )

    verb = verbs.add_parser("list", help="the schedules, their bubbles and their memory", allow_abbrev=False)
    verb.set_defaults(command=list_schedules)

    add_plan(verbs.add_parser("plan", help="build a schedule and say what it costs", allow_abbrev=False))
    add_compare(verbs.add_parser("compare", help="every schedule for the same costs", allow_abbrev=False))
    add_playground(verbs.add_parser("playground", help="all of that by sliders, in a browser", allow_abbrev=False))
    add_trace(verbs.add_parser("trace", help="a recorded iteration beside its plan", allow_abbrev=False))
    add_dry_run(verbs.add_parser("dry-run", help="a training job: layout, plan and memory", allow_abbrev=False))
    add_report(verbs.add_parser("report", help="print the environment for a bug report", allow_abbrev=False))
    return root


def list_schedules(_: argparse.Namespace) -> str:
    """A line a schedule."""
    units = "p ranks, v stages on each, m microbatches; F, B, W: times and M: activation of a microbatch on a rank"
    lines = [f"{units}; bubble by span, without communication"]
    for recipe in SCHEDULES.values():
        lines.append(f"{recipe.name:17}bubble {recipe.bubble:19}memory {recipe.memory:13}{recipe.summary}")
    lines.append(f"{AUTO:17}the shortest found for any costs, within the memory that --memory-limit allows")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
