"""Tests of the SVG drawing: well-formed, to scale, complete, and of limited size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.zero_bubble import Kind, PassCosts, PassMemory, Placement, Schedule, Timeline, build, simulate
from megatron.zero_bubble.core.render.svg import COLOURS, INKS, render_svg
from megatron.zero_bubble.planning.offload import plan_offload

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, p: int, m: int, factor: float = 1.0) -> Timeline:
    schedule = build(name, num_ranks=p, num_microbatches=m)
    return simulate(schedule, PassCosts.uniform(schedule.placement, 20 * factor, 18 * factor, 9 * factor, 1.0))


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def boxes(root: ElementTree.Element, kind: Kind) -> list[tuple[float, float]]:
    """Return (x, width) of every pass of a kind."""
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == kind.value]
    return [(float(x), float(w)) for path in paths for x, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", path)]


def test_every_pass_is_drawn_and_the_title_shows_the_bubble() -> None:
    drawn = timeline("zb-h1", 4, 8)
    root = parse(render_svg(drawn))
    assert [len(boxes(root, kind)) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW)] == [32, 32, 32, 0]
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert sum(text == "7" for text in texts) == 12
    assert [text for text in texts if text and text.startswith("rank")] == [f"rank {rank}" for rank in range(4)]
    title = next(text for text in texts if text and text.startswith("zb-h1"))
    assert f"{drawn.bubble_rate('makespan'):.1%} of makespan" in title
    assert "B input gradient" in texts
    assert "BW fused backward" not in texts


def test_several_timelines_share_one_scale() -> None:
    planned, measured = timeline("zb-h1", 2, 4), timeline("zb-h1", 2, 4, factor=2.0)
    root = parse(render_svg(planned, measured, titles=("planned", "measured & real")))
    widths = [width for _, width in boxes(root, Kind.F)]
    assert len(widths) == 16
    assert min(widths[8:]) > 1.9 * max(widths[:8])
    titles = [element.text or "" for element in root.iter(f"{SVG}text") if element.get("class") == "title"]
    assert titles[0].startswith("planned: zb-h1")
    assert titles[1].startswith("measured & real: zb-h1")


def test_axis_is_within_the_drawing_and_in_ms() -> None:
    root = parse(render_svg(timeline("1f1b", 2, 3), width=800))
    ticks = [element for element in root.iter(f"{SVG}text") if element.get("class") == "tick"]
    assert ticks[0].text == "0 ms"
    assert 5 <= len(ticks) <= 11
    assert all(64 <= float(tick.get("x", "0")) <= 784 for tick in ticks)


def test_later_chunks_are_paler() -> None:
    rows = ["0F0 3F0 3BW0 0BW0".split(), "1F0 2F0 2BW0 1BW0".split()]
    schedule = Schedule.from_text("v", Placement.vee(2), 1, rows)
    root = parse(render_svg(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
    opacities = [path.get("fill-opacity") for path in root.iter(f"{SVG}path") if path.get("class") == "F"]
    assert opacities == ["1", "0.75", "1", "0.75"]


def _luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance by WCAG 2."""
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _rgb(colour: str) -> tuple[float, ...]:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    return tuple(int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))


@pytest.mark.parametrize("idle", ["#eceef2", "#232a34"], ids=["light", "dark"])
@pytest.mark.parametrize("kind", COLOURS)
def test_numbers_stand_out_from_their_passes(kind: Kind, idle: str) -> None:
    """As WCAG 2 asks: 4.5 for text; 3, as for large text and graphics, on the paler passes of later stages."""
    for opacity, least in ((1.0, 4.5), (0.75, 3.0), (0.625, 3.0)):
        over = zip(_rgb(COLOURS[kind]), _rgb(idle), strict=True)
        mixed = tuple(opacity * own + (1 - opacity) * under for own, under in over)
        low, high = sorted(map(_luminance, (mixed, _rgb(INKS[kind]))))
        assert (high + 0.05) / (low + 0.05) >= least, f"{kind} at {opacity}"


def test_numbers_have_the_ink_of_their_kind() -> None:
    root = parse(render_svg(timeline("zb-h1", 4, 8)))
    marks = [element.get("class") for element in root.iter(f"{SVG}text") if "mb" in element.get("class", "")]
    assert set(marks) == {"mb on-F", "mb on-B", "mb on-W"}
    style = next(root.iter(f"{SVG}style")).text or ""
    assert all(f".mb.on-{kind.value}{{fill:{ink}}}" in style for kind, ink in INKS.items())


def test_a_drawing_says_what_it_shows() -> None:
    """In words, for screen readers."""
    root = parse(render_svg(timeline("zb-h1", 2, 4), timeline("1f1b", 2, 4), titles=("planned", "a & b")))
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img" and title is not None and description is not None
    assert (title.text or "").startswith("planned: zb-h1: 2 ranks") and "a & b: 1f1b: 2 ranks" in (title.text or "")
    assert "W weight gradient" in (description.text or "")


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[3] / "docs").glob("*.svg")), ids=lambda path: path.stem)
def test_drawings_of_the_pages_say_what_they_show(file: Path) -> None:
    root = parse(file.read_text(encoding="utf-8"))
    assert root.get("role") == "img"
    assert all((root.findtext(f"{SVG}{name}") or "").strip() for name in ("title", "desc"))


def test_large_plan_omits_numbers_and_stays_small() -> None:
    svg = render_svg(timeline("zb-h2", 32, 256))
    assert len(svg) < 1_000_000
    assert 'class="mb' not in svg
    assert len(boxes(parse(svg), Kind.W)) == 32 * 256


def test_empty_timeline_can_be_drawn() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    parse(render_svg(Timeline(schedule, ((), ()))))


def test_number_of_titles_must_match() -> None:
    with pytest.raises(ValueError, match="got 1 timelines and 2 titles"):
        render_svg(timeline("1f1b", 1, 1), titles=("a", "b"))
    with pytest.raises(ValueError, match="got 0 timelines"):
        render_svg()


def test_memory_curves_are_drawn_below() -> None:
    """The curve has one step per pass; the ranks' peaks are drawn to one scale."""
    drawn = timeline("zb-h1", 2, 3)
    memory = PassMemory.uniform(drawn.schedule.placement, 2.0**30, 2.0**29)
    root = parse(render_svg(drawn, drawn, titles=("planned", "measured"), memory=memory, width=900))
    titles = [element.text for element in root.iter(f"{SVG}text") if element.get("class") == "title"]
    assert titles[2] == "memory of microbatches, each rank up to 2 GiB"
    curves = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "kept"]
    assert [curve.count("V") for curve in curves] == [9 + 1, 9 + 1]
    lines = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "due"]
    assert [f"{line}V" for line in lines] == [curve[: len(line) + 1] for curve, line in zip(curves, lines, strict=True)]
    heights = [[float(y) for y in re.findall(r"V([\d.]+)", line)] for line in lines]
    ends = [float(line.split()[1].partition("H")[0]) for line in lines]
    assert [row[-1] for row in heights] == ends, "the curves must end at zero"
    assert [end - min(row) for end, row in zip(ends, heights, strict=True)] == [28, 28 * 1.5 / 2]
    assert max(max(row) for row in heights) <= float(root.get("height", "0"))


@pytest.mark.parametrize("width", [420, 1200])
def test_legend_is_beside_nothing_and_within_the_drawing(width: int) -> None:
    """It is in as many lines as it needs, and says what paler passes and numbers with a point are."""
    root = parse(render_svg(timeline("seq-zb-h1", 2, 3), timeline("zb-v", 2, 3), timeline("1f1b", 2, 3), width=width))
    last = max(float(tick.get("y", "0")) for tick in root.iter(f"{SVG}text") if tick.get("class") == "tick")
    entries = [each for each in root.iter(f"{SVG}text") if float(each.get("y", "0")) > last]
    assert {"BW fused backward", "paler: later stages of the rank", "1.2: microbatch 1, slice 2"} <= {
        each.text for each in entries
    }
    ends: dict[str, float] = {}
    for each in entries:
        y, x, text = each.get("y", ""), float(each.get("x", "0")), each.text or ""
        assert x >= ends.get(y, 0.0) and x + 5.5 * len(text) <= width
        ends[y] = x + 5.5 * len(text)
    assert float(max(ends, key=float)) < float(root.get("height", "0"))
    assert (len(ends) > 1) is (width < 1000)


def test_lanes_are_named_in_the_legend() -> None:
    schedule = build("pipe-offload", num_ranks=4, num_microbatches=8, num_chunks=2)
    costs = replace(PassCosts.uniform(schedule.placement, 1, 1, 1), host_ms=(0.8,) * 8)
    memory = PassMemory.uniform(schedule.placement)
    moving = plan_offload(simulate(schedule, costs, memory), costs, memory)
    texts = [each.text for each in parse(render_svg(moving.timeline)).iter(f"{SVG}text")]
    assert "copy back, copy out" in texts
