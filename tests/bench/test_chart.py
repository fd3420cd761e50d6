"""Tests of the charts: round ticks that cover the values, what a mark means, and labels next to their points."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chart import Axis, Dot, Line, Panel, draw
from bench.labels import Box, places

SVG = "{http://www.w3.org/2000/svg}"
AXES = Axis.counts("ranks", (2, 8)), Axis.shares("throughput", 0.71, 1.0)
WITHIN = Box(0, 0, 300, 200)


def test_axes_point_up_and_right_and_words_are_escaped() -> None:
    text = draw("title", [Panel("<panel>", (Line("a", ((2, 0.95), (8, 0.71))),))], {"a": "a & b"}, *AXES, ["x < y"])
    line = ElementTree.fromstring(text).find(f".//{SVG}polyline")
    assert line is not None
    (x0, y0), (x1, y1) = (map(float, corner.split(",")) for corner in line.attrib["points"].split())
    assert x0 < x1 and y0 < y1
    assert all(words in text for words in ("&lt;panel&gt;", "a &amp; b", "x &lt; y", ">ranks<", ">throughput<"))


@given(st.floats(0, 1), st.floats(0, 1))
def test_ticks_are_round_and_cover_all_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    axis = Axis.shares("", low, high)
    percents = [round(100 * tick) for tick in axis.ticks]
    step = percents[1] - percents[0] if len(percents) > 1 else 1
    assert step in (1, 2, 5, 10, 20) and all(percent % step == 0 for percent in percents)
    assert axis.ticks[0] <= low and high <= axis.ticks[-1] + 1e-9 and len(percents) <= 9
    assert axis.labels == tuple(f"{percent} %" for percent in percents)


def test_equal_factors_of_counts_have_equal_lengths() -> None:
    axis = Axis.counts("ranks", (2, 4, 64))
    assert [axis.part(count) for count in (2, 4, 8, 64)] == pytest.approx([0, 0.2, 0.4, 1])


def test_legend_shows_the_mark_of_each_name() -> None:
    points = ((2, 0.8), (8, 0.9))
    panel = Panel("", (Line("a", points), Line("b", points, is_dashed=True)), (Dot("c", "c", 4, 0.75),))
    root = ElementTree.fromstring(draw("", [panel], dict.fromkeys("abc", ""), *AXES))
    assert [element.attrib.get("class") for element in root.findall(f"{SVG}path")] == [None, "dashed"]
    assert len(root.findall(f"{SVG}circle")) == 1


def test_dots_that_touch_share_a_label() -> None:
    dots = (Dot("d", "one", 4, 0.75), Dot("d", "two", 4, 0.751), Dot("d", "three", 4, 0.95))
    text = draw("", [Panel("", (), dots)], {"d": ""}, *AXES)
    assert ">one, two<" in text and ">three<" in text


def test_labels_are_near_their_points_and_apart() -> None:
    points = [(100.0, 100.0), (104.0, 104.0), (299.0, 199.0)]
    wall = Box(100, 0, 102, 200)
    boxes = places(points, ["first", "second", "third"], [wall], WITHIN)
    assert all(WITHIN.contains(box) for box in boxes)
    for k, (box, point) in enumerate(zip(boxes, points, strict=True)):
        assert not any(box.overlaps(other) for other in [wall, *boxes[:k]])
        x, y = box.nearest(*point)
        assert abs(x - point[0]) + abs(y - point[1]) < 30


def test_a_label_larger_than_its_panel_is_rejected() -> None:
    with pytest.raises(ValueError, match="shorten it"):
        places([(5.0, 5.0)], ["a long label"], [], Box(0, 0, 20, 20))
