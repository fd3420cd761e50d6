"""A row of the table of ``zero-bubble compare``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from megatron.zero_bubble.core.ir.workload import Workload
from megatron.zero_bubble.core.search.placements import name_of
from megatron.zero_bubble.planning.figures import Figures


class Columns(Protocol):
    """Figures of a choice that rows may have, which are shown if some row has them. Their names are keys in JSON."""

    @property
    def is_known(self) -> bool:
        """Whether the row has them."""

    @property
    def head(self) -> str:
        """The head of the columns."""

    def cells(self, costs: Figures) -> str:
        """Format them."""


@dataclass(frozen=True)
class ComparedRow:
    """One schedule in the table.

    Attributes:
        work: what it puts in order; of it the table has the placement, and what tells it from other work.
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
        columns: the figures of other choices, of all rows alike.
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
    columns: tuple[Columns, ...] = ()
    is_lower_bound: bool = False
    needed_layout: str | None = None

    @property
    def placement(self) -> str:
        """The name of its placement, where a loop has the name of the schedules that have always been on one."""
        name = name_of(self.work.placement)
        return "interleaved" if name == "loop" else name or "another one"

    @property
    def content(self) -> dict[str, Any]:
        """What ``--format json`` has of it."""
        content: dict[str, Any] = {}
        for field in fields(self):
            if field.name == "work":
                content |= {"placement": self.placement, **self.work.figures}
            elif field.name == "columns":
                content |= {name: value for columns in self.columns for name, value in vars(columns).items()}
            else:
                content[field.name] = getattr(self, field.name)
        return content


def gib_cell(amount: float | None) -> str:
    """Format a column of bytes in GiB; empty if they are not known."""
    return f"{'' if amount is None else format(amount / 2**30, '.4g'):>8}"
