"""The answer to a question: the plan for ``plan``, a row of ``compare``, a run of ``zb-auto``, its dry run, and the
playground.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

from megatron.zero_bubble.core.errors import PlanError, UserError
from megatron.zero_bubble.core.formats.plan import Certificate
from megatron.zero_bubble.core.ir.garbage import without_gc
from megatron.zero_bubble.core.ir.vocabulary import Divided
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.planning.choosers import CHOOSERS
from megatron.zero_bubble.planning.feasibility import LESS_MEMORY, Feasibility
from megatron.zero_bubble.planning.offer import Ask, Chooser, Offer, score
from megatron.zero_bubble.planning.plans import bound, peak_memory
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.recompute import recomputing_bound
from megatron.zero_bubble.planning.score import Best, DroppedVariant, attempt, best
from megatron.zero_bubble.planning.vocabulary import divided_in


@dataclass(frozen=True, kw_only=True)
class Answer(Offer):
    """The best offer, and the question that it answers.

    Attributes:
        dropped: the variants without a plan, and why.
        seconds: the time that planning took, in seconds.
        within: the memory limit that it was searched with, in the unit of the question's: that of the question, unless
            nothing within it could run.
    """

    question: Question
    dropped: tuple[DroppedVariant, ...]
    seconds: float
    within: float | None

    @property
    def divided(self) -> Divided | None:
        """How its plan divides the vocabulary; None if it does not."""
        return divided_in(self.schedule, self.question.setup)

    @cached_property
    def certificate(self) -> Certificate | None:
        """How far the plan is from a lower bound; None without a memory limit, for sharded units, and where passes
        overlap.
        """
        limit, objective = self.question.limit, self.question.objective
        if limit is None or self.question.replicas is not None or self.schedule.overlaps:
            return None
        work, goal = Workload.of(self.schedule), self.question.goal
        if self.schedule.recomputed:
            least = recomputing_bound(self.costs, work, goal)
        else:
            least = bound(self.costs, work, goal, self.question.setup.offload is not None)
        return Certificate(objective, limit, limit / self.costs.microbatch, least, self.seconds)


@without_gc()
def answer(question: Question, choosers: Sequence[Chooser] = CHOOSERS) -> Answer:
    """Choose what the question leaves open: the shortest plan within the memory limit, else that with the least peak;
    of those that can run, if the question says what they must run on.

    Args:
        choosers: the last one makes schedules and asks nobody.

    Raises:
        UserError: when there is no plan; the reason is that of the first variant.
        PlanError: when none of the plans can run.
    """
    started = time.perf_counter()
    found, within = _found(question, _asking(choosers))
    seconds = time.perf_counter() - started
    offered = {field.name: getattr(found.offer, field.name) for field in fields(Offer)}
    offered["simulated"] = found.offer.known_timeline
    return Answer(**offered, question=question, dropped=found.dropped, seconds=seconds, within=within)


def _found(question: Question, ask: Ask) -> tuple[Best[Offer], float | None]:
    """The best offer that can run, and the memory limit that it was searched with.

    A search whose orders cannot run is made again within less memory than they take; not so with vocabulary
    parallelism, whose collectives are as many within any.
    """
    asked, rank = replace(question, ends=question.adds_nothing), partial(score, question)
    if question.runs is None:
        return best(ask(asked), rank), question.limit
    reason = ""
    while True:
        left = list(attempt(asked.schedule or "the schedule", partial(ask, asked)))
        made = [each for each in left if isinstance(each, Offer) and each.schedule not in asked.starts]
        peaks = [peak_memory(each.timeline, each.costs) for each in made]
        while any(isinstance(each, Offer) for each in left):
            found = best(left, rank)
            if (refused := refusal_of(found.offer, question.runs)) is None:
                return found, asked.limit
            reason = reason or refused
            left = [
                DroppedVariant(found.offer.schedule.name, refused) if each is found.offer else each for each in left
            ]
        if (
            not peaks
            or question.setup.vocabulary
            or question.setup.pairs
            or asked.limit is None
            or not question.is_search
        ):
            if reason:
                raise PlanError(reason)
            raise UserError(next(each.reason for each in left if isinstance(each, DroppedVariant)))
        less = question.costs.rounded(LESS_MEMORY * min(asked.limit, *peaks))
        asked = replace(asked, limit=less, starts=question.starts + question.instead)


def refusal_of(offer: Offer, runs: Feasibility) -> str | None:
    """Why a plan cannot run; None if it can."""
    memory = offer.costs.on(offer.schedule.placement)[1] if offer.costs.in_bytes else None
    return runs.refusal(offer.schedule, offer.added, memory)


def _asking(choosers: Sequence[Chooser]) -> Ask:
    if not choosers:
        return lambda _: ()
    return lambda question: choosers[0](question, _asking(choosers[1:]))
