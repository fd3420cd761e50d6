"""Draw a recorded iteration as a self-contained page: plan, measured timeline, causes of the difference, and memory.

The page loads nothing: it contains style and script (``page/``), and the times as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from megatron.zero_bubble.core.analysis.difference import ComparedIteration, Deviation, Link
from megatron.zero_bubble.core.analysis.memory import memory_curve
from megatron.zero_bubble.core.analysis.timeline import Timeline
from megatron.zero_bubble.core.costs.units import format_bytes
from megatron.zero_bubble.core.ir import Kind
from megatron.zero_bubble.core.render.svg import COLOURS, INKS, MEANING
from megatron.zero_bubble.core.render.text import imbalance, size_of

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
<h1>{title}</h1>
<p>{summary}</p>
<div class="legend">{legend}</div>
<canvas id="timeline"></canvas>
<div id="tip" hidden></div>
<p class="soft">Use the wheel to zoom, drag to move, and double-click to show everything. Point at a pass to see what it
waited for.</p>
<h2>Causes of the difference, along the critical chain</h2>
{chain}
<h2>By rank, in ms</h2>
{ranks}
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</html>
"""
_SHADE = "rgb(0 0 0 / 38%)"
_LARGEST = 10
"""Number of passes of the critical chain to list, those with the largest differences."""


def render_html(compared: ComparedIteration) -> str:
    schedule, difference = compared.measured.timeline.schedule, compared.difference
    title = f"{schedule.name}, iteration {compared.iteration}"
    files = resources.files("megatron.zero_bubble.core.render") / "page"
    return _PAGE.format(
        title=escape(title),
        style=(files / "timeline.css").read_text(encoding="utf-8"),
        summary=escape(_summary(compared)),
        legend=_legend(compared),
        chain=_chain(difference),
        ranks=_ranks(compared),
        data=json.dumps(_data(compared), separators=(",", ":")),
        script=(files / "timeline.js").read_text(encoding="utf-8"),
    )


def _summary(compared: ComparedIteration) -> str:
    schedule, planned, measured = compared.planned.schedule, compared.planned, compared.measured.timeline
    error_ms = max(row.clock_error_ms for row in compared.measured.ranks)
    return (
        f"{size_of(schedule)}. Planned "
        f"{planned.makespan_ms:,.1f} ms, bubble {planned.bubble_rate('makespan'):.1%} of the makespan and "
        f"{planned.bubble_rate('span'):.1%} of the span; measured {measured.makespan_ms:,.1f} ms, "
        f"{measured.bubble_rate('makespan'):.1%} and {measured.bubble_rate('span'):.1%}. "
        f"Mean idle of ranks: planned {planned.idle_rate('makespan'):.1%} of the makespan, measured "
        f"{measured.idle_rate('makespan'):.1%}. "
        f"The ranks' clocks agree to {error_ms:.3f} ms.{_advice(measured)}"
    )


def _advice(measured: Timeline) -> str:
    uneven = imbalance(measured)
    return "" if uneven is None else f" Measured, {uneven}: balance the layers of the stages, or divide the vocabulary."


def _legend(compared: ComparedIteration) -> str:
    present = {p.kind for p in compared.planned.schedule.passes()}
    entries = [(COLOURS[kind], MEANING[kind]) for kind in Kind if kind in present]
    entries += [
        ("var(--idle)", "idle as planned"),
        ("var(--late)", "input late"),
        ("var(--host)", "host gap: input present, nothing runs"),
        (f"linear-gradient({_SHADE}, {_SHADE}), {COLOURS[Kind.F]}", "slow: longer than planned"),
    ]
    return "".join(f'<span><i style="background:{colour}"></i>{escape(words)}</span>' for colour, words in entries)


def _data(compared: ComparedIteration) -> dict[str, Any]:
    planned, measured = compared.planned, compared.measured.timeline
    placement = measured.schedule.placement
    data: dict[str, Any] = {
        "titles": {
            "planned": f"planned, {planned.makespan_ms:,.1f} ms",
            "measured": f"measured, {measured.makespan_ms:,.1f} ms",
        },
        "makespans": {"planned": _ms(planned.makespan_ms), "measured": _ms(measured.makespan_ms)},
        "longest": _ms(max(planned.makespan_ms, measured.makespan_ms)),
        "colours": {kind.value: colour for kind, colour in COLOURS.items()},
        "inks": {kind.value: ink for kind, ink in INKS.items()},
        "chunk": [placement.chunk_of(stage) for stage in range(placement.num_stages)],
        "chunks": max(len(placement.stages_of(rank)) for rank in range(placement.num_ranks)),
        "planned": _planned(compared),
        "measured": _measured(compared),
    }
    if lanes := sorted({*planned.timed_lanes, *measured.timed_lanes}):
        data["lanes"] = {"names": lanes, "planned": _lanes(planned, lanes), "measured": _lanes(measured, lanes)}
    if compared.memory is not None:
        curves = {
            name: [
                [(_ms(at), round(amount)) for at, amount in curve] for curve in memory_curve(timeline, compared.memory)
            ]
            for name, timeline in (("planned", planned), ("measured", measured))
        }
        most = max(amount for curve in curves["planned"] for _, amount in curve)
        data["kept"] = {**curves, "most": most}
        data["titles"]["kept"] = f"memory of microbatches, each rank up to {format_bytes(most)}; dashed: as planned"
    return data


def _planned(compared: ComparedIteration) -> list[list[list[Any]]]:
    steps = [{step.pass_: step for step in row.steps} for row in compared.difference.ranks]
    return [
        [[*_pass(span), str(steps[rank][span.pass_].waits_for or "")] for span in row]
        for rank, row in enumerate(compared.planned.spans)
    ]


def _measured(compared: ComparedIteration) -> list[list[list[Any]]]:
    rows = []
    for part, difference in zip(compared.measured.ranks, compared.difference.ranks, strict=True):
        received = {got.producer: got for got in part.receives}
        row = []
        free_ms = 0.0
        for span, step in zip(part.spans, difference.steps, strict=True):
            got = received.get(step.waits_for) if step.waits_for else None
            times = (max(free_ms, got.awaited_ms), got.arrived_ms) if got else (free_ms, free_ms + step.waited_ms)
            amounts = (*times, step.slow_ms, step.late_ms, step.host_ms)
            row.append([*_pass(span), str(step.waits_for or ""), *map(_ms, amounts)])
            free_ms = span.end_ms
        rows.append(row)
    return rows


def _pass(span: Any) -> list[Any]:
    p = span.pass_
    microbatch = f"{p.microbatch}.{p.slice}" if p.slice else p.microbatch
    return [p.stage, p.kind.value, microbatch, _ms(span.start_ms), _ms(span.end_ms)]


def _lanes(timeline: Timeline, lanes: Sequence[str]) -> list[list[list[Any]]]:
    """For every op that is not a pass: the numbers of its lane and of its class, start and end."""
    rows = timeline.lanes or ((),) * len(timeline.spans)
    classes = sorted({type(span.op).__name__ for row in rows for span in row if span.lane in lanes})
    return [
        [
            [lanes.index(lane), classes.index(type(op).__name__), _ms(start_ms), _ms(end_ms)]
            for lane, op, start_ms, end_ms, _ in row
            if lane in lanes
        ]
        for row in rows
    ]


def _ms(value: float) -> float:
    return round(value, 4)


def _chain(difference: Deviation) -> str:
    parts = (
        ("slow passes", difference.slow_ms, "passes of the chain that took longer than planned"),
        ("transfers", difference.transfer_ms, "outputs that took longer to arrive than planned"),
        ("host gaps", difference.host_ms, "time in which the input was present but nothing ran"),
        ("slack used", difference.slack_ms, "idle time in the plan of this chain that absorbed delays"),
    )
    rows = [
        f"<tr><td>{name}</td><td>{_signed(value)}</td><td class=words>{why}</td></tr>" for name, value, why in parts
    ]
    rows.append(
        f"<tr class=total><td>measured minus planned</td><td>{_signed(difference.makespan_ms)}</td>"
        f"<td class=words>makespan; the chain has {len(difference.chain)} passes</td></tr>"
    )
    head = "<tr><th></th><th>ms</th><th class=words></th></tr>"
    return f"<div class=scroll><table>{head}{''.join(rows)}</table></div>{_largest(difference)}"


def _largest(difference: Deviation) -> str:
    def size(link: Link) -> float:
        return max(abs(link.slow_ms), abs(link.transfer_ms), abs(link.host_ms))

    rows = "".join(
        f"<tr><td>{link.pass_}</td><td>{link.rank}</td><td class=words>{link.after or 'the start'}</td>"
        f"<td>{_signed(link.slow_ms)}</td><td>{_signed(link.transfer_ms)}</td><td>{_signed(link.host_ms)}</td>"
        f"<td>{_signed(link.slack_ms)}</td></tr>"
        for link in sorted(difference.chain, key=size, reverse=True)[:_LARGEST]
    )
    head = "<tr><th>pass</th><th>rank</th><th class=words>after</th><th>slow</th><th>transfer</th><th>host</th>"
    return (
        f"<p class=soft>The {_LARGEST} passes of the chain with the largest differences, in ms:</p>"
        f"<div class=scroll><table>{head}<th>slack</th></tr>{rows}</table></div>"
    )


def _ranks(compared: ComparedIteration) -> str:
    head = (
        "<tr><th>rank</th><th>idle, planned</th><th>idle, measured</th><th>input late</th><th>host gaps</th>"
        "<th>end</th><th>slow passes</th><th>measured minus planned</th></tr>"
    )
    rows = []
    for rank, part in enumerate(compared.difference.ranks):
        idle = _idle(compared.planned, rank), _idle(compared.measured.timeline, rank)
        differences = (part.late_ms, part.host_ms, part.end_ms, part.slow_ms, part.slow_ms + part.idle_ms)
        cells = [str(rank), *(f"{value:,.2f}" for value in idle), *map(_signed, differences)]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        "<p class=soft>Idle time is counted from the first start to the last end over all ranks. Its difference is the "
        "sum of late inputs, host gaps and the end, in which only other ranks run.</p>"
        f"<div class=scroll><table>{head}{''.join(rows)}</table></div>"
    )


def _idle(timeline: Timeline, rank: int) -> float:
    return timeline.makespan_ms - sum(end - start for _, start, end in timeline.spans[rank])


def _signed(value: float) -> str:
    return f"{value + 0.0:+,.2f}" if abs(value) >= 0.005 else "0"
