"""The answer to a question: the plan for ``plan``, a row of ``compare``, a run of ``zb-auto``, its dry run, and the
playground.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron.zero_bubble.formats.plan import Certificate
from megatron.zero_bubble.ir.garbage import without_gc
from megatron.zero_bubble.ir.vocabulary import algorithm_of
from megatron.zero_bubble.planning.choosers import layout, offload, schedules, shards, slices, vocabulary
from megatron.zero_bubble.planning.offer import Ask, Chooser, Offer, score
from megatron.zero_bubble.planning.plans import bound
from megatron.zero_bubble.planning.question import Question
from megatron.zero_bubble.planning.score import DroppedVariant, best

CHOOSERS: tuple[Chooser, ...] = (shards, offload, layout, vocabulary, slices, schedules)
"""Who chooses what, in this order: a chooser sees what those after it offer for each of its values."""


@dataclass(frozen=True, kw_only=True)
class Answer(Offer):
    """The best offer, and the question that it answers.

    Attributes:
        dropped: the variants without a plan, and why.
        seconds: the time that planning took, in seconds.
    """

    question: Question
    dropped: tuple[DroppedVariant, ...]
    seconds: float

    @property
    def recompute_logits(self) -> bool:
        """Whether the divided output layer computes the logits again."""
        return self.question.recompute_logits and algorithm_of(self.schedule) is not None

    @cached_property
    def certificate(self) -> Certificate | None:
        """How far the plan is from a lower bound; None without a memory limit, for sharded units, and where passes
        overlap.
        """
        limit, objective, moving = self.question.limit, self.question.objective, self.question.offload
        if limit is None or self.shards is not None or self.schedule.overlaps:
            return None
        own, schedule = self.costs if moving is None else moving.on(self.costs), self.schedule
        kinds = schedule.slices, algorithm_of(schedule), moving is not None
        least = bound(own, schedule.placement, limit, objective, *kinds)
        return Certificate(objective, limit, limit / self.costs.microbatch, least, self.seconds)


@without_gc()
def answer(question: Question, choosers: Sequence[Chooser] = CHOOSERS) -> Answer:
    """Choose what the question leaves open: the shortest plan within the memory limit, else that with the least peak.

    Args:
        choosers: the last one makes schedules and asks nobody.

    Raises:
        UserError: when there is no plan; the reason is that of the first variant.
    """
    started = time.perf_counter()
    asked = replace(question, ends=question.adds_nothing)
    found = best(_asking(choosers)(asked), partial(score, question))
    own, seconds = found.offer, time.perf_counter() - started
    offered = own.schedule, own.costs, own.layouts, own.offloaded, own.shards
    return Answer(*offered, question=question, dropped=found.dropped, seconds=seconds)


def _asking(choosers: Sequence[Chooser]) -> Ask:
    if not choosers:
        return lambda _: ()
    return lambda question: choosers[0](question, _asking(choosers[1:]))
