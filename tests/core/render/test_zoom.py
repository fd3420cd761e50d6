"""Tests of the zoomable SVG: a static picture for viewers without scripts, and zoom and movement in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build, simulate
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.render.svg import render_svg, zoomable
from tests.helpers.browser import browser, console_errors

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

SCHEDULE = build("zb-h1", num_ranks=4, num_microbatches=100)
TIMELINE = simulate(SCHEDULE, PassCosts.uniform(SCHEDULE.placement, 20, 18, 9, 1))
SVG = zoomable(render_svg(TIMELINE, TIMELINE, titles=("a", "b"), memory=PassMemory.uniform(SCHEDULE.placement)))
WHEEL = """
const event = {clientX: arguments[0], clientY: 100, deltaY: arguments[1], cancelable: true, bubbles: true};
return document.documentElement.dispatchEvent(new WheelEvent("wheel", event));
"""
SHOWN = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => {
  const first = document.querySelector("path.F").getAttribute("d").split("M")[1];
  const place = (tick) => [Number(tick.getAttribute("x")), parseFloat(tick.textContent)];
  done({first, numbers: [...document.querySelectorAll(".mb")].map((label) => label.textContent),
    ticks: [...document.querySelectorAll(".tick")].map(place),
    curve: document.querySelector(".kept").getAttribute("d")});
}));
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with browser() as driver:
        driver.set_script_timeout(30)
        yield driver


@pytest.fixture
def page(driver: WebDriver, tmp_path: Path) -> Iterator[WebDriver]:
    path = tmp_path / "drawing.svg"
    path.write_text(SVG)
    driver.get(path.as_uri())
    yield driver
    assert console_errors(driver) == []


def test_drawing_is_unchanged_apart_from_the_script() -> None:
    root = ElementTree.fromstring(SVG)
    (script,) = root.iter("{http://www.w3.org/2000/svg}script")
    root.remove(script)
    plain = ElementTree.fromstring(
        render_svg(TIMELINE, TIMELINE, titles=("a", "b"), memory=PassMemory.uniform(SCHEDULE.placement))
    )
    assert ElementTree.tostring(root) == ElementTree.tostring(plain)


def test_script_loads_nothing() -> None:
    assert re.findall(r"https?://[^\"]*", SVG) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|src=|import|fetch|url\(", SVG)


def test_command_writes_a_zoomable_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    times = "--forward-ms 2 --backward-ms 2 --wgrad-ms 1".split()
    assert (
        main(["plan", "--schedule", "1f1b", "--num-ranks", "2", "--num-microbatches", "3", *times, "--format=svg"]) == 0
    )
    assert capsys.readouterr().out.count("<script>") == 1


def test_wheel_zooms_around_the_pointer_until_numbers_appear(page: WebDriver) -> None:
    before = page.execute_async_script(SHOWN)
    assert before["numbers"] == []
    assert page.execute_script(WHEEL, 64, -1500) is False, "the page must not scroll"
    after = page.execute_async_script(SHOWN)
    assert {"0", "3"} <= set(after["numbers"])
    # The first pass stays at the pointer, and is wider by exp(0.0015 * 1500). Between passes is a gap.
    widths = [float(state["first"].split("h")[1].split("v")[0]) for state in (before, after)]
    widths = [widths[0] / 0.85, widths[1] + 1]
    assert after["first"].startswith("64.00 ")
    assert widths[1] == pytest.approx(widths[0] * 9.4877, abs=0.1)
    # The axis has the same scale: F takes 20 ms.
    (x, ms), (other, more) = after["ticks"][:2]
    assert (x, ms) == (64, 0)
    assert (other - x) / (more - ms) == pytest.approx(widths[1] / 20, rel=1e-2)


def test_time_under_the_pointer_stays(page: WebDriver) -> None:
    def under(x: float) -> float:
        (first, ms), *_, (last, more) = page.execute_async_script(SHOWN)["ticks"]
        return float(ms + (x - first) * (more - ms) / (last - first))

    before = under(600)
    for delta in (-1000, -1000, 500):
        page.execute_script(WHEEL, 600, delta)
        assert under(600) == pytest.approx(before, rel=2e-3)


def test_drag_moves_and_double_click_resets(page: WebDriver) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    static = page.execute_async_script(SHOWN)
    page.execute_script(WHEEL, 64, -1500)
    zoomed = page.execute_async_script(SHOWN)
    ActionChains(page).move_by_offset(600, 100).click_and_hold().move_by_offset(-40, 0).release().perform()
    moved = page.execute_async_script(SHOWN)
    assert moved["ticks"][0][0] + 40 == pytest.approx(
        dict(map(reversed, zoomed["ticks"]))[moved["ticks"][0][1]], abs=0.2
    )
    assert moved["curve"] != zoomed["curve"]
    ActionChains(page).double_click().perform()
    reset = page.execute_async_script(SHOWN)
    for old, new in zip(static["ticks"], reset["ticks"], strict=True):
        assert new == pytest.approx(old, abs=0.15)
    assert reset["curve"] == static["curve"].replace("M64 ", "M64.00 ")
    assert reset["first"] == static["first"]


def test_view_stays_within_the_drawing_and_names_of_ranks_do_not_zoom(page: WebDriver) -> None:
    static = page.execute_async_script(SHOWN)
    assert page.execute_script(WHEEL, 30, -1500) is True
    page.execute_script(WHEEL, 600, 5000)
    assert page.execute_async_script(SHOWN)["first"] == static["first"]


def test_numbers_in_another_order_are_listed() -> None:
    swapped = TIMELINE.spans[0][1]._replace(pass_=TIMELINE.spans[0][1].pass_._replace(microbatch=2))
    assert "data-numbers" not in SVG.partition("<script>")[0]
    spans = ((TIMELINE.spans[0][0], swapped), *TIMELINE.spans[1:])
    assert 'data-numbers="0 2"' in render_svg(type(TIMELINE)(SCHEDULE, spans))
