"""Draw timelines as a self-contained SVG: one row per rank, time in ms to the right, idle time in grey.

Several timelines are drawn above each other on one time scale, for example the planned above the measured one. All
passes of one kind on a rank are one path, so that a plan of 32 ranks and 256 microbatches takes less than a megabyte.
Their microbatches are counted from 0, or listed in ``data-numbers`` where they have another order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.analysis.memory import MemoryStep, memory_curve
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs import PassMemory
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Kind, Schedule
from megatron.zero_bubble.core.render.text import headline

_OF_STAGES = {Kind.F: "#4f81ee", Kind.B: "#ea9132", Kind.W: "#43ab82", Kind.BW: "#d95f43"}
_OF_SOME = {
    Kind.S: "#2b3f8c",
    Kind.T: "#1f6f54",
    Kind.L: "#7a3fa8",
    Kind.I: "#7fb0d8",
    Kind.J: "#8fcf9f",
    Kind.R: "#9db8f7",
}
"""Those that only some schedules have."""
COLOURS = _OF_STAGES | _OF_SOME
MEANING = {
    Kind.F: "F forward",
    Kind.B: "B input gradient",
    Kind.W: "W weight gradient",
    Kind.BW: "BW fused backward",
    Kind.R: "R forward again",
    Kind.S: "S output layer",
    Kind.T: "T its gradient",
    Kind.L: "L loss",
    Kind.I: "I embedding",
    Kind.J: "J its gradient",
}
INKS = dict.fromkeys(COLOURS, "#000") | dict.fromkeys((Kind.S, Kind.T, Kind.L), "#fff")
"""The colours of the numbers on the passes: 4.5 times as light or dark as these, and 3 times on the paler ones of later
stages.
"""
LANE_COLOUR = "#8b6fc4"
"""The colour of ops on other lanes than that of the passes."""
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#4b5563}"
    ".title{font-size:15px;font-weight:600;fill:#111827}.mb{font-size:10px;text-anchor:middle}"
    f".lane{{fill:{LANE_COLOUR}}}"
    ".of{font-size:8px;text-anchor:end}"
    ".kept{fill:#a7bff5}.due{fill:none;stroke:#111827;stroke-dasharray:3 3}"
    ".rank{text-anchor:end}.tick{text-anchor:middle}.idle{fill:#eceef2}.grid{stroke:#cbd0d9;stroke-dasharray:2 3}"
    ".paper{fill:#fff}"
    + "".join(f".{kind.value}{{fill:{colour}}}" for kind, colour in _OF_STAGES.items())
    + "@media(prefers-color-scheme:dark){text{fill:#a8b0bd}.title{fill:#e6e9ee}.paper{fill:#0f141b}"
    ".idle{fill:#232a34}.grid{stroke:#39424f}.due{stroke:#e6e9ee}}"
    + "".join(f".mb.on-{kind.value}{{fill:{ink}}}" for kind, ink in INKS.items())
)
_LEFT, _RIGHT, _HEADER = 64, 16, 44
_FOOTER, _ENTRY = 36, 20
"""Height below the rows without the legend, and of a line of it, in pixels."""
_LETTER = 6.6
"""Width of a letter of the legend on average, in pixels."""
_CURVE = 34
"""Height of a rank's memory curve, in pixels."""
_LANE = 10
"""Height of a lane below the passes of its rank, in pixels."""
_DIGIT = 6.5
"""Width of a digit in a microbatch number, in pixels."""


def render_svg(
    *timelines: Timeline, titles: Sequence[str] = (), memory: PassMemory | None = None, width: int = 1200
) -> str:
    """Draw one or more timelines, each starting at 0 ms, ``width`` pixels wide.

    ``titles`` precede the names of the timelines, for example ``("planned", "measured")``. With ``memory``, in bytes,
    the memory of every rank is drawn below: filled for the last timeline, dashed for the first.

    Raises:
        UserError: without timelines, or when the number of titles is neither 0 nor that of the timelines.
    """
    if not timelines or len(titles) not in (0, len(timelines)):
        raise UserError(
            f"a drawing needs at least one timeline, and either no titles or one per timeline; "
            f"got {len(timelines)} timelines and {len(titles)} titles"
        )
    longest_ms = max(timeline.makespan_ms for timeline in timelines) or 1.0
    scale = (width - _LEFT - _RIGHT) / longest_ms
    bodies, top = [], 8.0
    for timeline, title in zip(timelines, titles or [""] * len(timelines), strict=True):
        body, height = _panel(timeline, title, scale, top)
        bodies.append(body)
        top += height
    if memory is not None:
        body, height = _kept_panel(timelines[0], timelines[-1], memory, scale, top)
        bodies.append(body)
        top += height
    kinds = {span.pass_.kind for timeline in timelines for row in timeline.spans for span in row}
    entries = _entries(timelines, kinds)
    legend, lines = _legend(entries, width, top + 42)
    height = round(top + _FOOTER + lines * _ENTRY)
    more = "".join(f".{kind.value}{{fill:{colour}}}" for kind, colour in _OF_SOME.items() if kind in kinds)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{_words(timelines, titles, [text for _, text in entries])}'
        f'<style>{_STYLE}{more}</style><rect class="paper" width="{width}" height="{height}"/>\n'
        + "".join(_axis(longest_ms, scale, top))
        + "".join(bodies)
        + legend
        + "</svg>\n"
    )


def _words(timelines: Sequence[Timeline], titles: Sequence[str], entries: Sequence[str]) -> str:
    """The title and description of a drawing, which screen readers read."""
    named = [
        _titled(timeline, title) for timeline, title in zip(timelines, titles or [""] * len(timelines), strict=True)
    ]
    what = f"The passes of every rank, one row per rank, time to the right. Colours: {'; '.join(entries)}."
    return f"<title>{escape('; '.join(named))}</title><desc>{escape(what)}</desc>\n"


def _titled(timeline: Timeline, title: str) -> str:
    return f"{title}: {headline(timeline)}" if title else headline(timeline)


def draw_comparison(compared: ComparedIteration) -> str:
    """Draw a recorded iteration, zoomable: the plan above the measured timeline, and the memory of every rank below."""
    measured = compared.measured.timeline
    return zoomable(render_svg(compared.planned, measured, titles=("planned", "measured"), memory=compared.memory))


def zoomable(svg: str) -> str:
    """Add a script to a drawing with which browsers zoom and move it in time; other viewers ignore the script."""
    script = (resources.files("megatron.zero_bubble.core.render") / "page" / "zoom.js").read_text(encoding="utf-8")
    drawing = svg.removesuffix("</svg>\n")
    constants = f"const LEFT = {_LEFT}, RIGHT = {_RIGHT}, DIGIT = {_DIGIT};\n"
    return f"{drawing}<script><![CDATA[\n{constants}{script}]]></script></svg>\n"


def _panel(timeline: Timeline, title: str, scale: float, top: float) -> tuple[str, float]:
    pitch = 26 if len(timeline.spans) <= 16 else 18
    lines = [f'<text class="title" x="{_LEFT}" y="{top + 22:g}">{escape(_titled(timeline, title))}</text>\n']
    lanes = timeline.timed_lanes
    height = pitch + _LANE * len(lanes)
    for rank in range(len(timeline.spans)):
        y = top + _HEADER - 8 + rank * height
        lines.extend(_row(timeline, rank, scale, y, pitch - 4))
        for number, lane in enumerate(lanes):
            lines.extend(_lane(timeline, rank, lane, scale, y + pitch - 3 + number * _LANE))
    return "".join(lines), _HEADER + len(timeline.spans) * height


def _row(timeline: Timeline, rank: int, scale: float, y: float, height: int) -> Iterator[str]:
    placement = timeline.schedule.placement
    chunks = len(placement.stages_of(rank))
    paths: defaultdict[tuple[Kind, int], list[str]] = defaultdict(list)
    numbers: defaultdict[tuple[Kind, int], list[str]] = defaultdict(list)
    labels = []
    for works, start_ms, end_ms in timeline.boxes(rank):
        x, w = _LEFT + (start_ms - timeline.start_ms) * scale, (end_ms - start_ms) * scale
        # Leave a thin gap between neighbours, but never so wide that a short pass disappears.
        drawn = w - min(1.0, 0.15 * w)
        high = height / len(works)  # the passes of a pair are drawn above each other in one box
        for number, p in enumerate(works):
            top = y + number * high
            part = p.kind, placement.chunk_of(p.stage)
            paths[part].append(f"M{x:.2f} {top:g}h{drawn:.2f}v{high:g}h-{drawn:.2f}z")
            label = p.label
            numbers[part].append(label)
            if _DIGIT * len(label) < drawn:
                at = f'x="{x + drawn / 2:.1f}" y="{top + high / 2 + 3.5:g}"'
                labels.append(f'<text class="mb on-{p.kind.value}" {at}>{label}</text>')
    middle = y + height / 2 + 4
    yield f'<text class="rank" x="{_LEFT - 8}" y="{middle:g}">rank {rank}</text>'
    yield f'<rect class="idle" x="{_LEFT}" y="{y:g}" width="{timeline.makespan_ms * scale:.2f}" height="{height}"/>'
    for (kind, chunk), path in paths.items():
        listed = numbers[kind, chunk]
        data = "" if listed == [str(n) for n in range(len(listed))] else f' data-numbers="{" ".join(listed)}"'
        # Later chunks of the same rank are paler.
        yield f'<path class="{kind.value}" fill-opacity="{1 - 0.5 * chunk / chunks:.3g}"{data} d="{"".join(path)}"/>'
    yield "".join(labels) + "\n"


def _lane(timeline: Timeline, rank: int, lane: str, scale: float, y: float) -> Iterator[str]:
    """Draw the ops of one lane below the passes, one path for each class of ops."""
    yield f'<text class="of" x="{_LEFT - 8}" y="{y + _LANE - 3:g}">{escape(lane)}</text>'
    paths: defaultdict[str, list[str]] = defaultdict(list)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for on, op, start_ms, end_ms, _ in timeline.lanes[rank]:
        if on == lane and end_ms > start_ms:
            x, w = _LEFT + (start_ms - timeline.start_ms) * scale, (end_ms - start_ms) * scale
            drawn = w - min(1.0, 0.15 * w)
            part = type(op).__name__
            paths[part].append(f"M{x:.2f} {y:g}h{drawn:.2f}v{_LANE - 2}h-{drawn:.2f}z")
            names[part].append(str(op).replace(" ", "_"))
    for number, (part, path) in enumerate(sorted(paths.items())):
        numbers = escape(" ".join(names[part]), quote=True)
        yield f'<path class="lane" fill-opacity="{1 / (1 + number):.3g}" data-numbers="{numbers}" d="{"".join(path)}"/>'
    yield "\n"


def _kept_panel(first: Timeline, last: Timeline, memory: PassMemory, scale: float, top: float) -> tuple[str, float]:
    """Draw one memory curve per rank; return the curves and their height."""
    curves, dashed = memory_curve(last, memory), memory_curve(first, memory)
    most = max(step.amount for curve in curves for step in curve)
    title = f"memory of microbatches, each rank up to {format_bytes(most)}"
    lines = [f'<text class="title" x="{_LEFT}" y="{top + 22:g}">{title}</text>\n']
    for rank in range(len(curves)):
        y = top + _HEADER - 8 + rank * _CURVE
        bottom = y + _CURVE - 6
        lines.append(f'<text class="rank" x="{_LEFT - 8}" y="{y + _CURVE / 2 + 1:g}">rank {rank}</text>')
        filled = _steps(curves[rank], last, scale, bottom, (_CURVE - 6) / most)
        lines.append(f'<path class="kept" d="{filled}V{bottom:g}z"/>')
        line = _steps(dashed[rank], first, scale, bottom, (_CURVE - 6) / most)
        lines.append(f'<path class="due" d="{line}"/>\n')
    return "".join(lines), _HEADER + len(curves) * _CURVE


def _steps(curve: Sequence[MemoryStep], timeline: Timeline, scale: float, bottom: float, height: float) -> str:
    """Draw the path of a curve, from 0 at the start of the timeline to the amount at its end."""
    steps = "".join(
        f"H{_LEFT + (at - timeline.start_ms) * scale:.2f}V{bottom - amount * height:.2f}" for at, amount in curve
    )
    return f"M{_LEFT} {bottom:g}{steps}H{_LEFT + timeline.makespan_ms * scale:.2f}"


def _axis(longest_ms: float, scale: float, bottom: float) -> Iterator[str]:
    """Draw vertical lines at round times behind the rows, with the times in ms below."""
    magnitude = 10.0 ** math.floor(math.log10(longest_ms / 8))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if longest_ms / (magnitude * factor) <= 10)
    for k in range(int(longest_ms / step * (1 + 1e-9)) + 1):
        x = f"{_LEFT + k * step * scale:.1f}"
        unit = " ms" if k == 0 else ""
        yield f'<path class="grid" d="M{x} 36V{bottom:g}"/>'
        yield f'<text class="tick" x="{x}" y="{bottom + 14:g}">{k * step:.6g}{unit}</text>'
    yield "\n"


def _entries(timelines: Sequence[Timeline], kinds: set[Kind]) -> list[tuple[str | None, str]]:
    """What the colours and the numbers mean: the style of each colour, None for a remark."""
    lanes = dict.fromkeys(lane for timeline in timelines for lane in timeline.timed_lanes)
    schedules = [timeline.schedule for timeline in timelines]
    entries: list[tuple[str | None, str]] = [(kind.value, MEANING[kind]) for kind in Kind if kind in kinds]
    entries += [("lane", ", ".join(lanes))] if lanes else []
    entries += [("idle", "idle")]
    entries += [(None, "paler: later stages of the rank")] if any(map(_has_chunks, schedules)) else []
    entries += [(None, "1.2: microbatch 1, slice 2")] if any(each.num_slices > 1 for each in schedules) else []
    return entries


def _has_chunks(schedule: Schedule) -> bool:
    return schedule.num_stages > schedule.num_ranks


def _legend(entries: Sequence[tuple[str | None, str]], width: int, y: float) -> tuple[str, int]:
    parts, x, lines = [], _LEFT, 1
    for style, text in entries:
        mark = 0 if style is None else 18
        wide = mark + round(_LETTER * len(text)) + 14
        if x + wide > width and x > _LEFT:
            x, y, lines = _LEFT, y + _ENTRY, lines + 1
        if style is not None:
            parts.append(f'<rect class="{style}" x="{x}" y="{y - 10:g}" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + mark}" y="{y:g}">{escape(text)}</text>')
        x += wide
    return "".join(parts) + "\n", lines
