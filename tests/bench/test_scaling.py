"""Tests of the scaling prediction: same lengths as the simulator, and the page's chart."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ranks import environment
from bench.scaling import DRAWN, PUBLISHED, Setting, lengths_ms, predict
from megatron.zero_bubble import PassCosts, build, simulate
from tests.helpers.rows import some

ROOT = Path(__file__).parents[2]
SETTING = Setting(forward_ms=10.0, backward_ms=12.0, wgrad_ms=8.0, comm_ms=0.5, tokens=1000)


@given(st.sampled_from(PUBLISHED), st.integers(1, 6), st.integers(1, 15), st.randoms())
def test_lengths_equal_the_simulators(name: str, p: int, m: int, rng: random.Random) -> None:
    schedule = build(name, num_ranks=p, num_microbatches=m)
    figures = (tuple(rng.uniform(0.1, 20.0) for _ in range(schedule.num_stages)) for _ in range(3))
    links = {(a, b): rng.uniform(0.0, 9.0) for a in range(p) for b in range(p) if rng.random() < 0.2}
    costs = PassCosts(*figures, rng.uniform(0.0, 5.0), links)
    timeline, fast = simulate(schedule, costs), lengths_ms(schedule, costs)
    assert fast == pytest.approx({"makespan": timeline.makespan_ms, "span": timeline.span_ms}, rel=1e-12)


def test_mixed_fused_and_split_backwards_are_rejected() -> None:
    schedule = build("dualpipe-v", num_ranks=2, num_microbatches=8)
    with pytest.raises(ValueError, match="dualpipe-v has both"):
        lengths_ms(schedule, PassCosts.uniform(schedule.placement, 1, 1, 1))


@pytest.mark.parametrize("p", [2, 8, 32])
def test_1f1b_without_transfers_equals_the_papers_formula(p: int) -> None:
    m, work = 64, 30.0
    point = predict(Setting(10.0, 12.0, 8.0, 0.0, 1000), "1f1b", (p, m))
    for metric in ("makespan", "span"):
        assert point.ms[metric] == pytest.approx((m + p - 1) * work)
        assert point.bubble[metric] == pytest.approx((p - 1) / (m + p - 1))
        assert point.tokens_s[metric] == pytest.approx(m * 1000 / ((m + p - 1) * work) * 1e3)


@pytest.mark.parametrize("name", [name for name in DRAWN if name in PUBLISHED])
def test_more_microbatches_and_post_validation_never_lower_throughput(name: str) -> None:
    few, many = (predict(SETTING, name, (4, m)) for m in (16, 64))
    for metric in ("makespan", "span"):
        assert few.tokens_s[metric] < many.tokens_s[metric] < SETTING.ideal_tokens_s
    assert many.tokens_s["span"] >= many.tokens_s["makespan"]


def scale(folder: Path, *flags: str) -> tuple[dict, str]:
    output = folder / "scaling.json"
    command = [sys.executable, "-m", "bench.scaling", "--num-ranks", "2", "4", "--num-microbatches", "8"]
    command += ["--schedules", "1f1b", "zb-h2", "--jobs", "1", "--output", str(output), *flags]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    return json.loads(output.read_text()), output.with_suffix(".svg").read_text()


def test_measured_times_and_links_replace_the_estimates(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward_ms": [1, 3], "backward_ms": 4, "wgrad_ms": 5, "comm_ms": 9}))
    flags = ("--config", "configs/gpt_1.5b.yaml", "--num-ranks", "2")
    content, _ = scale(tmp_path, *flags, "--latency-us", "100", "--link-gbs", "50")
    estimated = content["setting"]
    message_bytes = 2 * 1024 * 6 * 2304
    assert estimated["comm_ms"] == pytest.approx(0.1 + message_bytes / 50e6)
    assert estimated["tokens"] == 6 * 1024
    # The configuration has 8 ranks, so lists in the file have 8 figures, of which the setting takes the median.
    costs.write_text(json.dumps({"forward_ms": [1, 3] * 4, "backward_ms": 4, "wgrad_ms": 5}))
    given_ = scale(tmp_path, *flags, "--costs", str(costs))[0]["setting"]
    assert [given_[f"{name}_ms"] for name in ("forward", "backward", "wgrad")] == [2, 4, 5]


def test_published_times_equal_the_table() -> None:
    with (ROOT / "configs/published/zero_bubble_table5.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    published = next(row for row in rows if (row["model"], row["m"]) == ("28.3B", "256"))
    content = json.loads((ROOT / "configs/published/gpt_28.3b_a100.json").read_text())
    keys = {"forward_ms": "t_f_ms", "backward_ms": "t_b_ms", "wgrad_ms": "t_w_ms", "comm_ms": "t_comm_ms"}
    assert content == {name: float(published[key]) for name, key in keys.items()}


def test_missing_costs_file_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.scaling", "--costs", str(tmp_path / "none.json")]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("scaling.py: cannot read the costs file") and result.stderr.count("\n") == 1


PLANNED = [("zb-auto", "zb-v"), *((f"{name}-fitted", name) for name in ("zb-v", "v-half", "v-min"))]


@pytest.mark.parametrize(("planned", "published"), some(PLANNED, PLANNED[0], PLANNED[2]))
def test_planned_schedules_are_faster_than_published_ones_in_the_same_memory(planned: str, published: str) -> None:
    ours, theirs = predict(SETTING, planned, (4, 12)), predict(SETTING, published, (4, 12))
    for metric in ("makespan", "span"):
        assert ours.tokens_s[metric] > theirs.tokens_s[metric]


def test_published_schedules_are_dashed_beside_fitted_ones_and_what_is_not_planned_is_said(tmp_path: Path) -> None:
    flags = ("--schedules", "v-half", "v-half-fitted", "zb-h1", "--plan-up-to", "16")
    content, text = scale(tmp_path, *flags)
    lines = ElementTree.fromstring(text).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [line.attrib.get("class") for line in lines] == ["dashed", None, None] * 2
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 1, 2] * 2
    assert lines[0].attrib["stroke"] == lines[1].attrib["stroke"] != lines[2].attrib["stroke"]
    sentence = "Not planned or fitted, as it takes too long: 8 microbatches on 4 ranks."
    assert sentence in text and sentence == content["assumptions"][-1]
    assert "v-half, memory (p/2+1)M, solid if fitted, dashed if not" in text
    assert "Not planned" not in scale(tmp_path, "--schedules", "zb-h1", "--plan-up-to", "16")[1]


def test_what_is_planned_already_is_not_planned_again(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    first, _ = scale(tmp_path / "first", "--schedules", "1f1b", "zb-auto", "--num-ranks", "2")
    published, planned = first["points"]
    published["seconds"] = planned["seconds"] = 1234.0
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first))
    second, _ = scale(tmp_path, "--schedules", "1f1b", "zb-auto", "--planned", str(earlier), "--plan-up-to", "0")
    points = second["points"]
    sizes = [("1f1b", 2), ("1f1b", 4), ("zb-auto", 2)]
    assert [(point["schedule"], point["num_ranks"]) for point in points] == sizes
    assert [point["seconds"] == 1234 for point in points] == [False, False, True]
    assert points[2] == planned


def test_plans_for_another_setting_are_rejected(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"setting": {"forward_ms": 1}, "points": []}))
    command = [sys.executable, "-m", "bench.scaling", "--num-ranks", "2", "--num-microbatches", "2"]
    command += ["--planned", str(earlier)]
    command += ["--schedules", "1f1b", "--output", str(tmp_path / "scaling.json")]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "must be of the same setting" in result.stderr and result.stderr.count("\n") == 1


def test_chart_has_one_line_per_schedule_and_panel(tmp_path: Path) -> None:
    content, text = scale(tmp_path)
    root = ElementTree.fromstring(text)
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * 2 and len(content["points"]) == 2 * 2
    assert "prefers-color-scheme:dark" in text
    assert "zb-h2, memory (2p-1)M" in text
