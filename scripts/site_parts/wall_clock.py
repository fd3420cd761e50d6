"""Tables of docs/wall_clock.json: benches that run whole jobs on CPU ranks, for hours, and are repeated by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from site_parts.markdown import table

_FILE = Path(__file__).parent.parent.parent / "docs/wall_clock.json"


def auto_wall() -> str:
    """Gains that ``advise`` predicted and runs had."""
    rows = (
        (
            row["job"],
            row["advised"],
            *(_percent(row[key]) for key in ("predicted", "measured", "auto")),
            f"{row['best_by_name']}: {_percent(row['best_by_name_gain'])}",
        )
        for row in _bench("auto_wall")["rows"]
    )
    head = ("job", "advised", "predicted", "measured", "`auto`", "best by name")
    return f"{_when('auto_wall')}\n\n{table(head, rows)}"


def lengths_wall() -> str:
    """Times of microbatches of different lengths, planned and measured."""
    keys = ("measured_over_planned", "planned_gain", "measured_gain")
    rows = (
        (
            *(row[key] for key in ("schedule", "order", "shapes")),
            *(f"{row[key]:.0f}" for key in ("planned_ms", "measured_ms")),
            *(f"{row[key]:.{places}f}" for key, places in zip(keys, (3, 2, 2), strict=True)),
        )
        for row in _bench("lengths_wall")["rows"]
    )
    head = (
        "schedule",
        "order",
        "shapes",
        "planned ms",
        "measured ms",
        "measured / planned",
        "gain, planned",
        "measured",
    )
    return f"{_when('lengths_wall')}\n\n{table(head, rows)}"


def _bench(name: str) -> Any:
    return json.loads(_FILE.read_text(encoding="utf-8"))[name]


def _when(name: str) -> str:
    bench = _bench(name)
    return f"Measured on {bench['date']}, {bench['machine']}, {bench['rounds']} rounds: `{bench['command']}`."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


PARTS = {"auto-wall": auto_wall, "lengths-wall": lengths_wall}
