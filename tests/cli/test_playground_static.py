"""Tests of the static playground: files for a file server, and in a real browser, the plans of ``zero-bubble plan``."""

from __future__ import annotations

import io
import json
import math
import random
import shlex
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.playground.answers import Answers
from megatron.zero_bubble.cli.playground.questions import read_question
from megatron.zero_bubble.cli.playground.static import PYODIDE, static_files
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.search import loops
from tests.helpers.browser import browser, console_errors, resize
from tests.helpers.playground import (
    drawn_setting,
    line_of,
    lines,
    name_of,
    settle,
    show,
    static_playground,
    without_seconds,
)

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

Capture = pytest.CaptureFixture[str]
TIMES = {"forward-ms": "10", "backward-ms": "11", "wgrad-ms": "8", "comm-ms": "0.5"}
ASKED = {"schedule": "zb-h1", "num-ranks": "2", "num-microbatches": "3", **TIMES}
SMALL = {"p": "2", "m": "4", "limit": "2", "placement": "linear"}
ASK = """
const [query, parts, done] = arguments;
Promise.all(parts.map((part) => ask(query, undefined, part))).then(done, (error) => done({error: error.message}));
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with static_playground(tmp_path_factory.mktemp("static")) as at:
        yield at


@pytest.fixture(scope="module")
def driver(address: str) -> Iterator[WebDriver]:
    with browser() as driver:
        driver.set_script_timeout(300)
        driver.get(f"{address}#{urlencode(SMALL)}")
        settle(driver, 300)
        yield driver


@pytest.fixture
def page(driver: WebDriver) -> Iterator[WebDriver]:
    """The page, whose planner has started; no test may cause errors in its console."""
    yield driver
    assert console_errors(driver) == []


def visit(page: WebDriver, **setting: str) -> None:
    """Change the setting by the address, which keeps the planner."""
    page.execute_script("location.hash = arguments[0]", urlencode(SMALL | setting))
    settle(page, 300)


def words_of(asked: dict[str, str]) -> list[str]:
    return [word for flag, value in asked.items() for word in (f"--{flag}", value) if word]


@contextmanager
def without_compiled_search() -> Iterator[None]:
    """Search in Python, as the browser does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "find_spec", lambda _: None)
        loops.compiled.cache_clear()
        yield
    loops.compiled.cache_clear()


def searches(asked: dict[str, str]) -> bool:
    with suppress(UserError):
        return read_question(urlencode(asked)).question.searches
    return False


def planned(asked: dict[str, str], capsys: Capture) -> dict[str, Any]:
    """Return the plan that the command prints, or its error. Only its searches depend on the compiled loops."""
    with without_compiled_search() if searches(asked) else nullcontext():
        code = main(["plan", *words_of(asked), "--format", "json"])
    out, err = capsys.readouterr()
    return dict(json.loads(out)) if code == 0 else {"error": err.removeprefix("zero-bubble plan: ").strip()}


def close(ours: object, theirs: object) -> bool:
    """Whether two values differ by rounding only: Python 3.12, and so Pyodide, rounds sums of floats less than 3.11."""
    if isinstance(ours, (float, int)) and isinstance(theirs, (float, int)):  # JavaScript writes 1.0 as 1
        return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(close(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return ours == theirs


def asked_settings(count: int) -> Iterator[dict[str, str]]:
    """Yield settings; a fifth of them searches a loop or a wave, and a fifth runs pairs."""
    draw = random.Random(65)
    for number in range(count):
        asked = drawn_setting(draw, searched=number % 10 == 4)
        costs = {flag: asked[flag] for flag in (*TIMES, "num-microbatches")}
        if number % 5 == 0:
            placement, chunks = draw.choice([("loop", "2"), ("loop", "3"), ("wave", "4")])
            ranks = str(draw.randint(2, 4))
            yield {"schedule": "zb-auto", "placement": placement, "num-chunks": chunks, "num-ranks": ranks, **costs}
        elif number % 5 == 1:
            named = draw.choice([{"schedule": "dualpipe-v"}, {"schedule": "interleaved-1f1b", "num-chunks": "2"}])
            yield {**named, "pairs": "", "num-ranks": "2", **costs, "num-microbatches": "8"}
        else:
            yield asked


def test_files_are_the_page_and_the_planner() -> None:
    made = static_files(home="../index.html")
    assert made == static_files(home="../index.html"), "the same sources make the same files"
    page = made["index.html"].decode()
    assert not [word for word in (" src=", "@import", "url(", "http://", "https://") if word in page]
    (line,) = [line for line in page.splitlines() if line.startswith("const CATALOGUE = ")]
    catalogue = json.loads(line.removeprefix("const CATALOGUE = ").removesuffix(";"))
    assert (catalogue["has_server"], catalogue["home"], catalogue["job"]) == (False, "../index.html", None)
    names = zipfile.ZipFile(io.BytesIO(made["planner.zip"])).namelist()
    assert "megatron/zero_bubble/cli/playground/answers.py" in names and "megatron/__init__.py" not in names
    assert 0.5e6 < len(made["planner.zip"]) < 2e6


def test_command_writes_the_files_and_says_how_to_serve_them(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "page"
    assert main(["playground", "--static", str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["index.html", "planner.zip", "worker.js"]
    said = capsys.readouterr().out
    assert f"npm pack pyodide@{PYODIDE} && " in said and f"mv package {folder}/pyodide\n" in said
    assert f"python -m http.server --directory {folder}\n" in said


def test_static_page_has_no_job_and_needs_a_folder(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    for words, sentence in (
        (["--config", "configs/llama_8b.yaml"], "--static has settings of its own, not those of a job"),
        ([], "cannot be written"),
    ):
        assert main(["playground", "--static", str(tmp_path / "file"), *words]) == 2
        assert sentence in capsys.readouterr().err


def test_worker_replies_with_parts_of_the_answer_or_the_commands_error(capsys: Capture) -> None:
    answers, query = Answers(), urlencode(ASKED)
    expected = planned(ASKED, capsys)
    assert json.loads(answers.reply(query, "drawing"))["order"] == expected.pop("order")
    assert without_seconds(json.loads(answers.reply(query, "plan"))["plan"]) == without_seconds(expected)
    assert json.loads(answers.reply(query, "file"))["schedule"] == "zb-h1"
    assert [*answers.kept] == [query], "planned once"
    for wrong in ({"schedule": "zb-9"}, {"forward-ms": "nan"}):
        error = planned(ASKED | wrong, capsys)
        assert json.loads(answers.reply(urlencode(ASKED | wrong), "plan")) == error and error["error"]
    assert "too large or too small" in answers.reply(urlencode(ASKED | {"num-ranks": f"1{'0' * 400}"}), "plan")


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.full)])
def test_browsers_plans_equal_the_commands(page: WebDriver, capsys: Capture, count: int) -> None:
    for asked in asked_settings(count):
        answer = page.execute_async_script(ASK, urlencode(asked), ["plan", "drawing"])
        expected = planned(asked, capsys)
        if "error" in expected:
            assert answer == expected, asked
            continue
        figures, drawing = answer
        assert shlex.split(figures["command"]) == ["zero-bubble", "plan", *words_of(asked)]
        order = [[part for op in row for part in op.split("&")] for row in expected.pop("order")]
        if "pairs" in asked:  # the parts of pairs are drawn by their times
            order, drawing["order"] = ([sorted(row) for row in rows] for rows in (order, drawing["order"]))
        assert drawing["order"] == order, asked
        assert close(without_seconds(figures["plan"]), without_seconds(expected)), asked
        assert max(end for row in drawing["times"] for _, end in row) == pytest.approx(expected["makespan_ms"])


@pytest.mark.parametrize(
    ("setting", "row"),
    [
        ({"placement": "loop", "v": "2"}, "zb-auto loop x2"),
        ({"placement": "wave", "v": "4"}, "zb-auto wave x4"),
        ({"pairs": "on"}, "1f1b with pairs"),
        ({"slices": "2"}, "zb-auto n2"),
    ],
)
def test_links_open_loops_waves_pairs_and_slices(
    page: WebDriver, capsys: Capture, setting: dict[str, str], row: str
) -> None:
    visit(page, **setting)
    line = line_of(page, row)
    words = shlex.split(str(line.find_element("css selector", "button").get_attribute("title")))
    with without_compiled_search():
        assert main([*words[1:], "--format", "json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    cell = line.find_element("css selector", "td.makespan")
    assert float(str(cell.get_attribute("data-value"))) == expected["makespan_ms"]
    show(page, row)
    wanted = page.execute_script("return hashOf(readSetting())")
    assert all(f"{name}={value}" in wanted for name, value in (SMALL | setting).items())


def test_first_drawings_are_the_pinned_and_the_best(page: WebDriver) -> None:
    visit(page)
    first = page.find_elements("css selector", "#first figure h2")
    assert [title.text for title in first] == [name_of(line) for line in lines(page)[:2]] and first[0].text == "1f1b"
    assert all(text.is_displayed() for text in page.find_elements("class name", "here"))
    assert not page.find_element("id", "home").is_displayed()


def test_narrow_page_does_not_scroll_sideways(page: WebDriver) -> None:
    visit(page, slices="2", pairs="on")
    wide = (
        "return [document.documentElement, document.querySelector('.wide')].map((e) => e.scrollWidth - e.clientWidth)"
    )
    try:
        resize(page, 375, 812)
        assert page.execute_script(wide) == [0, 0]
        page.execute_script("document.getElementById('controls').open = true")
        assert page.execute_script(wide) == [0, 0]
    finally:
        resize(page, 1200, 900)


def test_dark_mode_is_the_systems_until_it_is_switched(page: WebDriver) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    theme = "return [document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"
    dark, light = ["dark", "rgb(18, 22, 28)"], ["light", "rgb(245, 246, 248)"]
    prefer = "Emulation.setEmulatedMedia"
    button = page.find_element("id", "theme")
    assert page.execute_script(theme) == light
    page.execute_cdp_cmd(prefer, {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    try:
        WebDriverWait(page, 60).until(lambda page: page.execute_script(theme) == dark)
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        assert page.execute_script(theme) == light and button.get_attribute("aria-pressed") == "false"
        assert page.execute_script("return localStorage.getItem(THEME)") == "light"
    finally:
        page.execute_script("localStorage.removeItem(THEME); chosen = null")
        page.execute_cdp_cmd(prefer, {"features": [{"name": "prefers-color-scheme", "value": "light"}]})


@pytest.mark.full
def test_question_that_nobody_waits_for_is_abandoned(page: WebDriver) -> None:
    asked = {"schedule": "zb-auto", "placement": "auto", "num-ranks": "32", "num-microbatches": "128", **TIMES}
    leave = """
    const [long, short, done] = arguments, before = source.worker, gone = new AbortController();
    ask(long, gone.signal).catch(({message}) => message).then(async (message) => {
      const {plan} = await ask(short);
      done([message, source.worker === before, plan.schedule]);
    });
    setTimeout(() => gone.abort(), 100);
    """
    said = page.execute_async_script(leave, urlencode(asked), urlencode(ASKED))
    assert said == ["nobody waits for this answer", False, "zb-h1"]


def test_page_from_a_folder_says_what_it_needs(driver: WebDriver, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_bytes(static_files()["index.html"])
    try:
        driver.get(f"file://{tmp_path}/index.html")
        settle(driver)
        said = driver.find_element("id", "absent").text
        assert "the planner needs WebAssembly, and a file server such as python -m http.server" in said
        console_errors(driver)
    finally:
        driver.back()
