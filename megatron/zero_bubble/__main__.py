"""The ``zero-bubble`` command.

``list`` prints the schedules; ``plan`` builds one, or reads one from a file, and says what it costs. Wrong input is
one sentence on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.zero_bubble import __version__
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.costs import PassCosts, PassMemory, read_costs_file
from megatron.zero_bubble.ir import Placement, Schedule
from megatron.zero_bubble.plan_file import plan_to_json, read_schedule_file
from megatron.zero_bubble.render.svg import render_svg
from megatron.zero_bubble.render.text import headline, render_text
from megatron.zero_bubble.schedules import SCHEDULES, build

_TEXT_WIDTH = 160


class _Parser(argparse.ArgumentParser):
    """argparse without the usage block in front of its errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        output: str = options.command(options)
    except ValueError as error:
        print(f"zero-bubble {options.name}: {error}", file=sys.stderr)
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
    verbs = root.add_subparsers(dest="name", required=True, metavar="COMMAND", help="list or plan")

    verb = verbs.add_parser("list", help="the schedules, their bubbles and their memory", allow_abbrev=False)
    verb.set_defaults(command=list_schedules)

    verb = verbs.add_parser("plan", help="build a schedule and say what it costs", allow_abbrev=False)
    verb.set_defaults(command=plan)
    source = verb.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    source.add_argument("--schedule-file", metavar="FILE", help="a schedule as JSON, in the form of --format json")
    verb.add_argument("--num-ranks", type=int, metavar="P", help="pipeline ranks")
    verb.add_argument("--num-microbatches", type=int, metavar="M", help="microbatches an iteration")
    verb.add_argument("--forward-ms", type=float, metavar="F", help="forward of a rank's whole share, a microbatch")
    verb.add_argument("--backward-ms", type=float, metavar="B", help="its input gradient")
    verb.add_argument("--wgrad-ms", type=float, metavar="W", help="its weight gradient")
    verb.add_argument("--comm-ms", type=float, metavar="C", help="latency between two ranks (default: 0)")
    verb.add_argument("--activation-memory", type=float, metavar="A", help="kept from F to B (default: 1)")
    verb.add_argument("--wgrad-memory", type=float, metavar="G", help="kept from B to W (default: A)")
    verb.add_argument("--costs", metavar="FILE", help="a costs file, in place of the four times")
    verb.add_argument("--format", choices=("text", "json", "svg"), default="text", help="default: text")
    return root


def list_schedules(_: argparse.Namespace) -> str:
    """A line a schedule."""
    lines = [
        "p ranks; F, B, W: times and M: activation of a microbatch on a rank; bubble by span, without communication"
    ]
    for recipe in SCHEDULES.values():
        lines.append(f"{recipe.name:8}bubble {recipe.bubble:15}memory {recipe.memory:9}{recipe.summary}")
    return "\n".join(lines) + "\n"


def plan(options: argparse.Namespace) -> str:
    """The plan in the form asked for."""
    schedule = _schedule(options)
    costs, memory = _costs(options, schedule.placement)
    timeline = simulate(schedule, costs, memory)
    write: dict[str, Callable[[Timeline], str]] = {"text": _text, "json": plan_to_json, "svg": render_svg}
    return write[options.format](timeline)


def _schedule(options: argparse.Namespace) -> Schedule:
    counts = {"--num-ranks": options.num_ranks, "--num-microbatches": options.num_microbatches}
    if options.schedule_file is None:
        for flag, count in counts.items():
            if count is None:
                raise ValueError(f"--schedule needs {flag}")
        return build(options.schedule, num_ranks=options.num_ranks, num_microbatches=options.num_microbatches)
    schedule = read_schedule_file(options.schedule_file)
    for (flag, count), own in zip(counts.items(), (schedule.num_ranks, schedule.num_microbatches), strict=True):
        if count not in (None, own):
            raise ValueError(f"{flag} must be what the schedule file says, {own}; got {count}; leave it out")
    return schedule


def _costs(options: argparse.Namespace, placement: Placement) -> tuple[PassCosts, PassMemory]:
    """Times from the flags or the file; memory from the flags, else the file, else the defaults."""
    times = {
        "--forward-ms": options.forward_ms,
        "--backward-ms": options.backward_ms,
        "--wgrad-ms": options.wgrad_ms,
        "--comm-ms": options.comm_ms,
    }
    memory = None
    if options.costs is not None:
        for flag, value in times.items():
            if value is not None:
                raise ValueError(f"--costs gives all times of the passes; leave out {flag}")
        costs, memory = read_costs_file(options.costs, placement)
    else:
        times["--comm-ms"] = options.comm_ms or 0.0
        for flag, value in times.items():
            if value is None:
                raise ValueError(f"without --costs the times come from flags; {flag} is missing")
        costs = PassCosts.uniform(placement, *times.values())
    if memory is None or options.activation_memory is not None or options.wgrad_memory is not None:
        activation = 1.0 if options.activation_memory is None else options.activation_memory
        memory = PassMemory.uniform(placement, activation, options.wgrad_memory)
    return costs, memory


def _text(timeline: Timeline) -> str:
    """The picture and a table with both bubble rates."""
    peaks = timeline.peak_activation
    listed = " ".join(f"{peak:.4g}" for peak in peaks)
    return (
        f"{headline(timeline)}\n\n{render_text(timeline, _TEXT_WIDTH)}\n"
        f"{'metric':10}{'ms':>12}{'bubble rate':>14}   measured from\n"
        f"{'span':10}{timeline.span_ms:12.3f}{timeline.bubble_rate('span'):14.4f}   "
        "a rank's first pass to its last, the longest rank: the optimizer does not wait for other ranks\n"
        f"{'makespan':10}{timeline.makespan_ms:12.3f}{timeline.bubble_rate('makespan'):14.4f}   "
        "the first pass of all to the last of all: the optimizer waits for every rank\n\n"
        f"peak activation {max(peaks):.4g} microbatches on a rank; by rank: {listed}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
