"""Line charts as SVG: several panels on the same axes with one legend, in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, COLUMNS = 430, 290, 2
_LEFT, _RIGHT, _TOP, _BOTTOM, _TITLE, _ENTRY = 58, 16, 26, 48, 30, 18
# Okabe and Ito's colours, which are safe for colour-blind readers, and visible on white and on black.
_COLOURS = ("#8a8f98", "#b8860b", "#56a0d8", "#0072b2", "#009e73", "#d55e00", "#c060a0", "#7a6ff0")
_STYLE = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#4b5563}"
    ".title{font-size:14px;font-weight:600;fill:#111827}.paper{fill:#fff}.grid{stroke:#e3e6eb}"
    ".middle{text-anchor:middle}.end{text-anchor:end}polyline{fill:none;stroke-width:2}"
    ".dashed{stroke-dasharray:5 4;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#a8b0bd}.title{fill:#e6e9ee}.paper{fill:#0f141b}.grid{stroke:#2a313c}}"
)


@dataclass(frozen=True)
class Axis:
    """An axis from its first tick to its last; ``is_log`` gives equal factors equal lengths."""

    title: str
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log: bool = False

    @classmethod
    def shares(cls, title: str, low: float, high: float) -> Axis:
        """An axis in percent that includes both shares, with ticks at round percentages."""
        step = next(step for step in (1, 2, 5, 10, 20) if 100 * (high - low) <= 7 * step)
        percents = range(step * math.floor(100 * low / step), step * math.ceil(100 * high / step) + 1, step)
        return cls(title, tuple(percent / 100 for percent in percents), tuple(f"{percent} %" for percent in percents))

    @classmethod
    def counts(cls, title: str, counts: Sequence[int]) -> Axis:
        """An axis with a tick at each of the counts, which are in ascending order."""
        return cls(title, tuple(map(float, counts)), tuple(map(str, counts)), is_log=True)

    def part(self, value: float) -> float:
        """The distance of ``value`` from the first tick, as a part of the axis."""
        low, high, at = (math.log(x) if self.is_log else x for x in (self.ticks[0], self.ticks[-1], value))
        return (at - low) / ((high - low) or 1.0)


@dataclass(frozen=True)
class Line:
    """A line through points (x, y); lines with the same name have the same colour."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: tuple[Line, ...]


def draw(title: str, panels: Sequence[Panel], legend: Mapping[str, str], x: Axis, y: Axis) -> str:
    """Draw all panels on the axes ``x`` and ``y``; ``legend`` has the label of each line by its name."""
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
        left, top = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT + _TITLE
        parts.append(f'<g transform="translate({left},{top})">{"".join(_panel(panel, x, y, colours))}</g>')
    for index, (name, words) in enumerate(legend.items()):
        left, top = _LEFT + index % COLUMNS * WIDTH, legend_top + _ENTRY * (index // COLUMNS) + 10
        parts.append(
            f'<rect x="{left}" y="{top - 6}" width="18" height="4" fill="{colours[name]}"/>'
            f'<text x="{left + 26}" y="{top}">{escape(words)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, x: Axis, y: Axis, colours: Mapping[str, str]) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    centre, middle = (_LEFT + right) / 2, (_TOP + bottom) / 2

    def across(value: float) -> float:
        return _LEFT + (right - _LEFT) * x.part(value)

    def down(value: float) -> float:
        return bottom - (bottom - _TOP) * y.part(value)

    yield f'<text class="middle" x="{centre}" y="16">{escape(panel.title)}</text>'
    yield f'<text class="middle" x="{centre}" y="{bottom + 32}">{escape(x.title)}</text>'
    yield f'<text class="middle" transform="translate(12,{middle}) rotate(-90)">{escape(y.title)}</text>'
    for value, label in zip(x.ticks, x.labels, strict=True):
        yield f'<path class="grid" d="M{across(value):.1f} {_TOP}V{bottom}"/>'
        yield f'<text class="middle" x="{across(value):.1f}" y="{bottom + 15}">{label}</text>'
    for value, label in zip(y.ticks, y.labels, strict=True):
        yield f'<path class="grid" d="M{_LEFT} {down(value):.1f}H{right}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{down(value) + 4:.1f}">{label}</text>'
    for line in panel.lines:
        corners = " ".join(f"{across(at):.1f},{down(value):.1f}" for at, value in line.points)
        dashed = ' class="dashed"' if line.is_dashed else ""
        yield f'<polyline{dashed} points="{corners}" stroke="{colours[line.name]}"/>'
