"""The table of features that no GPU has measured, for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable

from gpu_day.unmeasured import UNMEASURED, Unmeasured
from site_parts.markdown import table


def unmeasured() -> str:
    """One row per feature."""
    head = ("feature", "flags", "since", "step", "promoted by", "removed by")
    rows = [(row.feature, row.flags, row.since, _of_steps(row), row.promotes, row.removes) for row in UNMEASURED]
    return table(head, rows)


def _of_steps(row: Unmeasured) -> str:
    return ", ".join(f"*{name}*" for name in row.steps) or "none yet"


PARTS: dict[str, Callable[[], str]] = {"gpu-unmeasured": unmeasured}
