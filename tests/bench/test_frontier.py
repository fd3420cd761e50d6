"""Tests of the frontier's picture: it shows each limit's own bubble, and no public schedule below it."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from bench import frontier
from bench.frontier import LIMITS, Frontier, M, P, Point, below, draw_all, steps
from bench.labels import LETTER, LINE, Box
from bench.peer_schedules import PEERS, Answer, Case, read

CASE = Case(P, M, 10.0, 10.0, 10.0, 0.0, 1.0, 0.0)
SVG = "{http://www.w3.org/2000/svg}"


def frontier_of(bubbles: dict[float, float], *peers: Point, case: Case = CASE) -> Frontier:
    found = tuple(Answer(bubble, bubble / 2, "vee", limit, 0.1) for limit, bubble in bubbles.items())
    return Frontier(case, tuple(bubbles), found, peers)


def test_each_bubble_holds_from_its_limit_to_the_next() -> None:
    assert steps([1, 2, 4], [0.5, 0.3, 0.1]) == ((1, 0.5), (2, 0.5), (2, 0.3), (4, 0.3), (4, 0.1))


@pytest.mark.parametrize(("peak", "bubble", "is_below"), [
    (4.0, 0.2000, False), (4.0, 0.1996, False), (4.0, 0.1990, True), (3.9, 0.25, True), (4.4, 0.21, False),
    (4.4, 0.19, True), (4.5, 0.10, False), (7.0, 0.09, True),
])  # fmt: skip
def test_peers_below_the_line_are_found(peak: float, bubble: float, is_below: bool) -> None:
    panel = frontier_of({3.0: 0.3, 4.0: 0.2, 4.5: 0.1}, Point("v-min", peak, bubble)).panel
    assert bool(below(panel)) == is_below


def test_a_peer_is_compared_with_what_is_drawn() -> None:
    panel = frontier_of({3.0: 0.3, 4.0: 0.2}, Point("v-min", 4.0, 0.25)).panel
    late = tuple((limit + 0.01, rate) for limit, rate in panel.lines[1].points)
    assert not below(panel)
    assert below(replace(panel, lines=(panel.lines[0], replace(panel.lines[1], points=late))))


def test_a_peer_below_the_line_fails_the_bench_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "frontier.json"
    monkeypatch.setattr(sys, "argv", ["frontier", "--svg", str(tmp_path / "chart.svg"), "--output", str(output)])
    answers = {3.0: 0.3, 4.0: 0.2}
    for peer, code in ((Point("v-min", 4.0, 0.2), 0), (Point("v-min", 4.0, 0.15), 1)):
        monkeypatch.setattr(frontier, "_frontiers", lambda *_, peer=peer: [frontier_of(answers, peer)])
        assert frontier.main() == code
    sentence = "F 10, B 10, W 10, transfer 0 ms: v-min has a bubble of 15.00% in 0.500 p, below zb-auto's 20.00%"
    assert capsys.readouterr().out.endswith(f"{sentence}\n")
    assert json.loads(output.read_text())["below"] == [sentence]


def of_all_peers() -> list[Frontier]:
    """The panels with all peers of the table, and a line through the best of them."""
    cases = {case: peers for case, peers in read(PEERS).items() if (case.p, case.m, case.wgrad_memory) == (P, M, 1)}
    frontiers = []
    for profile in {replace(case, limit=0.0) for case in cases}:
        of = {case.limit: peers for case, peers in cases.items() if replace(case, limit=0.0) == profile}
        points = [Point(peer.schedule, peak, peer.bubble["span"]) for peak, peers in of.items() for peer in peers]
        best = {at: min([0.4 - at / 40, *(to.bubble for to in points if to.peak <= at)]) for at in LIMITS}
        frontiers.append(frontier_of(best, *points, case=profile))
    return frontiers


def test_labels_overlap_no_label_no_line_and_no_dot() -> None:
    root = ElementTree.fromstring(draw_all(of_all_peers(), "span"))
    panels = root.findall(f"{SVG}g")
    assert len(panels) == 4
    for panel in panels:
        labels = [label for label in panel.findall(f"{SVG}text") if "class" not in label.attrib]
        named = sorted(name for label in labels for name in (label.text or "").split(", "))
        assert named == sorted("1f1b zb-1p zb-2p v-half v-min zbv zbv-formatted DualPipeV interleaved-v2".split())
        boxes = [box_of(label) for label in labels]
        taken = [*dots_of(panel), *segments_of(panel)]
        assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
        assert not any(box.overlaps(other) for box in boxes for other in taken)


def box_of(label: ElementTree.Element) -> Box:
    left, bottom = float(label.attrib["x"]), float(label.attrib["y"]) + 3
    return Box(left, bottom - LINE, left + LETTER * len(label.text or ""), bottom)


def dots_of(panel: ElementTree.Element) -> list[Box]:
    centres = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in panel.findall(f"{SVG}circle")]
    return [Box(x, y, x, y).grown(3.5) for x, y in centres]


def segments_of(panel: ElementTree.Element) -> Sequence[Box]:
    boxes = []
    for line in panel.findall(f"{SVG}polyline"):
        corners = [tuple(map(float, corner.split(","))) for corner in line.attrib["points"].split()]
        boxes += [Box(x0, min(y0, y1), x1, max(y0, y1)) for (x0, y0), (x1, y1) in pairwise(corners)]
    return boxes
