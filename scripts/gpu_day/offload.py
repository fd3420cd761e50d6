"""Activations in host memory: the speed of copies while passes run, and what they add to an iteration.

One rank runs all forwards first, so that every microbatch is kept long enough to leave and return. Compared with
keeping all activations are: moving all; what ``auto`` plans; and, if copies take longer than passes, the share whose
copies take 0.9 of the time of all passes. Each must give the gradients of keeping all, bit for bit. The speed of a
plain copy is that of one large pinned tensor, while nothing else runs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu_day import gpt, step
from megatron.zero_bubble.core.analysis.simulate import simulate
from megatron.zero_bubble.core.costs import PassCosts
from megatron.zero_bubble.core.formats.plan import plan_to_json
from megatron.zero_bubble.core.ir import Kind, Pass, Placement, Schedule
from megatron.zero_bubble.engine.measure.gather import gather_trace, median_costs
from megatron.zero_bubble.engine.measure.recorder import Recorder
from megatron.zero_bubble.integration.adapter.offloading import OffloadPart
from megatron.zero_bubble.integration.patching import revert
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig

WARM_UP = 6
"""Iterations before the measured ones: with ``auto``, the sixth is the first that moves what was planned."""
ALLOWED = 0.9
"""Time of all copies over that of all passes up to which the copies should add nothing."""


def main() -> int:
    """Measure every variant, each with the same model; return 1 if the gradients of one differ."""
    parser = step.parser(__doc__)
    step.add_sizes(parser)
    parser.add_argument("--mib", type=int, default=512, help="size of the plain copy")
    options = parser.parse_args()
    job = gpt.Gpt(options)
    with tempfile.TemporaryDirectory() as folder:
        file = _all_forwards_first(options.num_microbatches, Path(folder) / "plan.json")
        kept = _measure(job, file, None, options)
        expected = list(job.gradients())

        def moving(what: str) -> dict[str, Any]:
            return {**_measure(job, file, what, options), "same_gradients": same(expected, job.gradients())}

        moved, auto = moving("all"), moving("auto")
        rows = [kept, moved, auto]
        load = moved["load"]
        if load > ALLOWED:
            rows.append(moving(f"{max(1, int(100 * ALLOWED / load))}%"))
    hidden = rows[-1] if load > ALLOWED else moved
    plain = _plain_gb_per_s(options, job.platform.current_device())
    figures: dict[str, Any] = {
        "gb_per_s": moved["gb_per_s"],
        "of_plain": moved["gb_per_s"] / plain,
        "load": load,
        "hidden": hidden["offload"],
        "hidden_slowdown": hidden["iteration_ms"] / kept["iteration_ms"] - 1,
        "auto_slowdown": auto["iteration_ms"] / kept["iteration_ms"] - 1,
        "same_gradients": all(row["same_gradients"] for row in rows[1:]),
        "auto_memory": auto["memory"]["allocated"] / kept["memory"]["allocated"],
    }
    step.write(options.output, {**figures, "plain_gb_per_s": plain, "rows": rows})
    gpt.leave()
    return int(not figures["same_gradients"])


def same(expected: Sequence[torch.Tensor], found: Iterable[torch.Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _all_forwards_first(count: int, file: Path) -> Path:
    """Write a plan for one rank that runs every F, then every B and its W, first in, first out."""
    backwards = (Pass(0, kind, number) for number in range(count) for kind in (Kind.B, Kind.W))
    order = (*(Pass(0, Kind.F, number) for number in range(count)), *backwards)
    schedule = Schedule("all forwards first", Placement.linear(1), count, (order,))
    file.write_text(plan_to_json(simulate(schedule, PassCosts.uniform(schedule.placement, 1.0, 1.0, 1.0))))
    return file


def _measure(job: gpt.Gpt, file: Path, what: str | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return the median time of an iteration, its memory, and the speed of copies; 0 without copies."""
    recorder = Recorder(job.platform)
    gc.collect()
    pipeline = gpt.under(ZeroBubbleConfig(schedule_file=str(file), offload=what, measure_memory=True), [recorder])
    try:
        for _ in range(WARM_UP):
            job.iteration()
        job.platform.synchronize()
        job.platform.reset_peak_memory()
        times = [_iteration_ms(job) for _ in range(options.rounds)]
        memory = job.memory()
        recorder.start(job.group)
        job.iteration()
        costs = median_costs([gather_trace("offload", recorder.stop(), job.group).timeline])
        assert pipeline.memory is not None
        size = pipeline.memory.gather(job.group).activation[0]
        offloading = pipeline.part(OffloadPart)
        host = 0 if offloading is None else offloading.host_peak
    finally:
        revert()
    copy_ms = costs.host_ms[0]
    work_ms = costs.forward_ms[0] + costs.backward_ms[0] + costs.wgrad_ms[0]
    return {
        "offload": what or "none",
        "iteration_ms": median(times),
        "gb_per_s": size / copy_ms / 1e6 if copy_ms else 0.0,
        "load": 2 * copy_ms / work_ms,
        "memory": memory,
        "host": host,
    }


def _iteration_ms(job: gpt.Gpt) -> float:
    job.platform.synchronize()
    start = job.platform.mark()
    job.iteration()
    return job.platform.elapsed_ms(start, job.platform.mark())


def _plain_gb_per_s(options: argparse.Namespace, device: torch.device) -> float:
    """The mean speed of both directions."""
    num_bytes, on_gpu = options.mib * 2**20, device.type == "cuda"
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)

    def copy_us(to: torch.Tensor, source: torch.Tensor) -> float:
        return step.time_us(partial(to.copy_, source, non_blocking=True), options.device, options.rounds)

    us = [copy_us(there, here), copy_us(here, there)]
    return num_bytes / (sum(us) / len(us)) / 1e3


if __name__ == "__main__":
    sys.exit(main())
