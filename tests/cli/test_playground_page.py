"""Tests of the playground's page in a real browser: same figures as ``zero-bubble plan``, mouse and keyboard use."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from megatron.zero_bubble import SCHEDULES
from megatron.zero_bubble.__main__ import main
from tests.helpers.browser import browser, console_errors, resize
from tests.helpers.playground import drawn_setting, figures, line_of, lines, name_of, playground, settle, show, shown

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
pytestmark = pytest.mark.usefixtures("short_searches")  # also those of the server, which is in this process
Capture = pytest.CaptureFixture[str]
KEYS = {"p": "num-ranks", "m": "num-microbatches", "F": "forward-ms", "B": "backward-ms", "W": "wgrad-ms"}
KEYS |= {"comm": "comm-ms"}
SMALL = {"p": "3", "m": "4", "F": "10", "B": "11", "W": "8", "comm": "0.5", "limit": "1", "v": "2", "a": "0"}
SMALL |= {"slices": "1"}
SHARDS = {"S": "output-ms", "T": "output-wgrad-ms"}
ASK = """
const [setting, id, done] = arguments;
const row = rowsOf(setting).find((row) => row.id === id);
ask(row.query, new AbortController().signal).then((answer) => {
  const line = answerLine(row, answer, {span: 1, makespan: 1, idle: 1, peak: 1});
  const cells = [...line.querySelectorAll("td[data-value]")];
  done({values: cells.map((cell) => Number(cell.dataset.value)), command: line.querySelector("button").title});
}, (error) => done({error: error.message}));
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with playground() as at:
        yield at


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver: WebDriver, address: str) -> Iterator[WebDriver]:
    """The page with a small setting after all searches; no test may cause errors in the page's console."""
    driver.get("about:blank")
    driver.get(f"{address}#{urlencode(SMALL)}")
    settle(driver)
    yield driver
    assert console_errors(driver) == []


def plan(capsys: Capture, *words: str) -> dict[str, Any] | str:
    """Return the plan that ``zero-bubble plan`` prints, or its error."""
    code = main(["plan", *words, "--format", "json"])
    out, err = capsys.readouterr()
    return dict(json.loads(out)) if code == 0 else err.removeprefix("zero-bubble plan: ").strip()


def controls_for(flags: dict[str, str]) -> tuple[dict[str, str], dict[str, str], str]:
    """Return the controls' setting for ``flags``, the flags that the page derives from it, and the row's name."""
    name, objective = flags["schedule"], flags.get("objective", "makespan")
    setting = {key: flags[flag] for key, flag in KEYS.items()} | {"v": flags.get("num-chunks", "2")}
    setting |= {"slices": flags.get("num-slices", "1"), "a": flags.get("attention-share", "0")}
    setting |= {"limit": flags.get("memory-limit", "").removesuffix("p"), "objective": objective}
    setting["placement"] = flags.get("placement", "any").replace("auto", "any")
    setting |= {key: flags.get(flag, "2.5") for key, flag in SHARDS.items()}
    setting["vocabulary"] = flags.get("vocabulary", "off")
    made = {"memory-limit": f"{flags['num-microbatches']}p", **flags, "objective": objective}
    if objective == "makespan":
        del made["objective"]
    row = f"{name} x{flags['num-chunks']}" if "num-chunks" in flags else name
    if name in SCHEDULES and SCHEDULES[name].adapts and "equal-passes" not in flags:
        row = f"{name} fitted"
    if "num-slices" in flags:
        row += f" n{flags['num-slices']}".replace("nauto", "n auto")
    return setting, made, row


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.full)])
def test_table_equals_plan_for_drawn_settings(page: WebDriver, capsys: Capture, count: int) -> None:
    """Compare the table's cells for values of the controls with the output of the command that this test builds."""
    draw = random.Random(88)
    for number in range(count):
        setting, flags, row = controls_for(drawn_setting(draw, searched=number % 50 == 0))
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value) if word]
        answer = page.execute_async_script(ASK, setting, row)
        expected = plan(capsys, *words)
        if isinstance(expected, str):
            assert answer == {"error": expected}, setting
            page.get_log("browser")  # discard the logged status 400
        else:
            assert answer["values"] == figures(expected), (setting, row)
            assert sorted(shlex.split(answer["command"])) == sorted(["zero-bubble", "plan", *words])


@pytest.mark.full
def test_fitted_rows_have_the_stages_per_rank_of_the_setting(page: WebDriver, capsys: Capture) -> None:
    answer = page.execute_async_script(ASK, {**SMALL, "v": "3"}, "zb-interleaved fitted")
    words = "--num-ranks 3 --num-microbatches 4 --forward-ms 10 --backward-ms 11 --wgrad-ms 8 --comm-ms 0.5".split()
    expected = plan(capsys, "--schedule", "zb-interleaved", "--num-chunks", "3", *words, "--memory-limit", "1p")
    assert isinstance(expected, dict)
    assert answer["values"] == figures(expected)


def test_every_schedule_has_a_table_row_and_a_chart(page: WebDriver) -> None:
    names = {name_of(line) for line in lines(page)}
    expected = {
        f"{name} x2" if recipe.shape == "interleaved" else name
        for name, recipe in SCHEDULES.items()
        if not recipe.sliced
    }
    expected |= {"zb-auto", *(f"{name} fitted" for name, recipe in SCHEDULES.items() if recipe.adapts)}
    assert names == expected
    assert {title.text for title in page.find_elements("css selector", "figure h2")} == expected
    makespans = [shown(line)[2] for line in page.find_elements("css selector", "tbody tr:not(.over):not(.pinned)")]
    assert makespans == sorted(makespans)
    assert name_of(lines(page)[0]) == "1f1b" and "pinned" in str(lines(page)[0].get_attribute("class"))
    best = page.find_element("id", "best").text
    assert best.startswith("Shortest within the limit: ") and f"{makespans[0]:.2f} ms, mean idle " in best
    reasons = page.find_element("id", "absent").text
    assert "seq-1f1b, seq-interleaved-1f1b x2, seq-zb-h1: cuts sequences; select 2 or more slices" in reasons
    assert "zb-h2: memory limit 3 microbatches: EXCEEDED by zb-h2, peak 4 microbatches per rank" in reasons
    scales = {canvas.get_attribute("data-scale") for canvas in page.find_elements("css selector", "canvas.layer")}
    assert len(scales) == 1


def test_slider_updates_the_table_to_plans_figures(page: WebDriver, capsys: Capture) -> None:
    from selenium.webdriver.common.keys import Keys

    before = shown(line_of(page, "1f1b"))
    page.find_element("id", "slider-W").send_keys(Keys.ARROW_RIGHT)
    page.find_element("css selector", "input[value=span]").click()
    settle(page)
    assert page.find_element("id", "number-W").get_attribute("value") == "8.5"
    words = "--num-ranks 3 --num-microbatches 4 --forward-ms 10 --backward-ms 11 --wgrad-ms 8.5 --comm-ms 0.5".split()
    words += ["--memory-limit", "1p", "--objective", "span"]
    for name in ("1f1b", "zb-h1", "dualpipe-v", "zb-auto"):
        expected = plan(capsys, "--schedule", name, *words)
        assert isinstance(expected, dict)
        assert shown(line_of(page, name)) == figures(expected)
    assert shown(line_of(page, "1f1b")) != before
    assert "W=8.5" in page.current_url and "objective=span" in page.current_url


@pytest.mark.full
def test_lengths_are_typed_and_hide_the_number_of_microbatches(page: WebDriver, capsys: Capture) -> None:
    page.find_element("name", "lengths").send_keys("4096,300,8000")
    settle(page)
    assert not page.find_element("id", "number-m").is_displayed()
    words = "--num-ranks 3 --lengths 4096,300,8000 --forward-ms 10 --backward-ms 11 --wgrad-ms 8 --comm-ms 0.5".split()
    assert main(["plan", "--schedule", "zb-h1", *words]) == 0
    printed = capsys.readouterr().out
    span, makespan = (shown(line_of(page, "zb-h1"))[at] for at in (0, 2))
    assert f"\nspan      {span:12.3f}" in printed and f"\nmakespan  {makespan:12.3f}" in printed
    assert "lengths=4096%2C300%2C8000" in page.current_url


def test_url_restores_the_setting(page: WebDriver, address: str) -> None:
    page.find_element("css selector", "input[value=linear]").click()
    settle(page)
    url = page.current_url
    table = page.find_element("css selector", "tbody").text
    page.get("about:blank")
    page.get(url)
    settle(page)
    assert page.find_element("css selector", "input[value=linear]").is_selected()
    assert page.find_element("css selector", "tbody").text == table
    reasons = page.find_element("id", "absent").text
    assert "has two stages per rank in a V, but the selected placement is linear" in reasons
    assert "zb-v fitted" in reasons and "zb-v fitted" not in table


def test_slices_add_rows_with_plans_figures(page: WebDriver, capsys: Capture) -> None:
    before = {name_of(line): shown(line) for line in lines(page)}
    page.find_element("css selector", "input[name=slices][value='4']").click()
    settle(page)
    rows = {name_of(line): line for line in lines(page)}
    added = {"seq-1f1b n4", "seq-interleaved-1f1b x2 n4", "seq-zb-h1 n4", "zb-auto n4"}
    assert rows.keys() == before.keys() | added
    assert {name: shown(rows[name]) for name in before} == before
    assert "slices=4" in page.current_url
    words = "--num-ranks 3 --num-microbatches 4 --forward-ms 10 --backward-ms 11 --wgrad-ms 8 --comm-ms 0.5".split()
    for name, schedule in (("seq-zb-h1 n4", "seq-zb-h1"), ("zb-auto n4", "zb-auto")):
        expected = plan(capsys, "--schedule", schedule, *words, "--num-slices", "4", "--memory-limit", "1p")
        assert isinstance(expected, dict)
        assert shown(rows[name]) == figures(expected)
        assert "4 slices" in rows[name].find_element("css selector", "th").text
    canvas = show(page, "seq-zb-h1 n4")
    page.execute_script("arguments[0].focus()", canvas)
    canvas.send_keys("\ue014")  # right arrow
    assert page.find_element("id", "tip").text.startswith(
        "0F0.1 forward of slice 1 of microbatch 0, stage 0 on rank 0:"
    )


@pytest.mark.full
def test_automatic_slices_show_how_many_were_chosen(page: WebDriver, capsys: Capture) -> None:
    page.find_element("css selector", "input[name=slices][value=auto]").click()
    number = page.find_element("id", "number-a")
    number.clear()
    number.send_keys("0.4")
    settle(page)
    words = "--num-ranks 3 --num-microbatches 4 --forward-ms 10 --backward-ms 11 --wgrad-ms 8 --comm-ms 0.5".split()
    words += ["--memory-limit", "1p", "--num-slices", "auto", "--attention-share", "0.4"]
    expected = plan(capsys, "--schedule", "seq-zb-h1", *words)
    assert isinstance(expected, dict)
    line = line_of(page, "seq-zb-h1 n auto")
    assert shown(line) == figures(expected)
    assert f"{expected['num_slices']} slices" in line.find_element("css selector", "th").text
    command = str(line.find_element("css selector", "button").get_attribute("title"))
    assert "--num-slices auto" in command and "--attention-share 0.4" in command
    assert "--attention-share" not in str(
        line_of(page, "1f1b").find_element("css selector", "button").get_attribute("title")
    )


@pytest.mark.full
def test_vocabulary_adds_its_passes_on_all_ranks(page: WebDriver, capsys: Capture) -> None:
    before = {name_of(line): shown(line) for line in lines(page)}
    kinds = "return [...new Set(drawn[0].rows[arguments[0]].map(({kind}) => kind))].sort().join(' ')"
    legend = page.find_element("id", "legend").text
    assert "S output layer" not in legend and "BW fused backward" in legend
    assert not page.find_element("id", "number-S").is_displayed()
    page.find_element("css selector", "input[name=vocabulary][value='2']").click()
    page.find_element("id", "slider-S").send_keys("\ue014")  # right arrow
    settle(page)
    assert page.find_element("id", "number-S").is_displayed() and "vocabulary=2" in page.current_url
    rows = {name_of(line): line for line in lines(page)}
    assert rows.keys() == before.keys()
    words = "--num-ranks 3 --num-microbatches 4 --forward-ms 10 --backward-ms 11 --wgrad-ms 8 --comm-ms 0.5".split()
    words += "--memory-limit 1p --vocabulary 2 --output-ms 3 --output-wgrad-ms 2.5".split()
    for name in ("zb-h1", "zb-auto"):
        expected = plan(capsys, "--schedule", name, *words)
        assert isinstance(expected, dict)
        assert shown(rows[name]) == figures(expected) != before[name]
    legend = page.find_element("id", "legend").text
    assert "S output layer" in legend and "T its gradient" in legend
    assert "seq-zb-h1: cuts sequences, which vocabulary parallelism does not support" in (
        page.find_element("id", "absent").text
    )
    canvas = show(page, str(page.execute_script("return drawn[0].id")))
    assert [page.execute_script(kinds, rank) for rank in range(3)][1] == "BW F I J S T", "1f1b is pinned"
    assert "vocabulary parallelism 2, bubble" in page.find_element("css selector", "figure .figures").text
    page.execute_script("arguments[0].focus()", canvas)
    select = "const [kind, rank] = arguments; const [first] = drawn;"
    select += "first.select(first.rows[rank].find((pass) => pass.kind === kind))"
    page.execute_script(select, "S", 1)
    said = page.find_element("id", "tip").text
    assert said.startswith("1S0 output layer of microbatch 0, shard of rank 1: ")
    assert re.search(r"Waits for \d+F0 on rank \d, whose result arrives at ", said)
    page.execute_script(select, "T", 1)
    assert re.search(r"Waits for \d+L0 on rank \d, whose result arrives at ", page.find_element("id", "tip").text)


def test_hovering_over_a_pass_shows_its_dependencies(page: WebDriver) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = show(page, "zb-h1")
    left, scale, pitch = (float(str(canvas.get_attribute(f"data-{name}"))) for name in ("left", "scale", "pitch"))
    # F of microbatch 0 takes 10 ms per rank and 0.5 ms to the next rank: on rank 1 it runs from 10.5 to 20.5 ms.
    x = left + 15 * scale - canvas.size["width"] / 2
    y = 1.4 * pitch - canvas.size["height"] / 2
    ActionChains(page).move_to_element_with_offset(canvas, int(x), int(y)).perform()
    assert page.find_element("id", "tip").text.splitlines() == [
        "1F0 forward of microbatch 0, stage 1 on rank 1: 10.5 ms to 20.5 ms.",
        "Waits for 0F0 on rank 0, whose result arrives at 10.5 ms.",
        "Rank 1 is idle for 10.5 ms before it.",
        "Needed by 2F0 on rank 2.",
    ]
    drawn = "return arguments[0].toDataURL()"
    marked = page.execute_script(drawn, canvas)
    ActionChains(page).move_to_element(page.find_element("css selector", "#picture-zb-h1 h2")).perform()
    assert not page.find_element("id", "tip").is_displayed()
    assert page.execute_script(drawn, canvas) != marked


def test_passes_can_be_selected_with_the_keyboard(page: WebDriver) -> None:
    from selenium.webdriver.common.keys import Keys

    canvas = show(page, "zb-h1")
    page.execute_script("arguments[0].focus()", canvas)
    said = [page.find_element("id", "tip").text.split(" ")[0]]
    for key in (Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER, Keys.ESCAPE):
        canvas.send_keys(key)
        said.append(page.find_element("id", "tip").text.split(" ")[0])
    assert said == ["0F0", "1F0", "1F1", "0F1", ""]


def test_drawings_zoom_together_around_the_pointer_and_move(page: WebDriver) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    canvas = show(page, "zb-h1")
    scale = "return [...document.querySelectorAll('canvas.layer')].map((layer) => Number(layer.dataset.scale))"
    [whole] = set(page.execute_script(scale))
    left, width = float(str(canvas.get_attribute("data-left"))), canvas.size["width"]
    part = 0.25 * (width - left - 8)
    wheel = """arguments[0].dispatchEvent(new WheelEvent("wheel", {deltaY: -1000, ctrlKey: arguments[1], clientX:
        arguments[0].getBoundingClientRect().left + arguments[2], cancelable: true}))"""
    at = "return [view.start + 0.25 * view.length, view.length]"
    page.execute_script(wheel, canvas, False, left + part)
    assert page.execute_script(at) == [0.25, 1], "the wheel alone scrolls the page"
    page.execute_script(wheel, canvas, True, left + part)
    middle, length = page.execute_script(at)
    assert (middle, length) == (pytest.approx(0.25, abs=1e-3), pytest.approx(0.22313, abs=1e-3))
    WebDriverWait(page, 10).until(lambda page: set(page.execute_script(scale)) != {whole})
    [zoomed] = set(page.execute_script(scale))
    assert zoomed == pytest.approx(whole / length)
    ActionChains(page).move_to_element(canvas).click_and_hold().move_by_offset(-100, 0).release().perform()
    moved = 100 / (width - left - 8) * length
    assert page.execute_script(at) == [pytest.approx(middle + moved, abs=2e-3), pytest.approx(length)]
    canvas.send_keys("+")
    assert page.execute_script(at)[1] == pytest.approx(length / 1.5)
    canvas.send_keys(Keys.HOME, "0")
    assert page.execute_script(at) == [0.25, 1]


def test_selected_pass_is_brought_into_view(page: WebDriver) -> None:
    from selenium.webdriver.common.keys import Keys

    canvas = show(page, "zb-h1")
    page.execute_script("arguments[0].focus(); view.show(0.9, 0.1)", canvas)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert page.find_element("id", "tip").text.startswith("0F1 ")
    start, length = page.execute_script("return [view.from, view.ms]")
    assert start <= 10.0 and start + length >= 20.0
    page.execute_script("view.show(0, 1)")


@pytest.mark.full
def test_64_ranks_are_planned_one_by_one_and_drawn_when_in_view(driver: WebDriver, address: str) -> None:
    driver.get("about:blank")
    driver.get(f"{address}#{urlencode(SMALL | {'p': '64', 'm': '6', 'placement': 'linear'})}")
    status = driver.find_element("id", "status")
    WebDriverWait(driver, 60, 0.01).until(lambda _: re.fullmatch(r"planning zb-h[12] \(\d of 4\)…", status.text))
    settle(driver)
    figures = driver.find_elements("css selector", "figure")
    assert [figure.size["height"] > 64 * 12 for figure in figures] == [True] * 4
    rows = "return drawn.map(({rows}) => (rows ?? []).flat().length)"
    show(driver, driver.execute_script("return drawn[0].id"))
    assert driver.execute_script(rows)[3] == 0
    show(driver, driver.execute_script("return drawn[3].id"))
    WebDriverWait(driver, 10).until(lambda driver: driver.execute_script(rows)[0] == 0)
    assert driver.execute_script(rows)[3] in (64 * 6 * 2, 64 * 6 * 3)
    assert console_errors(driver) == []


def test_copied_command_prints_the_same_figures(page: WebDriver, capsys: Capture) -> None:
    rights = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", rights)
    for name in ("zb-auto", "zb-v", "interleaved-1f1b x2"):
        line = line_of(page, name)
        button = line.find_element("css selector", "button")
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
        read = "navigator.clipboard.readText().then(arguments[0])"
        copied = shlex.split(str(page.execute_async_script(read)))
        assert copied[:2] == ["zero-bubble", "plan"]
        assert button.text == "copied"
        saving = page.find_elements("css selector", ".saving button")
        assert {other.text for other in saving} <= {"save SVG", "save plan", ""}
        expected = plan(capsys, *copied[2:])
        assert isinstance(expected, dict)
        assert shown(line) == figures(expected)


@pytest.mark.parametrize("width", [1200, 700])
def test_content_fits_the_window_width(page: WebDriver, width: int) -> None:
    resize(page, width, 900)
    try:
        for what in ("document.documentElement", "document.querySelector('.wide')"):
            wide = page.execute_script(f"return {what}.scrollWidth - {what}.clientWidth")
            assert wide <= 0, what
        marks = page.find_elements("css selector", "tr.over th .limit")
        assert marks and all(mark.is_displayed() for mark in marks)
    finally:
        resize(page, 1200, 900)


def test_invalid_number_shows_plans_error(driver: WebDriver, address: str) -> None:
    driver.get("about:blank")
    driver.get(f"{address}#{urlencode(SMALL | {'F': '-1'})}")
    settle(driver)
    reasons = driver.find_element("id", "absent").text
    assert reasons.startswith("1f1b, interleaved-1f1b x2, breadth-first x2, zb-h1, ")
    assert reasons.count("--forward-ms must be a finite number, 0 or above; got -1.0") == 1
    assert driver.find_element("id", "best").text == "No schedule is within the limit."
    assert all("400" in message for message in console_errors(driver))
