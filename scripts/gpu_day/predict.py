"""Bubbles of pipelines whose ranks run the passes that were measured on one rank, by ``zero-bubble compare --costs``.

Transfers are free in this prediction, and every rank has the same share of the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_day import step

FUSED = "split, fused"
"""The variant of the passes from which bubbles are predicted."""
NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "zb-auto")


def main() -> int:
    """Compare the schedules for every number of ranks, with four microbatches per rank."""
    parser = step.parser(__doc__)
    parser.add_argument("--passes", type=Path, required=True, help="figures of the step that measured the passes")
    parser.add_argument("--num-ranks", type=int, nargs="+", required=True)
    options = parser.parse_args()
    rows = json.loads(options.passes.read_text(encoding="utf-8"))["rows"]
    measured = next(row["costs"] for row in rows if row["variant"] == FUSED)
    costs = options.output.with_name("costs.json")
    costs.write_text(json.dumps({name: stages[0] for name, stages in measured.items()}), encoding="utf-8")
    results = [{"num_ranks": number, "bubbles": compared(costs, number)} for number in options.num_ranks]
    last = results[-1]["bubbles"]
    shown = {f"bubble_{name.replace('-', '_')}": last[name]["span"] for name in ("1f1b", "zb-v", "zb-auto")}
    step.write(options.output, {"num_ranks": options.num_ranks[-1], **shown, "rows": results})
    return 0


def compared(costs: Path, num_ranks: int) -> dict[str, Any]:
    """The bubble rates and the peak memory of the schedules, as ``zero-bubble compare`` prints them."""
    sizes = ["--num-ranks", str(num_ranks), "--num-microbatches", str(4 * num_ranks)]
    command = [sys.executable, "-m", "megatron.zero_bubble", "compare", "--costs", str(costs), *sizes]
    result = subprocess.run([*command, "--format", "json"], check=True, capture_output=True, text=True)
    # Shortest first, and zb-auto once per placement: the first row of a name counts.
    rows = {row["schedule"]: row for row in reversed(json.loads(result.stdout)["rows"])}
    return {
        name: {
            "span": rows[name]["bubble_rate_span"],
            "makespan": rows[name]["bubble_rate_makespan"],
            "peak_microbatches": rows[name]["peak_microbatches"],
        }
        for name in NAMES
        if name in rows
    }


if __name__ == "__main__":
    sys.exit(main())
