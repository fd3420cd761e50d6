"""How to run a schedule of the table that ``zero-bubble compare`` prints, or that the playground shows."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.zero_bubble.cli.choices import choices_of
from megatron.zero_bubble.cli.plan import add_plan
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules import recipe
from megatron.zero_bubble.planning.candidates import Candidate
from megatron.zero_bubble.planning.decision import shown
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import Named, Setup
from megatron.zero_bubble.planning.values import PLAN_ROWS, values_of_plan

FILE, OFF = "plan.json", "off"


def how_to_run(
    options: argparse.Namespace, winner: Candidate, schedule: Schedule, needed_layout: str | None = None
) -> str:
    """Return the flags that a job needs for a row; or, where no flag says all, the command that writes its plan.

    Args:
        options: the flags of ``compare``.
        schedule, needed_layout: the order and the layout that its plan has.
    """
    tensor = [] if winner.tensor_parallel is None else [f"--tensor-model-parallel-size {winner.tensor_parallel}"]
    named = has_name(winner.question, schedule, needed_layout)
    flags = flags_of_name(winner.question) if named else None
    command = "" if named else f"{' '.join(_command(_chosen(options, winner, schedule)))} --format json > {FILE}"
    return run_text(flags, command, tensor)


def run_text(flags: Sequence[str] | None, get_file: str, more: Sequence[str] = ()) -> str:
    """Return the sentence that says how to run a plan.

    Args:
        flags: those that name its schedule; None if no flag says all that was chosen.
        get_file: what writes the plan to ``FILE``.
        more: other flags that the job needs.
    """
    if flags is None:
        run = " ".join((*more, f"--zero-bubble-schedule {FILE}"))
        return f"To run it: {get_file}, and add to the job: {run}"
    words = " ".join((*more, *flags))
    return f"To run it, add to the job: {words}" if words else "It is Megatron's own schedule: add nothing."


def has_name(question: Question, schedule: Schedule, needed_layout: str | None) -> bool:
    """Return whether the name of a schedule is all that was chosen.

    Args:
        schedule, needed_layout: the order and the layout that its plan has.
    """
    setup = question.setup.running(Setup.of(schedule))
    more = question.adapts or setup.adds or question.setup.cuts or needed_layout
    return isinstance(setup.order, Named) and not more


def flags_of_name(question: Question) -> tuple[str, ...]:
    """Return the flags of a job for a schedule by name."""
    return tuple(_flags(question.setup))


def _flags(setup: Setup) -> Iterator[str]:
    assert isinstance(setup.order, Named), "it has a name"
    known = recipe(setup.order.name)
    if known.name != "1f1b":
        yield f"--zero-bubble-schedule {known.name}"
    if known.shape == "interleaved":
        yield f"--zero-bubble-num-chunks {known.num_chunks(setup.order.of_run)}"
    if known.has_units:
        yield f"--zero-bubble-unit-microbatches {setup.unit}"


def _chosen(options: argparse.Namespace, winner: Candidate, schedule: Schedule) -> dict[str, Any]:
    """The flags of ``plan`` that make this row, by name: those of ``compare``, and what the row has chosen. A flag that
    was left open is off, if it can be, where nothing was chosen.
    """
    asked = choices_of(options).setup
    values = values_of_plan(winner.question.setup.alone(asked, Setup.of(schedule)))
    chosen: dict[str, Any] = {}
    for decision in PLAN_ROWS:
        if (flag := decision.plan) is not None:
            is_off = OFF in flag.values and getattr(options, flag.option, None)
            chosen[flag.option] = values.get(decision.name, OFF if is_off else None)
    return {**vars(options), **chosen, "memory_limit": options.memory_limit}


def _command(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the command ``plan`` with these flags."""
    parser = argparse.ArgumentParser(add_help=False)
    add_plan(parser)
    yield "zero-bubble plan"
    for action in parser._actions:
        value = chosen.get(action.dest)
        if action.dest == "format" or value is None or value is False or value == action.default:
            continue
        yield action.option_strings[-1]
        if value is not True:
            yield shlex.quote(f"{value:.12g}" if isinstance(value, float) else shown(value))
