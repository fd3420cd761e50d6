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
    """An argument parser that prints errors without the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
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
        # The reader (for example `head`) closed the pipe; without this, Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the command-line parser, with one sub-parser per command."""
    root = _Parser(
        prog="zero-bubble", description="Plan, compare and inspect zero-bubble pipeline schedules.", allow_abbrev=False
    )
    root.add_argument("--version", action="version", version=__version__)
    verbs = root.add_subparsers(
        dest="name", required=True, metavar="COMMAND", help="'zero-bubble COMMAND --help' lists the flags of a command"
    )

    def verb(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=summary, description=description, allow_abbrev=False)

    listing = verb(
        "list",
        "list the schedules with their bubble and memory",
        "List the schedules with formulas for their bubble and their memory.",
    )
    listing.set_defaults(command=list_schedules)
    add_plan(
        verb(
            "plan",
            "build a schedule and print its cost",
            "Build a schedule, search for one (zb-auto) or read one from a file, and print its picture, length, bubble "
            "rates and peak memory. Give the costs as times (--forward-ms, ...), as a file (--costs) or as a model "
            "(--config).",
        )
    )
    add_compare(
        verb(
            "compare",
            "compare all schedules for the same costs",
            "Print one line per schedule for the same costs, shortest first, and a lower bound on the length of any "
            "schedule within the memory limit. Give the costs as times (--forward-ms, ...), as a file (--costs) or as "
            "a model (--config).",
        )
    )
    add_playground(
        verb(
            "playground",
            "explore schedules interactively in a browser",
            "Serve a page on this machine that draws and compares all schedules for costs set by sliders.",
        )
    )
    add_trace(
        verb(
            "trace",
            "compare a recorded iteration with its plan",
            "Draw a recorded iteration next to its plan, and attribute the difference in length to causes and ranks.",
        )
    )
    add_dry_run(
        verb(
            "dry-run",
            "check a training job: rank layout, plan and memory",
            "Check a training job without starting it, and print its rank layout, plan and memory. If the run would "
            "reject the job, print the same error and exit with code 2.",
        )
    )
    add_report(verb("report", "print the environment for a bug report", "Print versions, compiled parts and devices."))
    return root


def list_schedules(_: argparse.Namespace) -> str:
    """List the schedules, one line per schedule."""
    units = "p: ranks; v: stages per rank; m: microbatches; F, B, W: times and M: activation of a microbatch on a rank"
    lines = [f"{units}; bubble: idle time within the span, without communication"]
    for recipe in SCHEDULES.values():
        lines.append(f"{recipe.name:17}bubble {recipe.bubble:19}memory {recipe.memory:13}{recipe.summary}")
    lines.append(f"{AUTO:17}the shortest schedule found for the given costs within --memory-limit")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
