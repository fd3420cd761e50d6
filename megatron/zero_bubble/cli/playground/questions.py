"""The page's questions: flags of ``zero-bubble plan`` as a query string, answered by the code of that command.

``schedule=zb-h1&num-ranks=4&...`` means ``--schedule zb-h1 --num-ranks 4 ...``; a flag without a value, such as
``equal-passes``, has an empty value. The page cannot use flags that read files, and the size of a plan is limited.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from megatron.zero_bubble.cli.lengths import PlanOfLengths, loads_of
from megatron.zero_bubble.cli.plan import add_plan, question_of
from megatron.zero_bubble.cli.playground.job import PageJob
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.costs.lengths import Load
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.plan import PlanFile, plan_content
from megatron.zero_bubble.core.ir import Compute, Pass, Schedule
from megatron.zero_bubble.core.ir.flow import SAVED
from megatron.zero_bubble.core.ir.ops import COPY_BACK, COPY_OUT
from megatron.zero_bubble.core.ir.passes import VOCABULARY_KINDS
from megatron.zero_bubble.core.plan.offload import NO_SHARE
from megatron.zero_bubble.core.render.svg import COLOURS, INKS, LANE_COLOUR, MEANING
from megatron.zero_bubble.core.schedules import SCHEDULES, sliced
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.codecs import StrictParser
from megatron.zero_bubble.planning.decision import SWITCH
from megatron.zero_bubble.planning.offload import AUTO, OffloadPlan
from megatron.zero_bubble.planning.plan_file import written
from megatron.zero_bubble.planning.plans import limit_verdict, rank_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import DEFAULT_CUTS, Given
from megatron.zero_bubble.planning.source import ZB_AUTO
from megatron.zero_bubble.planning.values import PLAN_ROWS
from megatron.zero_bubble.planning.vocabulary import CHOICES

_COSTS = (
    *("num-ranks", "forward-ms", "backward-ms", "wgrad-ms", "comm-ms", "message-ms", "activation-memory"),
    *("wgrad-memory", "attention-share", "output-ms", "output-wgrad-ms", "embedding-ms", "embedding-wgrad-ms"),
    *("collective-ms",),
)
"""The flags that a job gives."""
_OFFERED = [row.plan for row in PLAN_ROWS if row.plan is not None and row.plan.on_page]
_FLAGS = (*(flag.name for flag in _OFFERED), "num-microbatches", "objective", *_COSTS, "host-ms", "lengths")
OWN = "own"
"""The name of a job's own schedule in a question."""
_WITHOUT_VALUE = [flag.name for flag in _OFFERED if flag.values == SWITCH]
_TIMES = [flag for flag in _FLAGS if flag.endswith("-ms")]
MOST = {"num-ranks": 64, "num-microbatches": 256, "num-chunks": 4, **dict.fromkeys(_TIMES, 1e6)}
"""Largest values. At the largest size, a plan without a search takes about two seconds and a search about five."""
MOST_SHOWN_SLICES = 16
_MOST_DIGITS = 9
_MOST_FORWARDS = 64 * 256 * 4
"""The most forwards of a plan, which slices multiply."""
_MOST_SEARCHED = 4096
"""The most forwards for which a schedule of slices is searched: about five seconds."""
_MOST_DIVIDED, _MOST_DIVIDED_SEARCHED = 2048, 512
"""The most forwards of a plan with vocabulary parallelism, without a search and with one: about five seconds."""
_MOST_OFFLOADED, _MOST_OFFLOADED_SEARCHED = 16384, 512
"""The same with offloading."""


class PageQuestion(NamedTuple):
    """A parsed query string: the command to copy, and what it asks.

    Attributes:
        command: None if no command has the costs of the job.
        loads: those of the microbatches, if they differ.
    """

    command: str | None
    question: Question
    loads: tuple[Load, ...] | None


def read_question(query: str, job: PageJob | None = None) -> PageQuestion:
    """Parse a query string.

    Args:
        job: gives costs and ranks, in place of the flags for them.

    Raises:
        UserError: with the message of ``zero-bubble plan`` for flags that it rejects; also for a flag that the
            playground does not offer, and for a size that is too large.
    """
    parser = StrictParser(prog="zero-bubble plan", allow_abbrev=False)
    add_plan(parser)
    given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=len(_FLAGS)))
    is_own = job is not None and job.make is not None and given.get("schedule") == OWN
    if is_own:
        given["schedule"] = "1f1b"  # replaced below
    known = _FLAGS if job is None else [flag for flag in _FLAGS if flag not in _COSTS]
    words = ["zero-bubble", "plan", *(job.words or () if job is not None else ())]
    arguments = []
    for flag, value in given.items():
        if flag not in known:
            raise UserError(f"the playground accepts only {', '.join(known)}; got {flag!r}; leave it out")
        bare = flag in _WITHOUT_VALUE and not value
        arguments.append(f"--{flag}" if bare else f"--{flag}={value}")
        words += [f"--{flag}"] if bare else [f"--{flag}", value]
    options = parser.parse_args(arguments)
    command = shlex.join(words) if job is None or job.words else None
    if job is None:
        _check_size(options)
        return PageQuestion(command, question_of(options), loads_of(options))
    return _of_job(command, options, job, is_own)


def _of_job(command: str | None, options: argparse.Namespace, job: PageJob, is_own: bool) -> PageQuestion:
    options.num_ranks = job.costs.num_ranks
    _check_size(options)
    loads = loads_of(options)
    count = options.num_microbatches if loads is None else len(loads)
    if count is None or count < 1:
        raise UserError(f"--num-microbatches must be 1 or more; got {count}; raise it")
    asked = question_of(options, job.with_microbatches(count))
    if is_own:
        assert job.make is not None
        asked = asked.deciding(order=Given(OWN, PlanFile(job.make(count))))
    return PageQuestion(command, asked, loads)


class PageAnswer(NamedTuple):
    """The answer in two parts, because a page shows the figures of all schedules but few drawings at a time.

    Attributes:
        figures: the plan as ``--format json`` prints it, without its order; ``limit`` states whether the plan is within
            the memory limit, and is None without a limit. With microbatches of different lengths, times are those of
            these lengths, there is no lower bound, and ``lengths`` says what their best order takes. ``run`` says how
            a job runs the plan, and ``memory_gib`` the peaks of activations, and with weights, where they are known.
        drawing: the plan's ``order``, in which the passes of a pair follow each other and share its time; ``times`` has
            ``[start, end]`` of every pass in it, in ms; ``waits_for`` has the passes that it depends on, each with the
            time in ms at which its result arrives; ``copies`` has, per rank, ``[op, start, end]`` of every copy to host
            memory or back.
        file: returns the text of the plan's file, which a job runs.
    """

    figures: dict[str, Any]
    drawing: dict[str, Any]
    file: Callable[[], str]


def page_answer(asked: PageQuestion, job: PageJob | None = None) -> PageAnswer:
    """Make the plan, as ``zero-bubble plan`` does.

    Args:
        job: that of ``read_question``.

    Raises:
        UserError: with the message that ``zero-bubble plan`` prints on stderr.
    """
    made = answer(asked.question)
    timeline, costs, certificate = made.timeline, made.costs, made.certificate
    limit = None
    if (most := made.question.limit) is not None:
        kept, sentence = limit_verdict(timeline, costs, most)
        limit = {"kept": kept, "sentence": sentence}
    plan, more = plan_content(timeline, certificate), {}
    if asked.loads is not None:
        lengths = PlanOfLengths.of(made, asked.loads)
        timeline = lengths.timeline()
        of_bound = ("lower_bound_ms", "lower_bound_reason", "gap")
        equal = {key: value for key, value in plan.items() if key not in of_bound}
        plan, more = equal | plan_content(timeline), {"lengths": lengths.text()}
    if (moved := made.part(OffloadPlan)) is not None:
        plan |= moved.figures
    drawing = {
        "order": [[str(span.pass_) for span in row] for row in timeline.spans],
        "times": [[(start, end) for _, start, end in row] for row in timeline.spans],
        "waits_for": _arrivals(timeline, costs.on(timeline.schedule.placement)[0]),
        "copies": _copies(timeline),
    }
    plan.pop("order")
    figures = {"command": asked.command, "plan": plan, "limit": limit, "run": _how_to_run(asked.question, made, job)}
    return PageAnswer({**figures, "memory_gib": _memory_gib(made), **more}, drawing, partial(written, made))


def _how_to_run(asked: Question, made: Answer, job: PageJob | None) -> str:
    if job is not None:
        return job.how_to_run(asked, made)
    return PageJob("", made.costs).how_to_run(asked, made)


def _memory_gib(made: Answer) -> dict[str, float | None] | None:
    """Peak memory of the fullest rank: activations, and with weights, gradients and optimizer."""
    costs, placement = made.costs, made.schedule.placement
    if not costs.in_bytes:
        return None
    kept = rank_memory(made.timeline, costs)
    weights = costs.weights_on(placement)
    total = None if weights is None else max(map(sum, zip(kept, weights, strict=True))) / 2**30
    return {"activations": max(kept) / 2**30, "total": total}


def catalogue(job: PageJob | None = None) -> dict[str, Any]:
    """Return the available schedules, the colours of passes, the size limits, and what the page shows of a job.

    Raises:
        UserError: for a job with more ranks than the page can draw.
    """
    if job is not None and job.costs.num_ranks > MOST["num-ranks"]:
        raise UserError(
            f"the playground allows at most {MOST['num-ranks']} num-ranks; got {job.costs.num_ranks} in {job.source}; "
            "use zero-bubble advise or compare"
        )
    return {
        "has_server": True,
        "job": None if job is None else job.content(),
        "own": OWN,
        "schedules": [
            {name: getattr(recipe, name) for name in ("name", "summary", "shape", "adapts", "sliced", "has_pairs")}
            for recipe in SCHEDULES.values()
        ],
        "auto": ZB_AUTO,
        "kinds": [
            {
                "kind": kind.value,
                "colour": COLOURS[kind],
                "ink": INKS[kind],
                "meaning": MEANING[kind],
                "shard": kind in VOCABULARY_KINDS,
            }
            for kind in COLOURS
        ],
        "vocabulary": CHOICES,
        "lane": LANE_COLOUR,
        "offload": (NO_SHARE, AUTO, "50%", "all"),
        "most": MOST,
        "slices": [*(str(2**power) for power in range(MOST_SHOWN_SLICES.bit_length())), AUTO],
    }


def _check_size(options: argparse.Namespace) -> None:
    own = loads_of(options)
    if own is not None:
        options = argparse.Namespace(**{**vars(options), "num_microbatches": len(own)})
    for flag, most in MOST.items():
        size = getattr(options, flag.replace("-", "_"))
        if size is not None and size > most:
            raise UserError(
                f"the playground allows at most {most:g} {flag}; got {size:g}; use zero-bubble plan for larger values"
            )
    slices = _most_slices(options)
    if slices > MOST_SHOWN_SLICES:
        raise UserError(
            f"the playground allows at most {MOST_SHOWN_SLICES} slices; got {slices}; use zero-bubble plan for larger "
            "values"
        )
    forwards = (options.num_ranks or 1) * (options.num_microbatches or 1) * slices
    for is_given, searched, built, what, fewer in (
        (slices > 1, _MOST_SEARCHED, _MOST_FORWARDS, " x slices of this schedule", "fewer slices"),
        (
            options.vocabulary not in (None, "off"),
            *(_MOST_DIVIDED_SEARCHED, _MOST_DIVIDED),
            *(" of this schedule with vocabulary parallelism", "fewer"),
        ),
        (
            options.offload not in (None, NO_SHARE),
            *(_MOST_OFFLOADED_SEARCHED, _MOST_OFFLOADED),
            *(" of this schedule with offloading", "fewer"),
        ),
    ):
        most = searched if options.schedule == ZB_AUTO else built // (options.num_chunks or 1)
        if is_given and forwards > most:
            raise UserError(
                f"the playground allows at most {most} for ranks x microbatches{what}; got {forwards}; choose {fewer}, "
                "or use zero-bubble plan"
            )


def _most_slices(options: argparse.Namespace) -> int:
    """Return the largest number of slices that is tried; 1 for text that ``plan`` will reject."""
    if options.num_slices == AUTO:
        return MOST_SHOWN_SLICES
    if options.num_slices is not None:
        digits = options.num_slices if options.num_slices.isascii() and options.num_slices.isdigit() else "1"
        return int(digits[:_MOST_DIGITS])
    if options.slice_cuts is not None:
        return len(options.slice_cuts.split(","))
    return DEFAULT_CUTS if options.schedule in sliced() else 1


def _copies(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    rows = timeline.lanes or ((),) * len(timeline.spans)
    lanes = COPY_OUT, COPY_BACK
    return [[(str(span.op), span.start_ms, span.end_ms) for span in row if span.lane in lanes] for row in rows]


def _waited_for(schedule: Schedule, p: Pass) -> list[Pass]:
    """Return the passes that ``p`` depends on. A backward that waits for another stage omits its own, earlier F."""
    inputs = schedule.flow.inputs(p)
    return list(dict.fromkeys(value.producer for value in inputs if value.name != SAVED or value is inputs[0]))


def _arrivals(timeline: Timeline, costs: PassCosts) -> list[list[list[tuple[str, float]]]]:
    """Return, for every pass of every rank, the passes that it depends on and when their results arrive."""
    schedule = timeline.schedule
    rank_of = schedule.placement.stage_to_rank
    end = {span.pass_: span.end_ms for row in timeline.spans for span in row}

    def arrives_ms(rank: int, p: Pass, source: Pass) -> float:
        origin = rank_of[source.stage]
        return end[source] + (costs.comm(origin, rank) + Compute(p).arrival_ms(costs, source) if origin != rank else 0)

    def needs(rank: int, row: Sequence[Any]) -> list[list[tuple[str, float]]]:
        return [[(str(d), arrives_ms(rank, span.pass_, d)) for d in _waited_for(schedule, span.pass_)] for span in row]

    return [needs(rank, row) for rank, row in enumerate(timeline.spans)]
