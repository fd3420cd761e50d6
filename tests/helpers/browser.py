"""A real browser for page tests: headless Chromium, driven by selenium.

    with browser() as driver:
        driver.get(url)  # http:// or file://
        ...
    assert console_errors(driver) == []

Requires selenium (the extra ``dev``), ``chromium`` and ``chromedriver`` (``scripts/install_browser.sh``); nothing is
downloaded here. The test is skipped where one of them is missing.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver
    from selenium.webdriver.remote.webelement import WebElement

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the sandbox does not start as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    # No network requests other than the page's own.
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> str | None:
    """Describe what browser tests need and this machine lacks; None if nothing is missing."""
    lacking = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
    if importlib.util.find_spec("selenium") is None:
        lacking.append("selenium")
    if not lacking:
        return None
    return f"needs {', '.join(lacking)}: scripts/install_browser.sh, and pip install selenium"


@contextmanager
def browser(width: int = 1200, height: int = 900, *, dark: bool = False) -> Iterator[WebDriver]:
    """Start a browser whose pages are ``width`` x ``height`` pixels; ``dark`` selects the pages' dark colour scheme.

    Each start uses an empty profile. On a machine without a browser the test is skipped with the reason.
    """
    if reason := missing():
        pytest.skip(reason)
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile,
    ):
        for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        # Requests to the driver must not go through a configured proxy.
        patch.setenv("no_proxy", "localhost,127.0.0.1")
        driver = Chrome(options, Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(60)
            resize(driver, width, height)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def resize(driver: WebDriver, width: int, height: int) -> None:
    """Set the page's viewport to ``width`` x ``height`` pixels, independent of the window's frame."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def console_errors(driver: WebDriver) -> list[str]:
    """Return the pages' errors since the last call: exceptions, failed requests, console.error and console.warn."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def screenshot(driver: WebDriver, path: Path, element: WebElement | None = None) -> Path:
    """Write a PNG of the visible page, or of ``element``, to ``path``."""
    shot = driver.get_screenshot_as_png() if element is None else element.screenshot_as_png
    path.write_bytes(shot)
    return path
