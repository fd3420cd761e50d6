"""Line charts as SVG: several panels on the same axes with one legend, in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import ClassVar

from bench.labels import Box, places

WIDTH, HEIGHT, COLUMNS = 430, 290, 2
_LEFT, _RIGHT, _TOP, _BOTTOM, _TITLE, _ENTRY = 58, 16, 26, 48, 30, 18
# Okabe and Ito's colours, which are safe for colour-blind readers, and visible on white and on black.
_RADIUS = 3.5
_COLOURS = ("#8a8f98", "#b8860b", "#56a0d8", "#0072b2", "#009e73", "#d55e00", "#c060a0", "#7a6ff0")
_STYLE = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#4b5563}"
    ".title{font-size:14px;font-weight:600;fill:#111827}.paper{fill:#fff}.grid{stroke:#e3e6eb}"
    ".middle{text-anchor:middle}.end{text-anchor:end}polyline{fill:none;stroke-width:2}"
    ".dashed{stroke-dasharray:5 4;stroke-width:1.5}.leader{stroke:#8a8f98;stroke-width:.7}"
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
class Dot:
    """A labelled point; dots with the same name have the same colour. Dots that touch share one label."""

    name: str
    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Panel:
    """One pair of axes; the labels of dots avoid the lines."""

    title: str
    lines: tuple[Line, ...]
    dots: tuple[Dot, ...] = ()


def draw(
    title: str, panels: Sequence[Panel], legend: Mapping[str, str], x: Axis, y: Axis, caption: Sequence[str] = ()
) -> str:
    """Draw all panels on the axes ``x`` and ``y``; ``legend`` has the words for each name of lines or of dots."""
    colours = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(legend)}
    legend_top = _TITLE + HEIGHT * -(-len(panels) // COLUMNS)
    caption_top = legend_top + _ENTRY * -(-len(legend) // COLUMNS)
    size = COLUMNS * WIDTH, caption_top + _ENTRY * len(caption) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(_description(panels, x, y, [*legend.values(), *caption]))}</desc>",
        f'<style>{_STYLE}</style><rect class="paper" width="{size[0]}" height="{size[1]}"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        left, top = index % COLUMNS * WIDTH, index // COLUMNS * HEIGHT + _TITLE
        parts.append(f'<g transform="translate({left},{top})">{"".join(_panel(panel, _Frame(x, y), colours))}</g>')
    for index, (name, words) in enumerate(legend.items()):
        left, top = _LEFT + index % COLUMNS * WIDTH, legend_top + _ENTRY * (index // COLUMNS) + 10
        parts.append(_sample(name, panels, left, top - 4, colours[name]))
        parts.append(f'<text x="{left + 26}" y="{top}">{escape(words)}</text>')
    for index, words in enumerate(caption):
        parts.append(f'<text x="{_LEFT}" y="{caption_top + _ENTRY * index + 10}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _description(panels: Sequence[Panel], x: Axis, y: Axis, words: Sequence[str]) -> str:
    """What is drawn, in words."""
    return f"{y.title} over {x.title}: {'; '.join(panel.title for panel in panels)}. {'; '.join(words)}."


@dataclass(frozen=True)
class _Frame:
    """The axes of a panel in pixels."""

    x: Axis
    y: Axis
    box: ClassVar[Box] = Box(_LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM)

    def at(self, x: float, y: float) -> tuple[float, float]:
        box = self.box
        across, up = (box.right - box.left) * self.x.part(x), (box.bottom - box.top) * self.y.part(y)
        return round(box.left + across, 1), round(box.bottom - up, 1)


def _panel(panel: Panel, frame: _Frame, colours: Mapping[str, str]) -> Iterator[str]:
    x, y, box = frame.x, frame.y, frame.box
    centre, middle = (box.left + box.right) / 2, (box.top + box.bottom) / 2
    yield f'<text class="middle" x="{centre}" y="16">{escape(panel.title)}</text>'
    yield f'<text class="middle" x="{centre}" y="{box.bottom + 32}">{escape(x.title)}</text>'
    yield f'<text class="middle" transform="translate(12,{middle}) rotate(-90)">{escape(y.title)}</text>'
    for value, label in zip(x.ticks, x.labels, strict=True):
        left, _ = frame.at(value, y.ticks[0])
        yield f'<path class="grid" d="M{left} {box.top}V{box.bottom}"/>'
        yield f'<text class="middle" x="{left}" y="{box.bottom + 15}">{label}</text>'
    for value, label in zip(y.ticks, y.labels, strict=True):
        _, top = frame.at(x.ticks[0], value)
        yield f'<path class="grid" d="M{box.left} {top}H{box.right}"/>'
        yield f'<text class="end" x="{box.left - 6}" y="{top + 4}">{label}</text>'
    for line in panel.lines:
        corners = " ".join("{},{}".format(*frame.at(*point)) for point in line.points)
        yield f'<polyline{_dashed(line.is_dashed)} points="{corners}" stroke="{colours[line.name]}"/>'
    yield from _dots(panel, frame, colours)


def _dots(panel: Panel, frame: _Frame, colours: Mapping[str, str]) -> Iterator[str]:
    """The dots with their labels; dots that touch share one."""
    labels: dict[tuple[float, float], str] = {}
    for dot in panel.dots:
        at = frame.at(dot.x, dot.y)
        yield f'<circle cx="{at[0]}" cy="{at[1]}" r="{_RADIUS}" fill="{colours[dot.name]}"/>'
        near = next((other for other in labels if math.dist(at, other) <= 2 * _RADIUS), at)
        labels[near] = f"{labels[near]}, {dot.label}" if near in labels else dot.label
    taken = [Box(*at, *at).grown(_RADIUS + 1) for at in (frame.at(dot.x, dot.y) for dot in panel.dots)]
    for line in panel.lines:
        for (x0, y0), (x1, y1) in pairwise(frame.at(*point) for point in line.points):
            taken.append(Box(min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)).grown(2))
    for (at, text), place in zip(labels.items(), places([*labels], [*labels.values()], taken, frame.box), strict=True):
        end = place.nearest(*at)
        if math.dist(at, end) > 2 * _RADIUS:
            yield f'<path class="leader" d="M{at[0]} {at[1]}L{end[0]:.1f} {end[1]:.1f}"/>'
        yield f'<text x="{place.left:.1f}" y="{place.bottom - 3:.1f}">{escape(text)}</text>'


def _sample(name: str, panels: Sequence[Panel], left: float, top: float, colour: str) -> str:
    """What the legend shows for ``name``: a dot, or a line that is dashed if all lines of that name are."""
    if any(dot.name == name for panel in panels for dot in panel.dots):
        return f'<circle cx="{left + 9}" cy="{top}" r="{_RADIUS}" fill="{colour}"/>'
    is_dashed = all(line.is_dashed for panel in panels for line in panel.lines if line.name == name)
    return f'<path{_dashed(is_dashed)} d="M{left} {top}h20" stroke="{colour}" stroke-width="2"/>'


def _dashed(is_dashed: bool) -> str:
    return ' class="dashed"' if is_dashed else ""
