"""Places for the labels of points in a chart: next to their points, off lines, points and each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

LETTER, LINE = 6.6, 12.0
"""The width of a letter and the height of a line of text, in pixels; generous, as the font depends on the reader."""
_DISTANCES = range(5, 160, 5)
_DIRECTIONS = 16


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels, with y downwards; a point or an axis-parallel line is a box without an area."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether the boxes have a point in common."""
        across = self.left <= other.right and other.left <= self.right
        return across and self.top <= other.bottom and other.top <= self.bottom

    def contains(self, other: Box) -> bool:
        """Whether ``other`` does not stick out."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom

    def grown(self, by: float) -> Box:
        """The box with a margin."""
        return Box(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the box that is nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)


def places(points: Sequence[tuple[float, float]], texts: Sequence[str], taken: Sequence[Box], within: Box) -> list[Box]:
    """A box for the label of each point: the nearest of those that overlap the fewest boxes, ``taken`` or placed."""
    placed: list[Box] = []
    for (x, y), text in zip(points, texts, strict=True):
        candidates = [box for box in _around(x, y, LETTER * len(text)) if within.contains(box)]
        if not candidates:
            raise ValueError(f"the label {text!r} is larger than its panel; shorten it")
        avoided = [*taken, *placed]
        placed.append(min(candidates, key=lambda box: sum(map(box.overlaps, avoided))))
    return placed


def _around(x: float, y: float, width: float) -> list[Box]:
    """Boxes around a point, from near to far, each with its nearest corner or the middle of an edge at the distance."""
    boxes = []
    for distance, turn in product(_DISTANCES, range(_DIRECTIONS)):
        angle = 2 * math.pi * turn / _DIRECTIONS
        right, down = math.cos(angle), -math.sin(angle)
        left = x + distance * right + width * (round(right) - 1) / 2
        top = y + distance * down + LINE * (round(down) - 1) / 2
        boxes.append(Box(left, top, left + width, top + LINE))
    return boxes
