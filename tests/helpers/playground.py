"""Start a playground in this process, served by itself or by a file server, draw random settings for it, and wait for
its page.
"""

from __future__ import annotations

import random
import threading
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron.zero_bubble.cli.playground import add_playground
from megatron.zero_bubble.cli.playground.job import job_of
from megatron.zero_bubble.cli.playground.server import Server
from megatron.zero_bubble.cli.playground.static import PYODIDE, static_files
from megatron.zero_bubble.core.schedules import SCHEDULES

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver
    from selenium.webdriver.remote.webelement import WebElement

_PYODIDE = Path(__file__).resolve().parents[2] / "build" / f"pyodide-{PYODIDE}"
_SETTLED = "return document.body.dataset.settled === hashOf(readSetting())"


@contextmanager
def playground(*flags: str) -> Iterator[str]:
    """Run a playground with these flags in this process; yield its address."""
    parser = ArgumentParser()
    add_playground(parser)
    with Server(0, job_of(parser.parse_args(flags))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.address
        finally:
            server.shutdown()


class _QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def static_playground(folder: Path) -> Iterator[str]:
    """Write the static playground into a folder, and serve that as files; yield its address.

    On a machine without Pyodide the test is skipped with the reason.
    """
    if not _PYODIDE.exists():
        pytest.skip(f"needs {_PYODIDE.name}: scripts/install_pyodide.sh")
    for name, content in static_files().items():
        (folder / name).write_bytes(content)
    (folder / "pyodide").symlink_to(_PYODIDE)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietFiles, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def settle(driver: WebDriver, seconds: float = 120) -> None:
    """Wait until the page shows all results for the current values of its controls."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, seconds, poll_frequency=0.1).until(lambda page: page.execute_script(_SETTLED))


def show(driver: WebDriver, row: str) -> WebElement:
    """Scroll to the drawing of a row, wait until it is drawn, and return the canvas that follows the pointer."""
    from selenium.webdriver.support.ui import WebDriverWait

    figure = f"#picture-{row.replace(' ', '-')}"
    canvas = driver.find_element("css selector", f"{figure} canvas.layer")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    WebDriverWait(driver, 60, 0.05).until(lambda page: page.find_elements("css selector", f"{figure}[data-drawn]"))
    return canvas


def drawn_setting(draw: random.Random, *, searched: bool) -> dict[str, str]:
    """Draw flags of ``zero-bubble plan``; with ``searched``, a small case of a schedule that needs a search."""
    adapting = [name for name, recipe in SCHEDULES.items() if recipe.adapts]
    name = draw.choice(["zb-auto", *adapting] if searched else [*SCHEDULES])
    flags = {
        "schedule": name,
        "num-ranks": str(draw.randint(1, 3 if searched else 6)),
        "num-microbatches": str(draw.randint(1, 4 if searched else 12)),
        "forward-ms": f"{draw.uniform(0.1, 40):.{draw.randint(0, 3)}f}",
        "backward-ms": f"{draw.uniform(0.1, 40):.{draw.randint(0, 3)}f}",
        "wgrad-ms": f"{draw.uniform(0, 40):.{draw.randint(0, 3)}f}",
        "comm-ms": f"{draw.choice([0, draw.uniform(0, 10)]):.{draw.randint(0, 3)}f}",
    }
    if name in adapting and not searched:
        flags["equal-passes"] = ""
    if name in SCHEDULES and SCHEDULES[name].shape == "interleaved":
        flags["num-chunks"] = str(draw.randint(2, 4))
    if name == "zb-auto":
        flags["placement"] = draw.choice(["linear", "vee", "auto"])
    is_sliced = name in SCHEDULES and SCHEDULES[name].sliced
    if is_sliced or (name == "zb-auto" and draw.random() < 0.5):
        flags["num-slices"] = draw.choice(["2", "4", "8", "16", "auto"])
        if draw.random() < 0.5:
            flags["attention-share"] = f"{draw.uniform(0.01, 1):.3f}"
    if "num-slices" not in flags and draw.random() < 0.3:
        flags["vocabulary"] = draw.choice(["1", "2", "auto"])
        flags |= {flag: f"{draw.uniform(0, 20):.2f}" for flag in ("output-ms", "output-wgrad-ms")}
    if draw.random() < 0.8:
        flags["memory-limit"] = f"{draw.choice([0.3, 0.5, 0.75, 1, 1.5, 2, draw.uniform(0.2, 3)]):.4g}p"
    if draw.random() < 0.5:
        flags["objective"] = draw.choice(["span", "makespan"])
    return flags


def without_seconds(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's JSON without the planning time, which differs between runs."""
    return {key: value for key, value in plan.items() if key != "planning_seconds"}


def line_of(page: WebDriver, name: str) -> WebElement:
    """The line of a schedule in the table."""
    return next(line for line in lines(page) if name_of(line) == name)


def lines(page: WebDriver) -> list[WebElement]:
    """The lines of the table."""
    return list(page.find_elements("css selector", "tbody tr"))


def name_of(line: WebElement) -> str:
    return str(line.find_element("css selector", "th a").text)


def figures(plan: dict[str, Any]) -> list[float]:
    """Return a plan's figures in the order of the table's columns, as ``shown`` does those of a row."""
    keys = ("span_ms", "bubble_rate_span", "makespan_ms", "bubble_rate_makespan", "idle_rate_makespan")
    peak = max(plan["peak_activation"]) / plan["num_ranks"]
    return [*(plan[key] for key in keys), peak, plan["lower_bound_ms"], plan["gap"]]


def shown(line: WebElement) -> list[float]:
    """The exact values of a line, in the order of its columns."""
    return [
        float(str(cell.get_attribute("data-value"))) for cell in line.find_elements("css selector", "td[data-value]")
    ]
