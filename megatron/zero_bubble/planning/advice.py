"""What a job gains from each change that this package offers, and which of them is worth making.

The job as it is and every change are planned with the same costs. A change is a question to the planner, together with
the flags that make a job run the answer. A search is left out where a lower bound shows that it cannot give a shorter
plan than is known already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.score import ROUNDING, Goal, length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric, Timeline
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.core.errors import PlanError, Refusal, UserError, attempted
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.planning.answer import Answer, answer, refusal_of
from megatron.zero_bubble.planning.change import LARGE, SAME, AdviceRow, Change, Need, Today, need_of_plan
from megatron.zero_bubble.planning.feasibility import Feasibility
from megatron.zero_bubble.planning.few import extended, two_numbers
from megatron.zero_bubble.planning.plans import quick_bound
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.recompute import without_recomputation
from megatron.zero_bubble.planning.score import DroppedVariant
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.worth import Advice, Barred

_EQUAL = 1 + 1e-6
"""Plans that differ by less are equally good, of which the simpler one is taken."""
_AS_LONG = 1.005
"""Plans that differ by less count as equally long, of which the one with less memory is taken."""
_ALIKE = 1.01
"""Amounts of memory that differ by less count as equal."""
_ms = attrgetter("ms")


class StartedWith(NamedTuple):
    """What a job is started with, and what its GPUs can then run."""

    runs: Feasibility
    environment: tuple[str, ...] = ()


class Tried(NamedTuple):
    """The plan of a job that was tried, what it takes, and, of a search, the answer."""

    timeline: Timeline
    need: Need
    answer: Answer | None


@dataclass
class Adviser:
    """Plans changes, and keeps the best of each kind.

    Args:
        capacity: bytes of a GPU that a plan may take; None if unknown.
        refused: why a job with a change would be refused, given what it then runs; None if it would run.
        settings: what the job may be started with, the first is preferred; empty for any plan.
        tried: plans and proves the job with a row's change as its dry run does; raises ``UserError`` for what is
            refused, ``PlanError`` where another setting may help. None to prove rows as they were planned.
        most_searched: passes of searched plans after which searches are left out. It is a count and no time, so that
            the advice is the same on every machine.
        unproved: rows that are refused as the job would run them, and why.
        searched: passes of the plans that were searched for so far.
        is_quick: whether schedules by name are compared by few microbatches where there are many, by estimates of the
            memory of messages, and without bounds. What is to be shown has the figures of ``tried``, which this needs.
        tell: is called with the name of each change before it is planned.
        most_activations: limit of activation memory alone, in the unit of the costs.
    """

    today: Today
    objective: Metric
    capacity: float | None
    refused: Callable[[Change, Setup], Refusal | None]
    worth: float
    most_searched: float = math.inf
    tell: Callable[[str], None] = lambda _: None
    most_activations: float = math.inf
    settings: tuple[StartedWith, ...] = ()
    tried: Callable[[AdviceRow], Tried] | None = None
    rows: list[AdviceRow] = field(default_factory=list)
    dropped: list[DroppedVariant] = field(default_factory=list)
    unproved: list[tuple[AdviceRow, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    searched: int = 0
    is_quick: bool = False

    def advise(self, changes: Iterable[Change | DroppedVariant]) -> Advice:
        """Plan the changes, those that need no search first; then prove those that are to be shown."""
        waiting: list[tuple[float, Change]] = []
        for change in changes:
            if isinstance(change, DroppedVariant):
                self.dropped.append(change)
            elif change.searches:
                saves_weights = change.question.replicas is not None  # of use also where it is slower
                waiting.append((0.0 if saves_weights else self._least(change), change))
            else:
                self._plan(change)
        searches = _in_order(waiting)
        while True:
            searches = [each for each in searches if not self._searched(*each)]
            chosen = self._chosen()
            if (row := next((row for row in chosen if not row.is_checked), None)) is not None:
                self._check(row)
            elif (row := self._too_large(chosen)) is not None and row.expected_ms is not None:
                self.rows[self.rows.index(row)] = self._row(row.change, row.change.question)
            else:
                break
        dropped, left_out = tuple(self.dropped), tuple(self.left_out)
        rows = tuple(self._certified(row) for row in chosen)
        barred = self._barred(rows)
        return Advice(self.today, rows, self.objective, self.worth, dropped, left_out, len(self.rows), barred)

    def _searched(self, least: float, change: Change) -> bool:
        """Make a search unless a row is known that it cannot beat, which is asked again once that row is refused."""
        needed = ROUNDING if change.question.setup.cuts is None else self.worth
        if not (is_of_use := least < self._to_beat(change) * (1 - needed)):
            return False
        if self.searched >= self.most_searched:
            self.left_out.append(change.name)
        else:
            self._plan(change)
        return is_of_use

    def _check(self, row: AdviceRow) -> None:
        """Prove a row that is to be shown, and give it the figures of its dry run; drop it if that refuses it.

        A proof takes as long as a search, so only these rows are proved.
        """
        place = next(at for at, own in enumerate(self.rows) if own.change is row.change)
        self.tell(f"{row.change.name}, as the job would run it")
        as_run = self._as_run(row)
        if isinstance(as_run, Refusal):
            del self.rows[place]
            self.dropped.append(DroppedVariant(row.change.name, as_run.reason, as_run.remedy))
            self.unproved.append((row, as_run.reason))
        else:
            self.rows[place] = replace(as_run, titles=())

    def _as_run(self, row: AdviceRow) -> AdviceRow | Refusal:
        """A row with the first of ``settings`` in which it runs as short as planned, else the shortest of them."""
        if not self.settings or not row.change.is_ours:
            return attempted(partial(self._with_figures, row, None))
        found: list[AdviceRow] = []
        for setting in self.settings:
            started = replace(row, environment=setting.environment)
            as_run = attempted(partial(self._with_figures, started, setting.runs))
            if isinstance(as_run, Refusal):
                is_last = not as_run.is_of_plan
            else:
                is_last = as_run.ms <= row.ms * _AS_LONG
                found.append(as_run)
            if is_last:
                break
        return min(found, key=lambda each: (not each.fits, each.ms), default=as_run)

    def _with_figures(self, row: AdviceRow, runs: Feasibility | None) -> AdviceRow:
        """A row with the figures of its dry run, which proves its plan. Where that does not have them, because it may
        not know the bandwidths that the times of copies and collectives follow from, a search whose plan cannot run
        is made again.

        Raises:
            UserError: it is refused.
        """
        change, tried = row.change, None if self.tried is None else self.tried(row)
        if tried is None or not row.plan.is_plain:
            own = row
            if runs is not None and (refused := refusal_of(row.plan, runs)) is not None:
                if not change.searches:
                    raise PlanError(refused)
                own = self._row(change, replace(change.question, runs=runs))
            return replace(own, environment=row.environment, is_checked=True)
        timeline, need, plan = tried
        ms, before = (length_ms(each, self.objective) for each in (timeline, self.today.timeline))
        gap, gain = None if row.gap is None else max(0.0, 1 - self._least(change) / ms), 1 - ms / before
        if row.expected_ms is not None and row.plan.question is not (asked := change.question):
            plan = replace(row.plan, question=asked, costs=asked.costs, schedule=timeline.schedule, simulated=timeline)
        row = replace(row, plan=plan or row.plan, need=need, fits=self._fits(need), gain=gain, gap=gap)
        return replace(row, is_checked=True, as_run=timeline, expected_ms=None)

    def _fits(self, need: Need) -> bool:
        fits = self.capacity is None or need.most <= self.capacity * (1 + ROUNDING)
        return fits and max(need.activations) <= self.most_activations * (1 + ROUNDING)

    def _barred(self, rows: Sequence[AdviceRow]) -> tuple[Barred, ...]:
        """The shortest plan above a limit, and the shortest that no proof allows, where all that can run are longer."""
        found = [] if (row := self._too_large(rows)) is None else [(row, self._excess(row.need))]
        if self.unproved:
            row, why = min(self.unproved, key=lambda one: one[0].ms)
            whole = row if row.expected_ms is None else self._row(row.change, row.change.question)
            found += [(whole, why)] if whole.ms < self._shortest(rows) else []
        return tuple(Barred(row.change.name, row.ms, why) for row, why in found)

    def _too_large(self, rows: Sequence[AdviceRow]) -> AdviceRow | None:
        """The shortest plan above a limit, if it is shorter than ``rows``."""
        row = min((row for row in self.rows if not row.fits), key=_ms, default=None)
        return None if row is None or row.ms >= self._shortest(rows) else row

    def _shortest(self, rows: Sequence[AdviceRow]) -> float:
        """The length in ms below which a plan is shorter than ``rows`` and the job as it is."""
        return min([length_ms(self.today.timeline, self.objective), *map(_ms, rows)]) / _AS_LONG

    def _excess(self, need: Need) -> str:
        """The limit that a need is above."""
        costs, most = self.today.costs, max(need.activations)
        if most > self.most_activations * (1 + ROUNDING):
            return f"activations of {costs.show(most)}, above the limit of {costs.show(self.most_activations)}"
        assert self.capacity is not None, "what does not fit is above a limit"
        return f"{format_bytes(need.most)} on the fullest rank, of which {format_bytes(self.capacity)} may be taken"

    def _least(self, change: Change) -> float:
        """A lower bound in ms on the plans of a change, in closed form."""
        least = attempted(partial(self._bound, change))
        return 0.0 if isinstance(least, Refusal) else least

    def _bound(self, change: Change) -> float:
        question = change.question
        again = question.setup.early_recompute
        costs = question.costs
        passes, _ = costs.on(change.placement)
        work = math.fsum((*passes.forward_ms, *passes.backward_ms, *passes.wgrad_ms))
        if question.setup.pairs:  # computation and all-to-alls may run at the same time
            sent = math.fsum(parts.all_to_all for parts in passes.experts)
            work = max(work - sent, sent)
        mean = costs.num_microbatches * work / costs.num_ranks
        if question.by_cost or question.setup.cuts or question.setup.pairs:  # they divide the work otherwise
            return mean
        costs = without_recomputation(costs) if again else costs  # no pass waits for an R
        return max(mean, quick_bound(costs, Workload(change.placement, costs.num_microbatches), Goal(self.objective)))

    def _to_beat(self, change: Change) -> float:
        """The length below which a change is of use: that of the best of its kind so far, and of the job as it is."""
        known = [row.ms for row in self.rows if row.fits and (row.change.reorders or not change.reorders)]
        return min([*known, length_ms(self.today.timeline, self.objective)])

    def _plan(self, change: Change) -> None:
        self.tell(change.name)
        refused = self.refused(change, change.setup)
        if refused is None and change.searches:
            self.searched += change.num_searched
        make = self._roughly if self.is_quick and change.question.is_named else self._row
        row = attempted(partial(make, change, change.question)) if refused is None else refused
        if isinstance(row, Refusal):
            self.dropped.append(DroppedVariant(change.name, row.reason, row.remedy))
        else:
            self.rows.append(row)

    def _row(self, change: Change, question: Question, is_rough: bool = False) -> AdviceRow:
        """The row of a change whose plan answers a question.

        Args:
            is_rough: whether messages are estimated, and there is no bound.

        Raises:
            UserError: there is no plan, or the job refuses it.
        """
        question.costs.check(change.placement)
        plan = answer(question)
        need = need_of_plan(plan, 0 if is_rough else LARGE)
        setup = change.of_plan(change.setup, plan)
        if setup != change.setup and (refused := self.refused(change, setup)) is not None:
            raise UserError(refused.reason, remedy=refused.remedy)
        ms, before = (length_ms(each, self.objective) for each in (plan.timeline, self.today.timeline))
        gap = None if plan.schedule.overlaps else 1.0 if is_rough else max(0.0, 1 - self._least(change) / ms)
        return AdviceRow(change, plan, need, self._fits(need), 1 - ms / before, gap, setup)

    def _roughly(self, change: Change, question: Question) -> AdviceRow:
        """The same, roughly, with figures that are extended from those of few microbatches, if there are many.

        Raises:
            UserError: as ``_row``.
        """
        costs, before = question.costs, length_ms(self.today.timeline, self.objective)
        if (counts := two_numbers(costs.num_ranks, count := costs.num_microbatches)) is None:
            row = self._row(change, question, is_rough=True)
            return replace(row, expected_ms=row.ms)
        short = (replace(question, costs=replace(costs, num_microbatches=each)) for each in counts)
        first, second = (self._row(change, own, is_rough=True) for own in short)
        (ms,) = extended((first.ms,), (second.ms,), counts, count)
        need = replace(
            second.need, activations=extended(first.need.activations, second.need.activations, counts, count)
        )
        return replace(second, need=need, fits=self._fits(need), gain=1 - ms / before, expected_ms=ms)

    def _certified(self, row: AdviceRow) -> AdviceRow:
        """The row with the gap to the bound that ``plan`` certifies with, if that is for all its plans."""
        asked, timeline = row.plan.question, row.timeline
        is_open = row.change.question.by_cost or asked.setup.cuts is not None
        is_within = asked.limit is not None and max(row.need.activations) <= asked.limit * (1 + ROUNDING)
        is_large = sum(map(len, timeline.spans)) > LARGE  # then a bound takes as long as a search
        if row.gap is None or is_open or is_large or not is_within or (certificate := row.plan.certificate) is None:
            return row
        return replace(row, gap=min(row.gap, max(0.0, certificate.gap(timeline))))

    def _chosen(self) -> tuple[AdviceRow, ...]:
        """The best rows of each kind, each once, the fastest first."""
        fits = [row for row in self.rows if row.fits]
        titles: dict[int, list[str]] = {}
        for title, rows, amount in self._kinds(fits):
            if rows:
                best = _simplest(rows, amount)
                titles.setdefault(self.rows.index(best), []).append(title)
        found = [replace(self.rows[number], titles=tuple(of)) for number, of in titles.items()]
        return tuple(sorted(found, key=lambda row: row.ms))

    def _kinds(
        self, fits: Sequence[AdviceRow]
    ) -> Iterator[tuple[str, Sequence[AdviceRow], Callable[[AdviceRow], float]]]:
        """What rows can be the best at, the rows that compete, and the amount that counts, the least is the best."""
        gains = [row for row in fits if row.gain > ROUNDING]
        yield "fastest", gains, _ms
        yield "only the order changes", [row for row in gains if row.change.reorders], _ms
        yield "without a search", [row for row in gains if not row.change.searches], _ms
        yield "same bits", [row for row in gains if row.change.numbers == SAME], _ms
        less = [row for row in fits if row.need.most < self.today.need.most * (1 - ROUNDING)]
        yield "less memory, not slower", [row for row in less if row.gain > -ROUNDING], lambda row: row.need.most
        yield "least memory", less, lambda row: row.need.most


def _in_order(waiting: Sequence[tuple[float, Change]]) -> list[tuple[float, Change]]:
    """Searches in the order in which they are made: the most promising stages first, and on them the search for an
    order alone before those that add to it. Those of slices are the last: they take longest, and their gain must be
    worth it.
    """
    first: dict[Placement, float] = {}
    for least, change in waiting:
        first[change.placement] = min(least, first.get(change.placement, math.inf))

    def key(each: tuple[float, Change]) -> tuple[bool, float, bool, float]:
        least, change = each
        question = change.question
        return question.setup.cuts is not None, first[change.placement], not question.adds_nothing, least

    return sorted(waiting, key=key)


def _simplest(rows: Sequence[AdviceRow], amount: Callable[[AdviceRow], float]) -> AdviceRow:
    """The row with the least amount; of those that are as long as the shortest, the one with the least memory."""
    near = _AS_LONG if amount is _ms else _EQUAL
    close = [row for row in rows if amount(row) <= near * min(map(amount, rows))]
    least = _ALIKE * min(row.need.most for row in close)
    return min((row for row in close if row.need.most <= least), key=lambda row: (row.change.effort, row.ms))
