"""What torch reserves over what tensors take, after many iterations of schedules with much or little memory.

The ranks of a pipeline share one GPU over gloo, so their times mean nothing. Memory is that of every rank's own
process; on the CPU it is the process's peak, where reserved equals allocated.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from gpu_day import gpt, step
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.patching import revert

SCHEDULES = ("zb-h2", "v-min")


def main() -> int:
    """Run the iterations of every schedule on all ranks."""
    parser = step.parser(__doc__)
    gpt.add_sizes(parser)
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    options.num_microbatches = 2 * int(os.environ["WORLD_SIZE"])
    rows: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        job = gpt.Gpt(options, schedule)
        gpt.under(ZeroBubbleConfig(schedule=schedule))
        try:
            job.platform.reset_peak_memory()
            for _ in range(options.iterations):
                job.iteration()
            job.platform.synchronize()
        finally:
            revert()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, job.memory())
        rows.append({"schedule": schedule, "ranks": of_ranks})
        del job
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    worst = {
        str(row["schedule"]).replace("-", "_"): max(one["reserved"] / one["allocated"] for one in row["ranks"])
        for row in rows
    }
    step.write(options.output, {**worst, "iterations": options.iterations, "rows": rows})
    gpt.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
