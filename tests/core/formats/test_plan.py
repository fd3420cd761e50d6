"""Tests of plans as JSON: keys, round trip, and errors in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from megatron.zero_bubble import PassCosts, Placement, Schedule, ScheduleError, Slices, build, simulate
from megatron.zero_bubble.core.formats.plan import plan_to_json, read_schedule_file
from tests.helpers.plans import schedule_from_json
from tests.helpers.strategies import schedules


def plan(schedule: Schedule) -> str:
    return plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 2.0, 2.0, 1.0)))


def content(**changes: Any) -> str:
    plan_ = json.loads(plan(build("zb-h1", num_ranks=2, num_microbatches=2))) | changes
    return json.dumps({key: value for key, value in plan_.items() if value is not None})


def test_json_keys_are_exactly_the_documented_ones() -> None:
    assert list(json.loads(content())) == [
        "schedule", "num_ranks", "num_stages", "num_microbatches", "stage_to_rank", "order", "makespan_ms", "span_ms",
        "bubble_rate_makespan", "bubble_rate_span", "idle_rate_makespan", "idle_rate_span", "imbalance",
        "peak_activation",
    ]  # fmt: skip


def test_json_values_of_a_plan() -> None:
    read = json.loads(plan(build("zb-h1", num_ranks=2, num_microbatches=2)))
    assert read["order"] == [["0F0", "0F1", "0B0", "0W0", "0B1", "0W1"], ["1F0", "1B0", "1F1", "1B1", "1W0", "1W1"]]
    assert (read["stage_to_rank"], read["num_stages"], read["peak_activation"]) == ([0, 1], 2, [2.0, 2.0])
    assert (read["makespan_ms"], read["span_ms"]) == (13.0, 13.0)
    assert read["bubble_rate_makespan"] == read["bubble_rate_span"] == pytest.approx(3 / 13)
    assert read["idle_rate_makespan"] == read["idle_rate_span"] == pytest.approx(3 / 13)
    assert read["imbalance"] == 1.0


@given(schedules())
def test_round_trip(schedule: Schedule) -> None:
    assert schedule_from_json(plan(schedule)) == schedule


def test_round_trip_of_chunks_and_slices() -> None:
    rows = [
        "0F0 0F0.1 3F0 3F0.1 3BW0.1 3BW0 0BW0.1 0BW0".split(),
        "1F0 1F0.1 2F0 2F0.1 2BW0.1 2BW0 1BW0.1 1BW0".split(),
    ]
    schedule = Schedule.from_text("v", Placement.vee(2), 1, rows, Slices.even(2))
    assert schedule_from_json(plan(schedule)) == schedule


def test_unknown_keys_are_ignored_and_counts_are_optional() -> None:
    assert schedule_from_json(content(more=[1], num_ranks=None, num_stages=None, makespan_ms=None)).num_ranks == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON; line 1, column 1"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object"),
        (content(schedule=None), "must have the key schedule, a string; it is missing"),
        (content(schedule=3), "schedule must be a string; got 3"),
        (content(num_microbatches=0), "num_microbatches must be a whole number above 0; got 0"),
        (content(num_microbatches=2.0), "num_microbatches must be a whole number above 0; got 2.0"),
        (content(num_microbatches=True), "num_microbatches must be a whole number above 0; got true"),
        (content(stage_to_rank="01"), "stage_to_rank must be a list of ranks"),
        (content(stage_to_rank=[0, -1]), "stage_to_rank must be a list of ranks"),
        (content(stage_to_rank=[0, 2]), "renumber the ranks without gaps"),
        (content(stage_to_rank=[]), "at least one stage"),
        (content(order=[["0F0"], "1F0"]), "order must be one list per rank"),
        (content(order=[["0F0", 3]]), "order must be one list per rank"),
        (content(order=[["0X0"]]), "a pass is written .* got '0X0'"),
        (content(order=[]), "one list for each of the 2 ranks; got 0"),
        (content(num_ranks=3), "num_ranks must agree with stage_to_rank, which gives 2; got 3"),
        (content(num_stages=4), "num_stages must agree with stage_to_rank, which gives 2; got 4"),
    ],
)
def test_corrupt_file_is_rejected_in_one_sentence_with_its_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^schedule file .*plan.json: .*{message}") as caught:
        read_schedule_file(path)
    assert "\n" not in str(caught.value)


def test_invalid_order_shows_the_grid() -> None:
    order = json.loads(content())["order"]
    order[1][1], order[1][0] = order[1][0], order[1][1]
    with pytest.raises(ScheduleError, match="rank 1 stops at 1B0, which waits for 1F0 on rank 1") as caught:
        schedule_from_json(content(order=order))
    assert ">1B0<" in str(caught.value)


def test_missing_and_binary_files_are_rejected_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the schedule file .*: No such file"):
        read_schedule_file(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"schedule file .*: it must be JSON in UTF-8"):
        read_schedule_file(tmp_path / "binary")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slices": 3}, "num_slices must agree with the order, which has 2; got 3"),
        ({"num_slices": 10**30}, "num_slices must be a number from 1 to 4096"),
        ({"slice_shares": [10**400, 1]}, "slice_shares must be a list of numbers from 0 to 1"),
        ({"slice_shares": [0.5, 0.25]}, "add up to 1"),
        ({"slice_shares": [0.5, 0.25, 0.25]}, "slice_shares must have one number per slice; got 3 for 2 slices"),
    ],
)
def test_contradictory_slices_are_refused(changes: dict[str, object], message: str) -> None:
    schedule = build("seq-zb-h1", num_ranks=2, num_microbatches=1, num_slices=2)
    content = json.loads(plan(schedule)) | changes
    with pytest.raises(ValueError, match=message):
        schedule_from_json(json.dumps(content))
