"""``--offload`` of ``zero-bubble plan`` and ``compare``: text, JSON, SVG, costs files, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, PassMemory
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.core.formats.costs import CostsFile, costs_to_json
from megatron.zero_bubble.core.ir import Pass, Placement
from megatron.zero_bubble.core.plan.offload import Move

SIZE = ("--num-ranks", "4", "--num-microbatches", "16")
UNITS = (*SIZE, "--forward-ms", "2", "--backward-ms", "2", "--wgrad-ms", "2")
COPIES = ("--offload", "auto", "--host-ms", "2.5")


def out_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def plan_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(out_of(capsys, "plan", *words, "--format", "json"))
    return content


def test_plan_prints_memory_of_device_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "plan", "--schedule", "pipe-offload", *UNITS, *COPIES)
    assert "of the forwards move, makespan no longer than without" in text
    for what in ("device peak", "host peak", "pending operands of W"):
        assert f"{what} by rank, in microbatches: " in text


def test_json_has_the_moves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--schedule", "pipe-offload", *UNITS)
    plain, moved = plan_of(capsys, *words), plan_of(capsys, *words, *COPIES)
    assert moved["makespan_ms"] == plain["makespan_ms"] and moved["offload_added_ms"] == 0
    assert max(moved["peak_activation"]) < max(plain["peak_activation"]) and "moves" not in plain
    forward, after, out, back = moved["moves"][0]
    assert Move(Pass.parse(forward), out, back, after).out >= 1
    assert moved["offloaded_share"] == pytest.approx(len(moved["moves"]) / (8 * 16))


def test_memory_limit_is_met_by_offloading(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--schedule", "zb-h2", *UNITS, "--wgrad-memory", "0.3", "--memory-limit", "1.2p", "--objective", "span")
    assert "EXCEEDED" in out_of(capsys, "plan", *words)
    text = out_of(capsys, "plan", *words, "--offload", "auto", "--host-ms", "1.5")
    assert "memory limit 4.8 microbatches: met" in text
    assert "lower bound 96.000 ms span" in text


def test_search_uses_the_memory_that_offloading_frees(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--schedule",
        "zb-auto",
        "--placement",
        "linear",
        *UNITS,
        "--wgrad-memory",
        "0.3",
        "--memory-limit",
        "0.8p",
    )
    plain = plan_of(capsys, *words)
    moved = plan_of(capsys, *words, "--offload", "auto", "--host-ms", "1.5")
    assert max(moved["device_peak"]) <= moved["memory_limit"]
    assert moved["span_ms"] < plain["lower_bound_ms"]


def test_search_takes_a_known_schedule_if_its_own_gain_less(capsys: pytest.CaptureFixture[str]) -> None:
    """W keeps as much as F here, and the search delays W's, whose operands cannot move; 1F1B has none."""
    words = ("--num-ranks", "3", "--num-microbatches", "9", "--forward-ms", "2", "--backward-ms", "2", "--wgrad-ms")
    limit = ("2", "--placement", "linear", "--memory-limit", "0.67p", *COPIES)
    moved = plan_of(capsys, "--schedule", "zb-auto", *words, *limit)
    fixed = plan_of(capsys, "--schedule", "1f1b", *words, "2", "--memory-limit", "0.67p", *COPIES)
    assert max(moved["device_peak"]) <= moved["memory_limit"] and moved["span_ms"] <= fixed["span_ms"]
    table = json.loads(out_of(capsys, "compare", *words, *limit, "--max-chunks", "1", "--format", "json"))
    found = next(row for row in table["rows"] if row["schedule"] == "zb-auto")
    assert found["within_limit"] and found["span_ms"] == moved["span_ms"]


def test_layouts_have_the_time_of_their_copies(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[2] / "configs" / "gpt_1.5b.yaml")
    words = ("--schedule", "1f1b", "--config", config, "--num-microbatches", "12", "--layout", "auto")
    moved = plan_of(capsys, *words, "--offload", "auto", "--host-bandwidth", "400", "--memory-limit", "0.6p")
    assert 0 < moved["offloaded_share"] < 1 and max(moved["device_peak"]) <= moved["memory_limit"]


def test_both_algorithms_of_the_vocabulary_are_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--schedule", "1f1b", *UNITS, "--output-ms", "1", "--output-wgrad-ms", "1", "--memory-limit", "1p")
    assert "EXCEEDED" in out_of(capsys, "plan", *words, "--vocabulary", "auto")
    moved = plan_of(capsys, *words, "--vocabulary", "auto", "--offload", "auto", "--host-ms", "1.5")
    each = [plan_of(capsys, *words, "--vocabulary", n, "--offload", "auto", "--host-ms", "1.5") for n in "12"]
    assert max(moved["device_peak"]) <= moved["memory_limit"]
    assert moved["span_ms"] == min(plan["span_ms"] for plan in each)


def test_svg_draws_both_copies(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = out_of(capsys, "plan", "--schedule", "pipe-offload", *UNITS, *COPIES, "--format", "svg")
    assert drawn.count('<path class="lane"') == 2 * 4
    assert 'data-numbers="0F0^ ' in drawn and ">compute</text>" not in drawn
    assert ">copy out</text>" in drawn and ">copy back</text>" in drawn
    assert 'class="lane"' not in out_of(capsys, "plan", "--schedule", "gis", *UNITS, "--format", "svg")


def test_compare_lists_what_moves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", *UNITS, *COPIES, "--placement", "linear", "--max-chunks", "2", "--equal-passes")
    rows = {row["schedule"]: row for row in json.loads(out_of(capsys, *words, "--format", "json"))["rows"]}
    assert 0 < rows["gis x2"]["offloaded_share"] < 1 and rows["gis x2"]["host_peak"] > 0
    assert {"moved", "host"} <= set(out_of(capsys, *words).split("\n")[1].split())


def test_costs_file_gives_the_time_of_copies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    on = Placement.linear(4)
    costs = PassCosts((2.0,) * 4, (2.0,) * 4, (2.0,) * 4, host_ms=(2.5, 2.5, 2.0, 1.5))
    memory = PassMemory.uniform(on, 2.0**30, 2.0**28)
    text = costs_to_json(costs, memory)
    assert CostsFile.parse(text).on(on) == (costs, memory)
    file = tmp_path / "costs.json"
    file.write_text(text)
    words = ("--schedule", "zb-h2", *SIZE, "--costs", str(file))
    moved = plan_of(capsys, *words, "--offload", "auto")
    limited = plan_of(capsys, *words, "--offload", "auto", "--host-memory", "3GiB")
    assert max(limited["host_peak"]) <= 3 * 2**30 and max(moved["host_peak"]) > 3 * 2**30
    # 1 GiB in 2.5 ms is 429.5 GB/s.
    fast = plan_of(capsys, *words, "--offload", "auto", "--host-bandwidth", "1000000")
    assert max(fast["device_peak"]) <= max(moved["device_peak"])
    assert "GiB" in out_of(capsys, "plan", *words, "--offload", "all", "--node-memory", "4GiB", "--ranks-per-node", "4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--offload", "half"), "the share to offload is all, none or a percentage up to 100%, for example 50%"),
        (("--offload", "all"), "offloading needs the time of a copy to host memory; got none with offload all"),
        (("--host-ms", "1"), "--host-ms applies only to --offload; got --offload none; give --offload auto or all"),
        ((*COPIES, "--host-bandwidth", "9"), "--host-ms and --host-bandwidth both give the time of copies; leave out"),
        (("--offload", "all", "--host-ms", "0"), "--host-ms must be above 0; got 0.0"),
        (("--offload", "all", "--host-bandwidth", "9"), "a bandwidth to the host needs activation memory in bytes"),
        ((*COPIES, "--host-memory", "1GiB"), "--host-memory 1GiB needs activation memory in bytes"),
        ((*COPIES, "--ranks-per-link", "0"), "ranks_per_link must be 1 or more; got 0"),
    ],
)
def test_errors_state_rule_value_and_remedy(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "plan", "--schedule", "zb-h1", *UNITS, *flags)


def test_costs_per_layer_have_the_times_of_their_copies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A layer of one kind is copied in 1.5 ms, of the other in 1 ms; every stage has one of each."""
    kinds = {
        kind: {"forward_ms": 2.0, "backward_ms": 2.0, "wgrad_ms": 2.0, "activation": 2**30, "wgrad": 2**29} | copies
        for kind, copies in (("dense", {"host_ms": 1.5}), ("moe", {"host_ms": 1.0}))
    }
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"layers": ["dense", "moe"] * 4, "parts": kinds}))
    costs, _ = CostsFile.parse(file.read_text()).on(Placement.linear(4))
    assert costs.host_ms == (2.5,) * 4
    words = ("--schedule", "zb-h2", *SIZE, "--costs", str(file), "--offload", "auto")
    given, own = plan_of(capsys, *words, "--host-ms", "2.5"), plan_of(capsys, *words)
    assert own["moves"] == given["moves"] and len(own["moves"]) > 0
    laid_out = plan_of(capsys, *words, "--layout", "auto")
    assert laid_out["moves"] == own["moves"], "all stages are alike already"
