"""Write a recorded iteration for https://ui.perfetto.dev and chrome://tracing, as JSON in the Trace Event Format.

Each rank is a process with threads for its passes, its sends, its posted receives, its waits to receive, its other
waits, and every lane of other ops; the plan of a rank is a process above it. An arrow leads from every send to the end
of its receive, and a counter shows the memory of the rank. The format is documented by its authors ("Trace Event
Format", 2016); Perfetto reads the event kinds X, i, C, M and the flows s and f.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from megatron.zero_bubble.core.analysis.difference import ComparedIteration, RankDifference
from megatron.zero_bubble.core.analysis.memory import memory_curve
from megatron.zero_bubble.core.analysis.timeline import Box, Timeline
from megatron.zero_bubble.core.ir import Pass
from megatron.zero_bubble.core.ir.passes import AND

PASSES, SENDS, POSTS, RECEIVES, WAITS = range(1, 6)
_THREADS = {PASSES: "passes", SENDS: "sends", POSTS: "posted receives", RECEIVES: "receives", WAITS: "other waits"}
_CAUSES = ("slow_ms", "late_ms", "host_ms", "waited_ms")

Event = dict[str, Any]


def render_perfetto(compared: ComparedIteration) -> str:
    """Write the JSON text, one event per line. Times are in us; plan and iteration start at the same time."""
    schedule = compared.measured.timeline.schedule
    sides = {True: compared.planned, False: compared.measured.timeline}
    lanes = sorted({lane for timeline in sides.values() for lane in timeline.timed_lanes})
    events = [*_names(schedule.num_ranks, lanes), *_measured(compared), *_planned(compared), *_memory(compared)]
    for planned, timeline in sides.items():
        events += _on_lanes(timeline, planned, lanes)
    # A rank posts its first receive before the first pass of any rank starts, and times must not be negative.
    first = min(event.get("ts", 0.0) for event in events)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    lines = ",\n".join(json.dumps(event) for event in events)
    # displayTimeUnit is left out: some versions of Perfetto interpret it as the unit of the times.
    return f'{{"traceEvents": [\n{lines}\n]}}\n'


def _pid(rank: int, planned: bool = False) -> int:
    """Return a process number; numbers are spaced for thread numbers, which Perfetto requires to be globally unique."""
    return 100 * (2 * rank + (1 if planned else 2))


def _names(num_ranks: int, lanes: Sequence[str]) -> Iterator[Event]:
    threads = _THREADS | {_thread(lanes, lane): lane for lane in lanes}
    for rank in range(num_ranks):
        for planned in (True, False):
            pid = _pid(rank, planned)
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": _process(rank, planned)}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
            for tid, name in threads.items():
                if tid == PASSES or name in lanes or not planned:
                    yield {"ph": "M", "pid": pid, "tid": pid + tid, "name": "thread_name", "args": {"name": name}}
                    sort = {"name": "thread_sort_index", "args": {"sort_index": tid}}
                    yield {"ph": "M", "pid": pid, "tid": pid + tid} | sort


def _thread(lanes: Sequence[str], lane: str) -> int:
    """Return the thread number of a lane, after the threads that every rank has."""
    return WAITS + 1 + lanes.index(lane)


def _on_lanes(timeline: Timeline, planned: bool, lanes: Sequence[str]) -> Iterator[Event]:
    for rank, row in enumerate(timeline.lanes):
        for lane, op, start_ms, end_ms, _ in row:
            if lane in lanes:
                yield _slice(_pid(rank, planned), _thread(lanes, lane), str(op), start_ms, end_ms)


def _process(rank: int, planned: bool) -> str:
    return f"rank {rank}, planned" if planned else f"rank {rank}"


def _planned(compared: ComparedIteration) -> Iterator[Event]:
    for rank in range(len(compared.planned.spans)):
        for works, start_ms, end_ms in compared.planned.boxes(rank):
            yield _slice(_pid(rank, planned=True), PASSES, _name(works), start_ms, end_ms, _of_pass(*works))


def _measured(compared: ComparedIteration) -> Iterator[Event]:
    ids = {(sent.producer, sent.target): number for number, sent in enumerate(_sends(compared), start=1)}
    received = {(got.producer, rank) for rank, row in enumerate(compared.measured.ranks) for got in row.receives}
    rows = zip(compared.measured.ranks, compared.difference.ranks, strict=True)
    for rank, (row, difference) in enumerate(rows):
        pid = _pid(rank)
        yield from _passes(pid, compared.measured.timeline.boxes(rank), difference)
        ends = {span.pass_: span.end_ms for span in row.spans}
        for producer, target, at_ms in row.sends:
            start_ms = min(at_ms, ends.get(producer, at_ms))
            yield _slice(pid, SENDS, f"{producer} to rank {target}", start_ms, at_ms)
            if (producer, target) in received:
                yield _flow("s", ids[producer, target], pid, SENDS, _us(start_ms))
        for producer, source, posted_ms, awaited_ms, arrived_ms in row.receives:
            yield _slice(pid, RECEIVES, f"{producer} from rank {source}", awaited_ms, arrived_ms)
            # Instants are on a separate thread, because Perfetto would attach the arrow to the instant.
            expects = {"ph": "i", "s": "t", "pid": pid, "tid": pid + POSTS, "name": f"expects {producer}"}
            yield expects | {"ts": _us(posted_ms)}
            if (producer, rank) in ids:
                # The arrow ends on a 1 ns slice, because Perfetto draws arrows from the slice that starts first.
                last = max(_us(awaited_ms), round(_us(arrived_ms) - 0.001, 3))
                yield _slice_us(pid, RECEIVES, f"{producer} arrives", last, last)
                yield _flow("f", ids[producer, rank], pid, RECEIVES, last)
        for producer, target, start_ms, end_ms in row.settles:
            yield _slice(pid, WAITS, f"until rank {target} has {producer}", start_ms, end_ms)
        for start_ms, end_ms in row.validations:
            yield _slice(pid, WAITS, "validate the optimizer step", start_ms, end_ms)


def _sends(compared: ComparedIteration) -> Iterator[Any]:
    for row in compared.measured.ranks:
        yield from row.sends


def _passes(pid: int, boxes: Iterable[Box], difference: RankDifference) -> Iterator[Event]:
    steps = iter(difference.steps)
    for works, start_ms, end_ms in boxes:
        step, *_ = islice(steps, len(works))
        why: dict[str, Any] = {name: round(getattr(step, name), 4) for name in _CAUSES}
        if step.waits_for is not None:
            why["waits_for"] = str(step.waits_for)
        yield _slice(pid, PASSES, _name(works), start_ms, end_ms, _of_pass(*works) | why)


def _name(works: Iterable[Pass]) -> str:
    return AND.join(map(str, works))


def _memory(compared: ComparedIteration) -> Iterator[Event]:
    if compared.memory is None:
        return
    sides: tuple[tuple[Timeline, bool], ...] = ((compared.planned, True), (compared.measured.timeline, False))
    for timeline, planned in sides:
        for rank, curve in enumerate(memory_curve(timeline, compared.memory)):
            for at_ms, amount in curve:
                yield {
                    "ph": "C",
                    "pid": _pid(rank, planned),
                    "name": "memory of microbatches",
                    "ts": _us(at_ms),
                    "args": {"bytes": round(amount)},
                }


def _of_pass(p: Pass, other: Pass | None = None) -> dict[str, Any]:
    own = {"stage": p.stage, "kind": p.kind.value, "microbatch": p.microbatch, "slice": p.slice}
    return own if other is None else own | {"paired with": str(other)}


def _slice(pid: int, tid: int, name: str, start_ms: float, end_ms: float, args: dict[str, Any] | None = None) -> Event:
    return _slice_us(pid, tid, name, _us(start_ms), _us(end_ms)) | ({"args": args} if args else {})


def _slice_us(pid: int, tid: int, name: str, start: float, end: float) -> Event:
    """Make a slice of at least 1 ns: a flow needs a slice that is open at its time."""
    event: Event = {"ph": "X", "pid": pid, "tid": pid + tid, "name": name, "ts": start}
    return event | {"dur": max(0.001, round(end - start, 3))}


def _flow(phase: str, number: int, pid: int, tid: int, ts: float) -> Event:
    """Make one end of an arrow, attached to the slice that is open at ``ts``."""
    event = {"ph": phase, "id": number, "pid": pid, "tid": pid + tid, "name": "message", "cat": "message", "ts": ts}
    return event | ({"bp": "e"} if phase == "f" else {})


def _us(ms: float) -> float:
    """Convert to us, rounded to a nanosecond, which is Perfetto's resolution."""
    return round(ms * 1e3, 3)
