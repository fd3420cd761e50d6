"""Tests of traces for Perfetto: valid, complete, and with each event on its track."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from megatron.zero_bubble import Schedule, build
from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.analysis.trace import RankTrace, Trace
from megatron.zero_bubble.core.render.perfetto import PASSES, RECEIVES, SENDS, WAITS, render_perfetto
from tests.core.formats.test_trace import recording
from tests.helpers.strategies import schedules
from tests.helpers.trace_format import problems

SCHEDULE = build("zb-h1", num_ranks=2, num_microbatches=2)


def compared(schedule: Schedule = SCHEDULE, iteration: int = 7) -> ComparedIteration:
    return recording(schedule).compared(iteration)


def events(comparison: ComparedIteration) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(render_perfetto(comparison))["traceEvents"]
    return found


@given(schedules(min_ranks=2))
def test_every_trace_is_valid(schedule: Schedule) -> None:
    assert problems(render_perfetto(compared(schedule))) == []


def test_every_slice_is_on_its_track() -> None:
    comparison = compared()
    slices = [event for event in events(comparison) if event["ph"] == "X"]
    # Processes 100, 300, ... are the ranks' plans, and 200, 400, ... their measured timelines.
    assert Counter((event["pid"], event["tid"] - event["pid"]) for event in slices) == {
        (100, PASSES): 6, (200, PASSES): 6, (300, PASSES): 6, (400, PASSES): 6,
        (200, SENDS): 2, (400, SENDS): 2, (200, RECEIVES): 4, (400, RECEIVES): 4, (200, WAITS): 2,
    }  # fmt: skip
    first = next(event for event in slices if (event["pid"], event["name"]) == (200, "0F0"))
    assert (first["ts"], first["dur"]) == (0.0, 19000.0)
    assert first["args"]["slow_ms"] == 9.0
    waited = next(event for event in slices if event["name"] == "0F0 from rank 0")
    assert (waited["pid"], waited["ts"], waited["dur"]) == (400, 0.0, 20000.0)
    consumer = next(event for event in slices if (event["pid"], event["name"]) == (400, "1F0"))
    assert consumer["args"]["waits_for"] == "0F0"
    assert consumer["args"]["late_ms"] == 9.0
    assert {event["name"] for event in slices if event["tid"] == 200 + WAITS} == {
        "until rank 1 has 0F0", "validate the optimizer step",
    }  # fmt: skip


def test_events_before_the_first_pass_shift_the_start() -> None:
    full = compared()
    head, row = full.measured.ranks
    early = replace(row, receives=(row.receives[0]._replace(posted_ms=-2.0, awaited_ms=-1.5), *row.receives[1:]))
    text = render_perfetto(replace(full, measured=Trace(full.measured.timeline, (head, early))))
    assert problems(text) == []
    starts = {
        event["ts"] for event in json.loads(text)["traceEvents"] if event.get("name") == "0F0" and event["ph"] == "X"
    }
    assert starts == {2000.0}, "planned and measured must still start together"


@pytest.mark.parametrize("half", [0.5, 1.5, 2.5])
def test_arrows_end_in_slices_despite_rounding(half: float) -> None:
    """An arrow's target slice stays within its receive for any rounding of their times."""
    full = compared()
    head, row = full.measured.ranks
    receives = tuple(got._replace(arrived_ms=got.arrived_ms + half * 1e-6) for got in row.receives)
    text = render_perfetto(
        replace(full, measured=Trace(full.measured.timeline, (head, replace(row, receives=receives))))
    )
    assert problems(text) == []


def test_every_message_has_an_arrow() -> None:
    arrows = Counter((event["ph"], event["pid"]) for event in events(compared()) if event["ph"] in "sf")
    assert arrows == {("s", 200): 2, ("f", 400): 2, ("s", 400): 2, ("f", 200): 2}


def test_every_process_has_a_memory_counter() -> None:
    counters = [event for event in events(compared()) if event["ph"] == "C"]
    assert Counter(event["pid"] for event in counters) == {100: 6, 200: 6, 300: 6, 400: 6}
    assert [event["args"]["bytes"] for event in counters if event["pid"] == 400][:2] == [64_000_000, 16_000_000]


def test_trace_without_messages_and_memory_has_only_passes() -> None:
    full = compared()
    rows = tuple(RankTrace(row.spans) for row in full.measured.ranks)
    bare = ComparedIteration(7, full.planned, Trace(full.measured.timeline, rows), full.costs)
    text = render_perfetto(bare)
    assert problems(text) == []
    assert {event["ph"] for event in json.loads(text)["traceEvents"]} == {"M", "X"}


def edited(index: int, **changes: Any) -> str:
    """Return a valid trace with one event changed; None removes a key."""
    content = json.loads(render_perfetto(compared()))
    event = content["traceEvents"][index] | changes
    content["traceEvents"][index] = {key: value for key, value in event.items() if value is not None}
    return json.dumps(content)


def index_of(**wanted: Any) -> int:
    return next(i for i, event in enumerate(events(compared())) if wanted.items() <= event.items())


@pytest.mark.parametrize(
    ("event", "changes", "words"),
    [
        ({"ph": "X"}, {"dur": None}, "X lacks ['dur']"),
        ({"ph": "X"}, {"dur": -1.0}, "dur must be a number of microseconds"),
        ({"ph": "X"}, {"pid": "1"}, "pid must be a whole number above 0"),
        ({"ph": "X", "name": "0F0", "pid": 200}, {"dur": 25000.0}, "0F1 overlaps the slice before it"),
        ({"ph": "X", "name": "0F1", "pid": 200}, {"ts": 1e6, "dur": 1.0}, "goes back in time"),
        ({"ph": "s"}, {"id": 77}, "has 1 starts and 0 ends"),
        ({"ph": "s"}, {"ts": 1e6}, "is in no slice"),
        ({"ph": "f"}, {"ts": 19500.0}, "Perfetto would reverse it"),
        ({"ph": "i"}, {"tid": 404}, "is on a thread with instants"),
        ({"ph": "f"}, {"bp": None}, "f lacks ['bp']"),
        ({"ph": "C"}, {"args": {"bytes": "many"}}, "must count in numbers"),
        ({"ph": "M", "name": "process_name"}, {"pid": 9}, "process 100 has no name"),
        ({"ph": "M", "name": "thread_name"}, {"args": {}}, "thread_name must have args name"),
        ({"ph": "X", "pid": 400}, {"tid": 201}, "thread 201 belongs to several processes"),
        ({"ph": "i"}, {"colour": 1}, "i has ['colour']"),
        ({"ph": "i"}, {"ph": "I"}, "a known ph"),
    ],
)
def test_invalid_traces_are_detected(event: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    found = problems(edited(index_of(**event), **changes))
    assert any(words in problem for problem in found), found
