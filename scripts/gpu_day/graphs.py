"""A GPT on one rank with and without CUDA graphs of its stage: the same bits, time, idle share, host time, memory.

Both rows are of one model under ZB-H1, which on one rank runs every W directly after its B. Megatron's options decide
in every iteration whether graphs run, so the model with graphs is measured first without them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from gpu_day import gpt, passes, step
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

SPLIT = ZeroBubbleConfig(schedule="zb-h1")
WARM = 2
"""Iterations without graphs, and the one that records them."""


def main() -> int:
    """Measure both rows."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    options = parser.parse_args()
    job = gpt.Gpt(options, graphs="local")
    job.model_config.cuda_graph_warmup_steps = 1
    rows: dict[str, dict[str, Any]] = {}
    gradients: list[list[torch.Tensor]] = []
    for name, implementation in (("eager", "none"), ("graphs", "local")):
        job.model_config.cuda_graph_impl = implementation
        rows[name] = passes.measure(job, SPLIT, options, WARM)
        gradients.append(list(job.gradients()))
    differing = sum(not torch.equal(*pair) for pair in zip(*gradients, strict=True))
    step.write(options.output, {**figures(rows), "differing": differing, "rows": rows})
    gpt.leave()
    return 1 if differing else 0


def figures(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The figures of both rows that the table shows, and how much longer an iteration takes than the device computes
    in it: not a number where the profiler cannot see the device.
    """
    found: dict[str, float] = {}
    for name, row in rows.items():
        found |= {
            f"{name}_ms": row["iteration_ms"],
            f"{name}_host_ms": row["host_ms"],
            f"{name}_over_busy": row["iteration_ms"] / (row["busy_ms"] or math.nan),
            f"{name}_reserved_gib": row["memory"]["reserved"] / 2**30,
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
