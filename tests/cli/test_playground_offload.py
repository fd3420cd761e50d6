"""The playground's switch for offloading, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli import test_playground_page
from tests.cli.test_playground_page import Capture, figures, plan
from tests.helpers.playground import lines, name_of, settle, show, shown

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

page, driver, address = test_playground_page.page, test_playground_page.driver, test_playground_page.address


@pytest.mark.full
def test_offloading_moves_activations(page: WebDriver, capsys: Capture) -> None:
    before = {name_of(line): shown(line) for line in lines(page)}
    assert not page.find_element("id", "number-H").is_displayed()
    assert "copy to host memory" not in page.find_element("id", "legend").text
    page.find_element("css selector", "input[name=offload][value='all']").click()
    settle(page)
    assert page.find_element("id", "number-H").is_displayed() and "offload=all" in page.current_url
    words = "--num-ranks 3 --num-microbatches 4 --forward-ms 10 --backward-ms 11 --wgrad-ms 8 --comm-ms 0.5".split()
    words += "--memory-limit 1p --offload all --host-ms 10".split()
    rows = {name_of(line): line for line in lines(page)}
    for name in ("zb-h2", "zb-auto"):
        expected = plan(capsys, "--schedule", name, *words)
        assert isinstance(expected, dict)
        assert shown(rows[name]) == figures(expected)
    assert shown(rows["zb-h2"]) != before["zb-h2"]
    assert "copy to host memory, or back" in page.find_element("id", "legend").text
    show(page, "zb-h2")
    copies = page.execute_script("return drawn.find(({id}) => id === 'zb-h2').copies.map((row) => row.length)")
    assert copies[0] > 0 and copies[0] % 2 == 0
    assert "of the forwards move, bubble" in page.find_element("id", "picture-zb-h2").text
