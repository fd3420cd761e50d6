"""``ScheduleError``: a violated rule, with the grid around the bad cell."""

from __future__ import annotations

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.core.ir import Pass, Schedule

_COLUMNS = 6
_ROWS = 8


class ScheduleError(UserError):
    """A schedule violates a rule at the pass ``bad`` of rank ``rank``.

    The message is one sentence, followed by the grid (one row per rank, one column per position) with the cell between
    ``>`` and ``<``. ``column`` is its position in the rank's order; one past the end means that the pass is missing.
    """

    def __init__(self, rule: str, schedule: Schedule, rank: int, column: int, bad: Pass) -> None:
        super().__init__(f"{schedule.name}: {rule}\n{mark(schedule, rank, column, bad)}")
        self.rule = rule
        self.rank = rank
        self.bad = bad
        self._arguments = (rule, schedule, rank, column, bad)

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[object, ...]]:
        """Support pickle, with which worker processes send errors: by default, it passes only the message."""
        return type(self), self._arguments


def mark(schedule: Schedule, rank: int, column: int, bad: Pass) -> str:
    """Format the part of the grid around the cell, which prints as ``>2B1<``."""
    first, last = max(0, column - _COLUMNS), column + _COLUMNS + 1
    top = max(0, rank - _ROWS)
    lines: list[tuple[str, list[str]]] = []
    for r, row in enumerate(schedule.order[top : rank + _ROWS + 1], start=top):
        cells = [f" {p} " for p in row[first:last]]
        if r == rank:
            cells[column - first : column - first + 1] = [f">{bad}<"]
        lines.append((f"rank {r}" + " ..." * (first > 0), [*cells, " ..." * (len(row) > last)]))
    margin = max(len(head) for head, _ in lines) + 1
    width = max(len(cell) for _, cells in lines for cell in cells)
    return "\n".join((head.ljust(margin) + "".join(c.ljust(width) for c in cells)).rstrip() for head, cells in lines)
