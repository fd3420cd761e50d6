"""Draw a timeline as text: one row per rank, time to the right, dots for idle time.

At unit costs this is the picture in the schedules' docstrings::

    rank 0 |F0 F1 ......B0 W0 |
    rank 1 |...F0 B0 F1 B1 ...|
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.ir import Kind, Pass, Schedule
from megatron.zero_bubble.core.ir.passes import AND

_LONGEST = 12
"""Largest width of a pass in characters, even if short passes then lose their numbers."""
_UNEVEN = 1.1
"""From this multiple of the mean work on, the busiest rank is worth a sentence."""
_MOST_COLUMNS = 100_000
"""Largest width of the picture, even if passes that are far shorter than waits then lose their labels."""
CUT = " ~~ "
"""Mark for columns that are left out."""


def render_text(timeline: Timeline, max_width: int | None = None) -> str:
    """Draw the picture, one line per rank; a row wider than ``max_width`` characters is cut in the middle.

    A pass is drawn as kind and microbatch, ``F12``, preceded by its stage if ranks have several stages. If that does
    not fit, only the kind is drawn. Fused backwards and other long passes are extended with dashes. The two passes of a
    pair are drawn as one, ``3F7&0B4``.
    """
    ms_per_character = _scale(timeline)
    width = round(timeline.makespan_ms / ms_per_character) if ms_per_character else 0
    heads = [f"rank {rank} |" for rank in range(len(timeline.spans))]
    margin = max(map(len, heads), default=0)
    lines = []
    for rank, head in enumerate(heads):
        row = "".join(_cells(timeline, rank, ms_per_character)).ljust(width, ".")
        lines.append(head.rjust(margin) + _shorten(row, max_width and max_width - margin - 1) + "|")
    return "\n".join(lines) + "\n"


def headline(timeline: Timeline) -> str:
    """Format name, size, makespan, both bubble rates, and the mean idle share of all ranks, in one line."""
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {size_of(schedule)}, "
        f"{timeline.makespan_ms:,.1f} ms, bubble {timeline.bubble_rate('makespan'):.1%} of makespan, "
        f"{timeline.bubble_rate('span'):.1%} of span, mean idle {timeline.idle_rate('makespan'):.1%}"
    )


def imbalance(timeline: Timeline) -> str | None:
    """Name the rank with the most work; None if it has at most 1.1 times the mean."""
    if timeline.imbalance <= _UNEVEN:
        return None
    rank = timeline.work_by_rank.index(timeline.work_ms)
    return f"rank {rank} has {timeline.imbalance:.3g} x the mean work of the ranks"


def size_of(schedule: Schedule) -> str:
    """Format the number of ranks, microbatches and, if sequences are cut, slices."""
    slices = f" of {schedule.num_slices} slices" if schedule.num_slices > 1 else ""
    return f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches{slices}"


def _label(timeline: Timeline, works: Iterable[Pass]) -> str:
    one_stage_per_rank = timeline.schedule.num_stages == timeline.schedule.num_ranks
    return AND.join(str(p).removeprefix(str(p.stage)) if one_stage_per_rank else str(p) for p in works)


def _scale(timeline: Timeline) -> float:
    """Return the milliseconds per character, such that the shortest pass has room for the longest label and a blank."""
    boxes = [box for rank in range(len(timeline.spans)) for box in timeline.boxes(rank) if box.end_ms > box.start_ms]
    if not boxes:
        return 0.0
    # BW is not considered: it lasts as long as B and W together, so its longer label fits if theirs do.
    labels = [len(_label(timeline, box.works)) for box in boxes if box.works[-1].kind is not Kind.BW]
    label = max(labels, default=1)
    shortest = min(box.end_ms - box.start_ms for box in boxes)
    longest = max(box.end_ms - box.start_ms for box in boxes)
    return max(shortest / (label + 1), longest / max(_LONGEST, label + 1), timeline.makespan_ms / _MOST_COLUMNS)


def _cells(timeline: Timeline, rank: int, ms_per_character: float) -> list[str]:
    """Return the pieces of a row: dots up to each pass, then the pass."""
    cells = []
    column = 0
    for works, start_ms, end_ms in timeline.boxes(rank):
        # If the scale is 0, all passes take no time; each is drawn as wide as its label.
        start, end = (
            round((ms - timeline.start_ms) / ms_per_character) if ms_per_character else column
            for ms in (start_ms, end_ms)
        )
        cells.append("." * (start - column))
        cells.append(cell(_label(timeline, works), AND.join(p.kind.value for p in works), end - start))
        column = end
    return cells


def cell(label: str, kind: str, width: int) -> str:
    """Draw one pass, ``width`` characters wide: its label, or only its kind if there is no room."""
    text = label if len(label) < width else kind
    return (text.ljust(width - 1, "-") + " ")[:width] if len(text) < width else text[:width]


def _shorten(row: str, width: int | None) -> str:
    """Cut out the middle of a row, which repeats; warm-up and cool-down are at the ends."""
    if width is None or len(row) <= width:
        return row
    half = (width - len(CUT)) // 2
    return row[:half] + CUT + row[-half:]
