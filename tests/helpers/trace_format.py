"""A strict checker of what importers of Chrome traces rely on.

It follows the "Trace Event Format" document (Google, 2016) and the errors of Perfetto's importer (google/perfetto,
``json_trace_tokenizer.cc``, ``json_trace_parser_impl.cc``): events of the kinds X, i, C, M, s and f with their keys,
times in us, thread numbers unique across processes, nested slices per thread, arrows with both ends, each inside a
slice that precedes it in the file, and numeric counters.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]

_KEYS: dict[str, set[str]] = {
    "X": {"ph", "pid", "tid", "name", "ts", "dur"},
    "i": {"ph", "pid", "tid", "name", "ts", "s"},
    "C": {"ph", "pid", "name", "ts", "args"},
    "M": {"ph", "pid", "name", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "id", "ts"},
    "f": {"ph", "pid", "tid", "name", "cat", "id", "ts", "bp"},
}
_OPTIONAL: dict[str, set[str]] = {"X": {"args", "cat"}, "M": {"tid"}}
_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def problems(text: str) -> list[str]:
    """Return one sentence per error in a trace; empty for a valid trace."""
    content = json.loads(text, parse_constant=lambda name: name)  # NaN and Infinity are not valid JSON
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        return ["the trace must be an object with the list traceEvents"]
    if content.keys() != {"traceEvents"}:
        return [f"all versions agree only on the key traceEvents; got {sorted(content)}"]
    events: list[Event] = content["traceEvents"]
    found = [f"{wrong}: {json.dumps(event)}" for event in events for wrong in _of_event(event)]
    if found:
        return found
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    return [*_names(events), *_nesting(slices), *_arrows(events, slices), *_counters(events)]


def _of_event(event: Any) -> Iterable[str]:
    if not isinstance(event, dict) or event.get("ph") not in _KEYS:
        yield "an event must be an object with a known ph"
        return
    phase = event["ph"]
    if missing := _KEYS[phase] - event.keys():
        yield f"{phase} lacks {sorted(missing)}"
    if unknown := event.keys() - _KEYS[phase] - _OPTIONAL.get(phase, set()):
        yield f"{phase} has {sorted(unknown)}"
    yield from _of_values(event)
    if phase == "M":
        yield from _of_metadata(event)
    if phase == "f" and event.get("bp") != "e":
        yield "an arrow must end in the slice around it, bp e"


def _of_values(event: Event) -> Iterable[str]:
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            yield f"{key} must be a number of microseconds, 0 or more"
    for key in ("pid", "tid", "id"):
        if type(event.get(key, 1)) is not int or event.get(key, 1) < 1:
            yield f"{key} must be a whole number above 0 (0 is the idle process)"
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield "name must be text"
    if not isinstance(event.get("args", {}), dict):
        yield "args must be an object"


def _of_metadata(event: Event) -> Iterable[str]:
    key, kind = _METADATA.get(event["name"], ("", str))
    if not key:
        yield "a metadata event must have a known name"
    elif set(event["args"]) != {key} or type(event["args"][key]) is not kind:
        yield f"{event['name']} must have args {key}"


def _names(events: list[Event]) -> Iterable[str]:
    """Every process and thread with events has exactly one name."""
    given: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    for event in events:
        if event["ph"] == "M":
            given[event["name"], event["pid"], event.get("tid", 0)] += 1
    used = {event["pid"] for event in events if event["ph"] != "M"}
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M" and "tid" in event}
    yield from (f"process {pid} has no name" for pid in used if not given["process_name", pid, 0])
    yield from (f"thread {tid} of {pid} has no name" for pid, tid in threads if not given["thread_name", pid, tid])
    homes: defaultdict[int, set[int]] = defaultdict(set)
    for pid, tid in threads:
        homes[tid].add(pid)
    yield from (f"thread {tid} belongs to several processes" for tid in homes if len(homes[tid] | ({tid} & used)) > 1)
    yield from (
        f"{name} of {pid}, {tid} is given {count} times" for (name, pid, tid), count in given.items() if count > 1
    )


def _nesting(slices: dict[Track, list[Event]]) -> Iterable[str]:
    """Slices of a thread are nested or disjoint, and are listed in the order of their starts."""
    for track, row in slices.items():
        open_until: list[int] = []
        before = 0
        for event in row:
            start, end = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
            if start < before:
                yield f"track {track} goes back in time at {event['name']}"
            before = start
            while open_until and open_until[-1] <= start:
                open_until.pop()
            if open_until and end > open_until[-1]:
                yield f"track {track}: {event['name']} overlaps the slice before it"
            open_until.append(end)


def _arrows(events: list[Event], slices: dict[Track, list[Event]]) -> Iterable[str]:
    """Each arrow has two ends, each in a slice on a thread without instants: Perfetto would attach it to an instant."""
    instants = {(event["pid"], event["tid"]) for event in events if event["ph"] == "i"}
    place = {id(event): index for index, event in enumerate(events)}
    starts: dict[int, int] = {}
    ends: defaultdict[tuple[str, int], dict[str, list[Event]]] = defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]][event["ph"]].append(event)
            at = _ns(event["ts"])
            around = slices.get((event["pid"], event["tid"]), [])
            before = [each for each in around if place[id(each)] < place[id(event)]]
            open_then = [each for each in before if _ns(each["ts"]) <= at < _ns(each["ts"]) + _ns(each["dur"])]
            if not open_then:
                yield f"an end of arrow {event['id']} is in no slice"
            starts[id(event)] = _ns(open_then[-1]["ts"]) if open_then else at
            if (event["pid"], event["tid"]) in instants:
                yield f"an end of arrow {event['id']} is on a thread with instants"
    for (_, number), both in ends.items():
        if [len(both["s"]), len(both["f"])] != [1, 1]:
            yield f"arrow {number} has {len(both['s'])} starts and {len(both['f'])} ends"
        elif both["s"][0]["ts"] > both["f"][0]["ts"]:
            yield f"arrow {number} ends before it starts"
        elif starts[id(both["s"][0])] > starts[id(both["f"][0])]:
            yield f"arrow {number} ends in a slice that starts before its source slice: Perfetto would reverse it"


def _counters(events: list[Event]) -> Iterable[str]:
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] == "C":
            track = event["pid"], event["name"]
            if not event["args"] or any(type(value) not in (int, float) for value in event["args"].values()):
                yield f"counter {track} must count in numbers"
            if event["ts"] < last.get(track, 0):
                yield f"counter {track} goes back in time"
            last[track] = event["ts"]


def _ns(us: float) -> int:
    return round(us * 1000)
