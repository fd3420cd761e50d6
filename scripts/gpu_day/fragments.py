"""What torch reserves over what tensors take, after many iterations of schedules with much or little memory.

With ``--limit``, the iterations run once more while torch may reserve only that multiple of the peak: then it flushes
its cache, which waits for the GPU. Ranks may share one GPU, so of their times only the ratio means something. Memory is
that of every rank's own process; on the CPU it is the process's peak, where reserved equals allocated.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gpu_day import gpt, step
from megatron.zero_bubble.integration.patching import revert
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

SCHEDULES = ("zb-h2", "v-min")


def main() -> int:
    """Run the iterations of every schedule on all ranks."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--limit", type=float, help="multiple of the allocated peak that torch may reserve")
    options = parser.parse_args()
    options.num_microbatches = 2 * int(os.environ["WORLD_SIZE"])
    rows: list[dict[str, Any]] = []
    for schedule in SCHEDULES:
        job = gpt.Gpt(options, ["--zero-bubble-schedule", schedule])
        gpt.under(ZeroBubbleConfig(schedule=schedule))
        try:
            job.platform.reset_peak_memory()
            ms = _iterations_ms(job, options.iterations)
            figures: dict[str, Any] = {**job.memory(), "ms": ms}
            if options.limit is not None:
                with limited(options.device, int(options.limit * figures["allocated"])) as flushes:
                    figures["limited_ms"] = _iterations_ms(job, options.iterations)
                    figures["flushes"] = flushes()
        finally:
            revert()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, figures)
        rows.append({"schedule": schedule, "ranks": of_ranks})
        del job
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    worst = {
        str(row["schedule"]).replace("-", "_"): max(one["reserved"] / one["allocated"] for one in row["ranks"])
        for row in rows
    }
    more = {} if options.limit is None else within_limit(rows)
    step.write(options.output, {**worst, **more, "iterations": options.iterations, "rows": rows})
    gpt.leave()
    return 0


def within_limit(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The most flushes of a rank, and the largest slowdown of an iteration."""
    ranks = [one for row in rows for one in row["ranks"]]
    return {
        "flushes": max(one["flushes"] for one in ranks),
        "slowdown": max(one["limited_ms"] / one["ms"] for one in ranks) - 1,
    }


def _iterations_ms(job: gpt.Gpt, count: int) -> float:
    """The mean time of an iteration, after a first one."""
    job.iteration()
    job.platform.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        job.iteration()
    job.platform.synchronize()
    return 1e3 * (time.perf_counter() - began) / count


@contextmanager
def limited(device: str, num_bytes: int) -> Iterator[Callable[[], int]]:
    """Let torch reserve no more than ``num_bytes`` of the GPU; gives a function that counts the flushes since."""
    if device == "cpu":
        yield lambda: 0
        return
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield lambda: int(torch.cuda.memory_stats()["num_alloc_retries"] - before)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    sys.exit(main())
