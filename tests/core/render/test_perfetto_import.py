"""Import traces into Perfetto and query them with its SQL: all events must arrive unchanged, without errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.zero_bubble import PassCosts, PassMemory, build
from megatron.zero_bubble.core.formats.trace import Recording
from megatron.zero_bubble.core.render.perfetto import RECEIVES, SENDS, _pid, render_perfetto
from tests.core.formats.test_trace import recording
from tests.helpers.delayed import run
from tests.helpers.perfetto import Perfetto, perfetto
from tests.helpers.rows import some

# The importer's numbering of tracks, flows and slices is arbitrary, so rows are compared as multisets.
_SLICES = """
    select process.pid, thread.tid, thread.name, slice.name, slice.ts - (select min(ts) from slice), slice.dur
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""
_ARROWS = """
    select sent.name, out.name, out.tid, got.name, target.name, target.tid
    from flow
    join slice sent on flow.slice_out = sent.id
    join thread_track a on sent.track_id = a.id join thread out on a.utid = out.utid
    join slice got on flow.slice_in = got.id
    join thread_track b on got.track_id = b.id join thread target on b.utid = target.utid
"""
_COUNTERS = """
    select process.pid, counter.ts - (select min(ts) from slice), counter.value
    from counter join process_counter_track track on counter.track_id = track.id join process using (upid)
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Perfetto]:
    with perfetto() as found:
        yield found


def written(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


def nanoseconds(us: float) -> int:
    return round(us * 1e3)


def trace_of(name: str) -> str:
    """Return the trace of a schedule's iteration with memory; "everything" has an event of every kind."""
    if name == "everything":
        return render_perfetto(recording().compared(7))
    schedule = build(name, num_ranks=4, num_microbatches=8)
    costs = PassCosts.uniform(schedule.placement, 20, 20, 20, 1)
    memory = PassMemory.uniform(schedule.placement, 2.0**30)
    return render_perfetto(Recording(costs, {50: run(schedule, costs)}, memory).compared(50))


@pytest.mark.parametrize("name", some(["everything", "interleaved-1f1b", "zb-v"], "everything"))
def test_every_event_is_imported(page: Perfetto, name: str) -> None:
    text = trace_of(name)
    page.open(text)
    assert page.import_errors() == []
    events = written(text)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lasting = [*of_kind(events, "X"), *(event | {"dur": 0} for event in of_kind(events, "i"))]
    assert Counter(page.rows(_SLICES)) == Counter(
        (e["pid"], e["tid"], names[e["tid"]], e["name"], nanoseconds(e["ts"]), nanoseconds(e["dur"])) for e in lasting
    )
    processes = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert processes <= set(page.rows("select pid, name from process"))
    assert Counter(page.rows(_COUNTERS)) == Counter(
        (e["pid"], nanoseconds(e["ts"]), float(e["args"]["bytes"])) for e in of_kind(events, "C")
    )
    sends = [(event["name"], event["pid"]) for event in lasting if names[event["tid"]] == "sends"]
    assert len(sends) == len(of_kind(events, "s")) > 0
    assert Counter(page.rows(_ARROWS)) == Counter(arrow(name, pid) for name, pid in sends)


def arrow(name: str, pid: int) -> tuple[str, str, int, str, str, int]:
    """Return both ends of the arrow that starts in the send ``name`` of process ``pid``."""
    producer, _, target = name.partition(" to rank ")
    return name, "sends", pid + SENDS, f"{producer} arrives", "receives", _pid(int(target)) + RECEIVES


@pytest.mark.full
def test_import_errors_are_counted(page: Perfetto) -> None:
    """Test the test's own check with overlapping passes and arrows without an end."""
    content = json.loads(trace_of("everything"))
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            event["dur"] += 1500
        elif event["ph"] == "f":
            event["tid"] = 999
    page.open(json.dumps(content))
    counted = {name for name, _ in page.import_errors()}
    assert counted == {"flow_no_enclosing_slice", "slice_drop_overlapping_complete_event"}
