"""Measured bubbles of pipelines, next to those that the plan predicts from the passes of the same run.

Every schedule runs the same model on all ranks. The costs of its passes and messages are medians over the measured
iterations; the simulation of the order that ran, with these costs, is the prediction. Both bubbles are the share of an
iteration in which the busiest rank does not compute. Ranks that share a GPU compute at the same time only under CUDA's
Multi-Process Service, which is used where it works; without it, their bubbles mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from statistics import median
from typing import Any

import torch

from gpu_day import gpt, mps, step
from megatron.zero_bubble.analysis.simulate import simulate
from megatron.zero_bubble.analysis.timeline import Timeline
from megatron.zero_bubble.job.config import ZeroBubbleConfig
from megatron.zero_bubble.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.measure.recorder import Recorder
from megatron.zero_bubble.patching import revert

SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b")
WARM_UP = 2


def main() -> int:
    """Measure every schedule."""
    parser = step.parser(__doc__)
    gpt.add_sizes(parser)
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    per_gpu = -(-ranks // torch.cuda.device_count()) if options.device == "cuda" else 0
    with mps.shared_gpu(per_gpu) as is_shared:
        rows = [compared(schedule, _measured(schedule, options)) for schedule in SCHEDULES]
        gpt.leave()
    shares = {
        f"{str(row['schedule']).replace('-', '_')}_{what}": row[what]["bubble"]
        for row in rows
        for what in ("measured", "predicted")
    }
    where = {"num_ranks": ranks, "ranks_per_gpu": per_gpu, "mps": is_shared}
    step.write(options.output, {**shares, **where, "rows": rows})
    return 0


def _measured(schedule: str, options: argparse.Namespace) -> list[Timeline]:
    """Timelines of iterations after the first ones, which load kernels, compile, and connect ranks."""
    job = gpt.Gpt(options, schedule)
    recorder = Recorder(job.platform)
    pipeline = gpt.under(ZeroBubbleConfig(schedule=schedule), [recorder])
    timelines = []
    try:
        for number in range(WARM_UP + options.rounds):
            recorder.start(job.group)
            job.iteration()
            timeline = gather_trace(schedule, recorder.stop(), job.group).timeline
            if number >= WARM_UP:
                timelines.append(timeline)
        job.platform.synchronize()
    finally:
        pipeline.close()
        revert()
    del job
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the ranks share the GPU's memory
    return timelines


def compared(schedule: str, timelines: list[Timeline]) -> dict[str, Any]:
    """The median time and bubble of the measured iterations, the predicted ones, and the costs of the prediction.

    Raises:
        RuntimeError: an iteration did not run all passes, so that nothing can be compared.
    """
    costs = median_costs(timelines)
    predicted = simulate(timelines[0].schedule, costs)
    if min(costs.forward_ms) <= 0 or min(costs.backward_ms) <= 0:
        raise RuntimeError(f"{schedule} needs a time for F and B of every stage, got {costs}")
    return {
        "schedule": schedule,
        "measured": {
            "ms": median(one.makespan_ms for one in timelines),
            "bubble": median(one.bubble_rate("makespan") for one in timelines),
            "span_bubble": median(one.bubble_rate("span") for one in timelines),
        },
        "predicted": {
            "ms": predicted.makespan_ms,
            "bubble": predicted.bubble_rate("makespan"),
            "span_bubble": predicted.bubble_rate("span"),
        },
        "forward_ms": list(costs.forward_ms),
        "backward_ms": list(costs.backward_ms),
        "wgrad_ms": list(costs.wgrad_ms),
        "comm_ms": costs.comm_ms,
        "message_ms": costs.message_ms,
    }


if __name__ == "__main__":
    sys.exit(main())
