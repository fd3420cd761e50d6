"""A new decision of the planner, defined outside the package: a flag, a field of the setup, and a function.

The decision is how often a schedule is repeated one after the other, for fewer microbatches each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product

import pytest

from megatron.zero_bubble.cli.plan import add_plan, question_of
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.planning.answer import answer
from megatron.zero_bubble.planning.choosers import CHOOSERS
from megatron.zero_bubble.planning.offer import Ask, Offer
from megatron.zero_bubble.planning.offload import OffloadPlan
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant, attempt
from megatron.zero_bubble.planning.setup import Setup

TIMES = "--forward-ms 4 --backward-ms 5 --wgrad-ms 3 --num-ranks 3 --num-microbatches 6"

OPTION = ("--repeat", {"type": int, "nargs": "+", "default": [1], "help": "how often a schedule is repeated"})


@dataclass(frozen=True)
class _Setup(Setup):
    repeat: tuple[int, ...] = (1,)


def repeat(question: Question, ask: Ask) -> Iterator[Offer | DroppedVariant]:
    """Choose how often the schedule is repeated; its parts have equally many microbatches."""
    assert isinstance(question.setup, _Setup)
    for times in question.setup.repeat:
        yield from attempt(f"repeating {times} times", partial(_repeated, question, ask, times))


def _repeated(question: Question, ask: Ask, times: int) -> Iterator[Offer | DroppedVariant]:
    whole = question.costs
    few = whole.num_microbatches // times
    for offer in ask(replace(question, costs=replace(whole, num_microbatches=few))):
        yield offer if isinstance(offer, DroppedVariant) else Offer(_chained(offer.schedule, times), whole)


def _chained(schedule: Schedule, times: int) -> Schedule:
    m = schedule.num_microbatches
    order = tuple(
        tuple(p._replace(microbatch=p.microbatch + part * m) for part, p in product(range(times), row))
        for row in schedule.order
    )
    return replace(schedule, num_microbatches=times * m, order=order)


WITH_REPEAT = (*CHOOSERS[:-1], repeat, CHOOSERS[-1])


def asked(flags: str) -> Question:
    parser = argparse.ArgumentParser()
    add_plan(parser)
    parser.add_argument(OPTION[0], **OPTION[1])
    options = parser.parse_args(f"{TIMES} {flags}".split())
    question = question_of(options)
    own = {field.name: getattr(question.setup, field.name) for field in fields(question.setup)}
    return replace(question, setup=_Setup(**own, repeat=tuple(options.repeat)))


def test_its_best_value_is_chosen_with_every_other_decision() -> None:
    """Parts of one microbatch take longer and hold less, so that a limit decides."""
    once = answer(asked("--schedule zb-h2"), WITH_REPEAT)
    assert once.timeline == answer(question_of_flags("--schedule zb-h2")).timeline
    free = answer(asked("--schedule zb-h2 --repeat 6 1"), WITH_REPEAT)
    assert free.schedule == once.schedule, "the shortest"
    limited = answer(
        asked("--schedule zb-h2 --memory-limit 3GiB --activation-memory 1073741824 --repeat 1 6"), WITH_REPEAT
    )
    validate(limited.schedule)
    assert limited.schedule.num_microbatches == 6
    assert limited.timeline.span_ms > free.timeline.span_ms, "repeated, to be within the limit"
    assert limited.certificate is not None and max(limited.timeline.peak_activation) <= 3
    moved = answer(asked("--schedule zb-h2 --offload all --host-ms 2 --repeat 6"), WITH_REPEAT)
    assert moved.part(OffloadPlan) is not None and moved.timeline.schedule == limited.schedule


def test_a_value_without_a_plan_is_reported() -> None:
    found = answer(asked("--schedule zb-h1 --repeat 7 1"), WITH_REPEAT)
    assert [each.name for each in found.dropped] == ["repeating 7 times"]
    with pytest.raises(ValueError, match="num_microbatches must be 1 or more"):
        answer(asked("--schedule zb-h1 --repeat 7"), WITH_REPEAT)


def question_of_flags(flags: str) -> Question:
    parser = argparse.ArgumentParser()
    add_plan(parser)
    return question_of(parser.parse_args(f"{TIMES} {flags}".split()))
