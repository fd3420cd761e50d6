"""Test of the playground's page with pairs of forwards and backwards."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from tests.helpers.browser import browser, console_errors
from tests.helpers.playground import playground, settle

pytest.importorskip("selenium.webdriver.support.ui")
SMALL = {"p": "2", "m": "4", "F": "10", "B": "11", "W": "8", "comm": "0.5", "limit": "2", "v": "2", "pairs": "on"}


@pytest.mark.full
def test_pairs_add_rows_and_pictures() -> None:
    with playground() as address, browser() as driver:
        driver.get("about:blank")
        driver.get(f"{address}#{urlencode(SMALL)}")
        settle(driver)
        names = [name.text.split("\n")[0] for name in driver.find_elements("css selector", "tbody th")]
        assert {"1f1b with pairs", "interleaved-1f1b x2 with pairs", "dualpipe-v with pairs"} <= {*names}
        pictures = driver.find_elements("css selector", "figure[id='picture-dualpipe-v-with-pairs']")
        assert len(pictures) == 1 and driver.find_element("css selector", "input[name=pairs][value=on]").is_selected()
        driver.get("about:blank")
        driver.get(f"{address}#{urlencode(SMALL | {'vocabulary': '1'})}")
        settle(driver)
        reasons = driver.find_element("id", "absent").text
        assert "runs pairs, which exclude vocabulary parallelism" in reasons
        assert console_errors(driver) == []
