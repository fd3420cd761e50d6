"""What post-validation gains under a schedule, in one sentence for the log."""

from __future__ import annotations

from megatron.zero_bubble.core.analysis.score import ROUNDING
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.even import even_costs
from megatron.zero_bubble.core.ir import Schedule
from megatron.zero_bubble.core.schedules import build
from megatron.zero_bubble.planning.codecs import spell
from megatron.zero_bubble.planning.setup import Setup
from megatron.zero_bubble.planning.source import ZB_AUTO, ScheduleSource

_GAINING = ("zb-h2", "zb-v")
"""Schedules on which no rank waits for the last one to end, if there are enough microbatches, and every sequence and
the vocabulary are whole."""


def forecast(source: ScheduleSource, num_microbatches: int) -> str:
    """The predicted length of an iteration with and without post-validation, before any pass was measured.

    Args:
        num_microbatches: of a training iteration.
    """
    if source.name == ZB_AUTO:
        return "post-validation: zb-auto plans for it, and prints what it gains with the plan"
    return f"post-validation under {source.name}: {_gain(_of_equal_passes(source.make(num_microbatches)))}"


def planned_gain(timeline: Timeline) -> str:
    """The same for a plan made from measured passes."""
    return f"post-validation: {_gain(timeline, ' ms')}"


def _of_equal_passes(schedule: Schedule) -> Timeline:
    """The timeline in units of the F of all stages of a rank, with F, B and W of equal length."""
    return simulate(schedule, even_costs(schedule.placement))


def _gain(timeline: Timeline, unit: str = "") -> str:
    ahead, synchronous = timeline.span_ms, timeline.makespan_ms
    condition = "" if unit else ", for F, B and W of equal length and in units of a rank's F"
    if not _gains(timeline):
        return (
            f"no gain, because an iteration takes {ahead:.1f}{unit} and the optimizer step with and without it"
            f"{condition}; {_advice(timeline.schedule, is_planned=bool(unit))}"
        )
    return (
        f"predicted {ahead:.1f}{unit} per iteration instead of {synchronous:.1f}{unit} "
        f"({ahead / synchronous - 1:.1%}), plus the optimizer step{condition}"
    )


def _gains(timeline: Timeline) -> bool:
    return timeline.makespan_ms - timeline.span_ms >= ROUNDING * timeline.makespan_ms


def _advice(schedule: Schedule, is_planned: bool) -> str:
    """What to run instead of ``schedule``, which gains nothing; ``is_planned`` is whether it is the plan of zb-auto."""
    size = {"num_ranks": schedule.num_ranks, "num_microbatches": schedule.num_microbatches}
    found = [name for name in _GAINING if _gains(_of_equal_passes(build(name, **size)))]
    if not found:
        return "drop --zero-bubble-post-validation"
    found += [] if is_planned else [f"{ZB_AUTO} with more than 1p of memory"]
    others = spell(Setup().running(Setup.of(schedule)))
    needs = f", without {' '.join(others)}," if others else ""
    *first, last = found
    return f"{', '.join(first)} and {last}{needs} gain" if first else f"{last}{needs} gains"
