"""Line charts as SVG: several panels with one legend, shares over powers of two, in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, COLUMNS = 430, 270, 2
_LEFT, _RIGHT, _TOP, _BOTTOM, _TITLE, _ENTRY = 44, 14, 26, 34, 30, 18
# Okabe and Ito's colours, which are safe for colour-blind readers, and visible on white and on black.
_COLOURS = ("#8a8f98", "#b8860b", "#56a0d8", "#0072b2", "#009e73", "#d55e00", "#c060a0", "#7a6ff0")
_STYLE = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#4b5563}"
    ".title{font-size:14px;font-weight:600;fill:#111827}.paper{fill:#fff}.grid{stroke:#e3e6eb}"
    ".middle{text-anchor:middle}.end{text-anchor:end}polyline{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#a8b0bd}.title{fill:#e6e9ee}.paper{fill:#0f141b}.grid{stroke:#2a313c}}"
)


@dataclass(frozen=True)
class Line:
    """A named line of points (count, share)."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; lines with the same name have the same colour in all panels."""

    title: str
    lines: tuple[Line, ...]


def draw(title: str, panels: Sequence[Panel], legend: Mapping[str, str]) -> str:
    """Draw all panels on the same axes; ``legend`` has the label of each line by its name."""
    counts = sorted({count for panel in panels for line in panel.lines for count, _ in line.points})
    lowest = min(part for panel in panels for line in panel.lines for _, part in line.points)
    floor = math.floor(lowest * 10) / 10
    colours = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(legend)}
    rows = -(-len(panels) // COLUMNS)
    legend_top = _TITLE + rows * HEIGHT
    size = COLUMNS * WIDTH, legend_top + _ENTRY * (-(-len(legend) // COLUMNS)) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}">',
        f'<style>{_STYLE}</style><rect class="paper" width="{size[0]}" height="{size[1]}"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        x, y = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT + _TITLE
        parts.append(f'<g transform="translate({x},{y})">{"".join(_panel(panel, counts, floor, colours))}</g>')
    for index, (name, words) in enumerate(legend.items()):
        x, y = _LEFT + index % COLUMNS * WIDTH, legend_top + _ENTRY * (index // COLUMNS) + 10
        parts.append(
            f'<rect x="{x}" y="{y - 6}" width="18" height="4" fill="{colours[name]}"/>'
            f'<text x="{x + 26}" y="{y}">{escape(words)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, counts: Sequence[int], floor: float, colours: Mapping[str, str]) -> Iterator[str]:
    first, doublings = math.log2(counts[0]), math.log2(counts[-1] / counts[0]) or 1.0

    def x(count: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (math.log2(count) - first) / doublings

    def y(part: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (part - floor) / (1 - floor)

    yield f'<text class="middle" x="{WIDTH / 2}" y="16">{escape(panel.title)}</text>'
    for count in counts:
        yield f'<path class="grid" d="M{x(count):.1f} {y(1):.1f}V{y(floor):.1f}"/>'
        yield f'<text class="middle" x="{x(count):.1f}" y="{y(floor) + 15:.1f}">{count}</text>'
    for tenth in range(round(floor * 10), 11):
        yield f'<path class="grid" d="M{x(counts[0]):.1f} {y(tenth / 10):.1f}H{x(counts[-1]):.1f}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y(tenth / 10) + 4:.1f}">{tenth * 10} %</text>'
    for line in panel.lines:
        corners = " ".join(f"{x(count):.1f},{y(part):.1f}" for count, part in line.points)
        yield f'<polyline points="{corners}" stroke="{colours[line.name]}"/>'
