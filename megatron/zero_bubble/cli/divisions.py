"""What a plan says about the layers of its stages: the layout that it needs, or that they are unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from megatron.zero_bubble.cli.layouts import layout_flag
from megatron.zero_bubble.core.ir import Placement
from megatron.zero_bubble.planning.figures import HALVED, Figures

_MARK = "   lower bound"


class DividedRow(Protocol):
    """A row of a table with these figures."""

    @property
    def schedule(self) -> str: ...

    @property
    def is_lower_bound(self) -> bool: ...

    @property
    def needed_layout(self) -> str | None: ...


def mark(row: DividedRow) -> str:
    """The end of the line of a row whose times are a lower bound."""
    return _MARK if row.is_lower_bound else ""


def division_lines(rows: Iterable[DividedRow], costs: Figures) -> Iterator[str]:
    """Yield the layouts that rows need, and what a lower bound means."""
    listed = list(rows)
    needing = sorted((row for row in listed if row.needed_layout), key=lambda row: str(row.needed_layout))
    for layout, of in groupby(needing, key=attrgetter("needed_layout")):
        yield f"{_needs(layout, costs)}: {', '.join(row.schedule for row in of)}"
    if any(row.is_lower_bound for row in listed):
        yield f"lower bound: {HALVED}"


def division_text(costs: Figures, placement: Placement) -> str:
    """The same for one plan."""
    layout = costs.needed_layout(placement)
    return (f"{_needs(layout, costs)}\n" if layout else "") + (
        f"A lower bound: {HALVED}\n" if costs.halves(placement) else ""
    )


def _needs(layout: str, costs: Figures) -> str:
    return f"needs {layout_flag(layout, costs)}, as the layers do not divide otherwise"
