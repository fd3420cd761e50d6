"""What the page asks: flags of ``zero-bubble plan`` in the form of a query string, answered by that command's own code.

``schedule=zb-h1&num-ranks=4&...`` is ``--schedule zb-h1 --num-ranks 4 ...``; a flag without a value, ``equal-passes``,
has an empty one. Flags that read files are not for a page to use, and what it may ask for has a size.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn
from urllib.parse import parse_qsl

from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.cli.plan import add_plan, make_plan, searches
from megatron.zero_bubble.costs import PassCosts
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.formats.plan import plan_content
from megatron.zero_bubble.ir import Pass, Schedule
from megatron.zero_bubble.ir.flow import SAVED
from megatron.zero_bubble.job.source import AUTO
from megatron.zero_bubble.planning.plans import limit_verdict
from megatron.zero_bubble.render.svg import COLOURS, MEANING
from megatron.zero_bubble.schedules import SCHEDULES

_FLAGS = (
    *("schedule", "equal-passes", "num-chunks", "num-ranks", "num-microbatches", "placement", "objective"),
    *("forward-ms", "backward-ms", "wgrad-ms", "comm-ms", "activation-memory", "wgrad-memory", "memory-limit"),
)
_WITHOUT_VALUE = ("equal-passes",)
_MOST_MS = dict.fromkeys(("forward-ms", "backward-ms", "wgrad-ms", "comm-ms"), 1e6)
MOST = {"num-ranks": 32, "num-microbatches": 128, "num-chunks": 4, **_MOST_MS}
MOST_CELLS = 1024
"""The most ranks times microbatches: what is planned in about a second, and searched in a few."""


class Question(NamedTuple):
    """A query string, understood: what it asks ``plan`` for, as the command to copy and as its options."""

    command: str
    options: argparse.Namespace

    @property
    def searches(self) -> bool:
        """Whether its answer takes seconds."""
        return searches(self.options)


class _Parser(argparse.ArgumentParser):
    """The command's own, for many questions: what is wrong is raised, not printed at exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def read_question(query: str) -> Question:
    """The question in a query string.

    Raises:
        UserError: for what ``zero-bubble plan`` would refuse to read, in its words; for a flag that is not offered
            here, or a size that is too large.
    """
    parser = _Parser(prog="zero-bubble plan", allow_abbrev=False)
    add_plan(parser)
    given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=len(_FLAGS)))
    words = ["zero-bubble", "plan"]
    arguments = []
    for flag, value in given.items():
        if flag not in _FLAGS:
            raise UserError(f"the playground asks with {', '.join(_FLAGS)}; got {flag!r}; leave it out")
        bare = flag in _WITHOUT_VALUE and not value
        arguments.append(f"--{flag}" if bare else f"--{flag}={value}")
        words += [f"--{flag}"] if bare else [f"--{flag}", value]
    options = parser.parse_args(arguments)
    _check_size(options)
    return Question(shlex.join(words), options)


def answer(question: Question) -> dict[str, Any]:
    """The plan as ``--format json`` has it, and what a drawing needs besides.

    ``times`` has ``[start, end]`` of every pass in ``order``, in ms; ``waits_for`` the passes it depends on, each with
    the ms at which its result has arrived. ``limit`` says whether the memory limit is kept; None without one.

    Raises:
        UserError: what ``zero-bubble plan`` prints on stderr.
    """
    made = make_plan(question.options)
    timeline, costs, certificate = made.timeline, made.costs, made.certificate
    limit = None
    if certificate is not None:
        kept, sentence = limit_verdict(timeline, costs, certificate)
        limit = {"kept": kept, "sentence": sentence}
    return {
        "command": question.command,
        "plan": plan_content(timeline, certificate),
        "limit": limit,
        "times": [[(start, end) for _, start, end in row] for row in timeline.spans],
        "waits_for": _arrivals(timeline, costs.on(timeline.schedule.placement)[0]),
    }


def catalogue() -> dict[str, Any]:
    """What there is to ask for, how it is coloured, and how large it may be."""
    return {
        "schedules": [
            {"name": r.name, "summary": r.summary, "shape": r.shape, "adapts": r.adapts} for r in SCHEDULES.values()
        ],
        "auto": AUTO,
        "kinds": [{"kind": kind.value, "colour": COLOURS[kind], "meaning": MEANING[kind]} for kind in COLOURS],
        "most": MOST,
        "most_cells": MOST_CELLS,
    }


def _check_size(options: argparse.Namespace) -> None:
    sizes = [(flag, getattr(options, flag.replace("-", "_")), most) for flag, most in MOST.items()]
    if options.num_ranks is not None and options.num_microbatches is not None:
        sizes.append(("ranks times microbatches", options.num_ranks * options.num_microbatches, MOST_CELLS))
    for what, size, most in sizes:
        if size is not None and size > most:
            raise UserError(f"the playground has at most {most:g} {what}; got {size:g}; zero-bubble plan takes more")


def _waited_for(schedule: Schedule, p: Pass) -> list[Pass]:
    """What ``p`` depends on; of a backward that waits for another stage, not its own F, which was there before."""
    inputs = schedule.flow.inputs(p)
    return [value.producer for value in inputs if value.name != SAVED or value is inputs[0]]


def _arrivals(timeline: Timeline, costs: PassCosts) -> list[list[list[tuple[str, float]]]]:
    """For every pass of every rank: what it depends on, and when that is there."""
    schedule = timeline.schedule
    rank_of = schedule.placement.stage_to_rank
    end = {span.pass_: span.end_ms for row in timeline.spans for span in row}

    def needs(rank: int, row: Sequence[Any]) -> list[list[tuple[str, float]]]:
        return [
            [(str(d), end[d] + costs.comm(rank_of[d.stage], rank)) for d in _waited_for(schedule, span.pass_)]
            for span in row
        ]

    return [needs(rank, row) for rank, row in enumerate(timeline.spans)]
