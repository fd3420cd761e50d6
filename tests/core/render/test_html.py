"""Tests of the HTML page: self-contained, and drawing, zooming and explaining in a real browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build
from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.formats.trace import Recording
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.render.html import render_html
from tests.helpers.browser import browser, console_errors
from tests.helpers.delayed import run
from tests.helpers.rows import some

SCHEDULE = build("zb-v", num_ranks=2, num_microbatches=4)
COSTS = PassCosts.uniform(SCHEDULE.placement, 20, 20, 20, 1)


def compared(memory: PassMemory | None = None) -> ComparedIteration:
    """1F0 (stage 1 on rank 1) starts late because 0F0 is 7 ms slower; the host delays 3B0 by 3 ms."""
    delays = {"slow": {Pass.parse("0F0"): 7.0}, "host": {Pass.parse("3B0"): 3.0}}
    return Recording(COSTS, {50: run(SCHEDULE, COSTS, **delays)}, memory).compared(50)


def page(comparison: ComparedIteration | None = None) -> str:
    return render_html(compared(PassMemory.uniform(SCHEDULE.placement, 2.0**30)) if comparison is None else comparison)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_page_loads_no_external_resources() -> None:
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(f"{tag} {value}" for key, value in attrs if key in ("src", "href"))

    text = page()
    Links().feed(text)
    assert found == ["link data:,"]
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text and "url(" not in text


def test_page_contains_all_data() -> None:
    data = data_of(page())
    assert data["makespans"]["measured"] - data["makespans"]["planned"] == pytest.approx(
        compared().difference.makespan_ms
    )
    assert [len(row) for row in data["measured"]] == [24, 24]
    stage, kind, microbatch, start, end, waits_for, awaited, arrived, slow, late, host = data["measured"][1][0]
    assert (stage, kind, microbatch, waits_for) == (1, "F", 0, "0F0")
    assert (start, end, awaited, arrived) == (18.0, 28.0, 0.0, 18.0)
    assert (slow, late, host) == (0.0, 7.0, 0.0)
    assert len(data["kept"]["planned"][0]) == 24
    assert data["kept"]["most"] <= 4 * 2**30


def test_schedule_name_is_escaped() -> None:
    comparison = compared()
    schedule = comparison.measured.timeline.schedule
    object.__setattr__(schedule, "name", "</script><b>")
    text = page(comparison)
    assert "<b>" not in text
    assert text.count("</script>") == 2


def test_memory_is_omitted_if_not_measured() -> None:
    assert "kept" not in data_of(page(compared()))


def test_tables_explain_the_difference() -> None:
    words = re.sub(r"<[^>]+>", " ", page().split("<h2>", 1)[1].split("<script", 1)[0])
    words = " ".join(words.split())
    assert "slow passes +7.00" in words
    assert "measured minus planned +" in words
    assert "rank idle, planned idle, measured" in words


@pytest.mark.parametrize("dark", some([False, True], True))
def test_page_works_in_a_browser(tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "timeline.html"
    file.write_text(page(), encoding="utf-8")
    with browser(dark=dark) as driver:
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.by import By

        driver.get(file.as_uri())
        canvas, tip = driver.find_element(By.ID, "timeline"), driver.find_element(By.ID, "tip")
        assert not tip.is_displayed()
        pixels = "return [...new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer)]"
        assert len(set(driver.execute_script(pixels))) > 10, (
            "passes of three kinds and two chunks, gaps and axes must have different colours"
        )

        def point_at(name: str) -> str:
            """Point at a measured pass; return the text of its tooltip."""
            where = driver.execute_script(
                "const place = places.get(arguments[0]), pass = place.measured, box = canvas.getBoundingClientRect();"
                "return [x((pass[START] + pass[END]) / 2) - box.width / 2,"
                " y(panels[1], place.rank) + panels[1].row / 2 - box.height / 2]",
                name,
            )
            ActionChains(driver).move_to_element_with_offset(canvas, *map(round, where)).perform()
            assert tip.is_displayed()
            return tip.text

        late = point_at("1F0")
        assert late.startswith("1F0\nforward of microbatch 0, stage 1, rank 1\n")
        assert "measured: 18.00 to 28.00 ms, takes 10.00 ms" in late
        assert "waited 18.00 ms for 0F0 from rank 0, 7.00 ms longer than planned" in late
        assert "pass: 7.00 ms longer than planned" in point_at("0F0")
        assert "host gap before it: 3.00 ms" in point_at("3B0")
        whole = driver.execute_script("return view")
        zoom = (
            "canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: -600, clientX: 500, cancelable: true})); return view"
        )
        zoomed = driver.execute_script(zoom)
        assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
        ActionChains(driver).drag_and_drop_by_offset(canvas, -100, 0).perform()
        moved = driver.execute_script("return view")
        assert moved[0] > zoomed[0]
        assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
        ActionChains(driver).double_click(canvas).perform()
        assert driver.execute_script("return view") == whole
        assert console_errors(driver) == []
