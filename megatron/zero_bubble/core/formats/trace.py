"""Recorded iterations as JSON: written by ``--zero-bubble-trace`` and drawn by ``zero-bubble trace``.

The keys are a contract with other tools (docs/trace-json.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron.zero_bubble.core.analysis.difference import ComparedIteration
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.analysis.timeline import Box, LaneSpan, Timeline, divided
from megatron.zero_bubble.core.analysis.trace import RankTrace, Received, Sent, Settled, Trace, ValidationWait
from megatron.zero_bubble.core.analysis.validate import validate
from megatron.zero_bubble.core.costs import PassCosts, PassMemory
from megatron.zero_bubble.core.costs.lengths import Load, PackedCosts
from megatron.zero_bubble.core.costs.terms import BY_KEY, MEMORY, OF, REQUIRED, Owner
from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.formats.cost_figures import (
    LINKS,
    OF_RANKS,
    costs_content,
    figures_from,
    figures_on,
    with_ranks,
)
from megatron.zero_bubble.core.formats.files import (
    is_positive,
    is_text,
    json_object,
    list_of,
    read_file,
    read_key,
    read_optional,
)
from megatron.zero_bubble.core.formats.schedule import passes_content, with_passes_of
from megatron.zero_bubble.core.ir import Op, Pass, Placement, Schedule
from megatron.zero_bubble.core.ir.collectives import collectives_of
from megatron.zero_bubble.core.ir.offload import OFFLOAD_OPS
from megatron.zero_bubble.core.ir.ops import parse_op
from megatron.zero_bubble.core.ir.passes import AND
from megatron.zero_bubble.core.plan.timelines import timeline_of

FORMAT = 1

_PASSES = "passes"
_ROWS: Mapping[str, tuple[type[NamedTuple], tuple[str, ...]]] = {
    _PASSES: (Box, ("pass", "start", "end")),
    "sends": (Sent, ("pass", "rank", "sent")),
    "receives": (Received, ("pass", "rank", "posted", "awaited", "arrived")),
    "settles": (Settled, ("pass", "rank", "start", "end")),
    "validations": (ValidationWait, ("start", "end")),
}
_LANES = "lanes"
"""The key of timed ops that are not passes; a rank without such ops does not have the key."""
_SEQUENCE, _LOADS = "sequence_tokens", "loads"
"""The keys of the sequence that the costs are for, and of the loads of the microbatches of an iteration."""

_NOT_RECORDED = (LINKS, "host_ms", "gather_ms", "reduce_ms")


@dataclass(frozen=True)
class Recording:
    """Recorded iterations of a run, all with the same stages.

    Attributes:
        costs: costs of the plans that the iterations are compared with.
        traces: at least one trace, by the number of the iteration.
        memory: memory of a microbatch on each stage, in bytes; None if it was not measured.
        sequence: the tokens of the sequence that the costs are for, if microbatches have loads of their own.
    """

    costs: PassCosts
    traces: Mapping[int, Trace]
    memory: PassMemory | None = None
    sequence: int | None = None

    def compared(self, iteration: int) -> ComparedIteration:
        """Compare an iteration with the simulation of its order. Ops that were read from a file have an unknown effect
        on memory, so with such ops the comparison has no memory.
        """
        trace = self.traces[iteration]
        schedule, costs = trace.timeline.schedule, self.costs
        if trace.timeline.loads and self.sequence is not None:
            costs = PackedCosts(**vars(costs), sequence=self.sequence, loads=trace.timeline.loads)
            planned = simulate(schedule, costs, self.memory)
        else:
            planned = timeline_of(schedule, costs, self.memory)
        known = not any(isinstance(span.op, str) for row in trace.timeline.lanes for span in row)
        return ComparedIteration(iteration, planned, trace, costs, self.memory if known else None)

    @property
    def typical(self) -> int:
        """The number of the iteration with the median makespan."""
        by_length = sorted(self.traces, key=lambda number: self.traces[number].timeline.makespan_ms)
        return by_length[len(by_length) // 2]


def trace_to_json(recording: Recording) -> str:
    """Write the JSON text: one line per key common to all iterations, then one line per rank of each iteration."""
    planned = recording.compared(recording.typical).planned
    schedule = planned.schedule
    costs, memory = recording.costs, recording.memory
    content: dict[str, Any] = {
        "format": FORMAT,
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        **passes_content(schedule),
        **_written(costs, memory),
        **({} if recording.sequence is None else {_SEQUENCE: recording.sequence}),
        "planned": _figures([planned]),
        "measured": _figures([trace.timeline for trace in recording.traces.values()]),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    iterations = [
        f'    {{"iteration": {number}, {_loads(trace)}"ranks": [\n      '
        + ",\n      ".join(json.dumps(_rank(row, trace.timeline, rank)) for rank, row in enumerate(trace.ranks))
        + "\n    ]}"
        for number, trace in recording.traces.items()
    ]
    return "{\n" + ",\n".join([*lines, '  "iterations": [\n' + ",\n".join(iterations) + "\n  ]"]) + "\n}\n"


def trace_from_json(text: str) -> Recording:
    """Read what ``trace_to_json`` wrote; figures that follow from the iterations are ignored.

    Raises:
        UserError: when the text is not a trace file.
    """
    content = json_object(text)
    read_key(content, "format", f"{FORMAT}, the only format that this version reads", _is_format)
    name = read_key(content, "schedule", "a string", is_text)
    iterations = read_key(content, "iterations", "a list of at least one iteration", _is_filled_list)
    traces: dict[int, Trace] = {}
    for iteration in iterations:
        if not isinstance(iteration, dict):
            raise UserError(f"every iteration must be an object; got {json.dumps(iteration)[:60]}")
        number = read_key(iteration, "iteration", "a whole number", lambda value: type(value) is int)
        if number in traces:
            raise UserError(f"iteration numbers must be unique; got {number} twice; remove one of them")
        ranks = read_key(iteration, "ranks", "a list of at least one rank", _is_filled_list)
        rows = tuple(_rank_from(row, rank, len(ranks), number) for rank, row in enumerate(ranks))
        trace = Trace.of(name, rows).with_loads(_loads_from(iteration))
        traces[number] = trace.running(_schedule_from(content, trace.timeline.schedule, ranks))
    num_stages = {trace.timeline.schedule.num_stages for trace in traces.values()}
    if len(num_stages) > 1:
        raise UserError(f"all iterations must have the same number of stages; got {sorted(num_stages)}; split the file")
    costs, memory = _costs_from(content, next(iter(traces.values())).timeline.schedule.placement)
    sequence = read_optional(content, _SEQUENCE, "a whole number", is_positive)
    recording = Recording(costs, traces, memory, sequence)
    recording.compared(recording.typical)  # raises if costs or memory are for another number of stages
    return recording


def read_trace_file(path: str | Path) -> Recording:
    """Read a file with ``trace_from_json``; errors name the file."""
    return read_file(path, "trace file", trace_from_json)


def _written(costs: PassCosts, memory: PassMemory | None) -> dict[str, Any]:
    """The figures that a recording has, by the fields of their values."""
    figures = costs_content(costs, memory)
    return {BY_KEY[key].field: figure for key, figure in figures.items() if key not in _NOT_RECORDED}


def _costs_from(content: dict[str, Any], placement: Placement) -> tuple[PassCosts, PassMemory | None]:
    costs = with_ranks(PassCosts(**_of_stages(content, "passes")), figures_from(content, *OF_RANKS), placement)
    if not content.keys() & set(MEMORY):
        return costs, None
    logits = BY_KEY["logits"]
    of_ranks = {} if logits.key not in content else {logits.key: logits.checked(content[logits.key])}
    return costs, PassMemory(**_of_stages(content, "memory"), **figures_on(of_ranks, "memory", placement))


def _of_stages(content: dict[str, Any], owner: Owner) -> dict[str, Any]:
    """The figures of stages, and those of the whole pipeline, by field."""
    found = {}
    for term in OF[owner]:
        if term.field not in content and term.missing != REQUIRED:
            continue
        if term.per == "stage":
            form = "a list of numbers, one per stage"
            found[term.field] = tuple(read_key(content, term.field, form, list_of(_is_number)))
        elif term.per == "pipeline":
            found[term.field] = read_key(content, term.field, "a number", _is_number)
    return found


def _figures(timelines: Sequence[Timeline]) -> dict[str, float]:
    return {
        "makespan_ms": median(t.makespan_ms for t in timelines),
        "span_ms": median(t.span_ms for t in timelines),
        "bubble_rate_makespan": median(t.bubble_rate("makespan") for t in timelines),
        "bubble_rate_span": median(t.bubble_rate("span") for t in timelines),
        "idle_rate_makespan": median(t.idle_rate("makespan") for t in timelines),
        "idle_rate_span": median(t.idle_rate("span") for t in timelines),
    }


def _loads(trace: Trace) -> str:
    loads = trace.timeline.loads
    return f'"{_LOADS}": {json.dumps(list(map(list, loads)))}, ' if loads else ""


def _loads_from(iteration: dict[str, Any]) -> tuple[Load, ...]:
    form = "a list of pairs of whole numbers, tokens and the sum of the squares of the samples' tokens"
    return tuple(Load(*load) for load in read_optional(iteration, _LOADS, form, list_of(_is_load)) or ())


def _rank(row: RankTrace, timeline: Timeline, rank: int) -> dict[str, Any]:
    boxes = [(AND.join(map(str, works)), start_ms, end_ms) for works, start_ms, end_ms in timeline.boxes(rank)]
    rows = (boxes, row.sends, row.receives, row.settles, row.validations)
    events = {key: [[_cell(cell) for cell in event] for event in kind] for key, kind in zip(_ROWS, rows, strict=True)}
    lanes = (
        {_LANES: [list(map(_cell, (lane, op, start, end))) for lane, op, start, end, _ in row.lanes]}
        if row.lanes
        else {}
    )
    return {"clock_error_ms": round(row.clock_error_ms, 6), **events, **lanes}


def _cell(value: object) -> str | float:
    """Round times to a tenth of a microsecond; more digits are noise and would double the file size."""
    return round(value, 4) if isinstance(value, int | float) else str(value)


def _rank_from(row: object, rank: int, num_ranks: int, iteration: int) -> RankTrace:
    where = f"iteration {iteration}, rank {rank}"
    if not isinstance(row, dict):
        raise UserError(f"{where} must be an object; got {json.dumps(row)[:60]}")
    kinds: list[Any] = [tuple(_events(row, key, where)) for key in _ROWS]
    boxes, sends, receives, settles, validations = kinds
    spans = tuple(span for works, start_ms, end_ms in boxes for span in divided(works, start_ms, end_ms))
    times = [time for _, *both in spans for time in both]
    if not spans or times != sorted(times):
        raise UserError(
            f"{where} must have one or more passes in order of time, without overlap; got {len(spans)} passes"
        )
    error_ms = read_key(row, "clock_error_ms", "a number", _is_number)
    lanes = tuple(_events(row, _LANES, where)) if _LANES in row else ()
    lanes = tuple(span._replace(op=_op(span.op, rank, num_ranks)) for span in lanes)
    return RankTrace(spans, sends, receives, settles, validations, error_ms, lanes)


def _schedule_from(content: dict[str, Any], ran: Schedule, ranks: Sequence[dict[str, Any]]) -> Schedule:
    """The schedule of an iteration, of which the order ``ran`` is known already."""
    order = ((works for works, *_ in row[_PASSES]) for row in ranks)
    schedule = with_passes_of(content, Schedule.from_text(ran.name, ran.placement, ran.num_microbatches, order))
    validate(schedule)
    return schedule


def _op(text: str, rank: int, num_ranks: int) -> Op | str:
    """The collective or op of offloading that prints as ``text``; the text if it is another op."""
    with suppress(UserError):
        return parse_op(text, rank, (*collectives_of(num_ranks), *OFFLOAD_OPS))
    return text


def _events(row: dict[str, Any], key: str, where: str) -> Iterator[Any]:
    kind, columns = _ROWS.get(key, (LaneSpan, ("lane", "op", "start", "end")))
    make: Callable[..., Any] = kind
    form = f"[{', '.join(columns)}]"
    for event in read_key(row, key, f"a list of rows {form}", lambda value: isinstance(value, list)):
        if not isinstance(event, list) or len(event) != len(columns):
            raise UserError(f"{key} of {where} must be rows {form}; got {json.dumps(event)[:60]}")
        cells = zip(event, columns, strict=True)
        first = (_works(next(cells)[0], where),) if key == _PASSES else ()
        yield make(*first, *(_value(cell, column, f"{key} of {where}") for cell, column in cells))


def _works(cell: object, where: str) -> tuple[Pass, ...]:
    """Read a pass, or the two passes of a pair."""
    texts = cell.split(AND) if isinstance(cell, str) else [cell]
    return tuple(_value(text, "pass", f"{_PASSES} of {where}") for text in texts)


def _value(cell: object, column: str, where: str) -> Any:
    if column == "pass" and isinstance(cell, str):
        return Pass.parse(cell)
    if column == "rank" and type(cell) is int and cell >= 0:
        return cell
    if column in ("lane", "op") and isinstance(cell, str):
        return cell
    if column not in ("pass", "rank", "lane", "op") and _is_number(cell):
        return cell
    form = {"pass": 'a pass such as "2F0"', "rank": "a rank", "lane": "a string", "op": "a string"}.get(column, "ms")
    raise UserError(f"{where} must give {column} as {form}; got {json.dumps(cell)[:60]}")


def _is_format(value: object) -> bool:
    return type(value) is int and value == FORMAT  # True == 1


def _is_number(value: object) -> bool:
    """Whether ``value`` is a finite float, or a whole number that fits in one."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= sys.float_info.max


def _is_load(value: object) -> bool:
    return list_of(is_positive)(value) and len(value) == 2  # type: ignore[arg-type]


def _is_filled_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)
