"""Render the pictures of the playground: ``python -m tests.helpers.screenshots [FOLDER]`` (default: docs)."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from tests.helpers.browser import browser
from tests.helpers.playground import settle, show, static_playground

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

SETTING = {"p": "4", "m": "8", "F": "10", "B": "11", "W": "8", "comm": "0.5", "limit": "1"}


def main(folder: Path) -> None:
    """Write ``playground.webp``, with a pass under the pointer, and ``playground-narrow.webp``, dark and on a phone."""
    with tempfile.TemporaryDirectory() as files, static_playground(Path(files)) as address:
        page = f"{address}#{urlencode(SETTING)}"
        with browser(1160, 900) as driver:
            driver.get(page)
            settle(driver, 300)
            _point_at_a_backward(driver)
            _save(driver, folder / "playground.webp")
        with browser(375, 900, dark=True) as driver:
            driver.get(page)
            settle(driver, 300)
            _save(driver, folder / "playground-narrow.webp")


def _save(driver: WebDriver, path: Path) -> None:
    """Write what is visible as WebP, which is smaller than PNG."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 85})
    path.write_bytes(base64.b64decode(shot["data"]))


def _point_at_a_backward(driver: WebDriver) -> None:
    """Move the pointer to a backward of the best schedule that waits for another rank."""
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = show(driver, str(driver.execute_script("return drawn[1].id")))
    driver.execute_script("scrollTo(0, 0); linkPasses(drawn[1].rows, drawn[1].waits)")
    spot = "const p = drawn[1].rows[2].find(({kind, needs}) => kind === 'B' && needs[0].pass.rank !== 2);"
    spot += "const {x, y, wide, high} = drawn[1].box(p); return [x + wide / 2, y + high / 2];"
    x, y = driver.execute_script(spot)
    size = canvas.size
    pointer = ActionChains(driver)
    pointer.move_to_element_with_offset(canvas, int(x - size["width"] / 2), int(y - size["height"] / 2)).perform()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path("docs"))
