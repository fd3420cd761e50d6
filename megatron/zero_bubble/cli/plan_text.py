"""The text that ``zero-bubble plan`` prints."""

from __future__ import annotations

import shutil

from megatron.zero_bubble.core.analysis.period import period_ms
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.formats.plan import Certificate
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.render.excerpt import draw
from megatron.zero_bubble.core.render.text import headline, imbalance
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.planning.figures import Figures
from megatron.zero_bubble.planning.plans import limit_verdict, message_memory, rank_memory

_WIDEST = 160
"""Width of a picture in characters where the terminal is wider, or the output is not a terminal."""
SLOW = " in pure Python, which searches less; reinstall with pybind11 and a C++ compiler to use the C++ planner"
"""End of the sentence with the planning time where the search is not compiled."""


def plan_text(timeline: Timeline, costs: Figures) -> str:
    """Format the picture, and a table with both lengths, their bubble rates, and the mean idle share of all ranks."""
    peaks = timeline.peak_activation
    listed = " ".join(f"{peak:.4g}" for peak in peaks)
    return (
        "".join(f"{note}\n" for note in costs.notes) + f"{picture(timeline)}\n"
        f"{'metric':10}{'ms':>12}{'bubble rate':>14}{'mean idle':>12}   measured from\n"
        f"{'span':10}{timeline.span_ms:12.3f}{timeline.bubble_rate('span'):14.4f}{timeline.idle_rate('span'):12.4f}   "
        "first to last pass of a rank, longest rank: the optimizer does not wait for other ranks\n"
        f"{'makespan':10}{timeline.makespan_ms:12.3f}{timeline.bubble_rate('makespan'):14.4f}"
        f"{timeline.idle_rate('makespan'):12.4f}   "
        "first to last pass over all ranks: the optimizer waits for every rank\n\n"
        f"peak activation {max(peaks):.4g} microbatches per rank; by rank: {listed}\n{_bytes_by_rank(timeline, costs)}"
    )


def picture(timeline: Timeline) -> str:
    """Draw a timeline below its headline, as wide as the terminal."""
    columns = shutil.get_terminal_size((_WIDEST, 24)).columns
    return f"{headline(timeline)}\n\n{draw(timeline, min(columns, _WIDEST))}"


def imbalance_text(timeline: Timeline, costs: Figures, layout: bool, divided: bool) -> str:
    """Name the rank with the most work, and the flags that divide the work better; empty if all have about as much.

    Args:
        layout, divided: whether the plan has a layout by cost, or a divided vocabulary, or cannot have it.
    """
    if (found := imbalance(timeline)) is None:
        return ""
    if costs.layers is None:
        return f"{found}: to try --layout auto, give --config, or costs with layers_per_stage\n"
    others = ["--layout auto"] * (not layout) + ["--vocabulary auto"] * (not divided)
    return f"{found}{': try ' if others else ''}{' or '.join(others)}\n"


def _bytes_by_rank(timeline: Timeline, costs: Figures) -> str:
    """Format the memory per rank, if it is known in bytes. On a V the first rank has both ends of the model."""
    if not costs.in_bytes:
        return ""
    placement = timeline.schedule.placement
    parts = [("activations", rank_memory(timeline, costs))]
    if costs.message_bytes is not None:
        parts.append(
            ("messages", message_memory(timeline.schedule, costs.message_bytes, widths=costs.widths_on(placement)))
        )
    if (weights := costs.weights_on(placement)) is not None:
        parts.append(("weights and optimizer", weights))
    total = ("total", tuple(map(sum, zip(*(row for _, row in parts), strict=True))))
    lines = [*parts, total] if weights is not None else parts
    return "".join(f"GiB by rank, {what}: {' '.join(f'{b / 2**30:.3g}' for b in row)}\n" for what, row in lines)


def period_text(timeline: Timeline, costs: Figures, step_ms: float, only_synchronous: bool) -> str:
    """Format the time from one iteration to the next, for each kind of optimizer that the plan supports."""
    schedule = timeline.schedule
    on = costs.on(schedule.placement)[0]
    kinds = (("synchronous", False), ("with post-validation", True))
    periods = ((kind, period_ms(schedule, on, step_ms, ahead)) for kind, ahead in kinds[: 2 - only_synchronous])
    listed = ", ".join(f"{period:.3f} ms {kind}" for kind, period in periods)
    return f"iteration with an optimizer step of {step_ms:g} ms: {listed}\n"


def limit_text(timeline: Timeline, costs: Figures, certificate: Certificate) -> str:
    """Format whether the plan is within the limit, and how much shorter a schedule within it could be."""
    objective, best = certificate.objective, certificate.bound
    kept, verdict = limit_verdict(timeline, costs, certificate.memory_limit)
    lines = [verdict]
    where = best.reason if best.rank is None else f"{best.reason}, rank {best.rank}"
    these = "placement and limit" if Workload.of(timeline.schedule).is_whole else "placement, limit and cuts"
    lines.append(f"lower bound {best.value_ms:.3f} ms {objective}, for this {these} ({where})")
    if kept:
        gap = f"{certificate.gap(timeline):.2%}"
        lines.append(f"gap {gap}: no schedule with this {these} can be more than {gap} shorter")
    lines.append(f"planned in {certificate.seconds:.2f} s{'' if compiled() else SLOW}")
    return "\n".join(lines) + "\n"
