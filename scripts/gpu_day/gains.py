"""Gains of schedules on ranks that do not slow each other, next to what the planner predicts.

Ranks that share a GPU get so few of its multiprocessors (CUDA's Multi-Process Service) that they share its bandwidth
and power in name only. ``measured_gains``, which runs on every rank, checks that first. If ranks slow each other, they
start again with a smaller share; the last share counts in any case.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

from gpu_day import mps, step

ALLOWED = 0.03
"""The largest slowdown by other ranks with which ranks do not slow each other."""
CTAS = "1"
"""Of few multiprocessors, a receive that waits should occupy no larger part than of many."""


def main() -> int:
    """Start the ranks, with the first share of the multiprocessors with which they do not slow each other."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True, help="numbers of microbatches")
    parser.add_argument("--shares", type=int, nargs="+", required=True, help="of the multiprocessors, in percent")
    options = parser.parse_args()
    if options.device == "cuda" and not mps.is_used():
        step.write(options.output, {"skip_reason": "CUDA's Multi-Process Service does not run here"})
        return 0
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launched += [str(options.num_ranks), "-m", "gpu_day.measured_gains", *sys.argv[1:]]
    tries: list[dict[str, Any]] = []
    for share in options.shares:
        allowed = math.inf if share == options.shares[-1] else ALLOWED
        own = {"NCCL_MAX_CTAS": CTAS, **({mps.SHARE: str(share)} if mps.is_used() else {})}
        subprocess.run([*launched, "--allowed", str(allowed)], env={**os.environ, **own}, check=True)
        found = json.loads(options.output.read_text(encoding="utf-8"))
        tries.append({"share": share, "slowdown": found["slowdown"]})
        if "rows" in found:
            break
    step.write(options.output, {**found, "tries": tries, "share": share})
    return 0


if __name__ == "__main__":
    sys.exit(main())
