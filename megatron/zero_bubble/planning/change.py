"""A change of a job, and what it needs and gains once it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.answer import Answer
from megatron.zero_bubble.planning.codecs import spell
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import message_memory, rank_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.setup import Setup

SAME, ORDER, ROUNDED = "same bits", "same bits but for the norm", "rounded differently"
"""How the numbers of a change compare with those of the job as it is."""
NUMBERS = {
    SAME: "those of the job as it is, bit for bit with --zero-bubble-exact",
    ORDER: "those of the job as it is from the same weights, bit for bit with --zero-bubble-exact but for gradient "
    "norms, which are summed over other ranks, and steps that are clipped by them",
    ROUNDED: "those of the job as it is up to rounding, because sums are in another order (float32: within 1e-5)",
}
MESSAGES = 4
"""Messages per stage of a rank that a plan leaves room for: two that it sends, and two that it receives."""
LARGE = 20_000
"""Passes of a large plan."""
_INSERTED = 10
"""Plans of a search into which passes are inserted, one after the other, each in several ways."""


@dataclass(frozen=True)
class Change:
    """A change of the job.

    Its plan must run on the GPUs of the job, unless it is Megatron's own.

    Attributes:
        name: a short name for the table.
        question: what the planner is asked.
        setup: what the job runs then, but for what depends on the plan (``of_plan``).
        adds: flags of Megatron's own to add, with their values.
        drops: flags of Megatron's own to leave out, which contradict the change.
        numbers: a key of ``NUMBERS``.
        reorders: whether it changes only the order of passes: same stages, layers and sequences.
        placement: where the stages are.
        of_plan: completes the setup by what the planner has chosen, such as a layout.
    """

    name: str
    question: Question
    setup: Setup
    placement: Placement
    adds: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    numbers: str = SAME
    reorders: bool = False
    of_plan: Callable[[Setup, Answer], Setup] = lambda setup, _: setup

    @property
    def is_ours(self) -> bool:
        """Whether a schedule of this package runs it."""
        return self.setup.order is not None

    @property
    def searches(self) -> bool:
        """Whether it takes seconds to plan."""
        return self.question.searches

    @property
    def num_searched(self) -> int:
        """The passes of the plans that it searches among, by which the work of a search is counted."""
        question = self.question
        searches = 1 if question.offloading is None else len(question.offloading.limits)
        plans = searches * (_INSERTED if question.setup.vocabulary else 1) * (1 + question.setup.early_recompute)
        cuts = question.setup.cuts
        parts = 1 if cuts is None else cuts.num_parts
        return plans * 3 * self.placement.num_stages * question.costs.num_microbatches * parts

    @property
    def effort(self) -> tuple[int, int]:
        """What it asks of a user: how much the numbers change, and how many words there are to add."""
        return list(NUMBERS).index(self.numbers), len(self.adds) + len(spell(self.setup))


@dataclass(frozen=True)
class Need:
    """Memory of one GPU of every pipeline rank, in bytes, or activations alone in the unit of the costs."""

    activations: tuple[float, ...]
    messages: tuple[float, ...]
    weights: tuple[float, ...]

    @cached_property
    def totals(self) -> tuple[float, ...]:
        """The sum per rank."""
        return tuple(map(sum, zip(self.activations, self.messages, self.weights, strict=True)))

    @property
    def fullest(self) -> int:
        """The rank that needs most."""
        return max(range(len(self.totals)), key=self.totals.__getitem__)

    @property
    def most(self) -> float:
        """What the fullest rank needs."""
        return self.totals[self.fullest]


def need_of(timeline: Timeline, costs: Figures, large: int = LARGE) -> Need:
    """The memory of a plan; zero for messages and weights whose sizes are unknown.

    Messages of a large plan count as ``MESSAGES`` per stage, because lowering it takes long.

    Args:
        large: the passes above which a plan is large.
    """
    messages = nothing = (0.0,) * costs.num_ranks
    if costs.message_bytes and costs.in_bytes:
        schedule, widths = timeline.schedule, costs.widths_on(timeline.schedule.placement)
        each = MESSAGES * costs.message_bytes * max(widths, default=1.0)
        stages = schedule.num_stages // costs.num_ranks
        is_large = sum(map(len, timeline.spans)) > large
        messages = (each * stages,) * costs.num_ranks
        messages = messages if is_large else message_memory(schedule, costs.message_bytes, widths=widths)
    weights = costs.weights_on(timeline.schedule.placement) if costs.in_bytes else None
    return Need(rank_memory(timeline, costs), messages, weights or nothing)


def need_of_plan(plan: Answer, large: int = LARGE) -> Need:
    """The memory of an answer; the arguments are those of ``need_of``."""
    own = need_of(plan.timeline, plan.costs, large)
    return replace(own, weights=plan.static or own.weights)


@dataclass(frozen=True)
class AdviceRow:
    """A planned change.

    Attributes:
        titles: what it is the best at.
        gain: the share of the time of the job as it is that it saves.
        gap: the most by which another plan of the same change could be shorter, as a share of its time; None where
            passes overlap, for which there is no bound.
        need: its memory.
        fits: whether it is within the memory.
        setup: what the job runs with it.
        environment: variables to start the job with, as ``NAME=VALUE``.
        is_checked: whether it is proved, with the figures of its dry run.
        as_run: the timeline of its dry run, whose layers per stage may be others than the plan's; None if it has none.
        expected_ms: its length where figures are rough, and the plan may have only few of the microbatches; else None.
    """

    change: Change
    plan: Answer
    need: Need
    fits: bool
    gain: float
    gap: float | None
    setup: Setup
    environment: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    is_checked: bool = False
    as_run: Timeline | None = None
    expected_ms: float | None = None

    @property
    def timeline(self) -> Timeline:
        """That of its dry run, if it has one."""
        return self.plan.timeline if self.as_run is None else self.as_run

    @property
    def ms(self) -> float:
        """Its length by the objective."""
        if self.expected_ms is not None:
            return self.expected_ms
        return length_ms(self.timeline, self.plan.question.objective)


class Today(NamedTuple):
    """The job as it is."""

    timeline: Timeline
    costs: Figures
    need: Need
