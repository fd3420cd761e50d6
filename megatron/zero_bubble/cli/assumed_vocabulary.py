"""What advice would be with other vocabularies, for a job whose flags and tokenizer do not tell its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir.vocabulary import Divided, algorithm_of
from megatron.zero_bubble.core.plan.timelines import timeline_of
from megatron.zero_bubble.planning.change import AdviceRow, Today
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.idle import idle_of
from megatron.zero_bubble.planning.job.model import GPT2_VOCAB_SIZE
from megatron.zero_bubble.planning.layout_plan import LayoutPlan
from megatron.zero_bubble.planning.vocabulary import divided_costs

OTHER_SIZES = (32_000, 256_000)
"""Vocabularies of Llama 2, and about those of Gemma and of Llama 4: the range of public models."""


class OtherVocabSize(NamedTuple):
    """A job with another vocabulary than the assumed one.

    Attributes:
        idle: the share of the time in which its ranks idle.
        gain: what the advised change then gains; None without one, or where it moves or shards memory.
    """

    size: int
    idle: float
    gain: float | None


def with_others(
    jobs: Callable[[int], tuple[Today, Figures]], best: AdviceRow | None, objective: Metric
) -> tuple[OtherVocabSize, ...]:
    """Return the job and the advised change, with the same orders of passes, under each of ``OTHER_SIZES``.

    Args:
        jobs: the job as it is with a vocabulary, and the costs of its changes.
    """
    return tuple(_with_other(size, *jobs(size), best, objective) for size in OTHER_SIZES)


def _with_other(size: int, today: Today, costs: Figures, best: AdviceRow | None, objective: Metric) -> OtherVocabSize:
    timeline = today.timeline
    idle = idle_of(timeline, today.costs.on(timeline.schedule.placement)[0]).total / timeline.makespan_ms
    if best is None or not best.plan.is_plain:
        return OtherVocabSize(size, idle, None)
    schedule = best.timeline.schedule
    own = timeline_of(schedule, *_costs_of(best, costs).on(schedule.placement))
    return OtherVocabSize(size, idle, 1 - length_ms(own, objective) / length_ms(timeline, objective))


def _costs_of(row: AdviceRow, costs: Figures) -> Figures:
    """The costs of a row's layers per stage and vocabulary."""
    schedule, layouts = row.timeline.schedule, row.plan.part(LayoutPlan)
    own = costs if layouts is None else costs.evenly()
    if (algorithm := algorithm_of(schedule)) is not None:
        own = divided_costs(own, Divided(algorithm))
    return own if layouts is None else own.laid_out(schedule.placement, layouts.best.layout)


def remark(others: Iterable[OtherVocabSize]) -> str:
    """What the advice rests on, in words."""
    words = (
        f"with {each.size:,}, its ranks idle {each.idle:.1%}"
        + ("" if each.gain is None else f" and the change makes {-each.gain:+.1%}")
        for each in others
    )
    assumed = f"This rests on an assumed vocabulary of {GPT2_VOCAB_SIZE:,}"
    return f"{assumed}: {'; '.join(words)}, and another change may be the best; give --vocab-size."
