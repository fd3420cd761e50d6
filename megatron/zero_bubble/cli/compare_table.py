"""The table of ``zero-bubble compare``, and its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, groupby
from typing import Any

from megatron.zero_bubble.cli.break_even import BreakEven
from megatron.zero_bubble.cli.divisions import division_lines, mark
from megatron.zero_bubble.cli.layouts import compared
from megatron.zero_bubble.cli.plan_text import SLOW
from megatron.zero_bubble.core.analysis.score import length_ms
from megatron.zero_bubble.core.analysis.timeline import Metric
from megatron.zero_bubble.core.ir.vocabulary import Algorithm
from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.loops import compiled
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.candidates import FITTED
from megatron.zero_bubble.planning.figures import Figures


@dataclass(frozen=True)
class ComparedRow:
    """One schedule in the table.

    Attributes:
        work: what it puts in order; of it the table has the placement, the slices, and the algorithm of vocabulary
            parallelism.
        span_ms, makespan_ms: length of an iteration; the longest span of a rank, and the time from the first pass of
            any rank to the last.
        bubble_rate_span, bubble_rate_makespan: share of either in which the busiest rank does not compute.
        idle_rate_span, idle_rate_makespan: the same as a mean over all ranks.
        imbalance: work of the busiest rank, divided by the mean of the ranks.
        peak_microbatches: the highest peak of a rank, in microbatches of that rank.
        peak_memory: the same, in the unit of the costs.
        messages: number of messages between ranks per iteration.
        message_bytes: their total size; None if the size of a message is unknown.
        speedup_over_1f1b, speedup_over_interleaved: factor by which the objective is shorter; None without the
            baseline.
        layout: Megatron's ``--pipeline-model-parallel-layout`` if the layout was chosen by cost.
        offloaded_share: share of the forwards that move to host memory; None without ``--offload``.
        host_peak: the most host memory of a rank, in the unit of the costs; None without ``--offload``.
        gathers, reductions: collectives of a rank per iteration; None where weights are not sharded.
        static_bytes: weights, gradients and optimizer, on the rank that needs most in total; None if unknown.
        replica_bytes: what a rank sends to its replicas per iteration; None if unknown.
        tensor_parallel: number of GPUs that divide a layer instead of replicas; None where layers are whole.
        tensor_bytes: what a rank sends to these GPUs per iteration; None where layers are whole.
        is_lower_bound: whether the costs of a stage were divided without knowing its layers.
        needed_layout: the layout without which a job has other layers per stage.
    """

    schedule: str
    work: Workload
    span_ms: float
    makespan_ms: float
    bubble_rate_span: float
    bubble_rate_makespan: float
    idle_rate_span: float
    idle_rate_makespan: float
    imbalance: float
    peak_microbatches: float
    peak_memory: float
    messages: int
    message_bytes: float | None
    speedup_over_1f1b: float | None
    speedup_over_interleaved: float | None
    within_limit: bool
    layout: str | None
    offloaded_share: float | None = None
    host_peak: float | None = None
    gathers: int | None = None
    reductions: int | None = None
    static_bytes: float | None = None
    replica_bytes: float | None = None
    tensor_parallel: int | None = None
    tensor_bytes: float | None = None
    is_lower_bound: bool = False
    needed_layout: str | None = None

    @property
    def placement(self) -> str:
        """The name of its placement, where a loop has the name of the schedules that have always been on one."""
        name = name_of(self.work.placement)
        return "interleaved" if name == "loop" else name or "another one"

    @property
    def num_slices(self) -> int:
        """Slices per sequence."""
        return len(self.work.slices)

    @property
    def vocabulary(self) -> Algorithm | None:
        """The algorithm of vocabulary parallelism; None without it."""
        return self.work.vocabulary

    @property
    def content(self) -> dict[str, Any]:
        """What ``--format json`` has of it."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "work"}
        of_work = {"placement": self.placement, "num_slices": self.num_slices, "vocabulary": self.vocabulary}
        return {"schedule": self.schedule, **of_work, **figures}


@dataclass(frozen=True)
class Table:
    """What ``--format json`` has; ``lower_bound_ms`` is by placement, ``absent`` explains missing schedules.

    ``lower_bound_ms`` is for whole sequences, ``sliced_lower_bound_ms`` for slices; empty unless all are cut alike.
    Both are for equally many layers per stage. ``gain_of_vocabulary`` is the share by which the shortest schedule with
    vocabulary parallelism is shorter than the shortest with a layout by cost; None without either.
    """

    objective: Metric
    num_ranks: int
    num_microbatches: int
    memory_limit: float
    lower_bound_ms: dict[str, float]
    sliced_lower_bound_ms: dict[str, float]
    rows: tuple[ComparedRow, ...]
    absent: tuple[str, ...]
    gain_of_vocabulary: float | None = field(init=False)
    break_even: BreakEven | None = None

    def __post_init__(self) -> None:
        """Compare the shortest with a divided vocabulary and the shortest with a layout by cost."""
        lengths = [self.shortest(divided=divided) for divided in (False, True)]
        whole, divided = (None if row is None else length_ms(row, self.objective) for row in lengths)
        object.__setattr__(self, "gain_of_vocabulary", 1 - divided / whole if whole and divided is not None else None)

    @property
    def content(self) -> dict[str, Any]:
        """The content of ``--format json``."""
        rows = [row.content for row in self.rows]
        return asdict(replace(self, rows=())) | {"rows": rows, "gain_of_vocabulary": self.gain_of_vocabulary}

    def shortest(self, *, divided: bool) -> ComparedRow | None:
        """Return the shortest schedule within the limit with a divided vocabulary, or else with a layout by cost and a
        whole one.
        """
        rows = (row for row in self.rows if row.within_limit and (row.vocabulary is not None) is divided)
        return next((row for row in rows if divided or row.layout is not None), None)


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
    moves = any(row.offloaded_share is not None for row in table.rows)
    head += f"{'moved':>8}{'host':>8}" if moves else ""
    units = any(row.gathers is not None for row in table.rows)
    head += f"{'gathers':>9}{'reduces':>9}{'static':>8}{'sent':>8}" if units else ""
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
        line += _moved(row, costs) if moves else ""
        line += _collectives(row) if units else ""
        line += f"{_gib(row.peak_memory if costs.in_bytes else None)}{row.messages:7}{_gib(row.message_bytes)}"
        line += f"{_percent(row.speedup_over_1f1b):>9}{_percent(row.speedup_over_interleaved):>21}"
        lines.append(line + ("" if row.within_limit else "   over the limit") + mark(row))
    lines += _legend(table)
    whole = " of whole sequences" if any(row.num_slices > 1 for row in table.rows) else ""
    whole += " of equally many layers per stage" if any(row.layout for row in table.rows) else ""
    for of, bounds in ((whole, table.lower_bound_ms), (" of these slices", table.sliced_lower_bound_ms)):
        for placement, ms in bounds.items():
            lines.append(f"no {placement} schedule{of} within the limit has a {table.objective} below {ms:.3f} ms")
    lines += chain(division_lines(table.rows), _layouts(table))
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


def _layouts(table: Table) -> Iterator[str]:
    """Yield the layouts by cost and their schedules, the best layout, and what a divided vocabulary gains over it."""
    laid_out = sorted((row for row in table.rows if row.layout is not None), key=lambda row: str(row.layout))
    for layout, rows in groupby(laid_out, key=lambda row: row.layout):
        yield f"--pipeline-model-parallel-layout '{layout}': {', '.join(row.schedule for row in rows)}"
    best, divided = table.shortest(divided=False), table.shortest(divided=True)
    if best is not None:
        yield f"best layout: '{best.layout}' with {best.schedule}, {length_ms(best, table.objective):.3f} ms"
    if divided is not None and (gain := table.gain_of_vocabulary) is not None:
        ms = length_ms(divided, table.objective)
        yield f"vocabulary parallelism, {divided.schedule}, {ms:.3f} ms: {compared(gain)} the best layout"


def _moved(row: ComparedRow, costs: Figures) -> str:
    """Format the share that moves, and the peak of host memory, in GiB or microbatches."""
    if row.offloaded_share is None or row.host_peak is None:
        return f"{'':16}"
    host = row.host_peak / (2**30 if costs.in_bytes else costs.microbatch)
    return f"{row.offloaded_share:8.0%}{host:8.4g}"


def _collectives(row: ComparedRow) -> str:
    """Format gathers, reductions, static memory in GiB, and what a rank sends to replicas and to parts of layers."""
    counts = ("" if count is None else count for count in (row.gathers, row.reductions))
    sent = None if row.replica_bytes is None else row.replica_bytes + (row.tensor_bytes or 0.0)
    return "".join(f"{count:>9}" for count in counts) + _gib(row.static_bytes) + _gib(sent)


def _gib(amount: float | None) -> str:
    return f"{'' if amount is None else format(amount / 2**30, '.4g'):>8}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.1%}"
