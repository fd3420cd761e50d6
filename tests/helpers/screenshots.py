"""Render the picture of the playground: ``python -m tests.helpers.screenshots [FOLDER]`` (default: docs)."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlencode

from tests.helpers.browser import browser, screenshot
from tests.helpers.playground import playground, settle, show

SETTING = {"p": "4", "m": "8", "F": "10", "B": "11", "W": "8", "comm": "0.5", "limit": "1", "placement": "vee"}


def main(folder: Path) -> None:
    """Write ``playground.png``: the table, the first charts, and a pass under the pointer."""
    from selenium.webdriver.common.action_chains import ActionChains

    with playground() as address, browser(1160, 880) as driver:
        driver.get(f"{address}#{urlencode(SETTING)}")
        settle(driver)
        canvas = show(driver, str(driver.execute_script("return drawn[0].id")))
        driver.execute_script("scrollTo(0, 0)")
        driver.execute_script("linkPasses(drawn[0].rows, drawn[0].waits)")
        spot = "const p = drawn[0].rows[2].find(({kind, needs}) => kind === 'B' && needs[0].pass.rank !== 2);"
        spot += "const {x, y, wide, high} = drawn[0].box(p); return [x + wide / 2, y + high / 2];"
        x, y = driver.execute_script(spot)
        size = canvas.size
        ActionChains(driver).move_to_element_with_offset(
            canvas, int(x - size["width"] / 2), int(y - size["height"] / 2)
        ).perform()
        screenshot(driver, folder / "playground.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path("docs"))
