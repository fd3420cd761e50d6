"""What post-validation gains under a schedule, in one sentence for the log."""

from __future__ import annotations

from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.ir import Schedule
from megatron.zero_bubble.job.source import AUTO, ScheduleSource, even_costs


def forecast(source: ScheduleSource, num_microbatches: int) -> str:
    """The predicted length of an iteration with and without post-validation, before any pass was measured.

    Args:
        num_microbatches: of a training iteration.
    """
    if source.name == AUTO:
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
    if synchronous - ahead < 1e-9 * synchronous:
        return (
            f"no gain, because an iteration takes {ahead:.1f}{unit} and the optimizer step with and without it"
            f"{condition}; zb-h2, zb-v and zb-auto with more than 1p of memory gain"
        )
    return (
        f"predicted {ahead:.1f}{unit} per iteration instead of {synchronous:.1f}{unit} "
        f"({ahead / synchronous - 1:.1%}), plus the optimizer step{condition}"
    )
