"""Tests of the browser helper: page errors are reported, and machines without a browser skip the test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.browser import browser, console_errors, missing, screenshot

PAGE = "<!doctype html><meta charset=utf-8><title>Hello</title><p id=size></p>"
SCRIPT = "<script>document.querySelector('p').textContent = innerWidth + 'x' + innerHeight</script>"


def test_page_is_loaded_rendered_and_its_errors_reported(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    good.write_text(PAGE + SCRIPT)
    bad.write_text(PAGE + "<script>nowhere()</script>")
    with browser(700, 500) as driver:
        driver.get(good.as_uri())
        assert driver.title == "Hello"
        assert driver.find_element("id", "size").text == "700x500"
        assert console_errors(driver) == []
        assert screenshot(driver, tmp_path / "shot.png").read_bytes().startswith(b"\x89PNG")
        driver.get(bad.as_uri())
        (error,) = console_errors(driver)
        assert "nowhere is not defined" in error


@pytest.mark.parametrize("dark", [False, True])
def test_dark_sets_the_preferred_colour_scheme(tmp_path: Path, dark: bool) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    with browser(dark=dark) as driver:
        driver.get(page.as_uri())
        assert driver.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches") is dark


def test_missing_browser_skips_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "needs chromium, chromedriver" in str(missing())
    with pytest.raises(pytest.skip.Exception, match="scripts/install_browser.sh"), browser():
        pass
