"""The table of ``zero-bubble compare``, and its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, compress, groupby
from typing import Any

from megatron.zero_bubble.cli.break_even import BreakEven
from megatron.zero_bubble.cli.compared_row import ComparedRow, gib_cell
from megatron.zero_bubble.cli.divisions import division_lines, mark
from megatron.zero_bubble.cli.layouts import layout_flag
from megatron.zero_bubble.cli.plan_text import SLOW
from megatron.zero_bubble.cli.vocabulary import GainOverLayouts
from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.planning.candidates import FITTED, Bounds
from megatron.zero_bubble.planning.figures import Figures


@dataclass(frozen=True)
class Table:
    """What ``--format json`` has; ``absent`` explains missing schedules, and bounds are for equally many layers per
    stage.
    """

    objective: Metric
    num_ranks: int
    num_microbatches: int
    memory_limit: float
    bounds: tuple[Bounds, ...]
    rows: tuple[ComparedRow, ...]
    absent: tuple[str, ...]
    gain: GainOverLayouts
    break_even: BreakEven | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The content of ``--format json``."""
        return {
            "objective": self.objective,
            "num_ranks": self.num_ranks,
            "num_microbatches": self.num_microbatches,
            "memory_limit": self.memory_limit,
            **{bounds.key: bounds.ms for bounds in self.bounds},
            "rows": [row.content for row in self.rows],
            "absent": self.absent,
            **self.gain.content,
            "break_even": None if self.break_even is None else asdict(self.break_even),
        }


def short_text(row: ComparedRow, objective: Metric) -> str:
    """Format a row alone, to show it before the table is complete."""
    over = "" if row.within_limit else "   over the limit"
    ms, name = length_ms(row, objective), f"{row.schedule} ({row.placement})"
    return f"{name:38}{ms:12,.1f} ms{row.idle_rate_makespan:8.1%} idle{row.peak_microbatches:8.4g} microbatches{over}"


def table_text(table: Table, costs: Figures, about_limit: str | None = None) -> str:
    """Format the table as text columns, followed by what they mean, and by the lower bounds.

    Args:
        about_limit: a sentence on the memory limit.
    """
    width = max(22, *(len(row.schedule) + 1 for row in table.rows)) if table.rows else 22
    head = f"{'':{width}}{'placement':12}{'span ms':>11}{'bubble':>8}{'makespan ms':>13}{'bubble':>8}{'idle':>8}"
    head += f"{'peak':>7}"
    known = ([columns.is_known for columns in row.columns] for row in table.rows)
    listed = list(map(any, zip(*known, strict=True)))
    head += "".join(columns.head for columns in compress(table.rows[0].columns, listed)) if listed else ""
    head += f"{'GiB' if costs.in_bytes else '':>8}{'sends':>7}{'GiB' if costs.message_bytes else '':>8}"
    size = f"{table.num_ranks} ranks, {table.num_microbatches} microbatches"
    lines = [
        *costs.notes,
        f"{size}, memory limit {costs.show(table.memory_limit)}; shortest {table.objective} first",
        *([] if about_limit is None else [about_limit]),
        head + f"{'vs 1F1B':>9}{'vs best interleaved':>21}",
    ]
    for row in table.rows:
        line = f"{row.schedule:{width}}{row.placement:12}{row.span_ms:11.3f}{row.bubble_rate_span:8.2%}"
        line += f"{row.makespan_ms:13.3f}{row.bubble_rate_makespan:8.2%}{row.idle_rate_makespan:8.2%}"
        line += f"{row.peak_microbatches:7.4g}"
        line += "".join(columns.cells(costs) for columns in compress(row.columns, listed))
        line += f"{gib_cell(row.peak_memory if costs.in_bytes else None)}{row.messages:7}{gib_cell(row.message_bytes)}"
        line += f"{_percent(row.speedup_over_1f1b):>9}{_percent(row.speedup_over_interleaved):>21}"
        lines.append(line + ("" if row.within_limit else "   over the limit") + mark(row))
    lines += _legend(table)
    whole = "" if all(row.work.is_whole for row in table.rows) else " of whole sequences"
    whole += " of equally many layers per stage" if any(row.layout for row in table.rows) else ""
    for bounds in table.bounds:
        schedule = f"schedule{bounds.of or whole} within the limit"
        lines += (f"no {on} {schedule} has a {table.objective} below {ms:.3f} ms" for on, ms in bounds.ms.items())
    lines += chain(division_lines(table.rows, costs), _layouts(table, costs))
    lines += [] if table.break_even is None else [str(table.break_even)]
    lines += (f"not compared: {reason}" for reason in table.absent)
    if not compiled():
        lines.append(f"planned{SLOW}")
    return "\n".join(lines) + "\n"


def _legend(table: Table) -> Iterator[str]:
    """Yield what the columns mean."""
    yield (
        "bubble: share of the time in which the busiest rank does not compute; idle: the mean of all ranks, of the "
        "makespan"
    )
    yield "peak: microbatches on the fullest rank; sends: messages between ranks per iteration"
    if any(row.speedup_over_1f1b is not None for row in table.rows):
        yield f"vs: gain in throughput, by the {table.objective}; +25.0% takes 20.0% less time"
    if any(FITTED in row.schedule for row in table.rows):
        yield f"{FITTED}: passes reordered for these costs, in the memory of the published order"


def _layouts(table: Table, costs: Figures) -> Iterator[str]:
    """Yield the layouts by cost and their schedules, and what is gained over the best."""
    laid_out = sorted((row for row in table.rows if row.layout is not None), key=lambda row: str(row.layout))
    for layout, rows in groupby(laid_out, key=lambda row: row.layout):
        yield f"{layout_flag(str(layout), costs)}: {', '.join(row.schedule for row in rows)}"
    yield from table.gain.lines


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.1%}"
