"""The page says what the stored JSON says, and nothing else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from bench import page
from bench.sections import SECTIONS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/bench"


@pytest.fixture
def summary() -> dict[str, Any]:
    return page.summarize(GOLDEN / "run")


def test_the_page_of_a_stored_run(summary: dict[str, Any]) -> None:
    """``UPDATE_GOLDEN=1`` writes it again."""
    golden = GOLDEN / "benchmarks.md"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(page.render(summary))
    assert page.render(summary) == golden.read_text()


def test_a_range_is_that_of_the_rounds_and_a_ratio_is_of_the_same_round(summary: dict[str, Any]) -> None:
    raw = json.loads((GOLDEN / "run/real-compute.json").read_text())["results"][0]["variants"]
    own, stock = raw["zb-h1"]["rounds_ms"], raw["stock 1f1b"]["rounds_ms"]
    figures = next(bench for bench in summary["benches"] if bench["name"] == "real-compute")["figures"]
    row = next(row for row in figures["rows"] if row["schedule"].startswith("zb-h1"))
    assert row["iteration_ms"] == {"median": sum(own) / 2, "least": min(own), "most": max(own)}
    ratios = [a / b for a, b in zip(own, stock, strict=True)]
    assert row["over_stock"] == {"median": sum(ratios) / 2, "least": min(ratios), "most": max(ratios)}


def test_a_failed_bench_is_named_with_its_last_lines_and_shows_no_figures(summary: dict[str, Any]) -> None:
    text = page.render(summary)
    section = text[text.index("## Weight gradients on a GPU") :]
    assert "**Failed: exit code 1.**" in section and "    RuntimeError: no GPU | at all" in section
    assert "|---" not in section


def test_publishing_again_from_what_was_stored_changes_nothing(tmp_path: Path, summary: dict[str, Any]) -> None:
    (tmp_path / "docs").mkdir()
    chart = tmp_path / "drawn.svg"
    chart.write_text("<svg/>")
    page.publish(summary, tmp_path, chart)
    first = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in first} == {"benchmarks.md", "benchmarks.json", "scaling.svg", chart.name}
    page.publish(json.loads(first[tmp_path / page.STORED]), tmp_path, tmp_path / "docs" / page.CHART)
    assert first == {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}


def test_lines_are_of_the_width_of_our_texts(summary: dict[str, Any]) -> None:
    words = [line for line in page.render(summary).splitlines() if not line.startswith(("|", "`"))]
    assert max(map(len, words)) <= 120


@pytest.mark.skipif(not (ROOT / page.STORED).exists(), reason="no full run was stored yet: bash scripts/bench.sh")
def test_the_page_is_that_of_the_stored_run() -> None:
    stored = json.loads((ROOT / page.STORED).read_text())
    assert not stored["quick"]
    again = "bash scripts/bench.sh page writes it again"
    assert (ROOT / page.PAGE).read_text() == page.render(stored), again


def test_a_bench_prints_what_the_page_would_have_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((GOLDEN / "run/wgrad.json").read_text())
    page.report("wgrad", content, tmp_path / "wgrad.json")
    assert json.loads((tmp_path / "wgrad.json").read_text()) == content
    printed = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert SECTIONS["wgrad"].table(SECTIONS["wgrad"].summary(content)) == [row for row in printed if len(row) == 6]


def test_sizes_that_were_not_planned_have_a_dash_and_only_orders_for_equal_passes_explain_a_rise() -> None:
    content = json.loads((GOLDEN / "run/scaling.json").read_text())
    throughputs = {"zb-v": (3e4, 2e4, 1e4), "v-half": (1e4, 2e4, 3e4), "v-min-fitted": (1e4, 2e4)}
    content["memory"] = dict.fromkeys(throughputs, "pM")
    content["points"] = [
        {"schedule": name, "num_ranks": 2**k, "num_microbatches": 16, "tokens_s": {"makespan": rate, "span": rate}}
        for name, rates in throughputs.items()
        for k, rate in enumerate(rates)
    ]
    summary = SECTIONS["scaling"].summary(content)
    assert SECTIONS["scaling"].table(summary)[-1] == ["16", "v-min-fitted", "pM", "10.0 / 10.0", "-"]
    text = SECTIONS["scaling"].text(summary, content["machine"])
    assert "The throughput of v-half does not fall steadily" in text
