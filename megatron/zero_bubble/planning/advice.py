"""What a job gains from each change that this package offers, and which of them is worth making.

The job as it is and every change are planned with the same costs. A change is a question to the planner, together with
the flags that make a job run the answer. A search is left out where a lower bound shows that it cannot give a shorter
plan than is known already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.analysis.score import ROUNDING, length_ms
from megatron.zero_bubble.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.errors import UserError
from megatron.zero_bubble.ir import Placement
from megatron.zero_bubble.planning.answer import Answer, answer
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import message_memory, quick_bound, rank_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant
from megatron.zero_bubble.planning.uncertainty import gains

SAME, ORDER, ROUNDED = "same bits", "same bits but for the norm", "rounded differently"
"""How the numbers of a change compare with those of the job as it is."""
NUMBERS = {
    SAME: "those of the job as it is, bit for bit with --zero-bubble-exact",
    ORDER: "those of the job as it is from the same weights, bit for bit with --zero-bubble-exact but for gradient "
    "norms, which are summed over other ranks, and steps that are clipped by them",
    ROUNDED: "those of the job as it is up to rounding, because sums are in another order (float32: within 1e-5)",
}
WORTH = 0.01
"""The least gain, as a share of the time, that is worth a change by measured costs."""
WORTH_ESTIMATED = 0.02
"""The same by estimated costs."""
MESSAGES = 4
"""Messages per stage of a rank that a plan leaves room for: two that it sends, and two that it receives."""
_LARGE = 20_000
"""Passes of a large plan."""
_NEARLY = 0.01
"""The share of the time that a simpler change may lose against the fastest."""
_AS_LONG = 1 + 1e-6
"""Plans that differ by less count as equally long, of which the simpler one is taken."""


@dataclass(frozen=True)
class Change:
    """A change of the job.

    Attributes:
        name: a short name for the table.
        question: what the planner is asked; None for a schedule that is known, ``known``.
        flags: the flags to add, but for those that depend on the plan (``of_plan``).
        drops: the flags of the job to leave out, which contradict the change.
        numbers: a key of ``NUMBERS``.
        reorders: whether it changes only the order of passes: same stages, layers and sequences.
        placement: where the stages are.
        of_plan: further flags, such as a layout that the planner chooses.
    """

    name: str
    question: Question
    flags: tuple[str, ...]
    placement: Placement
    drops: tuple[str, ...] = ()
    numbers: str = SAME
    reorders: bool = False
    of_plan: Callable[[Answer], tuple[str, ...]] = lambda _: ()

    @property
    def searches(self) -> bool:
        """Whether it takes seconds to plan."""
        return self.question.searches

    @property
    def effort(self) -> tuple[int, int]:
        """What it asks of a user: how much the numbers change, and how many flags there are to add."""
        return list(NUMBERS).index(self.numbers), len(self.flags)


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


def need_of(timeline: Timeline, costs: Figures) -> Need:
    """The memory of a plan; zero for messages and weights whose sizes are unknown.

    Messages of a large plan count as ``MESSAGES`` per stage, because lowering it takes seconds.
    """
    messages = nothing = (0.0,) * costs.num_ranks
    if costs.message_bytes and costs.in_bytes:
        schedule, each = timeline.schedule, MESSAGES * costs.message_bytes
        stages = schedule.num_stages // costs.num_ranks
        is_large = sum(map(len, timeline.spans)) > _LARGE
        messages = (each * stages,) * costs.num_ranks if is_large else message_memory(schedule, costs.message_bytes)
    weights = costs.weight_bytes(timeline.schedule.placement) if costs.weight_bytes and costs.in_bytes else nothing
    return Need(rank_memory(timeline, costs), messages, weights)


def _need(plan: Answer) -> Need:
    own = need_of(plan.timeline, plan.costs)
    if plan.shards is None:
        return own
    return Need(plan.shards.activations, own.messages, plan.shards.static or own.weights)


@dataclass(frozen=True)
class Row:
    """A planned change.

    Attributes:
        titles: what it is the best at.
        gain: the share of the time of the job as it is that it saves.
        gap: the most by which another plan of the same change could be shorter, as a share of its time; None where
            passes overlap, for which there is no bound.
        need: its memory.
        fits: whether it is within the memory.
        flags: all flags to add.
    """

    change: Change
    plan: Answer
    need: Need
    fits: bool
    gain: float
    gap: float | None
    titles: tuple[str, ...] = ()

    @cached_property
    def flags(self) -> tuple[str, ...]:
        return (*self.change.flags, *self.change.of_plan(self.plan))

    @cached_property
    def drops(self) -> tuple[str, ...]:
        """The flags of the job to leave out."""
        return tuple(flag for flag in self.change.drops if flag not in self.flags)

    @property
    def ms(self) -> float:
        """Its length by the objective."""
        return length_ms(self.plan.timeline, self.plan.question.objective)


class Today(NamedTuple):
    """The job as it is."""

    timeline: Timeline
    costs: Figures
    need: Need


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        rows: the best changes, the fastest first; empty if nothing can be gained.
        dropped: changes that are refused or have no plan, with the reason.
        left_out: the changes that were not planned, because the time was up.
        worth: the least gain that is worth a change, as a share of the time of the job as it is.
    """

    today: Today
    rows: tuple[Row, ...]
    objective: Metric
    worth: float
    dropped: tuple[DroppedVariant, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def is_estimated(self) -> bool:
        """Whether the costs are estimates."""
        return self.worth == WORTH_ESTIMATED

    @property
    def best(self) -> Row | None:
        """The change to make: the simplest that is nearly as fast as the fastest; None if none is worth it."""
        fits = [row for row in self.rows if row.fits and row.gain >= self.worth]
        fastest = max((row.gain for row in fits), default=0.0)
        near = (row for row in fits if row.gain > fastest - _NEARLY)
        return min(near, key=lambda row: (row.change.effort, row.ms), default=None)

    @cached_property
    def gain_range(self) -> tuple[float, float] | None:
        """The least and the largest gain of ``best`` if passes or transfers take another time (``uncertainty``); None
        if there is none, or where all-to-alls, copies or collectives take part.
        """
        best, (timeline, costs, _) = self.best, self.today
        if best is None or best.plan.offloaded is not None or best.plan.shards is not None:
            return None
        schedules = (timeline.schedule, costs), (best.plan.schedule, best.plan.costs)
        before, after = ((schedule, of.on(schedule.placement)[0]) for schedule, of in schedules)
        return None if before[1].experts or after[1].experts else gains(before, after, self.objective)

    @property
    def today_ms(self) -> float:
        """The time of the job as it is."""
        return length_ms(self.today.timeline, self.objective)


@dataclass
class Adviser:
    """Plans changes, and keeps the best of each kind.

    Args:
        capacity: bytes of a GPU that a plan may take; None if unknown.
        accepts: returns why a job with these flags, without those, would be refused; None if it would run.
        seconds: CPU time after which changes are left out.
        tell: is called with the name of each change before it is planned.
        most_activations: limit of activation memory alone, in the unit of the costs.
    """

    today: Today
    objective: Metric
    capacity: float | None
    accepts: Callable[[Sequence[str], Sequence[str]], str | None]
    worth: float
    seconds: float = math.inf
    tell: Callable[[str], None] = lambda _: None
    most_activations: float = math.inf
    rows: list[Row] = field(default_factory=list)
    dropped: list[DroppedVariant] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def advise(self, changes: Iterable[Change | DroppedVariant]) -> Advice:
        """Plan the changes, those that need no search first."""
        started = time.process_time()
        waiting: list[tuple[float, int, Change]] = []
        for number, change in enumerate(changes):
            if isinstance(change, DroppedVariant):
                self.dropped.append(change)
            elif change.searches:
                saves_weights = change.question.shards is not None  # of use also where it is slower
                waiting.append((0.0 if saves_weights else self._least(change), number, change))
            else:
                self._plan_in_time(change, started)
        for least, _, change in sorted(waiting, key=lambda each: each[:2]):
            if least < self._to_beat(change) * (1 - ROUNDING):
                self._plan_in_time(change, started)
        dropped, left_out = tuple(self.dropped), tuple(self.left_out)
        rows = tuple(self._certified(row, started) for row in self._chosen())
        return Advice(self.today, rows, self.objective, self.worth, dropped, left_out)

    def _least(self, change: Change) -> float:
        """A lower bound in ms on the plans of a change, in closed form."""
        question = change.question
        costs = question.variants[0].costs if question.variants else question.costs
        try:
            passes, _ = costs.on(change.placement)
            work = math.fsum((*passes.forward_ms, *passes.backward_ms, *passes.wgrad_ms))
            mean = costs.num_microbatches * work / costs.num_ranks
            if question.by_cost or question.slices:  # they divide the work otherwise
                return mean
            return max(mean, quick_bound(costs, change.placement, None, self.objective))
        except UserError:
            return 0.0

    def _to_beat(self, change: Change) -> float:
        """The length below which a change is of use: that of the best of its kind so far, and of the job as it is."""
        known = [row.ms for row in self.rows if row.fits and (row.change.reorders or not change.reorders)]
        return min([*known, length_ms(self.today.timeline, self.objective)])

    def _plan_in_time(self, change: Change, started: float) -> None:
        if time.process_time() - started > self.seconds:
            self.left_out.append(change.name)
        else:
            self._plan(change)

    def _plan(self, change: Change) -> None:
        self.tell(change.name)
        try:
            if (refused := self.accepts(change.flags, change.drops)) is not None:
                raise UserError(refused)
            plan = answer(change.question)
            need = _need(plan)  # costs refuse a placement whose stages they lack
            flags = change.of_plan(plan)
            if flags and (refused := self.accepts((*change.flags, *flags), change.drops)) is not None:
                raise UserError(refused)
        except UserError as error:
            self.dropped.append(DroppedVariant(change.name, str(error)))
            return
        fits = self.capacity is None or need.most <= self.capacity * (1 + ROUNDING)
        fits = fits and max(need.activations) <= self.most_activations * (1 + ROUNDING)
        ms, before = (length_ms(each, self.objective) for each in (plan.timeline, self.today.timeline))
        gap = None if plan.schedule.overlaps else max(0.0, 1 - self._least(change) / ms)
        self.rows.append(Row(change, plan, need, fits, 1 - ms / before, gap))

    def _certified(self, row: Row, started: float) -> Row:
        """The row with the gap to the bound that ``plan`` certifies with, if that is for all its plans and in time."""
        asked, timeline = row.plan.question, row.plan.timeline
        is_open = asked.by_cost or asked.slices is not None
        is_within = asked.limit is not None and max(row.need.activations) <= asked.limit * (1 + ROUNDING)
        is_late = sum(map(len, timeline.spans)) > _LARGE or time.process_time() - started > self.seconds
        if row.gap is None or is_open or is_late or not is_within or (certificate := row.plan.certificate) is None:
            return row
        return replace(row, gap=min(row.gap, max(0.0, certificate.gap(timeline))))

    def _chosen(self) -> tuple[Row, ...]:
        """The best rows of each kind, each once, the fastest first."""
        fits = [row for row in self.rows if row.fits]
        titles: dict[int, list[str]] = {}
        for title, rows, amount in self._kinds(fits):
            if rows:
                enough = _AS_LONG * min(map(amount, rows))
                best = min((row for row in rows if amount(row) <= enough), key=lambda row: (row.change.effort, row.ms))
                titles.setdefault(self.rows.index(best), []).append(title)
        found = [replace(self.rows[number], titles=tuple(of)) for number, of in titles.items()]
        return tuple(sorted(found, key=lambda row: row.ms))

    def _kinds(self, fits: Sequence[Row]) -> Iterator[tuple[str, Sequence[Row], Callable[[Row], float]]]:
        """What rows can be the best at, the rows that compete, and the amount that counts, the least is the best."""

        def ms(row: Row) -> float:
            return row.ms

        gains = [row for row in fits if row.gain > ROUNDING]
        yield "fastest", gains, ms
        yield "only the order changes", [row for row in gains if row.change.reorders], ms
        yield "without a search", [row for row in gains if not row.change.searches], ms
        yield "same bits", [row for row in gains if row.change.numbers == SAME], ms
        less = [row for row in fits if row.need.most < self.today.need.most * (1 - ROUNDING)]
        yield "less memory, not slower", [row for row in less if row.gain > -ROUNDING], lambda row: row.need.most
        yield "least memory", less, lambda row: row.need.most
